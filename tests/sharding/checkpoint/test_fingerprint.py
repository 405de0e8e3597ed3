"""Fingerprints: equal on every layout, different after any damage."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.meter import compiled

EXPLICIT = (jax.sharding.AxisType.Explicit,) * 2
AUTO = (jax.sharding.AxisType.Auto,) * 2


def mesh(shape, kinds=EXPLICIT):
  count = int(np.prod(shape))
  return jax.make_mesh(
    shape, ('data', 'tensor'), kinds, devices=jax.devices()[:count]
  )


def leaves():
  rng = np.random.default_rng(0)
  return {
    'a/float32': rng.standard_normal((8, 24)).astype(np.float32),
    'a/bfloat16': rng.standard_normal((4, 8, 8)).astype(jnp.bfloat16),
    'a/float16': rng.standard_normal((16,)).astype(np.float16),
    'b/int32': rng.integers(-9, 9, (8, 8)).astype(np.int32),
    'b/uint8': rng.integers(0, 255, (64,)).astype(np.uint8),
    'b/bool': rng.integers(0, 2, (8, 8)).astype(bool),
    'b/float8': rng.standard_normal((8, 8)).astype(jnp.float8_e4m3fn),
    'c/scalar': np.asarray(3.5, np.float32),
    'c/step': np.asarray(7, np.uint32),
    'c/empty': np.zeros((0, 8), np.float32),
  }


def mixed(x):
  x ^= x >> 16
  x = x * 0x85EBCA6B % 2**32
  x ^= x >> 13
  x = x * 0xC2B2AE35 % 2**32
  return x ^ x >> 16


def reference(x):
  """The equation of the module, element by element in Python integers."""
  bits = x.view(f'u{min(x.dtype.itemsize, 4)}')
  if x.dtype.itemsize == 8:
    bits = bits.reshape(x.shape + (2,))
  word1 = word2 = 0
  for index in np.ndindex(bits.shape):
    s, t = 0x9E3779B9, 0x7F4A7C15
    for axis, i in enumerate(index):
      i = (i + axis * 0x27D4EB2F) % 2**32
      s, t = s + mixed(i), t + mixed(i ^ 0xFFFFFFFF)
    h = mixed(int(bits[index]) ^ s % 2**32)
    word1, word2 = word1 + h, word2 + h * (t % 2**32 | 1)
  return f'{word1 % 2**32:08x}{word2 % 2**32:08x}'


def place(tree, m):
  """Shards the last axis over tensor and the first over data, where it fits."""

  def spec(x):
    parts = [None] * x.ndim
    if x.ndim and x.shape[0] % m.shape['data'] == 0:
      parts[0] = 'data'
    if x.ndim > 1 and x.shape[-1] % m.shape['tensor'] == 0:
      parts[-1] = 'tensor'
    return NamedSharding(m, P(*parts))

  return {k: jax.device_put(x, spec(x)) for k, x in tree.items()}


@pytest.mark.invariant(4)
def test_equal_to_the_equation_on_every_mesh():
  tree = leaves()
  wanted = {k: reference(x) for k, x in tree.items() if x.size}
  wanted['c/empty'] = '0' * 16
  assert fingerprint.fingerprint(tree) == wanted
  for shape, kinds in [
    ((1, 1), EXPLICIT),
    ((8, 1), EXPLICIT),
    ((2, 4), EXPLICIT),
    ((2, 2), AUTO),
    ((4, 2), AUTO),
  ]:
    m = mesh(shape, kinds)
    assert fingerprint.fingerprint(place(tree, m)) == wanted, shape
  with jax.set_mesh(mesh((2, 4))):
    assert fingerprint.fingerprint(place(tree, mesh((2, 4)))) == wanted


def test_eight_byte_types():
  rng = np.random.default_rng(1)
  tree = {
    'f': rng.standard_normal((4, 6)),
    'i': rng.integers(-(2**62), 2**62, (8,)),
  }
  with jax.enable_x64(True):
    placed = place(tree, mesh((2, 2)))
    assert placed['f'].dtype == jnp.float64
    got = fingerprint.fingerprint(placed)
    tree['i'][3] += 2**40  # a change in the upper half only
    assert fingerprint.fingerprint(place(tree, mesh((2, 2))))['i'] != got['i']
  assert got['f'] == reference(tree['f'])


def test_every_single_bit_flip_is_seen():
  host = leaves()
  for name in ['a/float32', 'a/bfloat16', 'b/bool', 'c/scalar']:
    x = host[name]
    before = fingerprint.fingerprint({name: x})[name]
    rng = np.random.default_rng(2)
    for _ in range(25):
      raw = bytearray(x.tobytes())
      bit = 1 if x.dtype == bool else 1 << rng.integers(8)
      raw[rng.integers(len(raw))] ^= bit
      flipped = np.ndarray(x.shape, x.dtype, bytes(raw))
      after = fingerprint.fingerprint({name: flipped})[name]
      # Each word on its own must differ: f is a bijection.
      assert after[:8] != before[:8] and after[8:] != before[8:]


def test_elements_that_change_places_are_seen():
  x = np.random.default_rng(3).standard_normal((6, 32)).astype(np.float32)
  x[0, 0] = -x[5, 9]  # a linear sum of bits cannot see this pair swap
  before = fingerprint.fingerprint({'x': x})
  pairs = [((0, 0), (5, 9)), ((1, 2), (2, 1)), ((3, 0), (3, 1))]
  for one, two in pairs:
    swapped = x.copy()
    swapped[one], swapped[two] = x[two], x[one]
    assert fingerprint.fingerprint({'x': swapped}) != before
  assert fingerprint.fingerprint({'x': x[::-1]}) != before
  assert fingerprint.fingerprint({'x': x[:, ::-1]}) != before
  # Negative: what stays equal does compare equal, so the above can fail.
  swapped = x.copy()
  swapped[0, 0], swapped[0, 0] = x[0, 0], x[0, 0]
  assert fingerprint.fingerprint({'x': swapped}) == before
  # -0.0 equals 0.0 as a number, not as bits.
  zero = fingerprint.fingerprint({'x': np.zeros(3, np.float32)})
  assert fingerprint.fingerprint({'x': -np.zeros(3, np.float32)}) != zero


# Opcodes that name bytes, and read none.
NAMES = 'parameter', 'bitcast', 'tuple', 'get-tuple-element', 'constant'
SMALL = 256  # bytes for a leaf: its words, the place of a device


def read(lowered):
  """Bytes that a program reads: operands of what runs, in the compiled text;
  and what its cost analysis says that it reads and writes."""
  program = lowered.compile()
  text = compiled.CompiledProgram(program.as_text())
  found = [
    array.bytes
    for i in text.computations[text.entry].values()
    if i.opcode not in NAMES
    for array in text.operand_arrays(i)
  ]
  return sum(found), program.cost_analysis()['bytes accessed']


def programs(m, kinds=None):
  """Yields (lowered program that `Words` runs, bytes of leaves on a device):
  of arrays on a mesh, and of others. kinds: names of types; None: all."""
  shapes = {
    'float32': ((1024, 4096), P('data', 'tensor')),
    'bfloat16': ((16, 256, 1024), P(None, 'tensor', 'data')),
    'int32': ((2**22,), P('tensor')),
    'uint8': ((4, 1024, 2048), P('data')),
    'bool': ((2048, 2048), P()),
  }
  tree = [
    jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(m, spec))
    for kind, (shape, spec) in shapes.items()
    if kinds is None or kind in kinds
  ]
  alone = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tree]
  specs = tuple(x.sharding.spec for x in tree)
  # Not those that are kept: a test changes what they are made of.
  on_mesh = fingerprint._of_devices.__wrapped__(m, specs)
  whole = fingerprint._whole.__wrapped__()
  nbytes = lambda x, shape: int(np.prod(shape)) * x.dtype.itemsize
  shards = [nbytes(x, x.sharding.shard_shape(x.shape)) for x in tree]
  yield on_mesh.lower(tuple(tree)), shards
  yield whole.lower(tuple(alone)), [nbytes(x, x.shape) for x in alone]


def test_every_byte_is_read_once():
  """Of the shards of a device; and nothing as large as a leaf is written."""
  for lowered, held in programs(mesh((2, 4))):
    for found in read(lowered):
      assert sum(held) <= found <= sum(held) + SMALL * len(held)
    assert min(held) > 100 * SMALL * len(held)  # one leaf more would be seen


def words_apart(monkeypatch):
  """A reduction of each word."""

  def reduce(words, start, add, axes):
    del start, add
    return tuple(jnp.sum(x, axes, dtype=jnp.uint32) for x in words)

  monkeypatch.setattr(jax.lax, 'reduce', reduce)


def finiteness_apart(monkeypatch):
  """Words in one pass, and whether all elements are finite in another."""
  leaf = fingerprint._leaf

  def twice(x, first=()):
    bad = ~jnp.isfinite(x).all()
    return *leaf(x, first)[:2], bad.astype(jnp.uint32)

  monkeypatch.setattr(fingerprint, '_leaf', twice)


@pytest.mark.parametrize('form', [words_apart, finiteness_apart])
def test_a_second_pass_is_seen(monkeypatch, form):
  """By the bound of the test above."""
  form(monkeypatch)
  for lowered, held in programs(mesh((2, 4)), ['float32', 'bfloat16']):
    for found in read(lowered):
      assert found >= 2 * sum(held) > sum(held) + SMALL * len(held)


def test_names_of_non_finite_leaves():
  tree, m = leaves(), mesh((2, 4))
  assert fingerprint.measure(place(tree, m))[1] == []
  tree['a/float32'][3, 7] = np.nan
  tree['a/bfloat16'][0, 0, 0] = -np.inf
  assert fingerprint.measure(place(tree, m))[1] == ['a/bfloat16', 'a/float32']


def test_bad_leaves():
  for leaf in [3.5, np.float32(1), jax.random.key(0), np.zeros(2, complex)]:
    with pytest.raises(errors.UserError, match='params/w'):
      fingerprint.fingerprint({'params/w': leaf})
  assert fingerprint.fingerprint({}) == {}
