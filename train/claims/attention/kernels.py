"""Claims about attention in blocks: equal, linear in memory, counted work.

    s = scale q.k on visible pairs;  lse = log sum e^s;  o = sum e^(s - lse) v

Every form (the XLA one, the TPU and the Triton kernel under an interpreter)
against the dense definition; memory and the largest array of the compiled
program at several lengths; blocks that are visited and operations, counted from
the program against a formula. With b tokens to a block, R = T / b rows of
blocks, and a window of w tokens (FlashAttention-2, arXiv:2307.08691, 3.1):

    visited = sum over rows i = 1 .. R of min(i, ceil((w - 1) / b) + 1)
    operations = (4 forward, 10 backward) b^2 H for each of them and head

(a window of T or more: R (R + 1) / 2, half of all for many rows); 14 backward
in two kernels that both make the scores.

Legend: B rows, T tokens, N query heads, K kv heads, H head width. The argument
`shape` of a claim is [N, K, H].
"""

import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.pallas_kernels import reference
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import gpu as attention_gpu
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import tpu as attention_tpu
from paraxis.pallas_kernels.attention import xla as attention_xla
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import compiled
from paraxis.sharding.meter import flops
from paraxis.train.bench import measure as bench_measure
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts

_KERNELS = dict(pallas_tpu=attention_tpu, pallas_gpu=attention_gpu)
_NAMES = 'o', 'lse', 'dq', 'dk', 'dv'


def _problem(length, shape, packed):
  """(q, k, v, do, dlse) float64 of two rows, and segments or None."""
  (n, kv, h), rng = shape, np.random.default_rng(0)
  sizes = [(n, h), (kv, h), (kv, h), (n, h), (n,)]
  arrays = [rng.normal(size=(2, length, *s)) for s in sizes]
  ids = np.sort(rng.integers(0, 4, (2, length)), 1).astype(np.int32)
  if packed:  # a row that sees nothing has lse = NEG, without a gradient
    arrays[4] = np.where(ids[..., None] > 0, arrays[4], 0)
  return arrays, (ids, ids) if packed else None


def _by_autodiff(attend):
  def run(q, k, v, do, dlse):
    out, back = jax.vjp(attend, q, k, v)
    return *out, *back((do, dlse))

  return run


def _form(impl, mask, segments, block):
  """run(q, k, v, do, dlse) -> (o, lse, dq, dk, dv) of one implementation."""
  if impl not in _KERNELS:
    return _by_autodiff(
      lambda q, k, v: attention.attention(q, k, v, mask, segments, impl=impl)
    )
  module = _KERNELS[impl]
  given = segments, None, mask
  launch = attention_blocks.Launch(tuple(block), True)

  def run(q, k, v, do, dlse):
    o, lse = module.forward(q, k, v, *given, launch)
    delta = (o * do).sum(-1) - dlse
    rows = attention_blocks.QueryRows(lse, delta, do)
    return o, lse, *module.backward(q, k, v, *given, rows, launch)

  return run


def equals_dense(run, *, impl, cases, shape, within):
  """EQ: o, lse and the gradients of q, k, v against dense attention in float64.

  The XLA form runs in float64, a kernel in float32 under the interpreter.

  Args:
    impl: 'xla', 'pallas_tpu' or 'pallas_gpu'.
    cases: list of {'length', 'block': a number (xla) or [queries, keys],
      'packed', and fields of attention.Mask}.
  """
  worst = dict.fromkeys(_NAMES, 0.0)  # np.maximum: a NaN stays
  dtype = np.float32 if impl in _KERNELS else np.float64
  for given in cases:
    given = dict(given)
    length, block = given.pop('length'), given.pop('block')
    arrays, segments = _problem(length, shape, given.pop('packed', False))
    size = block if impl == 'xla' else max(block)
    mask = attention.Mask(scale=shape[2] ** -0.5, block=size, **given)

    def dense(q, k, v, mask=mask, segments=segments):
      return reference.attention_ref(q, k, v, mask, segments)

    with jax.enable_x64(True):
      right = jax.device_get(jax.jit(_by_autodiff(dense))(*arrays))
    with jax.enable_x64(dtype == np.float64):
      form = jax.jit(_form(impl, mask, segments, block))
      found = jax.device_get(form(*(x.astype(dtype) for x in arrays)))
    seen = right[1] > -1e29  # lse of rows that see nothing is a constant
    same = np.array_equal(seen, found[1] > -1e29)
    right, found = (
      (x[0], np.where(seen, x[1], 0), *x[2:]) for x in (right, found)
    )
    for name, a, b in zip(_NAMES, found, right, strict=True):
      gap = experiment.gap(a, b) if same else math.inf
      worst[name] = float(np.maximum(worst[name], gap))
  return experiment.equal(
    worst,
    within,
    f'{impl}, {np.dtype(dtype)}, {len(cases)} cases, N, K, H {shape}: '
    f'{experiment.listed(worst)}',
  )


def _dense(q, k, v, mask):
  del mask
  return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _ours(q, k, v, mask, rows=None):
  segments = None if rows is None else (rows, rows)
  attend: Any = attention.attention  # its custom_vjp is untyped
  return attend(q, k, v, mask, segments)[0]


def _gradients(attend, shape, window=0):
  """attend's o and gradients of q, k, v for cotangents do."""
  mask = attention.Mask(scale=shape[2] ** -0.5, window=window)

  def both(q, k, v, do, *rows):
    o, back = jax.vjp(lambda *x: attend(*x, mask, *rows), q, k, v)
    return o, back(do)

  return both


def _shapes(length, shape, dtype):
  n, kv, h = shape
  sizes = [(1, length, heads, h) for heads in (n, kv, kv, n)]
  return [jax.ShapeDtypeStruct(s, dtype) for s in sizes]


def dense():
  """Knock-out: attention as its definition says, all scores at once."""

  def whole(q, k, v, mask, segments=None, order=None, impl=''):
    del impl
    o, lse = reference.attention_ref(q, k, v, mask, segments, order)
    return o.astype(v.dtype), lse

  return knockouts.patched(attention, 'attention', whole)


def every_block():
  """Knock-out: no block of scores is left out."""
  real = attention_blocks.block_kinds
  some = lambda *given: np.maximum(real(*given), 1)
  return knockouts.patched(attention_blocks, 'block_kinds', some)


@contextlib.contextmanager
def blocks_apart():
  """Knock-out: a block of queries sees the keys of its own place alone, and no
  blocks are merged."""
  pairs, kinds = attention_xla.visible_pairs, attention_blocks.block_kinds

  def diagonal(*given):
    found = pairs(*given)
    return found[found[:, 0] == found[:, 1]]

  def near(mask, q_info, k_info, block_q, block_k):
    found = kinds(mask, q_info, k_info, block_q, block_k)
    i, j = np.indices(found.shape[1:])
    here = (i * block_q < (j + 1) * block_k) & (j * block_k < (i + 1) * block_q)
    return found * here

  with (
    knockouts.patched(attention_xla, 'visible_pairs', diagonal),
    knockouts.patched(attention_blocks, 'block_kinds', near),
  ):
    yield


def no_band():
  """Knock-out: a window hides nothing in the blocks that are visited."""
  real = attention_xla.visible
  all_before = lambda mask, *given: real(
    dataclasses.replace(mask, window=0), *given
  )
  return knockouts.patched(attention_xla, 'visible', all_before)


def largest(text):
  """(elements, type) of the largest array in a compiled program's text."""
  sizes = ((math.prod(a.shape), a) for a in compiled.arrays(text))
  elements, array = max(sizes, key=lambda pair: pair[0])
  return elements, f'{array.dtype}[{",".join(map(str, array.shape))}]'


def temporaries(run, *, lengths, shape, within, dense_at_least):
  """HLO: temporary memory with gradients, doubling with the length, on CPU.

  Args:
    lengths: each twice the one before. within: how far growth may be above 2.
    dense_at_least: growth of jax.nn.dot_product_attention, or the claim would
      say nothing.
  """
  grows, held, square = {}, [], True
  for name, attend in (('ours', _ours), ('dense', _dense)):
    sizes = []
    for t in lengths:
      program = jax.jit(_gradients(attend, shape))
      program = program.lower(*_shapes(t, shape, jnp.float32)).compile()
      sizes.append(aot.memory(program).temporaries)
      found, array = largest(program.as_text() or '')
      square &= (found >= t * t) == (name == 'dense')
    grows[name] = [b / a for a, b in zip(sizes, sizes[1:], strict=False)]
    mib = experiment.numbers([x / 2**20 for x in sizes], '.1f')
    held.append(f'{name} {mib} MiB, largest array {array}')
  most, least = max(grows['ours']), min(grows['dense'])
  return claims.Outcome(
    f'<= {2 + within:g} a doubling',
    f'{most:.2f}',
    f'B1, N, K, H {shape}, float32, causal, T {experiment.numbers(lengths)}, '
    f'compiled for CPU: {"; ".join(held)}; dense grows by {least:.2f}; '
    f'{"only dense" if square else "NOT only dense"} holds T x T numbers',
    most <= 2 + within and least >= dense_at_least and square,
  )


def compiled_is_linear(run, *, topologies, lengths, shape, window, at_most):
  """AOT: no array of T x T numbers; memory a multiple of what goes in and out.

  A packed row in bfloat16, with gradients; the mask comes from documents and
  places, in the kernel. The kernels must be there, one forward, two backward.

  Args:
    window: 0 or tokens.
    at_most: peak memory over arguments and results, at every length.
  """
  right, ratios, held = True, [], []
  attend = _gradients(_ours, shape, window)
  for name in topologies:
    peaks = []
    for t in lengths:
      rows = jax.ShapeDtypeStruct((1, t), jnp.int32)
      arrays = [*_shapes(t, shape, jnp.bfloat16), rows]
      program = experiment.for_chip(name, 'attention', attend, arrays)
      text = program.as_text() or ''
      found, array = largest(text)
      right &= found < t * t and text.count('tpu_custom_call"') == 3
      memory = aot.memory(program)
      peaks.append(memory.peak)
      ratios.append(memory.peak / (memory.arguments + memory.results))
    mib = experiment.numbers([x / 2**20 for x in peaks], '.0f')
    held.append(f'{name} {mib} MiB, largest {array}')
  return claims.Outcome(
    f'no T x T, <= {at_most:g}',
    f'{"none" if right else "FOUND"}, {max(ratios):.2f}',
    f'B1, N, K, H {shape}, bfloat16, packed, window {window}, T '
    f'{experiment.numbers(lengths)}; peak memory with gradients, over that of '
    f'arguments and results: {"; ".join(held)}; largest arrays at the last T',
    right and max(ratios) <= at_most,
  )


def visited(length, block, window):
  """Blocks that the formula above lets a causal mask visit."""
  near = math.ceil(((window or length) - 1) / block) + 1
  return sum(min(i, near) for i in range(1, length // block + 1))


def blocks_visited(run, *, length, block, windows, shape):
  """SIM: blocks in the list and operations in the program equal the formula.

  Args:
    length: a multiple of `block`. block: tokens.
    windows: [0 (none) or tokens, ...].
  """
  n, _, h = shape
  pairs, found, right, counts = [], [], True, []
  arrays = _shapes(length, shape, jnp.float32)
  rows = jax.ShapeDtypeStruct((1, length, n), jnp.float32)
  for window in windows:
    mask = attention.Mask(scale=1.0, block=block, window=window)
    sizes = (length, length), None, None, mask, (block, block)
    kinds = attention_blocks.plan(*sizes).kinds
    pairs.append(visited(length, block, window))
    found.append(int((kinds > 0).sum()))
    counts.append(
      f'window {window or "none"}: {found[-1]} of {kinds.size}, '
      f'{(kinds == 1).sum()} with a mask'
    )
    for impl, both in (('xla', 14), ('pallas_tpu', 18), ('pallas_gpu', 18)):
      form = _form(impl, mask, None, (block, block))
      work = flops.count(form, *arrays, rows).total
      right &= work == both * pairs[-1] * block**2 * n * h
  return claims.Outcome(
    experiment.numbers(pairs),
    experiment.numbers(found),
    f'T={length} in blocks of {block}, causal; {"; ".join(counts)}. Operations '
    f'in the program {"are" if right else "ARE NOT"} b^2 H for each block and '
    'head times 4 + 10 in XLA, 4 + 14 with kernels (two, each makes the scores '
    'again; FlashAttention-2 counts 10)',
    right and found == pairs,
  )


def cost(run, *, lengths, shape, rounds, at_least):
  """CPU: CPU-seconds of jax.nn.dot_product_attention over ours.

  Args:
    at_least: the median ratio at the last length, with gradients.
  """
  medians, spreads = [], []
  for t in lengths:
    rng = np.random.default_rng(0)
    arrays = [
      jnp.asarray(rng.normal(size=s.shape), s.dtype)
      for s in _shapes(t, shape, jnp.float32)
    ]
    ways = {}
    for name, attend in (('dense', _dense), ('ours', _ours)):
      call = jax.jit(_gradients(attend, shape)).lower(*arrays).compile()
      ways[name] = lambda call=call, arrays=arrays: (
        jax.block_until_ready(call(*arrays)) and None
      )
    times = bench_measure.interleave(ways, rounds, bench_measure.settled)
    spread = bench_measure.spread(
      bench_measure.ratios(times['dense'], times['ours'])
    )
    medians.append(spread.median)
    spreads.append(f'T={t}: {experiment.numbers(spread, ".1f")}')
  return claims.Outcome(
    f'>= {at_least:g}',
    experiment.numbers(medians, '.1f'),
    f'B1, N, K, H {shape}, float32, causal, o and all gradients, {rounds} '
    f'rounds in turn; least, median, most: {"; ".join(spreads)}',
    medians[-1] >= at_least,
  )
