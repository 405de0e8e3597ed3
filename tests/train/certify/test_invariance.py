"""THE invariance test: no layout and no option changes the numbers.

Every case of a pairwise-covering array over all options runs on 8 virtual
devices and on one, in float64: loss, every gradient, and one update from
identical gradients agree within 1e-9, and every leaf is sharded as the rules
say (ZeRO). Then each kind of collective is broken, one at a time, and the same
comparison must see it.
"""

import dataclasses
import functools
import sys

import covering
import jax
import jax.numpy as jnp
import pytest
import support

from paraxis.sharding import rules
from paraxis.train.certify import options

PROPERTIES = ('loss', 'gradients', 'update', 'layout')
SEED = 8  # of 10, one that gives the fewest cases
RULES = tuple(covering.Rule(*rule) for rule in options.RULES)


@functools.cache
def cases():
  return covering.cover(covering.Space(options.FACTORS, RULES), SEED)


def name_of(case):
  """The options that are not the first of their factor."""
  return '.'.join(
    f'{n}={v}' for n, v in case.items() if v != options.FACTORS[n][0]
  )


def reference_of(case):
  return f'{case["model"]}{case["kv_heads"]}'


@pytest.mark.array(6, 75)
@pytest.mark.parametrize(
  'case', covering.params(cases(), name_of, reference_of)
)
def test_equals_one_device(case):
  rows = support.certify(options.config_of(case), case['packed'], PROPERTIES)
  assert len(rows) == 4 and all(row.passed for row in rows), rows


def test_the_array_covers_every_pair():
  space = covering.Space(options.FACTORS, RULES)
  wanted = space.pairs()
  found = set().union(*map(covering.pairs_of, cases()))
  assert found == wanted
  assert len(wanted) >= 1500 and 40 <= len(cases()) <= 90
  assert all(map(space.holds, cases()))
  # Every value of every factor occurs.
  for name, values in options.FACTORS.items():
    assert {case[name] for case in cases()} == set(values), name


# One axis over every device: its loops are as long as they get here.
ALONE = [
  dict(data=8, zero=3),
  dict(fsdp=8),
  dict(context=8, form='usp', order='striped'),
  dict(tensor=8, kv_heads=2, collective_matmul='all'),
  dict(stage=8, schedule='interleaved', chunks=2),
]


def text_of(fields):
  return '.'.join(f'{k}{v}' for k, v in fields.items())


@pytest.mark.xdist_group('broken')
@pytest.mark.parametrize('fields', ALONE, ids=text_of)
def test_one_axis_over_all_devices(fields):
  rows = support.certify(layout(**fields))
  assert len(rows) == 3 and all(row.passed for row in rows), rows


# ------------------------------------------------- broken one at a time


def _size(axis, groups=None):
  return len(groups[0]) if groups else jax.lax.axis_size(axis)


def nothing_sent(x, axis, *args, **options):
  """psum, pmean, pmax, ppermute: every device keeps its own."""
  del axis, args, options
  return x


def own_chunk(x, axis, *, scatter_dimension=0, tiled=False):
  """psum_scatter without the sum."""
  assert tiled
  size = x.shape[scatter_dimension] // _size(axis)
  start = jax.lax.axis_index(axis) * size
  return jax.lax.dynamic_slice_in_dim(x, start, size, scatter_dimension)


def own_repeated(x, name, *, axis_index_groups=None, axis=0, tiled=False):
  """all_gather of one's own."""
  assert tiled
  return jnp.concatenate([x] * _size(name, axis_index_groups), axis)


def own_cut(x, name, split, concat, *, tiled=False, axis_index_groups=None):
  """all_to_all that only changes the shape."""
  assert tiled
  n = _size(name, axis_index_groups)
  return jnp.concatenate(jnp.split(x, n, split), concat)


FAKES = {
  'psum': nothing_sent,
  'pmean': nothing_sent,
  'pmax': nothing_sent,
  'ppermute': nothing_sent,
  'psum_scatter': own_chunk,
  'all_gather': own_repeated,
  'all_to_all': own_cut,
}


def within(name):
  """Whether a function of ours with `name` in its own is being traced."""
  frame = sys._getframe()
  while frame and name not in frame.f_code.co_name:
    frame = frame.f_back
  return frame is not None


def downwards(axis, pairs):
  """Whether a permute sends cotangents of stages: its device 1 to 0."""
  return axis == 'stage' and (1, 0) in pairs


def only_cotangent(real, fake):
  """The real collective, of which plain differentiation makes the fake one."""

  def run(x, name, split, concat, **options):
    exchange = jax.custom_vjp(lambda x: real(x, name, split, concat, **options))
    exchange.defvjp(
      lambda x: (exchange(x), None),
      lambda _, g: (fake(g, name, concat, split, **options),),
    )
    return exchange(x)

  return run


def broken(kind, where):
  """A collective that is wrong everywhere, or only within functions whose name
  contains `where`, such as the backward rules."""
  real, fake = getattr(jax.lax, kind), FAKES[kind]
  if where == 'cotangents':
    return only_cotangent(real, fake)
  wrong = {
    'everywhere': lambda x, *_: True,
    'gradients': lambda x, *_: getattr(x, 'ndim', 0) > 0,
    'cotangents of stages': lambda x, *a: downwards(*a),
  }.get(where, lambda x, *_: within(where))
  return lambda x, *a, **k: (fake if wrong(x, *a) else real)(x, *a, **k)


def layout(**fields):
  """schema.Config on a mesh, the rest as plain as can be."""
  case = dict(
    kv_heads=8, model='llama', optimizer='adamw', microbatches=1, remat='none',
    zero=0, sequence=True, collectives='annotated', collective_matmul='',
    form='ring', order='zigzag', schedule='one_f_one_b', chunks=1,
    activations='recompute', lora=0, **dict.fromkeys(options.AXES, 1),
  )  # fmt: skip
  config = options.config_of(case | fields)
  layers = config.mesh.stage * config.pipeline.chunks
  model = dataclasses.replace(config.model, num_layers=layers)
  return dataclasses.replace(config, model=model)


EXPLICIT = dict(collectives='explicit')
# kind, where it is broken, layout, whether the loss stays right.
BROKEN = [
  ('psum', 'everywhere', EXPLICIT | dict(tensor=8), False),
  ('psum', 'gradients', EXPLICIT | dict(data=8), True),
  ('pmean', 'everywhere', EXPLICIT | dict(tensor=8, model='gemma'), False),
  ('pmax', 'everywhere', EXPLICIT | dict(tensor=8), False),
  ('psum_scatter', 'everywhere', EXPLICIT | dict(tensor=8), False),
  ('psum_scatter', 'backward', EXPLICIT | dict(fsdp=8), True),
  ('psum_scatter', 'everywhere', EXPLICIT | dict(data=8, zero=2), True),
  ('all_gather', 'everywhere', EXPLICIT | dict(fsdp=8), False),
  ('all_gather', 'backward', EXPLICIT | dict(tensor=8), True),
  ('ppermute', 'everywhere', dict(context=8), False),
  ('ppermute', 'backward', dict(context=8), True),
  ('ppermute', 'backward', dict(tensor=8, collective_matmul='all'), True),
  ('all_to_all', 'everywhere', dict(context=8, form='ulysses'), False),
  ('all_to_all', 'cotangents', dict(context=8, form='ulysses'), True),
  # On stages F and the loss are no part of `backward`; B computes F again.
  ('psum', 'everywhere', dict(stage=2, data=4), False),
  ('psum', 'gradients', dict(stage=2, data=4), False),
  ('psum', '_all_reduce', dict(stage=2, data=4), True),
  ('pmax', 'everywhere', dict(stage=8), False),
  ('ppermute', 'everywhere', dict(stage=2, data=4), False),
  ('ppermute', 'cotangents of stages', dict(stage=4, data=2), True),
  ('ppermute', 'backward', dict(stage=2, context=4), True),
  ('psum_scatter', 'backward', dict(stage=2, data=2, tensor=2), True),
  ('psum_scatter', 'scatter', dict(stage=2, fsdp=4), True),
  (
    'psum_scatter',
    'weights',
    dict(stage=2, fsdp=4, schedule='zero_bubble'),
    True,
  ),
  ('all_gather', 'gather', dict(stage=2, fsdp=4), False),
  ('all_gather', 'backward', dict(stage=2, tensor=4), True),
  ('all_to_all', 'everywhere', dict(stage=2, context=4, form='ulysses'), False),
]


@pytest.mark.xdist_group('broken')
@pytest.mark.parametrize(
  'kind, where, fields, loss_holds',
  BROKEN,
  ids=[
    f'{kind}.{where}.{text_of(fields)}' for kind, where, fields, _ in BROKEN
  ],
)
def test_a_broken_collective_is_seen(
  monkeypatch, kind, where, fields, loss_holds
):
  monkeypatch.setattr(jax.lax, kind, broken(kind, where))
  rows = support.certify(layout(**fields), properties=('loss', 'gradients'))
  loss, gradients = (row.passed for row in rows)
  assert not gradients and loss == loss_holds, rows


# On Explicit axes the compiler places the collectives, from array types. What
# is wrong there does not get as far as numbers.


@pytest.mark.xdist_group('broken')
def test_a_dropped_reshard_of_a_partial_sum_is_refused(monkeypatch):
  monkeypatch.setattr(jax, 'reshard', lambda x, *a, **k: x)
  with pytest.raises(ValueError, match='tensor'):
    support.certify(layout(tensor=8), properties=('loss',))


@pytest.mark.xdist_group('broken')
def test_a_dropped_reshard_of_a_whole_value_shows_in_the_layout(monkeypatch):
  config = layout(data=8, zero=1)
  (right,) = support.certify(config, properties=('layout',))
  assert right.passed and right.measured == 0, right
  monkeypatch.setattr(jax, 'reshard', lambda x, *a, **k: x)
  *numbers, wrong = support.certify(config, properties=('gradients', 'layout'))
  assert all(row.passed for row in numbers) and not wrong.passed


def exchanged(spec):
  """A PartitionSpec with the axes of each dimension in the opposite order."""
  return jax.P(*(a[::-1] if isinstance(a, tuple) else a for a in spec))


@pytest.mark.xdist_group('broken')
def test_a_wrong_out_spec_is_refused(monkeypatch):
  right = jax.shard_map

  def wrong(function, *, out_specs, **options):
    swapped = jax.tree.map(exchanged, out_specs)
    return right(function, out_specs=swapped, **options)

  monkeypatch.setattr(jax, 'shard_map', wrong)
  with pytest.raises((ValueError, TypeError), match='data.*fsdp|fsdp.*data'):
    support.certify(layout(data=2, fsdp=2, context=2), properties=('loss',))


@pytest.mark.xdist_group('broken')
def test_a_wrong_out_spec_at_the_end_of_our_own_region_is_seen(monkeypatch):
  """Nothing comes after it that could object: the rows of a gradient move."""
  right = rules.stored
  monkeypatch.setattr(rules, 'stored', lambda *a: exchanged(right(*a)))
  config = layout(data=4, fsdp=2, zero=3, **EXPLICIT)
  loss, gradients = support.certify(config, properties=('loss', 'gradients'))
  assert loss.passed and not gradients.passed, gradients
