"""Writes the tables of BENCHMARKS.md from what `paraxis bench` measured.

    paraxis bench all --out=FILE.json
    python -m paraxis.train.bench.report BENCHMARKS.md < FILE.json

A table is between `<!-- bench NAME -->` and `<!-- /bench NAME -->`. The
tables of the benches in the input are replaced, all other text stays. Each
names its bench, date and machine. Standard library only.
"""

import argparse
import datetime
import pathlib
import re
import sys

from paraxis.configs.base import errors
from paraxis.train.bench import measure
from paraxis.train.bench import peers

# Benches whose rows are quoted too, and a pattern of these rows.
QUOTED = {'context': r'(?!compile )'}
HEAD = ('| what | min / median / max | target | |', '|---|---|---|---|')


def _spread(values, form):
  return ' / '.join(form(x) for x in measure.spread(values))


def table(report, date: str) -> str:
  """A report as Markdown: one line of source, then a line a ratio.

  Args:
    report: what measure.from_json gives.
    date: ISO date of the measurement.
  """
  last = report.notes[-1] if report.notes else ''
  if not report.complete:
    last = f'CUT after {", ".join(report.parts) or "nothing"}'
  lines = [f'**{report.name}**, {date}, {last}: {report.setup}.', '', *HEAD]
  for check in report.checks:
    shown = _spread(check.values, '{:.2f}'.format)
    lines.append(
      f'| {check.what} | {shown} | {check.bound} | {check.verdict} |'
    )
  for what, (unit, values) in report.rows.items():
    if report.name in QUOTED and re.match(QUOTED[report.name], what):
      shown = _spread(values, measure.number)
      lines.append(f'| {what} ({unit}) | {shown} | | |')
  named = [n for n in report.notes if n.partition(':')[0] in peers.NAMES]
  lines += ['', f'Peers: {"; ".join(named)}.'] if named else []
  return '\n'.join(lines)


def replaced(text: str, reports, date: str) -> str:
  """`text` with the tables of `reports`; UserError: a marker is missing."""
  for report in reports:
    begin = f'<!-- bench {report.name} -->'
    end = f'<!-- /bench {report.name} -->'
    if text.count(begin) != 1 or text.count(end) != 1:
      raise errors.UserError(
        f'bench {report.name}: the file has {text.count(begin)} times {begin} '
        f'and {text.count(end)} times {end}; each must occur once.'
      )
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    text = f'{before}{begin}\n{table(report, date)}\n{end}{after}'
  return text


def main(argv: list[str]) -> None:
  """argv: the Markdown file; reads JSON of `paraxis bench` (--out, --json)."""
  parser = argparse.ArgumentParser(
    description='BENCHMARKS.md, from the JSON of `paraxis bench`'
  )
  parser.add_argument('file', type=pathlib.Path)
  path = parser.parse_args(argv).file
  reports = measure.from_json(sys.stdin.read())
  today = datetime.date.today().isoformat()
  path.write_text(replaced(path.read_text('utf-8'), reports, today), 'utf-8')
  print(f'wrote {", ".join(r.name for r in reports)} in {path}')


if __name__ == '__main__':
  main(sys.argv[1:])
