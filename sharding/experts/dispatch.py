"""Experts sharded over mesh axes: tokens are sent to them and come back.

    y_n = sum_k mix_nk f_e(x_n),  e = ids_nk

The devices of a region (any tuple of mesh axes, independently of attention: MoE
Parallel Folding, arXiv:2504.14960) hold E / r experts each; rank i of
the region holds experts i E / r and following. An exchange is one of

  local    one device holds all experts. Rows are sorted by expert.
  padded   all_to_all of C slots per (expert, source device). C = N, the tokens
           of a device, always suffices; it sends E / K times the bytes of the
           assignments, and does as many times the products where empty blocks
           are not skipped (pallas_kernels/matmul/grouped.py skips them on CPU
           alone). With a capacity C = ceil(N K / E factor): tokens are served
           in their order on their own device, and assignments without a slot
           are dropped and counted. So which tokens are dropped depends on the
           layout.
  ragged   ragged_all_to_all of the assignments alone, sorted by expert (TPU and
           GPU; XLA on CPU has no such collective). Buffers hold the worst case,
           r N min(K, E / r) rows.

Either way two exchanges forward and two backward. `hierarchical` exchanges over
one axis after the other (DeepSpeed-MoE, arXiv:2201.05596, section 5.3; SE-MoE,
arXiv:2205.10034): the same bits arrive in sum_a (r_a - 1) messages, each
r / r_a times as large, not in r - 1. `hot` experts (Hecate, arXiv:2502.02581)
are gathered by every device of the region: their tokens are not sent (a padded
exchange keeps its slots; then only the work of the busiest device shrinks).

An example, 4 experts on 2 ranks, top-1, one token a row:

    rank 0: ids  2 0 2 1        rank 1: ids  3 2 0 3
    `_rank`     (place of each among those of its expert; counts of experts)
            0 0 1 0; 1 1 2 0            0 0 0 1; 1 0 1 2
    `_places`   (slot of each token; token in each slot), sorted by expert
            2 0 3 1; 1 3 0 2            2 1 0 3; 2 1 0 3
    ragged: counts_RE = [[1 1 2 0], [1 0 1 2]]; rank 0 sends its slots 0, 1 to
            itself and 2, 3 to rank 1, where runs are sorted by expert, then by
            source:

    at rank 0   expert 0: r0 r1   expert 1: r0
    at rank 1   expert 2: r0 r0 r1   expert 3: r1 r1

    `offsets` of rank 0 (block 1), a number for each expert; on the way back for
    each (source rank, own expert)
            there   start 0 1 2 4   count 1 1 2 0   target 0 2 0 3
            back    start 0 2 1 3   count 1 1 1 0   target 0 1 0 1

Functions of axis names, for a fully manual region with check_vma=False, or for
one device (region ()). No activation is summed under differentiation.

Legend: N tokens of a device, K choices, A = N K assignments, E experts, D
model, F width, S slots, C slots of an expert for one source, R ranks of the
region.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.matmul import grouped as grouped_matmul
from paraxis.sharding import turns
from paraxis.sharding.experts import product as expert_product

_range = functools.partial(jnp.arange, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class DispatchPlan:
  """The static options of a dispatch.

  experts: number of the layer's experts. region: mesh axes that shard them.
  gather: mesh axes that shard the width of the matrices (fsdp). factor:
  capacity factor, 0: nothing is dropped. hierarchical: exchange axis by axis.
  exchange: 'padded', 'ragged', or 'auto': ragged if the target has it and
  nothing is dropped.
  """

  experts: int
  region: tuple[str, ...] = ()
  gather: tuple[str, ...] = ()
  factor: float = 0.0
  hierarchical: bool = False
  exchange: str = 'auto'


def size(region: tuple[str, ...]) -> int:
  """Devices of a region."""
  return math.prod(map(lax.axis_size, region))


def slots(plan: DispatchPlan, tokens: int, choices: int) -> int:
  """Capacity of an expert for one device's tokens; 0: unlimited."""
  exact = tokens * choices / plan.experts * plan.factor
  exact = min(tokens, exact)  # of a token's experts each is another
  return math.ceil(float(f'{exact:.9g}'))  # 55.00000000000001 is 55


def _resolve(plan):
  if plan.exchange != 'auto':
    return plan.exchange
  on_cpu = registry.current_target().platform == 'cpu'
  return 'padded' if on_cpu or plan.factor or plan.hierarchical else 'ragged'


def dispatch(
  run: Callable,
  weights: Sequence[Any],
  x_ND: jax.Array,
  ids_NK: jax.Array,
  mix_NK: jax.Array,
  valid_N: jax.Array,
  plan: DispatchPlan,
  hot: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Sum over each token's experts of mix times the expert's output.

  Args:
    run: (rows_SD, weights, multiply) -> rows_SD, the experts: of any rows, with
      multiply(rows, w, dim, bias) in place of a product, row by row with the
      matrix, and bias or None, of the row's expert; `dim` of w is split over
      plan.gather.
    weights: arrays (E / r, ...), this device's experts.
    x_ND: tokens of this device. ids_NK: their experts, distinct for a token.
    mix_NK: weights of the sum. valid_N: False: neither sent nor counted.
    hot: None or int (h,): distinct experts that every device gathers. The same
      on all devices of the region; data, so a change compiles nothing.

  Returns:
    (y_ND in x's dtype, 0 for invalid tokens; number of assignments dropped).

  Raises:
    ValueError: a ragged exchange with a capacity or axis by axis.
  """
  tokens, choices = ids_NK.shape
  keep_NK = jnp.broadcast_to(valid_N[:, None], ids_NK.shape)
  dropped = jnp.int32(0)
  if plan.factor:
    position, _ = _rank(ids_NK, keep_NK, plan.experts)
    fits = position < slots(plan, tokens, choices)
    dropped = (keep_NK & ~fits).sum()
    keep_NK = keep_NK & fits
  outs, run = [], turns.of_rows(run, ids_NK.size)
  if hot is not None:
    absent = jnp.full(plan.experts, hot.size, jnp.int32)
    index = absent.at[hot].set(_range(hot.size))
    near = index[ids_NK]
    stays = keep_NK & (near < hot.size)
    copies = [materialise(w, hot, plan.region) for w in weights]
    outs.append(_local(run, copies, x_ND, near, mix_NK, stays, plan.gather))
    keep_NK = keep_NK & ~stays
  if plan.region:
    way = _padded if _resolve(plan) == 'padded' else _ragged
    outs.append(way(run, weights, x_ND, ids_NK, mix_NK, keep_NK, plan))
  else:
    given = run, weights, x_ND, ids_NK, mix_NK, keep_NK
    outs.append(_local(*given, plan.gather))
  return functools.reduce(jnp.add, outs).astype(x_ND.dtype), dropped


def _rank(ids_NK, keep_NK, experts):
  """(place of each assignment among the kept ones of its expert; counts_E)."""
  flat = jnp.where(keep_NK, ids_NK, experts).reshape(-1)
  order = jnp.argsort(flat, stable=True)
  counts = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)
  first = jnp.cumsum(counts) - counts
  rank = jnp.zeros_like(flat).at[order].set(_range(flat.size))
  return (rank - first[flat]).reshape(ids_NK.shape), counts[:experts]


def _places(first_E, position_NK, ids_NK, keep_NK, total):
  """(slot of each assignment, `total`: none; content of each slot, A: none)."""
  slot_NK = jnp.where(keep_NK, first_E[ids_NK] + position_NK, total)
  empty = jnp.full(total, ids_NK.size, jnp.int32)
  source_S = empty.at[slot_NK.reshape(-1)].set(_range(ids_NK.size), mode='drop')
  return slot_NK, source_S


def _rows(x, index):
  """Rows x[index]; an index past the end gives zeros."""
  return x.at[index].get(mode='fill', fill_value=0)


@jax.custom_vjp
def _spread(x_ND, slot_NK, source_S):
  """Rows of the slots. Its transpose is a gather too, and not a scatter."""
  return _rows(x_ND, source_S // slot_NK.shape[1])


def _spread_forward(x_ND, slot_NK, source_S):
  return _spread(x_ND, slot_NK, source_S), slot_NK


def _spread_backward(slot_NK, g_SD):
  wide = jnp.promote_types(g_SD.dtype, jnp.float32)
  dx = _rows(g_SD, slot_NK).sum(1, dtype=wide)
  return dx.astype(g_SD.dtype), None, None


_spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def _collect(y_SD, mix_NK, slot_NK, source_S):
  """sum_k mix_nk y[slot_nk] in promote_types(dtype, float32)."""
  wide = jnp.promote_types(y_SD.dtype, jnp.float32)
  return jnp.einsum(
    'NKD,NK->ND',
    _rows(y_SD, slot_NK),
    mix_NK.astype(wide),
    preferred_element_type=wide,
  )


def _collect_forward(y_SD, mix_NK, slot_NK, source_S):
  return _collect(y_SD, mix_NK, slot_NK, source_S), (
    y_SD, mix_NK, slot_NK, source_S,
  )  # fmt: skip


def _collect_backward(kept, g_ND):
  y_SD, mix_NK, slot_NK, source_S = kept
  mix_S = _rows(mix_NK.reshape(-1), source_S)
  dy = _rows(g_ND, source_S // mix_NK.shape[1]) * mix_S[:, None]
  dmix = jnp.einsum('NKD,ND->NK', _rows(y_SD, slot_NK).astype(g_ND.dtype), g_ND)
  return dy.astype(y_SD.dtype), dmix.astype(mix_NK.dtype), None, None


_collect.defvjp(_collect_forward, _collect_backward)


def _local(run, weights, x_ND, ids_NK, mix_NK, keep_NK, gather):
  """All experts here: rows sorted by expert, runs aligned to blocks."""
  experts = len(weights[0])
  block = grouped_matmul.block(ids_NK.size, experts)
  total = grouped_matmul.capacity(ids_NK.size, experts, block)
  position_NK, counts_E = _rank(ids_NK, keep_NK, experts)
  sizes_E = -(-counts_E // block) * block
  first_E = jnp.cumsum(sizes_E) - sizes_E
  slot, source = _places(first_E, position_NK, ids_NK, keep_NK, total)
  multiply = expert_product.multiplier(gather, sizes_E, block)
  y_SD = run(_spread(x_ND, slot, source), weights, multiply)
  return _collect(y_SD, mix_NK, slot, source)


def _padded(run, weights, x_ND, ids_NK, mix_NK, keep_NK, plan):
  """all_to_all of C slots per expert."""
  tokens, choices = ids_NK.shape
  experts, ranks = plan.experts, size(plan.region)
  count, block, runs = slots(plan, tokens, choices), 1, None
  if not count:
    block = grouped_matmul.block(ids_NK.size, experts)
    count = -(-tokens // block) * block
    if block > 1:  # on a CPU blocks of zeros are skipped
      runs = jnp.full(experts // ranks, ranks * count, jnp.int32)
  position_NK, _ = _rank(ids_NK, keep_NK, experts)
  first_E = _range(experts) * count
  slot, source = _places(first_E, position_NK, ids_NK, keep_NK, experts * count)
  rows = _spread(x_ND, slot, source).reshape(ranks, -1, count, x_ND.shape[1])
  rows = jnp.moveaxis(_swap(rows, plan), 0, 1)  # (E / r, source, C, D)
  multiply = expert_product.multiplier(plan.gather, runs, block)
  y = run(rows.reshape(-1, rows.shape[-1]), weights, multiply)
  y = _swap(jnp.moveaxis(y.reshape(rows.shape), 1, 0), plan)
  return _collect(y.reshape(-1, y.shape[-1]), mix_NK, slot, source)


def _swap(x, plan):
  """x[i] goes to rank i, and x[j] then came from rank j."""
  if not plan.hierarchical:
    return lax.all_to_all(x, plan.region, 0, 0, tiled=True)
  y = x.reshape(*map(lax.axis_size, plan.region), *x.shape[1:])
  for i in reversed(range(len(plan.region))):  # nearest devices first
    y = lax.all_to_all(y, plan.region[i], i, i, tiled=True)
  return y.reshape(x.shape)


class Offsets(NamedTuple):
  """Arguments of one ragged_all_to_all; slices i go to rank i // (E / r)."""

  start: object
  count: object
  target: object
  arriving: object


def offsets(counts_RE, me, block=1):
  """(`Offsets` to the experts, and back) of rank `me`; lengths of its runs.

  At home rows are sorted by expert; at the experts they are sorted by expert,
  whose run starts at a multiple of `block`, and then by source. The module's
  docstring has an example.

  Args:
    counts_RE: rows that each rank sends to each expert.
  """
  ranks, experts = counts_RE.shape
  before = lambda a, axis: jnp.cumsum(a, axis) - a
  home_RE = before(counts_RE, 1)
  runs = -(-counts_RE.sum(0, dtype=jnp.int32) // block) * block
  runs = runs.reshape(ranks, -1)  # (owner, its experts)
  there_RE = before(runs, 1).reshape(-1) + before(counts_RE, 0)
  own = experts // ranks
  mine = lambda a: lax.dynamic_slice_in_dim(a, me * own, own, 1).reshape(-1)
  sent, arriving = counts_RE[me], mine(counts_RE)
  there = Offsets(home_RE[me], sent, there_RE[me], arriving)
  back = Offsets(mine(there_RE), arriving, mine(home_RE), sent)
  return there, back, runs[me]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _send(region, rows, home, x, there, back):
  """Sorted x to the ranks, into a buffer of `rows`; home: len(x)."""
  out = jnp.zeros((rows, *x.shape[1:]), x.dtype)
  return lax.ragged_all_to_all(x, out, *there, axis_name=region)


def _send_forward(region, rows, home, x, there, back):
  return _send(region, rows, home, x, there, back), (there, back)


def _send_backward(region, rows, home, kept, g):
  there, back = kept
  return _send(region, home, rows, g, back, there), None, None


_send.defvjp(_send_forward, _send_backward)


def _ragged(run, weights, x_ND, ids_NK, mix_NK, keep_NK, plan):
  """ragged_all_to_all of the assignments, sorted by expert."""
  if plan.factor or plan.hierarchical:
    raise ValueError('a ragged exchange has no capacity and no axis order.')
  tokens, choices = ids_NK.shape
  own, ranks = plan.experts // size(plan.region), size(plan.region)
  position_NK, counts_E = _rank(ids_NK, keep_NK, plan.experts)
  first_E = jnp.cumsum(counts_E) - counts_E
  slot, source = _places(first_E, position_NK, ids_NK, keep_NK, ids_NK.size)
  counts_RE = lax.all_gather(counts_E, plan.region).reshape(ranks, -1)
  block = grouped_matmul.block(ids_NK.size, own)
  total = ranks * tokens * min(choices, own)
  total = grouped_matmul.capacity(total, own, block)
  me = lax.axis_index(plan.region)
  there, back, sizes = offsets(counts_RE, me, block)
  rows = _spread(x_ND, slot, source)
  rows = _send(plan.region, total, ids_NK.size, rows, there, back)
  multiply = expert_product.multiplier(plan.gather, sizes, block)
  y = run(rows, weights, multiply)
  y = _send(plan.region, ids_NK.size, total, y, back, there)
  return _collect(y, mix_NK, slot, source)


def hottest(load_E: jax.Array, count: int) -> jax.Array:
  """Ids of the `count` experts with the most assignments, best first.

  Those to gather, so that their owners do not make all others wait.
  """
  return lax.top_k(load_E, count)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def materialise(w_EDF, hot, region):
  """w[hot] of experts sharded over `region`, on each of its devices.

  A sparse all-gather: owners contribute their rows, other devices zeros, with
  the volume of an all-reduce, 2 h |w| (r - 1) / r, against E |w| (r - 1) / r
  for all experts. Its transpose returns gradients to the owners at that cost.

  Args:
    w_EDF: this device's experts. hot: int (h,), the same on all devices.
  """
  rows = _rows(w_EDF, _owned(w_EDF, hot, region))
  return lax.psum(rows, region) if region else rows


def _owned(w_EDF, hot, region):
  """Local index of each hot expert; past the end: another device holds it."""
  local = hot - lax.axis_index(region) * len(w_EDF) if region else hot
  mine = (local >= 0) & (local < len(w_EDF))
  return jnp.where(mine, local, len(w_EDF))


def _materialise_forward(w_EDF, hot, region):
  return materialise(w_EDF, hot, region), (w_EDF, hot)


def _materialise_backward(region, kept, g):
  w_EDF, hot = kept
  g = lax.psum(g, region) if region else g
  zeros = jnp.zeros(w_EDF.shape, w_EDF.dtype)
  return zeros.at[_owned(w_EDF, hot, region)].add(g, mode='drop'), None


materialise.defvjp(_materialise_forward, _materialise_backward)
