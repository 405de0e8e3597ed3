"""Caches built as a stream: workers, kills, files of ids, weights of sources.

The reference encodes every row of a source in order, in one list.
"""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time

import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models.text import tokenizer
from paraxis.train.data import batches
from paraxis.train.data import cache_build
from paraxis.train.data import corpus
from paraxis.train.data import pieces
from paraxis.train.data import rows
from paraxis.train.data import token_cache
from paraxis.train.data import token_worker


@pytest.fixture
def text(tmp_path, monkeypatch):
  """A folder of two files that make some 20 blocks."""
  monkeypatch.setattr(rows, 'BLOCK', 3000)
  rng = np.random.default_rng(0)
  folder = tmp_path / 'text'
  folder.mkdir()
  for name, ending in (('a.jsonl', ''), ('b.txt', '\n\n')):
    body = []
    for n in range(120):
      words = ' '.join(f'w{x} é' for x in rng.integers(0, 99, 60)) + ending
      line = {'text': words, 'id': f'd{n % 100}'}
      body.append(words if ending else json.dumps(line) + '\n')
    (folder / name).write_text(''.join(body))
  return folder


def build(path, cache, say=print, **fields):
  fields = dict(path=str(path), tokenizer='bpe2048', workers=1) | fields
  data = schema.with_values(schema.Data(cache_dir=str(cache)), fields)
  return token_cache.tokens(
    schema.Config(data=data), tokenizer.load(data.tokenizer), say
  )


def content(made):
  return {p.name: p.read_bytes() for p in sorted(made.folder.iterdir())}


def expected(path):
  """Tokens, names and splits, from all rows in one list."""
  t = tokenizer.load('bpe2048')
  found = corpus.documents(path)
  each = [[t.bos_id(d.domain), *t.encode(d.text), t.end_id] for d in found]
  return (
    np.concatenate(each).astype(np.uint16),
    [d.name for d in found],
    [d.held for d in found],
  )


@pytest.mark.parametrize('workers', [1, 2])
def test_any_number_of_workers_gives_the_same_bytes(text, tmp_path, workers):
  made = build(text, tmp_path / 'cache', workers=workers)
  tokens, names, held = expected(text)
  np.testing.assert_array_equal(made.tokens, tokens)
  assert [made.name(d) for d in range(len(held))] == names
  assert 'a/d3#2' in names  # a name that comes again
  assert made.held.tolist() == held and 0 < sum(held) < len(held)
  assert len(list((tmp_path / 'cache').iterdir())) == 1
  # The size of a block is not in the cache.
  rows.BLOCK = 10_000  # the fixture puts it back
  again = build(text, tmp_path / 'again', workers=3 - workers)
  assert content(again) == content(made)


def test_a_worker_does_not_import_jax(text):
  source = corpus.source_files(text)[0]
  block = rows.Block(source, 1, 'lines', b'{"text": "one"}\n', [])
  code = (
    'import io, json, runpy, sys\n'
    'from paraxis.train.data import token_worker\n'
    'token_worker.main()\n'
    'print(sorted({m.split(".")[0] for m in sys.modules}), file=sys.stderr)\n'
  )
  t = tokenizer.load('bytes')
  about = json.dumps([t.name, t.fingerprint, rows.PLAIN, str(text)])
  done = subprocess.run(
    [sys.executable, '-c', code],
    input=about.encode() + b'\n' + token_worker.message(7, block),
    capture_output=True,
    check=True,
  )
  assert json.loads(done.stdout) == {'tokens': 5}
  body = (text / '000007.tokens').read_bytes()
  assert np.frombuffer(body, '<u2').tolist() == [258, *b'one', 257]
  found = done.stderr.decode()
  assert "'numpy'" in found and "'jax'" not in found and "'flax'" not in found


def test_variants_of_a_text_keep_their_caches(text, tmp_path):
  """Another column of the same files is no change of the text."""
  said = []
  for key in ('text', 'id', 'text'):
    build(text / 'a.jsonl', tmp_path / 'cache', said.append, text_key=key)
  assert len(list((tmp_path / 'cache').glob('a-*'))) == 2
  assert not any('changed' in line for line in said)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"text": "something"}\n' * 9)

  def gone(source):
    raise PermissionError(13, 'Permission denied', str(source.file))

  monkeypatch.setattr(token_cache.corpus, 'fingerprint', gone)
  with support.refused('data.path', 'a.jsonl', 'cannot be read'):
    build(path, tmp_path / 'cache')


@pytest.mark.parametrize('end', ['grows', 'goes'])
def test_text_may_not_change_while_it_is_read(text, tmp_path, monkeypatch, end):
  tokenize, file = cache_build._tokenize, text / 'a.jsonl'

  def late(*given):
    if end == 'grows':
      with open(file, 'a') as opened:
        opened.write('{"text": "late"}\n')
    count = tokenize(*given)
    if end == 'goes':
      file.unlink()
    return count

  monkeypatch.setattr(cache_build, '_tokenize', late)
  with support.refused('a.jsonl changed while it was read (', 'start again'):
    build(text, tmp_path / 'cache')
  assert not list((tmp_path / 'cache').iterdir())


@pytest.mark.parametrize('letter', ['é', 'a'])
def test_a_long_name_has_a_cache(tmp_path, letter):
  name = letter * (248 // len(letter.encode()))
  path = tmp_path / f'{name}.jsonl'
  path.write_text('{"text": "something"}\n' * 9)
  made = build(path, tmp_path / 'cache')
  assert made.folder.name.startswith(name[:50])
  assert made.domains == (name,)


@pytest.mark.parametrize('workers', [1, 2])
def test_an_error_names_its_line_and_leaves_nothing(text, tmp_path, workers):
  with open(text / 'a.jsonl', 'a') as file:
    file.write('{"text": 1}\n')
  with support.refused('a.jsonl:121: "text" is of type int, not a string'):
    build(text, tmp_path / 'cache', workers=workers)
  assert not list((tmp_path / 'cache').iterdir())


KILLED = """
import os, signal, sys
from paraxis.train.data import cache_build, pieces, rows
rows.BLOCK = 3000
write, left = pieces.write, int(sys.argv[4])
def killing(folder, number, block, piece):
  global left
  left -= 1
  if not left:
    (folder / f'{number:06d}.tokens').write_bytes(b'half')
    os.kill(os.getpid(), signal.SIGKILL)
  write(folder, number, block, piece)
pieces.write = killing
from paraxis.configs import schema
from paraxis.models.text import tokenizer
from paraxis.train.data import token_cache
data = schema.Data(path=sys.argv[1], cache_dir=sys.argv[2], workers=1)
token_cache.tokens(schema.Config(data=data), tokenizer.load('bpe2048'))
"""


def killed(text, cache, pieces_done):
  done = subprocess.run(
    [sys.executable, '-c', KILLED, str(text), str(cache), '', str(pieces_done)]
  )
  assert done.returncode == -signal.SIGKILL


def test_a_killed_build_goes_on(text, tmp_path, monkeypatch):
  killed(text, tmp_path / 'cache', 6)
  work, lock = sorted((tmp_path / 'cache').iterdir())
  assert lock.name == f'{work.name}.lock' and lock.is_file()
  assert len(list(work.glob('*.json'))) == 5
  # One piece is damaged since; one index too.
  (work / '000001.tokens').write_bytes(b'no')
  index = work / '000003.json'
  index.write_text(index.read_text().replace('d', 'e', 1))
  made, write = [], pieces.write
  monkeypatch.setattr(
    pieces, 'write', lambda *given: (made.append(given[1]), write(*given))
  )
  said = []
  found = build(text, tmp_path / 'cache', said.append)
  np.testing.assert_array_equal(found.tokens, expected(text)[0])
  assert made[:3] == [1, 3, 5] and not {0, 2, 4} & {*made}
  assert said == [
    'token cache: 1 finished pieces of an earlier build are kept.'
  ]
  assert len(list((tmp_path / 'cache').iterdir())) == 1


def test_pieces_of_other_text_are_removed(text, tmp_path):
  killed(text, tmp_path / 'cache', 3)
  with open(text / 'a.jsonl', 'a') as file:
    file.write('{"text": "more"}\n')
  found = build(text, tmp_path / 'cache')
  np.testing.assert_array_equal(found.tokens, expected(text)[0])
  assert len(list((tmp_path / 'cache').iterdir())) == 1


def test_a_worker_that_dies_is_one_line_and_pieces_remain(
  text, tmp_path, monkeypatch
):
  start = token_worker._start

  def dying(about):
    process = start(about)
    process.kill()
    return process

  monkeypatch.setattr(token_worker, '_start', dying)
  with support.refused('a process that tokenizes ended with code -9'):
    build(text, tmp_path / 'cache', workers=2)
  assert [p.name[:9] for p in (tmp_path / 'cache').iterdir()] == ['building-']


def test_builders_wait_for_one_another(text, tmp_path):
  folder = tmp_path / 'cache' / 'x'
  folder.parent.mkdir()
  said = []
  with cache_build._alone(folder, said.append) as work:
    code = (
      'import pathlib, sys\n'
      'from paraxis.train.data import cache_build\n'
      'with cache_build._alone(pathlib.Path(sys.argv[1]), print): pass\n'
    )
    command = [sys.executable, '-u', '-c', code, str(work)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert other.stdout
    with other.stdout:
      line = other.stdout.readline()
    assert line == b'another process is writing x: waiting for it.\n'
    assert other.poll() is None
    work.rmdir()
  assert not other.wait()
  assert not said


def test_builders_without_locks_share_nothing(tmp_path, monkeypatch):
  """Not even in two containers, where both are process 1."""

  def refused(*_):
    raise OSError(errno.ENOLCK, 'no locks')

  monkeypatch.setattr(cache_build.fcntl, 'flock', refused)
  alone = lambda: cache_build._alone(tmp_path / 'building-x', print)
  with alone() as one, alone() as two:
    assert one != two and one.is_dir() and two.is_dir()


def test_what_is_locked_is_a_file(text, tmp_path, monkeypatch):
  """NFS locks no folder for other hosts."""
  killed(text, tmp_path / 'cache', 3)
  locked, flock = [], cache_build.fcntl.flock

  def noted(opened, flags):
    locked.append(stat.S_ISREG(os.fstat(opened).st_mode))
    flock(opened, flags)

  monkeypatch.setattr(cache_build.fcntl, 'flock', noted)
  (text / 'c.txt').write_text('more')
  made = build(text, tmp_path / 'cache')
  # What the killed build left is removed, and this one's lock too.
  assert len(locked) > 1 and all(locked)
  assert list((tmp_path / 'cache').iterdir()) == [made.folder]


def test_a_lock_alone_is_removed(text, tmp_path):
  made = build(text, tmp_path / 'cache')
  work = cache_build.BUILDING + made.folder.name[:-16] + 16 * '0'
  lock = tmp_path / 'cache' / f'{work}.lock'
  lock.touch()
  (text / 'c.txt').write_text('more')
  build(text, tmp_path / 'cache')
  assert not lock.exists()


def test_a_good_cache_of_another_builder_stays(text, tmp_path, monkeypatch):
  """Where there are no locks: a run may have it mapped."""

  def refused(*_):
    raise OSError(errno.ENOLCK, 'no locks')

  join, first = cache_build._join, []

  def overtaken(*given):
    monkeypatch.setattr(cache_build, '_join', join)
    first.append(build(text, tmp_path / 'cache').folder.stat().st_ino)
    return join(*given)

  monkeypatch.setattr(cache_build.fcntl, 'flock', refused)
  monkeypatch.setattr(cache_build, '_join', overtaken)
  made = build(text, tmp_path / 'cache')
  assert first == [made.folder.stat().st_ino]
  assert list((tmp_path / 'cache').iterdir()) == [made.folder]


def test_progress_is_one_line(capsys, monkeypatch):
  import concurrent.futures

  now = iter([0.0, 1.0, 31.0, 40.0, 70.0])
  monkeypatch.setattr(time, 'monotonic', lambda: next(now))
  future = concurrent.futures.Future()
  future.set_result(1_000_000)
  progress = cache_build._Progress(100, print)
  for at in (10, 31, 40, 70):
    progress.add(at, future)
  progress.end()
  lines = capsys.readouterr().err.splitlines()
  assert [line.strip() for line in lines] == [
    'tokenizing:  31%, 0.06 M tokens/s, 69 s left',
    'tokenizing:  70%, 0.06 M tokens/s, 30 s left',
  ]


# Files of ids


def ids_file(path, ids):
  path.parent.mkdir(exist_ok=True, parents=True)
  np.asarray(ids, '<u2').tofile(path)
  return path


def pairs(made):
  """Sorted (token, next) of all documents."""
  out = []
  for d in range(len(made.held)):
    ids = made.tokens[made.starts[d] : made.starts[d + 1]].tolist()
    out += zip(ids[:-1], ids[1:], strict=True)
  return sorted(out)


@pytest.mark.parametrize('block', [3000, 1 << 20])
def test_ids_as_they_are(tmp_path, monkeypatch, block):
  monkeypatch.setattr(rows, 'BLOCK', max(block, 1 << 14))
  ids = np.random.default_rng(0).integers(0, 500, 20_000)
  path = ids_file(tmp_path / 'a.bin', ids)
  made = build(path, tmp_path / 'cache', tokenizer='ids')
  assert pairs(made) == sorted(zip(ids[:-1], ids[1:], strict=True))
  assert made.lengths.tolist() == [4097] * 4 + [20_000 - 4 * 4096]
  assert made.n_bytes.sum() == 2 * 19_999
  assert made.vocab_size == 500 and made.held.any()


def test_ids_of_a_tokenizer_end_with_its_end(tmp_path):
  t = tokenizer.load('bytes')
  texts = ['one', 'two é', '']
  ids = [i for text in texts for i in [*t.encode(text), t.end_id]]
  path = ids_file(tmp_path / 'a.bin', ids)
  made = build(path, tmp_path / 'cache', tokenizer='bytes')
  assert pairs(made) == sorted(zip(ids[:-1], ids[1:], strict=True))
  assert made.lengths.tolist() == [4, 8, 2]
  assert made.n_bytes.tolist() == [2, 6, 0]  # the first id is not predicted


def test_train_and_val_are_the_splits(tmp_path):
  ids_file(tmp_path / 'set' / 'train.bin', range(90))
  ids_file(tmp_path / 'set' / 'val.bin', range(30))
  made = build(tmp_path / 'set', tmp_path / 'cache', tokenizer='ids')
  assert made.domains == ('set',) and made.held.tolist() == [False, True]


def test_bad_files_of_ids(tmp_path):
  path, cache = tmp_path / 'a.bin', tmp_path / 'cache'
  ids_file(path, [5, 50_256])
  with support.refused("data.tokenizer='ids' to use them as they are"):
    build(path, cache)
  with support.refused('a.bin holds ids up to 50256, tokenizer bytes has 259'):
    build(path, cache, tokenizer='bytes')
  made = build(path, cache, tokenizer='ids')
  config = schema.Config(data=schema.Data(tokenizer='ids'))
  with support.refused('ids up to 50256, model.vocab_size is 2048'):
    batches.Batches(config, made)
  path.write_bytes(b'abc')
  with support.refused('a.bin: 3 bytes are not whole uint16 tokens'):
    build(path, cache, tokenizer='ids')
  np.asarray([20240520, 1, 9], '<i4').tofile(path)
  with support.refused('a.bin: begins with a header of 1,024 bytes'):
    build(path, cache, tokenizer='ids')
  ids_file(path, [])
  with support.refused('0 documents in 1 files'):
    build(path, cache, tokenizer='ids')
  (tmp_path / 'a.txt').write_text('text')
  with support.refused('a.txt is text: name a tokenizer'):
    build(tmp_path / 'a.txt', cache, tokenizer='ids')


# Sources with weights


def weighted(tmp_path, spec, **train):
  for name, count in (('a.txt', 9), ('b/x.jsonl', 40), ('b/y.jsonl', 40)):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    text = name * 50
    line = json.dumps({'text': text}) + '\n'
    path.write_text(line * count if 'jsonl' in name else f'{text}\n' * 999)
  data = schema.Data(
    sources=spec.replace('~', str(tmp_path)),
    tokenizer='bytes',
    sequence_length=64,
    cache_dir=str(tmp_path / 'cache'),
  )
  train = schema.with_values(schema.Train(), train)
  config = schema.Config(data=data, train=train)
  return config, token_cache.tokens(config, tokenizer.load('bytes'))


def test_rows_come_in_the_proportions_of_the_sources(tmp_path):
  config, made = weighted(tmp_path, '~/a.txt:3,~/b/*.jsonl:1', batch_size=8)
  assert made.domains == ('a', 'x', 'y')
  data = batches.Batches(config, made)
  (a, (w_a, rows_a)), (b, (w_b, rows_b)) = data.parts.items()
  assert str(a).endswith('a.txt') and str(b).endswith('b/*.jsonl')
  assert (w_a, w_b) == (3, 1) and rows_a > rows_b > 8
  steps = 300
  read = np.concatenate([data.rows_at(t) for t in range(steps)])
  of_a = (read < rows_a).sum()
  assert abs(of_a - 0.75 * len(read)) <= 1
  assert data.epochs(steps) == {
    a: pytest.approx(0.75 * len(read) / rows_a),
    b: pytest.approx(0.25 * len(read) / rows_b),
  }
  # An epoch of a source is each of its rows once.
  mine = read[read >= rows_a]
  assert len({*mine[:rows_b]}) == rows_b
  # A run that resumes reads what the first would have read.
  for t, batch in data.iterate(7):
    np.testing.assert_array_equal(batch.tokens, data.batch_at(t).tokens)
    if t == 9:
      break
  # Weights do not make another cache, sources do.
  other, again = weighted(tmp_path, '~/a.txt:1,~/b/*.jsonl:9', batch_size=8)
  assert again.fingerprint == made.fingerprint
  assert not np.array_equal(
    batches.Batches(other, again).rows_at(0), data.rows_at(0)
  )


@pytest.mark.parametrize(
  'spec, words',
  [
    ('~/a.txt', "is not 'PATH:WEIGHT' with a weight above 0"),
    ('~/a.txt:0', "is not 'PATH:WEIGHT' with a weight above 0"),
    ('~/a.txt:nan', "is not 'PATH:WEIGHT' with a weight above 0"),
    ('~/a.txt:1,~/a.txt:2', "a.txt' twice"),
    ('~/a.txt:1,~/*.txt:2', 'a.txt is in'),
    ('~/none.txt:1', 'no such file or folder'),
  ],
)
def test_bad_sources(tmp_path, spec, words):
  with support.refused(words):
    weighted(tmp_path, spec)


def test_sources_stand_alone():
  for other in (dict(path='x.txt'), dict(mixture='a=1')):
    data = schema.with_values(schema.Data(sources='a:1'), other)
    with support.refused('give one of them'):
      corpus.sources(data)


def test_sources_may_stand_beside_an_empty_path(tmp_path):
  """As a flag leaves it out whose configuration names one."""
  (tmp_path / 'a.txt').write_text('words')
  data = schema.Data(path='', sources=f'{tmp_path}/a.txt:1')
  config = corpus.with_places(schema.Config(data=data))
  assert not config.data.path
  [found] = corpus.sources(config.data)
  assert found.file == tmp_path / 'a.txt'


def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch):
  (tmp_path / 'a.txt').write_text('words')
  monkeypatch.chdir(tmp_path)
  config = schema.Config(data=schema.Data(path=''))
  with support.refused('data.path is empty'):
    corpus.sources(corpus.with_places(config).data)


def test_the_advice_for_a_flat_folder_helps(tmp_path):
  """Short files directly in it are domains of one document."""
  for n in range(3):
    (tmp_path / f'{n}.txt').write_text(f'essay {n}')
  given = dict(tokenizer='bytes', cache_dir=str(tmp_path / 'cache'))
  config = schema.Config(data=schema.Data(path=str(tmp_path), **given))
  made = token_cache.tokens(config, tokenizer.load('bytes'))
  with support.refused('0 of 3', 'in a sub-folder and name its parent'):
    batches.evaluation(config, made)
  (tmp_path / 'essays' / 'all').mkdir(parents=True)
  for n in range(3):
    (tmp_path / f'{n}.txt').rename(tmp_path / 'essays' / 'all' / f'{n}.txt')
  config = schema.with_value(config, 'data.path', str(tmp_path / 'essays'))
  made = token_cache.tokens(config, tokenizer.load('bytes'))
  [held] = batches.evaluation(config, made)
  assert held.domain == 'all'


def test_advice_on_what_is_held_out_can_help(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"text": "one document"}\n')
  config = schema.Config(
    data=schema.Data(
      path=str(path), tokenizer='bytes', cache_dir=str(tmp_path / 'cache')
    )
  )
  made = token_cache.tokens(config, tokenizer.load('bytes'))
  with support.refused('0 of 1 documents are held out; each domain has one'):
    batches.evaluation(config, made)
