"""The bench of masked models: what is compared has the same tokens."""

import operator

import numpy as np
import pytest

from paraxis.train.bench import methods as masks
from paraxis.train.bench import report as report_lib
from paraxis.train.bench import train as bench_train


def test_steps_and_calls_have_rows_and_bounds():
  report = masks.masks(1, True, lambda line: None)
  for name in (masks.CAUSAL, *masks.STEPS):
    unit, values = report.rows[f'step, {name}']
    assert unit == 's' and len(values) == 1 and values[0] > 0
  checks = {c.what: c for c in report.checks}
  assert len(checks) == 3 + len(masks.CALLS)
  few = checks['one row: time of a causal call of 8 tokens / of 1']
  one, eight = (
    report.rows[f'one row, a causal call of {n}'][1][0] for n in (1, 8)
  )
  assert few.values == [eight / one] and few.target == 2.5
  step = checks['step: time of masks / causal']
  own, causal = (report.rows[f'step, {n}'][1][0] for n in ('masks', 'causal'))
  assert step.values == [own / causal] and step.target == 1.1
  for count in masks.CALLS:
    assert checks[f'call of {count}: time of a block / causal'].target == 1.15
  unit, pairs = report.rows['step: time of pairs of rows / causal']
  both = (report.rows[f'step, {n}'][1][0] for n in ('pairs of rows', 'causal'))
  assert unit == 'no target' and pairs == [operator.truediv(*both)]
  shown = report_lib.table(report)
  assert '| step: time of pairs of rows / causal (no target) |' in shown
  assert '| step, causal' not in shown


@pytest.mark.parametrize('count', masks.CALLS)
def test_calls_are_those_of_decoding(count, monkeypatch):
  """As many of a canvas as of drafts, none of which is kept."""
  c = bench_train.config(True)
  fields = {'model.visibility': 'block', 'model.block': count}
  traced = []
  call = masks.canvas.Unmask.call
  monkeypatch.setattr(
    masks.canvas.Unmask, 'call',
    lambda self, *given: traced.append(self) or call(self, *given),
  )  # fmt: skip
  for config in (c, masks._with(c, fields)):
    calls = masks._call(config, count, 2)()
    assert calls.tolist() == [masks.REPEATS] * 2
  assert [made.width for made in traced] == [count]


def test_a_masked_step_has_masks_in_the_same_tokens(monkeypatch):
  given = []
  put = bench_train.job_lib.Program.put
  monkeypatch.setattr(
    bench_train.job_lib.Program, 'put',
    lambda self, b, *more: given.append(b) or put(self, b, *more),
  )  # fmt: skip
  c = bench_train.config(True)
  fields, _ = masks.STEPS['masks']
  for config in (c, masks._with(c, fields)):
    bench_train.Ours(config, 'data=1', bench_train.measure.settled)
  plain, masked = given
  hidden = masked.tokens == c.model.vocab_size - 1
  assert 0.3 < hidden.mean() < 0.7 and plain.tokens.shape == hidden.shape
  np.testing.assert_array_equal(plain.targets, masked.targets)
