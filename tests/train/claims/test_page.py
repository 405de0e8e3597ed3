"""One page: every config and claim, what is negative first, nothing loaded."""

import html.parser
import re

import pytest

from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train import cli
from paraxis.train.claims import harness
from paraxis.train.claims import page
from paraxis.train.claims import papers

PNG = b'\x89PNG'
LINKS = ('src', 'href', 'srcset', 'action', 'data', 'poster')


class Reader(html.parser.HTMLParser):
  """What a page loads, and its text."""

  def __init__(self, text):
    super().__init__()
    self.links, self.tags, self.words = [], set(), []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    self.links += [value for name, value in attrs if name in LINKS]

  def handle_data(self, data):
    self.words.append(data)


def _result(claim, verdict, **more):
  row = dict(
    claim=claim, kind='EQ', paper=None, expected='<= 1', measured='0',
    caveat='why & <how>', passed=True, verdict=verdict, seeds=1,
  )  # fmt: skip
  return row | more


@pytest.fixture
def results(tmp_path):
  """What two configs found, one of them with a picture."""
  claims = {
    name: papers.claims(command_line.load_module(name), name)
    for name in ('gpipe', 'megatron')
  }
  keep = lambda name, verdicts: harness.keep(
    tmp_path / name,
    name,
    [
      _result(claim.name, verdict)
      for claim, verdict in zip(claims[name], verdicts, strict=False)
    ],
  )
  keep('gpipe', ['reproduced'] * len(claims['gpipe']))
  bad = ['reproduced', 'not reproduced, one seed', 'SKIPPED (no libtpu)']
  keep('megatron', bad)
  (tmp_path / 'gpipe' / 'loss.png').write_bytes(PNG)
  return tmp_path


def test_the_page_has_every_config_and_loads_nothing(results):
  path = page.write(results=results)
  assert path == results / page.FILE
  text = path.read_text(encoding='utf-8')
  read = Reader(text)
  for paper in papers.index():
    assert f'id="{paper.name}"' in text
    for claim in papers.claims(command_line.load_module(paper.name), ''):
      assert claim.name in read.words
  inside = {link for link in read.links if link.startswith('#')}
  pictures = [link for link in read.links if link.startswith('data:image/png')]
  assert len(inside) + len(pictures) == len(read.links) and len(pictures) == 1
  assert not read.tags & {'script', 'link', 'iframe'} and '@import' not in text
  assert 'why & <how>' in read.words  # escaped
  assert 'of three seeds are a one-sided p of .09' in text
  assert not re.search(r'20\d\d-\d\d-\d\d|/(tmp|home|root)/', text)


def test_what_is_negative_comes_first(results):
  text = page.write(results=results).read_text(encoding='utf-8')
  at = lambda name: text.index(f'<h2 id="{name}"')
  assert (
    at('megatron') < at('quickstart') < at('gpipe')
  )  # failed, not run, held
  (paper,) = [p for p in papers.index() if p.name == 'megatron']
  ranks = [
    page.rank(r['verdict']) for r in page.rows(paper, results / 'megatron')
  ]
  assert ranks == sorted(ranks) and ranks[0] == page.rank('not reproduced')
  order = [
    'opposite', 'not reproduced, one seed', 'direction only', 'SKIPPED (why)',
    'not run', 'reproduced',
  ]  # fmt: skip
  assert sorted(reversed(order), key=page.rank) == order


def test_claims_that_are_gone_and_files_that_are_damaged(results):
  harness.keep(results / 'zero', 'zero', [_result('no such claim', 'opposite')])
  page.write('zero', results / 'one.html', results)
  text = (results / 'one.html').read_text(encoding='utf-8')
  assert 'no such claim' not in text and 'id="zero"' in text
  (results / 'zero' / harness.LAST).write_text('[')
  with pytest.raises(errors.UserError, match=r'zero/last.json is damaged'):
    page.write('', results / 'two.html', results)
  with pytest.raises(errors.UserError, match='cannot be written'):
    page.write('gpipe', results / 'gpipe', results)


@pytest.mark.usefixtures('settings_stay')
def test_the_command_writes_it(results, monkeypatch, capsys):
  monkeypatch.chdir(results)
  assert cli.main(['papers', 'gpipe', '--html=mine.html']) == 0
  assert capsys.readouterr().out == 'wrote mine.html\n'
  assert (results / 'mine.html').exists()
  assert cli.main(['papers', 'gpipe', '--html']) == 0
  assert (results / 'results' / page.FILE).exists()
