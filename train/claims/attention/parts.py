"""Claims about tiles of a mask, and about attention to parts of a row.

FastAttention (arXiv:2410.16663) reads the mask of a tile from one small matrix,
and lets the host attend to the keys that it keeps, so that they never move; two
parts of a row are joined by their lse.

Legend: B rows, T tokens, S slots, N query heads, K kv heads, H head width.
"""

import jax
import numpy as np

from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.decode_attention import host as decode_host
from paraxis.pallas_kernels.decode_attention import op as decode_attention
from paraxis.pallas_kernels.decode_attention import schedule as decode_schedule
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts


def mask_is_a_slice(run, *, length, blocks):
  """EQ: every tile of the mask that is computed is a slice of one small mask.

  FastAttention keeps a triangle of 2M x 2M and reads every M x M tile from it;
  here a tile is computed from the places of its tokens. Tiles without a mask
  must be all visible, those left out all hidden.

  Args:
    blocks: list of [queries, keys] of a tile.
  """
  wrong = total = masked = 0
  place = np.arange(length)
  for bq, bk in blocks:
    mask = attention.Mask()
    plan = attention_blocks.plan((length, length), None, None, mask, (bq, bk))
    triangle = np.tri(2 * max(bq, bk), dtype=bool)
    for i, j in np.ndindex(plan.kinds.shape[1:]):
      rows, columns = (
        place[k * b : (k + 1) * b] for k, b in ((i, bq), (j, bk))
      )
      ahead, kind = i * bq - j * bk, plan.kinds[0, i, j]
      tile = columns[None] <= rows[:, None]
      found = np.full(tile.shape, kind == 2)
      if kind == 1:
        pair = (1, rows[:, None]), (1, columns[None])
        found = np.asarray(attention_blocks.visible(plan, *pair))
        r, c = max(ahead, 0), max(-ahead, 0)
        tile = triangle[r : r + len(rows), c : c + len(columns)]
      wrong += not np.array_equal(found, tile)
      total, masked = total + 1, masked + (kind == 1)
  return claims.Outcome(
    '0 differ',
    f'{wrong} differ',
    f'T={length}, tiles {blocks}: {total} tiles, {masked} with a mask, the '
    'rest visible or skipped',
    wrong == 0,
  )


def no_mask():
  """Knock-out: every tile counts as visible."""
  real = attention_blocks.block_kinds
  full = lambda *given: 0 * real(*given) + 2
  return knockouts.patched(attention_blocks, 'block_kinds', full)


def host_part(run, *, slots, on_host, rows, shape, within):
  """EQ: slots that stay on the host, the rest on the device, merged by lse.

  The host attends in NumPy to the first slots of every row; q goes there, (o,
  lse) comes back; keys and values never move.

  Args:
    slots: of a row. on_host: list of how many of them the host keeps.
    rows: B. shape: [query heads, kv heads, head width].
  """
  (n, kv, h), rng = shape, np.random.default_rng(0)
  q = rng.normal(size=(rows, 1, n, h))
  k, v = (rng.normal(size=(rows, kv, slots, h)) for _ in 'kv')
  mask, gaps = attention.Mask(scale=h**-0.5), []
  with jax.enable_x64(True):

    def device(first):
      count = np.full(rows, slots - first, np.int32)
      parts = q, k[:, :, first:], v[:, :, first:]
      return decode_attention.ragged(*parts, mask, count, impl='xla')

    whole = device(0)
    for first in on_host:
      kept = k[:, :, :first], v[:, :, :first]
      host = decode_host.attend(q, *kept, mask.scale)
      both = decode_schedule.merge(host, device(first))
      gaps += map(experiment.gap, both, whole)
  crossing, kept = rows * n * (2 * h + 1), 2 * rows * max(on_host) * kv * h
  return experiment.equal(
    gaps,
    within,
    f'{rows} rows, N, K, H {shape}, float64, {experiment.numbers(on_host)} of '
    f'{slots} slots on the host: o and lse; {crossing:,} numbers cross a token '
    f'and layer, {kept:,} of keys and values stay',
  )


def mean_of_parts():
  """Knock-out: parts of a row join without their lse."""
  mean = lambda a, b: tuple((x + y) / 2 for x, y in zip(a, b, strict=True))
  return knockouts.patched(decode_schedule, 'merge', mean)
