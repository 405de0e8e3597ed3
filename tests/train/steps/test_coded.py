"""Gradient codes: what is decoded, by whom; and the gradient of a step.

References: sums in NumPy; one device, plain.
"""

import functools
import itertools

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.train.certify import inputs
from paraxis.train.certify import trial
from paraxis.train.steps import coded


@pytest.mark.parametrize(('n', 's'), [(1, 0), (4, 0), (5, 4), (6, 2), (9, 3)])
def test_any_survivors_give_the_sum_and_no_fewer(n, s):
  code = coded.cyclic(n, s)
  for i, row in enumerate(code):  # s + 1 chunks, the first its own
    assert set(np.flatnonzero(row)) == {(i + k) % n for k in range(s + 1)}
  chunks = np.random.default_rng(1).normal(size=(n, 7))
  sent = code @ chunks
  for missing in range(s + 1):
    for late in itertools.combinations(range(n), missing):
      arrived = ~np.isin(np.arange(n), late)
      sent[~arrived] = np.nan  # nothing that could be read
      shares = coded.decoding(code, arrived)
      assert not shares[~arrived].any()
      found = shares[arrived] @ sent[arrived]
      np.testing.assert_allclose(found, chunks.sum(0), atol=1e-8)
      sent = code @ chunks
  if n > s + 1:
    few = np.arange(n) < n - s - 1
    with support.refused(f'{n - s - 1} of {n} workers', f'needs {n - s}'):
      coded.decoding(code, few)


@pytest.fixture(scope='module')
def stepped(float64):
  """(runner of 4 workers, its compiled coded gradient, parameters, a batch)."""
  changes = {'mesh.zero': 2, 'train.microbatches': 2, 'train.batch_size': 16}
  config = schema.with_values(
    support.piped(dict(data=4, fsdp=2), layers=1), changes
  )
  runner = trial.Runner(config, jax.devices()[:8])
  of = functools.partial(coded.gradients, runner.job.built, coded.cyclic(4, 1))
  batch = trial.batches(config, packed=True)[0]
  return runner, jax.jit(of), inputs.parameters(runner), batch


def test_the_gradient_is_that_of_one_device_whoever_is_late(stepped):
  runner, step, params, batch = stepped
  code = coded.cyclic(4, 1)
  alone = trial.Runner(trial.plain(runner.config), jax.devices()[:1])
  loss, wanted, _ = jax.device_get(alone.gradients(alone.start(params), batch))
  with runner.job.context():
    state, rows = runner.start(params), runner.put(batch)
    for late in (None, 0, 3):
      arrived = np.arange(4) != late
      shares = coded.decoding(code, arrived)
      found, grads, aux = step(shares, state.inner, rows)
      np.testing.assert_allclose(found, loss, rtol=1e-9)
      np.testing.assert_allclose(aux.terms['nats'], loss, rtol=1e-9)
      support.close(runner.job.in_order(grads), wanted, 1e-9)
    # Shares of another set are not those of this one.
    off = step(np.roll(shares, 1), state.inner, rows)[1]
    assert trial.worst(runner.job.in_order(off), wanted)[0] > 1e-3


def test_numbers_of_a_straggler_are_not_read():
  """0 x NaN would be NaN."""
  layouts = object.__new__(coded._Decoded)
  layouts.share = jax.numpy.zeros(())
  assert not np.isnan(layouts._counted(jax.numpy.array([np.nan, 1.0]))).any()


def test_workers_are_the_places_along_data(stepped):
  runner, _, params, batch = stepped
  with runner.job.context(), support.refused('a code of 3 workers', 'data=4'):
    state = runner.start(params)
    coded.gradients(
      runner.job.built, coded.cyclic(3, 1), np.ones(3), state.inner,
      runner.put(batch),
    )  # fmt: skip
