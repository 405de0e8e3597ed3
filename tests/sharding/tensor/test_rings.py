"""Matmul rings: which sends depend on which products, dtypes, errors.

That they equal products of gathered arrays, and how much they send, is tested
in test_project.py and tests/train/claims/layouts/test_tensor.py.
Legend: B rows, T tokens, D model, F mlp, N heads, H head width.
"""

import re

import jax
from jax.extend import core
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from paraxis.sharding.tensor import rings

COLUMNS = ('BTD,DF->BTF', 'BTD,DNH->BTNH')
ROWS = 'BTF,FD->BTD'
LENGTH, WIDTH = P(None, 'tensor'), P(None, None, 'tensor')


def in_region(run, n, *specs):
  """run(local arrays) on n ranks of 'tensor'; results are local, too."""
  mesh = jax.sharding.Mesh(jax.devices()[:n], ('tensor',))
  return jax.shard_map(
    run, mesh=mesh, in_specs=specs, out_specs=P('tensor'), check_vma=False
  )


def gather(x, *weights, dtype=None):
  products = list(zip(COLUMNS, weights, strict=False))
  return rings.gather_matmul(x, products, 'tensor', 1, dtype)


def scatter(h, down):
  return rings.matmul_scatter(ROWS, h, down, 'tensor', 1)


def waits(jaxpr, before, found):
  """Adds (primitive, primitives before it) of a jaxpr's equations to found.

  before: of each argument, the primitives that it depends on.
  """
  known = dict(zip(jaxpr.invars, before, strict=True))
  get = lambda v: known.get(v, set()) if isinstance(v, core.Var) else set()
  for eqn in jaxpr.eqns:
    ins = [get(v) for v in eqn.invars]
    inner = [
      getattr(p, 'jaxpr', p)
      for p in eqn.params.values()
      if isinstance(p, core.Jaxpr | core.ClosedJaxpr)
    ]
    name = eqn.primitive.name
    if inner and len(inner[0].invars) == len(ins):
      outs = waits(inner[0], ins, found)
    else:
      found.append((name, set().union(*ins)))
      outs = [set().union({name}, *ins)] * len(eqn.outvars)
    known |= zip(eqn.outvars, outs, strict=True)
  return [get(v) for v in jaxpr.outvars]


def test_no_send_waits_for_the_product_next_to_it():
  """A gather's sends depend on no product, a scatter's products on no send."""

  def before(run, specs, shapes, primitive):
    args = [jnp.zeros(shape) for shape in shapes]
    jaxpr = jax.make_jaxpr(in_region(run, 4, *specs))(*args).jaxpr
    found = []
    waits(jaxpr, [set() for _ in args], found)
    found = [ins for name, ins in found if name == primitive]
    assert len(found) in (3, 4, 6, 8)
    return set().union(*found)

  columns = P(None, 'tensor')
  one = gather, (LENGTH, columns, columns), [(2, 8, 6), (6, 8), (6, 4, 2)]
  other = scatter, (WIDTH, P('tensor')), [(2, 8, 8), (8, 6)]
  assert 'dot_general' not in before(*one, 'ppermute')
  assert 'ppermute' not in before(*other, 'dot_general')
  # The products of a gather and the sends of a scatter do, of course.
  assert 'ppermute' in before(*one, 'dot_general')
  assert 'dot_general' in before(*other, 'ppermute')


def test_bfloat16_products_and_float32_sums():
  """Messages and products are bfloat16; dw is a float32 sum over all tokens."""
  rng = np.random.default_rng(0)
  n, t = 8, 1024
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  x, g = draw(1, t, 4), draw(1, t, 8)
  w, v = (draw(*shape).astype('f4') for shape in ((4, 8), (8, 4)))

  def run(x, w, g, v):
    (y,), (wide,) = gather(x, w), gather(x, w, dtype=jnp.float32)
    dx, (dw,) = rings.gather_matmul_gradients(
      x, [(COLUMNS[0], w)], (g,), 'tensor', 1
    )
    z = scatter(g, v)
    dg, dv = rings.matmul_scatter_gradients(ROWS, g, v, x, 'tensor', 1)
    return tuple(a[None] for a in (y, dx, dw, z, dg, dv, wide))

  run = in_region(run, n, LENGTH, P(None, 'tensor'), WIDTH, P('tensor'))
  y, dx, dw, z, dg, dv, wide = jax.jit(run)(x, w, g, v)
  assert {a.dtype for a in (y, dx, z, dg)} == {jnp.dtype(jnp.bfloat16)}
  assert {a.dtype for a in (dw, dv, wide)} == {jnp.dtype(jnp.float32)}
  messages = re.findall(
    r'(\w+)\[[^\n]*= ppermute', str(jax.make_jaxpr(run)(x, w, g, v))
  )
  assert set(messages) == {'bf16'}
  f8 = lambda a: np.asarray(a, np.float64)
  exact = np.einsum('BTD,BTF->DF', f8(x), f8(g))
  dw = np.concatenate(list(f8(dw)), -1)
  assert np.abs(dw - exact).max() < 1e-3
  rounded = f8(jnp.asarray(dw, jnp.bfloat16))
  assert np.abs(rounded - exact).max() > 1e-2  # what bfloat16 would cost
  dv = np.concatenate(list(f8(dv)), 0)
  assert np.abs(dv - exact.T).max() < 1e-3


GATHER = lambda x, w: rings.gather_matmul(x, [(COLUMNS[0], w)], 'tensor', 2)


@pytest.mark.parametrize(
  'run, words',
  [
    (('BTF,FD->BTD', 2), "'D' must be in the first operand"),
    (('BTF,FD->BFD', 1), "'F' must be in the first operand and in the"),
    (('BTF,FD->BTD', 1), "'T' has size 6, which 4 ranks of 'tensor'"),
    (GATHER, "'D' must be in"),
  ],
)
def test_what_no_ring_can_gather_or_scatter(run, words):
  if isinstance(run, tuple):
    equation, dim = run
    run = lambda x, w: rings.matmul_scatter(equation, x, w, 'tensor', dim)
  with pytest.raises(ValueError, match=words):
    in_region(run, 4, P(), P())(jnp.ones((1, 6, 4)), jnp.ones((4, 8)))
