"""A drawing shows what the shardings say: every part, and all who hold it."""

import jax
import numpy as np
import pytest

from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.sequence import order as context_order
from paraxis.train.plot import layout as draw_layout


def picture(spec, shape=(16, 32), mesh='data=2,fsdp=2,tensor=2', **more):
  sharding = jax.NamedSharding(mesh_lib.make(mesh), spec)
  names = tuple(f'axis_{i}' for i in range(len(shape)))
  return draw_layout.Picture('x', shape, sharding, names, **more)


def painted(drawn):
  """Every element -> the set of its holders, as drawn; each painted once."""
  rows, columns = (drawn.shape[i] for i in drawn.dims)
  out = np.full((rows, columns), None)
  for (down, across), devices in draw_layout.holders(drawn).items():
    part = out[slice(*down), slice(*across)]
    assert part.size and all(v is None for v in part.flat)
    for at in np.ndindex(part.shape):
      part[at] = frozenset(devices)
  return out


def placed(x, mesh):
  """The same from an array on devices; its elements are their own numbers."""
  places = {d: i for i, d in enumerate(mesh.devices.flat)}
  out = [set() for _ in range(x.size)]
  for shard in x.addressable_shards:
    for number in np.asarray(shard.data).flat:
      out[number].add(places[shard.device])
  return np.array([frozenset(s) for s in out]).reshape(x.shape)


@pytest.mark.parametrize(
  'spec',
  [
    jax.P(None, None),
    jax.P('data', 'tensor'),
    jax.P(('data', 'fsdp'), 'tensor'),
    jax.P(None, ('fsdp', 'data', 'tensor')),
  ],
)
def test_holders_are_those_of_the_array(spec):
  drawn = picture(spec)
  numbers = np.arange(16 * 32).reshape(16, 32)
  x = jax.device_put(numbers, drawn.sharding)
  np.testing.assert_array_equal(painted(drawn), placed(x, drawn.sharding.mesh))


def test_another_layout_is_drawn_otherwise():
  one, other = (
    picture(jax.P('data', 'tensor')),
    picture(jax.P('tensor', 'data')),
  )
  assert (painted(one) != painted(other)).any()


@pytest.mark.parametrize('layout', ['zigzag', 'striped', 'contiguous'])
def test_tokens_are_drawn_in_the_order_of_the_text(layout):
  order = context_order.permutation(layout, 8, 32)
  drawn = picture(
    jax.P(None, 'context', None),
    (4, 32, 5),
    'context=8',
    order=order,
  )
  mesh = drawn.sharding.mesh
  x = jax.device_put(order, jax.NamedSharding(mesh, jax.P('context')))
  np.testing.assert_array_equal(painted(drawn), np.stack([placed(x, mesh)] * 4))


def test_what_is_not_drawn_must_be_whole():
  drawn = picture(jax.P('tensor', None, None), (4, 16, 32), dims=(1, 2))
  with pytest.raises(ValueError, match=r'dimension 0 .axis_0. is sharded'):
    draw_layout.holders(drawn)


def texts(fig):
  """What is written inside the axes of a Figure, one list an axes."""
  return [[t.get_text() for t in ax.texts] for ax in fig.axes]


def test_grid_shows_every_holder():
  rows = {
    'mixed': [picture(jax.P('fsdp', 'tensor')), picture(jax.P())],
    'data=8': [
      picture(jax.P('data'), mesh='data=8'),
      picture(jax.P(None, 'data'), mesh='data=8'),
    ],
  }
  fig = draw_layout.grid(rows)
  inside = texts(fig)
  assert len(inside) == 4
  for found, label in zip(inside, ('mixed', None, 'data=8', None), strict=True):
    numbers = sorted(t for t in found if t != label)
    assert numbers == list('01234567')
  assert fig.axes[0].get_ylabel() == 'axis 0\nover fsdp'
  assert draw_layout.png(fig).startswith(b'\x89PNG')


def test_costs_are_stacked_to_their_sum():
  held = {'a': {'parameters': 4e6, 'optimizer': 8e6}, 'b': {'parameters': 1e6}}
  received = {'a': [('all-gather', 'fsdp', 3e6)], 'b': []}
  left, right = draw_layout.costs(held, received).axes
  ends = [p.get_x() + p.get_width() for p in left.patches]
  assert ends == [4, 12, 1]
  assert [p.get_width() for p in right.patches] == [3]
  assert [t.get_text() for t in right.texts] == ['fsdp']


def test_losses_show_the_difference():
  one = [3.0, 2.0]
  fig = draw_layout.losses({'same': [3.0, 2.0], 'off': [3.0, 2.5]}, one)
  left, right = fig.axes
  assert len(left.lines) == 3
  same, off = (list(line.get_ydata()) for line in right.lines)
  assert max(same) < 1e-16 and off == [same[0], 0.5]
