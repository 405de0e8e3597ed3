"""Claims about the steps of replicas: what they compute.

A replica is compared with one device, plain, that reads the rows of the replica
alone.
"""

import contextlib

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.sharding import annotate
from paraxis.train.certify import inputs
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import knockouts

STEPS = 2
PLAIN = schema.Outer()


def all_seen():
  """Knock-out: the sums of a step see the other replicas."""
  seen = lambda axis: contextlib.nullcontext()
  return knockouts.patched(annotate, 'hide', seen)


def _rows(batch, config, r):
  """The rows of replica r: its part of every microbatch."""
  parts, n = config.microbatches, config.mesh.replica

  def cut(x):
    folded = x.reshape(parts, n, -1, x.shape[-1])[:, r]
    return folded.reshape(-1, x.shape[-1])

  rows = type(batch)(*map(cut, batch[:5]), denominator=0)
  return rows._replace(denominator=max(rows.weights.sum(), 1))


def _stepped(runner, params, batches):
  """[(loss, gradients, State)] after each of some steps."""
  state, found = runner.start(params), []
  for batch in batches:
    loss, gradients, aux = runner.gradients(state, batch)
    state = runner.update(state, loss, gradients, aux)
    found.append((loss, gradients, state))
  return jax.device_get(found)


def _gap(found, wanted):
  pairs = zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
  return max(experiment.gap(a, b) if np.any(b) else np.abs(a).max()
             for a, b in pairs)  # fmt: skip


def _off(config, devices):
  """Largest difference of the replicas of a config from one device."""
  runner = trial.Runner(config, devices)
  params = inputs.parameters(runner)
  batches = trial.batches(config, packed=True)[:STEPS]
  steps, n = _stepped(runner, params, batches), config.mesh.replica
  small = {
    'train.batch_size': config.train.batch_size // n, 'train.microbatches': 1
  }  # fmt: skip
  plain = schema.with_value(config, 'outer', PLAIN)
  plain = experiment.fields(plain, experiment.ONE, small)
  alone, worst = trial.Runner(plain, devices[:1]), 0.0
  for r in range(n):
    mine = [_rows(b, config, r) for b in batches]
    for found, wanted in zip(steps, _stepped(alone, params, mine), strict=True):
      loss, gradients, state = found
      own = loss, gradients, state.outer.params, state.optimizer
      own = jax.tree.map(lambda x, r=r: x[r], own)
      loss, gradients, state = wanted
      wanted = loss, gradients, state.params, state.optimizer
      worst = max(worst, _gap(own, wanted))
  return worst


def alone(run, *, cases, within):
  """EQ: every replica's loss, gradients, parameters and optimizer state equal
  those of one device that reads its rows, over two steps.

  In float64, sizes shrunk as by `paraxis verify`, rows packed: replicas differ
  in their numbers of targets.

  Args:
    cases: list of {'mesh': text, 'section.field': value, ...}.
  """
  found = {}
  for case in cases:
    config, devices = experiment.on_case(run.config, case, experiment.shrunk)
    with jax.enable_x64(True):
      found[experiment.case_text(case)] = _off(config, devices)
  return experiment.equal(
    found,
    within,
    f'each replica against one device on its rows, {STEPS} steps: loss, all '
    f'gradients, parameters, optimizer state; {experiment.listed(found)}',
  )
