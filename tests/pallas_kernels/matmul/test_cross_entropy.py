"""Cross-entropy without logits against its definition, with every gradient."""

import functools

import jax
from jax.extend import core
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.matmul import cross_entropy


def arrays(T=7, D=5, V=37, dtype='f8'):
  """(x_TD, w_VD), targets_T and cotangents of (nll, lse)."""
  rng = np.random.default_rng(0)
  x, w = 2 * rng.normal(size=(T, D)), rng.normal(size=(V, D))
  targets = rng.integers(0, V, T).astype(np.int32)
  cast = lambda *a: [np.asarray(b, dtype) for b in a]
  return cast(x, w), targets, cast(*rng.normal(size=(2, T)))


def dense(x, w, targets, softcap=0.0):
  """The definition, with all logits."""
  z = x @ w.T
  z = softcap * jnp.tanh(z / softcap) if softcap else z
  lse = jax.nn.logsumexp(z, -1)
  return lse - jnp.take_along_axis(z, targets[:, None], 1)[:, 0], lse


def both(fn, arrays, targets, cotangents, **options):
  """nll, lse, and gradients of x and w."""
  run = lambda x, w: fn(x, w, targets, **options)
  return kernel_cases.with_gradients(run, arrays, cotangents)


op = cross_entropy.linear_cross_entropy


@pytest.mark.parametrize(
  'chunk, softcap',
  [(0, 0.0), (37, 1.5), (8, 0.0), (12, 1.5)],  # 8: four and a shorter one
)
def test_equals_the_definition_in_float64(chunk, softcap):
  with jax.enable_x64(True):
    case = arrays()
    actual = both(op, *case, softcap=softcap, chunk=chunk)
    support.close(actual, both(dense, *case, softcap=softcap))
    assert {a.dtype for a in actual} == {np.dtype('f8')}
    with pytest.raises(AssertionError):
      support.close(actual, both(dense, *case, softcap=0.7), 1e-3)


def test_shapes_of_batches():
  with jax.enable_x64(True):
    (x, w), targets, _ = arrays(T=6)
    found = op(x.reshape(2, 3, 5), w, targets.reshape(2, 3), chunk=10)
    assert [a.shape for a in found] == [(2, 3), (2, 3)]
    support.close(tuple(a.ravel() for a in found), dense(x, w, targets))


def test_a_target_outside_finds_no_logit():
  (x, w), targets, _ = arrays(dtype='f4')
  nll, lse = op(x, w, targets + 1000, chunk=8)
  np.testing.assert_array_equal(nll, lse)


def test_large_logits_do_not_overflow():
  (x, w), *rest = arrays(dtype='f4')
  actual = both(op, (1000 * x, w), *rest, chunk=8)
  assert all(np.isfinite(a).all() for a in actual)


def test_low_precision():
  given, *rest = arrays(dtype='f4')
  low = [jnp.asarray(a, jnp.bfloat16) for a in given]
  actual = both(op, low, *rest, chunk=8)
  names = [a.dtype.name for a in actual]
  assert names == ['float32'] * 2 + ['bfloat16'] * 2
  expected = both(dense, [np.asarray(a, 'f4') for a in low], *rest)
  support.close(actual, expected, 0.05)


def temporary(V, run):
  """Bytes of temporaries of loss and gradients, of 256 tokens."""
  shapes = (256, 16), (V, 16), (256,)
  x, w, targets = (jax.ShapeDtypeStruct(s, 'f4') for s in shapes)
  targets = jax.ShapeDtypeStruct((256,), 'i4')
  loss = lambda x, w, targets: run(x, w, targets)[0].sum()
  program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, w, targets)
  return program.compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_vocabulary():
  run = functools.partial(op, chunk=128)
  small, large = temporary(1024, run), temporary(8192, run)
  logits = 256 * 8192 * 4
  assert large <= small + 4096 and large < logits / 8
  assert temporary(8192, dense) >= logits


@pytest.mark.parametrize('tokens', [130, 256, 300])  # 128 at a time
@pytest.mark.parametrize('chunk, softcap', [(0, 1.5), (8, 0.0)])
def test_blocks_of_tokens(monkeypatch, tokens, chunk, softcap):
  """Whole blocks, and a shorter last one."""
  monkeypatch.setattr(cross_entropy, 'BLOCK', 128)
  with jax.enable_x64(True):
    case = arrays(T=tokens)
    options = dict(softcap=softcap, chunk=chunk)
    found = both(op, *case, **options)
    support.close(found, both(dense, *case, softcap=softcap))
    monkeypatch.setattr(cross_entropy, '_put', lambda whole, rows, at: whole)
    with pytest.raises(AssertionError):
      support.close(both(op, *case, **options), found)


def test_blocks_in_low_precision(monkeypatch):
  given, *rest = arrays(T=300, dtype='f4')
  low = [jnp.asarray(a, jnp.bfloat16) for a in given]
  whole = both(op, low, *rest)
  monkeypatch.setattr(cross_entropy, 'BLOCK', 128)
  blocks = both(op, low, *rest)
  assert [a.dtype for a in blocks] == [a.dtype for a in whole]
  support.close(blocks[:3], whole[:3], 1e-6)  # of a token: the same sums
  support.close(blocks[3:], whole[3:], 0.01)


def products(jaxpr):
  """(bytes that its products read and write, numbers in its largest array)."""
  total = most = 0
  for e in jaxpr.eqns:
    trips = e.params.get('length', 1)
    assert e.primitive.name != 'while'  # it does not say how often
    for inner in core.jaxprs_in_params(e.params):
      moved, size = products(inner)
      total, most = total + trips * moved, max(most, size)
    if e.primitive.name == 'dot_general':
      total += sum(v.aval.size * v.aval.dtype.itemsize
                   for v in (*e.invars, *e.outvars))  # fmt: skip
    most = max(most, *(v.aval.size for v in e.outvars))
  return total, most


def counted(T, D):
  """`products` of the loss and its gradients, V 32,768."""
  shapes = ((T, D), 'bfloat16'), ((2**15, D), 'bfloat16'), ((T,), 'int32')
  loss = lambda x, w, targets: op(x, w, targets)[0].sum()
  made = jax.make_jaxpr(jax.grad(loss, (0, 1)))
  return products(made(*(jax.ShapeDtypeStruct(*s) for s in shapes)).jaxpr)


def test_a_token_moves_the_same_however_many_there_are(monkeypatch):
  """Chunks do not become narrower, nor are more than 2**24 logits held."""
  few, many = counted(2**14, 768)[0], counted(2**17, 768)[0]
  assert many == 8 * few
  assert counted(2**17 - 5, 768)[0] < 1.01 * many
  assert counted(2**18, 16)[1] == cross_entropy.LOGITS
  monkeypatch.setattr(cross_entropy, 'BLOCK', 2**30)  # negative
  assert counted(2**17, 768)[0] > 3 * many
  assert counted(2**18, 16)[1] == 2 * cross_entropy.LOGITS


def test_how_many_rows_at_a_time():
  of = cross_entropy.chunk_of
  assert of(8192, 50000) == 2048 and of(2**14, 50000) == 1024
  assert of(10**9, 50000) == 1024 and of(16, 1000) == 1000
  blocks = {2**14: 2**14, 2**14 + 1: 8320, 2**15: 2**14, 40000: 13440}
  assert {t: cross_entropy.block_of(t) for t in blocks} == blocks
  assert registry.resolve('cross_entropy').name == 'xla'


@pytest.mark.parametrize(
  'change, words',
  [
    (dict(x=np.ones((7, 4))), r'x \(7, 4\), w \(37, 5\)'),
    (dict(targets=np.ones(6, int)), r'targets \(6,\) do not fit'),
    (dict(softcap=-1.0), 'softcap is -1.0'),
  ],
)
def test_what_does_not_fit(change, words):
  (x, w), targets, _ = arrays()
  given = dict(x=x, w_VD=w, targets=targets) | change
  with pytest.raises(errors.UserError, match=words):
    op(**given)
