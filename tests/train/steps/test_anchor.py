"""Where the anchor of replicas lies: its shards, what crosses replicas.

That it moves as it should: tests/train/steps/test_replicas.py.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import hlo
from paraxis.train import program
from paraxis.train.steps import anchor
from paraxis.train.steps import outer
from paraxis.train.steps import replicas

pytestmark = pytest.mark.usefixtures('float64')

MEAN = schema.Outer('mean', 4)
HELD = [  # mesh, outer, {path: mesh axes of its anchor beyond the parameter's}
  (
    'replica=2,data=2,fsdp=2',
    MEAN,
    {
      'embedding': (('data', 'replica'), ()),
      'layers/mlp/up': (('data', 'replica'), (), ()),
      'layers/mlp_norm/scale': (('data', 'fsdp'), ('replica',)),
    },
  ),
  (
    'replica=2,data=2',
    schema.Outer('mean', 4, fragments=2),  # by layers: those stay whole
    {
      'embedding': (('data', 'replica'), ()),
      'layers/mlp/up': ((), ('data', 'replica'), ()),
    },
  ),
  (
    'replica=2,data=2,fsdp=2',
    schema.Outer('mean', 4, delay=1),
    {
      'embedding': (('data',), ()),
      'layers/mlp_norm/scale': (('data', 'fsdp'), ()),
    },
  ),
  (
    'replica=2,data=2',
    schema.Outer('mean', 4, codec='e3m0'),
    {'embedding': (('data',), ())},
  ),
  ('replica=2', schema.Outer('mean', 4, delay=1), {}),
  ('replica=3', MEAN, {'embedding': ((), ())}),
  ('data=2', MEAN, {}),
]


def job_of(mesh, loop=MEAN, changes=()):
  """program.Program of a small model, of shapes alone."""
  sizes = mesh_lib.parse(mesh)
  rows = 4 * sizes.get('replica', 1)
  given = {'outer': loop, 'train.batch_size': rows} | dict(changes)
  config = schema.with_values(support.piped(sizes), given)
  devices = jax.devices()[: math.prod(sizes.values())]
  return program.of_shapes(config, '', devices)


def axes_beyond(spec, own):
  """((mesh axes beyond another's, ..) of each dimension) of a PartitionSpec."""
  as_tuple = lambda a: a if isinstance(a, tuple) else (a,) if a else ()
  pairs = zip(map(as_tuple, spec), map(as_tuple, own), strict=True)
  return tuple(tuple(a for a in x if a not in y) for x, y in pairs)


@pytest.mark.parametrize(('mesh', 'loop', 'wanted'), HELD, ids=lambda _: '')
def test_an_anchor_is_sharded_where_a_sum_lands_at_once(mesh, loop, wanted):
  job = job_of(mesh, loop)
  state = job.state
  of = lambda tree: {p: x.sharding.spec for p, x in tree.items()}
  held, momentum = of(state.params), of(state.outer.momentum)
  own = {p: x[1:] for p, x in of(state.outer.params).items()}
  found = {p: axes_beyond(held[p], own[p]) for p in held}
  assert all(momentum[p] == held[p] for p in momentum)
  assert {p: found[p] for p in wanted} == wanted
  if not wanted:
    assert not any(a for each in found.values() for a in each)


@pytest.mark.parametrize('delay', [0, 1])
def test_a_replica_sends_each_number_once(delay):
  """Over replicas, whatever number of its devices hold it."""
  found = {}
  for mesh in ('replica=2', 'replica=2,data=2', 'replica=2,data=4'):
    loop = schema.Outer('mean', 4, delay=delay)
    job = job_of(mesh, loop, {'train.batch_size': 16})
    run = outer.Exchange(job)
    with job.context():
      run.compile()
    texts = [p.as_text() for p in run.programs.values()]
    each = [c for text in texts for c in hlo.collectives(text, job.mesh)]
    assert {c.axes for c in each} <= {('replica',), ('data',)}
    over = sum(c.total for c in each if replicas.AXIS in c.axes)
    found[mesh] = over * job.mesh.shape['data']
  assert len(set(found.values())) == 1
  each = job.built.params.values()
  numbers = sum(x.size * x.dtype.itemsize for x in each)
  assert found['replica=2'] == numbers  # 2 (R - 1) / R of them


def test_what_is_evaluated_is_the_whole_anchor(monkeypatch):
  alone, waited = annotate.alone, []
  monkeypatch.setattr(annotate, 'alone', lambda x: waited.append(x) or alone(x))
  job = job_of('replica=2,data=2,fsdp=2')
  with job.context():
    state = job.initial_state()
    found = anchor.variables(state)
  assert found.keys() == state.variables.keys()
  # Gathers of many leaves at once can starve each other on CPU.
  assert len(waited) == len(state.params)
  for path, x in found.items():
    own = job.built.params[path].sharding
    assert x.sharding.is_equivalent_to(own, x.ndim), path
    np.testing.assert_array_equal(x, state.params[path])
  assert any(
    x.sharding.shard_shape(x.shape) != found[p].sharding.shard_shape(x.shape)
    for p, x in state.params.items()
  )


def test_a_small_gap_of_bfloat16_parameters_is_kept():
  """Replicas at 1 + 2^-7 and 1: their mean is no bfloat16."""
  mesh = jax.make_mesh(
    (2,), ('replica',), axis_types=(jax.sharding.AxisType.Explicit,)
  )
  spec, cut = jax.P('replica'), (('replica', 0),)
  own = np.array([[1 + 2.0**-7] * 4, [1.0] * 4])
  with jax.set_mesh(mesh):
    own = jax.device_put(
      own.astype(jnp.bfloat16), jax.NamedSharding(mesh, spec)
    )

    def body(x):
      return anchor.mean_shard(replicas.one(x), cut)

    mean = replicas.region(body, (spec,), spec)(own)
  assert mean.dtype == jnp.float32
  np.testing.assert_array_equal(mean, 1 + 2.0**-8)
