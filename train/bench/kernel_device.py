"""Attention on an accelerator: device time, rates, ratios to others, ceilings.

Protocol: a program repeats the op, feeding its output to its query, so that one
call of the host is many of the device; inputs are normal bfloat16; three calls
warm up; candidates run in turn and a ratio is taken within a round. Operations
of a causal mask count half, a backward pass 2.5 times its forward pass; bytes
are those of q, k, v and o (and of their gradients), each once.

The ceilings, a square product and a copy, are measured in the same rounds. No
rate can be above them: one that is means that the clock or the count is wrong,
and it is printed as such, not as a good result.

Forward passes of others run through their adapters; with gradients their own
public function is timed, since an adapter's backward pass is ours.

The same functions run on a CPU, where XLA's form is all there is; the tests do
that.

Legend: B rows, T tokens, N heads, H head size.
"""

from collections.abc import Callable
import functools
import time
from typing import NamedTuple, cast

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import tokamax_adapter
from paraxis.pallas_kernels.attention import op as attention
from paraxis.train.bench import measure

REPEATS, WARM = 20, 3
FORWARD, BOTH = 'forward', 'with gradients'


class Sizes(NamedTuple):
  """shape: B, T, N, H. square: side of the arrays of the ceilings."""

  shape: tuple[int, int, int, int]
  square: int
  repeats: int = REPEATS


SIZES = dict(
  quick=Sizes((1, 1024, 2, 128), 1024), full=Sizes((2, 8192, 16, 128), 8192)
)


def repeated(step, repeats, x, *rest):
  """step(x, *rest) -> x, `repeats` times in one program."""
  return jax.lax.fori_loop(0, repeats, lambda _, x: step(x, *rest), x)


def timed(step, arrays, repeats=REPEATS, clock=time.perf_counter):
  """A candidate for measure.interleave: seconds of one step."""
  program = functools.partial(repeated, step, repeats)
  call = jax.jit(program).lower(*arrays).compile()
  for _ in range(WARM):
    jax.block_until_ready(call(*arrays))

  def run():
    before = clock()
    jax.block_until_ready(call(*arrays))
    return {'': (clock() - before) / repeats}

  return run


def splash(q, k, v, sizes=None):
  """jax's splash attention, causal; it scales nothing.

  sizes: splash_attention.BlockSizes; None: its own.
  """
  one = splash_attention.CausalMask((q.shape[1], k.shape[1]))
  kernel = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([one] * q.shape[2]),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
  )
  q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
  o = cast(jax.Array, jax.vmap(kernel)(q.astype(k.dtype), k, v))
  return o.transpose(0, 2, 1, 3)


def _splash(q, k, v, mask):
  return splash(q * mask.scale, k, v)


def _cudnn(q, k, v, mask):
  return jax.nn.dot_product_attention(
    q, k, v, scale=mask.scale, is_causal=True, implementation='cudnn'
  )


def _tokamax(q, k, v, mask):
  form = tokamax_adapter.form(registry.current_target())
  return tokamax_adapter.load().dot_product_attention(
    q, k, v, scale=mask.scale, is_causal=True,
    implementation=(form or '').partition('_')[0],
  )  # fmt: skip


# Public functions of others, with backward passes of their own.
PEERS = dict(splash=_splash, cudnn=_cudnn, tokamax=_tokamax)


def _with_gradients(function):
  def both(q, k, v):
    o, back = jax.vjp(function, q, k, v)
    dq, dk, dv = back(o)
    # All three are used, or the compiler drops what makes them.
    return (dq + dk + dv).astype(q.dtype)

  return both


def steps(mask, spec):
  """{row: step(q, k, v) -> the next q}, and {name: why it does not run}."""
  out, refused = {}, {}
  for name, _, reason in registry.explain('attention', spec=spec):
    if reason:
      refused[name] = reason
      continue
    op = functools.partial(attention.attention, mask=mask, impl=name)
    first = lambda q, k, v, op=op: op(q, k, v)[0]
    out[f'{name} {FORWARD}'] = first
    whole = first
    if name in PEERS:
      whole = functools.partial(PEERS[name], mask=mask)
    out[f'{name} {BOTH}'] = _with_gradients(whole)
  return out, refused


def ceilings(size, repeats, dtype='bfloat16'):
  """{row: candidate} of a product of size x size and of a copy.

  The copy is of twice as many float32 numbers: bfloat16 ones, and fewer bytes,
  came to no more than .8 of it on an H200.
  """
  x, y = jax.random.normal(jax.random.key(1), (2, size, size), dtype)
  y = y / size**0.5
  wide = jax.random.normal(jax.random.key(2), (2 * size, size), 'float32')
  return {
    'product': timed(lambda x, y: x @ y, (x, y), repeats),
    'copy': timed(lambda x: x + jnp.ones_like(x), (wide,), repeats),
  }


def work(row, sizes):
  """(operations, bytes) of one step of a row."""
  b, t, n, h = sizes.shape
  forward = 2 * b * n * t * t * h  # 4 T T H a head, of which causal leaves half
  array = 2 * b * t * n * h
  if row == 'product':
    return 2 * sizes.square**3, 3 * 2 * sizes.square**2
  if row == 'copy':
    return 2 * sizes.square**2, 2 * 4 * 2 * sizes.square**2
  if row.endswith(BOTH):  # and o, do, dq, dk, dv
    return 3.5 * forward, 4 * array + 8 * array
  return forward, 4 * array


def rates(report, times, sizes):
  """Adds TF/s and GB/s of every row, and its share of the ceilings.

  A share above 1, by the medians, is a fault of the measurement: a note says so
  (and its target is missed, or within noise).
  """
  at = {row: work(row, sizes) for row in times}
  rate = lambda row, i: [at[row][i] / s for s in times[row]]
  tops = rate('product', 0), rate('copy', 1)
  for row in times:
    report.add({f'{row}: rate': [x / 1e12 for x in rate(row, 0)]}, 'TF/s')
    report.add({f'{row}: moved': [x / 1e9 for x in rate(row, 1)]}, 'GB/s')
  for row in times:
    if row in ('product', 'copy'):
      continue
    for i, (top, name) in enumerate(
      zip(tops, ('product', 'copy'), strict=True)
    ):
      share = measure.ratios(rate(row, i), top)
      what = f'{row} / {name}, {("operations", "bytes")[i]}'
      report.check(what, share, 1.0, least=False)
      if measure.spread(share).median > 1:
        report.notes.append(
          f'WRONG: {what} is above 1: no rate can be above a ceiling measured '
          f'beside it; do not use the figures of {row}'
        )


def against(report, times, ours, judged):
  """Adds other / ours of all rows of both kinds, round by round."""
  for which in (FORWARD, BOTH):
    mine = f'{ours} {which}'
    for row in times:
      if row.endswith(which) and row != mine and mine in times:
        ratios = measure.ratios(times[row], times[mine])
        report.check(f'{row} / {mine}', ratios, 1.0, judged=judged)


def kernels(
  rounds, quick, say, sizes=None, begin: Callable = measure.BenchReport
):
  """Attention, causal, in bfloat16: every implementation that runs here.

  begin: (name, setup, clock, judged) -> BenchReport; measure.begin: that of a
  bench, which has facts and the rounds that its session has kept.
  """
  sizes = sizes or SIZES['quick' if quick else 'full']
  b, t, n, h = sizes.shape
  draw = lambda i: jax.random.normal(jax.random.key(i), sizes.shape, 'bfloat16')
  arrays = draw(0), draw(1), draw(2)
  mask = attention.Mask(scale=h**-0.5)
  spec = attention.spec_of(*arrays[:2], mask, None, None)
  found, refused = steps(mask, spec)
  report = begin(
    'kernels',
    f'attention B{b} T{t} N{n} H{h}, causal, bfloat16, '
    f'{registry.current_target()}',
    f'seconds of a step, {sizes.repeats} to a program; host clock',
    not quick,
  )
  made = {}
  for row, step in found.items():
    say(f'compiling {row}')
    try:
      made[row] = timed(step, arrays, sizes.repeats)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as e:
      text = ' '.join(str(e).split())[:200]
      report.notes.append(f'{row} did not run: {type(e).__name__}: {text}')
  made |= ceilings(sizes.square, sizes.repeats)
  times = measure.interleave(made, rounds, say=say)
  report.add(times)
  rates(report, times, sizes)
  ours = attention.choose(spec=spec)[0].name
  against(report, times, ours, judged=not quick)
  report.notes += [
    f'{name} is not available: {why}' for name, why in refused.items()
  ]
  return report
