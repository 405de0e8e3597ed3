"""Grouped products against a loop over rows, by every implementation.

Legend: S rows, E groups, D input width, F output width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
import support

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.matmul import grouped as grouped_matmul
from paraxis.pallas_kernels.matmul import grouped_gpu

pytestmark = pytest.mark.usefixtures('float64')

S, E, D, F, SIZE = 40, 4, 3, 5, 8
CPU = kernel_cases.CPU
# `ragged` is asked for by its functions: on CPU it must not be chosen. Kernels
# of others are in float32: below, and in test_tokamax_adapter.py.
BY_NAME = {i.name: i for i in registry._OPS[grouped_matmul.OP]}


def arrays(sizes):
  """(x, w, g) and the group of every row; rows after the runs are 0."""
  rng = np.random.default_rng(0)
  used = sum(sizes)
  x, g = rng.normal(size=(S, D)), rng.normal(size=(S, F))
  x[used:] = g[used:] = 0
  return x, rng.normal(size=(E, D, F)), g, np.repeat(np.arange(E), sizes)


@pytest.mark.parametrize('name', ['ragged', 'blocks'])
@pytest.mark.parametrize('sizes', [(8, 0, 24, 8), (16, 8, 0, 8)])
def test_equal_to_a_loop(name, sizes):
  x, w, g, groups = arrays(sizes)
  y, dw = np.zeros((S, F)), np.zeros((E, D, F))
  for s, e in enumerate(groups):
    y[s] = x[s] @ w[e]
    dw[e] += np.outer(x[s], g[s])
  lengths, op = jnp.array(sizes, jnp.int32), BY_NAME[name]
  found = jax.jit(lambda x, w: op.forward(x, w, lengths, SIZE, x.dtype))(x, w)
  np.testing.assert_allclose(found, y, rtol=0, atol=1e-12)
  found = jax.jit(lambda x, g: op.backward(x, g, lengths, SIZE, x.dtype))(x, g)
  np.testing.assert_allclose(found, dw, rtol=0, atol=1e-12)
  wrong = jnp.array((*sizes[1:], sizes[0]), jnp.int32)
  found = op.forward(jnp.asarray(x), jnp.asarray(w), wrong, SIZE, x.dtype)
  assert np.abs(found - y).max() > 0.1


def test_blocks_use_no_row_after_the_last_run():
  sizes = (16, 8, 0, 8)
  x, w, g = map(jnp.asarray, arrays(sizes)[:3])
  tail, lengths = sum(sizes), jnp.array(sizes, jnp.int32)
  assert tail < S
  op, dirty = BY_NAME['blocks'], [a.at[tail:].set(np.nan) for a in (x, g)]
  given = lengths, SIZE, x.dtype
  y = op.forward(dirty[0], w, *given)
  assert not np.asarray(y)[tail:].any()
  np.testing.assert_array_equal(y, op.forward(x, w, *given))
  dw = op.backward(*dirty, *given)
  np.testing.assert_array_equal(dw, op.backward(x, g, *given))


def test_blocks_of_bfloat16_are_summed_in_float32():
  """XLA on a CPU takes 1.5 times as long where a result is bfloat16."""
  x, w, g, groups = arrays((8, 0, 24, 8))
  sizes = jnp.array(np.bincount(groups, minlength=E), jnp.int32)
  rows = [jnp.asarray(a, jnp.bfloat16) for a in (x, w, g)]

  def both(x, w, g):
    common = sizes, SIZE, jnp.bfloat16, 'blocks'
    y = grouped_matmul.product(x, w, *common)
    return y, grouped_matmul.gradient(x, g, *common[:2], E, *common[2:])

  text = str(jax.make_jaxpr(both)(*rows))
  assert text.count('preferred_element_type=float32') == 2
  y, dw = both(*rows)
  assert y.dtype == dw.dtype == jnp.bfloat16
  x, w, g = (np.asarray(a, 'f8') for a in rows)
  want = np.stack([x[s] @ w[e] for s, e in enumerate(groups)])
  np.testing.assert_allclose(np.asarray(y, 'f8'), want, rtol=2**-8, atol=1e-6)
  want = sum(np.eye(E)[e][:, None, None] * np.outer(x[s], g[s])
             for s, e in enumerate(groups))  # fmt: skip
  np.testing.assert_allclose(np.asarray(dw, 'f8'), want, rtol=0.03, atol=0.03)


def test_even_runs():
  x, w, g, groups = arrays((10, 10, 10, 10))
  y = grouped_matmul.product(x, w, None, 1, x.dtype)
  expected = np.einsum('SD,SDF->SF', x, w[groups])
  np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)
  dw = grouped_matmul.gradient(x, g, None, 1, E, x.dtype)
  expected = np.einsum('SE,SD,SF->EDF', np.eye(E)[groups], x, g)
  np.testing.assert_allclose(dw, expected, rtol=0, atol=1e-12)


def test_megablox_is_the_same():
  rng = np.random.default_rng(0)
  draw = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)
  x, w, g = draw(256, 128), draw(2, 128, 128), draw(256, 128)
  sizes, op = jnp.array([96, 160], jnp.int32), BY_NAME['megablox']
  for call, ours, b in (
    (op.forward, BY_NAME['blocks'].forward, w),
    (op.backward, BY_NAME['blocks'].backward, g),
  ):
    with jax.enable_x64(False):
      found = call(x, b, sizes, 32, jnp.float32, interpret=True)
    expected = ours(x, b, sizes, 32, jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
  'rows, groups, size', [(4096, 8, 128), (64, 4, 8), (300, 2, 72), (3, 8, 8)]
)
def test_runs_fit_however_long_they_are(rows, groups, size):
  assert grouped_matmul.block(rows, groups) == size
  total = grouped_matmul.capacity(rows, groups, size)
  assert total % size == 0
  rng = np.random.default_rng(0)
  for _ in range(50):
    lengths = np.bincount(rng.integers(0, groups, rows), minlength=groups)
    assert (-(-lengths // size) * size).sum() <= total
  assert grouped_matmul.capacity(rows, groups, 1) == rows


@pytest.mark.parametrize(
  'rows, groups, size', [(4096, 8, 128), (64, 4, 16), (300, 2, 64), (3, 8, 16)]
)
def test_blocks_of_the_gpu_kernel(monkeypatch, rows, groups, size):
  monkeypatch.setattr(registry, 'current_target', lambda: kernel_cases.GPU)
  assert grouped_matmul.block(rows, groups) == size
  monkeypatch.setattr(registry, 'current_target', lambda: kernel_cases.TPU)
  assert grouped_matmul.block(rows, groups) == 1


# ---------------------------------------------------------------- GPU kernel --

# Two tiles of inputs and two of outputs, of which the last are not full.
SMALL = grouped_gpu.GroupedLaunch(
  grouped_gpu.GroupedTile(32, 32, 64), interpret=True
)
WIDTHS = 40, 72


def interpreted(dtype, sizes, size, tail):
  """(y, dw) of the kernel, and of a loop over rows in float64.

  The last `tail` rows belong to no run and are not numbers.
  """
  rng, (d, f) = np.random.default_rng(0), WIDTHS
  s, groups = sum(sizes) + tail, np.repeat(np.arange(len(sizes)), sizes)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  x, w, g = draw(s, d), draw(len(sizes), d, f), draw(s, f)
  x, g = (a.at[len(groups) :].set(jnp.nan) for a in (x, g))
  with jax.enable_x64(False):
    common = jnp.array(sizes, jnp.int32), size, jnp.float32, SMALL
    y = jax.jit(lambda x, w: grouped_gpu.forward(x, w, *common))(x, w)
    dw = jax.jit(lambda x, g: grouped_gpu.backward(x, g, *common))(x, g)
  x, w, g = (np.asarray(a, 'f8') for a in (x, w, g))
  wanted = np.zeros((s, f)), np.zeros(w.shape)
  for row, e in enumerate(groups):
    wanted[0][row] = x[row] @ w[e]
    wanted[1][e] += np.outer(x[row], g[row])
  return (y, dw), wanted


wrong = functools.partial(kernel_cases.wrong, ('y', 'dw'))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('sizes, size, tail', [
  ((32, 0, 96, 16), 16, 48),  # unequal runs, one empty, and rows of no run
  ((0, 64), 64, 0),  # the first is empty; a block is two tiles
  ((48, 0, 0), 48, 0),  # the last are empty; no power of two: three tiles
])  # fmt: skip
def test_the_gpu_kernel_equals_a_loop(dtype, sizes, size, tail):
  found, wanted = interpreted(dtype, sizes, size, tail)
  assert [x.dtype for x in found] == ['float32'] * 2
  # Products of bfloat16 are exact in float32: only its sums round.
  assert wrong(found, wanted, 1e-6) == []
  if tail:
    assert not np.asarray(found[0][-tail:]).any()
  for e, rows in enumerate(sizes):
    assert np.asarray(found[1][e]).any() == (rows > 0)


def test_bands_of_the_gpu_kernel_leave_nothing_out(monkeypatch):
  """Bands of two tiles of rows, the last of one; two tiles of outputs."""
  monkeypatch.setattr(grouped_gpu, 'BAND', 32)
  assert wrong(*interpreted('float32', (32, 16, 16), 16, 16), 1e-6) == []


@pytest.mark.parametrize('most', (48, 70, 97, 1000))
def test_the_gpu_kernel_in_parts_of_few_rows(monkeypatch, most):
  """Arrays whose numbers 32 bits do not address are cut between blocks, in the
  midst of runs and behind the last one."""
  widest, calls, right = 72, [], grouped_gpu._product
  monkeypatch.setattr(grouped_gpu, 'MOST_ELEMENTS', most * widest)

  def product(x, *given):
    calls.append(len(x))
    return right(x, *given)

  monkeypatch.setattr(grouped_gpu, '_product', product)
  found, wanted = interpreted('float32', (32, 0, 48), 16, 32)
  assert wrong(found, wanted, 1e-6) == []
  assert len(calls) > 1 if most < 100 else len(calls) == 1
  assert max(calls) <= most


def test_a_wrong_table_of_the_gpu_kernel_is_found(monkeypatch):
  """Rows times the matrix of the next group."""
  right = grouped_gpu._groups
  monkeypatch.setattr(
    grouped_gpu, '_groups', lambda *given: jnp.minimum(right(*given) + 1, 2)
  )
  assert wrong(*interpreted('float32', (32, 16, 16), 16, 0), 1e-2) == ['y']


def test_an_edge_that_is_not_masked_is_found(monkeypatch):
  """Of the inputs: the interpreter drops what is stored behind an edge."""
  monkeypatch.setattr(grouped_gpu, '_mask', lambda rows, columns: None)
  assert wrong(*interpreted('float32', (32, 16), 16, 0), 1e-2) == ['y']


@pytest.mark.parametrize('name', ['bfloat16', 'float32'])
def test_results_of_the_gpu_kernel_have_the_asked_dtype(name):
  x, w = jnp.ones((32, 16), jnp.bfloat16), jnp.ones((2, 16, 16), jnp.bfloat16)
  given = jnp.array([16, 16], jnp.int32), 16, jnp.dtype(name), SMALL
  with jax.enable_x64(False):
    y = jax.jit(lambda x, w: grouped_gpu.forward(x, w, *given))(x, w)
    dw = jax.jit(lambda x: grouped_gpu.backward(x, x, *given))(x)
  assert y.dtype == dw.dtype == name
  assert np.all(y == 16) and np.all(dw == 16)


def test_the_gpu_kernel_in_a_manual_region_with_checked_types():
  """Rows and runs differ between devices, matrices do not."""
  sizes = np.full((4, 2), 16, 'i4')
  w = jnp.zeros((2, 16, 24), 'f4')

  def run(x, sizes):
    given = sizes[0], 16, jnp.float32
    y = grouped_gpu.forward(x, w, *given)
    return y, grouped_gpu.backward(x, y, *given)

  x = np.zeros((128, 16), 'f4')
  with jax.enable_x64(False):
    found = kernel_cases.shapes_in_region(run, x, sizes)
  assert found == [(128, 24), (8, 16, 24)]


SPEC = grouped_matmul.GroupedSpec(256, 'bfloat16', 128, ('bfloat16',))


@pytest.mark.parametrize('change, words', [
  (dict(size=24), 'blocks of 24 rows: takes multiples of 16'),
  (dict(rows=200), '200 rows are not a multiple of 128'),
  (dict(others=('float32',)), 'bfloat16 times float32: takes one dtype'),
  (dict(result='float64'), 'adds up in float32, not in float64'),
  (dict(most=2**31), '2147483648 elements, addresses fewer than'),
  (dict(dtype='float64', others=('float64',)), 'not float64'),
  (dict(sharded=True), 'manual region'),
])  # fmt: skip
def test_what_the_gpu_kernel_does_not_take(change, words):
  """Then blocks of XLA run, and the reason says so."""
  resolve = functools.partial(
    registry.resolve, grouped_matmul.OP, target=kernel_cases.GPU
  )
  assert resolve(spec=SPEC).name == 'pallas_gpu'
  spec = dataclasses.replace(SPEC, **change)
  with support.refused(words):
    resolve('pallas_gpu', spec)
  assert resolve(spec=spec).name == 'blocks'


def test_what_a_call_tells_of_itself(monkeypatch):
  """Sizes of results count: of a gradient all matrices."""
  seen = []
  blocks = BY_NAME['blocks']
  monkeypatch.setattr(
    registry, 'resolve', lambda op, impl, spec: seen.append(spec) or blocks
  )
  x, w = jnp.zeros((32, 8), 'f4'), jnp.zeros((8, 8, 24), 'f4')
  sizes = jnp.array([16, 16, 0, 0, 0, 0, 0, 0], jnp.int32)
  y = grouped_matmul.product(x, w, sizes, 16, jnp.float64)
  grouped_matmul.gradient(x, y, sizes, 16, 8, jnp.float32)
  spec = functools.partial(grouped_matmul.GroupedSpec, 32, 'float32', 16)
  assert seen == [
    spec(('float32',), 'float64', 8 * 8 * 24),
    spec(('float64',), 'float32', 8 * 8 * 24),
  ]
