"""`paraxis doctor --kernels`: all ops, compiled ahead of time for TPU and GPU.

One line per (op, implementation, chip): compiled, with how many kernels the
program calls and the most memory it has in use; refused, with the reason of the
implementation (registry.py); failed, which is a bug of paraxis; or not tried,
because the compiler for the chip is not installed. None is executed.

A program is the op with its gradients (where it has any) at one small shape, in
the dtype that it is used in. Custom calls are counted in the compiled text, so
that a missing kernel is noticed: an XLA form calls none.

Legend: B rows, T tokens, N query heads, K kv heads, H head size, D model,
E groups, F outputs, V vocabulary.
"""

import collections
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import block_table
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.decode_attention import op as decode_attention
from paraxis.pallas_kernels.matmul import cross_entropy
from paraxis.pallas_kernels.matmul import grouped as grouped_matmul
from paraxis.pallas_kernels.matmul import quantized as quantized_matmul
from paraxis.pallas_kernels.scans import affine as affine_scan
from paraxis.pallas_kernels.scans import delta as delta_scan
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import linear as linear_scan
from paraxis.pallas_kernels.scans import selective as selective_scan
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import target as target_lib

# One chip of each kind, or the smallest slice that its compiler takes.
TARGETS = (
  'v5e:1x1', 'v5p:1x1x1', 'v6e:1x1', 'tpu7x:1x1x1', 'h100:1', 'h200:1'
)  # fmt: skip
# Hand-written kernels in a compiled program: Mosaic (TPU, GPU), Triton, cuDNN.
KERNEL = re.compile(
  r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*|'
  r'__gpu\$xla\.gpu\.triton|__cudnn\$\w+)"'
)
# Implementations that are kernels; all others are made of XLA's operations.
KERNELS = (
  'pallas_tpu', 'pallas_hopper', 'pallas_gpu', 'splash', 'cudnn', 'megablox',
  'tokamax',
)  # fmt: skip
_FAULTS = (jax.errors.JaxRuntimeError, NotImplementedError, ValueError)


class KernelRow(NamedTuple):
  """One line of the matrix.

  state: 'compiled', 'refused', 'failed' or 'not tried', all but the first with
  a reason. kernels: custom calls. peak: bytes in use at the worst moment,
  arguments and results included.
  """

  op: str
  implementation: str
  target: str
  state: str
  reason: str = ''
  kernels: int = 0
  peak: int = 0


def _with_gradients(function, count):
  """function(*arrays) -> its result and the gradients of the first `count`."""

  def both(*arrays):
    inputs, rest = arrays[:count], arrays[count:]
    out, back = jax.vjp(lambda *x: function(*x, *rest), *inputs)
    return out, back(out)

  return both


def _attention(impl):
  mask = attention.Mask(scale=128**-0.5)

  def call(q, k, v):
    return attention.attention(q, k, v, mask, impl=impl)

  kv = (1, 1024, 2, 128), 'bfloat16'
  return _with_gradients(call, 3), [((1, 1024, 8, 128), 'bfloat16'), kv, kv]


def _decode_attention(impl):
  mask = attention.Mask(scale=128**-0.5)

  def call(q, k, v, lengths):
    return decode_attention.ragged(q, k, v, mask, lengths, impl)

  cache = (4, 2, 2048, 128), 'bfloat16'
  query = (4, 1, 8, 128), 'bfloat16'
  return call, [query, cache, cache, ((4,), 'int32')]


def _gated_scan(impl):
  def call(q, k, v, g, state, reset):
    return gated_scan.gated_scan(q, k, v, g, reset, state, impl=impl)

  q, v = (1, 1024, 4, 64), (1, 1024, 4, 128)
  keys = [(q, 'bfloat16')] * 2 + [(v, 'bfloat16'), (q, 'float32')]
  state = (1, 4, 64, 128), 'float32'
  return _with_gradients(call, 5), [*keys, state, (q[:2], 'bool')]


def _delta_scan(impl):
  def call(q, k, v, g, beta, state, reset):
    return delta_scan.delta_scan(q, k, v, g, beta, reset, state, impl=impl)

  q, v = (1, 1024, 2, 64), (1, 1024, 4, 128)
  tokens = [(q, 'bfloat16')] * 2 + [(v, 'bfloat16'), *[(v[:3], 'float32')] * 2]
  state = (1, 4, 64, 128), 'float32'
  return _with_gradients(call, 6), [*tokens, state, (q[:2], 'bool')]


def _linear_scan(impl):
  def call(a, b, state, reset):
    return linear_scan.linear_scan(a, b, reset, state, impl=impl)

  row = (2, 1024, 512), 'float32'
  state = (2, 512), 'float32'
  shapes = [row, row, state, ((2, 1024), 'bool')]
  return _with_gradients(call, 3), shapes


def _selective_scan(impl):
  def call(x, dt, shared, rate, state, reset):
    return selective_scan.selective_scan(
      x, dt, shared, rate, reset, state, impl=impl
    )

  row, reset = (1, 1024, 512), ((1, 1024), 'bool')
  floats = row, row, (1, 1024, 2, 16), (512, 16), (1, 512, 16)
  return _with_gradients(call, 5), [*((s, 'float32') for s in floats), reset]


def _affine_scan(impl):
  call = functools.partial(affine_scan.affine_scan, impl=impl)
  j, b = (1, 256, 2, 2, 256), (1, 256, 2, 256)
  shapes = [(s, 'float32') for s in (j, b, (1, 2, 256))]
  return _with_gradients(call, 3), shapes


def _grouped_matmul(impl):
  def call(x, w, sizes):
    y = grouped_matmul.product(x, w, sizes, 64, jnp.float32, impl)
    given = x, y.astype(x.dtype), sizes, 64, len(w), jnp.float32
    return y, grouped_matmul.gradient(*given, impl)

  x, w = (1024, 256), (8, 256, 512)
  return call, [(x, 'bfloat16'), (w, 'bfloat16'), ((8,), 'int32')]


def _quantized_matmul(impl):
  call = functools.partial(quantized_matmul.quantized_matmul, impl=impl)
  return call, [
    ((16, 1024), 'bfloat16'), ((512, 2048), 'uint8'), ((8, 2048), 'float32')
  ]  # fmt: skip


def _cross_entropy(impl):
  def call(x, w, targets):
    return cross_entropy.linear_cross_entropy(
      x, w, targets, chunk=2048, impl=impl
    )

  shapes = [((512, 256), 'bfloat16'), ((16384, 256), 'bfloat16')]
  return _with_gradients(call, 2), [*shapes, ((512,), 'int32')]


# op -> (implementation -> (function, [(shape, dtype) of its arguments]))
PROGRAMS = dict(
  attention=_attention,
  decode_attention=_decode_attention,
  gated_scan=_gated_scan,
  delta_scan=_delta_scan,
  linear_scan=_linear_scan,
  selective_scan=_selective_scan,
  affine_scan=_affine_scan,
  grouped_matmul=_grouped_matmul,
  quantized_matmul=_quantized_matmul,
  cross_entropy=_cross_entropy,
)


def _reason(op, implementation, error):
  """The registry's reason for one implementation, cut out of its message."""
  found = re.search(
    rf'{op}: cannot run on .*?: {implementation}: (.*); use', error
  )
  return found[1] if found else error


def row(op, implementation, name, topology):
  """`KernelRow` of one program; `name` is what the chip is called in it."""
  make = functools.partial(KernelRow, op, implementation, name)
  function, shapes = PROGRAMS[op](implementation)
  arrays = [jax.ShapeDtypeStruct(*s) for s in shapes]
  try:
    traced = aot.trace_on(topology, function, *arrays)
  except errors.UserError as error:
    return make('refused', _reason(op, implementation, str(error)))
  try:
    compiled = aot.compile_for(topology, op, traced)
  except (errors.UserError, *_FAULTS) as error:
    return make('failed', ' '.join(str(error).split())[:200])
  kernels = len(KERNEL.findall(compiled.as_text() or ''))
  return make('compiled', '', kernels, aot.memory(compiled).peak)


def rows(targets=TARGETS):
  """`KernelRow`s of all implementations of all ops on `targets`.

  targets: names of topologies (target.py), one device of each is used.
  """
  for name in targets:
    kind = name.partition(':')[0]
    lacking = aot.missing(target_lib.CHIPS[kind].platform)
    topology = None if lacking else aot.topology(name)
    for op in PROGRAMS:
      for implementation, _, _ in registry.explain(op):
        if lacking:
          yield KernelRow(op, implementation, kind, 'not tried', lacking)
        else:
          yield row(op, implementation, kind, topology)


def line(found):
  """`KernelRow` as text."""
  text = f'{found.state}: {found.reason}'
  if found.state == 'compiled':
    text = (
      f'compiled, {found.kernels} kernels, peak {found.peak / 2**20:.1f} MiB'
    )
  return f'{found.op:16} {found.implementation:13} {found.target:5} {text}'


# Kinds of device whose blocks are printed, (platform, jax's device_kind).
KINDS = (
  ('tpu', 'TPU v5 lite'), ('tpu', 'TPU v5'), ('tpu', 'TPU v6 lite'),
  ('tpu', 'TPU7x'), ('gpu', 'NVIDIA H100 80GB HBM3'),
  ('gpu', 'NVIDIA H200 141GB HBM3e'),
)  # fmt: skip


def block_lines(kinds=KINDS, heads=(64, 128)):
  """Lines: blocks (queries x keys) of attention in bfloat16, and their source.

  Of the kernels that blocks are searched for; pallas_hopper has its own.

  kinds: (platform, device kind) each. heads: head sizes. Masked calls.
  """
  for platform, kind in kinds:
    for head in heads:
      call = attention_blocks.Call(head, 'bfloat16', True, kind)
      shown = []
      for which in ('forward', 'dq', 'dkv'):
        found = attention_blocks.choose(platform, which, call)
        size = 'x'.join(map(str, found.block))
        shown.append(f'{which} {size} ({found.source})')
      of = f'attention by pallas_{platform}'
      yield f'blocks of {of}, {kind}, head size {head}: {", ".join(shown)}'
  for row in block_table.rows().values():
    yield f'{" ".join(map(str, row.key))}: {row.report()}'


def run(targets=TARGETS, say=print):
  """Prints the matrix and the blocks -> exit code: 1 if one failed, 77 if none
  was compiled.

  A kernel whose program calls none has failed, whatever the compiler says.
  """
  counts = collections.Counter()
  for found in rows(targets):
    say(line(found))
    silent = found.implementation in KERNELS and not found.kernels
    bad = found.state == 'compiled' and silent
    counts['failed' if bad else found.state] += 1
  for text in block_lines():
    say(text)
  states = 'compiled', 'refused', 'not tried', 'failed'
  told = ', '.join(f'{counts[state]} {state}' for state in states)
  say(f'{told}; none was executed')
  if counts['failed']:
    return errors.EXIT_DIFFERENT
  return errors.EXIT_OK if counts['compiled'] else errors.EXIT_SKIPPED
