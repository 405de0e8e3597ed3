"""Files of every format -> the same rows; damaged and wrong ones say where."""

import gzip
import hashlib
import importlib
import json

import numpy as np
import pytest
import support
import zstandard

from paraxis.configs import schema
from paraxis.models.text import tokenizer
from paraxis.train.data import corpus
from paraxis.train.data import files
from paraxis.train.data import readers
from paraxis.train.data import rows
from paraxis.train.data import token_cache

TEXTS = ['one', 'zwei\r\nZeilen', 'été \u2028 tři', 'x' * 9000]


def jsonl(rows):
  return ''.join(json.dumps(row) + '\n' for row in rows).encode()


def plain(path, **options):
  """[(name, split, text)] of a source."""
  said = []
  sources = corpus.source_files(str(path))
  found = corpus.read(sources, path, rows.Options(**options), said.append)
  return [(f'{r.domain}/{r.id}', r.split, r.text) for r in found], said


def tokens(path, cache):
  """(Corpus of bytes, lines that were said)."""
  data = schema.Data(path=str(path), tokenizer='bytes', cache_dir=str(cache))
  said = []
  config = schema.Config(data=data)
  return token_cache.tokens(config, tokenizer.load('bytes'), said.append), said


def parquet(path, columns, **options):
  arrow = importlib.import_module('pyarrow')
  table = importlib.import_module('pyarrow.parquet')
  table.write_table(arrow.table(columns), path, **options)
  return path


def dataset(folder, texts, shards=2, **columns):
  """What `datasets` 4 leaves: Arrow streams, state.json, dataset_info.json."""
  arrow = importlib.import_module('pyarrow')
  folder.mkdir(parents=True)
  names = [f'data-{n:05d}-of-{shards:05d}.arrow' for n in range(shards)]
  table = arrow.table({'text': texts, **columns})
  for n, name in enumerate(names):
    part = table.slice(n * len(texts) // shards, len(texts) // shards)
    with arrow.OSFile(str(folder / name), 'wb') as file:
      with arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(part, 1)
  state = {'_data_files': [{'filename': name} for name in names]}
  (folder / 'state.json').write_text(json.dumps(state))
  (folder / 'dataset_info.json').write_text('{}')
  return folder


def rows_of(domains):
  """What `plain` finds where TEXTS are in a file of each domain."""
  return [
    (f'{domain}/{n}', None, text)
    for domain in domains
    for n, text in enumerate(TEXTS, 1)
  ]


# The same rows from every format


def test_every_format_gives_the_same_rows(tmp_path):
  body = jsonl({'text': t} for t in TEXTS)
  half = body.index(b'\n') + 1
  squeeze = zstandard.ZstdCompressor().compress
  (tmp_path / 'a.jsonl').write_bytes(body)
  (tmp_path / 'b.jsonl.gz').write_bytes(gzip.compress(body))
  frames = squeeze(body[:half]) + squeeze(body[half:])  # two, one file
  (tmp_path / 'c.jsonl.zst').write_bytes(frames)
  assert plain(tmp_path) == (rows_of('abc'), [])


@pytest.mark.extras
def test_tables_give_the_same_rows(tmp_path):
  (tmp_path / 'a.jsonl').write_bytes(jsonl({'text': t} for t in TEXTS))
  parquet(tmp_path / 'b.parquet', {'text': TEXTS}, row_group_size=2)
  dataset(tmp_path / 'c', TEXTS)
  assert plain(tmp_path) == (rows_of('abc'), [])


@pytest.mark.extras
def test_small_blocks_change_nothing(tmp_path, monkeypatch):
  (tmp_path / 'a.jsonl').write_bytes(jsonl({'text': t} for t in TEXTS * 3))
  (tmp_path / 'b.txt').write_text(f'{TEXTS[3]}\n\n' * 9)
  parquet(tmp_path / 'd.parquet', {'text': TEXTS * 3})
  whole, _ = plain(tmp_path)
  monkeypatch.setattr(rows, 'BLOCK', 10)
  source = corpus.source_files(tmp_path)[0]
  assert len(list(readers.blocks(source))) > 3
  assert plain(tmp_path)[0] == whole


@pytest.mark.extras
def test_columns_beside_the_text(tmp_path):
  columns = {
    'content': ['a', 'b', 'c', ''],
    'id': ['x', None, 'z', 'w'],
    'split': ['held', None, 'train', None],
    'domain': ['law', None, 'law', None],
    'other': [1, 2, 3, 4],
  }
  path = parquet(tmp_path / 't.parquet', columns)
  found, said = plain(path, text_key='content')
  assert found == [('law/x', 'held', 'a'), ('t/2', None, 'b'),
                   ('law/z', 'train', 'c')]  # fmt: skip
  assert said == [f'{path}: 1 of 4 rows have no text: left out.']


@pytest.mark.parametrize('block', [10, rows.BLOCK])
def test_rows_of_jsonl_without_text_are_left_out(tmp_path, monkeypatch, block):
  """As of tables; the others keep the number of their line as id."""
  monkeypatch.setattr(rows, 'BLOCK', block)
  texts = ['a', '', 'b', None, '"text": ""', '']
  body = jsonl({'tëxt': t, 'text': ''} for t in texts) + b'\n'
  body += '{"tëxt" : "", "n": 1}\n{"n": {"tëxt": ""}, "tëxt": "c"}\n'.encode()
  path = tmp_path / 'a.jsonl.gz'
  path.write_bytes(gzip.compress(body))
  found, said = plain(path, text_key='tëxt')
  assert found == [
    ('a/1', None, 'a'), ('a/3', None, 'b'), ('a/5', None, '"text": ""'),
    ('a/9', None, 'c'),
  ]  # fmt: skip
  assert said == [f'{path}: 4 of 8 rows have no text: left out.']


def test_a_cache_is_of_the_rows_with_text(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(jsonl({'text': t} for t in ('a', '', 'b', None)))
  made, said = tokens(path, tmp_path / 'cache')
  assert [made.name(n) for n in range(2)] == ['a/1', 'a/3']
  assert said == [f'{path}: 2 of 4 rows have no text: left out.']
  path.write_bytes(jsonl([{'text': ''}, {'text': None}]))
  with support.refused('0 documents in 1 files'):
    tokens(path, tmp_path / 'cache')


def test_null_is_no_id_and_no_domain(tmp_path):
  path = tmp_path / 'a.jsonl'
  null = dict(id=None, domain=None, split=None)
  path.write_bytes(jsonl([{'text': 'a'} | null, {'text': 'b'} | null]))
  assert plain(path)[0] == [('a/1', None, 'a'), ('a/2', None, 'b')]
  (one, _) = corpus.read(corpus.source_files(str(path)), path)
  assert not one.own  # its text decides the split


@pytest.mark.parametrize(
  'line, null',
  [('{"id" : null, "text": "a"}', True), ('{"domain":null,"text":"a"}', True),
   ('{"id": 0, "text": "\\"id\\": null"}', False), ('{"text": "a"}', False)],
)  # fmt: skip
def test_a_cache_of_ids_that_were_null_is_not_taken(tmp_path, line, null):
  path = tmp_path / 'a.jsonl'
  path.write_text(f'{{"text": "null"}}\n{line}\n')
  found = corpus.fingerprint(rows.Source(path, 'a'))
  assert found == files.sha256(path) + '|null is none' * null


def test_text_key_of_jsonl(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(jsonl([{'body': 'a', 'text': 'no'}]))
  assert plain(path, text_key='body')[0] == [('a/1', None, 'a')]
  with support.refused("(it has 'body', 'text'); data.text_key names the key"):
    plain(path, text_key='txt')


# Names of files


@pytest.mark.extras
def test_shards_are_one_domain_and_names_may_say_the_split(tmp_path):
  for name in ('train-00000-of-00002', 'train-00001-of-00002', 'test'):
    parquet(tmp_path / f'{name}.parquet', {'text': [name]})
  dataset(tmp_path / 'web' / 'train', ['a', 'b'])
  dataset(tmp_path / 'web' / 'validation', ['c', 'd'])
  dataset(tmp_path / 'only' / 'train', ['e', 'f'])
  found, _ = plain(tmp_path)
  here = tmp_path.name
  assert sorted(found) == sorted([
    ('train/1', None, 'e'), ('train/2', None, 'f'),
    (f'{here}/1', 'held', 'test'),
    (f'{here}/1#2', 'train', 'train-00000-of-00002'),
    (f'{here}/1#3', 'train', 'train-00001-of-00002'),
    ('web/1', 'train', 'a'), ('web/2', 'train', 'b'),
    ('web/1#2', 'held', 'c'), ('web/2#2', 'held', 'd'),
  ])  # fmt: skip


@pytest.mark.parametrize(
  'end', ['jsonl', 'jsonl.gz', 'jsonl.zst', 'txt', 'md', 'parquet']
)
def test_names_say_the_split_in_any_format(tmp_path, end):
  """Where both kinds are in one folder; a file that is named has none."""
  folder = tmp_path / 'set'
  folder.mkdir()
  for name in ('train', 'valid', 'test-00000-of-00001', 'other'):
    (folder / f'{name}.{end}').touch()
  splits = lambda path: {
    readers.stem(s.file): (s.domain, s.split)
    for s in corpus.source_files(str(path))
  }
  found = splits(tmp_path)
  assert found['train'] == ('set', 'train') and found['other'][1] is None
  assert found['valid'] == found['test'] == ('set', 'held')
  assert splits(folder) == found | {'other': ('other', None)}
  assert splits(folder / f'train.{end}') == {'train': ('train', None)}
  for name in ('valid', 'test-00000-of-00001'):
    (folder / f'{name}.{end}').unlink()
  assert {split for _, split in splits(folder).values()} == {None}


def test_a_split_by_name_is_said_and_another_text(tmp_path, monkeypatch):
  """So that no run goes on with a validation set that it was trained on."""
  for name in ('train', 'validation'):
    row = {'text': name * 9}
    (tmp_path / f'{name}.jsonl').write_bytes(jsonl([row] * 20))
  made, said = tokens(tmp_path, tmp_path / 'cache')
  assert made.domains == (tmp_path.name,)
  assert made.held.tolist() == [False] * 20 + [True] * 20
  assert said == [
    f'data: {tmp_path}: by the names of files, train is trained on, '
    'validation is held out.'
  ]
  monkeypatch.setattr(corpus, 'HELD', ())
  before, said = tokens(tmp_path, tmp_path / 'cache')
  assert before.fingerprint != made.fingerprint
  assert not any('by the names' in line for line in said)


@pytest.mark.parametrize('hash_', ['', '-a09b74b3ef9c3b56'])
def test_shards_of_the_hub_have_a_split(tmp_path, hash_):
  """Their names had a hash behind the number until 2023."""
  for split in ('train', 'validation'):
    for n in range(2):
      (tmp_path / f'{split}-{n:05d}-of-00002{hash_}.parquet').touch()
  found = corpus.source_files(tmp_path)
  assert [s.split for s in found] == ['train'] * 2 + ['held'] * 2
  assert {s.domain for s in found} == {tmp_path.name}
  one = tmp_path / f'web.00000-of-00001{hash_}.jsonl.zst'
  assert readers.stem(one) == 'web'


def test_globs(tmp_path, monkeypatch):
  for name in ('a/x.txt', 'a/y.md', 'b/c/x.txt', 'b/z.jsonl', 'b/z.csv'):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(jsonl([{'text': name}]))
  names = lambda path: [
    (str(s.file.relative_to(tmp_path)), s.domain)
    for s in corpus.source_files(str(tmp_path / path))
  ]
  assert names('*/x.txt') == [('a/x.txt', 'a')]
  assert names('**/x.txt') == [('a/x.txt', 'a'), ('b/c/x.txt', 'b')]
  assert names('b*') == [('b/c/x.txt', 'b'), ('b/z.jsonl', 'z')]
  assert names('a/[xy].*') == [('a/x.txt', 'x'), ('a/y.md', 'y')]
  with support.refused("'*.none': 0 sources of text in"):
    corpus.source_files('*.none')
  (tmp_path / 'odd[1].txt').write_text('a')  # a name, not a pattern
  assert names('odd[1].txt') == [('odd[1].txt', 'odd[1]')]


# Text is cut as it always was, and lines without end too


def whole(text):
  """The rule over all of a text: documents, where no line is long."""
  out, lines = [], []
  for line in text.splitlines(keepends=True):
    lines.append(line)
    size = sum(map(len, lines))
    if size >= 16384 or (size >= 8192 and not line.strip()):
      out.append(''.join(lines))
      lines = []
  return out + ([''.join(lines)] if lines else [])


@pytest.mark.parametrize('packed', [False, True])
def test_text_in_chunks_is_cut_as_the_whole_text(tmp_path, packed):
  rng = np.random.default_rng(0)
  ends = np.array(['\n', '\r\n', '\r', '\u2028', '\x0c', '\n\n', ' é'])
  text = ''.join(
    'ab ' * n + end
    for n, end in zip(
      rng.integers(0, 90, 20_000), rng.choice(ends, 20_000), strict=True
    )
  )
  path = tmp_path / ('a.txt.gz' if packed else 'a.txt')
  body = text.encode()
  assert len(body) > 2 << 20  # of reading: 1 MiB at once
  path.write_bytes(gzip.compress(body, 1) if packed else body)
  assert [t for *_, t in plain(path)[0]] == whole(text)


@pytest.mark.parametrize('spaces', [True, False])
def test_a_line_without_end_is_cut_and_said(tmp_path, spaces):
  rng = np.random.default_rng(0)
  word = lambda n: 'w' * n + ' ' * spaces
  text = ''.join(map(word, rng.integers(1, 30, 120_000))) + 'end'
  text = f'first\n{text}\nlast'
  (tmp_path / 'a.txt').write_text(text)
  found, said = plain(tmp_path / 'a.txt')
  texts = [t for *_, t in found]
  assert ''.join(texts) == text
  assert len(texts) > 60 and max(map(len, texts)) < 4 * 8192
  inner = texts[:-2]
  assert all(t.endswith(' ') for t in inner) == spaces
  assert len(said) == 1 and 'longer than 65,536 characters are cut' in said[0]
  # A line up to that length is a document of its own, as it was.
  (tmp_path / 'b.txt').write_text(f'{text[:65_535]}\n'.replace('\n', ' ', 1))
  assert len(plain(tmp_path / 'b.txt')[0]) == 1


@pytest.mark.parametrize('end', ['', '.gz', '.zst'])
def test_text_without_a_suffix(tmp_path, end):
  """As text8 is: one line, no suffix."""
  text = 'anarchism originated as a term of abuse ' * 5000
  pack = {
    '': bytes, '.gz': gzip.compress,
    '.zst': zstandard.ZstdCompressor().compress,
  }[end]  # fmt: skip
  path = tmp_path / f'text8{end}'
  path.write_bytes(pack(text.encode()))
  found, said = plain(path)
  assert ''.join(t for *_, t in found) == text and len(found) > 8
  assert found[0][0] == 'text8/text8/00000'
  assert said[0] == (
    f'{path} has no suffix: it is read as text, which its beginning is.'
  )
  assert len(said) == 2  # the other: long lines are cut
  (tmp_path / 'a.txt').write_text('a')
  assert [s.file.name for s in corpus.source_files(tmp_path)] == ['a.txt']


@pytest.mark.parametrize(
  'body',
  [b'', b' \n', b'a\0b', b'\xff\xfea', 'é'.encode('utf-16'), b'\x1f\x8b'],
)
def test_no_text_without_a_suffix(tmp_path, body):
  path = tmp_path / 'text8'
  path.write_bytes(body)
  with support.refused('has no suffix, and its beginning is not UTF-8 text'):
    plain(path)
  path.write_bytes('é'.encode() * 40_000)  # cut within a character
  assert readers.is_utf8(path)


def test_long_lines_change_the_fingerprint(tmp_path):
  path = tmp_path / 'a.txt'
  for text, long in (('a\n' * 99_999, 0), ('a' * 40_000, 1), ('a' * 9, 0)):
    path.write_text(text)
    found = corpus.fingerprint(rows.Source(path, 'a'))
    assert found.startswith(hashlib.sha256(text.encode()).hexdigest())
    assert found.endswith('cut') == bool(long)


# What was tokenized before


@pytest.mark.parametrize(
  'name, fingerprint, tokens, starts',
  [
    ('bpe2048', '1de7228be498ea94', '87fe87a660e1ebb4', '20090ad25d2c9ba8'),
    ('bytes', '96b022573de5d94a', '1f3a44b163876d6b', '58f67267ca0812d9'),
  ],
)
def test_the_shipped_text_gives_the_tokens_it_gave(
  tmp_path, name, fingerprint, tokens, starts
):
  data = schema.Data(tokenizer=name, cache_dir=str(tmp_path))
  made = token_cache.tokens(schema.Config(data=data), tokenizer.load(name))
  assert made.fingerprint.startswith(fingerprint)
  wanted = {
    'tokens.bin': tokens,
    'starts.npy': starts,
    'held.npy': '1f5b66e7eb315924',
    'n_bytes.npy': '082971e0a294544e',
    'domain_ids.npy': 'e7c3188c9d0ec053',
    'ids.json': '94cd5143cd8b9f8a',
  }
  found = {name: files.sha256(made.folder / name)[:16] for name in wanted}
  assert found == wanted


# Bad inputs


@pytest.mark.parametrize(
  'make, words',
  [
    pytest.param(
      lambda p: p / 'a.parquet', 'a.parquet: cannot be read: ',
      marks=pytest.mark.extras,
    ),
    (lambda p: p / 'a.jsonl.gz', 'a.jsonl.gz: damaged or cut off: Not a gzipp'),
    (lambda p: p / 'a.jsonl.zst', 'a.jsonl.zst: damaged or cut off: '),
    (lambda p: p / 'a.jsonl.xz', "ends in '.xz'; text is read from .txt, .md"),
    (lambda p: p / 'none.txt', 'no such file or folder'),
  ],
)  # fmt: skip
def test_garbage(tmp_path, make, words):
  for name in ('a.parquet', 'a.jsonl.gz', 'a.jsonl.zst', 'a.jsonl.xz'):
    (tmp_path / name).write_bytes(b'garbage ' * 99)
  with support.refused(words):
    plain(make(tmp_path))


@pytest.mark.parametrize('name', ['gz', 'zst'])
def test_files_that_are_cut_off(tmp_path, name):
  body = jsonl({'text': f'{n} {hash(str(n))}'} for n in range(2000))
  if name == 'gz':
    packed = gzip.compress(body)
  else:
    packed = zstandard.ZstdCompressor().compress(body)
  path = tmp_path / f'a.jsonl.{name}'
  path.write_bytes(packed[:-9])
  with support.refused(f'a.jsonl.{name}: damaged or cut off: '):
    plain(path)


def test_line_that_is_not_utf8(tmp_path):
  (tmp_path / 'a.txt').write_bytes(b'a\n' * 700_000 + b'\xff\n')
  with support.refused('a.txt:700001: not UTF-8'):
    plain(tmp_path / 'a.txt')


@pytest.mark.extras
def test_tables_without_text(tmp_path):
  path = parquet(tmp_path / 'a.parquet', {'body': ['a'], 'n': [1]})
  with support.refused("no column 'text'; it has 'body', 'n': name one by"):
    plain(path)
  with support.refused("column 'n' is int64, not text"):
    plain(path, text_key='n')
  with support.refused('0 documents in 1 files'):
    plain(parquet(path, {'text': ['', None]}))
  bad = {'text': ['a', 'b'], 'split': ['train', 'dev']}
  with support.refused('a.parquet, row 2: "split" is \'dev\''):
    plain(parquet(path, bad))


@pytest.mark.extras
def test_what_datasets_itself_saves(tmp_path):
  library = importlib.import_module('datasets')
  made = library.Dataset.from_dict({'text': TEXTS, 'id': list('wxyz')})
  made.save_to_disk(str(tmp_path / 'd'), num_shards=2)
  wanted = [(f'd/{i}', None, t) for i, t in zip('wxyz', TEXTS, strict=True)]
  assert plain(tmp_path / 'd') == (wanted, [])
  made.select([2, 0]).save_to_disk(str(tmp_path / 'e'))
  found, _ = plain(tmp_path / 'e')  # save_to_disk writes what is selected
  assert [t for *_, t in found] == [TEXTS[2], TEXTS[0]]


@pytest.mark.extras
def test_damaged_datasets(tmp_path):
  folder = dataset(tmp_path / 'd', ['a', 'b'])
  (folder / 'data-00001-of-00002.arrow').unlink()
  with support.refused('data-00001-of-00002.arrow'):
    plain(folder)
  state = {'_data_files': [], '_indices_files': [{'filename': 'x'}]}
  (folder / 'state.json').write_text(json.dumps(state))
  with support.refused('a selection of rows'):
    plain(folder)
  (folder / 'state.json').write_text('{')
  with support.refused('state.json: does not list the files of a dataset'):
    plain(folder)


@pytest.mark.parametrize('name', ['a.parquet', 'a.jsonl.zst'])
def test_a_missing_package_is_one_line(tmp_path, name, monkeypatch):
  import sys

  for package in ('pyarrow', 'pyarrow.parquet', 'zstandard'):
    monkeypatch.setitem(sys.modules, package, None)
  (tmp_path / name).write_bytes(b'x')
  extra = 'parquet' if 'parquet' in name else 'zstd'
  with support.refused(f"pip install 'paraxis[{extra}]'"):
    plain(tmp_path / name)
