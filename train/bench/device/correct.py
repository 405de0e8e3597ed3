"""Are the kernels of a device right? Each against a plain loop in float64.

Every op of pallas_kernels runs on the device, uninterpreted, by its kernel for
the platform; where there is none, by the form that 'auto' takes, and the row
names it. Inputs are normal numbers, rounded to the dtype of the case first, so
that both sides have the same. Outputs, final states and every gradient are
compared, row by row (a row is the last axis):

    error = max over rows of |x - ref| / (|ref| + a tenth of the rms row)

so that one wrong row counts as it would alone, and a row that is nearly zero
has the scale of the others. float32 has the bound of rounding: a kernel that
rounds to TF32 or bfloat16 does not pass. XLA's forms are asked for float32 by
jax.default_matmul_precision. Legend: reference.py's.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.pallas_kernels import registry
from paraxis.train.bench.device import problems
from paraxis.train.bench.device import reference as reference

# Largest error of an output and of a gradient. A rounding to bfloat16 is
# 2**-9 of a number, to float16 an eighth of that; attention and scans round two
# or three times in between.
BOUNDS = dict(
  float32=(1e-4, 2e-4), bfloat16=(0.03, 0.06), float16=(0.004, 0.008)
)  # fmt: skip
# dq of attention has do.v - sum_h o do, of a rounded o: what rounding leaves is
# a sixth of a small row, in XLA's form too (T 651).
CANCELS = dict(bfloat16=0.3, float16=0.04)
LOW, FULL, CASES = problems.LOW, problems.FULL, problems.CASES


class WrongError(ValueError):
  """A result differs from its reference by more than the bound."""


def form_of(names: Any) -> str:
  """What ran, of the names of implementations, in words."""
  text = ', '.join(names)
  return text if 'pallas_' in text else f'{text}, no kernel'


def errors_of(problem: problems.Problem) -> dict[str, float]:
  """{output, or 'd' and the argument: its error}."""
  names, arrays = list(problem.arrays), tuple(problem.arrays.values())
  wide = [np.asarray(x, np.float64) for x in arrays]
  wanted, back = problem.loop(*wide)
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(problem.call, *arrays)
  cotangents = [jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in shapes]

  @jax.jit
  def run(arrays, cotangents):
    if back is None:
      return tuple(problem.call(*arrays)), ()
    out, pull = jax.vjp(lambda *x: tuple(problem.call(*x)), *arrays)
    return tuple(out), pull(tuple(cotangents))

  found, grads = jax.device_get(run(arrays, cotangents))
  out = {
    name: reference.error(x, y)
    for name, x, y in zip(problem.outputs, found, wanted, strict=True)
  }
  if back is not None:
    expected = back(*(np.asarray(c, np.float64) for c in cotangents))
    for name, x, y in zip(names, grads, expected, strict=True):
      out[f'd{name}'] = reference.error(x, y)
  return out


def bound_of(name: str, dtype: str, what: str) -> float:
  """The largest error of an output, or of the gradient 'd...'."""
  if what == 'dq' and dtype in CANCELS and name.startswith('attention'):
    return CANCELS[dtype]
  return BOUNDS[dtype][what.startswith('d')]


def check(name: str, dtype: str, work: Any) -> None:
  """Adds the worst error of a case to the report.

  Raises:
    WrongError: it is above its bound, which the report says too.
  """
  op, make, _ = CASES[name]
  precision = 'highest' if dtype == FULL else 'default'
  with jax.default_matmul_precision(precision), registry.recording() as ran:
    found = errors_of(make(work.quick, dtype))
  worst = max(found, key=lambda n: found[n] / bound_of(name, dtype, n))
  what = f'{name} {dtype} ({form_of(ran[op])}): error of {worst}, the worst of '
  what += ' '.join(found)
  bound = bound_of(name, dtype, worst)
  work.report.check(what, [found[worst]], bound, least=False, judged=True)
  if not found[worst] <= bound:
    raise WrongError(
      f'{name} {dtype}: {worst} is wrong by {found[worst]:.1e}, the bound is '
      f'{bound:.0e}'
    )


# What --quick computes in bfloat16 too.
BRIEF = ('attention causal', 'linear scan', 'gated scan by head')


def correct(quick: bool) -> dict[str, Callable]:
  """The cases of the part: every op, mask and dtype."""
  return {
    f'{name} {dtype}': functools.partial(check, name, dtype)
    for name, (_, _, dtypes) in CASES.items()
    for dtype in dtypes
    if dtype == FULL or not quick or name in BRIEF
  }
