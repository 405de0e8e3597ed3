"""What the attention kernels for Hopper GPUs (Mosaic) are made of.

A program has three groups of four warps (FlashAttention-3, arXiv:2407.08608,
section 3.1). One copies blocks to shared memory, as many ahead as there are
slots for; two compute, each for its half of the block that the program is of.
A slot has two barriers: `ready`, its block is there; `taken`, both have used
it. As in gpu.py a program walks a list of the blocks it can see, full ones
first, and only the partial ones have a mask.

Programs of one section of heads, whose keys and values fit the second cache
together, start one after another, those with the most blocks first.

Legend: B batch, q, k tokens of a block.
"""

import functools
import inspect
import math
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import blocks

HALF = 64  # tokens of a computing group: the rows of one product
ACC = plgpu.WGMMAAccumulatorRef
CACHE = 32 * 2**20  # bytes of keys and values of one section of heads
REGISTERS = 240, 24  # of a thread that computes, that copies
WGMMA = plgpu.Layout.WGMMA
ROW, COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)  # a number of each row, column
TILES = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


# Layers that make the same call share one function, which is lowered and
# compiled once: 18 layers that were written out took 100 s on an H200.
once = functools.partial(jax.jit, static_argnames=('mask', 'launch'))


class Place(NamedTuple):
  """What a program is of; listed: its batch entry in lists and infos."""

  batch: Any
  head: Any
  kv_head: Any
  row: Any
  listed: Any


def places(plan, heads, rows, bytes_of_head, first=False):
  """(() -> Place of a program, grid).

  Args:
    heads: B, heads, those that share keys. rows: blocks of a head.
    bytes_of_head: what the programs of those that share read.
    first: row 0 has the most blocks, so that it starts; else the last has.
  """
  b, n, shared = heads
  most = max(1, CACHE // bytes_of_head) * shared
  section = max(x for x in range(1, b * n + 1) if b * n % x == 0 and x <= most)

  def place():
    i = jax.lax.axis_index('section') * section + jax.lax.axis_index('head')
    batch, head = (f(i, jnp.int32(n)) for f in (jax.lax.div, jax.lax.rem))
    row = jax.lax.axis_index('row')
    row = row if first else rows - 1 - row
    kv_head = jax.lax.div(head, jnp.int32(shared))
    return Place(batch, head, kv_head, row, 0 if plan.static else batch)

  return place, (b * n // section, rows, section)


def call(name, kernel, launch, grid, out, scratch, flops):
  """The function of arrays that runs kernel(refs, (memory, barriers)).

  flops: floating-point operations of it, for those that count.
  """

  def entry(*refs):
    run = lambda *scratch: kernel(refs, scratch)
    pl.run_scoped(run, *scratch, collective_axes='group')

  run = plgpu.kernel(
    entry,
    out_type=out,
    grid=grid,
    grid_names=('section', 'row', 'head'),
    num_threads=3,
    thread_name='group',
    kernel_name=f'attention_hopper_{name}',
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=launch.interpret or None,
  )
  size = math.prod(out[0].shape)
  run = jax.named_scope(f'about_{flops}_flops_for_{size}')(run)  # turns.py

  def typed(q, *rest):
    """Its results vary over the manual mesh axes that q does."""
    axes = jax.typeof(q).mat.varying
    return [varying.vary(x, axes) for x in run(q, *rest)]

  return typed


def tile(dtype, *shape):
  """Blocks in shared memory, laid out for the tensor cores."""
  return plgpu.SMEM(shape, dtype, transforms=TILES)


def barriers(number, arrivals=1):
  """`number` barriers, each passed after so many arrivals."""
  return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)


def infos(plan):
  """q_info and k_info of a plan on the device."""
  return jnp.asarray(plan.q_info), jnp.asarray(plan.k_info)


# ------------------------------------------------------ the group that copies


def copies(count, slots, copy, *taken):
  """Runs copy(i, slot, w) of blocks i < count for every w of `taken`.

  taken: barriers of the slots, one row of them for what is used at one time.
  A block waits until both groups have used what its slot held; all have been
  used at the end.
  """
  plgpu.set_max_registers(REGISTERS[1], action='decrease')

  @pl.loop(0, count + slots)
  def _block(i):
    slot = jax.lax.rem(i, jnp.int32(slots))
    for which, of_slot in enumerate(taken):

      @pl.when((i >= slots) & (i - slots < count))
      def _wait(of_slot=of_slot):
        plgpu.barrier_wait(of_slot.at[slot])

      @pl.when(i < count)
      def _copy(which=which):
        copy(i, slot, which)


# ---------------------------------------------------- the groups that compute


def walk(body, full, every, carry):
  """Folds body(partial, i, carry) over a list: full blocks, then partial."""
  some = lambda partial: functools.partial(body, partial)
  carry = jax.lax.fori_loop(0, full, some(False), carry)
  return jax.lax.fori_loop(full, every, some(True), carry)


def constant(shape, value, layout):
  """A float32 constant in registers."""
  return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def load(ref, layout, optimized=True):
  """All of a reference in registers; optimized: by wide loads."""
  index = inspect.signature(plgpu.load).parameters.get('idx')
  # jax 0.10 asks for one.
  given = [()] if index and index.default is index.empty else []
  return plgpu.load(ref, *given, layout=layout, optimized=optimized)


def line(ref, at, size, layout):
  """`size` numbers of a row of the device's memory from `at` on."""
  return load(ref.at[pl.ds(at, size)], layout, optimized=False)


def add_product(start, x, y_ref, launch, meanwhile=lambda: None):
  """start + x y, x in registers, and meanwhile() while it runs."""
  if launch.interpret:  # it has no such product
    meanwhile()
    y = y_ref[...]
    plgpu.commit_smem()  # it asks for that between a load and the next copy
    return start + blocks.dot(x, y, blocks.NN)

  def product(acc):
    plgpu.wgmma(acc, x, y_ref)
    meanwhile()

  return pl.run_state(product)(ACC.init(start))


def factor_of(mask):
  """What a score times it is a base-2 logit; None: more than a product."""
  factor = mask.scale * blocks.LOG2E
  return None if mask.softcap or factor < 1e-6 else factor


def logits(plan, s, masked):
  """Scores -> (x, slope); base-2 logits: x times the factor, if there is one.

  The factor is left to the product that subtracts a maximum or lse from them:
  one instruction. masked(s, value): s with `value` where a key is hidden.
  """
  factor, cap = factor_of(plan.mask), plan.mask.softcap
  if factor is not None:
    return masked(s, blocks.NEG / factor), None
  if not cap:
    return masked(blocks.logits(plan.mask, s)[0], blocks.NEG), None
  # The tanh of approximate mathematics has 11 bits; that of 2^x has them all.
  power = jnp.exp2(s * (2 * blocks.LOG2E * plan.mask.scale / cap))
  tanh = 1 - 2 / (1 + power)
  return masked(tanh * (cap * blocks.LOG2E), blocks.NEG), 1 - tanh * tanh


def masked(plan, q, k, axis, partial):
  """The `masked` of `logits` in a block.

  Args:
    q, k: (info of a batch entry, first token, tokens, layout). axis: that of
      the queries in the block. partial: False: nothing is hidden.
  """

  def hide(s, value):
    spread = lambda x, axis: jax.lax.broadcast_in_dim(x, s.shape, (axis,))
    both = (q, axis), (k, 1 - axis)
    infos = [
      [spread(line(info.at[row], *place), axis) for row in (0, 1)]
      for (info, *place), axis in both
    ]
    ok = blocks.visible(plan, *infos)
    return s if ok is None else jnp.where(ok, s, value)

  return hide if partial else lambda s, value: s
