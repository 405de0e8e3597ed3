"""A sharded vocabulary against one device: both losses, and the embedding.

(test_project.py compares lookups on every mesh.)
Legend: B rows, T tokens, D model, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import support

from paraxis.pallas_kernels.matmul import cross_entropy
from paraxis.sharding import annotate
from paraxis.sharding.tensor import vocabulary

B, T, D, V = 4, 8, 4, 20
X = ('batch', 'residual_length', 'hidden')
W = ('vocab', 'embed')
ROWS = ('batch', 'length')
NAMES = X, W, ROWS, ROWS


def arrays():
  """(x, w, targets, weights), whole."""
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=(B, T, D)), rng.normal(size=(V, D))
  return x, w, rng.integers(0, V, (B, T)), rng.normal(size=(B, T))


def reference(x, w, targets, weights, softcap):
  """[nll, dx, dw] of one device, with all logits."""

  def dense(x, w):
    z = jnp.einsum('BTD,VD->BTV', x, w)
    z = softcap * jnp.tanh(z / softcap) if softcap else z
    picked = jnp.take_along_axis(z, targets[..., None], 2)[..., 0]
    return jax.nn.logsumexp(z, -1) - picked

  nll, back = jax.vjp(dense, x, w)
  return [nll, *back(weights)]


def ours(softcap, chunk):
  """The same of functions of arrays in the layout in force."""

  def run(x, w, targets, weights):
    of = lambda x, w: vocabulary.linear_nll(x, X, w, W, targets, softcap, chunk)
    nll, back = jax.vjp(of, x, w)
    return nll, *back(weights)

  return run


def placed(arrays):
  """x, w, targets and weights, or the like, on the mesh in force."""
  return jax.device_put(arrays, tuple(map(annotate.spec, NAMES)))


@pytest.mark.parametrize(
  'mesh, fields, softcap, chunk',
  [
    ('data=1', {}, 1.5, 3),
    ('fsdp=2,context=2,tensor=2', {}, 0.0, 0),
    ('data=2,fsdp=2,tensor=2', {}, 1.5, 4),
    # The length is whole: dx is reduced, not scattered.
    ('data=2,tensor=4', dict(sequence=False), 0.0, 2),
    # Whole logits on every shard of the length.
    ('tensor=2', dict(rules='fsdp_tensor vocab='), 0.0, 7),
  ],
)
def test_equals_one_device(mesh, fields, softcap, chunk):
  given = arrays()
  with jax.enable_x64(True):
    wanted = jax.device_get(reference(*given, softcap))
    with support.laid_out(mesh, **fields):
      run = jax.jit(ours(softcap, chunk))
      found = run(*placed(given))
      laid_out = [jax.typeof(x).sharding.spec for x in found]
      assert laid_out == list(map(annotate.spec, (ROWS, X, W)))
      support.close(list(found), wanted)
      # A target more, of another word, is seen.
      x, w, targets, weights = given
      moved = (targets + (np.arange(T) == 3)) % V
      other = run(*placed((x, w, moved, weights)))
      with pytest.raises(AssertionError):
        support.close(list(other), wanted)


def in_a_region(mesh, sequence=True):
  """`ours` in a manual region, gradients summed over tokens by the caller."""

  def local(*arrays):
    nll, dx, dw = ours(0.0, 3)(*arrays)
    return nll, dx, jax.lax.psum(dw, 'data')

  with support.laid_out(mesh, sequence=sequence):
    region = annotate.region(local, NAMES, (ROWS, X, W))
    return jax.device_get(jax.jit(region)(*placed(arrays())))


def test_in_a_manual_region():
  with jax.enable_x64(True):
    found = in_a_region('data=2,fsdp=2,tensor=2')
    support.close(list(found), reference(*arrays(), 0.0))


def test_blocks_of_the_tokens_of_a_shard(monkeypatch):
  """8 or 4 tokens on a device, 3 at a time, and their parts of a vocabulary."""
  monkeypatch.setattr(cross_entropy, 'BLOCK', 3)
  monkeypatch.setattr(cross_entropy, 'LANES', 1)
  with jax.enable_x64(True):
    wanted = reference(*arrays(), 0.0)
    support.close(list(in_a_region('data=2,fsdp=2,tensor=2')), wanted)
    wanted = jax.device_get(wanted)
    with support.laid_out('fsdp=2,context=2,tensor=2'):
      found = jax.jit(ours(0.0, 0))(*placed(arrays()))
      support.close(list(found), wanted)


def test_a_sum_that_nothing_takes_is_an_error():
  with pytest.raises(ValueError, match=r"a sum over \['tensor'\]"):
    in_a_region('data=2,tensor=2', sequence=False)


def plain(z, targets, seed):
  """(nll, dz) of whole logits in NumPy."""
  p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
  hit = np.eye(z.shape[-1])[targets]
  return -np.log((p * hit).sum(-1)), seed[..., None] * (p - hit)


def of_logits(z, targets):
  """(nll, dz, seed) of logits over 2 x 2 ranks, seeded with 1, 2, 3, ..."""
  seed = 1.0 + np.arange(z.shape[0] * z.shape[1]).reshape(z.shape[:2])
  axes = 'context', 'tensor'

  def run(z, targets):
    out, vjp = jax.vjp(lambda z: vocabulary.nll(z, targets, axes), z)
    return out[None], vjp(jnp.asarray(seed, out.dtype))[0]

  columns = P(None, None, axes)
  run = jax.shard_map(
    run,
    mesh=jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), axes),
    in_specs=(columns, P()),
    out_specs=(P(axes), columns),
    check_vma=False,
  )
  with jax.enable_x64(True):
    out, dz = jax.device_get(jax.jit(run)(z, targets))
  return out, dz, seed


def padded():
  """(z, targets): rank 2 holds one column of the vocabulary, rank 3 none."""
  rng = np.random.default_rng(0)
  z, targets = rng.normal(size=(B, T, 16)), rng.integers(0, 9, (B, T))
  z[..., 9:] = -np.inf
  return z, targets


def test_columns_that_pad_the_vocabulary_have_no_share():
  z, targets = padded()
  out, dz, seed = of_logits(z, targets)
  wanted, gradient = plain(z, targets, seed)
  np.testing.assert_allclose(out, np.broadcast_to(wanted, out.shape), 1e-12)
  np.testing.assert_allclose(dz, gradient, rtol=0, atol=1e-12)
  assert (dz[..., 9:] == 0).all()


BACKWARD = vocabulary.nll.bwd


@pytest.mark.parametrize(
  'owner, name, broken, nll_is_right',
  [
    (jax.lax, 'psum', lambda x, axis: x, False),
    (jax.lax, 'pmax', lambda x, axis: x, False),
    (vocabulary.nll, 'bwd', lambda a, kept, g: BACKWARD(a, kept, 2 * g), True),
  ],
  ids=['sums are local', 'maximum is local', 'cotangent counts twice'],
)
def test_a_broken_reduction_is_found(
  monkeypatch, owner, name, broken, nll_is_right
):
  monkeypatch.setattr(owner, name, broken)
  z, targets = padded()
  out, dz, seed = of_logits(z, targets)
  wanted, gradient = plain(z, targets, seed)
  assert np.allclose(out, wanted) == nll_is_right
  assert not np.allclose(dz, gradient)


def test_logits_far_apart_and_in_bfloat16():
  z = np.zeros((1, 2, 8))
  z[0, 0, 1], z[0, 1, 6] = 900.0, -900.0
  wanted = 4 * [[[0.0, 900 + np.log(7)]]]
  out, dz, _ = of_logits(z, np.array([[1, 6]]))
  np.testing.assert_allclose(out, wanted, rtol=1e-12)
  assert np.isfinite(dz).all()
  out, dz, _ = of_logits(jnp.asarray(z, jnp.bfloat16), np.array([[1, 6]]))
  assert out.dtype == jnp.float32 and dz.dtype == jnp.bfloat16
  np.testing.assert_allclose(out, wanted, rtol=1e-6)


def test_ids_outside_the_vocabulary():
  """What the documentation says: log sum exp, and rows of zeros."""
  out, dz, seed = of_logits(np.zeros((1, 2, 8)), np.array([[-1, 8]]))
  np.testing.assert_allclose(out, np.full((4, 1, 2), np.log(8)))
  np.testing.assert_allclose(dz.sum(-1), seed)
  run = jax.shard_map(
    lambda table, ids: vocabulary.embedding(table, ids, 'tensor'),
    mesh=jax.sharding.Mesh(jax.devices()[:2], ('tensor',)),
    in_specs=(P('tensor'), P()),
    out_specs=P(None, 'tensor'),
    check_vma=False,
  )
  table = np.arange(1.0, 17, dtype='f4').reshape(8, 2)
  rows = jax.jit(run)(table, np.array([[-1, 7, 8, 0]]))
  np.testing.assert_array_equal(rows[0], [[0, 0], [15, 16], [0, 0], [1, 2]])
