"""`paraxis papers --html`: every config and what it found last, in one page.

The page opens from disk and loads nothing: pictures are in it. Claims are read
from the configs, what they found from results/NAME/, where `paraxis reproduce
NAME` leaves last.json and pictures. What is negative comes first.
"""

import base64
import collections
import html
import json
import pathlib

from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train.claims import harness
from paraxis.train.claims import knockouts
from paraxis.train.claims import papers

FILE = 'papers.html'  # in harness.RESULTS
NOT_RUN = 'not run'
# The first words of verdicts, negative ones first.
ORDER = (
  'opposite', 'not reproduced', 'direction only', 'SKIPPED', NOT_RUN,
  'reproduced',
)  # fmt: skip
COLOURS = dict(
  zip(
    ORDER,
    ('#b3261e', '#b3261e', '#9a6700', '#5f6b7a', '#5f6b7a', '#1a7f37'),
    strict=True,
  )
)
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72em;
  margin: 2em auto; padding: 0 1em; color: #1b1f24; }
table { border-collapse: collapse; width: 100%; margin: .6em 0 1.2em; }
th, td { text-align: left; vertical-align: top; padding: .3em .6em;
  border-bottom: 1px solid #d8dee4; }
th { font-weight: 600; color: #5f6b7a; }
h2 { margin-top: 2.2em; border-top: 2px solid #d8dee4; padding-top: .6em; }
dt { font-weight: 600; color: #5f6b7a; } dd { margin: 0 0 .5em 0; }
img { max-width: 100%; } small { color: #5f6b7a; } a { color: inherit; }
"""


def rank(verdict: str) -> int:
  """How far down a verdict stands: 0 is the most negative."""
  return next(i for i, word in enumerate(ORDER) if verdict.startswith(word))


def last(folder: pathlib.Path) -> dict:
  """{claim: its row of the last `paraxis reproduce`}; {}: there was none.

  Raises:
    UserError: the file is damaged.
  """
  path = folder / harness.LAST
  try:
    rows = json.loads(path.read_text(encoding='utf-8'))['claims']
    return {row['claim']: row for row in rows}
  except FileNotFoundError:
    return {}
  except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as e:
    raise errors.UserError(
      f'{path} is damaged ({type(e).__name__}): remove it, and run `paraxis '
      f'reproduce {folder.name}` again.'
    ) from e


def rows(paper: papers.Paper, folder: pathlib.Path) -> list[dict]:
  """A row for each claim of a config, negative ones first."""
  path = command_line.find_config(paper.name)
  module = command_line.load_module(paper.name)
  alone = {claim.name for claim in knockouts.uncovered(module, path)}
  found, out = last(folder), []
  for claim in papers.claims(module, path):
    empty = dict(expected='', measured='', caveat='', verdict=NOT_RUN)
    about = dict(claim=claim.name, kind=claim.kind, paper=claim.paper)
    about['knockout'] = claim.name not in alone
    out.append(empty | found.get(claim.name, {}) | about)
  return sorted(out, key=lambda row: rank(row['verdict']))


def _coloured(verdict):
  colour = COLOURS[ORDER[rank(verdict)]]
  return f'<b style="color:{colour}">{html.escape(verdict)}</b>'


def _cells(cells, tag='td'):
  return f'<tr>{"".join(f"<{tag}>{cell}</{tag}>" for cell in cells)}</tr>'


def _claim(row):
  text = lambda name: html.escape(str(row[name]))
  paper = '' if row['paper'] is None else text('paper')
  return _cells(
    [
      f'{text("claim")}<br><small>{text("caveat")}</small>',
      text('kind'), text('expected'), paper, text('measured'),
      _coloured(row['verdict']),
    ]
  )  # fmt: skip


def _section(paper, found, folder):
  fields = ''.join(
    f'<dt>{name}</dt><dd>{html.escape(text)}</dd>'
    for name, text in paper.fields.items()
  )
  pictures = ''.join(
    f'<p><img alt="{html.escape(path.stem)}" src="data:image/png;base64,'
    f'{base64.b64encode(path.read_bytes()).decode()}"></p>'
    for path in sorted(folder.glob('*.png'))
  )
  head = ['claim', 'kind', 'expected', 'paper', 'measured', 'verdict']
  return (
    f'<h2 id="{paper.name}">{paper.name}: {html.escape(paper.title)}</h2>'
    f'<table>{_cells(head, "th")}{"".join(map(_claim, found))}</table>'
    f'{pictures}<dl>{fields}</dl>'
  )


def page(found: list, results: pathlib.Path) -> str:
  """The page as text.

  Args:
    found: [(papers.Paper, its `rows`)]. results: folder with one of each.
  """
  worst = lambda item: (rank(item[1][0]['verdict']), item[0].name)
  ordered = sorted(found, key=worst)
  counts = collections.Counter(
    ORDER[rank(row['verdict'])] for _, found_of in found for row in found_of
  )
  summary = ', '.join(f'{counts[w]} {w}' for w in ORDER if counts[w])
  alone = sum(not row['knockout'] for _, found_of in found for row in found_of)
  index = ''.join(
    _cells(
      [
        f'<a href="#{p.name}">{p.name}</a>', html.escape(p.title),
        html.escape(papers.source(p)), _coloured(r[0]['verdict']),
      ]
    )
    for p, r in ordered
  )  # fmt: skip
  sections = ''.join(_section(p, r, results / p.name) for p, r in ordered)
  return (
    '<!doctype html><html lang="en"><meta charset="utf-8">'
    f'<title>paraxis: papers</title><style>{STYLE}</style>'
    f'<h1>What paraxis reproduces</h1><p>{len(found)} configs, '
    f'{counts.total()} claims: {summary}; {alone} have no knock-out. What is '
    'negative comes first; <code>paraxis reproduce NAME</code> runs the claims '
    'of a config. What variants and seeds show counts at two standard errors, '
    'which of three seeds are a one-sided p of .09.</p>'
    f'<table>{_cells(["config", "title", "paper", "worst"], "th")}{index}'
    f'</table>{sections}</html>\n'
  )


def write(word='', file='', results=harness.RESULTS) -> pathlib.Path:
  """Writes the page of the configs that mention a word -> its path.

  Args:
    file: '': papers.html in the results. results: folder that is read.

  Raises:
    UserError: no config mentions the word; the file cannot be written.
  """
  folder = pathlib.Path(results)
  found = [(p, rows(p, folder / p.name)) for p in papers.mentioning(word)]
  path = pathlib.Path(file or folder / FILE)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(found, folder), encoding='utf-8')
  except OSError as e:
    raise errors.UserError(
      f'--html={path}: cannot be written ({e.strerror}).'
    ) from e
  return path
