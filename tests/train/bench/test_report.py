"""Tables of BENCHMARKS.md: only what was measured is replaced."""

import dataclasses
import io
import pathlib
import sys

import pytest

from paraxis.configs.base import errors
from paraxis.train.bench import command
from paraxis.train.bench import measure
from paraxis.train.bench import report as report_lib

ROOT = pathlib.Path(__file__).resolve().parents[3]


def made(name):
  report = measure.BenchReport(name, 'B1 T8', measure.CPU)
  report.add(dict.fromkeys(('ring, 8', 'compile ring, 8'), [0.5, 0.25, 1.0]))
  report.check('time of a / b', [1.3, 1.5, 1.25], 1.2, least=False)
  report.add({'temporary, ring': [7.0, 7.5, 8.0]}, 'MiB')
  report.facts |= dict(
    cpu='A Processor', cores=2, threads=3, device='cpu', jax='1.2.3',
    python='3.11.7', flags='--xla_x=1', rounds=3, quick=False,
  )  # fmt: skip
  report.notes.append('load 1.0 before, load 2.0 after')
  report.finish()
  report.dates[:] = ['2026-01-02']
  return report


def marked(*names):
  return '\n'.join(
    f'<!-- bench {n} -->\nold {n}\n<!-- /bench {n} -->\nprose of {n}'
    for n in names
  )


def test_a_table_says_when_and_how():
  text = report_lib.table(made('context'))
  assert text.startswith(
    '**context**, 2026-01-02, A Processor, 2 cores, 3 threads, device cpu, '
    'jax 1.2.3, Python 3.11.7, 3 rounds, XLA_FLAGS `--xla_x=1`, '
    'load 1.0 before, load 2.0 after: B1 T8.'
  )
  assert '| time of a / b | 1.25 / 1.30 / 1.50 | <= 1.2 | missed |' in text
  assert '| ring, 8 (s) | 0.250 / 0.500 / 1.00 | | |' in text
  assert 'compile' not in text and 'CUT' not in text
  cut = dataclasses.replace(made('context'), complete=False, parts=['a'])
  assert ', CUT after a: B1' in report_lib.table(cut)
  step = report_lib.table(made('step'))
  assert '| ring' not in step
  peer = made('methods')
  peer.add({'speed of ours / xllamacpp': [0.5, 0.25, 1.0]}, 'ratio')
  peer.add({'gpipe / data=8': [0.5]}, 'ratio')  # judged with what it predicts
  shown = report_lib.table(peer)
  row = '| speed of ours / xllamacpp | 0.25 / 0.50 / 1.00 | | |'
  assert row in shown and 'gpipe' not in shown
  assert step.endswith('\n\nMiB, medians: temporary, ring 7.50.')
  later = dataclasses.replace(
    made('step'), dates=['2026-01-02', '2026-02-01'], facts=dict(flags='')
  )
  shown = report_lib.table(later)
  assert '**step**, 2026-01-02 to 2026-02-01, no XLA_FLAGS, load' in shown


def test_only_the_measured_is_replaced(tmp_path, monkeypatch, capsys):
  path = tmp_path / 'B.md'
  path.write_text(marked('step', 'data'))
  monkeypatch.setattr(
    sys, 'stdin', io.StringIO(measure.to_json([made('data')]))
  )
  report_lib.main([str(path)])
  text = path.read_text()
  assert 'old step' in text and 'old data' not in text
  assert text.count('prose of') == 2 and '1.30' in text
  assert 'wrote data' in capsys.readouterr().out


def test_a_missing_marker_is_an_error():
  with pytest.raises(errors.UserError, match='0 times <!-- bench step'):
    report_lib.replaced(marked('data'), [made('step')])


def test_the_page_has_a_table_for_every_bench():
  text = (ROOT / 'BENCHMARKS.md').read_text(encoding='utf-8')
  reports = [made(name) for name in command.BENCHES]
  assert report_lib.replaced(text, reports) != text


def test_the_day_is_that_of_the_measurement():
  report = made('step')
  old = measure.from_json(measure.to_json([report]))
  assert '2026-01-02' in report_lib.replaced(marked('step'), old)
  without = measure.BenchReport('step', 'B1', measure.CPU)
  assert ', no date' in report_lib.table(without)
