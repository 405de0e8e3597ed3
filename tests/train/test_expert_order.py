"""Experts stacked in any order: one device's numbers, canonical checkpoints.

Slot s of a stack holds expert order[s] (mesh.expert_order); the router's
columns, counts and biases go with it.

Legend: E experts.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import model as model_schema
from paraxis.models import build
from paraxis.models import checks
from paraxis.models import depth
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train import state as state_lib
from paraxis.train.certify import trial

pytestmark = pytest.mark.usefixtures('float64')

E = 8
ONE, OTHER = '3,0,2,7,1,6,5,4', '6,1,4,0,7,3,2,5'
FOUR = 'tensor=4'  # two experts on each
EXPERTS = model_schema.Experts(
  count=E, d_ff=8, region='data+tensor', scores='sigmoid', bias_rate=0.01,
  shared=1, hot=2,
)  # fmt: skip


def config(order='', mesh=FOUR, experts=EXPERTS):
  made = support.piped(mesh_lib.parse(mesh), layers=2)
  return dataclasses.replace(
    made,
    mesh=dataclasses.replace(made.mesh, expert_order=order),
    model=dataclasses.replace(
      made.model, num_kv_heads=4, experts=experts, pattern='F'
    ),
    optimizer=schema.Optimizer(warmup_steps=0),
  )


@functools.cache
def runner(order='', mesh=FOUR):
  return trial.Runner(config(order, mesh), jax.devices()[:4])


@functools.cache
def reference():
  """One device, experts in order."""
  return trial.reference(config(), False, jax.devices()[0])


def differs(side):
  """The largest differences of (loss, gradients, counts) from one device."""
  wanted = reference()
  state = side.start(wanted.params)
  loss, *found = side.gradients(state, wanted.batches[0])
  gradients, counts = (
    side.job.in_order(x) for x in (found[0], found[1].counts)
  )
  return (
    abs(float(loss) / wanted.loss - 1),
    trial.worst(gradients, wanted.gradients)[0],
    trial.worst(counts, wanted.aux.counts)[0],
  )


@pytest.mark.parametrize('mesh', [FOUR, 'stage=2,tensor=2'])
def test_equals_one_device(mesh):
  """Layers and experts out of order at once on stages."""
  assert max(differs(runner(ONE, mesh))) < 1e-9


def test_a_router_whose_columns_stay_is_seen(monkeypatch):
  """The negative: the stacks alone are permuted."""
  monkeypatch.setattr(depth, 'BY_EXPERT', ('experts',))
  loss, gradients, _ = differs(runner.__wrapped__(ONE))
  assert loss > 1e-4 and gradients > 1e-2


def test_slots_hold_the_experts_that_are_named():
  side, params = runner(ONE), reference().params
  held = jax.device_get(side.start(params).variables)
  for slot, expert in enumerate(map(int, ONE.split(','))):
    for name, dim in (('up', 1), ('down', 1), ('router', 2), ('bias', 1)):
      path = f'layers/moe/{name}'
      np.testing.assert_array_equal(
        held[path].take(slot, dim), params[path].take(expert, dim)
      )
  load = held['layers/moe/load']  # also what is not by expert
  np.testing.assert_array_equal(load[:, E:], params['layers/moe/load'][:, E:])


def test_the_step_is_the_same_program():
  """In order nothing is permuted; out of order other numbers come in."""
  batch = reference().batches[0]
  texts = []
  for order in ('', '0,1,2,3,4,5,6,7', ONE):
    side = runner(order)
    texts.append(str(side.traced(side.start(reference().params), batch)[0]))
  assert texts[0] == texts[1] == texts[2]
  moved = lambda order: {
    path
    for path, held in build.build(
      config(order), devices=jax.devices()[:4]
    ).model.held.items()
    if held != depth.IN_ORDER
  }
  assert not moved('') and not moved('0,1,2,3,4,5,6,7')
  names = ('router', 'up', 'gate', 'down', 'load', 'bias')
  assert moved(ONE) == {f'layers/moe/{name}' for name in names}


def test_new_parameters_are_the_same():
  made = [runner(order).job for order in ('', ONE)]
  plain, mine = (j.in_order(j.initial_state().variables) for j in made)
  for path, x in plain.items():
    np.testing.assert_array_equal(mine[path], x, err_msg=path)


def saved(side, state, folder):
  """A checkpoint of the state: its tree, as numbers."""
  with store_lib.Store(folder, store_lib.Options(asynchronous=False)) as store:
    with side.job.context():
      tree = state_lib.in_order(state_lib.flatten(state), side.job.leaves)
      store.save(3, tree, state_lib.axes(side.job.leaves), {})
  return jax.device_get(tree)


def resumed(side, folder):
  """The state of a checkpoint, as train/loop.py reads it."""
  leaves, shapes = side.job.leaves, state_lib.flatten(side.job.state)
  with store_lib.Store(folder, store_lib.Options(asynchronous=False)) as store:
    with side.job.context():
      tree, _ = store.restore(3, state_lib.in_order(shapes, leaves))
      tree = state_lib.on_stages(tree, shapes, leaves)
  return state_lib.unflatten(side.job.state, tree)


def test_a_run_is_resumed_in_another_order(tmp_path):
  """Three steps, saved; read in any order: bitwise, moments, too."""
  params, batches = reference().params, reference().batches
  side = runner(ONE)
  state = side.steps(params, [*batches, batches[0]])
  tree = saved(side, state, tmp_path / 'first')
  apart = runner()
  wanted = jax.device_get(
    state_lib.flatten(apart.steps(params, [*batches, batches[0]]))
  )
  assert tree.keys() == wanted.keys()
  after = []
  others = runner(OTHER, 'data=2,tensor=2'), runner(ONE, 'stage=2,tensor=2')
  for i, other in enumerate((apart, *others)):
    state = resumed(other, tmp_path / 'first')
    again = saved(other, state, tmp_path / str(i))
    for path, x in tree.items():
      np.testing.assert_array_equal(again[path], x, err_msg=path)
    loss, gradients, _ = other.gradients(state, batches[1])
    after.append((float(loss), other.job.in_order(gradients)))
  for loss, gradients in after[1:]:  # and the next step goes on alike
    assert abs(loss / after[0][0] - 1) < 1e-9
    assert trial.worst(gradients, after[0][1])[0] < 1e-9
  # Equal to a run whose experts were always in order.
  learned = {p: x for p, x in wanted.items() if p.startswith('params/')}
  assert trial.worst({p: tree[p] for p in learned}, learned)[0] < 1e-9


def test_read_without_the_order_is_seen(tmp_path, monkeypatch):
  """The negative: what a checkpoint holds is not what memory holds."""
  side = runner(ONE)
  tree = saved(side, side.start(reference().params), tmp_path / 'first')
  other = runner(OTHER)
  monkeypatch.setattr(state_lib, 'on_stages', lambda flat, *_: flat)
  again = saved(other, resumed(other, tmp_path / 'first'), tmp_path / 'second')
  path = 'params/layers/moe/up'
  assert (again[path] != tree[path]).any()


@pytest.mark.parametrize(
  'order, fields, words',
  [
    ('3,1,2', {}, ['names 3 experts', '0 to 7', 'model.experts.count=8']),
    ('0,1,2,3,4,5,6,6', {}, ["'0,1,2,3,4,5,6,6' names 8 experts", 'once']),
    ('0,1,2,3,4,5,6,x', {}, ['names 8 experts']),
    ('1,0', dict(count=0), ['names 2 experts', 'model.experts.count=0']),
    (ONE, dict(groups=4, top_groups=2), ['model.experts.groups=4']),
    (ONE, dict(pattern='EP'), ['of 8 experts', 'P have 16']),
  ],
)
def test_what_is_no_order_is_refused(order, fields, words):
  experts = dataclasses.replace(EXPERTS, **fields)
  made = config(order, experts=experts)
  with support.refused('mesh.expert_order=', *words):
    checks.expert_order(made.mesh, made.model)
