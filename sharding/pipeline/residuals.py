"""What a forward phase keeps for its backward phase, without the parameters.

jax.vjp keeps whatever the backward pass reads, parameters and slices of them
among it. Between two phases of a pipeline all of it would lie in a slot for
every microbatch in flight. The parameters are there in the backward phase too:
what follows from them alone is made again there, the same array is kept once.

    kept = Kept(function, values, *args)      function -> (y, what is read)
    y, arrays = kept.run(values, *args)       the forward phase
    kept.again(values, arrays)                what is read, in the other phase

Both calls belong to one trace, or to two in the same region.
"""

import jax
from jax.extend import core


class Kept:
  """A function traced, and which of its results need not be kept."""

  def __init__(self, function, values, *args):
    """
    Args:
      function: (values, *args) -> (pytree, pytree of arrays).
      values: pytree of the arrays that are there later as well.
    """

    def flat(values, *args):
      y, read = function(values, *args)
      leaves, self._read = jax.tree.flatten(read)
      return y, leaves

    traced, shapes = jax.make_jaxpr(flat, return_shape=True)(values, *args)
    self._result = jax.tree.structure(shapes[0])
    jaxpr, count = traced.jaxpr, len(jax.tree.leaves(values))
    given = jaxpr.invars[:count]
    # A constant of this trace may be a tracer of it; no other may read that.
    fixed = [
      (v, c)
      for v, c in zip(jaxpr.constvars, traced.consts, strict=True)
      if not isinstance(c, jax.core.Tracer)
    ]
    known, equations = {*given, *(v for v, _ in fixed)}, []
    follows = lambda v: isinstance(v, core.Literal) or v in known
    for equation in jaxpr.eqns:
      if all(map(follows, equation.invars)) and not equation.effects:
        equations.append(equation)
        known.update(equation.outvars)
    results = jaxpr.outvars[: self._result.num_leaves]
    leaves = jaxpr.outvars[self._result.num_leaves :]
    arrays = list(dict.fromkeys(v for v in leaves if not follows(v)))
    # Of each leaf its place among the arrays kept; None: made again.
    self._places = [None if follows(v) else arrays.index(v) for v in leaves]
    self._count = len(arrays)
    self._forward = core.ClosedJaxpr(
      jaxpr.replace(outvars=[*results, *arrays]), traced.consts
    )
    self._repeat = core.ClosedJaxpr(
      jaxpr.replace(
        constvars=[v for v, _ in fixed],
        invars=given,
        eqns=equations,
        outvars=[v for v in leaves if follows(v)],
        effects=core.no_effects,
      ),
      [c for _, c in fixed],
    )

  def run(self, values, *args):
    """(result of the function, [array] to keep)."""
    flat = jax.tree.leaves((values, *args))
    out = core.jaxpr_as_fun(self._forward)(*flat)
    count = self._result.num_leaves
    return jax.tree.unflatten(self._result, out[:count]), list(out[count:])

  def again(self, values, arrays):
    """What the function gave second, from what `run` kept."""
    if len(arrays) != self._count:
      raise ValueError(f'{len(arrays)} arrays where {self._count} were kept.')
    made = iter(core.jaxpr_as_fun(self._repeat)(*jax.tree.leaves(values)))
    leaves = [next(made) if p is None else arrays[p] for p in self._places]
    return jax.tree.unflatten(self._read, leaves)
