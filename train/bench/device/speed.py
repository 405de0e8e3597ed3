"""How fast a device is: ceilings, attention, and its block sizes.

Every figure is by the protocol of kernel_device.py: a program repeats a step on
its own output, candidates run in turn, and a rate stands beside two ceilings of
the same device, a product and a copy. Those of part `ceilings` are the ones
that other parts refer to; attention measures its own in the same rounds.

Legend: B rows, T tokens, N heads, H head size.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import types
from typing import Any

import jax
import jax.numpy as jnp

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import block_table
from paraxis.pallas_kernels.attention import hopper
from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.pallas_kernels.attention import xla as attention_xla
from paraxis.sharding.meter import target
from paraxis.train.bench import kernel_device
from paraxis.train.bench import kernel_tune
from paraxis.train.bench import measure
from paraxis.train.bench.device import report as device_report

ATTENTION_GOAL, READ_GOAL = 0.85, 0.8
PRODUCT, COPY = 'product bfloat16', 'copy'
TINY = kernel_device.Sizes((1, 64, 2, 16), 64, 2)


# -------------------------------------------------------------------- ceilings


def _ceiling(dtype, precision, work):
  """Rates of a square product, and in bfloat16 also of a copy."""
  sizes = TINY if work.quick else kernel_device.SIZES['full']
  n, repeats = sizes.square, sizes.repeats
  work.report.setup = f'{n} x {n}, {repeats} to a program'
  with jax.default_matmul_precision(precision):
    made = kernel_device.ceilings(n, repeats, dtype)
  if dtype != 'bfloat16':
    made.pop('copy')
  times = measure.interleave(made, work.rounds, say=work.say)
  name = 'product ' + dtype + f', {precision}' * (precision != 'default')
  rates = [2 * n**3 / s / 1e12 for s in times['product']]
  work.report.add({name: rates}, 'TF/s')
  moved = kernel_device.work('copy', sizes)[1]
  copied = [moved / s / 1e9 for s in times.get('copy', ())]
  work.report.add({COPY: copied}, 'GB/s')
  chip = target.of_device(jax.devices()[0])
  if chip is None:
    work.report.notes.append(
      f"{name}: the maker's figures of {jax.devices()[0].device_kind} are not "
      'known'
    )
  elif dtype == 'bfloat16':
    bounds = ((name, rates, chip.flops / 1e12),
              (COPY, copied, chip.hbm_bandwidth / 1e9))  # fmt: skip
    for row, found, most in bounds:
      share = [x / most for x in found]
      work.report.check(f"{row} / the maker's figure", share, 1.0, least=False)


def ceilings(quick: bool) -> dict[str, Callable]:
  """Cases of the part: what other rates stand beside."""
  del quick
  kinds = (
    ('bfloat16', 'default'), ('float32', 'default'), ('float32', 'highest')
  )  # fmt: skip
  return {
    f'{dtype}, {precision}': functools.partial(_ceiling, dtype, precision)
    for dtype, precision in kinds
  }


# ------------------------------------------------------------------- attention


def _attention(length, work):
  """kernel_device.kernels at one length, and the goal."""
  sizes = TINY
  if not work.quick:
    b, t, n, h = kernel_device.SIZES['full'].shape
    sizes = kernel_device.SIZES['full']
    sizes = sizes._replace(shape=(b * t // length, length, n, h))
  name = f'T {sizes.shape[1]}: '
  found = kernel_device.kernels(work.rounds, work.quick, work.say, sizes)
  work.report.setup = found.setup.partition(' B')[0] + ', causal, bfloat16'
  said = [n for n in found.notes if not (work.quick and 'WRONG' in n)]
  work.report.notes += [name + note for note in said]
  for what, (unit, values) in found.rows.items():
    work.report.add({name + what: values}, unit)
  for c in found.checks:
    work.report.check(name + c.what, c.values, c.target, c.least)
  spec = jax.ShapeDtypeStruct(sizes.shape, jnp.bfloat16)
  mask = attention_op.Mask(scale=sizes.shape[-1] ** -0.5)
  spec = attention_op.spec_of(spec, spec, mask, None, None)
  ours = attention_op.choose(spec=spec)[0].name
  for which in (kernel_device.FORWARD, kernel_device.BOTH):
    mine = found.rows.get(f'{ours} {which}')
    if mine is None:
      raise RuntimeError(f'{ours} {which} did not run: see the notes')
    theirs = found.rows.get(f'cudnn {which}')
    if theirs and length == max(LENGTHS):
      goal = f'{device_report.GOAL}attention {which}: speed of ours / cudnn'
      ratios = measure.ratios(theirs[1], mine[1])
      work.report.check(goal, ratios, ATTENTION_GOAL)


LENGTHS = (8192, 2048)


def attention(quick: bool) -> dict[str, Callable]:
  """Cases of the part: a length each."""
  lengths = LENGTHS[:1] if quick else LENGTHS
  return {f'T {n}': functools.partial(_attention, n) for n in lengths}


# --------------------------------------------------------------------- blocks


def _standing_in(form) -> Any:
  """XLA's form as a kernel in blocks of a Launch."""

  def call(*given):
    *given, launch = given
    at = next(i for i, x in enumerate(given) if dataclasses.is_dataclass(x))
    given[at] = dataclasses.replace(given[at], block=launch.block[0])
    return form(*given)

  return call


def _blocks(head, work):
  """Searches one head size, and adds its rows to DIR/block_table.json."""
  here = registry.current_target()
  path = pathlib.Path(work.folder) / 'block_table.json'
  if here.platform in kernel_tune.GRID:
    setting = kernel_tune.Setting(here.platform, here.device_kind, head)
    grid, shape = kernel_tune.GRID[here.platform], (2, kernel_tune.LENGTH, 8)
    module = kernel_tune.KERNELS[here.platform]
    if here.platform == 'gpu' and hopper.unfit(here) is None:
      work.report.notes.append('of pallas_gpu: pallas_hopper has its own')
  else:
    setting = kernel_tune.Setting('gpu', here.device_kind, 16)
    grid, shape = [(16, 16), (32, 32)], (1, 64, 2)
    module = types.SimpleNamespace(
      forward=_standing_in(attention_xla.forward),
      backward=_standing_in(attention_xla.backward),
    )
    work.report.notes.append("XLA's form stands in for the kernel")
  work.report.setup = f'queries x keys, {here}, {shape}'
  rows = kernel_tune.measured(
    setting, module, grid, shape, work.rounds, work.say
  )
  kept = list(block_table.read(path).values()) if path.exists() else []
  keys = {row.key for row in rows}
  block_table.write(path, [*[r for r in kept if r.key not in keys], *rows])
  for row in rows:
    work.report.notes.append(kernel_tune.line(row))
    if row.default:
      what = f'{row.key.which} {row.key.mask}, head {head}: default / best'
      work.report.add({what: [row.default / row.figure]}, 'ratio')


def blocks(quick: bool) -> dict[str, Callable]:
  """Cases of the part: a head size each."""
  heads = kernel_tune.HEADS[:1] if quick else kernel_tune.HEADS
  return {f'head size {n}': functools.partial(_blocks, n) for n in heads}
