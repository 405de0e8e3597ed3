"""Attention kernels for GPUs (Triton): forward, dq, dkv; no atomics.

    s = q k';  m' = max(m, max s);  p = 2^(s - m')
    l' = 2^(m - m') l + sum p;  o' = 2^(m - m') o + p v
    backward: p = 2^(s - lse);  ds = p (do v' - delta)
    dq = sum ds k;  dv = sum p' do;  dk = sum ds' q

(FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.) One program per block
of queries and head (forward, dq), or per block of keys and kv head (dkv, which
adds up its query heads). It walks a list of the blocks it can see, full ones
first: two loops, and only the second has a mask. Every result is written by
one program, so a run repeats bit for bit. Arrays are read in place, (B, T, N,
H): no transposed copies.

Products take their inputs' dtype and add in float32 (float32 inputs are not
rounded to TF32); everything else is float32. Cost: 4 T S H flops per head times
the visible fraction, dq 6, dkv 8.

Legend: B batch, T query length, S key length, N query heads, K kv heads,
G = N / K, H head size of q and k, V of v; q, s tokens of a block.
"""

import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import blocks

DTYPES = ('bfloat16', 'float16', 'float32')
LEAST, MOST_HEAD_SIZE = 16, 128  # powers of two; larger ones spill registers
MOST_NUMBERS = 2**31 - 1  # offsets are 32-bit


def limits(spec, target):
  """None, or what else the kernels cannot take (registry.kernel)."""
  del target
  if any(h & (h - 1) or not LEAST <= h <= MOST_HEAD_SIZE for h in spec.heads):
    return (
      f'head size {max(spec.heads)}: takes powers of two from {LEAST} to '
      f'{MOST_HEAD_SIZE}'
    )
  if max(math.prod(spec.q), math.prod(spec.k)) > MOST_NUMBERS:
    return f'more than {MOST_NUMBERS} numbers in q or k'
  return None


def _over_list(counts, body, carry):
  """Folds body(partial, i, carry) over a list: full blocks, then partial."""
  full, every = counts[0], counts[1]
  carry = jax.lax.fori_loop(0, full, functools.partial(body, False), carry)
  return jax.lax.fori_loop(full, every, functools.partial(body, True), carry)


def _scores(plan, q, k, q_info, k_info, partial):
  """Base-2 logits (queries, keys) of a block, and their slope.

  The infos are (segment, order) that broadcast against the block.
  """
  s, slope = blocks.logits(plan.mask, blocks.dot(q, k, blocks.NT))
  ok = blocks.visible(plan, q_info, k_info) if partial else None
  return s if ok is None else jnp.where(ok, s, blocks.NEG), slope


def _column(info, at: Any = slice(None)):
  return info[0, at][:, None], info[1, at][:, None]


def _row(info, at: Any = slice(None)):
  return info[0, at][None], info[1, at][None]


def _forward_kernel(plan, *refs):
  q, k, v, q_info, k_info, columns, counts, o, lse = refs
  qi, here = q[...], _column(q_info)

  def body(partial, i, carry):
    o, old, total = carry
    at = pl.ds(columns[i] * plan.block_k, plan.block_k)
    kj, vj = k[at, :], v[at, :]
    s, _ = _scores(plan, qi, kj, here, _row(k_info, at), partial)
    new = jnp.maximum(old, s.max(1))
    p, shrink = jnp.exp2(s - new[:, None]), jnp.exp2(old - new)
    pv = blocks.dot(p.astype(vj.dtype), vj, blocks.NN)
    return o * shrink[:, None] + pv, new, total * shrink + p.sum(1)

  line = jnp.zeros((plan.block_q,), jnp.float32)
  out = jnp.zeros((plan.block_q, v.shape[-1]), jnp.float32)
  start = out, line + blocks.FLOOR, line
  out, m, total = _over_list(counts, body, start)
  total, lse[...] = blocks.softmax_end(m, total)
  o[...] = (out / total[:, None]).astype(o.dtype)


def _dq_kernel(plan, *refs):
  q, k, v, q_info, k_info, do, lse, delta, columns, counts, dq = refs
  qi, doi, here = q[...], do[...], _column(q_info)
  lse_i, delta_i = lse[...][:, None], delta[...][:, None]

  def body(partial, i, dq):
    at = pl.ds(columns[i] * plan.block_k, plan.block_k)
    kj = k[at, :]
    s, slope = _scores(plan, qi, kj, here, _row(k_info, at), partial)
    ds = blocks.dot(doi, v[at, :], blocks.NT) - delta_i
    ds = jnp.exp2(s - lse_i) * ds
    ds = ds if slope is None else ds * slope
    return dq + blocks.dot(ds.astype(kj.dtype), kj, blocks.NN)

  out = jnp.zeros(q.shape, jnp.float32)
  out = _over_list(counts, body, out) * plan.mask.scale
  dq[...] = out.astype(dq.dtype)


def _dkv_kernel(plan, *refs):
  q, k, v, q_info, k_info, do, lse, delta, rows, counts, dk, dv = refs
  kj, vj, here = k[...], v[...], _column(k_info)

  def head(g, carry):
    def body(partial, i, carry):
      dk, dv = carry
      at = pl.ds(rows[i] * plan.block_q, plan.block_q)
      qi, doi = q[at, g, :], do[at, g, :]
      # Transposed: (keys, queries).
      s, slope = blocks.logits(plan.mask, blocks.dot(kj, qi, blocks.NT))
      if partial:
        ok = blocks.visible(plan, _row(q_info, at), here)
        s = s if ok is None else jnp.where(ok, s, blocks.NEG)
      p = jnp.exp2(s - lse[g, at][None])
      ds = p * (blocks.dot(vj, doi, blocks.NT) - delta[g, at][None])
      ds = ds if slope is None else ds * slope
      dk += blocks.dot(ds.astype(qi.dtype), qi, blocks.NN)
      return dk, dv + blocks.dot(p.astype(doi.dtype), doi, blocks.NN)

    return _over_list(counts, body, carry)

  start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
  out_k, out_v = jax.lax.fori_loop(0, q.shape[1], head, start)
  dk[...] = (out_k * plan.mask.scale).astype(dk.dtype)
  dv[...] = out_v.astype(dv.dtype)


def _plan(which, arrays, segments, order, mask, launch):
  q, k, v = arrays
  lengths, bound = (q.shape[1], k.shape[1]), launch.block
  if bound is None:
    # Powers of two, as Triton's blocks must be; a product needs 16 rows.
    least = [max(16, pl.next_power_of_2(n)) for n in lengths]
    platform = 'gpu float32' if q.dtype == jnp.float32 else 'gpu'
    call = blocks.call_of(q, v, segments, mask)
    most = blocks.choose(platform, which, call).block
    bound = tuple(map(min, least, most))
  return blocks.plan(lengths, segments, order, mask, bound)


def _specs(plan, by_key):
  """BlockSpecs of (infos, list and counts); grid (block, head, batch).

  by_key: programs are of key blocks and read all queries, else the reverse.
  """

  def spec(shape, at):
    batch = lambda b: 0 if plan.static else b
    return pl.BlockSpec((None, *shape), lambda i, n, b: (batch(b), *at(i)))

  own = plan.block_k if by_key else plan.block_q
  tp, sp = plan.padded
  infos = [spec((2, tp), lambda i: (0, 0)), spec((2, sp), lambda i: (0, 0))]
  infos[by_key] = spec((2, own), lambda i: (0, i))
  length = plan.kinds.shape[1 if by_key else 2]
  listed = [spec((None, n), lambda i: (i, 0)) for n in (length, 2)]
  return infos, listed


def _launch(which, plan, q, v, launch) -> dict[str, Any]:
  """Arguments of pl.pallas_call beside the kernel, the grid and the arrays."""
  # H200, T 8192, H 128, forward 128 x 64: 1.46 ms with 4 warps, 1.84 with 8.
  warps = 8 if plan.block_q * plan.block_k > 128 * 64 else 4
  return dict(
    name=f'attention_gpu_{which}',
    compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2),
    cost_estimate=blocks.cost(which, plan, q, v),
    interpret=launch.interpret,
  )


def _by_query(which, kernel, plan, arrays, launch):
  """forward or dq: arrays are q, k, v and then do, lse, delta."""
  q, k, v, *rest = arrays
  (b, tp, n, h), (_, sp, kv, width) = q.shape, v.shape
  groups = n // kv
  rows = lambda size: pl.BlockSpec(
    (None, plan.block_q, None, size), lambda i, n, b: (b, i, n, 0)
  )
  whole = lambda size: pl.BlockSpec(
    (None, sp, None, size), lambda i, n, b: (b, 0, n // groups, 0)
  )
  line = pl.BlockSpec((None, None, plan.block_q), lambda i, n, b: (b, n, i))
  infos, listed = _specs(plan, by_key=False)
  if which == 'forward':
    out_specs = [rows(width), line]
    out_shape = [((b, tp, n, width), v.dtype), ((b, n, tp), jnp.float32)]
  else:
    out_specs, out_shape = [rows(h)], [(q.shape, q.dtype)]
  back = [rows(width), line, line][: len(rest)]
  return pl.pallas_call(
    functools.partial(kernel, plan),
    grid=(tp // plan.block_q, n, b),
    in_specs=[rows(h), whole(h), whole(width), *infos, *back, *listed],
    out_specs=out_specs,
    out_shape=[varying.result(q, *x) for x in out_shape],
    **_launch(which, plan, q, v, launch),
  )(q, k, v, *_infos(plan), *rest, *blocks.lists(plan.kinds))


def _by_key(plan, launch, q, k, v, do, lse, delta):
  """dkv."""
  (b, tp, n, h), (_, sp, kv, width) = q.shape, v.shape
  groups = n // kv
  own = lambda size: pl.BlockSpec(
    (None, plan.block_k, None, size), lambda i, n, b: (b, i, n, 0)
  )
  whole = lambda size: pl.BlockSpec(
    (None, tp, None, groups, size), lambda i, n, b: (b, 0, n, 0, 0)
  )
  lines = pl.BlockSpec((None, None, groups, tp), lambda i, n, b: (b, n, 0, 0))
  infos, listed = _specs(plan, by_key=True)
  heads = lambda x: x.reshape(b, tp, kv, groups, -1)
  rows = lambda x: x.reshape(b, kv, groups, tp)
  specs = [whole(h), own(h), own(width), *infos, whole(width), lines, lines]
  inputs = (heads(q), k, v, *_infos(plan), heads(do), rows(lse), rows(delta))
  return pl.pallas_call(
    functools.partial(_dkv_kernel, plan),
    grid=(sp // plan.block_k, kv, b),
    in_specs=[*specs, *listed],
    out_specs=[own(h), own(width)],
    out_shape=[varying.result(q, x.shape, x.dtype) for x in (k, v)],
    **_launch('dkv', plan, q, v, launch),
  )(*inputs, *blocks.lists(plan.kinds.swapaxes(1, 2)))


def _infos(plan):
  return jnp.asarray(plan.q_info), jnp.asarray(plan.k_info)


def forward(
  q_BTNH, k_BSKH, v_BSKV, segments, order, mask, launch=blocks.DEFAULT
):
  """-> (o_BTNV in v's dtype, lse_BTN float32); see op.py."""
  t = q_BTNH.shape[1]
  arrays = q_BTNH, k_BSKH, v_BSKV
  plan = _plan('forward', arrays, segments, order, mask, launch)
  tp, sp = plan.padded
  q, k, v = (
    varying.pad(x, n, 1) for x, n in ((q_BTNH, tp), (k_BSKH, sp), (v_BSKV, sp))
  )
  o, lse = _by_query('forward', _forward_kernel, plan, (q, k, v), launch)
  return o[:, :t], lse[:, :, :t].transpose(0, 2, 1)


def backward(
  q_BTNH, k_BSKH, v_BSKV, segments, order, mask, rows, launch=blocks.DEFAULT
):
  """-> (dq, dk, dv); rows: blocks.QueryRows."""
  t, s = q_BTNH.shape[1], k_BSKH.shape[1]

  def prepare(which):
    arrays = q_BTNH, k_BSKH, v_BSKV
    plan = _plan(which, arrays, segments, order, mask, launch)
    tp, sp = plan.padded
    q, do = (varying.pad(x, tp, 1) for x in (q_BTNH, rows.do))
    k, v = (varying.pad(x, sp, 1) for x in (k_BSKH, v_BSKV))
    # Rows past the end contribute nothing.
    lse = blocks.line(blocks.base2(rows.lse), tp, -blocks.NEG)
    return plan, (q, k, v, do, lse, blocks.line(rows.delta, tp))

  (dq,) = _by_query('dq', _dq_kernel, *prepare('dq'), launch)
  plan, arrays = prepare('dkv')
  dk, dv = _by_key(plan, launch, *arrays)
  return dq[:, :t], dk[:, :s], dv[:, :s]
