"""The kernels in programs compiled ahead of time for TPUs and GPUs.

test_kernel_matrix.py compiles every implementation at one small shape. Here are
the variants, at sizes where a copy of an input would be seen: how often a
program with its gradients calls a kernel, and the memory that it takes.

Legend: B batch, T tokens or slots, N query heads, K kv heads, H head size,
D inputs or channels, F outputs.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import kernel_cases
import numpy as np
import pytest
import support

from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.decode_attention import op as decode_attention
from paraxis.pallas_kernels.decode_attention import slot_write_tpu
from paraxis.pallas_kernels.matmul import grouped as grouped_matmul
from paraxis.pallas_kernels.matmul import quantized as quantized_matmul
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import linear as linear_scan
from paraxis.pallas_kernels.scans import selective as selective_scan
from paraxis.sharding.meter import aot
from paraxis.train.bench import kernel_matrix
from paraxis.train.claims import experiment

MIB = 2**20
array = jax.ShapeDtypeStruct


def packed_attention(impl):
  """Gradients of all arguments: documents, a window, a softcap and sinks."""
  mask = attention.Mask(scale=0.1, window=300, softcap=5.0)

  def loss(q, k, v, sinks, rows):
    o, lse = attention.attention(
      q, k, v, mask, (rows, rows), impl=impl, sinks_N=sinks
    )
    return o.astype(jnp.float32).sum() + jnp.where(lse > -1e9, lse, 0).sum()

  kv = array((2, 1000, 2, 128), 'bfloat16')
  return jax.grad(loss, (0, 1, 2, 3)), (
    array((2, 1000, 8, 128), 'bfloat16'), kv, kv, array((8,), 'float32'),
    array((2, 1000), 'int32'),
  )  # fmt: skip


def decode(softcap, slots, impl):
  mask = attention.Mask(scale=0.1, softcap=softcap)
  run = lambda q, k, v, n: decode_attention.ragged(q, k, v, mask, n, impl)
  cache = array((4, 8, slots, 128), 'bfloat16')
  query, lengths = array((4, 1, 32, 128), 'bfloat16'), array((4,), 'int32')
  return run, (query, cache, cache, lengths)


def quantized(form, t, impl):
  run = functools.partial(quantized_matmul.quantized_matmul, impl=impl)
  d, f = 4096, 14336
  rows = d if form == 'int4' else d // 2
  scale = array((d // 128, f), 'float32')
  return run, (array((t, d), 'bfloat16'), array((rows, f), form), scale)


def gated(scalar, chunk, impl):
  def run(q, k, v, g, reset, state):
    scan = lambda q, k, v, g, state: gated_scan.gated_scan(
      q, k, v, g, reset, state, chunk=chunk, impl=impl
    )
    out, back = jax.vjp(scan, q, k, v, g, state)
    return out, back(out)

  row = 2, 4096, 8, 128
  x = array(row, 'bfloat16')
  g = array(row[:3] if scalar else row, 'float32')
  reset, state = array(row[:2], 'bool'), array((2, 8, 128, 128), 'float32')
  return run, (x, x, x, g, reset, state)


def linear(dtype, impl):
  def run(a, b, reset, state, g):
    scan = lambda a, b, s: linear_scan.linear_scan(a, b, reset, s, impl=impl)
    out, back = jax.vjp(scan, a, b, state)
    return out, back((g, out[1]))

  row, reset = array((2, 4096, 2048), dtype), array((2, 4096), 'bool')
  return run, (row, row, reset, array((2, 2048), 'float32'), row)


def selective(impl):
  def run(x, dt, shared, rate, reset, state):
    scan = lambda *x: selective_scan.selective_scan(
      *x[:4], reset, x[4], impl=impl
    )
    out, back = jax.vjp(scan, x, dt, shared, rate, state)
    return out, back(out)

  b, t, f, s = SELECTIVE
  shapes = (b, t, f), (b, t, f), (b, t, 2, s), (f, s), (b, f, s)
  *tokens, state = (array(shape, 'float32') for shape in shapes)
  return run, (*tokens, array((b, t), 'bool'), state)


def grouped(impl):
  """A product and the gradient of the matrices, blocks of 128 rows."""

  def run(x, w, g, sizes):
    given = sizes, 128
    y = grouped_matmul.product(x, w, *given, x.dtype, impl)
    back = grouped_matmul.gradient
    return y, back(x, g, *given, len(w), jnp.float32, impl)

  rows = array((8192, 2048), 'bfloat16')
  w = array((8, 2048, 2048), 'bfloat16')
  return run, (rows, w, rows, array((8,), 'int32'))


def slot_write(impl):
  """64 rows of two caches of 34 MiB each."""
  del impl
  run = lambda slots, *x: slot_write_tpu.write(slots, *x[:3], x[3])
  caches = (array((64, 8, 272, 128), 'bfloat16'),) * 2
  rows = array((64,), 'int32'), array((64,), 'int32'), array((64,), 'bool')
  return run, (caches, *rows, (array((64, 8, 128), 'bfloat16'),) * 2)


class Case(NamedTuple):
  """Program of an implementation, its kernels, and bounds in MiB.

  kind: of memory, a field of aot.Memory. flops: least, as the TPU kernels say.
  more: kernels that a GPU has besides.
  """

  program: Any
  kernels: int
  kind: str
  tpu: float | None
  gpu: float | None
  flops: int = 0
  more: int = 0


part = functools.partial
SELECTIVE = 2, 4096, 2048, 16
SCAN = 4 * 2 * 2 * 4096 * 8 * 128 * 128  # of a gated scan, token by token
CASES = {
  # The scores alone would be eight times q in bfloat16.
  'packed_attention': Case(packed_attention, 3, 'peak', 31.25, 31.25),
  # The cache has 64 MiB. The 4 queries of a kv head fill up a register of 16.
  'decode': Case(
    part(decode, 0.0, 4096), 1, 'temporaries', 1, 4,
    4 * 4 * 4096 * 8 * 16 * 128, 1,
  ),
  'decode_softcap': Case(part(decode, 5.0, 4096), 1, 'temporaries', 1, None),
  # Slots that are no power of two and fill no tile.
  'decode_4000': Case(part(decode, 5.0, 4000), 2, 'temporaries', None, 4),
  'slot_write': Case(slot_write, 1, 'temporaries', 1, None),
  'grouped': Case(grouped, 2, 'temporaries', None, 1),
  'int4': Case(part(quantized, 'int4', 16), 1, 'temporaries', 0, None),
  # On a GPU the sums of 4 shares of the inputs.
  'uint8': Case(part(quantized, 'uint8', 16), 1, 'temporaries', 0, 3.5),
  'uint8_one': Case(part(quantized, 'uint8', 1), 1, 'temporaries', None, 0.44),
  'uint8_64': Case(part(quantized, 'uint8', 64), 1, 'temporaries', None, 14),
  # Inputs and outputs, gradients, their copies with heads before tokens, and
  # the states between chunks.
  'gated': Case(part(gated, False, 0), 2, 'peak', 500, 1000, SCAN),
  'gated_per_head': Case(part(gated, True, 0), 2, 'peak', 500, 1000, SCAN),
  'gated_by_128': Case(part(gated, True, 128), 2, 'peak', 500, None),
  # Of float32 nothing is copied; of bfloat16, l is a float32 array.
  'linear': Case(
    part(linear, 'float32'), 2, 'temporaries', 1, 1, 2 * 2 * 2 * 4096 * 2048
  ),
  # x has 64 MiB; decays, or states, of all tokens would have 1,024. States at
  # the starts of chunks; gradients of B and C of every block of channels. On a
  # GPU two sweeps besides, and the states of their segments.
  'selective': Case(
    selective, 2, 'peak', 410, 430,
    6 * math.prod(SELECTIVE), 2,
  ),
  'linear_bfloat16': Case(part(linear, 'bfloat16'), 2, 'temporaries', 129, 65),
}  # fmt: skip
ON_TPU = [name for name, case in CASES.items() if case.tpu is not None]
ON_GPU = [name for name, case in CASES.items() if case.gpu is not None]


def check(case, name, most, impl='auto', flops=0):
  run, shapes = case.program(impl)
  program = experiment.for_chip(name, 'kernel', run, shapes)
  found = len(kernel_matrix.KERNEL.findall(program.as_text()))
  wanted = case.kernels + case.more * name.startswith('h')
  assert found == wanted
  assert getattr(aot.memory(program), case.kind) <= most * MIB
  if flops:  # compiled for a GPU without one, a program says none
    assert program.cost_analysis()['flops'] >= flops


@support.compiles('tpu')
@pytest.mark.sampled(4)
@pytest.mark.parametrize('name', kernel_matrix.TARGETS[:4])
@pytest.mark.parametrize('case', ON_TPU)
def test_on_a_tpu(case, name):
  check(CASES[case], name, CASES[case].tpu, flops=CASES[case].flops)


@support.compiles('cuda')
@pytest.mark.parametrize('name', kernel_matrix.TARGETS[4:])
@pytest.mark.parametrize('case', ON_GPU)
def test_on_a_gpu(case, name):
  check(CASES[case], name, CASES[case].gpu)


@support.compiles('tpu')
@pytest.mark.parametrize('case', ['packed_attention', 'gated_per_head'])
def test_a_program_without_the_kernel_is_found(case):
  with pytest.raises(AssertionError, match='assert 0 == [23]'):
    check(CASES[case], 'v5e:1x1', CASES[case].tpu, 'xla')


def calls_on_a_mesh(name, call, manual):
  """How often a program of attention's gradients on four chips has `call`."""
  t = aot.topology(name)
  kinds = (jax.sharding.AxisType.Explicit,) * 2
  mesh = jax.sharding.Mesh(
    np.array(t.devices).reshape(2, 2), ('data', 'tensor'), axis_types=kinds
  )
  heads = P('data', None, 'tensor')
  x = array((2, 256, 4, 128), 'bfloat16', sharding=NamedSharding(mesh, heads))

  def grads(q, k, v):
    loss = lambda *x: attention.attention(*x, attention.Mask())[0].sum()
    return jax.grad(loss, (0, 1, 2))(q, k, v)

  with t.context(), jax.set_mesh(mesh):
    if manual:
      grads = jax.shard_map(grads, in_specs=heads, out_specs=heads)
    traced = jax.jit(grads).trace(x, x, x)
    text = aot.compile_for(t, 'attention', traced).as_text()
  return text.count(call)


# In a manual region the kernels run; else XLA, which can be spread.
@support.compiles('tpu')
@pytest.mark.parametrize('manual', [True, False])
def test_attention_on_a_mesh_of_tpus(manual):
  calls = calls_on_a_mesh('v5e:2x2', kernel_cases.TPU_CALL, manual)
  assert calls == (3 if manual else 0)


@support.compiles('cuda')
@pytest.mark.parametrize('manual', [True, False])
def test_attention_on_a_mesh_of_gpus(manual):
  calls = calls_on_a_mesh('h200:4', kernel_cases.GPU_CALL, manual)
  assert calls == (3 if manual else 0)
