"""bfloat16 on CPU: arrays are not converted whole, products still compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.sharding.meter import compiling
from paraxis.sharding.meter import narrow

STACK = 'f32[7,16,8]'  # what the scan below keeps, if it were converted
CONVERTS = pytest.mark.skipif(
  not narrow._converts(), reason='this XLA converts no array whole'
)


def _scanned(w, x):
  """The loss of seven layers, products with float32 results."""

  def layer(x, w):
    y = jnp.einsum('bd,df->bf', x, w, preferred_element_type=jnp.float32)
    return jnp.tanh(y.astype(x.dtype)), None

  return jax.lax.scan(layer, x, w)[0].astype(jnp.float32).sum()


def _arguments(dtype=jnp.bfloat16):
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape) / 3
  both = draw(0, 7, 8, 8), draw(1, 16, 8)
  return tuple(x.astype(jnp.bfloat16).astype(dtype) for x in both)


def _gradient():
  return compiling.compile_step('g', jax.grad(_scanned), *_arguments())


@CONVERTS
def test_what_a_scan_keeps_is_not_converted(monkeypatch):
  """With the pass it is, at every layer."""
  assert STACK not in _gradient().as_text()
  monkeypatch.setattr(narrow, 'needed', lambda: False)
  assert STACK in _gradient().as_text()


def test_gradients_are_as_near_to_those_in_float32(monkeypatch):
  wide = jax.grad(_scanned)(*_arguments(jnp.float32))
  found = [_gradient()(*_arguments())]
  monkeypatch.setattr(narrow, 'needed', lambda: False)
  found.append(_gradient()(*_arguments()))
  without, usual = (
    np.linalg.norm(np.asarray(x, np.float32) - wide) for x in found
  )
  assert 0 < without < 1.2 * usual < 0.05 * np.linalg.norm(wide)


def _product(x):
  return x @ x.T


def _softplus(x):
  """A loop so small that XLA does not fuse it."""
  return jax.lax.scan(lambda c, v: (jax.nn.softplus(c) + v, c), x[0], x)[1]


def _ragged(x):
  return jax.lax.ragged_dot(x, x[None], jnp.array([4]))


def _solved(x):
  return jax.lax.linalg.triangular_solve(x, x)


def _nested(x):
  return jax.lax.cond(x[0, 0] > 0, lambda: _product(x), lambda: 0 * _product(x))


@CONVERTS
@pytest.mark.parametrize(
  'function', [_product, _nested, _softplus, _ragged, _solved]
)
def test_a_program_with_what_xla_lacks_keeps_the_pass(function):
  """It does not compile without; in float32 it does."""
  x = jnp.ones((4, 4), jnp.bfloat16)
  traced = jax.jit(function).trace(x)
  assert narrow.options(traced.jaxpr) == {}
  made = compiling.compile_step('p', function, x)
  assert np.isfinite(np.asarray(made(x), np.float32)).all()
  with pytest.raises(jax.errors.JaxRuntimeError):
    traced.lower().compile(narrow._WITHOUT)(x)
  wide = jax.jit(function).trace(x.astype(jnp.float32))
  assert narrow.options(wide.jaxpr) == {}


@CONVERTS
def test_programs_of_several_devices_keep_the_pass():
  traced = jax.jit(_scanned).trace(*_arguments())
  mesh = jax.make_mesh((2,), ('data',), (jax.sharding.AxisType.Explicit,))
  with jax.set_mesh(mesh):
    assert not narrow.needed() and narrow.options(traced.jaxpr) == {}
  assert narrow.needed() and narrow.options(traced.jaxpr) == narrow._WITHOUT


def test_passes_that_are_named_stay(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--xla_disable_hlo_passes=cse')
  assert not narrow.needed()


def test_a_level_that_is_named_leaves_the_pass_out_too(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--xla_backend_optimization_level=3')
  jaxpr = jax.jit(_scanned).trace(*_arguments()).jaxpr
  wanted = narrow._WITHOUT if narrow._converts() else None
  assert compiling.options(jaxpr) == wanted and compiling.options() is None


def test_programs_that_run_once_keep_the_pass():
  """They are compiled by emitters that lack functions of bfloat16."""
  with compiling.quickly():
    made = compiling.jit_for('bfloat16')(jnp.log1p)
    assert made(jnp.zeros(3, jnp.bfloat16)).sum() == 0
    jaxpr = jax.jit(_scanned).trace(*_arguments()).jaxpr
    assert compiling.options(jaxpr) == compiling.options()


def test_float32_is_traced_once():
  assert compiling.jit_for('float32').func is jax.jit


@CONVERTS
def test_each_program_of_a_function_has_its_own_options():
  """Names, static arguments and donation are jax.jit's."""
  traces = []

  def function(x, product):
    traces.append(product)
    return _product(x) if product else x + 1

  made = compiling.jit_for('bfloat16')(
    function, static_argnames='product', donate_argnums=0
  )
  x = lambda: jnp.ones((4, 4), jnp.bfloat16)
  for _ in range(2):
    assert (made(x(), product=True) == 4).all()
    given = x()
    assert (made(given, product=False) == 2).all() and given.is_deleted()
  assert made._cache_size() == 2 and traces == [True, False]
  assert 'dot(' in made.lower(x(), product=True).compile().as_text()
  assert len(made._of) == 2
  kinds = [{narrow._FLAG} & set(dict(k)) for k in made._made]
  assert kinds == [set(), {narrow._FLAG}]


def test_programs_in_float32_are_not_concerned(monkeypatch):
  """Nothing is compiled to see whether XLA converts."""
  monkeypatch.setattr(narrow, 'needed', lambda: pytest.fail('it is asked'))
  jaxpr = jax.jit(jax.grad(_scanned)).trace(*_arguments(jnp.float32)).jaxpr
  assert narrow.options(jaxpr) == {}


def test_signatures_tell_programs_apart():
  """Values of arrays do not count; anything else may be static."""
  of = lambda *args, **named: compiling._signature(args, named)
  x = jnp.ones(3)
  assert of(x, np.int32(1)) == of(x + 1, np.int32(2))
  others = [
    of(x, 1), of(x, 1.0), of(x, True), of(x, n=1), of(x[:2], 1),
    of(x.astype(jnp.bfloat16), 1), of((x, 1)), of(x, np.int32(1)),
    of(x, jnp.asarray(1)), of(x, jnp.int32(1)),
  ]  # fmt: skip
  assert len(set(others)) == len(others) - 1  # NumPy's and jax's int32
  mesh = jax.make_mesh((2,), ('data',), (jax.sharding.AxisType.Explicit,))
  with jax.set_mesh(mesh):
    assert of(x, 1) not in others
