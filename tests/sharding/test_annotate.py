"""One code in three worlds: explicit, manual and without a mesh.

Legend: B rows, T tokens, D model, F mlp, V table rows.
"""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models import mlp
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib

B, T, D, F = 4, 6, 8, 12
# Tokens are sharded over tensor outside the matrices (arXiv:2205.05198).
SEQUENCE = rules_lib.Rules('sequence', {
  'batch': ('data', 'fsdp'), 'length': ('tensor',), 'embed': ('fsdp',),
  'mlp': ('tensor',), 'vocab': ('tensor',),
})  # fmt: skip
ROWS, WHOLE = ('batch', 'length', 'hidden'), ('batch', None, 'hidden')
WIDE = ('batch', None, 'mlp')
UP, DOWN = ('embed', 'mlp'), ('mlp', 'embed')


@pytest.fixture(autouse=True)
def _double():
  with jax.enable_x64(True):
    yield


@pytest.fixture
def cube():
  made = mesh_lib.make('data=2,fsdp=2,tensor=2')
  with annotate.use(SEQUENCE), jax.set_mesh(made):
    yield made


def block(x, up, down):
  """An mlp that moves its operands as every world needs them."""
  move, einsum = annotate.move, annotate.einsum
  up = move(up, UP, (None, 'mlp'))
  down = move(down, DOWN, ('mlp', None))
  h = einsum(
    'BTD,DF->BTF', move(x, ROWS, WHOLE), WHOLE, up, (None, 'mlp'), WIDE
  )
  h = jnp.tanh(h)
  return einsum('BTF,FD->BTD', h, WIDE, down, ('mlp', None), ROWS)


def arrays():
  rng = np.random.default_rng(0)
  return [rng.normal(size=s) for s in ((B, T, D), (D, F), (F, D))]


def loss(run, *args):
  y = run(*args)
  return (jnp.sin(y) * y).sum(), y


def evaluate(run, args):
  gradient = jax.value_and_grad(functools.partial(loss, run), (0, 1, 2), True)
  (value, y), grads = jax.jit(gradient)(*args)
  return [np.asarray(x) for x in (value, y, *grads)]


def specs():
  return tuple(map(annotate.spec, (ROWS, UP, DOWN)))


def placed(mesh):
  return [
    jax.device_put(x, jax.NamedSharding(mesh, s))
    for x, s in zip(arrays(), specs(), strict=True)
  ]


def compare(found, expected):
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_three_worlds_agree(cube):
  manual = jax.shard_map(block, in_specs=specs(), out_specs=specs()[0])
  args = placed(cube)
  found = {f.__name__: evaluate(f, args) for f in (block,)}
  found['manual'] = evaluate(manual, args)
  with jax.set_mesh(mesh_lib.make({}, jax.devices()[:1])):
    single = evaluate(block, arrays())
  x, up, down = arrays()
  y = np.tanh(x @ up) @ down
  dy = np.cos(y) * y + np.sin(y)
  h = np.tanh(x @ up)
  dh = dy @ down.T * (1 - h * h)
  by_hand = [
    (np.sin(y) * y).sum(), y, dh @ up.T,
    np.einsum('btd,btf->df', x, dh), np.einsum('btf,btd->fd', h, dy),
  ]  # fmt: skip
  for result in (*found.values(), single):
    compare(result, by_hand)


def test_without_a_mesh():
  assert annotate.mode() == 'none' and annotate.sizes() == {}
  x, up, down = arrays()
  compare([block(x, up, down)], [np.tanh(x @ up) @ down])
  assert annotate.put(x, ROWS) is x and annotate.move(x, ROWS, WHOLE) is x


def test_modes_and_sizes(cube):
  assert annotate.mode() == 'explicit'
  assert annotate.sizes() == dict(data=2, fsdp=2, tensor=2)
  assert annotate.shards('batch') == 4 and annotate.shards('hidden') == 1
  assert annotate.spec(ROWS, (B, T, D)) == P(('data', 'fsdp'), 'tensor', None)
  seen = []
  in_region(lambda x: seen.append(annotate.mode()), ROWS)
  assert seen == ['manual']


def test_use_is_undone():
  before = annotate._rules.get()
  with pytest.raises(KeyError), annotate.use(SEQUENCE):
    assert annotate._rules.get() is SEQUENCE
    raise KeyError
  assert annotate._rules.get() is before


def test_explicit_outputs_have_the_layout(cube):
  x, up, down = placed(cube)
  spec = lambda y: jax.typeof(y).sharding.spec
  y = jax.jit(block)(x, up, down)
  assert spec(y) == annotate.spec(ROWS)
  whole = annotate.move(x, ROWS, WHOLE)
  assert spec(whole) == annotate.spec(WHOLE)
  np.testing.assert_array_equal(whole, x)


def in_region(run, *names):
  """Traces run(local arrays) of arrays with these logical names (8 each)."""
  mesh, in_specs = jax.sharding.get_mesh(), tuple(map(annotate.spec, names))
  shapes = [
    jax.ShapeDtypeStruct(
      (8,) * len(s), 'f8', sharding=jax.NamedSharding(mesh, s)
    )
    for s in in_specs
  ]
  outer = jax.shard_map(
    lambda *a: (run(*a), jnp.zeros(()))[1], in_specs=in_specs, out_specs=P()
  )
  return jax.jit(outer).lower(*shapes)


@pytest.mark.parametrize(
  'equation, x, w, out, words',
  [
    # Doing nothing would leave a partial sum.
    ('BTF,FD->BTD', WIDE, ('mlp', None), WHOLE,
     "contracts 'F' over 'tensor', and no output dimension"),
    # Summed within one operand only.
    ('BTF,TD->BD', WIDE, (None, None), ('batch', 'hidden'), "contracts 'F'"),
    # Every device would hold other tokens of other columns.
    ('BTD,DF->BTF', ROWS, (None, 'mlp'), ('batch', 'length', 'mlp'),
     "'tensor' serves both 'length' and 'mlp'"),
    # The output's name claims a layout that nothing made.
    ('BTD,DF->BTF', WHOLE, (None, None), WIDE, "says ('tensor',); move"),
    ('BTD,DF->BTF', ROWS, (None, None), (*WHOLE[:2], None), 'move the operand'),
  ],
)  # fmt: skip
def test_manual_refuses_what_would_be_silently_wrong(
  cube, equation, x, w, out, words
):
  run = lambda a, b: annotate.einsum(equation, a, x, b, w, out)
  with pytest.raises(ValueError) as e:
    in_region(run, x, w)
  assert words in str(e.value)


def test_manual_refuses_to_scatter_by_a_move(cube):
  with pytest.raises(ValueError, match='can be gathered in a manual region'):
    in_region(lambda x: annotate.move(x, WHOLE, ROWS), WHOLE)


@pytest.mark.parametrize('name, fits', [('data', True), ('tensor', False)])
def test_the_mlp_of_the_model_in_a_region(name, fits):
  """It runs under rules that shard rows only, and refuses a partial sum."""
  module = mlp.Mlp(schema.Model(d_model=D, d_ff=F), nnx.Rngs(0))
  x = np.random.default_rng(0).normal(size=(8, T, D)).astype('f4')
  expected = np.asarray(module(jnp.asarray(x)))
  graph, state = nnx.split(module)
  params = {p[0]: v for p, v in nnx.to_flat_state(state)}

  def run(values, x):
    flat = [((n,), params[n].replace(v)) for n, v in values.items()]
    return nnx.merge(graph, nnx.from_flat_state(flat))(x)

  made = mesh_lib.make('data=2,fsdp=2,tensor=2')
  with annotate.use(rules_lib.preset(name)), jax.set_mesh(made):
    axes = {n: v.get_metadata('axes') for n, v in params.items()}
    names = ({n: annotate.spec(a) for n, a in axes.items()},
             annotate.spec(mlp.HIDDEN))  # fmt: skip
    put = lambda v, s: jax.device_put(np.asarray(v), jax.NamedSharding(made, s))
    args = {n: put(v[...], names[0][n]) for n, v in params.items()}
    region = jax.shard_map(run, in_specs=names, out_specs=names[1])
    if fits:
      found = jax.jit(region)(args, put(x, names[1]))
      np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    else:
      with pytest.raises(ValueError, match="contracts 'F' over 'tensor'"):
        jax.jit(region)(args, put(x, names[1]))


@pytest.mark.parametrize('names', [('vocab', 'hidden'), ('embed', 'hidden')])
def test_gather_of_a_sharded_table(cube, names):
  rng = np.random.default_rng(0)
  table, ids = rng.normal(size=(16, D)), rng.integers(0, 16, (B, T))
  weights = rng.normal(size=(B, T, D))

  def run(table, ids):
    y = annotate.gather(table, ids, WHOLE)
    return (y * weights).sum(), y

  put = lambda x, n: jax.device_put(
    x, jax.NamedSharding(cube, annotate.spec(n))
  )
  args = put(table, names), put(ids, WHOLE[:2])
  (_, y), grad = jax.jit(jax.value_and_grad(run, has_aux=True))(*args)
  assert jax.typeof(y).sharding.spec == annotate.spec(WHOLE)
  assert jax.typeof(grad).sharding.spec == annotate.spec(names)
  expected = np.zeros_like(table)
  np.add.at(expected, ids, weights)
  np.testing.assert_array_equal(y, table[ids])
  np.testing.assert_allclose(grad, expected, rtol=1e-12, atol=1e-12)


def test_like_varies_as_its_pattern(cube):
  x, _, _ = placed(cube)
  y = annotate.like(x, 3, jnp.int32)
  assert y.dtype == jnp.int32 and y.sharding == x.sharding and (y == 3).all()

  def run(x):
    start = annotate.like(x, 0)
    assert jax.typeof(start).mat.varying == jax.typeof(x).mat.varying
    return jax.lax.scan(lambda c, _: (c + x, None), start, None, 2)[0]

  spec = annotate.spec(ROWS)
  found = jax.jit(jax.shard_map(run, in_specs=spec, out_specs=spec))(x)
  np.testing.assert_allclose(found, 2 * np.asarray(x))


def test_the_weight_gradient_of_bfloat16_is_summed_in_float32():
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(4, 256, 8)), jnp.bfloat16)
  w = jnp.asarray(rng.normal(size=(8, 6)), jnp.float32)
  g = jnp.asarray(rng.normal(size=(4, 256, 6)), jnp.bfloat16)
  names = ('batch', 'length', 'hidden'), ('embed', 'mlp')
  out = ('batch', 'length', 'mlp')

  def y(w):
    return annotate.einsum('BTD,DF->BTF', x, names[0], w, names[1], out)

  dw = jax.vjp(y, w)[1](g)[0]
  exact = np.einsum('BTD,BTF->DF', *(np.asarray(a, np.float64) for a in (x, g)))
  error = lambda got: np.abs(np.asarray(got, np.float64) - exact).max()
  assert y(w).dtype == jnp.bfloat16 and dw.dtype == jnp.float32
  assert error(dw) < 1e-4
  assert error(dw.astype(jnp.bfloat16)) > 1e-3  # what rounding would cost
