"""Documents, the held-out rule and the token cache."""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models.text import tokenizer
from paraxis.train.data import cache_build
from paraxis.train.data import corpus
from paraxis.train.data import readers
from paraxis.train.data import token_cache


def config(path, cache, **model):
  """A Config that reads `path` with the byte tokenizer."""
  data = schema.Data(path=str(path), tokenizer='bytes', cache_dir=str(cache))
  return schema.Config(data=data, model=schema.Model(**model))


def write_jsonl(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows), 'utf-8')
  return path


def numbered(n, **extra):
  return [{'id': f'd{i}', 'text': f'text {i} ' * 9, **extra} for i in range(n)]


def build(path, cache, say=None, **model):
  lines = []
  made = token_cache.tokens(
    config(path, cache, **model), tokenizer.load('bytes'), say or lines.append
  )
  return made, lines


# Documents


def test_jsonl(tmp_path):
  rows = [
    {'text': 'a', 'id': 7, 'split': 'held', 'domain': 'x'},
    {'text': 'bé', 'split': 'train'},
  ]
  found = corpus.documents(write_jsonl(tmp_path / 'mine.jsonl', rows))
  assert found == [
    corpus.Document('x', '7', True, 'a', 1),
    corpus.Document('mine', '2', False, 'bé', 3),
  ]
  assert found[0].name == 'x/7'


def test_folder_of_both_kinds(tmp_path):
  (tmp_path / 'poems').mkdir()
  (tmp_path / 'poems' / 'one.txt').write_text('rose')
  (tmp_path / 'note.txt').write_text('thorn')
  (tmp_path / 'ignored.rst').write_text('no')
  write_jsonl(tmp_path / 'web.jsonl', numbered(2))
  found = corpus.documents(tmp_path)
  names = ['note/note/00000', 'poems/one/00000', 'web/d0', 'web/d1']
  assert [d.name for d in found] == names


def test_text_file_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
  paragraph = 'word ' * 400 + '\n\n'
  text = paragraph * 20 + 'x' * 9000 + '\n' + 'y' * 9000 + '\nlast line'
  (tmp_path / 'book.txt').write_text(text)
  found = corpus.documents(tmp_path / 'book.txt', 0.2)
  assert ''.join(d.text for d in found) == text
  assert len(found) > 4
  assert all(d.text.endswith('\n') for d in found[:-1])
  assert 0 < sum(d.held for d in found) < len(found)


def test_equal_names_are_numbered(tmp_path):
  rows = [{'id': 'same', 'text': t} for t in 'abc']
  found = corpus.documents(write_jsonl(tmp_path / 'x.jsonl', rows))
  assert [d.id for d in found] == ['same', 'same#2', 'same#3']


def test_held_out_is_a_fixed_share_of_every_domain(tmp_path):
  for name, count in (('big', 200), ('small', 20), ('single', 1)):
    write_jsonl(tmp_path / f'{name}.jsonl', numbered(count))
  found = corpus.documents(tmp_path, 0.1)
  share = lambda d: (
    sum(x.n_bytes for x in found if x.domain == d and x.held)
    / (sum(x.n_bytes for x in found if x.domain == d))
  )
  assert 0.1 <= share('big') < 0.11
  assert 0.1 <= share('small') < 0.2
  assert share('single') == 0  # the last document is always trained on
  # Adding documents moves few others, and the order of files does not matter.
  held = {d.id for d in found if d.domain == 'big' and d.held}
  rows = list(reversed(numbered(220)))
  again = corpus.documents(write_jsonl(tmp_path / 'big.jsonl', rows), 0.1)
  assert len(held & {d.id for d in again if d.held}) >= 0.8 * len(held)
  assert not any(d.held for d in corpus.documents(tmp_path, 0.0))


def test_of_large_files_no_more_is_held_out_than_can_matter(
  tmp_path, monkeypatch
):
  """And of a cache; small files keep the split that they had, and its name."""
  path = write_jsonl(tmp_path / 'big.jsonl', numbered(200))
  share, _ = build(path, tmp_path / 'cache')
  size = path.stat().st_size // 10
  monkeypatch.setattr(corpus, 'MOST_HELD', size + 1)
  assert build(path, tmp_path / 'cache')[0].fingerprint == share.fingerprint
  monkeypatch.setattr(corpus, 'MOST_HELD', size // 4)
  made, _ = build(path, tmp_path / 'cache')
  held = int(made.n_bytes[made.held].sum())
  assert size // 4 <= held < size // 4 + 100
  assert share.n_bytes[share.held].sum() > 2 * held
  assert made.fingerprint != share.fingerprint
  assert made.held.tolist() == [d.held for d in corpus.documents(path)]
  # What a row says is not bounded, nor what we bring.
  write_jsonl(path, numbered(200, split='held'))
  assert all(d.held for d in corpus.documents(path))
  held = lambda: [d.held for d in corpus.documents('fixture')]
  before = held()
  monkeypatch.setattr(corpus, 'MOST_HELD', 1)
  assert held() == before


def test_a_row_of_its_own_id_is_held_out_by_it(tmp_path):
  """The rule of shipped text: sha256 of 'paraxis/domain/id', by hand."""
  found = corpus.documents(write_jsonl(tmp_path / 'x.jsonl', numbered(50)))
  order = sorted(
    found, key=lambda d: hashlib.sha256(f'paraxis/x/{d.id}'.encode()).digest()
  )
  count = sum(d.held for d in found)
  assert 5 <= count <= 6 and all(d.held for d in order[:count])


def _plain(n, first=0):
  """Rows without an id, of different lengths."""
  return [{'text': f'text {i} ' * (5 + i % 7)} for i in range(first, n)]


def test_a_row_without_id_is_held_out_by_its_text(tmp_path):
  """Wherever it stands; and equal texts stand on one side."""
  held = lambda rows: {
    d.text
    for d in corpus.documents(write_jsonl(tmp_path / 'x.jsonl', rows), 0.2)
    if d.held
  }
  before = held(_plain(200))
  # A share of the documents: one more may move those at the border alone.
  after = held([{'text': 'a new first line'}, *_plain(200)])
  assert len(before) > 20 and len(before ^ after) <= 2
  assert held([*reversed(_plain(200))]) == before
  rows = [*_plain(60), *_plain(60), *_plain(30)]
  found = corpus.documents(write_jsonl(tmp_path / 'y.jsonl', rows), 0.2)
  sides = {d.text: set() for d in found}
  for d in found:
    sides[d.text].add(d.held)
  assert all(len(s) == 1 for s in sides.values())
  assert 0 < sum(d.held for d in found) < len(found) / 2


@pytest.mark.parametrize('kind', ['jsonl', 'txt'])
def test_a_cache_holds_out_what_documents_do(tmp_path, kind):
  """With ids and without, of text in pieces; not taken from the old rule."""
  source = tmp_path / f'x.{kind}'
  if kind == 'jsonl':
    write_jsonl(source, [*_plain(80), *numbered(40), *_plain(9)])
  else:
    source.write_text(''.join(f'line {i} of it\n\n' for i in range(20_000)))
  made, _ = build(source, tmp_path / 'cache')
  found = corpus.documents(source)
  assert made.held.tolist() == [d.held for d in found]
  assert 0 < sum(made.held) < len(found)
  assert [made.name(i) for i in range(3)] == [d.name for d in found[:3]]


def test_a_cache_of_another_rule_is_not_taken(tmp_path, monkeypatch):
  source = write_jsonl(tmp_path / 'x.jsonl', _plain(30))
  monkeypatch.setattr(corpus, 'BY_TEXT', b'')
  old, _ = build(source, tmp_path / 'cache')
  monkeypatch.undo()
  new, said = build(source, tmp_path / 'cache')
  assert new.fingerprint != old.fingerprint and said


def test_corpus_is_in_the_user_cache(tmp_path, monkeypatch):
  monkeypatch.setenv('PARAXIS_CACHE', str(tmp_path))
  with support.refused('paraxis data fetch'):
    corpus.documents('corpus')
  (tmp_path / 'corpus').mkdir()
  write_jsonl(tmp_path / 'corpus' / 'code.jsonl', numbered(3))
  assert len(corpus.documents('corpus')) == 3


@pytest.mark.parametrize(
  'line, message',
  [
    (b'{"text": "a"', 'x.jsonl:2: not JSON'),
    (b'["a"]', 'x.jsonl:2: needs an object with a string "text"'),
    (b'{"txt": "a"}', 'x.jsonl:2: needs an object'),
    (b'{"text": 7}', 'x.jsonl:2: "text" is of type int, not a string'),
    (b'{"text": ["a"]}', 'x.jsonl:2: "text" is of type list, not a string'),
    (b'{"text": "", "text": 7', 'x.jsonl:2: not JSON'),
    (b'{"text": "a", "split": "dev"}', 'x.jsonl:2: "split" is \'dev\''),
    (b'{"text": "\\ud800"}', 'x.jsonl:2: "text" is not Unicode'),
    (b'{"text": "a", "id": "\\udc00"}', 'x.jsonl:2: "id" is not Unicode'),
    (b'{"text": "a", "domain": "\\udc00"}', 'x.jsonl:2: "domain" is not'),
    (b'{"text": "\xff"}', 'x.jsonl:2: not JSON'),
  ],
)
def test_bad_lines_name_file_and_line(tmp_path, line, message):
  path = tmp_path / 'x.jsonl'
  path.write_bytes(b'{"text": "fine"}\n' + line + b'\n')
  with support.refused(message):
    corpus.documents(path)


@pytest.mark.parametrize(
  'name, content, path, words',
  [
    ('other', b'', '', '0 sources of text in'),
    ('x.jsonl', b'\n\n', '', '0 documents in 1 files'),
    ('x.csv', b'a', 'x.csv', "ends in '.csv'"),
    ('y.txt', b'\xff\xfe\xff', 'y.txt', 'y.txt:1: not UTF-8'),
  ],
)
def test_bad_sources(tmp_path, name, content, path, words):
  (tmp_path / name).write_bytes(content)
  with support.refused(words):
    corpus.documents(tmp_path / path)


# Token cache


def test_tokens_are_bos_text_end(tmp_path):
  write_jsonl(tmp_path / 'a.jsonl', numbered(5, split='train'))
  write_jsonl(tmp_path / 'b.jsonl', numbered(4, split='held'))
  made, lines = build(tmp_path, tmp_path / 'cache')
  assert not lines
  documents = corpus.documents(tmp_path)
  for i, document in enumerate(documents):
    ids = made.tokens[made.starts[i] : made.starts[i + 1]]
    assert ids.tolist() == [258, *document.text.encode(), 257]
    assert made.name(i) == document.name
    assert made.n_bytes[i] == document.n_bytes
  assert made.tokens.dtype == np.uint16 and len(made.tokens) == made.starts[-1]
  assert isinstance(made.tokens, np.memmap)
  assert made.domains == ('a', 'b') and made.pad_id == 256
  assert made.select('train').tolist() == [0, 1, 2, 3, 4]
  assert made.select('held').tolist() == [5, 6, 7, 8]
  assert made.select('held', 'a').tolist() == []
  with support.refused("no domain 'c'", 'has a, b'):
    made.select('train', 'c')


def test_domains_have_their_own_first_token(tmp_path):
  write_jsonl(tmp_path / 'drama.jsonl', numbered(1))
  write_jsonl(tmp_path / 'mine.jsonl', numbered(1))
  t = tokenizer.load('bpe2048')
  made = token_cache.tokens(config(tmp_path, tmp_path / 'cache'), t)
  first = made.tokens[made.starts[:-1]].tolist()
  assert first == [t.bos_id('drama'), t.bos_id()]


def test_large_vocabulary_takes_four_bytes(tmp_path):
  class Large(tokenizer.Bytes):
    def encode(self, text):
      return [70_000 + b for b in text.encode()]

  t = Large()
  t.vocab_size = 70_256
  write_jsonl(tmp_path / 'a.jsonl', numbered(2))
  made = token_cache.tokens(
    config(tmp_path, tmp_path / 'cache', vocab_size=70_256), t
  )
  assert made.tokens.dtype == np.uint32
  assert made.tokens[1] == 70_000 + ord('t')


def test_cache_is_used_again(tmp_path):
  write_jsonl(tmp_path / 'a.jsonl', numbered(5))
  first, _ = build(tmp_path, tmp_path / 'cache')
  changed = (first.folder / 'tokens.bin').stat().st_mtime_ns
  second, lines = build(tmp_path, tmp_path / 'cache')
  assert (second.folder / 'tokens.bin').stat().st_mtime_ns == changed
  assert second.fingerprint == first.fingerprint and not lines


@pytest.mark.parametrize(
  'name', ['tokens.bin', 'starts.npy', 'held.npy', 'ids.json', 'meta.json']
)
@pytest.mark.parametrize('damage', ['flip', 'cut', 'remove'])
def test_damaged_cache_is_rebuilt_and_said_so(tmp_path, name, damage):
  write_jsonl(tmp_path / 'a.jsonl', numbered(5))
  good, _ = build(tmp_path, tmp_path / 'cache')
  want = np.array(good.tokens)
  path = good.folder / name
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  if damage == 'remove':
    path.unlink()
  else:
    path.write_bytes(content if damage == 'flip' else content[:-3])
  again, lines = build(tmp_path, tmp_path / 'cache')
  assert len(lines) == 1 and 'is damaged' in lines[0]
  assert '\n' not in lines[0]
  np.testing.assert_array_equal(again.tokens, want)
  assert not build(tmp_path, tmp_path / 'cache')[1]  # and now it is sound
  assert len(list((tmp_path / 'cache').iterdir())) == 1  # nothing left over


def test_stale_cache_is_rebuilt_and_said_so(tmp_path):
  path = write_jsonl(tmp_path / 'a.jsonl', numbered(5))
  old, _ = build(path, tmp_path / 'cache')
  before = np.array(old.tokens)
  write_jsonl(path, numbered(6))
  new, lines = build(path, tmp_path / 'cache')
  assert len(lines) == 1 and 'changed' in lines[0]
  assert len(new.held) == 6 and new.fingerprint != old.fingerprint
  assert not old.folder.exists()
  np.testing.assert_array_equal(old.tokens, before)  # still mapped, untouched


def test_copies_of_a_tokenizer_share_a_cache(tmp_path):
  """Each workdir has one; what ends documents otherwise keeps its own cache."""
  path = write_jsonl(tmp_path / 'a.jsonl', numbered(5))
  shipped = pathlib.Path(tokenizer.__file__).parent / 'bpe2048.json'
  files = [tmp_path / name / 'tokenizer.json' for name in ('x', 'y', 'z')]
  for file in files:
    file.parent.mkdir()
    shutil.copy(shipped, file)
  tokenizers = [tokenizer.load(str(file)) for file in files]
  tokenizers[2].last = 9

  def made():
    given = config(path, tmp_path / 'cache')
    return [token_cache.tokens(given, t).folder for t in tokenizers]

  one, two, other = made()
  assert one == two != other and one.exists() and other.exists()
  write_jsonl(path, numbered(6))
  given = config(path, tmp_path / 'cache')
  token_cache.tokens(given, tokenizers[0])
  assert not one.exists() and other.exists()
  token_cache.tokens(given, tokenizers[2])
  assert not other.exists()


def test_rebuilding_is_logged(tmp_path, caplog):
  path = write_jsonl(tmp_path / 'a.jsonl', numbered(5))
  made, _ = build(path, tmp_path / 'cache')
  (made.folder / 'tokens.bin').write_bytes(b'')
  token_cache.tokens(config(path, tmp_path / 'cache'), tokenizer.load('bytes'))
  assert [r.levelname for r in caplog.records] == ['WARNING']
  assert 'tokens.bin does not match its checksum' in caplog.text


def test_builders_may_race(tmp_path):
  write_jsonl(tmp_path / 'a.jsonl', numbered(300))
  with concurrent.futures.ThreadPoolExecutor(6) as pool:
    made = list(
      pool.map(lambda _: build(tmp_path, tmp_path / 'cache')[0], range(6))
    )
  assert len({c.folder for c in made}) == 1
  assert all(np.array_equal(c.tokens, made[0].tokens) for c in made)
  assert len(list((tmp_path / 'cache').iterdir())) == 1


@pytest.mark.parametrize('name', ['mkdir', 'open'])
def test_a_builder_may_end_between_two_calls(tmp_path, monkeypatch, name):
  """The folder of its work is there, and is gone when it is looked at."""
  write_jsonl(tmp_path / 'a.jsonl', numbered(3))
  whole, left = getattr(os, name), ['once']

  def gone(path, *rest, **options):
    if pathlib.Path(path).name.startswith(cache_build.BUILDING) and left:
      left.pop()
      raise {'mkdir': FileExistsError, 'open': FileNotFoundError}[name](path)
    return whole(path, *rest, **options)

  monkeypatch.setattr(os, name, gone)
  made, _ = build(tmp_path, tmp_path / 'cache')
  assert not left and made.folder.exists()


def test_linked_folders_are_read_once(tmp_path):
  """Also where they lead back, or to what is there by its own name."""
  text, other = tmp_path / 'text', tmp_path / 'other'
  for folder in (text / 'b' / 'c', other / 'in'):
    folder.mkdir(parents=True)
    (folder / 'x.txt').write_text('a')
  (text / 'a').symlink_to(text / 'b' / 'c')
  (text / 'web').symlink_to(other)
  (text / 'web2').symlink_to(other / 'in')
  (other / 'in' / 'up').symlink_to(text)
  found = corpus.source_files(str(text))
  assert [(str(s.file.relative_to(text)), s.domain) for s in found] == [
    ('b/c/x.txt', 'b'), ('web/in/x.txt', 'web'),
  ]  # fmt: skip


def test_linked_files_are_read_once(tmp_path):
  """By the name that is no link, whichever stands first."""
  text = tmp_path / 'text'
  (text / 'b').mkdir(parents=True)
  for name in ('b/x.txt', 'c.txt'):
    (text / name).write_text(name)
  (text / 'a.txt').symlink_to(text / 'c.txt')
  (text / 'd.txt').symlink_to(text / 'b' / 'x.txt')
  (text / 'a').symlink_to(text / 'b')
  (tmp_path / 'again').symlink_to(text)  # nor is the root a link's
  for path in (text, text / '*', text / '**', tmp_path / 'again' / '*'):
    found = corpus.source_files(str(path))
    assert [s.file.name for s in found] == ['x.txt', 'c.txt']
    assert [s.domain for s in found] == ['b', 'c']
  # Of links alone the first.
  (tmp_path / 'links').mkdir()
  for name in ('y.txt', 'x.txt'):
    (tmp_path / 'links' / name).symlink_to(text / 'c.txt')
  [one] = corpus.source_files(tmp_path / 'links')
  assert one.file.name == 'x.txt'


@pytest.mark.parametrize(
  'inner', ['', '-31', '-0123456789abcdef', '-0123456789abcdef/whole']
)
def test_what_builds_leave_is_no_text(tmp_path, inner):
  write_jsonl(tmp_path / 'a.jsonl', numbered(3))
  work = tmp_path / f'building-x-{"1" * 8}-{"2" * 16}{inner}'
  work.mkdir(parents=True)
  (work / 'tokens.bin').write_bytes(b'ab')
  work.with_name(work.name + cache_build.LOCK).touch()
  found = corpus.source_files(str(tmp_path))
  assert [s.file.name for s in found] == ['a.jsonl']


def test_an_unreadable_file_without_suffix_is_an_error(tmp_path, monkeypatch):
  path = tmp_path / 'text8'
  path.write_text('a')

  def closed(file, *_):
    raise PermissionError(13, 'Permission denied', str(file))

  monkeypatch.setattr(readers, 'open', closed, raising=False)
  with support.refused('data.path', 'text8 cannot be read: Permission denied'):
    build(path, tmp_path / 'cache')


def test_a_file_named_as_one_of_caches_is_read(tmp_path):
  for name in ('tokens.bin', 'loss.bin'):
    (tmp_path / name).write_bytes(b'ab')
  found = corpus.source_files(str(tmp_path))
  assert [s.file.name for s in found] == ['loss.bin', 'tokens.bin']


def test_a_folder_may_go_while_it_is_searched(tmp_path, monkeypatch):
  write_jsonl(tmp_path / 'a.jsonl', numbered(3))
  going = tmp_path / 'building-x'
  going.mkdir()
  scandir = os.scandir

  def gone(path):
    if pathlib.Path(path) == going:
      going.rmdir()  # another builder is done between listing and opening
    return scandir(path)

  monkeypatch.setattr(os, 'scandir', gone)
  assert corpus.source_files(str(tmp_path)) == [
    (tmp_path / 'a.jsonl', 'a', None, '')
  ]
  assert not going.exists()


def test_an_unreadable_folder_is_an_error(tmp_path, monkeypatch):
  write_jsonl(tmp_path / 'a.jsonl', numbered(3))
  (tmp_path / 'closed').mkdir()
  scandir = os.scandir

  def closed(path):
    if pathlib.Path(path).name == 'closed':
      raise PermissionError(13, 'Permission denied', path)
    return scandir(path)

  monkeypatch.setattr(os, 'scandir', closed)
  with support.refused('closed cannot be read: Perm', '; let'):
    corpus.source_files(str(tmp_path))


def test_a_failed_build_leaves_nothing(tmp_path):
  class Broken(tokenizer.Bytes):
    def encode_batch(self, texts):
      raise RuntimeError('half way')

  write_jsonl(tmp_path / 'a.jsonl', numbered(5))
  with pytest.raises(RuntimeError, match='half way'):
    token_cache.tokens(config(tmp_path, tmp_path / 'cache'), Broken())
  assert not list((tmp_path / 'cache').iterdir())


def test_a_cache_at_home(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  monkeypatch.chdir(tmp_path)
  write_jsonl(tmp_path / 'a.jsonl', numbered(5))
  made, _ = build(tmp_path / 'a.jsonl', '~/tokens')
  assert made.folder.parent == tmp_path / 'home' / 'tokens'
  assert not (tmp_path / '~').exists()


def test_unwritable_cache(tmp_path):
  write_jsonl(tmp_path / 'a.jsonl', numbered(5))
  (tmp_path / 'file').write_text('')
  with support.refused('cannot be written', 'cache_dir'):
    build(tmp_path, tmp_path / 'file')


def test_fingerprint_covers_text_tokenizer_and_split(tmp_path):
  path = write_jsonl(tmp_path / 'a.jsonl', numbered(50))
  base = config(path, tmp_path / 'cache')
  other = dataclasses.replace(
    base, data=dataclasses.replace(base.data, held_out_fraction=0.5)
  )
  stated = tokenizer.load('bpe2048')
  stated.first = 7  # as tokenizer_config.json says it
  ended = tokenizer.load('bpe2048')
  ended.last = 9
  found = [
    token_cache.tokens(base, tokenizer.load('bytes')),
    token_cache.tokens(base, tokenizer.load('bpe2048')),
    token_cache.tokens(other, tokenizer.load('bytes')),
    token_cache.tokens(base, stated),
    token_cache.tokens(base, ended),
  ]
  assert len({c.fingerprint for c in found}) == 5
  assert set(np.asarray(found[4].tokens)[found[4].starts[1:] - 1]) == {9}
  assert set(np.asarray(found[3].tokens)[found[3].starts[:-1]]) == {7}
  assert found[2].held.sum() > found[0].held.sum()
