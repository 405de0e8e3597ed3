"""Branch frequencies, trip counts and work, in op names for cost counting.

    with turns.scope(15, 22): lax.cond(...)      taken in 15 of 22 iterations
    with jax.named_scope('about_4_trips'): lax.while_loop(...)
    with jax.named_scope('about_64_flops_for_8'): a kernel without an estimate,
      whose first result has 8 numbers, and more where it is batched

A cost count of a traced or compiled program (predict.py, flops.py, compiled.py
of sharding/meter) takes the costliest branch of a conditional. Without these
names it would count that branch in every iteration of the loop around it, and
could not count a loop whose trip count depends on data. jax keeps the names of
scopes in jaxprs and in compiled text; the patterns below match what it appends.
"""

import fractions
import re

import jax

_NAME = re.compile(r'turns_(\d+)_of_(\d+)\)*(?:/cond)?$')
_FLOPS = re.compile(r'about_(\d+)_flops_for_(\d+)\)*$')
_TRIPS = re.compile(r'about_(\d+)_trips\)*(?:/while)?$')


def scope(taken: int, turns: int):
  """Context around a lax.cond that runs its branch `taken` of `turns` times.

  A conditional inside the branch needs a scope of its own.
  """
  return jax.named_scope(f'turns_{taken}_of_{turns}')


def of_rows(run, used: int):
  """run(rows, ...), whose products count as those of `used` rows at most.

  The other rows are room: how many of them hold something is data.
  """

  def counted(rows, *more):
    with scope(min(used, len(rows)), len(rows)):
      return run(rows, *more)

  return counted


def share(name) -> int | fractions.Fraction:
  """Fraction of iterations that take a named conditional's branch, or 1; of
  rows that count, for what `of_rows` runs."""
  match = _NAME.search(str(name))
  if not match or not int(match[2]):
    return 1
  return fractions.Fraction(int(match[1]), int(match[2]))


def trips(name) -> int | None:
  """Trip count to assume for a loop of that name; None: the name has none."""
  match = _TRIPS.search(str(name))
  return int(match[1]) if match else None


def flops(name, size) -> int | None:
  """Floating-point operations of a kernel of that name; None: it has none.

  size: numbers of its first result.
  """
  match = _FLOPS.search(str(name))
  return int(match[1]) * size // int(match[2]) if match else None


def times(count, share):
  """count x share; whole numbers stay int."""
  scaled = count * share
  return int(scaled) if scaled == int(scaled) else float(scaled)
