"""In which dtype a traced program adds up what becomes a gradient.

    gradient <- reshape, cast, add, scale, psum ... <- dot, reduce_sum,
                                                       scatter-add

A bfloat16 number has 8 bits: of 256 equal terms the last ones change nothing.
So every sum between a parameter's gradient and the products of single tokens
must be in promote_types(dtype, float32), and so must the statistics of norms,
softmax and loss. A bound on numbers cannot see it, because one device rounds
alike. Activations and their cotangents, the terms themselves, are in the
model's dtype, also where devices sum them over `tensor` (one rounding each, as
Megatron-LM's all-reduces; the bound on numbers is what sees those).
"""

from typing import Any, NamedTuple

from jax.extend import core
import jax.numpy as jnp

from paraxis.sharding.meter import traced

# What moves or casts a gradient, and what adds up gradients.
_MOVES = {
  'all_gather', 'broadcast_in_dim', 'concatenate', 'convert_element_type',
  'copy', 'dynamic_slice', 'dynamic_update_slice', 'expand_dims',
  'mesh_cast', 'neg', 'optimization_barrier', 'pad', 'pbroadcast', 'pcast',
  'ppermute', 'pvary', 'reduce_precision', 'reshape', 'reshard', 'rev',
  'select_n', 'sharding_constraint', 'slice', 'split', 'squeeze', 'transpose',
}  # fmt: skip
_JOINS = {'add', 'add_any', 'psum', 'psum_invariant', 'reduce_scatter', 'sub'}
# Sums of the terms of tokens: the end of the way.
_SUMS = {
  'conv_general_dilated', 'cumsum', 'dot_general', 'ragged_dot',
  'ragged_dot_general', 'reduce_sum', 'scatter-add', 'scatter_add',
}  # fmt: skip
# Only of statistics: of squares, of shifted logits, of their sums.
_STATISTICS = {'cumlogsumexp', 'exp', 'exp2', 'log', 'rsqrt', 'sqrt'}


class Narrow(NamedTuple):
  """A sum or a statistic that is too narrow: its source line, its name."""

  where: str
  primitive: str


class _Frame(NamedTuple):
  """A jaxpr, and what its inputs are outside: eqn of `outer`, first operand."""

  jaxpr: Any
  outer: Any = None
  eqn: Any = None
  first: int = 0


def _narrow(var):
  dtype = getattr(var.aval, 'dtype', None)
  floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
  return floating and jnp.finfo(dtype).bits < 32


def _inner(eqn):
  """[(jaxpr, index of the operand that is its first input)] of an equation."""
  found = []
  for value in eqn.params.values():
    for x in value if isinstance(value, (tuple, list)) else (value,):
      x = getattr(x, 'jaxpr', x)
      if hasattr(x, 'eqns'):
        found.append((x, len(eqn.invars) - len(x.invars)))
  return found


def equations(jaxpr):
  """All equations, those of nested jaxprs too."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner, _ in _inner(eqn):
      yield from equations(inner)


class _Walk:
  """From gradients back to the sums that make them."""

  def __init__(self):
    self.found, self.sums, self._seen, self._made = set(), set(), set(), {}

  def visit(self, frame, var):
    """Follows one variable of a frame."""
    stack = [(frame, var)]
    while stack:
      frame, var = stack.pop()
      key = id(frame.jaxpr), id(var)
      if key in self._seen or isinstance(var, core.Literal):
        continue
      self._seen.add(key)
      stack += self._before(frame, var)

  def _before(self, frame, var):
    made = self._made.setdefault(
      id(frame.jaxpr),
      {id(v): eqn for eqn in frame.jaxpr.eqns for v in eqn.outvars},
    )
    eqn = made.get(id(var))
    if eqn is None:  # an input
      if frame.outer is None or var not in frame.jaxpr.invars:
        return []
      at = frame.jaxpr.invars.index(var) + frame.first
      return [(frame.outer, frame.eqn.invars[at])]
    inner = _inner(eqn)
    # A scatter-add has a jaxpr too: of one addition.
    if inner and eqn.primitive.name not in _SUMS:
      at = eqn.outvars.index(var)
      return [
        (_Frame(jaxpr, frame, eqn, first), jaxpr.outvars[at])
        for jaxpr, first in inner
        if at < len(jaxpr.outvars) == len(eqn.outvars)
      ]
    return self._operands(frame, eqn, var)

  def _operands(self, frame, eqn, var):
    name, out = eqn.primitive.name, []
    if name in _SUMS or name in _JOINS:
      self.sums.add(id(eqn))
      if _narrow(var):
        self.found.add(Narrow(traced.line(eqn.source_info), name))
    # No sum over tokens lies behind a product, element by element, of sums.
    if name in _MOVES or name in _JOINS or name in ('mul', 'div'):
      out = [(frame, v) for v in eqn.invars if _floating(v)]
    return out


def _floating(var):
  dtype = getattr(var.aval, 'dtype', None)
  return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def narrow_sums(jaxpr, gradients):
  """What adds up gradients in a traced program.

  Args:
    jaxpr: of it, not closed. gradients: indexes of the outputs to follow.

  Returns:
    (`Narrow`s sorted by line, number of sums looked at, those of the outputs
    that no sum was found of).
  """
  walk, lost = _Walk(), []
  for i in gradients:
    alone = _Walk()  # what another output has seen counts again
    alone.visit(_Frame(jaxpr), jaxpr.outvars[i])
    lost += [] if alone.sums else [i]
    walk.visit(_Frame(jaxpr), jaxpr.outvars[i])
  statistics = {
    Narrow(traced.line(eqn.source_info), eqn.primitive.name)
    for eqn in equations(jaxpr)
    if eqn.primitive.name in _STATISTICS and any(map(_narrow, eqn.outvars))
  }
  return sorted(walk.found | statistics), len(walk.sums), lost
