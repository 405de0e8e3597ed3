"""Claims about attention of one new token a row, shared out over workers.

    a tile of one head of one row is the unit of work;  W workers at a time
    by row:  a head of a row is one task           (FlashAttention-2)
    fixed:   a head of a row is cut in as many parts as that of the longest row
             (Flash-Decoding, in FlashAttention's library)
    even:    worker w takes tiles w n / W .. (w + 1) n / W - 1 of all n
             (LeanAttention, arXiv:2405.10480; decode_attention/schedule.py)

The simulator counts tiles, and for every part that a worker begins `part` tiles
more: its query, its partial result, the merge. Tasks start in order, each on
the worker that is free first, as a GPU hands out blocks. No time is measured.

Legend: B rows, N query heads, K kv heads, S slots, H head width, W workers.
"""

import functools
import heapq
import math

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.decode_attention import op as decode_attention
from paraxis.pallas_kernels.decode_attention import schedule as decode_schedule
from paraxis.sharding.meter import aot
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts


def _tiles(lengths, tile):
  return [-(-n // tile) for n in lengths]


def in_order(tasks, workers):
  """When the last of `tasks` ends; the next one goes to whoever is free."""
  free = [0.0] * workers
  for task in tasks:
    heapq.heapreplace(free, free[0] + task)
  return max(free)


def by_row(lengths, tile, workers, part):
  """Makespan of one task a row (of one head), in tiles."""
  tasks = [n + part for n in _tiles(lengths, tile) if n]
  return in_order(tasks, workers)


def splits_of(tasks, tiles, workers):
  """Parts of a row: the fewest that fill the last wave nearly best.

  The rule of FlashAttention's library: one part if the rows fill 80% of the
  workers; else of the numbers that shorten a part, the least whose share of
  busy workers is within 85% of the best.
  """
  if tasks >= 0.8 * workers:
    return 1
  busy = {}
  for splits in range(1, min(128, workers, tiles) + 1):
    if splits == 1 or -(-tiles // splits) != -(-tiles // (splits - 1)):
      waves = tasks * splits / workers
      busy[splits] = waves / math.ceil(waves)
  return min(s for s, b in busy.items() if b >= 0.85 * max(busy.values()))


def fixed_split(lengths, tile, workers, part):
  """Makespan if every row is cut as the longest; empty parts cost nothing."""
  tiles = _tiles(lengths, tile)
  splits = splits_of(len(tiles), max(tiles), workers)
  each = -(-max(tiles) // splits)
  tasks = [min(each, n - at) + part for n in tiles for at in range(0, n, each)]
  return in_order(tasks, workers)


def even(lengths, tile, workers, part):
  """Makespan of the even division, pieces and all."""
  plan = decode_schedule.make(
    np.array(lengths, np.int32), max(lengths), tile, workers
  )
  full = np.concatenate([[0], np.cumsum(plan.end > plan.first)])
  pieces = np.diff(full[plan.worker_piece])
  return float((np.diff(plan.worker) + part * pieces).max())


def whole_rows():
  """Knock-out: an even division that cuts no row; tables of shares alone."""
  real = decode_schedule.make

  def make(*given):
    plan = real(*given)
    line = np.append(np.unique(plan.origin), plan.worker[-1])  # of the rows
    at = np.searchsorted(line, plan.worker)
    return plan._replace(
      worker=line[at], worker_piece=at, first=line[:-1], end=line[1:]
    )

  return knockouts.patched(decode_schedule, 'make', make)


def equal_weights():
  """Knock-out: pieces of a row count alike, whatever their lse."""
  real = decode_schedule.merge_pieces
  alike = lambda o, lse, *given: real(o, jnp.zeros_like(lse), *given)
  return knockouts.patched(decode_schedule, 'merge_pieces', alike)


def no_kernel():
  """Knock-out: XLA's form, whatever the machine."""
  plain = functools.partial(decode_attention.ragged, impl='xla')
  return knockouts.patched(decode_attention, 'ragged', plain)


POLICIES = dict(row=by_row, fixed=fixed_split, even=even)
RAGGED = 'at random'  # of `batches`


def batches(longest, rows, draws):
  """{name: [lengths]} : equal rows, one long row, and rows at random.

  Args:
    longest: slots of the longest row. rows: in a batch; all batches of one row
      are the same and count once.
    draws: batches at random: lengths between 1/64 of the longest and all of it,
      as likely in every octave; the longest is always there.
  """
  if rows == 1:
    return {'one row': [[longest]]}
  rng = np.random.default_rng(0)
  short = max(1, longest // 64)
  spread = short * (longest / short) ** rng.random((draws, rows))
  return {
    'equal': [[longest] * rows],
    'one long': [[longest] + [short] * (rows - 1)],
    RAGGED: [[longest, *map(int, x[1:])] for x in spread],
  }


def _ratios(against, sizes, heads, tile, workers, part):
  """{(longest, rows, name): mean makespan of `against` over that of even}."""
  found = {}
  for longest, rows in sizes:
    for name, drawn in batches(longest, rows, 20).items():
      ratios = []
      for lengths in drawn:
        each = [n for n in lengths for _ in range(heads)]
        a, b = (
          POLICIES[p](each, tile, workers, part) for p in (against, 'even')
        )
        ratios.append(a / b)
      found[longest, rows, name] = float(np.mean(ratios))
  return found


def makespans(run, *, against, sizes, machine, part, swept, above):
  """SIM: makespan of another division over that of the even one.

  Args:
    against: 'row' or 'fixed'. sizes: list of [longest row, rows of a batch].
    machine: {'heads', 'tile', 'workers'}.
    part: what a part costs, in tiles. swept: other such costs.
    above: the least mean over the batches of rows at random, at any cost.
  """
  ragged = lambda found: float(
    np.mean([v for k, v in found.items() if k[2] == RAGGED])
  )
  found = _ratios(against, sizes, part=part, **machine)
  others = [ragged(found)] + [
    ragged(_ratios(against, sizes, part=p, **machine)) for p in swept
  ]
  mean = {
    kind: np.mean([v for k, v in found.items() if k[2] == kind])
    for kind in dict.fromkeys(name for *_, name in found)
  }
  (where, most), (last, least) = (
    pick(found.items(), key=lambda item: item[1]) for pick in (max, min)
  )
  text = lambda at: f'({at[1]} rows up to {at[0] // 1024}k, {at[2]})'
  return claims.Outcome(
    f'> {above:g} x',
    f'{min(others):.2f} to {max(others):.2f} x',
    f'batches of random lengths; {machine["heads"]} heads, '
    f'{machine["workers"]} workers, tiles of {machine["tile"]}, a part costs '
    f'{experiment.numbers(swept, "g")} tiles more: '
    f'{experiment.numbers(others[1:], ".2f")}; at {part:g}, which is assumed, '
    f'{mean[RAGGED]:.2f}. All {len(found)} cases then '
    f'{np.mean(list(found.values())):.2f}, by batch: '
    + ', '.join(f'{kind} {v:.2f}' for kind, v in mean.items())
    + f'; most {most:.2f} {text(where)}, least {least:.2f} {text(last)}',
    min(others) > above,
  )


def balance(run, *, draws, rows, longest, tile, workers):
  """SIM: tiles of the busiest worker less those of the idlest, at most one.

  Args:
    draws: batches at random, a fifth of the rows empty. rows, longest, tile: of
      a batch. workers: numbers of them that are tried.
  """
  rng, worst, fixed = np.random.default_rng(0), 0, 0
  for _ in range(draws):
    lengths = rng.integers(0, longest + 1, rows) * (rng.random(rows) > 0.2)
    lengths = lengths.astype(np.int32)
    fixed = max(fixed, int(np.ptp(-(-lengths // tile))))
    for w in workers:
      plan = decode_schedule.make(lengths, longest, tile, w)
      shares = np.diff(plan.worker)
      worst = max(worst, int(np.ptp(shares)))
      assert shares.sum() == (-(-lengths // tile)).sum()
  return claims.Outcome(
    '<= 1',
    str(worst),
    f'{draws} batches of {rows} rows of 0 to {longest} slots, tiles of {tile}, '
    f'{experiment.numbers(workers)} workers; one worker a row differs by up to '
    f'{fixed}',
    worst <= 1 < fixed,
  )


def _drawn(lengths, slots, heads, kv_heads, width):
  """(q, k, v) in float64; slots beyond a row's length are large."""
  rng, rows = np.random.default_rng(0), len(lengths)
  shapes = (rows, 1, heads, width), *[(rows, kv_heads, slots, width)] * 2
  q, k, v = (rng.normal(size=s) for s in shapes)
  beyond = np.arange(slots) >= np.array(lengths)[:, None]
  for x in (k, v):
    x.swapaxes(1, 2)[beyond] = 1e3
  return q, k, v


def _piecewise(drawn, lengths, plan, tile, mask):
  """(o, lse) of every piece of a plan, each computed for itself."""
  (q, k, v), parts = drawn, []
  for first, end, row, origin in zip(
    plan.first, plan.end, plan.row, plan.origin, strict=True
  ):
    here = slice((first - origin) * tile, (end - origin) * tile)
    left = max(0, min(int(lengths[row]), here.stop) - here.start)
    if end == first:  # nobody writes this slot
      parts.append((np.full(q.shape[2:], np.nan), np.full(q.shape[2], np.nan)))
      continue
    cut = lambda x, row=row, here=here: x[row][None, :, here]
    o, lse = decode_attention.ragged(
      q[row][None], cut(k), cut(v), mask, np.array([left], np.int32)
    )
    parts.append((o[0, 0], lse[0, 0]))
  return [jnp.stack(x) for x in zip(*parts, strict=True)]


def any_division(run, *, lengths, tile, workers, within):
  """EQ: pieces of any even division, merged, against the whole in one go.

  o and lse, float64.

  Args:
    lengths: of rows. tile: slots. workers: numbers of them.
  """
  mask = attention.Mask(scale=0.25, causal=False)
  with jax.enable_x64(True):
    lengths = np.array(lengths, np.int32)
    slots = -(-int(lengths.max()) // tile) * tile
    drawn = _drawn(lengths, slots, heads=4, kv_heads=2, width=16)
    wanted = decode_attention.ragged(*drawn, mask=mask, lengths_B=lengths)
    gaps, pieces = [], []
    for w in workers:
      plan = decode_schedule.make(lengths, slots, tile, w)
      o, lse = _piecewise(drawn, lengths, plan, tile, mask)
      found = decode_schedule.merge_pieces(o, lse, plan, len(lengths))
      for a, b in zip(found, wanted, strict=True):
        gaps.append(np.abs(a - b[:, 0]).max())
      pieces.append(int((plan.end > plan.first).sum()))
  return experiment.equal(
    gaps,
    within,
    f'o and lse, float64, {experiment.numbers(lengths)} slots in a row, '
    f'tiles of {tile}; {experiment.numbers(workers)} workers: '
    f'{experiment.numbers(pieces)} pieces',
  )


def shared_prefix(run, *, prefix, lengths, within):
  """EQ: a prefix read once for all rows, merged, against rows that hold it.

  Args:
    prefix: slots that all rows share. lengths: of the rows after it.
  """
  mask = attention.Mask(scale=0.25)
  lengths, rows = np.array(lengths, np.int32), len(lengths)
  with jax.enable_x64(True):
    q, k, v = _drawn(lengths, int(lengths.max()), 4, 2, 16)
    shared = [x[0] for x in _drawn([prefix], prefix, 4, 2, 16)[1:]]
    by_slots = [x.swapaxes(0, 1) for x in shared]
    found = decode_attention.shared_prefix(q, by_slots, (k, v), mask, lengths)
    whole = [
      np.concatenate([np.broadcast_to(a, (rows, *a.shape)), b], 2)
      for a, b in zip(shared, (k, v), strict=True)
    ]
    k, v = whole
    wanted = decode_attention.ragged(q, k, v, mask, lengths + prefix)
    gaps = [np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)]
  apart = rows * prefix + int(lengths.sum())
  once = prefix + int(lengths.sum())
  return experiment.equal(
    gaps,
    within,
    f'o and lse, float64, {rows} rows after {prefix} slots; slots read: {once} '
    f'instead of {apart}',
  )


def compiled(run, *, topologies, rows, slots, within):
  """AOT: the kernel is in the program, and the cache is not copied.

  Args:
    rows, slots: of the cache, 32 query and 8 kv heads of 128, bfloat16.
    within: temporaries over the bytes of the cache.
  """
  mask = attention.Mask(scale=128**-0.5)
  shares, right = [], True
  shapes = (rows, 1, 32, 128), *[(rows, 8, slots, 128)] * 2
  args = [jax.ShapeDtypeStruct(s, 'bfloat16') for s in shapes]
  args.append(jax.ShapeDtypeStruct((rows,), 'int32'))
  decode = lambda q, k, v, n: decode_attention.ragged(q, k, v, mask, n)
  for name in topologies:
    program = experiment.for_chip(name, 'decode attention', decode, args)
    share = aot.memory(program).temporaries / sum(
      2 * math.prod(s) for s in shapes[1:]
    )
    text = program.as_text() or ''
    kernel = 'tpu_custom_call' in text or '__gpu$xla.gpu.triton' in text
    right &= kernel and share <= within
    shares.append(f'{name} {share:.2%}{"" if kernel else " WITHOUT a kernel"}')
  return claims.Outcome(
    f'<= {within:.0%}',
    shares[-1].partition(' ')[2],
    f'temporaries over the cache, {rows} rows of {slots} slots, bfloat16: '
    + ', '.join(shares),
    right,
  )
