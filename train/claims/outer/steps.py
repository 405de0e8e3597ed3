"""Claims about the steps of replicas: what they compute, what they send.

A replica is compared with one device, plain, that reads the rows of the replica
alone. Bytes are those of the compiled programs of a step and of an exchange.
"""

import contextlib
import functools

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.sharding import annotate
from paraxis.train.certify import inputs
from paraxis.train.certify import target_compile
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.claims.outer import exchanges
from paraxis.train.steps import replicas

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
  found, own = {}, run.config.outer
  for case in cases:
    plain = schema.with_value(run.config, 'outer', PLAIN)
    changes = {k: case[k] for k in case if k != 'mesh'}
    config, devices = experiment.shrunk(plain, case['mesh'], changes)
    config = schema.with_value(config, 'outer', own)
    with jax.enable_x64(True):
      found[experiment.case_text(case)] = _off(config, devices)
  return experiment.equal(
    found,
    within,
    f'each replica against one device on its rows, {STEPS} steps: loss, all '
    f'gradients, parameters, optimizer state; {experiment.listed(found)}',
  )


def _over_replicas(found):
  return [c for c in found if replicas.AXIS in c.axes]


def messages(run, *, meshes, fewer):
  """HLO: no byte of a step crosses replicas, and an exchange every period sends
  so many times fewer than data parallel does in as many steps.

  Bytes are those that a device receives over `replica`: of data parallel every
  step, of ours in the gradient, the update and the exchanges of a period.

  Args:
    meshes: texts as for --mesh, with replica. fewer: at least so many times.
  """
  ratios, inner = {}, 0
  for mesh in meshes:
    config, devices = experiment.on(run.config, mesh)
    of = functools.partial(
      _received, devices=devices, names=target_compile.PROGRAMS
    )
    mine = of(config)
    inner += mine
    averaged = schema.with_value(config, 'outer', PLAIN)
    plain = of(experiment.fields(averaged, {'mesh.collectives': 'explicit'}))
    sent = sum(exchanges.received(config, devices).values())
    period = mine * config.outer.period + sent
    ratios[mesh] = plain * config.outer.period / max(period, 1)
  return claims.Outcome(
    f'0 in a step, >= {fewer:g} times fewer',
    f'{inner} in a step, {experiment.numbers(ratios.values(), ".1f")} times',
    f'{"; ".join(meshes)}: bytes received over replica in outer.period='
    f'{run.config.outer.period} steps, beside gradients averaged in each',
    not inner and min(ratios.values()) >= fewer,
  )


def _received(config, devices, names):
  """Bytes over `replica` of programs of a step."""
  return sum(
    c.total
    for name in names
    for c in _over_replicas(experiment.step_collectives(config, devices, name))
  )
