"""Residuals that a forward phase keeps for its backward phase, but parameters.

jax.vjp keeps whatever the backward pass reads, also parameters and slices of
them. Between two phases of a pipeline all of it would take a slot for every
microbatch in flight. The backward phase has the parameters too: it recomputes
what depends on them alone, and an array that is read twice is kept once.

    y, kept = keep(function, values, *args)   in the forward phase
    kept.again(values)                        the residuals, in the backward one

function -> (y, residuals). Both calls are in one trace, or in two of the same
region; `Kept` is a pytree, and may travel through buffers between them.
"""

import dataclasses
from typing import Any

import jax
import jax.core
from jax.extend import core


@dataclasses.dataclass(frozen=True, eq=False)
class _Recipe:
  """How residuals follow from parameters and from the arrays kept.

  repeat: ClosedJaxpr of the parameters alone. places: for each leaf of the
  residuals its place among the arrays kept; None: `repeat` makes it.
  """

  repeat: core.ClosedJaxpr
  places: list
  residuals: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
  """Residuals of a function, without those that its parameters determine.

  arrays: in a slot between the phases. recipe: the same for every `Kept` of one
  trace of a phase.
  """

  arrays: list
  recipe: _Recipe = dataclasses.field(metadata=dict(static=True))

  def again(self, values):
    """The residuals, given the function's parameters once more."""
    places = self.recipe.places
    count = len({p for p in places if p is not None})
    if len(self.arrays) != count:
      raise ValueError(f'{len(self.arrays)} arrays where {count} were kept.')
    leaves = jax.tree.leaves(values)
    made = iter(core.jaxpr_as_fun(self.recipe.repeat)(*leaves))
    leaves = [next(made) if p is None else self.arrays[p] for p in places]
    return jax.tree.unflatten(self.recipe.residuals, leaves)


def keep(function, values, *args):
  """-> (the function's first result, `Kept`).

  Args:
    function: (values, *args) -> (pytree, pytree of residuals).
    values: pytree of the parameters, which the backward phase has as well.
  """
  traced, shapes = jax.make_jaxpr(function, return_shape=True)(values, *args)
  result, read = map(jax.tree.structure, shapes)
  jaxpr, count = traced.jaxpr, len(jax.tree.leaves(values))
  given = jaxpr.invars[:count]
  # A constant may be a tracer of this trace, which no other trace may read.
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
  results = jaxpr.outvars[: result.num_leaves]
  leaves = jaxpr.outvars[result.num_leaves :]
  arrays = list(dict.fromkeys(v for v in leaves if not follows(v)))
  repeat = core.ClosedJaxpr(
    jaxpr.replace(
      constvars=[v for v, _ in fixed],
      invars=given,
      eqns=equations,
      outvars=[v for v in leaves if follows(v)],
      effects=core.no_effects,
    ),
    [c for _, c in fixed],
  )
  places = [None if follows(v) else arrays.index(v) for v in leaves]
  forward = core.ClosedJaxpr(
    jaxpr.replace(outvars=[*results, *arrays]), traced.consts
  )
  out = core.jaxpr_as_fun(forward)(*jax.tree.leaves((values, *args)))
  y = jax.tree.unflatten(result, out[: result.num_leaves])
  kept = list(out[result.num_leaves :])
  return y, Kept(kept, _Recipe(repeat, places, read))
