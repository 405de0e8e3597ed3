"""Programs in bfloat16 on CPU, whose arrays XLA would convert whole.

XLA of jax 0.10 has a pass that rewrites bfloat16 operations on CPU in float32,
those that only move data too: to write one row into an array, the cache of a
decoder or what a scan keeps of each layer, it converts the array to float32 and
back, all of it. Keeping L layers then costs L^2, and a token reads and writes
the whole cache. Without the pass each operation is rounded as it is written;
sums of products are in float32 where the program says so. XLA of jax 0.12
leaves such arrays alone.

XLA has no product with a bfloat16 result on CPU but by that pass, and functions
of which it has none where it does not fuse, a loop over small rows: programs
with one of those keep it. Programs on a mesh of several devices keep it too:
what their collectives add up in bfloat16 was not measured.
"""

import functools
import os

import jax
from jax.extend import core
import jax.numpy as jnp

from paraxis.sharding import annotate

_LACKS = {  # primitives; call_exported: what it calls is not seen
  'acos', 'acosh', 'asin', 'asinh', 'atan', 'atan2', 'atanh', 'call_exported',
  'conv_general_dilated', 'cumlogsumexp', 'dot_general', 'erf', 'log1p',
  'nextafter', 'ragged_dot_general', 'triangular_solve',
}  # fmt: skip
_FLAG = 'xla_disable_hlo_passes'
_WITHOUT = {_FLAG: 'float-normalization-bf16'}


def options(jaxpr: core.ClosedJaxpr) -> dict[str, str]:
  """XLA options that keep a program's bfloat16 arrays as they are; {}: none.

  jaxpr: traced on the mesh that it runs on, as `jax.jit(f).trace(...).jaxpr`.
  """
  found = set(_narrow(jaxpr.jaxpr))
  return _WITHOUT if found and not found & _LACKS and needed() else {}


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


def _narrow(jaxpr):
  """Yields the primitives with a bfloat16 result, of nested programs too."""
  for equation in jaxpr.eqns:
    kinds = [getattr(v.aval, 'dtype', None) for v in equation.outvars]
    if jnp.bfloat16 in kinds:
      yield equation.primitive.name
    for inner in core.jaxprs_in_params(equation.params):
      yield from _narrow(inner)
