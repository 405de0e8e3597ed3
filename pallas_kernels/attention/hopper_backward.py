"""Attention kernels for Hopper GPUs (Mosaic): dq, and dk with dv.

    p = 2^(s - lse);  ds = p (do v' - delta)
    dq = sum ds k;  dv = sum p' do;  dk = sum ds' q

(FlashAttention-2, arXiv:2307.08691, algorithm 2, in programs as in
hopper_program.py.) Two kernels, without atomics, so that a run repeats bit for
bit: seven products for a block in place of five. A program of dk and dv adds up
the query heads that share its keys.

Legend: as in hopper.py.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import blocks
from paraxis.pallas_kernels.attention import hopper_program as program

HALF = program.HALF
# H -> (queries, keys) of a block, and how many are in memory. H200, T 8192, ms:
# dq, H 128: 1.25; with 4 slots 1.32. H 64: 1.64, with 64 keys 1.80. dk and dv,
# H 128: 1.81, with 3 slots 1.97. H 64: 2.11, with 64 queries 2.29.
DQ = {128: ((2 * HALF, 64), 3), 64: ((2 * HALF, 128), 2)}
DKV = {128: ((64, 2 * HALF), 2), 64: ((128, 2 * HALF), 2)}


def _two_products(first, second, shape):
  """(x y', z w') of ((x, y), (z, w)) in shared memory."""

  def both(*accumulators):
    for acc, (x, y) in zip(accumulators, (first, second), strict=True):
      plgpu.wgmma(acc, x, y.transpose((1, 0)))
    return tuple(acc[...] for acc in accumulators)

  return pl.run_scoped(both, *[program.ACC(shape, jnp.float32)] * 2)


def _weights(plan, products, lse, delta, masked, axis):
  """(p, ds without the scale) of (q k', do v') of a block; axis: queries'."""
  s, dp = products
  spread = lambda x: jax.lax.broadcast_in_dim(x, s.shape, (axis,))
  x, slope = program.logits(plan, s, masked)
  factor = program.factor_of(plan.mask) or 1.0
  p = jnp.exp2(x * factor - spread(lse))
  ds = p * (dp - spread(delta))
  return p, ds if slope is None else ds * slope


def _dq_kernel(plan, launch, place, slots, refs, scratch):
  q, k, v, q_info, k_info, do, lse, delta, columns, counts, dq = refs
  (q_smem, do_smem, k_smem, v_smem), (own_ready, ready, taken) = scratch
  at, group = place(), jax.lax.axis_index('group')
  full, every = (counts[at.listed, at.row, i] for i in (0, 1))
  first_of = lambda i: columns[at.listed, at.row, i] * plan.block_k

  @pl.when(group == 2)
  def _copy():
    def copy(i, slot, _):
      keys = at.batch, pl.ds(first_of(i), plan.block_k), at.kv_head
      for x, smem in ((k, k_smem), (v, v_smem)):
        plgpu.copy_gmem_to_smem(x.at[keys], smem.at[slot], ready.at[slot])

    program.copies(every, slots, copy, taken)

  @pl.when(group < 2)
  def _compute():
    plgpu.set_max_registers(program.REGISTERS[0], action='increase')
    start = at.row * plan.block_q + group * HALF
    rows = at.batch, pl.ds(start, HALF), at.head
    mine, my_do = q_smem.at[group], do_smem.at[group]
    for x, smem in ((q, mine), (do, my_do)):
      plgpu.copy_gmem_to_smem(x.at[rows], smem, own_ready.at[group])
    mine_of = lambda x: program.line(
      x.at[at.batch, at.head], start, HALF, program.ROW
    )
    my_lse, my_delta = mine_of(lse), mine_of(delta)
    plgpu.barrier_wait(own_ready.at[group])

    def body(partial, i, out):
      slot = jax.lax.rem(i, jnp.int32(slots))
      ki, vi = k_smem.at[slot], v_smem.at[slot]
      plgpu.barrier_wait(ready.at[slot])
      shape = HALF, plan.block_k
      products = _two_products((mine, ki), (my_do, vi), shape)
      here = q_info.at[at.listed], start, HALF, program.ROW
      seen = k_info.at[at.listed], first_of(i), plan.block_k, program.COLUMN
      masked = program.masked(plan, here, seen, 0, partial)
      _, ds = _weights(plan, products, my_lse, my_delta, masked, 0)
      out = program.add_product(out, ds.astype(k.dtype), ki, launch)
      plgpu.barrier_arrive(taken.at[slot])
      return out

    zeros = program.constant((HALF, q.shape[-1]), 0, program.WGMMA)
    out = program.walk(body, full, every, zeros)
    mine[...] = (out * plan.mask.scale).astype(dq.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mine, dq.at[rows])
    plgpu.wait_smem_to_gmem(0)


def _dkv_block(plan, launch, own, other, given, masked, carry):
  """(dk, dv) with one block: own (k, v), other (q, do).

  given: () -> (lse, delta), which are loaded after the products: registers.
  """
  (out_k, out_v), (k, v), (q, do) = carry, own, other
  # Transposed: (keys, queries).
  products = _two_products((k, q), (v, do), (HALF, plan.block_q))
  lse, delta = given()
  p, ds = _weights(plan, products, lse, delta, masked, 1)
  out_v = program.add_product(out_v, p.astype(do.dtype), do, launch)
  out_k = program.add_product(out_k, ds.astype(q.dtype), q, launch)
  return out_k, out_v


def _dkv_kernel(plan, launch, place, slots, groups, refs, scratch):
  q, k, v, q_info, k_info, do, lse, delta, rows, counts, dk, dv = refs
  memory, (own_ready, ready, taken) = scratch
  k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem = memory
  at, group = place(), jax.lax.axis_index('group')
  full, every = (counts[at.listed, at.row, i] for i in (0, 1))
  first_of = lambda i: rows[at.listed, at.row, i] * plan.block_q

  @pl.when(group == 2)
  def _copy():
    def copy(step, slot, _):
      head = at.head * groups + jax.lax.div(step, every)
      tokens = pl.ds(first_of(jax.lax.rem(step, every)), plan.block_q)
      for x, smem, index in (
        (q, q_smem, (at.batch, tokens, head)),
        (do, do_smem, (at.batch, tokens, head)),
        (lse, lse_smem, (at.batch, head, tokens)),
        (delta, delta_smem, (at.batch, head, tokens)),
      ):
        plgpu.copy_gmem_to_smem(x.at[index], smem.at[slot], ready.at[slot])

    program.copies(every * groups, slots, copy, taken)

  @pl.when(group < 2)
  def _compute():
    plgpu.set_max_registers(program.REGISTERS[0], action='increase')
    start = at.row * plan.block_k + group * HALF
    own = at.batch, pl.ds(start, HALF), at.head
    my_k, my_v = k_smem.at[group], v_smem.at[group]
    for x, smem in ((k, my_k), (v, my_v)):
      plgpu.copy_gmem_to_smem(x.at[own], smem, own_ready.at[group])
    plgpu.barrier_wait(own_ready.at[group])

    def body(g, partial, i, carry):
      slot = jax.lax.rem(g * every + i, jnp.int32(slots))
      plgpu.barrier_wait(ready.at[slot])
      here = q_info.at[at.listed], first_of(i), plan.block_q, program.COLUMN
      seen = k_info.at[at.listed], start, HALF, program.ROW
      masked = program.masked(plan, here, seen, 1, partial)
      row_of = lambda x: program.load(x.at[slot], program.COLUMN)
      given = lambda: (row_of(lse_smem), row_of(delta_smem))
      other = q_smem.at[slot], do_smem.at[slot]
      carry = _dkv_block(
        plan, launch, (my_k, my_v), other, given, masked, carry
      )
      plgpu.barrier_arrive(taken.at[slot])
      return carry

    def head(g, carry):
      return program.walk(functools.partial(body, g), full, every, carry)

    zeros = program.constant((HALF, k.shape[-1]), 0, program.WGMMA)
    out_k, out_v = jax.lax.fori_loop(0, groups, head, (zeros, zeros))
    my_k[...] = (out_k * plan.mask.scale).astype(dk.dtype)
    my_v[...] = out_v.astype(dv.dtype)
    plgpu.commit_smem()
    for smem, x in ((my_k, dk), (my_v, dv)):
      plgpu.copy_smem_to_gmem(smem, x.at[own])
    plgpu.wait_smem_to_gmem(0)


def _dq(plan, launch, slots, arrays):
  """arrays: q, k, v, do, lse, delta."""
  q, k, v = arrays[:3]
  (b, tp, n, h), (_, sp, kv, _) = q.shape, v.shape
  place, grid = program.places(
    plan, (b, n, n // kv), tp // plan.block_q, 4 * sp * h
  )
  own = program.tile(v.dtype, 2, HALF, h)
  keys = program.tile(v.dtype, slots, plan.block_k, h)
  barriers = (
    program.barriers(2, 2),
    program.barriers(slots, 2),
    program.barriers(slots, 2),
  )
  scratch = (own, own, keys, keys), barriers
  kernel = functools.partial(_dq_kernel, plan, launch, place, slots)
  out = [varying.result(q, q.shape, q.dtype)]
  flops = blocks.cost('dq', plan, q, v).flops
  run = program.call('dq', kernel, launch, grid, out, scratch, flops)
  lists = blocks.lists(plan.kinds)
  return run(q, k, v, *program.infos(plan), *arrays[3:], *lists)[0]


def _dkv(plan, launch, slots, arrays):
  """arrays: as of `_dq`."""
  q, k, v = arrays[:3]
  (b, tp, n, h), (_, sp, kv, _) = q.shape, v.shape
  groups = n // kv
  place, grid = program.places(
    plan, (b, kv, 1), sp // plan.block_k, 4 * tp * h * groups, first=True
  )
  own = program.tile(v.dtype, 2, HALF, h)
  queries = program.tile(v.dtype, slots, plan.block_q, h)
  row = plgpu.SMEM((slots, plan.block_q), jnp.float32)
  barriers = (
    program.barriers(2, 2),
    program.barriers(slots, 4),
    program.barriers(slots, 2),
  )
  scratch = (own, own, queries, queries, row, row), barriers
  kernel = functools.partial(_dkv_kernel, plan, launch, place, slots, groups)
  out = [varying.result(q, x.shape, x.dtype) for x in (k, v)]
  flops = blocks.cost('dkv', plan, q, v).flops
  run = program.call('dkv', kernel, launch, grid, out, scratch, flops)
  lists = blocks.lists(plan.kinds.swapaxes(1, 2))
  return run(q, k, v, *program.infos(plan), *arrays[3:], *lists)


@program.once
def backward(
  q_BTNH, k_BSKH, v_BSKH, segments, order, mask, rows, launch=blocks.DEFAULT
):
  """-> (dq, dk, dv); rows: blocks.QueryRows."""
  t, s = q_BTNH.shape[1], k_BSKH.shape[1]

  def prepare(block, slots):
    plan = blocks.plan((t, s), segments, order, mask, launch.block or block)
    tp, sp = plan.padded
    q, do = (varying.pad(x, tp, 1) for x in (q_BTNH, rows.do))
    k, v = (varying.pad(x, sp, 1) for x in (k_BSKH, v_BSKH))
    # Rows past the end contribute nothing.
    lse = blocks.line(blocks.base2(rows.lse), tp, -blocks.NEG)
    delta = blocks.line(rows.delta, tp)
    return plan, launch, slots, (q, k, v, do, lse, delta)

  h = q_BTNH.shape[-1]
  dq = _dq(*prepare(*DQ[h]))
  dk, dv = _dkv(*prepare(*DKV[h]))
  return dq[:, :t], dk[:, :s], dv[:, :s]
