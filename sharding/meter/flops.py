"""Floating-point operations of a traced program, counted from its jaxpr.

Multiplications and additions of matrix products, convolutions and kernels:

    dot_general   2 x elements of the output x contracted length
    convolution   2 x elements of the output x window x input features
    ragged dot    a dot whose rows belong to one group each
    pallas_call   the kernel's own pl.CostEstimate
    Mosaic GPU    what the name around the kernel says (sharding/turns.py)

times the trip counts of the loops around them. XLA's own figure counts a loop
body once, and a kernel without an estimate as nothing; it is not used. A `cond`
counts its largest branch, recomputation in the backward pass counts, and so do
the blocks that a blockwise attention walks, visible or not. Of experts' rows
those count that tokens take, without the room around them, evenly spread over
devices (sharding/turns.py). Elementwise work and reductions are not counted.

Two figures: `total` over all devices, and `per_device`. Outside of a manual
region a product's share per device follows from its types: its output and the
dimensions that both operands contract in the same shards are divided, all else
is repeated. Axes in Auto mode carry no layout in types and count as repeated,
so `per_device` is then an upper bound and total a lower one.
"""

import math
from typing import NamedTuple

import jax
from jax.extend import core

from paraxis.sharding import turns
from paraxis.sharding.meter import traced


class Flops(NamedTuple):
  """Floating-point operations: of all devices together, and of one device."""

  total: float
  per_device: float

  def __add__(self, other):
    return Flops(*(a + b for a, b in zip(self, other, strict=True)))

  def __mul__(self, times):
    return Flops(*(a * times for a in self))


_NONE = Flops(0, 0)


def count(function, *args, **kwargs) -> Flops:
  """`Flops` of function(*args, **kwargs); args may be ShapeDtypeStructs."""
  return of_jaxpr(jax.make_jaxpr(function)(*args, **kwargs))


def of_jaxpr(jaxpr) -> Flops:
  """`Flops` of a ClosedJaxpr or Jaxpr, such as `jax.jit(f).trace(x).jaxpr`.

  Raises:
    ValueError: work in a `while` loop, whose trip count depends on data, or a
      kernel without a cost estimate.
  """
  return sum(map(_equation, jaxpr.eqns), _NONE)


def _equation(e):
  share = turns.share(e.source_info.name_stack)
  found = _whole(e)
  return found if share == 1 else found * float(share)


def _whole(e):
  name, params = e.primitive.name, e.params
  if name in _PRODUCTS:
    total = _PRODUCTS[name](e)
    return Flops(total, total / _shards(e))
  if name == 'scan':
    return of_jaxpr(params['jaxpr']) * params['length']
  if name == 'cond':
    return max(map(of_jaxpr, params['branches']), key=lambda f: f.per_device)
  if name == 'while':
    work = sum(map(of_jaxpr, core.jaxprs_in_params(params)), _NONE)
    trips = turns.trips(e.source_info.name_stack)
    if trips is not None:
      return work * trips
    if work.total:
      raise ValueError(
        f'a while loop with {work.total:.3g} floating-point operations a turn: '
        'its trip count depends on data; use scan, or fori_loop with bounds '
        'that are Python integers.'
      )
    return _NONE
  if name == 'shard_map':
    # Each device along the axes that become manual here runs the body.
    local = of_jaxpr(params['jaxpr'])
    sizes = dict(params['mesh'].shape)
    times = math.prod(sizes[a] for a in params['newly_manual_axes'])
    return Flops(local.total * times, local.per_device)
  if name == 'pallas_call':
    return _kernel(params)
  if name in _MOSAIC:
    return _named_kernel(e)
  return sum(map(of_jaxpr, core.jaxprs_in_params(params)), _NONE)


def _kernel(params):
  estimate = params.get('cost_estimate')
  if estimate is None:
    name = params.get('name') or params.get('name_and_src_info')
    raise ValueError(
      f'kernel {name}: pallas_call has no cost_estimate, so its work cannot be '
      'counted; give it a pl.CostEstimate.'
    )
  return Flops(estimate.flops, estimate.flops)


# What plgpu.kernel, which takes no estimate, is in a jaxpr: one in the other.
_MOSAIC = 'custom_vmap_call', 'mpmd_map'


def _named_kernel(e):
  work = turns.flops(e.source_info.name_stack, e.outvars[0].aval.size)
  if work is None and e.primitive.name == _MOSAIC[0]:
    return sum(map(of_jaxpr, core.jaxprs_in_params(e.params)), _NONE)
  if work is None:
    raise ValueError(
      f'kernel {e.params.get("name")}: its work cannot be counted; call it '
      "within jax.named_scope('about_N_flops_for_SIZE')."
    )
  return Flops(work, work)


def _dot(e):
  (contracted, _), _ = e.params['dimension_numbers']
  lhs, out = e.invars[0].aval.shape, e.outvars[0].aval.shape
  return 2 * math.prod(out) * math.prod(lhs[d] for d in contracted)


def _convolution(e):
  kernel, out = e.invars[1].aval.shape, e.outvars[0].aval.shape
  features = kernel[e.params['dimension_numbers'].rhs_spec[0]]
  return 2 * math.prod(out) * math.prod(kernel) // features


def _ragged_dot(e):
  numbers = e.params['ragged_dot_dimension_numbers']
  (contracted, _), _ = numbers.dot_dimension_numbers
  lhs, out = e.invars[0].aval.shape, e.outvars[0].aval.shape
  total = 2 * math.prod(out) * math.prod(lhs[d] for d in contracted)
  # Contracted rows: each belongs to one of the groups of the output.
  ragged = set(numbers.lhs_ragged_dimensions) & set(contracted)
  return total // out[0] if ragged else total


_PRODUCTS = dict(
  dot_general=_dot,
  conv_general_dilated=_convolution,
  ragged_dot_general=_ragged_dot,
)


def _shards(e):
  """Devices that share a product, from the layouts in its types."""
  out = e.outvars[0].aval
  axes = set().union(*traced.shard(out).layout)
  if e.primitive.name == 'dot_general':
    (left, right), _ = e.params['dimension_numbers']
    x, w = (traced.shard(v.aval).layout for v in e.invars)
    for a, b in zip(left, right, strict=True):
      if x[a] == w[b]:
        axes.update(x[a])
  sizes = dict(out.sharding.mesh.shape)
  return math.prod(sizes[a] for a in axes)
