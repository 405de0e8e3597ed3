"""The errors of kernels: loops against XLA's forms, and what a fault gives.

On a CPU XLA's forms stand in for the kernels, in sizes of --quick.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import xla as attention_xla
from paraxis.pallas_kernels.scans import gated
from paraxis.pallas_kernels.scans import gated_xla
from paraxis.train.bench import measure
from paraxis.train.bench.device import correct as correct
from paraxis.train.bench.device import parts as device_parts
from paraxis.train.bench.device import problems as problems
from paraxis.train.bench.device import reference as reference
from paraxis.train.bench.device import report as device_report

CASES = [
  (name, dtype)
  for name, (_, _, dtypes) in correct.CASES.items()
  for dtype in dtypes
]


@pytest.fixture
def work(tmp_path):
  """A case's Work, without x64: as on a device."""
  report = measure.BenchReport('correct', '', '', judged=False)
  with jax.enable_x64(False):
    yield device_parts.Work(True, 1, str(tmp_path), report, lambda _: None)


@pytest.mark.sampled(8)
@pytest.mark.parametrize('name, dtype', CASES)
def test_a_form_of_xla_is_within_the_bounds(work, name, dtype):
  correct.check(name, dtype, work)
  (check,) = work.report.checks
  assert check.verdict == 'met' and 0 < check.values[0]
  if dtype == correct.FULL:  # and far within: the adjoints are the right ones
    assert check.values[0] < 5e-6
  _, make, _ = correct.CASES[name]
  names = list(make(True, dtype).arrays)
  if 'product' not in name and 'decode' not in name:
    assert check.what.endswith(' '.join(f'd{n}' for n in names))


def swap(monkeypatch, op, **fields):
  """Replaces functions of the op's first form that runs here."""
  forms = registry._OPS[op]
  at = [name for name, chosen, _ in registry.explain(op) if chosen][0]
  changed = tuple(
    dataclasses.replace(f, **fields) if f.name == at else f for f in forms
  )
  monkeypatch.setitem(registry._OPS, op, changed)


def without_window(form):
  """A form of attention that forgets the window."""

  def call(q, k, v, segments, order, mask, *rows):
    mask = dataclasses.replace(mask, window=0)
    return form(q, k, v, segments, order, mask, *rows)

  return call


def without_order(q, k, v, segments, order, mask):
  """A forward pass that forgets the order."""
  return attention_xla.forward(q, k, v, segments, None, mask)


def without_delta(q, k, v, segments, order, mask, rows):
  """A backward pass that drops a term: ds = p do.v."""
  rows = rows._replace(delta=0 * rows.delta)
  return attention_xla.backward(q, k, v, segments, order, mask, rows)


def without_last_key(q, k, v, segments, order, mask):
  """A forward pass that is wrong in one row of one head."""
  o, lse = attention_xla.forward(q, k, v, segments, order, mask)
  return o.at[0, -1, 0].multiply(0.99), lse


def without_decay(*given):
  """A backward pass whose gradient of the decay is twice what it is."""
  dq, dk, dv, dg, *rest = gated_xla.backward(*given)
  return dq, dk, dv, 2 * dg, *rest


FAULTS = [
  ('attention window', 'attention', 'lse',
   dict(forward=without_window(attention_xla.forward))),
  ('attention window', 'attention', 'dq',
   dict(backward=without_window(attention_xla.backward))),
  ('attention order', 'attention', 'dq', dict(forward=without_order)),
  ('attention causal', 'attention', 'd[qk]', dict(backward=without_delta)),
  ('attention causal', 'attention', '(o|dq)',
   dict(forward=without_last_key)),
  ('gated scan by key', gated.OP, 'dg', dict(backward=without_decay)),
]  # fmt: skip


@pytest.mark.parametrize('name, op, what, fields', FAULTS)
def test_a_dropped_term_is_wrong(work, monkeypatch, name, op, what, fields):
  swap(monkeypatch, op, **fields)
  with pytest.raises(correct.WrongError, match=f'{what} is wrong by .* bound'):
    correct.check(name, correct.FULL, work)
  assert [c.verdict for c in work.report.checks] == ['missed']


def test_a_wrong_kernel_is_a_failed_part_and_the_rest_runs(work, monkeypatch):
  swap(monkeypatch, 'attention', backward=without_delta)
  names = ('attention causal', 'linear scan')
  cases = {n: functools.partial(correct.check, n, 'float32') for n in names}
  monkeypatch.setattr(device_parts, 'cases', lambda part, quick: cases)
  record = device_report.begin('correct', {})
  part = device_parts.find('correct')
  assert device_parts.run(part, record, work) == 0
  found = device_report.read(work.folder, 'correct')
  assert found['state'] == 'failed' and found['cases']['linear scan'][0] == 'ok'
  assert 'is wrong by' in device_report.why(found)
  text = device_report.markdown({}, [found])
  assert (
    '<= 0.0002 | missed |' in text and '| correct | failed | 1 of 2' in text
  )


def test_an_error_is_that_of_the_worst_row():
  rng = np.random.default_rng(0)
  wanted = rng.normal(size=(3, 50, 8))
  wrong = wanted.copy()
  wrong[1, 7] *= 1.5
  assert 0.4 < reference.error(wrong, wanted) < 0.5
  assert reference.error(wanted, wanted) == 0
  wrong[0, 0, 0] = np.nan
  assert reference.error(wrong, wanted) == np.inf
  # A row that is nearly zero has the scale of the others.
  wanted[0, 0] = 1e-9
  assert reference.error(wanted + 1e-6, wanted) < 1e-4


def test_a_row_that_sees_nothing_must_say_so():
  wanted = np.array([[1.0, reference.NEG]])
  assert reference.error(wanted, wanted) == 0
  assert reference.error(np.array([[1.0, -5.0]]), wanted) == np.inf
  assert reference.error(np.array([[reference.NEG, -5.0]]), wanted) == np.inf


def test_a_kernel_that_auto_would_not_take_has_a_case(monkeypatch):
  """On a Hopper GPU there are two for bfloat16 and float16."""
  names = ('pallas_hopper', 'pallas_gpu', 'xla')
  explained = [(n, n == names[0], None) for n in names]
  monkeypatch.setattr(registry, 'explain', lambda op, spec: explained)
  taken = []
  monkeypatch.setattr(
    problems.attention, 'attention', lambda *given: taken.append(given[6])
  )
  for kind in ('causal', 'Triton'):
    problem = problems.attention_problem(kind, True, correct.LOW)
    problem.call(*problem.arrays.values())
  assert taken == ['pallas_hopper', 'pallas_gpu']
  assert ('attention Triton', correct.LOW) in CASES


def test_attention_has_cases_of_other_shapes_and_dtypes():
  assert ('attention heads of 128', 'float16') in CASES
  for quick in (False, True):
    wide = problems.attention_problem('heads of 128', quick, 'float16')
    assert {(x.shape[-1], str(x.dtype)) for x in wide.arrays.values()} == {
      (128, 'float16')
    }
    fewer = problems.attention_problem('fewer keys', quick, correct.FULL)
    q, k, v = (x.shape[1] for x in fewer.arrays.values())
    assert q == 3 * k == 3 * v
  for what in ('o', 'dq', 'dk'):  # a rounding is an eighth of bfloat16's
    low, half = (
      correct.bound_of('attention x', d, what) for d in ('bfloat16', 'float16')
    )
    assert low / 8 <= half * 1.07 and half < low / 7


def test_every_op_with_a_kernel_has_a_case():
  checked = {op for op, _, _ in correct.CASES.values()}
  named = {
    op
    for op in registry.ops()
    if any(n.startswith('pallas') for n, _, _ in registry.explain(op))
  }
  assert named and named <= checked
