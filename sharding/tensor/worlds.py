"""The three worlds of a product: no mesh, Explicit axes, a manual region.

               gather      multiply              reduce        add_terms
    Plain      -           einsum                -             add
    Explicit   reshard     einsum, out_sharding  - (by XLA)    add, reshard
    Manual     all_gather  einsum                psum_scatter  add, psum_scatter

`current` picks the object once for each product; project.py asks for no mode.
Layouts are tuples of mesh axes, one tuple for each dimension
(sharding/tensor/product_layouts.py).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from paraxis.pallas_kernels import registry
from paraxis.sharding import annotate
from paraxis.sharding.tensor import int4
from paraxis.sharding.tensor import product_layouts as layouts


def current(region=False):
  """The world of the mesh in force; region: inside `annotate.region`."""
  if not annotate.sizes():
    return Plain()
  if region or annotate.mode() == 'manual':
    return Manual(annotate.deferred())
  return Explicit()


def _operands(equation, a, b, dtype):
  """(a, b), widened where XLA cannot accumulate their product in `dtype`."""
  wider = jnp.dtype(dtype).itemsize > a.dtype.itemsize
  if wider and _batched(equation) and _on_cpu():
    # XLA has no such product of narrow numbers with a wide result on CPU.
    return a.astype(dtype), b.astype(dtype)
  return a, b


def local(equation, a, b, dtype):
  """einsum of whole or local arrays, accumulated in `dtype`."""
  if isinstance(b, int4.Int4):
    y = int4.multiply(equation, a, b, dtype)
    if y is not None:
      return y
    b = int4.floats(b, a)
  wide, rows = _widened(a, dtype), len(a)
  a, b = _operands(equation, a, b, wide)
  a = _two_rows(equation, a, b)
  y = jnp.einsum(equation, a, b, preferred_element_type=wide)
  return (y if len(a) == rows else y[:rows]).astype(dtype)


def _two_rows(equation, a, b):
  """a, twice if it is one vector of 16 bits on a GPU; its first row counts.

  XLA on GPU takes the product of one vector apart: it rounds each number before
  it adds them, and where it does not fuse the two, writes as many as b has. To
  the matrix unit a second row costs nothing.
  """
  of_a, of_b = equation.split('->')[0].split(',')
  free = [n for letter, n in zip(of_a, a.shape, strict=True)
          if letter not in of_b]  # fmt: skip
  narrow = a.dtype.itemsize == b.dtype.itemsize == 2
  if math.prod(free) > 1 or of_a[0] in of_b or not narrow:
    return a
  if registry.current_target().platform != 'gpu' or _split(a):
    return a
  return jnp.broadcast_to(a, (2, *a.shape[1:]))


def _split(a):
  """Whether the first dimension is laid out over mesh axes."""
  spec = jax.typeof(a).sharding.spec
  return bool(spec and spec[0])


def _widened(a, dtype):
  """float32 where XLA on CPU multiplies bfloat16 fast only so; else dtype."""
  if a.dtype == dtype == jnp.bfloat16 and _on_cpu():
    return jnp.float32
  return dtype


def _split_sum(equation, *arrays):
  """Whether a letter that is summed is laid out over mesh axes."""
  ins, out = equation.split('->')
  return any(
    axes
    for letters, x in zip(ins.split(','), arrays, strict=True)
    for letter, axes in zip(letters, jax.typeof(x).sharding.spec, strict=True)
    if letter not in out
  )


def _batched(equation):
  """Whether a letter is in both operands and in the result."""
  ins, out = equation.split('->')
  return bool(set.intersection(*map(set, (*ins.split(','), out))))


def _on_cpu():
  return registry.current_target().platform == 'cpu'


def _add(terms):
  return functools.reduce(jnp.add, terms)


@dataclasses.dataclass(frozen=True)
class Plain:
  """Every array is whole: no mesh, or a mesh of one device."""

  def gather(self, x, split, whole):
    """x from the layout `split` to the layout `whole`."""
    del split, whole
    return x

  def multiply(self, equation, a, b, dtype, axes, summed=()):
    """einsum accumulated in `dtype`, laid out over `axes`.

    summed: mesh axes over which the result stays a partial sum.
    """
    del axes, summed
    return local(equation, a, b, dtype)

  def reduce(self, y, split, axes, summed=(), what=''):
    """The sum of y, laid out by `split` and partial over `summed`, in `axes`.

    Raises:
      ValueError: a sum over mesh axes that no dimension of y takes; `what` is
        the product.
    """
    del split, axes, summed, what
    return y

  def add_terms(self, ways, partial, whole, what):
    """dx in x's layout from its terms, partial over the same axes or whole."""
    del ways, what
    return _add(partial + whole)


@dataclasses.dataclass(frozen=True)
class Explicit(Plain):
  """Partial sums are jax's `unreduced` values; XLA chooses the collectives."""

  def gather(self, x, split, whole):
    if layouts.extra(split, whole):
      return jax.reshard(x, layouts.spec(whole))
    return x

  def multiply(self, equation, a, b, dtype, axes, summed=()):
    b, wide = int4.floats(b, a), dtype
    if not _split_sum(equation, a, b):  # else more bytes would be summed
      wide = _widened(a, dtype)
    a, b = _operands(equation, a, b, wide)
    # Without `summed` the sum is made at once, and `reduce` does nothing: a
    # remat policy may keep what a product makes, and a scan over layers cannot
    # stack partial sums.
    return jnp.einsum(
      equation, a, b, preferred_element_type=wide,
      out_sharding=layouts.spec(axes, summed),
    ).astype(dtype)  # fmt: skip

  def add_terms(self, ways, partial, whole, what):
    del what
    way, terms = _widest(ways), []
    if partial:
      terms.append(jax.reshard(_add(partial), layouts.spec(way.x)))
    if whole:
      # What was gathered forward is split again.
      dx, gathered = _add(whole), layouts.extra(way.x, way.x_whole)
      terms.append(jax.reshard(dx, layouts.spec(way.x)) if gathered else dx)
    return _add(terms)


@dataclasses.dataclass(frozen=True)
class Manual(Plain):
  """Collectives are ours; deferred: axes that `annotate.defer` named."""

  deferred: tuple = ()

  def gather(self, x, split, whole):
    for i, axes in layouts.extra(split, whole):
      x = jax.lax.all_gather(x, axes, axis=i, tiled=True)
    return x

  def reduce(self, y, split, axes, summed=(), what=''):
    left = [a for a in summed if a not in self.deferred]
    for i, extra in layouts.extra(axes, split):
      y = jax.lax.psum_scatter(y, extra, scatter_dimension=i, tiled=True)
      left = [a for a in left if a not in extra]
    if left:
      raise ValueError(
        f'einsum {what}: a sum over {left} that no dimension of the result '
        'takes (in a manual region residuals are sharded over tensor: '
        'mesh.sequence).'
      )
    return y

  def add_terms(self, ways, partial, whole, what):
    way = _widest(ways)
    # A result that every shard computes whole (few kv heads) is read by each in
    # part, so its term of dx is partial too.
    gathered = (a for _, e in layouts.extra(way.x, way.x_whole) for a in e)
    summed = {*way.summed_back, *gathered}
    return self.reduce(_add(partial + whole), way.x_whole, way.x, summed, what)


def _widest(ways):
  return max(ways, key=lambda way: len(way.summed_back))
