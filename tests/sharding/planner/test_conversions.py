"""Layouts: every conversion's values, transpose and bytes.

A tensor with partial axes is the stack of its terms on the host; `value` adds
them. Bytes are counted in the compiled program, axis by axis.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.planner import conversions as layout
from paraxis.train.claims.layouts import conversions as claims_layout

pytestmark = pytest.mark.usefixtures('float64')

SHAPE = (16, 8)
PLACEMENTS = ('S(0)', 'S(1)', 'B', 'P')
SIZES = dict(data=2, tensor=4)
CUBE = dict(data=2, fsdp=2, tensor=2)


def on(sizes):
  """The mesh, in force within a `with` statement."""
  return jax.set_mesh(mesh_lib.make(sizes))


def value(y, at):
  """The tensor behind the host's array; all copies of a block must agree."""
  for shard in y.addressable_shards:
    np.testing.assert_array_equal(shard.data, np.asarray(y)[shard.index])
  return np.asarray(y).sum(0) if at.partial else np.asarray(y)


def region(run, *args):
  """jit(shard_map(run)) of (host array, layout) pairs -> function, arrays."""
  specs = tuple(at.spec(2) for _, at in args)
  arrays = jax.device_put(tuple(x for x, _ in args), specs)

  def unstacked(*blocks):
    pairs = zip(blocks, args, strict=True)
    return run(*(b[0] if at.partial else b for b, (_, at) in pairs))

  return functools.partial(
    jax.shard_map, unstacked, in_specs=specs, check_vma=False
  ), arrays


def convert_and_back(source, target, sizes):
  """Converts, and pulls a cotangent back, inside one region.

  Returns:
    (x, y) and (g, dx): what went in and what came out, as tensors.
  """
  rng = np.random.default_rng(0)
  x, g = rng.normal(size=(2, *SHAPE))
  back, front = target.dual(sizes), source.dual(sizes)
  stacked = lambda x, at: x[None] if at.partial else x

  def run(x, g):
    y, pull = jax.vjp(lambda x: layout.convert(x, source, target), x)
    return stacked(y, target), stacked(pull(g)[0], front)

  with on(sizes):
    make, arrays = region(
      run,
      (claims_layout._terms(x, source, sizes, rng), source),
      (claims_layout._terms(g, back, sizes, rng), back),
    )
    y, dx = jax.jit(make(out_specs=(target.spec(2), front.spec(2))))(*arrays)
    return (x, value(y, target)), (g, value(dx, front))


def check(source, target, sizes):
  for start, end in convert_and_back(source, target, sizes):
    np.testing.assert_allclose(end, start, rtol=0, atol=1e-12)
  counted, error = claims_layout._conversion(
    mesh_lib.make(sizes), SHAPE, source, target
  )
  assert error < 1e-12
  assert counted == layout.cost(SHAPE, 'f8', source, target, sizes)


T = 16 * 8 * 8  # bytes of the tensor
TABLE = {
  ('S(0)', 'S(1)'): ('all_to_all', T / 4 * 3 / 4),
  ('S(1)', 'S(0)'): ('all_to_all', T / 4 * 3 / 4),
  ('S(0)', 'B'): ('all_gather', 3 * T / 4),
  ('S(1)', 'B'): ('all_gather', 3 * T / 4),
  ('S(0)', 'P'): ('pad', 0),
  ('S(1)', 'P'): ('pad', 0),
  ('B', 'S(0)'): ('slice', 0),
  ('B', 'S(1)'): ('slice', 0),
  ('B', 'P'): ('keep', 0),
  ('P', 'S(0)'): ('reduce_scatter', 3 * T / 4),
  ('P', 'S(1)'): ('reduce_scatter', 3 * T / 4),
  ('P', 'B'): ('all_reduce', 2 * 3 * T / 4),
}


@pytest.mark.parametrize('source', PLACEMENTS)
@pytest.mark.parametrize('target', PLACEMENTS)
def test_the_table_on_one_axis(source, target):
  a, b = (layout.parse(f'tensor:{p}') for p in (source, target))
  steps = layout.plan(SHAPE, 'f8', a, b, SIZES)
  expected = [TABLE[source, target]] if source != target else []
  assert [(s.kind, s.bytes) for s in steps] == expected
  check(a, b, SIZES)


@pytest.mark.parametrize(
  'source, target, kinds',
  [
    # Two axes on one dimension: the minor one comes off first.
    ('data:S(0) tensor:S(0)', 'B', 'all_gather all_gather'),
    ('data:S(0) tensor:S(0)', 'data:S(0)', 'all_gather'),
    ('data:S(0) tensor:S(0)', 'tensor:S(0)', 'permute all_gather'),
    ('data:S(0) tensor:S(0)', 'tensor:S(0) data:S(0)', 'permute'),
    ('B', 'tensor:S(0) data:S(0)', 'slice slice'),
    ('data:S(0)', 'tensor:S(0) data:S(0)', 'slice permute'),
    # Axes change places between dimensions.
    ('data:S(0) tensor:S(1)', 'tensor:S(0) data:S(1)',
     'all_to_all permute all_to_all'),
    # Terms over two axes: at once, or shrinking before the second sum.
    ('data:P tensor:P', 'B', 'all_reduce'),
    ('data:P tensor:P', 'tensor:S(0)', 'reduce_scatter all_reduce'),
    ('data:P tensor:P', 'data:S(1) tensor:P', 'reduce_scatter'),
    ('data:P tensor:S(1)', 'data:S(0) tensor:S(1)', 'reduce_scatter'),
    ('data:S(1) tensor:P', 'tensor:S(1)', 'reduce_scatter permute all_gather'),
    ('data:S(0) tensor:B', 'data:P tensor:S(1)', 'slice pad'),
    ('tensor:S(0)', 'data:P tensor:P', 'keep pad'),
  ],
)  # fmt: skip
def test_two_axes(source, target, kinds):
  a, b = layout.parse(source), layout.parse(target)
  steps = layout.plan(SHAPE, 'f8', a, b, SIZES)
  assert sorted(s.kind for s in steps) == sorted(kinds.split())
  check(a, b, SIZES)


@pytest.mark.parametrize(
  'source, target',
  [
    ('data:S(0) fsdp:S(0) tensor:S(0)', 'tensor:S(0) data:S(1)'),
    ('tensor:P data:S(1) fsdp:S(0)', 'fsdp:S(1) data:S(1) tensor:S(0)'),
  ],
)
def test_three_axes(source, target):
  check(layout.parse(source), layout.parse(target), CUBE)


def test_major_first_is_not_minor_first():
  """The negative: read in the other order, the blocks are in wrong places."""
  right = layout.parse('data:S(0) tensor:S(0)')
  wrong = layout.parse('tensor:S(0) data:S(0)')
  assert right != wrong
  with on(SIZES):
    x = np.arange(128.0).reshape(SHAPE)
    to = layout.parse('B')
    make, arrays = region(lambda x: layout.convert(x, wrong, to), (x, right))
    y = np.asarray(jax.jit(make(out_specs=P()))(*arrays))
  assert not (y == x).all() and sorted(y.ravel()) == sorted(x.ravel())


def test_an_axis_that_stays_lends_no_links():
  """Else 8 idle replicas would share an all-reduce that is not theirs."""
  a, b = layout.parse('tensor:P'), layout.parse('B')
  assert set(layout.cost(SHAPE, 'f8', a, b, SIZES)) == {'tensor'}
  a, b = layout.parse('data:P tensor:S(0)'), layout.parse('data:P')
  assert layout.cost(SHAPE, 'f8', a, b, SIZES) == dict(tensor=T * 3 / 4)


def test_cost_needs_no_devices():
  """70 billion parameters over 4096 chips; per axis, joint steps joined."""
  sizes = dict(data=64, tensor=64)
  shape, wide = (8192, 8192), layout.parse('B')
  two = layout.parse('data:P tensor:P')
  whole = 8192 * 8192 * 2
  cost = functools.partial(layout.cost, shape, 'bfloat16', sizes=sizes)
  assert cost(two, wide) == {'data,tensor': 2 * 4095 / 4096 * whole}
  both = layout.parse('tensor:S(0) data:S(1)')
  assert cost(both, wide) == dict(
    data=63 * whole / 4096, tensor=63 * whole / 64
  ) or cost(both, wide) == dict(tensor=63 * whole / 4096, data=63 * whole / 64)
  assert sum(cost(both, wide).values()) == 4095 / 4096 * whole


def brute(source, target, sizes, most):
  """Fewest bytes over all sequences of at most `most` steps."""
  best, ways = math.inf, [(source, 0)]
  for _ in range(most + 1):
    best = min([best, *(b for at, b in ways if at == target)])
    ways = [
      (step.result, bytes_ + step.bytes)
      for at, bytes_ in ways
      for step in layout._steps(at, SHAPE, 8, sizes, target)
      if bytes_ + step.bytes < best
    ]
  return best


def test_no_shorter_way_is_cheaper():
  both = itertools.product(PLACEMENTS, PLACEMENTS)
  pairs = [f'data:{a} tensor:{b}' for a, b in both]
  for a, b in itertools.product(pairs[::3], pairs[1::3]):
    a, b = layout.parse(a), layout.parse(b)
    if a['data'] == b['data'] or a['tensor'] == b['tensor']:
      continue
    found = sum(layout.cost(SHAPE, 'f8', a, b, SIZES).values())
    assert found == pytest.approx(brute(a, b, SIZES, 3)), (a, b)


def test_axes_of_size_one_cost_nothing():
  a, b = layout.parse('tensor:S(0) context:P'), layout.parse('tensor:S(0)')
  assert layout.cost((8,), 'f8', a, b, SIZES) == {}


def test_gradients_from_outside():
  """Replicated inputs and outputs too: nothing is counted p times."""
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=(2, *SHAPE))
  for a, b in itertools.permutations(('tensor:S(0)', 'B', 'tensor:P'), 2):
    a, b = layout.parse(a), layout.parse(b)
    with on(SIZES):

      def total(x, a=a, b=b):
        y = layout.on_mesh(x, a, b)
        return (jax.reshard(y.sum(0) if b.partial else y, P()) * w).sum()

      source = claims_layout._terms(x, a, SIZES, rng)
      grad = jax.jit(jax.grad(total))(jax.device_put(source, a.spec(2)))
    np.testing.assert_allclose(grad, np.broadcast_to(w, grad.shape))


def test_text_and_values():
  for text in ('data:S(0) tensor:S(0)', 'tensor:S(0) data:S(0)', 'B',
               'data:S(1) fsdp:P tensor:P'):  # fmt: skip
    assert str(layout.parse(text)) == text
    assert layout.parse(text) == layout.parse(f'{text} context:B'.lstrip('B '))
  a = layout.of({'tensor': 'S(1)', 'data': 'S(0)'})
  assert a == layout.parse('data:S(0) tensor:S(1)') and hash(a)
  assert (a['data'], a['fsdp']) == ('S(0)', 'B')
  assert a.spec(3) == P('data', 'tensor', None)
  b = layout.parse('data:S(0) tensor:P')
  assert b['tensor'] == 'P' and b.spec(1) == P('tensor', 'data')
  assert a.local(SHAPE, SIZES) == (8, 2)
  assert a.dual(CUBE) == layout.parse('data:S(0) tensor:S(1) fsdp:P')


@pytest.mark.parametrize(
  'text',
  'data|data:S|data:S(-1)|x:B|data:P data:P|data:S(0),tensor:P'.split('|'),
)
def test_wrong_texts(text):
  with pytest.raises(ValueError, match='data|mesh axis'):
    layout.parse(text)


def test_uneven_tensors_are_refused():
  a = layout.parse('tensor:S(1)')
  for shape, word in (((4, 6), '6'), ((4,), 'missing')):
    with pytest.raises(errors.UserError, match=f'is {word}, and tensor=4'):
      layout.plan(shape, 'f4', a, layout.parse('B'), SIZES)
  # An all-to-all to a dimension that does not divide is never planned.
  b = layout.parse('tensor:S(2)')
  steps = layout.plan((4, 4, 4, 3), 'f4', a, b, SIZES)
  assert [s.kind for s in steps] == ['all_to_all']


def test_only_inside_a_region():
  x = np.ones(SHAPE)
  assert layout.convert(x, layout.parse('tensor:P'), layout.parse('B')) is x
  with on(SIZES):
    with pytest.raises(ValueError, match='on_mesh'):
      layout.convert(jnp.zeros(SHAPE), layout.parse('B'), layout.parse('B'))
