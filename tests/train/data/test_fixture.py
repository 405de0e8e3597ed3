"""The shipped text is what the manifest says; the tokenizer is made from it."""

import hashlib
import json
import pathlib
import runpy

import pytest

from paraxis.models.text import tokenizer
from paraxis.train.data import baselines
from paraxis.train.data import corpus

FOLDER = pathlib.Path(corpus.__file__).resolve().parent / 'fixture'
MODELS = pathlib.Path(tokenizer.__file__).resolve().parent


def manifest():
  return json.loads((FOLDER / 'data' / 'manifest.json').read_text())['domains']


def test_manifest():
  found = {path.stem for path in (FOLDER / 'data').glob('*.jsonl')}
  assert found == set(manifest())
  for domain, entry in manifest().items():
    content = (FOLDER / 'data' / f'{domain}.jsonl').read_bytes()
    assert hashlib.sha256(content).hexdigest() == entry['sha256']
    rows = [json.loads(line) for line in content.decode().splitlines()]
    held = [row for row in rows if row['split'] == 'held']
    size = lambda part: sum(len(row['text'].encode()) for row in part)
    assert (len(rows), len(held)) == (entry['docs'], entry['held_docs'])
    assert (size(rows), size(held)) == (entry['bytes'], entry['held_bytes'])


def test_notices_travel_with_the_text():
  page = (FOLDER / 'LICENSES.md').read_text(encoding='utf-8')
  for name in ('PSF-LICENSE', 'django-LICENSE', 'shakespeare-COPYING'):
    assert (FOLDER / 'notices' / f'{name}.txt').stat().st_size > 1000
    assert f'notices/{name}.txt' in page
  wordnet = (FOLDER / 'notices' / 'wordnet-copyright.txt').read_text()
  assert 'WordNet' in wordnet and 'ALL copies' in wordnet
  for domain in manifest():
    assert f'| {domain} |' in page


def test_split_rule_of_the_script():
  """The held-out documents shipped are those the script's rule picks."""
  script = runpy.run_path(str(FOLDER / 'make_fixture.py'))
  documents = corpus.documents('fixture')
  for domain in manifest():
    rows = [(d.id, d.text) for d in documents if d.domain == domain]
    held = {d.id for d in documents if d.domain == domain and d.held}
    if domain == 'translation':
      assert script['held_out_strings'](rows) == held
    else:
      assert script['held_out'](domain, rows) == held
    assert script['held_out'](domain + 'x', rows) != held


def test_readers_of_the_script(tmp_path):
  script = runpy.run_path(str(FOLDER / 'make_fixture.py'))
  catalogue = (
    'msgid ""\nmsgstr "Project-Id-Version: x"\n\n'
    'msgid "a \\"b\\""\nmsgstr "c"\n" d"\n\n'
    '#, fuzzy\nmsgid "no"\nmsgstr "nein"\n\nmsgid "same"\nmsgstr "same"\n'
  )
  assert script['pairs'](catalogue, 'de') == ['en: a "b"\nde: c d\n']
  for part, _ in script['SPEECH']:
    (tmp_path / f'data.{part}').write_text(
      '  licence\n00 1 a 02 big_cat 0 lion(p) 0 000 | a cat  \n', 'latin-1'
    )
  assert script['dictionary'](None, tmp_path)[0] == (
    'noun/00000',
    'big cat, lion (n.) a cat\n',
  )


def test_tokenizer_is_made_from_the_training_split(tmp_path):
  script = runpy.run_path(str(FOLDER / 'make_tokenizer.py'))
  shipped = (MODELS / 'bpe2048.json').read_text(encoding='utf-8')
  assert script['train']() + '\n' == shipped
  # The negative: other text gives another vocabulary.
  row = {'split': 'train', 'text': 'abab' * 9}
  (tmp_path / 'x.jsonl').write_text(json.dumps(row))
  other = script['train'](tmp_path, vocab_size=3 + 256 + 2)
  assert '<|x|>' in other and '"abab"' in other


@pytest.mark.smoke
def test_round_trip_of_every_held_out_document():
  t = tokenizer.load('bpe2048')
  held = [d for d in corpus.documents('fixture') if d.held]
  assert len(held) == 34
  total = 0
  for document, ids in zip(
    held, t.encode_batch([d.text for d in held]), strict=True
  ):
    assert t.decode(ids) == document.text
    total += len(ids)
  # 2.62 bytes a token, as measured when it was chosen.
  assert sum(d.n_bytes for d in held) / total == pytest.approx(2.62, abs=0.01)


def test_compressors():
  found = baselines.text_baselines()
  assert found.n_bytes == 230_184
  assert found.gzip == pytest.approx(2.587, abs=5e-4)
  assert found.xz == pytest.approx(2.363, abs=5e-4)
  assert found.xz_given_training == pytest.approx(2.002, abs=5e-4)
  assert found.gzip_by_domain == pytest.approx(
    {
      'code': 2.215,
      'dictionary': 3.188,
      'drama': 3.463,
      'manual': 2.306,
      'scripture': 2.832,
      'translation': 1.770,
    },
    abs=2e-3,
  )
