"""What a forward phase keeps for its backward phase, without the parameters.

jax.vjp keeps whatever the backward pass reads, parameters and slices of them
among it. Between two phases of a pipeline all of it would lie in a slot for
every microbatch in flight. The parameters are there in the backward phase too:
what follows from them alone is made again there, the same array is kept once.

    y, kept = keep(function, values, *args)   the forward phase
    kept.again(values)                        what is read, in the other phase

function -> (y, what is read). Both calls belong to one trace, or to two in the
same region; `Kept` is a pytree, and may travel through buffers between them.
"""

import dataclasses
from typing import Any

import jax
from jax.extend import core


@dataclasses.dataclass(frozen=True, eq=False)
class _Recipe:
  """How what is read follows from parameters and from the arrays kept.

  repeat: ClosedJaxpr of the parameters alone. places: of each leaf of what is
  read its place among the arrays kept; None: `repeat` makes it.
  """

  repeat: core.ClosedJaxpr
  places: list
  read: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
  """What a function read, but for what follows from its parameters.

  arrays: in a slot between the phases. recipe: the same for all that one trace
  of a phase gives.
  """

  arrays: list
  recipe: _Recipe = dataclasses.field(metadata=dict(static=True))

  def again(self, values):
    """What the function gave second, given its parameters once more."""
    places = self.recipe.places
    count = len({p for p in places if p is not None})
    if len(self.arrays) != count:
      raise ValueError(f'{len(self.arrays)} arrays where {count} were kept.')
    leaves = jax.tree.leaves(values)
    made = iter(core.jaxpr_as_fun(self.recipe.repeat)(*leaves))
    leaves = [next(made) if p is None else self.arrays[p] for p in places]
    return jax.tree.unflatten(self.recipe.read, leaves)


def keep(function, values, *args):
  """-> (what the function gave first, `Kept`).

  Args:
    function: (values, *args) -> (pytree, pytree of arrays that are read later).
    values: pytree of the arrays that are there later as well.
  """
  traced, shapes = jax.make_jaxpr(function, return_shape=True)(values, *args)
  result, read = map(jax.tree.structure, shapes)
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
