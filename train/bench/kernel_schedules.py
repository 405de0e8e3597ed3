"""Static TPU schedules of the attention kernels, compared with jax's splash.

libtpu writes, for each kernel, the bundles of instructions that it made and
which units each of them uses (a TPU core issues one bundle a cycle, if nothing
stalls). So without a device: bundles of one visit of a block, the share of the
matrix units' slots in use, and registers stored because there were too few.

These are static figures of a compiled program, not measurements: waiting for
memory is not in them, and what runs once is counted like what runs always. Of
ours the full and the partial blocks are compiled separately (a visit runs one
of them; a program with both would count both). Splash has one kind, with a
mask; block sizes are equal.

The options must be in the environment before libtpu is loaded, so programs are
compiled in a process of its own (`measure`), with their gradients.

Legend: B rows, T tokens, N heads, H head size.
"""

import contextlib
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple
from unittest import mock

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp

from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import tpu as attention_tpu
from paraxis.sharding.meter import aot
from paraxis.train.bench import kernel_device

PASSES = {'fwd': 'forward', 'forward': 'forward', 'dq': 'dq', 'dkv': 'dkv'}
# Topology, tokens of a block; targets: splash's bundles, for each kind.
SCHEDULES = (('v5e:1x1', 512),)
BOUNDS = dict(full=0.95, partial=1.25)
KINDS = dict(full=2, partial=1, splash=None)  # of attention/blocks.py
_FILE = re.compile(
  r'-(?:attention_tpu|splash_mha)_(fwd|forward|dq|dkv)[\w.]*'
  r'-\d+-final_hlo-static-per-bundle-utilization\.txt$'
)
_OPTIONS = '--xla_jf_dump_to={} --xla_jf_dump_llo_text=true'


class StaticSchedule(NamedTuple):
  """Of a kernel. mxu: share of the matrix units' slots; spills: stores."""

  bundles: int
  mxu: float
  spills: int


def read(text):
  """`StaticSchedule` of the compiler's table of units per bundle.

  Raises:
    ValueError: the text is not such a table.
  """
  found = re.search(
    r'CAPA\w+:\n(?P<names>.*)\n(?P<most>.*)\n== UTIL\w+:\n(?P<rows>[\d\s]*)',
    text,
  )
  if not found:
    raise ValueError(f'not a table of units per bundle: {text[:80]!r}')
  names = [name.strip() for name in found['names'].split(',')]
  most = dict(zip(names, map(int, found['most'].split()), strict=True))
  rows = [line.split() for line in found['rows'].splitlines() if line.strip()]
  column = lambda name: sum(int(row[names.index(name)]) for row in rows)
  share = column('MXU') / (most['MXU'] * len(rows))
  return StaticSchedule(len(rows), share, column('VSTORE:SPILL'))


def _one_branch(kind):
  """Context: our kernels compile the branch for one kind of block alone.

  A causal mask has both kinds, so a kernel for it has both branches. Such a
  program gives wrong results: it is compiled, never run.
  """
  if kind is None:
    return contextlib.nullcontext()
  present = lambda plan: (kind,)
  return mock.patch.object(attention_blocks.BlockPlan, 'present', present)


def _ours(block, width):
  """Output and gradients by our kernels; block: (queries, keys)."""
  mask = attention.Mask(scale=width**-0.5)
  launch = attention_blocks.Launch(block)

  def call(q, k, v, do):
    given = q, k, v, None, None, mask
    o, lse = attention_tpu.forward(*given, launch)
    delta = (o.astype(jnp.float32) * do.astype(jnp.float32)).sum(-1)
    rows = attention_blocks.QueryRows(lse, delta, do)
    return o, attention_tpu.backward(*given, rows, launch)

  return call


def _splash(block):
  """The same by jax's splash attention."""
  (bq, bk), names = block, ('block_q', 'block_q_dkv', 'block_q_dq')
  sizes = splash_attention.BlockSizes(
    **dict.fromkeys(names, bq),
    **{n.replace('block_q', 'block_kv'): bk for n in names},
    block_kv_compute=bk,
    block_kv_dkv_compute=bk,
  )
  attend = functools.partial(kernel_device.splash, sizes=sizes)

  def call(q, k, v, do):
    o, back = jax.vjp(attend, q, k, v)
    return o, back(do)

  return call


def compile_all(name, block, folder, width, forms):
  """Compiles forms of the kernels -> {form: {pass: StaticSchedule}}.

  libtpu must have been loaded with `folder` in its options.

  Args:
    name: topology. block: (queries, keys) of a block. width: head size.
    forms: of KINDS.
  """
  machine, out = aot.topology(name), {}
  folder = pathlib.Path(folder)
  x = jax.ShapeDtypeStruct((2, 4 * max(block), 8, width), 'bfloat16')
  for form in forms:
    before, kind = set(folder.iterdir()), KINDS[form]
    call = _ours(block, width) if kind else _splash(block)
    with _one_branch(kind):
      traced = aot.trace_on(machine, call, x, x, x, x)
    aot.compile_for(machine, form, traced)
    out[form] = {}
    for path in set(folder.iterdir()) - before:
      if found := _FILE.search(path.name):
        out[form][PASSES[found[1]]] = read(path.read_text(encoding='utf-8'))
    if set(out[form]) != set(PASSES.values()):
      raise RuntimeError(
        f'{form}, {name}: the compiler wrote tables of {sorted(out[form])}, '
        f'expected {sorted(set(PASSES.values()))}'
      )
  return out


def environment(folder):
  """Of a process in which libtpu writes its tables into `folder`."""
  options = os.environ.get('LIBTPU_INIT_ARGS', ''), _OPTIONS.format(folder)
  options = ' '.join(options).strip()
  return os.environ | dict(JAX_PLATFORMS='cpu', LIBTPU_INIT_ARGS=options)


def measure(name, block, width=128, forms=tuple(KINDS)):
  """`compile_all` in a process of its own -> the same.

  block: (queries, keys), or a number for both.

  Raises:
    RuntimeError: it failed; its last line is in the message.
  """
  with tempfile.TemporaryDirectory() as folder:
    sizes = [block] * 2 if isinstance(block, int) else block
    arguments = json.dumps([name, sizes, folder, width, forms])
    done = subprocess.run(
      [sys.executable, '-m', 'paraxis.train.bench.kernel_schedules', arguments],
      env=environment(folder), capture_output=True, text=True, check=False,
    )  # fmt: skip
  if done.returncode:
    lines = re.findall(r'^[\w.]*(?:Error|Exception): .*', done.stderr, re.M)
    raise RuntimeError(f'schedules for {name}: {(lines or ["no message"])[-1]}')
  found = json.loads(done.stdout.splitlines()[-1])
  return {
    form: {which: StaticSchedule(*x) for which, x in passes.items()}
    for form, passes in found.items()
  }


def judge(report, say):
  """Adds bundles, shares and spills of the attention kernels for TPUs."""
  if not report.lacks('schedules'):
    return
  lacking = aot.missing('tpu')
  if lacking:
    report.notes.append(f'no static schedules: {lacking}')
    return
  for name, block in SCHEDULES:
    say(f'compiling attention for {name}, blocks of {block}')
    found = measure(name, block)
    kind = f'{name.partition(":")[0]} {block}'
    for form, passes in found.items():
      for which, x in sorted(passes.items()):
        row = f'{kind} {which}, {form}'
        report.add({f'{row}: bundles': [x.bundles]}, 'static')
        report.add({f'{row}: MXU share': [x.mxu]}, 'static')
        report.add({f'{row}: spills': [x.spills]}, 'static')
        if form in BOUNDS:
          ratio = [x.bundles / found['splash'][which].bundles]
          what = f'{row} / splash, bundles, static'
          report.check(what, ratio, BOUNDS[form], least=False)
  report.notes.append(
    'static: schedules compiled ahead of time for a TPU; not measured'
  )
  report.finish('schedules')


if __name__ == '__main__':
  topology_name, sizes, *arguments = json.loads(sys.argv[1])
  print(json.dumps(compile_all(topology_name, tuple(sizes), *arguments)))
