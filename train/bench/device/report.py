"""What `paraxis bench device` leaves in its folder, and how it is read again.

    DIR/PART.json    one part: its state, its cases, its figures, as they come
    DIR/PART.log     what its process printed
    DIR/device.json  all parts in one document
    DIR/device.md    the same as tables, goals first

A part is a dict ('record') with the fields that `begin` makes. A file is
replaced whole, so a cut leaves the last one. Standard library only.
"""

import json
import os
import pathlib
from typing import Any

from paraxis.train.bench import measure

OK, FAILED, RUNNING, LEFT_OUT = 'ok', 'failed', 'running', 'left out'
GOAL = 'goal: '  # what the checks of a goal begin with
# Goals, and the part that judges each.
GOALS = {
  'attention forward: speed of ours / cudnn': 'attention',
  'attention with gradients: speed of ours / cudnn': 'attention',
  'decode attention: bytes read / copy': 'kernels',
  'decode of 1 row: bytes read / copy': 'decode',
  'decode of 64 rows: bytes read / copy': 'decode',
  'MFU of a step of 1b': 'train_1b',
}
# Figures of a table cell; a number that is not finite.
_SHOWN = '{:.3g}'.format


def begin(part: str, identity: dict, setup: str = '') -> dict[str, Any]:
  """A record of a part of which nothing is known yet.

  names: its cases, None until its process has said them. cases: {name: (state,
  error)} of those that ended. running: the one under way. figures: {name:
  report of the case, as JSON}, so that one that runs again replaces its own.
  """
  return dict(
    part=part, identity=identity, setup=setup, state=RUNNING, error='',
    seconds=0.0, names=None, cases={}, running=None, figures={},
  )  # fmt: skip


def resumed(record: dict[str, Any]) -> dict[str, Any]:
  """The record, to go on with: of the cases that ended well alone."""
  good = {n: c for n, c in record['cases'].items() if c[0] == OK}
  figures = {n: f for n, f in record['figures'].items() if n in good}
  more = dict(state=RUNNING, error='', running=None)
  return record | more | dict(cases=good, figures=figures)


def report_of(record):
  """measure.BenchReport of all cases of a record, in the part's order."""
  whole = measure.BenchReport(record['part'], record['setup'], measure.WALL)
  figures = record['figures']
  names = [n for n in record['names'] or figures if n in figures]
  for found in measure.from_json(json.dumps([figures[n] for n in names])):
    whole.setup = found.setup or whole.setup
    whole.rows |= found.rows
    whole.checks += found.checks
    whole.notes += found.notes
  return whole


def with_figures(record, case: str, report):
  """The record with the figures of a case."""
  plain = json.loads(measure.to_json([report]))[0]
  return record | dict(figures=record['figures'] | {case: plain})


def _replace(path, text):
  new = path.with_name(f'.{path.name}.new')
  new.write_text(text, encoding='utf-8')
  os.replace(new, path)


def write(folder, record):
  """Writes DIR/PART.json."""
  path = pathlib.Path(folder) / f'{record["part"]}.json'
  _replace(path, json.dumps(record, indent=1))


def read(folder, part: str) -> dict[str, Any] | None:
  """The record of a part, or None: there is none, or it is no record.

  One of another source may have other fields, but has its identity.
  """
  try:
    path = pathlib.Path(folder) / f'{part}.json'
    record = json.loads(path.read_text(encoding='utf-8'))
    whole = record.keys() >= {'identity', 'state', 'cases'}
    return record if whole and record['part'] == part else None
  except (OSError, ValueError, AttributeError):
    return None


def median(folder, part, row):
  """The median of a row that was measured before; None: it was not."""
  record = read(folder, part)
  _, values = report_of(record).rows.get(row, ('', [])) if record else ('', [])
  return measure.spread(values).median if values else None


def missed(record):
  """Lines on the cases that did not end well."""
  bad = {n: e for n, (s, e) in record['cases'].items() if s != OK}
  return [f'{name}: {error}' for name, error in bad.items()]


def why(record):
  """What is to be said of a record's state in one line, '' if all is well."""
  left = [n for n in record['names'] or () if n not in record['cases']]
  not_reached = f'not reached: {", ".join(left)}' if left else ''
  lines = [record['error'], not_reached, *missed(record)]
  return '; '.join(' '.join(line.split()) for line in lines if line)


def _cell(text):
  return str(text).replace('|', '/').replace('\n', ' ')


def _table(head, rows):
  yield f'| {" | ".join(head)} |'
  yield '|' + '---|' * len(head)
  for row in rows:
    yield f'| {" | ".join(map(_cell, row))} |'
  yield ''


def _spread(values):
  return [_SHOWN(x) for x in measure.spread(values)]


def _goals(records):
  found = {}
  for record in records:
    for check in report_of(record).checks:
      if check.what.startswith(GOAL):
        found[check.what.removeprefix(GOAL)] = check
  states = {r['part']: r['state'] for r in records}
  for goal, part in GOALS.items():
    check = found.get(goal)
    if check:
      middle = _SHOWN(measure.spread(check.values).median)
      yield goal, middle, check.bound, check.verdict
    else:
      state = states.get(part, LEFT_OUT)
      about = 'see its notes' if state == OK else f'part {part}: {state}'
      yield goal, '', '', f'not measured: {about}'


def _figures(record):
  report = report_of(record)
  yield f'## {record["part"]}: {report.setup or record["state"]}'
  yield ''
  if line := why(record):
    yield f'{record["state"]}: {_cell(line)}'
    yield ''
  rows = [
    (what, unit, *_spread(values), '', '')
    for what, (unit, values) in report.rows.items()
  ]
  rows += [
    (f'> {c.what}', '', *_spread(c.values), c.bound, c.verdict)
    for c in report.checks
  ]
  if rows:
    yield from _table(('what', 'unit', 'min', 'median', 'max', '', ''), rows)
  for note in report.notes:
    yield f'- {note}'
  yield ''


def markdown(identity, records):
  """All parts as tables.

  identity: {what: text}. records: in the order of their rows.
  """
  lines = ['# paraxis bench device', '']
  lines += [f'- {what}: {value}' for what, value in identity.items()]
  lines += ['', '## Goals', '']
  lines += _table(('goal', 'median', 'bound', ''), _goals(records))
  lines += ['## Parts', '']
  rows = []
  for record in records:
    done = sum(state == OK for state, _ in record['cases'].values())
    count = len(record['names'] or ())
    cases = f'{done} of {count}' if count else ''
    shown = f'{record["seconds"]:.0f}'
    rows.append((record['part'], record['state'], cases, shown, why(record)))
  lines += _table(('part', 'state', 'cases', 'seconds', ''), rows)
  for record in records:
    if record['state'] != LEFT_OUT or record['cases']:
      lines += _figures(record)
  return '\n'.join(lines).rstrip() + '\n'


def publish(folder, identity, records):
  """Writes both documents -> the Markdown one."""
  folder = pathlib.Path(folder)
  text = markdown(identity, records)
  document = dict(identity=identity, parts=records)
  _replace(folder / 'device.json', json.dumps(document, indent=1))
  _replace(folder / 'device.md', text)
  return text
