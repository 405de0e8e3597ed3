"""`paraxis bench kernels --tune=FILE`: block sizes of attention, searched for.

A small grid of (queries, keys) per pass, at one head size and dtype, for calls
without a mask ('full') and with one ('partial'). On an accelerator the figure
is device time, and the table is for that kind of device (source 'measured').
Without one it is static, compiled ahead of time: bundles of a visit of a full
and of a partial block (kernel_schedules.py), times how many of each there
are in a causal mask of LENGTH tokens, or in none. Waiting for memory is not in
it, and what a kernel does once a row is counted at every visit; a choice made
by it is a guess about time, and its rows say 'static'. A block that does not
compile, or does not fit with both kinds and all options of a mask, is left out.

FILE is written and nothing else: PARAXIS_BLOCKS=FILE makes it count.

Legend: B rows, T tokens, N heads, H head size.
"""

import os
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import block_table
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import gpu as attention_gpu
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import tpu as attention_tpu
from paraxis.sharding.meter import aot
from paraxis.train.bench import kernel_device
from paraxis.train.bench import kernel_schedules
from paraxis.train.bench import measure

PASSES = ('forward', 'dq', 'dkv')
LENGTH = 8192  # tokens that a static figure is for
UNIT = f'bundles, T {LENGTH}'
TOPOLOGIES = ('v5e:1x1', 'v6e:1x1', 'v5p:1x1x1')
HEADS = (128, 64)
GRID = dict(
  tpu=[(512, 512), (1024, 1024), (512, 1024), (1024, 512)],
  gpu=[(128, 64), (64, 64), (128, 128), (64, 128), (64, 32)],
)
KERNELS = dict(tpu=attention_tpu, gpu=attention_gpu)


class Setting(NamedTuple):
  """What one row of the table is for, without the pass and the mask."""

  platform: str
  device: str
  head: int
  dtype: str = 'bfloat16'


def best(setting, mask, figures, source, unit):
  """Rows of the least figures.

  Args:
    figures: {pass: {block: figure}}, the default block among them if it runs.
    mask, source: as in block_table. unit: of the figures.

  Raises:
    errors.UserError: none of the blocks of a pass ran.
  """
  out = []
  for which, found in figures.items():
    if not found:
      raise errors.UserError(
        f'--tune: no block of {which} runs on {setting.device} at head size '
        f'{setting.head}; nothing is written'
      )
    device, head, dtype = setting[1:]
    key = block_table.Key('attention', which, device, head, dtype, mask)
    default = found.get(attention_blocks.BLOCKS[setting.platform][which])
    block = min(found, key=found.get)
    figure = found[block]
    out.append(
      block_table.TunedBlock(key, block, source, unit, figure, default)
    )
  return out


# --------------------------------------------------------------------- static


def visits(block, mask):
  """(full, partial) blocks of LENGTH tokens; mask: 'full' or 'partial'."""
  options = attention.Mask(causal=mask == 'partial')
  size = LENGTH, LENGTH
  kinds = attention_blocks.plan(size, None, None, options, block).kinds
  return int((kinds == 2).sum()), int((kinds == 1).sum())


def static_figures(schedules, mask):
  """{pass: {block: bundles}} from {block: {form: {pass: StaticSchedule}}}."""
  out = {which: {} for which in PASSES}
  for block, forms in schedules.items():
    full, partial = visits(block, mask)
    for which in PASSES:
      out[which][block] = full * forms['full'][which].bundles
      if partial:
        out[which][block] += partial * forms['partial'][which].bundles
  return out


def fits(topology, block, head):
  """Whether a block compiles with both kinds and every option of a mask."""
  make = lambda *s, t='bfloat16': jax.ShapeDtypeStruct(s, t)
  length = 2 * max(block)
  x, rows = make(2, length, 2, head), make(2, length, t='int32')
  line = make(2, length, 2, t='float32')
  mask = attention.Mask(window=length - 1, softcap=5.0)
  launch = attention_blocks.Launch(block)

  def call(q, k, v, rows, lse, delta, do):
    given = q, k, v, (rows, rows), None, mask
    side = attention_blocks.QueryRows(lse, delta, do)
    back = attention_tpu.backward(*given, side, launch)
    return attention_tpu.forward(*given, launch), back

  traced = aot.trace_on(topology, call, x, x, x, rows, line, line, x)
  try:
    aot.compile_for(topology, f'blocks {block}', traced)
  except (errors.UserError, jax.errors.JaxRuntimeError):
    return False
  return True


def static(name, head, say, grid=None):
  """Rows for a TPU, compiled ahead of time. name: topology.

  Raises:
    errors.UserError: libtpu is missing, or no block compiles.
  """
  topology, schedules = aot.topology(name), {}
  setting = Setting('tpu', topology.devices[0].device_kind, head)
  for block in grid or GRID['tpu']:
    try:
      found = kernel_schedules.measure(name, block, head, ('full', 'partial'))
    except RuntimeError as e:
      say(f'{setting.device}, head size {head}, {block}: left out: {e}')
      continue
    if fits(topology, block, head):
      schedules[block] = found
      say(f'{setting.device}, head size {head}, {block}: compiled')
    else:
      say(f'{setting.device}, head size {head}, {block}: does not fit')
  rows = []
  for mask in block_table.MASKS:
    figures = static_figures(schedules, mask)
    rows += best(setting, mask, figures, 'static', UNIT)
  return rows


# ------------------------------------------------------------------- measured


def steps(kernels, mask, block):
  """{pass: step(q, k, v, lse, delta, do) -> the next q} in blocks of a size."""
  launch = attention_blocks.Launch(block)
  like = lambda x, q: x.astype(q.dtype)

  def forward(q, k, v, *rows):
    return like(kernels.forward(q, k, v, None, None, mask, launch)[0], q)

  def back(q, k, v, *rows):
    side = attention_blocks.QueryRows(*rows)
    return kernels.backward(q, k, v, None, None, mask, side, launch)

  # The compiler removes computations whose results are not returned.
  dq = lambda q, *rest: like(back(q, *rest)[0], q)
  dkv = lambda q, *rest: like(sum(back(q, *rest)[1:]), q)
  return dict(forward=forward, dq=dq, dkv=dkv)


def measured(setting, kernels, grid, shape, rounds, say):
  """Rows by the time of a step on the devices of this process.

  Args:
    kernels: has `forward` and `backward` that take a Launch last.
    grid: blocks. shape: B, T, N; the head size is of `setting`.
  """
  x = (*shape, setting.head)
  draw = lambda i, s, t: jax.random.normal(jax.random.key(i), s, t)
  q, k, v, do = (draw(i, x, setting.dtype) for i in range(4))
  rows = []
  for mask in block_table.MASKS:
    options = attention.Mask(causal=mask == 'partial', scale=x[-1] ** -0.5)
    lse = jnp.full(shape, jnp.log(shape[1] / 2), jnp.float32)
    arrays = q, k, v, lse, jnp.zeros_like(lse), do
    figures = {which: {} for which in PASSES}
    made = {}
    for block in grid:
      for which, step in steps(kernels, options, block).items():
        try:
          made[which, block] = kernel_device.timed(step, arrays)
        except (jax.errors.JaxRuntimeError, NotImplementedError) as e:
          say(f'{which}, {block}: left out: {" ".join(str(e).split())[:120]}')
    names = {f'{w} {b}': run for (w, b), run in made.items()}
    times = measure.interleave(names, rounds, say=say)
    for which, block in made:
      spread = measure.spread(times[f'{which} {block}'])
      figures[which][block] = spread.median
    rows += best(setting, mask, figures, 'measured', 's')
  return rows


def tune(path, rounds, say):
  """Searches, writes the table to `path` -> lines of what was found.

  Raises:
    errors.UserError: nothing here can be searched, or `path` is no place.
  """
  if not path:
    raise errors.UserError('--tune: give the file to write, --tune=FILE')
  if os.path.isdir(path):
    raise errors.UserError(f'--tune={path} is a folder: name a file in it.')
  target = registry.current_target()
  rows, platform = [], target.platform
  begun = f'{path}.part'
  block_table.write(begun, [])  # now, not after an hour
  if platform in GRID:
    for head in HEADS:
      setting = Setting(platform, target.device_kind, head)
      given = KERNELS[platform], GRID[platform], (2, LENGTH, 8)
      rows += measured(setting, *given, rounds, say)
      block_table.write(begun, rows)
  else:
    for name in TOPOLOGIES:
      for head in HEADS:
        rows += static(name, head, say)
        block_table.write(begun, rows)
  os.replace(begun, path)  # an older table stands until this one is whole
  return list(map(line, rows))


def line(row):
  """A row as text."""
  size = 'x'.join(map(str, row.block))
  what = ' '.join(map(str, row.key[1:]))
  return f'{what}: {size}, {row.report()}'
