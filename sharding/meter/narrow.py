"""Programs in bfloat16 on CPU, whose arrays XLA would convert whole.

XLA up to jax 0.10 has a pass that rewrites bfloat16 operations on CPU in
float32, those that only move data too: to write one row into an array, the
cache of a decoder or what a scan keeps of each layer, it converts the array to
float32 and back, all of it. Keeping L layers then costs L^2, and a token reads
and writes the whole cache. Without the pass each operation is rounded as it is
written; sums of products are in float32 where the program says so. Later
releases leave such arrays alone.

XLA has no product with a bfloat16 result on CPU but by that pass, and functions
of which it has none where it does not fuse, a loop over small rows: programs
with one of those keep it. Programs of several devices keep it too: what their
collectives add up in bfloat16 was not measured.
"""

import functools
import os

import jax
from jax.extend import core
import jax.numpy as jnp

from paraxis.sharding import annotate

_PRODUCTS = (
  'call_exported', 'conv_general_dilated', 'dot_general', 'ragged_dot_general',
  'triangular_solve',
)  # fmt: skip
_FUNCTIONS = (
  'acos', 'acosh', 'asin', 'asinh', 'atan', 'atan2', 'atanh', 'cumlogsumexp',
  'erf', 'log1p', 'nextafter',
)  # fmt: skip
_FLAG = 'xla_disable_hlo_passes'
_WITHOUT = {_FLAG: 'float-normalization-bf16'}


def options(jaxpr: core.ClosedJaxpr) -> dict[str, str]:
  """XLA options that keep a program's bfloat16 arrays as they are; {}: none.

  jaxpr: traced on the mesh that it runs on, as `jax.jit(f).trace(...).jaxpr`.
  """
  return _WITHOUT if needed() and _may(jaxpr.jaxpr) else {}


def needed() -> bool:
  """Whether this XLA converts whole arrays, and programs here may be kept."""
  named = _FLAG in os.environ.get('XLA_FLAGS', '')
  on_cpu = jax.default_backend() == 'cpu'
  return on_cpu and not named and not annotate.sizes() and _converts()


@functools.cache
def _converts():
  """Whether to write one row of a bfloat16 array is done in float32."""
  write = lambda x, row, at: jax.lax.dynamic_update_slice(x, row, (at, 0))
  shape = lambda rows: jax.ShapeDtypeStruct((rows, 2), jnp.bfloat16)
  made = jax.jit(write).lower(shape(4), shape(1), 0).compile()
  return 'f32[4,2]' in (made.as_text() or '')


def _may(jaxpr):
  """Whether XLA can do without: no result of those that it lacks has 16 bits.

  Nested programs are seen too.
  """
  lacks = _PRODUCTS + _FUNCTIONS
  for equation in jaxpr.eqns:
    narrow = any(_is_narrow(v.aval) for v in equation.outvars)
    if narrow and equation.primitive.name in lacks:
      return False
    if not all(map(_may, core.jaxprs_in_params(equation.params))):
      return False
  return True


def _is_narrow(aval):
  kind = getattr(aval, 'dtype', None)
  return (
    kind is not None
    and jnp.issubdtype(kind, jnp.floating)
    and (kind.itemsize < 4)
  )
