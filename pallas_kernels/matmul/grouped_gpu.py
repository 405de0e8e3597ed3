"""Products of rows with the matrix of their group on GPU (Triton).

    y_s = x_s W_e(s)        dW_e = sum over s of e: x_s^T g_s

A run is a whole number of blocks of rows (grouped.py), so a tile of rows has
one matrix. Two kernels, both with a float32 sum that stays on the processor:

  product   A program is a tile of rows and one of outputs. It finds its group
            in a table of S / M numbers, which XLA makes, and walks D. Programs
            go band by band: 1,024 rows with all outputs, then the next. At 128
            rows a tile a band is 8 times F / 128 programs, about as many as run
            at once, so that a matrix and its rows are fetched from memory once
            and then are in the cache that the processors share. After the last
            run nothing is read and zeros are written.
  gradient  A program is a group and a tile of its matrix, and walks the rows of
            the run, which has no rows or many: an empty one writes zeros.

No atomics: a run repeats bit for bit. Products take the inputs' dtype (float32
is not rounded to TF32: no tensor cores, small tiles). Sizes that fill no tile
are masked, which costs a comparison for every number that is read.

Cost: 2 S D F operations. Memory, where a band fits the shared cache: x once and
a matrix once for each band of its run, dW once.

Legend: S rows, E groups, D input width, F output width, M rows of a tile, N
tiles of rows.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import blocks

DTYPES = 'bfloat16', 'float16', 'float32'
LEAST = 16  # rows, inputs and outputs of a product of the matrix unit
MOST_ROWS = 128  # of a block that is a tile
BAND = 1024  # rows that are neighbours in time
MOST_ELEMENTS = 2**31  # an address is counted in 32 bits


class GroupedTile(NamedTuple):
  """Most rows, inputs and outputs of a tile; powers of two."""

  rows: int
  inputs: int
  outputs: int


PRODUCT, GRADIENT = GroupedTile(MOST_ROWS, 64, 128), GroupedTile(64, 128, 128)
# Without tensor cores; with 32 inputs a tile, the product spills registers.
PRODUCT_FLOAT32, GRADIENT_FLOAT32 = (
  GroupedTile(64, 16, 64),
  GroupedTile(32, 64, 64),
)


class GroupedLaunch(NamedTuple):
  """How a kernel is called; for tests and measurements.

  tile: instead of those above. warps, stages: as Triton knows them; 0: as many
  as the tile needs. interpret: as in pl.pallas_call.
  """

  tile: GroupedTile | None = None
  warps: int = 0
  stages: int = 3
  interpret: Any = False


DEFAULT = GroupedLaunch()


def limits(spec, target):
  """None, or what else the kernels cannot take (registry.kernel)."""
  del target
  if spec.size % LEAST:
    return f'blocks of {spec.size} rows: takes multiples of {LEAST}'
  if spec.rows % spec.size:
    return f'{spec.rows} rows are not a multiple of {spec.size}'
  for name in spec.others:
    if name != spec.dtype:
      return f'{spec.dtype} times {name}: takes one dtype'
  if spec.result not in DTYPES:
    return f'adds up in float32, not in {spec.result}'
  if spec.most >= MOST_ELEMENTS:
    return (
      f'an array of {spec.most} elements, addresses fewer than {MOST_ELEMENTS}'
    )
  return None


def block(rows):
  """Rows of a block, a power of two: the largest up to `rows`, in bounds."""
  return min(max((1 << rows.bit_length()) >> 1, LEAST), MOST_ROWS)


def _fit(most, size, d, f):
  """`GroupedTile` of powers of two; its rows divide a block of `size`."""
  least = lambda n: max(LEAST, pl.next_power_of_2(n))
  ends = size & -size, least(d), least(f)
  return GroupedTile(*map(min, most, ends))


def _inside(first, count, size):
  """Which of `count` places from `first` on exist; None: all of any tile."""
  return None if size % count == 0 else first + jnp.arange(count) < size


def _mask(rows, columns):
  """The mask of a tile from what `_inside` gives for both sides, or None."""
  sides = [] if rows is None else [rows[:, None]]
  sides += [] if columns is None else [columns[None]]
  return functools.reduce(jnp.logical_and, sides) if sides else None


def _load(ref, rows, columns):
  mask = _mask(rows, columns)
  return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)


def _place(tiles, columns, band):
  """(tile of rows, tile of outputs) of this program; band: tiles of rows."""
  at = pl.program_id(0)
  first = at // (band * columns) * band
  inner, rows = at % (band * columns), jnp.minimum(tiles - first, band)
  return first + inner % rows, inner // rows


def _product_kernel(group_N, x, w, y, *, tile):
  (s, d), (groups, _, f) = x.shape, w.shape
  m, inputs, outputs = tile
  i, j = _place(s // m, pl.cdiv(f, outputs), BAND // m)
  e = group_N[i]
  rows, columns = pl.ds(i * m, m), pl.ds(j * outputs, outputs)
  right = _inside(j * outputs, outputs, f)

  def body(k, total):
    at, ok = pl.ds(k * inputs, inputs), _inside(k * inputs, inputs, d)
    left = _load(x.at[rows, at], None, ok)
    own = _load(w.at[e, at, columns], ok, right)
    return total + blocks.dot(left, own, blocks.NN)

  # A choice between two literals is no integer in Triton.
  steps = (e < groups).astype(jnp.int32) * pl.cdiv(d, inputs)
  total = jnp.zeros((m, outputs), jnp.float32)
  total = jax.lax.fori_loop(0, steps, body, total).astype(y.dtype)
  plgpu.store(y.at[rows, columns], total, mask=_mask(None, right))


def _gradient_kernel(begin_E, end_E, x, g, dw, *, tile):
  m, inputs, outputs = tile
  j, i, e = (pl.program_id(axis) for axis in range(3))
  columns = pl.ds(i * inputs, inputs), pl.ds(j * outputs, outputs)
  below = _inside(i * inputs, inputs, x.shape[1])
  right = _inside(j * outputs, outputs, g.shape[1])

  def body(k, total):
    at = pl.ds(k * m, m)
    left = _load(x.at[at, columns[0]], None, below)
    own = _load(g.at[at, columns[1]], None, right)
    return total + blocks.dot(left, own, blocks.TN)

  total = jnp.zeros((inputs, outputs), jnp.float32)
  total = jax.lax.fori_loop(begin_E[e], end_E[e], body, total)
  out, total = dw.at[(e, *columns)], total.astype(dw.dtype)
  plgpu.store(out, total, mask=_mask(below, right))


def _launch(launch, tile_area, flops, arrays) -> dict[str, Any]:
  """Arguments of pl.pallas_call that both kernels have."""
  warps = launch.warps or (8 if tile_area >= 128 * 128 else 4)
  return dict(
    compiler_params=plgpu.CompilerParams(
      num_warps=warps, num_stages=launch.stages
    ),
    cost_estimate=pl.CostEstimate(
      flops=flops,
      transcendentals=0,
      bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    ),
    interpret=launch.interpret,
  )


def _ends(sizes_E, rows):
  """Tiles of rows up to the end of every run."""
  return (jnp.cumsum(sizes_E) // rows).astype(jnp.int32)


def _groups(sizes_E, rows, count):
  """The group of every tile of rows; E: after the last run."""
  # All comparisons at once: a binary search is a loop, a launch a step.
  found = jnp.searchsorted(
    _ends(sizes_E, rows), jnp.arange(count), side='right', method='compare_all'
  )
  return found.astype(jnp.int32)


def _parts(sizes_E, size, *arrays, width=0):
  """[(rows of each array, lengths of the runs in them)], each of few enough
  rows for addresses of 32 bits; width: of another array of as many rows.

  A buffer of dropless experts has room for what could be sent here at most: of
  64 devices with 8,192 tokens each, 2^31 numbers.
  """
  rows = len(arrays[0])
  width = max(width, *(x.shape[1] for x in arrays))
  most = max((MOST_ELEMENTS - 1) // width // size, 1) * size
  if rows <= most:
    return [(arrays, sizes_E)]
  ends_E, parts = jnp.cumsum(sizes_E), []
  for first in range(0, rows, most):
    last = min(first + most, rows)
    here_E = jnp.clip(ends_E, first, last) - first
    lengths_E = jnp.diff(here_E, prepend=jnp.zeros_like(here_E[:1]))
    parts.append(([x[first:last] for x in arrays], lengths_E))
  return parts


def forward(x_SD, w_EDF, sizes_E, size, dtype, launch=DEFAULT):
  """-> y_SF in `dtype`; see grouped.py."""
  parts = _parts(sizes_E, size, x_SD, width=w_EDF.shape[2])
  done = [
    _product(x, w_EDF, lengths_E, size, dtype, launch)
    for (x,), lengths_E in parts
  ]
  return done[0] if len(done) == 1 else jnp.concatenate(done)


def backward(x_SD, g_SF, sizes_E, size, dtype, launch=DEFAULT):
  """-> dW_EDF in `dtype`; see grouped.py."""
  done = [
    _gradient(x, g, lengths_E, size, dtype, launch)
    for (x, g), lengths_E in _parts(sizes_E, size, x_SD, g_SF)
  ]
  return functools.reduce(jnp.add, done)


def _product(x_SD, w_EDF, sizes_E, size, dtype, launch):
  (s, d), f = x_SD.shape, w_EDF.shape[2]
  most = PRODUCT_FLOAT32 if x_SD.dtype == jnp.float32 else PRODUCT
  tile = _fit(launch.tile or most, size, d, f)
  tiles = s // tile.rows
  group_N, x, w = varying.same(
    (_groups(sizes_E, tile.rows, tiles), x_SD, w_EDF)
  )
  y = varying.result(x, (s, f), dtype)
  area = tile.rows * tile.outputs
  return pl.pallas_call(
    functools.partial(_product_kernel, tile=tile),
    name='grouped_matmul_gpu_product',
    grid=(tiles * pl.cdiv(f, tile.outputs),),
    out_shape=y,
    **_launch(launch, area, 2 * s * d * f, (x, w, y)),
  )(group_N, x, w)


def _gradient(x_SD, g_SF, sizes_E, size, dtype, launch):
  (s, d), f = x_SD.shape, g_SF.shape[1]
  most = GRADIENT_FLOAT32 if x_SD.dtype == jnp.float32 else GRADIENT
  tile = _fit(launch.tile or most, size, d, f)
  end_E = _ends(sizes_E, tile.rows)
  begin_E = jnp.pad(end_E[:-1], (1, 0))
  begin_E, end_E, x, g = varying.same((begin_E, end_E, x_SD, g_SF))
  dw = varying.result(x, (sizes_E.size, d, f), dtype)
  area = tile.inputs * tile.outputs
  return pl.pallas_call(
    functools.partial(_gradient_kernel, tile=tile),
    name='grouped_matmul_gpu_gradient',
    grid=(pl.cdiv(f, tile.outputs), pl.cdiv(d, tile.inputs), sizes_E.size),
    out_shape=dw,
    **_launch(launch, area, 2 * s * d * f, (x, g, dw)),
  )(begin_E, end_E, x, g)
