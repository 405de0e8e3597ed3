"""Signatures: a local einsum and its conversions equal the global einsum."""

import functools
import itertools

import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.planner import conversions as layout
from paraxis.sharding.planner import signatures

pytestmark = pytest.mark.usefixtures('float64')

SIZES = dict(data=2, tensor=4)
PAIR = signatures.Signature
at = layout.parse


def on_devices(equation, x, w, ways):
  """einsum by ways = Layouts of x, w as they are, as used, and y as used,
  wanted: what the devices hold in the end, terms stacked."""
  x_at, w_at, x_used, w_used, y_used, y_at = ways

  def run(x, w):
    x = layout.convert(x, x_at, x_used)
    w = layout.convert(w, w_at, w_used)
    return layout.convert(jnp.einsum(equation, x, w), y_used, y_at)

  mesh = mesh_lib.make(SIZES)
  ndim = len(equation.split('->')[1])
  specs = x_at.spec(x.ndim), w_at.spec(w.ndim)
  with jax.set_mesh(mesh):
    args = [
      jax.device_put(v, jax.NamedSharding(mesh, s))
      for v, s in zip((x, w), specs, strict=True)
    ]
    whole = P(y_at.partial, *layout.SbpLayout(y_at.splits).spec(ndim))
    stack = lambda x, w: run(x, w)[None]
    f = jax.shard_map(stack, in_specs=specs, out_specs=whole, check_vma=False)
    return np.asarray(jax.jit(f)(*args)).sum(0)


def random_layout(draw, ndim, terms):
  """Any placement of each axis, in any order."""
  kinds = [layout.Broadcast(), *map(layout.Split, range(ndim))]
  kinds += [layout.Partial()] if terms else []
  axes = draw(strategies.permutations(list(SIZES)))
  return layout.of({a: draw(strategies.sampled_from(kinds)) for a in axes})


@strategies.composite
def products(draw):
  """(equation, six Layouts): a product, and a legal way to run it."""
  some = lambda least, most, pool: ''.join(
    draw(strategies.permutations(pool))[
      : draw(strategies.integers(least, most))
    ]
  )
  x, w = some(1, 3, 'abcd'), some(1, 3, 'abcd')
  y = some(0, 3, sorted({*x, *w}))
  equation = f'{x},{w}->{y}'
  ways = {
    a: draw(strategies.sampled_from(signatures.signatures(equation)))
    for a in draw(strategies.permutations(list(SIZES)))
  }
  used = [layout.of({a: s[i] for a, s in ways.items()}) for i in range(3)]
  start = [random_layout(draw, len(held), False) for held in (x, w)]
  return equation, (*start, *used, random_layout(draw, len(y), True))


@hypothesis.settings(
  max_examples=15, deadline=None, derandomize=True, database=None
)
@hypothesis.given(products())
def test_any_product_in_any_signature(case):
  equation, ways = case
  assert signatures.infer(equation, ways[2], ways[3]) == ways[4]
  held = signatures.letters(equation)
  rng = np.random.default_rng(0)
  x, w = (rng.normal(size=(8,) * len(h)) for h in held[:2])
  found = on_devices(equation, x, w, ways)
  expected = np.einsum(equation, x, w)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


def test_matrix_products_are_oneflow_table_1():
  texts = [
    [str(layout.of({'tensor': p})) for p in s]
    for s in signatures.signatures('ab,bc->ac')
  ]
  rows = [[t.removeprefix('tensor:') for t in row] for row in texts]
  assert sorted(map(tuple, rows)) == sorted(
    [
      ('S(0)', 'B', 'S(0)'),
      ('B', 'S(1)', 'S(1)'),
      ('S(1)', 'S(0)', 'P'),
      ('P', 'B', 'P'),
      ('B', 'P', 'P'),
      ('B', 'B', 'B'),
    ]
  )


@pytest.mark.parametrize(
  'x, w, y',
  [
    ('data:S(0)', 'tensor:S(1)', 'data:S(0) tensor:S(1)'),
    ('data:S(0) tensor:S(1)', 'tensor:S(0)', 'data:S(0) tensor:P'),
    ('data:P', 'tensor:S(1)', 'data:P tensor:S(1)'),
    ('data:S(1) tensor:S(1)', 'data:S(0) tensor:S(0)', 'data:P tensor:P'),
    # The negatives: what would be silently wrong has no layout.
    ('tensor:P', 'tensor:S(1)', None),
    ('tensor:P', 'tensor:P', None),
    ('tensor:S(1)', 'B', None),
    ('tensor:S(0)', 'tensor:S(1)', None),
    ('data:S(1) tensor:S(1)', 'tensor:S(0) data:S(0)', None),
  ],
)
def test_infer(x, w, y):
  found = signatures.infer('ab,bc->ac', at(x), at(w))
  assert found == (y if y is None else at(y))


def test_what_infer_refuses_is_wrong():
  """A product of terms with blocks, run all the same, is another number."""
  x, w = np.random.default_rng(0).normal(size=(2, 8, 8))
  ways = ('tensor:S(1)', 'B', 'tensor:P', 'tensor:S(1)', 'tensor:S(1)', 'B')
  found = on_devices('ab,bc->ac', x, w, [*map(at, ways)])
  assert np.abs(found - x @ w).max() > 0.1


COLUMNS, ROWS = 'tensor:S(1)', 'tensor:S(0)'  # of a weight
SHAPES = (1024, 256), (256, 1024)  # rows and width; width and mlp


def test_the_cheapest_choice():
  """With weights where they are, activations move least."""
  cheap = functools.partial(
    signatures.cheapest, 'ab,bc->ac', SHAPES, dtype='f4', sizes=dict(tensor=4)
  )
  # Column: nothing moves, the work is a fourth.
  best = cheap(PAIR(at('B'), at('tensor:S(1)'), None))
  assert best.bytes == 0 and best.work == 1024 * 256 * 1024 // 4
  assert best.layouts.y == at('tensor:S(1)')
  # Row: the sum of terms where one layout of y is asked for, none else.
  row = PAIR(at('tensor:S(1)'), at('tensor:S(0)'), None)
  assert cheap(row).layouts.y == at('tensor:P')
  assert cheap(row).bytes == 0
  # Where all of y is asked for, operands a quarter of its size move instead:
  # bytes decide, work only between equals.
  asked = cheap(row._replace(y=at('B')))
  assert asked.bytes == 2 * 3 / 4 * 1024 * 256 * 4
  assert asked.layouts == PAIR(at('B'), at('B'), at('B'))


def pair(rows, width, mlp, ends):
  """{weight layouts: bytes} of f(x a) b over tensor=4; x and y laid out `ends`.

  f is not linear, so its input is no sum of terms.
  """
  cheap = functools.partial(
    signatures.cheapest, 'ab,bc->ac', dtype='f4', sizes=dict(tensor=4)
  )
  out, splits, ends = {}, (COLUMNS, ROWS), at(ends)
  for a, b in itertools.product(splits, repeat=2):
    out[a, b] = min(
      cheap(((rows, width), (width, mlp)), PAIR(ends, at(a), middle)).bytes
      + cheap(((rows, mlp), (mlp, width)), PAIR(middle, at(b), ends)).bytes
      for middle in map(at, ('B', *splits))
    )
  return out


@pytest.mark.parametrize('ends', ['B', 'tensor:S(0)'])
def test_two_products_choose_columns_then_rows(ends):
  """Megatron's mlp (arXiv:1909.08053, section 3): one all-reduce of y.

  With tokens split too, it is gathered and scattered (arXiv:2205.05198): the
  same bytes.
  """
  found = pair(rows=256, width=1024, mlp=4096, ends=ends)
  y = 256 * 1024 * 4
  assert found.pop((COLUMNS, ROWS)) == 2 * 3 / 4 * y
  assert min(found.values()) > 2 * 2 * 3 / 4 * y


def test_with_more_tokens_than_weights_the_weights_move():
  """Tokens stay where they are, weights are gathered: ZeRO stage 3."""
  found = pair(rows=65536, width=1024, mlp=4096, ends='tensor:S(0)')
  assert set(found.values()) == {3 / 4 * 2 * 1024 * 4096 * 4}


def test_choices_divide_and_are_sorted():
  found = signatures.choices(
    'ab,bc->ac', ((6, 8), (8, 8)), PAIR(at('B'), at('B'), None), 'f4', SIZES
  )
  assert [c[:2] for c in found] == sorted(c[:2] for c in found)
  assert not any(c.layouts.x['tensor'] == layout.Split(0) for c in found)
  assert any(c.layouts.x['data'] == layout.Split(0) for c in found)


@pytest.mark.parametrize(
  'equation',
  'ab->a|aa,ab->b|ab,bc|ab,bc->ad|a...,ab->b|ab,bc->aa'.split('|'),
)
def test_other_equations_are_refused(equation):
  with pytest.raises(ValueError, match='two operands'):
    signatures.signatures(equation)
