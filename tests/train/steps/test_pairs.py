"""Replicas that meet by twos (NoLoCo). Reference: NumPy."""

import itertools
import math

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import hlo
from paraxis.train.certify import inputs
from paraxis.train.certify import trial
from paraxis.train.steps import anchor
from paraxis.train.steps import outer
from paraxis.train.steps import pairs

PAIRS = schema.Outer('pairs', 2, 0.7, 0.5, False, pull=0.6)


def test_everyone_meets_everyone_once_in_a_tournament():
  for n in range(2, 12):
    rounds = pairs.matchings(n)
    met = [frozenset(p) for row in rounds for p in enumerate(row.tolist())]
    for row in rounds:
      np.testing.assert_array_equal(row[row], np.arange(n))  # both meet
      assert (row == np.arange(n)).sum() == n % 2  # one sits out
    every = {frozenset(p) for p in itertools.combinations(range(n), 2)}
    assert {p for p in met if len(p) == 2} == every
    assert len([p for p in met if len(p) == 2]) == 2 * len(every)
  many = pairs.matchings(100)
  assert len(many) == pairs.MOST
  reached = {0}
  for _ in range(100):  # whoever has met one of those that are reached
    reached |= {int(row[i]) for row in many for i in reached}
  assert len(reached) == 100


def test_who_meets_whom_is_drawn_by_seed_and_step():
  draw = lambda seed: [int(pairs.drawn(seed, t, 8)) for t in range(400)]
  found = draw(3)
  assert found == draw(3) and found != draw(4)
  count = np.bincount(found, minlength=7)
  assert len(count) == 7 and count.min() > 400 / 7 / 2


def runner_of(mesh, changes=(), loop=PAIRS):
  """trial.Runner of a small model, its first update at the full rate."""
  sizes = mesh_lib.parse(mesh)
  given = {'outer': loop, 'optimizer.warmup_steps': 1} | dict(changes)
  config = schema.with_values(support.piped(sizes), given)
  return trial.Runner(config, jax.devices()[: math.prod(sizes.values())])


def begun(runner):
  """(State with replicas that differ, their outer.Exchange), after 2 steps."""
  run = outer.Exchange(runner.job)
  with runner.job.context():
    run.compile()
  state = runner.start(inputs.parameters(runner))
  for batch in trial.batches(runner.config, packed=False)[:2]:
    loss, gradients, aux = runner.gradients(state, batch)
    state = runner.update(state, loss, gradients, aux)
  return state, run


def met(loop, row, anchor, momentum, theta):
  """(anchor, momentum) (R, ...) after replicas meet: the paper's equations."""
  moved, kept = anchor.copy(), momentum.copy()
  for i, j in enumerate(row):
    both = [i, j]
    found = (theta[both] - anchor[both]).mean(0)
    toward = anchor[both].mean(0) - anchor[i]
    # m of the paper is - rate times ours.
    paper = -loop.rate * momentum[i] * loop.momentum
    paper = paper + loop.rate * found + loop.pull * toward
    moved[i] = anchor[i] + paper
    kept[i] = paper / -loop.rate
  return moved, kept


def stepped(state, move):
  """State whose replicas are at move(where they were), by path."""
  put = lambda x: jax.device_put(move(np.asarray(x)), x.sharding)
  params = jax.tree.map(put, state.outer.params)
  return state._replace(outer=state.outer._replace(params=params))


MESHES = ['replica=4,data=2', 'replica=3,fsdp=2', 'replica=2,fsdp=2,tensor=2']


@pytest.mark.usefixtures('float64')
@pytest.mark.parametrize('mesh', MESHES)
def test_two_replicas_meet_as_in_numpy(mesh):
  runner = runner_of(mesh, {'train.batch_size': 12} if '3' in mesh else {})
  state, run = begun(runner)
  n, seed = runner.config.mesh.replica, runner.config.train.seed
  chosen = set()
  steps = lambda x: 1 + 0.01 * np.arange(n).reshape(-1, *[1] * (x.ndim - 1))
  for done in (2, 4, 6):
    state = state._replace(step=jax.numpy.full_like(state.step, done))
    before = jax.tree.map(np.array, jax.device_get(state.outer))
    with runner.job.context():
      state, _ = run(done, state, None)
    after = jax.device_get(state.outer)
    chosen.add(int(pairs.drawn(seed, done, n)))
    row = pairs.matchings(n)[int(pairs.drawn(seed, done, n))]
    for path, theta in before.params.items():
      own = before.each['anchor'][path], before.each['momentum'][path]
      anchor, momentum = met(PAIRS, row, *own, theta)
      support.close(after.each['anchor'][path], anchor)
      support.close(after.each['momentum'][path], momentum)
      support.close(after.params[path], anchor)
    state = stepped(state, lambda x: x * steps(x))
  assert n == 2 or len(chosen) > 1


@pytest.mark.usefixtures('float64')
def test_their_mean_moves_as_the_anchor_of_heavy_ball_diloco():
  loop = schema.Outer('mean', 2, PAIRS.rate, PAIRS.momentum, False)
  found = {}
  for name, chosen in (('pairs', PAIRS), ('mean', loop)):
    runner = runner_of('replica=4', loop=chosen)
    state, run = begun(runner)
    drift = jax.device_get(state.outer.params)
    with runner.job.context():
      for done in (2, 4, 6):  # as if every period found the same
        state, _ = run(done, state, None)
        moved = {
          p: jax.device_put(np.asarray(x) + 0.1 * drift[p], x.sharding)
          for p, x in state.outer.params.items()
        }
        state = state._replace(outer=state.outer._replace(params=moved))
      state = anchor.settled(state)
    found[name] = jax.device_get(state.params)
  support.close(found['pairs'], found['mean'], 1e-12)


@pytest.mark.usefixtures('float64')
def test_anchors_approach_by_the_pull_alone():
  """Two anchors 1 apart, no gradients: a heavy ball towards their mean."""
  runner = runner_of('replica=2')
  state, run = begun(runner)
  put = lambda x, y: jax.device_put(np.asarray(x), y.sharding)
  apart = {
    p: np.stack([0 * x[0], 0 * x[0] + 1])
    for p, x in jax.device_get(state.outer.params).items()
  }
  like = state.outer.params
  own, anchor = (  # each is donated
    {p: put(x, like[p]) for p, x in apart.items()} for _ in range(2)
  )
  each = dict(anchor=anchor, momentum=state.outer.each['momentum'])
  state = state._replace(outer=state.outer._replace(params=own, each=each))
  distance, speed = 1.0, 0.0
  with runner.job.context():
    for done in (2, 4, 6, 8):
      state, _ = run(done, state, None)
      speed = PAIRS.momentum * speed - PAIRS.pull * distance
      distance += speed
      for x in jax.device_get(state.outer.each['anchor']).values():
        np.testing.assert_allclose(x[1] - x[0], distance, atol=1e-12)
        np.testing.assert_allclose(x.mean(0), 0.5, atol=1e-12)


@pytest.mark.usefixtures('float64')
def test_a_message_is_as_large_as_the_parameters_and_of_two():
  runner = runner_of('replica=4,fsdp=2')
  run = outer.Exchange(runner.job)
  with runner.job.context():
    run.compile()
  (program,) = run.programs.values()
  found = hlo.collectives(program.as_text(), runner.job.mesh)
  assert {(c.kind, c.axes) for c in found} == {
    ('collective-permute', ('replica',))
  }
  whole = sum(
    8 * math.prod(x.sharding.shard_shape(x.shape))
    for x in runner.job.built.params.values()
  )
  assert sum(c.bytes for c in found) == whole  # of one matching
  text, leaves = program.as_text(), len(runner.job.built.params)
  assert text.count(' collective-permute(') == 3 * leaves
  assert not any(f' {kind}' in text for kind in ('all-reduce', 'all-gather'))
