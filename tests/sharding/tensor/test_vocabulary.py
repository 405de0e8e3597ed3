"""The loss of a sharded vocabulary without logits, against one device.

(nll of logits and the embedding are tested in test_tensor.py, with the products
around them.) Legend: B rows, T tokens, D model, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.tensor import vocabulary

B, T, D, V = 4, 8, 4, 20
X = ('batch', 'residual_length', 'hidden')
W = ('vocab', 'embed')
ROWS = ('batch', 'length')


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


def on(mesh, preset, sequence=True):
  """(mesh, rules) of some of the devices."""
  sizes = mesh_lib.parse(mesh)
  made = mesh_lib.make(mesh, jax.devices()[: np.prod(list(sizes.values()))])
  options = schema.Mesh(rules=preset, sequence=sequence)
  return made, rules_lib.of(options, dict(made.shape), 1)


def close(found, wanted):
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
  'mesh, rules, softcap, chunk',
  [
    ('data=1', {}, 1.5, 3),
    ('fsdp=2,context=2,tensor=2', {}, 0.0, 0),
    ('data=2,fsdp=2,tensor=2', {}, 1.5, 4),
    # The length is whole: dx is reduced, not scattered.
    ('data=2,tensor=4', dict(sequence=False), 0.0, 2),
    # Whole logits on every shard of the length.
    ('tensor=2', dict(preset='fsdp_tensor vocab='), 0.0, 7),
  ],
)
def test_equals_one_device(mesh, rules, softcap, chunk):
  made, rules = on(mesh, **dict(preset='fsdp_tensor') | rules)
  given = arrays()
  with jax.enable_x64(True):
    wanted = jax.device_get(reference(*given, softcap))
    with annotate.use(rules), jax.set_mesh(made):
      names = X, W, ROWS, ROWS
      specs = [annotate.spec(n) for n in names]
      put = lambda x, s: jax.device_put(x, jax.NamedSharding(made, s))
      run = jax.jit(ours(softcap, chunk))
      found = run(*map(put, given, specs))
      laid_out = [jax.typeof(x).sharding.spec for x in found]
      assert laid_out == [specs[2], *specs[:2]]
      close(found, wanted)
      # A target more, of another word, is seen.
      x, w, targets, weights = given
      moved = (targets + (np.arange(T) == 3)) % V
      other = run(*map(put, (x, w, moved, weights), specs))
      with pytest.raises(AssertionError):
        close(other, wanted)


def in_a_region(mesh, sequence=True):
  """`ours` in a manual region, gradients summed over tokens by the caller."""
  made, rules = on(mesh, 'fsdp_tensor', sequence)

  def local(*arrays):
    nll, dx, dw = ours(0.0, 3)(*arrays)
    return nll, dx, jax.lax.psum(dw, 'data')

  def run(*arrays):
    with annotate.use(rules), jax.set_mesh(made):
      specs = tuple(map(annotate.spec, (X, W, ROWS, ROWS)))
      put = lambda x, s: jax.device_put(x, jax.NamedSharding(made, s))
      region = jax.shard_map(
        local,
        in_specs=specs,
        out_specs=(specs[2], *specs[:2]),
        check_vma=False,
      )
      return jax.device_get(jax.jit(region)(*map(put, arrays, specs)))

  return run


def test_in_a_manual_region():
  with jax.enable_x64(True):
    found = in_a_region('data=2,fsdp=2,tensor=2')(*arrays())
    close(found, reference(*arrays(), 0.0))


def test_a_sum_that_nothing_takes_is_an_error():
  with pytest.raises(ValueError, match=r"a sum over \['tensor'\]"):
    in_a_region('data=2,tensor=2', sequence=False)(*arrays())
