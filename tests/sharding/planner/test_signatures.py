"""Signatures: a local einsum and its conversions equal the global einsum."""

import functools
import itertools

import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.planner import conversions as layout
from paraxis.sharding.planner import signatures

pytestmark = pytest.mark.usefixtures('float64')

SIZES = dict(data=2, tensor=4)
PAIR = signatures.Signature
at = layout.parse


def on_devices(equation, x, w, given, used):
  """The einsum of x and w, which with y are laid out as `given` (a Signature of
  SbpLayouts), computed in the layouts `used`; terms of y are added."""

  def run(x, w):
    x = layout.convert(x, given.x, used.x)
    w = layout.convert(w, given.w, used.w)
    y = layout.convert(jnp.einsum(equation, x, w), used.y, given.y)
    return y[None] if given.y.partial else y

  specs = given.x.spec(x.ndim), given.w.spec(w.ndim)
  out = given.y.spec(len(equation.split('->')[1]))
  with jax.set_mesh(mesh_lib.make(SIZES)):
    f = jax.shard_map(run, in_specs=specs, out_specs=out, check_vma=False)
    y = np.asarray(jax.jit(f)(*jax.device_put((x, w), specs)))
  return y.sum(0) if given.y.partial else y


def random_layout(draw, ndim, terms):
  """Any placement of each axis, in any order."""
  kinds = ['B', *(f'S({d})' for d in range(ndim)), *['P'] * terms]
  axes = draw(strategies.permutations(list(SIZES)))
  return layout.of({a: draw(strategies.sampled_from(kinds)) for a in axes})


@strategies.composite
def products(draw):
  """(equation, layouts of x, w and y, layouts that it may run in)."""
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
  given = PAIR(*start, random_layout(draw, len(y), True))
  return equation, given, PAIR(*used)


@hypothesis.settings(
  max_examples=15, deadline=None, derandomize=True, database=None
)
@hypothesis.given(products())
def test_any_product_in_any_signature(case):
  equation, given, used = case
  held = signatures.letters(equation)
  rng = np.random.default_rng(0)
  x, w = (rng.normal(size=(8,) * len(h)) for h in held[:2])
  found = on_devices(equation, x, w, given, used)
  expected = np.einsum(equation, x, w)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


def test_matrix_products_are_oneflow_table_1():
  assert sorted(signatures.signatures('ab,bc->ac')) == sorted(
    [
      ('S(0)', 'B', 'S(0)'),
      ('B', 'S(1)', 'S(1)'),
      ('S(1)', 'S(0)', 'P'),
      ('P', 'B', 'P'),
      ('B', 'P', 'P'),
      ('B', 'B', 'B'),
    ]
  )


def test_what_is_no_signature_is_wrong():
  """A product of terms with blocks, run all the same, is another number."""
  x, w = np.random.default_rng(0).normal(size=(2, 8, 8))
  given = PAIR(at('tensor:S(1)'), at('B'), at('B'))
  used = PAIR(at('tensor:P'), at('tensor:S(1)'), at('tensor:S(1)'))
  found = on_devices('ab,bc->ac', x, w, given, used)
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
  assert not any(c.layouts.x['tensor'] == 'S(0)' for c in found)
  assert any(c.layouts.x['data'] == 'S(0)' for c in found)


@pytest.mark.parametrize(
  'equation',
  'ab->a|aa,ab->b|ab,bc|ab,bc->ad|a...,ab->b|ab,bc->aa'.split('|'),
)
def test_other_equations_are_refused(equation):
  with pytest.raises(ValueError, match='two operands'):
    signatures.signatures(equation)
