"""The bench of methods: every one has a row, or a note that says why not."""

import time

import module_cases
import pytest
import support

from paraxis.configs.base.decode import METHODS
from paraxis.decode import methods as methods_lib
from paraxis.decode.drafts import distill
from paraxis.decode.drafts import heads
from paraxis.models import build
from paraxis.train.bench import measure
from paraxis.train.bench import methods

SILENT = lambda line: None


def test_every_method_has_a_row_or_a_note():
  report = methods.methods(1, True, SILENT)
  for name in METHODS:
    if name in methods_lib.CHANGING:
      note = f'{name}: its text is not that of one by one, not measured'
      assert note in report.notes
    elif name in methods_lib.NEEDED:
      assert f'{name}: no --draft={name}, not measured' in report.notes
      assert name not in report.rows
    else:
      unit, values = report.rows[name]
      assert unit == 'tokens/s' and len(values) == 1 and values[0] > 0
  checks = {c.what: c for c in report.checks}
  none = {*methods_lib.NEEDED, *methods_lib.CHANGING}
  assert len(checks) == len(METHODS) - len(none)
  assert report.clock == measure.CPU
  limit = checks['autoregressive: speed / byte limit']
  assert limit.most == 1.0
  assert 0 < limit.values[0] < 1 and limit.target == 0.6
  plain, jacobi = (report.rows[n][1][0] for n in ('autoregressive', 'jacobi'))
  check = checks['jacobi: speed / one by one']
  assert check.values == [pytest.approx(jacobi / plain)]
  assert check.verdict == '-'  # of a small model there is no verdict
  assert any(n.startswith('jacobi: ') for n in report.notes)


def test_on_an_accelerator_seconds_are_of_the_wall(monkeypatch):
  taken = []

  def interleave(candidates, rounds, clock, say):
    taken.append(clock)
    return {name: [1.0] * rounds for name in candidates}

  made = module_cases.generator('F', dtype='float32')
  monkeypatch.setattr(methods, '_small', lambda *_: (made, [[1, 2, 3]], ''))
  monkeypatch.setattr(methods, '_run', lambda *given: None)
  monkeypatch.setattr(methods.jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(measure, 'interleave', interleave)
  monkeypatch.setattr(methods, 'METHODS', (methods.PLAIN,))
  report = methods.methods(1, True, SILENT)
  assert taken == [time.perf_counter] and report.clock == measure.WALL


def test_drafts_come_from_files(tmp_path, monkeypatch):
  made = module_cases.generator('F', dtype='float32')
  monkeypatch.setattr(methods, '_small', lambda *_: (made, [[1, 2, 3]], ''))
  files = []
  for kind in methods_lib.NEEDED:
    given = made.built.model, made.params, kind, 'numbers'
    with build.use(made.built):
      draft = distill.untrained(*given)
    files.append(str(tmp_path / f'{kind}.npz'))
    heads.save(files[-1], *draft)
  with measure.session(drafts=tuple(files)):
    report = methods.methods(1, True, SILENT)
  assert {*METHODS} - {*methods_lib.CHANGING} == {*report.rows}
  with measure.session(drafts=('none.npz',)), support.refused('no trained'):
    methods.methods(1, True, SILENT)
