"""The attention op on an accelerator: device time, TF/s, ratios. UNTESTED.

No accelerator was at hand when this was written: nothing here has been run on
one. Protocol: a program repeats the op, feeding its output to its query, so
that one call of the host is many of the device; inputs are normal bfloat16;
three calls warm up; candidates run in turn. The ceilings, a square product and
a copy, are measured in the same run; operations of a causal mask count half, a
backward pass 2.5 times its forward pass.

Legend: B rows, T tokens, N heads, H head size.
"""

import functools
import time

import jax
import jax.numpy as jnp

from paraxis.pallas_kernels import attention
from paraxis.pallas_kernels import registry
from paraxis.train import bench_measure as measure

REPEATS = 20
_SHAPE = dict(quick=(1, 1024, 2, 128), full=(2, 8192, 16, 128))


def repeated(step, x, *rest):
  """step(x, *rest) -> x, REPEATS times in one program."""
  return jax.lax.fori_loop(0, REPEATS, lambda _, x: step(x, *rest), x)


def _timed(step, arrays):
  """A candidate: seconds of one step, by a program of many."""
  call = jax.jit(functools.partial(repeated, step)).lower(*arrays).compile()
  for _ in range(3):
    jax.block_until_ready(call(*arrays))

  def run():
    before = time.perf_counter()
    jax.block_until_ready(call(*arrays))
    return {'': (time.perf_counter() - before) / REPEATS}

  return run


def steps(mask):
  """{row: step(q, k, v) -> the next q} of all implementations that can run."""
  out = {}
  for name, _, reason in registry.explain('attention'):
    if reason:
      continue
    op = functools.partial(attention.attention, mask=mask, impl=name)
    out[f'{name} forward'] = lambda q, k, v, op=op: op(q, k, v)[0]

    def both(q, k, v, op=op):
      o, back = jax.vjp(lambda *x: op(*x)[0], q, k, v)
      dq, dk, dv = back(o)
      # All three are used, or the compiler drops what makes them.
      return (dq + dk + dv).astype(q.dtype)

    out[f'{name} with gradients'] = both
  return out


def _ceilings(size):
  """{row: candidate} of a product of size x size and a copy as large."""
  x, y = jax.random.normal(jax.random.key(1), (2, size, size), jnp.bfloat16)
  y = y / size**0.5
  return {
    'product': _timed(lambda x, y: x @ y, (x, y)),
    'copy': _timed(lambda x: x + jnp.ones_like(x), (x,)),
  }


def kernels(rounds, quick, say):
  """Attention, causal, in bfloat16: every implementation that runs here."""
  b, t, n, h = shape = _SHAPE['quick' if quick else 'full']
  size = 1024 if quick else 8192
  arrays = jax.random.normal(jax.random.key(0), (3, *shape), jnp.bfloat16)
  report = measure.Report(
    'kernels',
    f'attention B{b} T{t} N{n} H{h}, causal, bfloat16, '
    f'{registry.current_target()}',
    'seconds of a step, many to a program; host clock',
  )
  mask = attention.Mask(scale=h**-0.5)
  made = {name: _timed(f, tuple(arrays)) for name, f in steps(mask).items()}
  times = measure.interleave(made | _ceilings(size), max(rounds, 10), say=say)
  report.add(times)
  work = 2 * b * n * t * t * h  # 4 T T H a head, of which causal leaves half
  rate = lambda row, flops: [flops / s / 1e12 for s in times[row]]
  for row in made:
    passes = 3.5 if row.endswith('gradients') else 1.0
    report.add({f'{row}: rate': rate(row, passes * work)}, 'TF/s')
  report.add({'product: rate': rate('product', 2 * size**3)}, 'TF/s')
  moved = [4 * size**2 / s / 1e9 for s in times['copy']]
  report.add({'copy: read and written': moved}, 'GB/s')
  for which in ('forward', 'with gradients'):
    ours = f'{next(iter(made)).split()[0]} {which}'
    for row in made:
      if row.endswith(which) and row != ours:
        ratios = measure.ratios(times[row], times[ours])
        report.check(f'{row} / {ours}', ratios, 1.0, judged=not quick)
  report.notes.append('this path has not been tried on a device')
  return report
