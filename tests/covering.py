"""Few cases in which every two options meet: a pairwise-covering array.

Faults of composition mostly need two options to meet, seldom three (Kuhn,
Wallace, Gallo, IEEE TSE 30(6), 2004). So the invariance test runs an array in
which every pair of values that may stand together does so in some case.

Rules forbid combinations. A partial case is extendable if some full case
contains it and breaks no rule; this is searched exactly, depth first. Greedy
construction looks ahead with it and only takes values that can be completed:
without that, rows end in dead ends and pairs are silently left out.

Cost: about a second for 16 factors and 1,100 pairs. The number of cases is what
the greedy finds, not proven minimal.
"""

import collections
import itertools
import random
from typing import Any, NamedTuple

TRIES = 12  # rows built for every row that is taken


class Rule(NamedTuple):
  """holds(*values of the factors `names`) must be true in every case."""

  names: tuple
  holds: Any


class Space:
  """Factors, their values, and the rules on them.

  Attributes:
    factors: {name: tuple of values}.
  """

  def __init__(self, factors, rules):
    """ValueError: a rule names a factor that there is not."""
    self.factors = {name: tuple(values) for name, values in factors.items()}
    self._rules = {name: [] for name in self.factors}
    for rule in rules:
      for name in rule.names:
        if name not in self.factors:
          raise ValueError(f'a rule names {name!r}, which is no factor')
        self._rules[name].append(rule)

  def _fits(self, case, name):
    """Every rule on `name` whose factors all have values in `case` holds."""
    return all(
      rule.holds(*(case[n] for n in rule.names))
      for rule in self._rules[name]
      if all(n in case for n in rule.names)
    )

  def holds(self, case):
    """True if a case, full or partial, breaks no rule as far as it goes."""
    return all(self._fits(case, name) for name in case)

  def extend(self, case):
    """A full case that contains `case` and breaks no rule, or None."""
    if not self.holds(case):
      return None
    # Factors with many rules first: they fail early.
    left = [n for n in self.factors if n not in case]
    left.sort(key=lambda n: -len(self._rules[n]))
    return self._complete(dict(case), left)

  def _complete(self, case, left):
    if not left:
      return {name: case[name] for name in self.factors}
    name, *rest = left
    for value in self.factors[name]:
      case[name] = value
      found = self._fits(case, name) and self._complete(case, rest)
      if found:
        return found
    del case[name]
    return None

  def pairs(self):
    """All pairs, frozenset({(name, value), (name, value)}), of valid cases."""
    found = set()
    for a, b in itertools.combinations(self.factors, 2):
      for x, y in itertools.product(self.factors[a], self.factors[b]):
        if _pair((a, x), (b, y)) not in found:
          found |= pairs_of(self.extend({a: x, b: y}) or {})
    return found


def _pair(*items):
  return frozenset(items)


def pairs_of(case):
  """The pairs that one case holds."""
  return {_pair(*two) for two in itertools.combinations(case.items(), 2)}


def cover(space, seed=0):
  """Full cases, as few as the greedy finds, that hold every valid pair.

  Args:
    space: Space.
    seed: decides ties; the same seed gives the same cases.

  Returns:
    list of {factor: value}.
  """
  rng = random.Random(seed)
  left, cases = space.pairs(), []
  while left:
    rows = [_row(space, left, rng) for _ in range(TRIES)]
    best = max(rows, key=lambda case: len(pairs_of(case) & left))
    cases.append(best)
    left -= pairs_of(best)
  return _needed(cases)


def _needed(cases):
  """Without those whose pairs are all in the others."""
  counts = collections.Counter(p for case in cases for p in pairs_of(case))
  kept = []
  for case in cases:  # the first were chosen with no others to lean on
    pairs = pairs_of(case)
    if any(counts[p] == 1 for p in pairs):
      kept.append(case)
    else:
      counts.subtract(pairs)
  return kept


def _row(space, left, rng):
  """One case around one uncovered pair, made value by value."""
  case = dict(
    rng.choice(sorted(left, key=lambda pair: sorted(map(repr, pair))))
  )
  names = [n for n in space.factors if n not in case]
  rng.shuffle(names)
  for name in names:
    values = list(space.factors[name])
    rng.shuffle(values)
    gain = lambda value, name=name: sum(
      _pair(item, (name, value)) in left for item in case.items()
    )
    case[name] = next(
      value
      for value in sorted(values, key=gain, reverse=True)
      if space.extend(case | {name: value})
    )
  return {name: case[name] for name in space.factors}
