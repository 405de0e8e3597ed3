"""The files of `paraxis bench device`: what they hold, how they are read."""

import json

from paraxis.train.bench import measure
from paraxis.train.bench.device import report as report_lib

ABOUT = dict(device='1 x TPU v5 lite (tpu)', commit='abc')


def record(part, state='ok', goal=None, **cases):
  report = measure.BenchReport(part, f'setup of {part}', measure.WALL)
  report.add({'copy': [700.0, 720.0, 710.0]}, 'GB/s')
  if goal:
    report.check(report_lib.GOAL + goal, [0.5], 0.8)
  report.notes.append('a note')
  made = report_lib.begin(part, ABOUT) | dict(state=state, cases=cases)
  made |= dict(names=list(cases))
  return report_lib.with_figures(made, next(iter(cases), 'none'), report)


def test_a_record_comes_back(tmp_path):
  made = record('ceilings', a=['ok', ''])
  report_lib.write(tmp_path, made)
  assert report_lib.read(tmp_path, 'ceilings') == made
  assert report_lib.report_of(made).rows['copy'][0] == 'GB/s'
  assert report_lib.median(tmp_path, 'ceilings', 'copy') == 710
  assert report_lib.median(tmp_path, 'ceilings', 'paste') is None
  assert [p.name for p in tmp_path.iterdir()] == ['ceilings.json']


def figures(value):
  report = measure.BenchReport('x', f'setup {value}', measure.WALL)
  report.add({f'row {value}': [value]})
  report.check('an error', [value], 2.0, least=False)
  report.notes.append(f'note {value}')
  return report


def test_a_case_that_runs_again_replaces_its_figures():
  made = report_lib.begin('x', ABOUT) | dict(names=['a', 'b'])
  made['cases'] = dict(a=['failed', 'wrong'], b=['ok', ''])
  for case, value in (('a', 9.0), ('b', 1.0)):
    made = report_lib.with_figures(made, case, figures(value))
  assert [c.verdict for c in report_lib.report_of(made).checks] == [
    'missed', 'met'
  ]  # fmt: skip
  left = report_lib.resumed(made)
  assert left['cases'] == dict(b=['ok', '']) and left['state'] == 'running'
  assert report_lib.why(left) == 'not reached: a'
  found = report_lib.report_of(left)
  assert found.setup == 'setup 1.0' and list(found.rows) == ['row 1.0']
  again = report_lib.with_figures(left, 'a', figures(2.0))
  found = report_lib.report_of(again)  # in the part's order
  assert list(found.rows) == ['row 2.0', 'row 1.0']
  assert found.notes == ['note 2.0', 'note 1.0'] and len(found.checks) == 2


def test_what_is_no_record_is_none(tmp_path):
  assert report_lib.read(tmp_path, 'ceilings') is None
  for text in ('', '[1]', '{"part": "ceilings"}'):
    (tmp_path / 'ceilings.json').write_text(text)
    assert report_lib.read(tmp_path, 'ceilings') is None
  # One of another source may have other fields; --resume refuses it.
  other = dict(part='ceilings', identity=ABOUT, state='ok', cases={}, report={})
  (tmp_path / 'ceilings.json').write_text(json.dumps(other))
  assert report_lib.read(tmp_path, 'ceilings') == other
  report_lib.write(tmp_path, record('decode'))
  (tmp_path / 'decode.json').rename(tmp_path / 'ceilings.json')
  assert report_lib.read(tmp_path, 'ceilings') is None


def test_goals_come_first_and_what_was_not_measured_is_named(tmp_path):
  goal = 'decode of 1 row: bytes read / copy'
  records = [
    record('decode', goal=goal, b1=['ok', '']),
    record('attention', 'failed', forward=['failed', 'out of | memory']),
    record('train_1b', 'left out'),
  ]
  text = report_lib.publish(tmp_path, ABOUT, records)
  assert (tmp_path / 'device.md').read_text() == text
  lines = text.splitlines()
  assert f'| {goal} | 0.5 | >= 0.8 | missed |' in lines
  other = 'decode of 64 rows: bytes read / copy'
  assert f'| {other} |  |  | not measured: see its notes |' in lines
  mfu = '| MFU of a step of 1b |  |  | not measured: part train_1b: left out |'
  assert mfu in lines
  assert (
    '| attention | failed | 0 of 1 | 0 | forward: out of / memory |' in lines
  )
  assert '| copy | GB/s | 700 | 710 | 720 |  |  |' in lines
  assert lines.index('## Goals') < lines.index('## Parts')
  assert '## train_1b: setup of train_1b' not in lines
  document = json.loads((tmp_path / 'device.json').read_text())
  assert document['identity'] == ABOUT and document['parts'] == records
