"""A token of each row into its slot of a cache, in place, on TPU (Mosaic).

The grid is the rows. A program has, of every cache, the tile of slots that the
row's token falls into, of all heads; the place is known before the program
starts, so that the next row's tile is fetched meanwhile. It puts the token in,
or nothing, and the tile goes back. Caches are inputs and outputs at once: what
no program visits stays as it is. Rows are apart, for a tile that two programs
visit would be fetched before it was written.

A loop of updates has, by the compiler's estimate for v6e, 8,600 cycles a row
and layer (16 heads of 128, bfloat16): of 64 rows more than all else that makes
their next token. A scatter has as many.

Cost: a tile of each row and cache read and written.

Legend: R rows of the cache, n rows written, K kv heads, S slots, H head size.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying

# Slots of a TPU's tile times bytes of a number: 8 of float32, 16 of bfloat16.
BYTES = 32


def _kernel(*refs):
  row, place, keep, *refs = refs
  del row
  count, i = len(refs) // 3, pl.program_id(0)
  for new, old, out in zip(
    refs[:count], refs[count : 2 * count], refs[2 * count :], strict=True
  ):
    slots = out.shape[1]
    slot = jax.lax.broadcasted_iota(jnp.int32, (1, slots, 1), 1)
    here = (slot == place[i] % slots) & (keep[i] > 0)
    # Wide: not every TPU selects numbers of 16 bits.
    wide = lambda x: x[...].astype(jnp.float32)
    out[...] = jnp.where(here, wide(new), wide(old)).astype(out.dtype)


def supports(slots):
  """None, or why the kernel does not take these caches."""
  dtypes = {str(x.dtype) for x in slots}
  if not dtypes <= {'float32', 'bfloat16'}:
    return f'takes float32 and bfloat16, these are {", ".join(sorted(dtypes))}'
  return None


def write(slots, row_n, place_n, keep_n, new, interpret=False):
  """Caches with new tokens, a list.

  Args:
    slots: caches (R, K, S, H), of one R and S. row_n: int32, no two the same.
    place_n: int32 slots, 0 .. S - 1. keep_n: bool, which are written.
    new: (n, K, H) for each cache, in its dtype. interpret: as of pallas_call.
  """
  count, n = len(slots), len(row_n)
  keep_n = keep_n.astype(jnp.int32)
  given = row_n, place_n, keep_n, [x[:, :, None] for x in new], list(slots)
  row_n, place_n, keep_n, new, slots = varying.same(given)

  def cache(x):
    tile = min(BYTES // x.dtype.itemsize, x.shape[2])
    at = lambda i, row, place, keep: (row[i], 0, place[i] // tile, 0)
    return pl.BlockSpec((None, x.shape[1], tile, x.shape[3]), at)

  fresh = [
    pl.BlockSpec((None, *x.shape[1:]), lambda i, *_: (i, 0, 0, 0)) for x in new
  ]
  caches = [cache(x) for x in slots]
  return pl.pallas_call(
    _kernel,
    name='slot_write_tpu',
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(n,),
      in_specs=[*fresh, *caches],
      out_specs=caches,
    ),
    out_shape=[varying.result(x, x.shape, x.dtype) for x in slots],
    input_output_aliases={3 + count + i: i for i in range(count)},
    cost_estimate=pl.CostEstimate(
      flops=0,
      transcendentals=0,
      bytes_accessed=2
      * BYTES
      * n
      * sum(x.shape[1] * x.shape[3] for x in slots),
    ),
    interpret=interpret,
  )(row_n, place_n, keep_n, *new, *slots)
