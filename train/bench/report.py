"""Writes the tables of BENCHMARKS.md from what `paraxis bench` measured.

    paraxis bench all --out=FILE.json
    python -m paraxis.train.bench.report BENCHMARKS.md < FILE.json

A table is between `<!-- bench NAME -->` and `<!-- /bench NAME -->`. The
tables of the benches in the input are replaced, all other text stays. Each
names its bench, the days on which it was measured, the machine, versions,
threads and flags. Standard library only.
"""

import argparse
import pathlib
import re
import sys

from paraxis.configs.base import errors
from paraxis.train.bench import measure
from paraxis.train.bench import peers

# Benches whose rows are quoted too, and a pattern of these rows.
QUOTED = {'context': r'(?!compile )', 'masks': r'step: time of .* / causal'}
HEAD = ('| what | min / median / max | target | |', '|---|---|---|---|')


def _spread(values, form):
  return ' / '.join(form(x) for x in measure.spread(values))


def _source(report):
  """When, on what and how it was measured, in words."""
  f = report.facts
  dates = report.dates
  words = [' to '.join(sorted({dates[0], dates[-1]}) if dates else ['no date'])]
  words += [f[name] for name in ('cpu',) if f.get(name)]
  for name, form in (
    ('cores', '{} cores'),
    ('threads', '{} threads'),
    ('device', 'device {}'),
    ('jax', 'jax {}'),
    ('python', 'Python {}'),
    ('rounds', '{} rounds'),
  ):
    if name in f:
      words.append(form.format(f[name]))
  if 'flags' in f:
    words.append(f'XLA_FLAGS `{f["flags"]}`' if f['flags'] else 'no XLA_FLAGS')
  words += report.notes[-1:]  # command.run's: what else the machine did
  if not report.complete:
    words.append(f'CUT after {", ".join(report.parts) or "nothing"}')
  if f.get('quick'):
    words.append('QUICK, which judges nothing')
  return ', '.join(words)


def table(report) -> str:
  """A report as Markdown: a line of its source, then a line a ratio.

  Then one line of all memory, and one of the peers.

  Args:
    report: what measure.from_json gives.
  """
  lines = [f'**{report.name}**, {_source(report)}: {report.setup}.', '', *HEAD]
  for check in report.checks:
    shown = _spread(check.values, '{:.2f}'.format)
    lines.append(
      f'| {check.what} | {shown} | {check.bound} | {check.verdict} |'
    )
  memory = []
  for what, (unit, values) in report.rows.items():
    if what.rpartition(' / ')[2] in peers.NAMES:  # a ratio without a target
      lines.append(f'| {what} | {_spread(values, "{:.2f}".format)} | | |')
    elif report.name in QUOTED and re.match(QUOTED[report.name], what):
      shown = _spread(values, measure.number)
      lines.append(f'| {what} ({unit}) | {shown} | | |')
    elif unit == 'MiB':
      median = measure.number(measure.spread(values).median)
      memory.append(f'{what} {median}')
  named = [n for n in report.notes if n.partition(':')[0] in peers.NAMES]
  lines += ['', f'MiB, medians: {"; ".join(memory)}.'] if memory else []
  lines += ['', f'Peers: {"; ".join(named)}.'] if named else []
  return '\n'.join(lines)


def replaced(text: str, reports) -> str:
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
    text = f'{before}{begin}\n{table(report)}\n{end}{after}'
  return text


def main(argv: list[str]) -> None:
  """argv: the Markdown file; reads JSON of `paraxis bench` (--out, --json)."""
  parser = argparse.ArgumentParser(
    description='BENCHMARKS.md, from the JSON of `paraxis bench`'
  )
  parser.add_argument('file', type=pathlib.Path)
  path = parser.parse_args(argv).file
  reports = measure.from_json(sys.stdin.read())
  path.write_text(replaced(path.read_text('utf-8'), reports), 'utf-8')
  print(f'wrote {", ".join(r.name for r in reports)} in {path}')


if __name__ == '__main__':
  main(sys.argv[1:])
