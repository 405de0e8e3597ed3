"""Attention kernels for Hopper GPUs (Mosaic): the forward pass.

    s = q k';  m' = max(m, max s);  p = 2^(s - m')
    l' = 2^(m - m') l + sum p;  o' = 2^(m - m') o + p v

(FlashAttention-3, arXiv:2407.08608, section 3.) Programs as in
hopper_program.py, of a block of queries of a head. The two groups that compute
take turns: while one is at its softmax, the other has the tensor cores (section
3.2). Results are written once, so that a run repeats bit for bit.

Products take bfloat16 or float16 and add in float32; everything else is float32
(2^x, log and division by the approximate instructions). What these kernels do
not take gpu.py does.

Legend: B batch, T query length, S key length, N query heads, K kv heads, H head
size; q, k tokens of a block.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import blocks
from paraxis.pallas_kernels.attention import gpu
from paraxis.pallas_kernels.attention import hopper_backward
from paraxis.pallas_kernels.attention import hopper_program as program

NAME = 'pallas_hopper'
DTYPES = ('bfloat16', 'float16')
HEADS = (64, 128)
MOST_HEADS = 2**16 - 1  # of all rows: a dimension of the grid
HALF = program.HALF
BLOCK, SLOTS = (2 * HALF, 128), 2  # queries, keys; blocks of keys in memory


def unfit(target):
  """None, or why a GPU has no such kernels (registry.kernel)."""
  if re.search(r'\bG?H\d{2,3}\b', target.device_kind):
    return None
  return f'needs a Hopper GPU, target is {target.device_kind}'


def limits(spec, target):
  """None, or what else the kernels cannot take (registry.kernel)."""
  h, width = spec.heads
  if h != width or h not in HEADS:
    return f'head sizes {h} and {width}: takes 64, or 128, of both'
  if spec.q[1] < HALF:
    return f'{spec.q[1]} queries a row: takes {HALF} and more'
  if {*spec.others} - {spec.dtype}:
    return f'takes one dtype, not {spec.dtype} and {", ".join(spec.others)}'
  if spec.q[0] * spec.q[2] > MOST_HEADS:
    return f'{spec.q[0]} rows x {spec.q[2]} heads: takes {MOST_HEADS} together'
  return gpu.limits(spec, target)


class _Program(NamedTuple):
  """A program: references of memory and barriers, and what it is of.

  x: q, k, v, q_info, k_info, columns, counts, o, lse. memory: q and o, k, v,
  lse. ready: of q, k, v. taken: of k, v. turn: who has the tensor cores.
  """

  plan: Any
  launch: Any
  at: program.Place
  x: Any
  memory: Any
  ready: Any
  taken: Any
  turn: Any

  def counts(self):
    """Of its list: full blocks, all blocks."""
    return [self.x[6][self.at.listed, self.at.row, i] for i in (0, 1)]

  def keys(self, i):
    """The first key of block i."""
    return self.x[5][self.at.listed, self.at.row, i] * self.plan.block_k

  def pass_turn(self):
    """Gives the tensor cores to the other group, and waits for them."""
    plgpu.barrier_arrive(self.turn)
    plgpu.barrier_wait(self.turn)

  def await_keys(self, i, count):
    """Waits for the keys of block i of `count`."""

    @pl.when(i < count)
    def _wait():
      plgpu.barrier_wait(self.ready[1].at[_slot_of(i)])


def _slot_of(i):
  return jax.lax.rem(i, jnp.int32(SLOTS))


def _copy(p):
  def copy(i, slot, which):
    x, smem, ready = (of[which + 1] for of in (p.x, p.memory, p.ready))
    keys = p.at.batch, pl.ds(p.keys(i), p.plan.block_k), p.at.kv_head
    plgpu.copy_gmem_to_smem(x.at[keys], smem.at[slot], ready.at[slot])

  program.copies(p.counts()[1], SLOTS, copy, *p.taken)


def _block(p, mine, start, partial, i, carry):
  """Scores, softmax and values of one block; mine: the group's queries."""
  (out, old, total), slot = carry, _slot_of(i)
  _, k_smem, v_smem, _ = p.memory

  def scores(acc):
    plgpu.wgmma(acc, mine, k_smem.at[slot].transpose((1, 0)))
    p.pass_turn()
    return acc[...]

  s = pl.run_scoped(scores, program.ACC((HALF, p.plan.block_k), jnp.float32))
  plgpu.barrier_arrive(p.taken[0].at[slot])
  here = p.x[3].at[p.at.listed], start, HALF, program.ROW
  seen = p.x[4].at[p.at.listed], p.keys(i), p.plan.block_k, program.COLUMN
  masked = program.masked(p.plan, here, seen, 0, partial)
  s, _ = program.logits(p.plan, s, masked)
  factor = program.factor_of(p.plan.mask) or 1.0
  new = jnp.maximum(old, s.max(1) * factor)
  shrink = jnp.exp2(old - new)
  weight = jnp.exp2(s * factor - jax.lax.broadcast_in_dim(new, s.shape, (0,)))
  out *= jax.lax.broadcast_in_dim(shrink, out.shape, (0,))
  total = total * shrink + weight.sum(1)
  # Nothing of the softmax is left for after the turn.
  out, total, new, weight = jax.lax.optimization_barrier(
    (out, total, new, weight.astype(v_smem.dtype))
  )
  plgpu.barrier_arrive(p.turn)  # the softmax is done
  plgpu.barrier_wait(p.ready[2].at[slot])
  plgpu.barrier_wait(p.turn)  # the tensor cores are free
  following = lambda: p.await_keys(i + 1, p.counts()[1])
  out = program.add_product(out, weight, v_smem.at[slot], p.launch, following)
  plgpu.barrier_arrive(p.taken[1].at[slot])
  return out, new, total


def _compute(p, group):
  plgpu.set_max_registers(program.REGISTERS[0], action='increase')
  q, *_, o, lse = p.x
  mine, my_lse = p.memory[0].at[group], p.memory[3].at[group]
  start = p.at.row * p.plan.block_q + group * HALF
  rows = pl.ds(start, HALF)
  plgpu.copy_gmem_to_smem(
    q.at[p.at.batch, rows, p.at.head], mine, p.ready[0].at[group]
  )
  plgpu.barrier_wait(p.ready[0].at[group])
  full, every = p.counts()
  p.await_keys(jnp.int32(0), every)
  pl.when(group == 1)(p.pass_turn)
  carry = (
    program.constant((HALF, o.shape[-1]), 0, program.WGMMA),
    program.constant((HALF,), blocks.FLOOR, program.ROW),
    program.constant((HALF,), 0, program.ROW),
  )
  body = functools.partial(_block, p, mine, start)
  out, m, total = program.walk(body, full, every, carry)
  pl.when(group == 0)(p.pass_turn)
  total, my_lse[...] = blocks.softmax_end(m, total)
  out *= jax.lax.broadcast_in_dim(1 / total, out.shape, (0,))
  mine[...] = out.astype(o.dtype)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(mine, o.at[p.at.batch, rows, p.at.head])
  plgpu.copy_smem_to_gmem(my_lse, lse.at[p.at.batch, p.at.head, rows])
  plgpu.wait_smem_to_gmem(0)


def _kernel(plan, launch, place, refs, scratch):
  memory, (ready, taken, turn) = scratch
  p = _Program(plan, launch, place(), refs, memory, ready, taken, turn)
  group = jax.lax.axis_index('group')
  pl.when(group == 2)(lambda: _copy(p))
  pl.when(group < 2)(lambda: _compute(p, group))


@program.once
def forward(
  q_BTNH, k_BSKH, v_BSKH, segments, order, mask, launch=blocks.DEFAULT
):
  """-> (o_BTNH in v's dtype, lse_BTN float32); see op.py."""
  lengths = t, _ = q_BTNH.shape[1], k_BSKH.shape[1]
  plan = blocks.plan(lengths, segments, order, mask, launch.block or BLOCK)
  tp, sp = plan.padded
  q, k, v = (
    varying.pad(x, n, 1) for x, n in ((q_BTNH, tp), (k_BSKH, sp), (v_BSKH, sp))
  )
  (b, _, n, h), kv = q.shape, v.shape[2]
  place, grid = program.places(
    plan, (b, n, n // kv), tp // plan.block_q, 4 * sp * h
  )
  of_keys = program.tile(v.dtype, SLOTS, plan.block_k, h)
  queries = program.tile(v.dtype, 2, HALF, h)
  memory = queries, of_keys, of_keys, plgpu.SMEM((2, HALF), jnp.float32)
  barriers = (
    (program.barriers(2), *[program.barriers(SLOTS)] * 2),
    (program.barriers(SLOTS, 2),) * 2,
    program.barriers(1, 2),
  )
  kernel = functools.partial(_kernel, plan, launch, place)
  out = [
    varying.result(q, q.shape, v.dtype),
    varying.result(q, (b, n, tp), jnp.float32),
  ]
  flops = blocks.cost('forward', plan, q, v).flops
  scratch = memory, barriers
  run = program.call('forward', kernel, launch, grid, out, scratch, flops)
  infos, lists = program.infos(plan), blocks.lists(plan.kinds)
  o, lse = run(q, k, v, *infos, *lists)
  return o[:, :t], lse[:, :, :t].transpose(0, 2, 1)


backward = hopper_backward.backward
