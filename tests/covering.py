"""Few cases in which every two options meet: a pairwise-covering array.

Faults of composition mostly need two options to meet, seldom three (Kuhn,
Wallace, Gallo, IEEE TSE 30(6), 2004). So the invariance test runs an array in
which every pair of values that may stand together does so in some case.

Rules forbid combinations. A partial case is extendable if some full case
contains it and breaks no rule; this is searched exactly, depth first. Greedy
construction looks ahead with it and only takes values that can be completed:
without that, rows end in dead ends and pairs are silently left out.

Cost: about a second for 21 factors and 1,900 pairs. The number of cases is what
the greedy finds, not proven minimal.
"""

import collections
import itertools
import random
from typing import Any, NamedTuple

import pytest

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
      table = rule.names, self._allowed(rule)
      for name in rule.names:
        self._rules[name].append(table)
    # Factors with many rules first: they fail early. Without one, any value.
    self._order = sorted(self.factors, key=lambda n: -len(self._rules[n]))

  def _allowed(self, rule):
    """Values of rule.names that hold, and all that can be completed to those;
    None stands for a factor without a value."""
    allowed = set()
    for values in itertools.product(*(self.factors[n] for n in rule.names)):
      if rule.holds(*values):
        allowed.update(itertools.product(*((value, None) for value in values)))
    return allowed

  def _fits(self, case, name):
    """Every rule on `name` can still hold."""
    get = case.get
    for names, allowed in self._rules[name]:
      if tuple([get(n) for n in names]) not in allowed:
        return False
    return True

  def holds(self, case):
    """True if a case, full or partial, breaks no rule as far as it goes."""
    return all(self._fits(case, name) for name in case)

  def extend(self, case):
    """A full case that contains `case` and breaks no rule, or None."""
    if not self.holds(case):
      return None
    left = [n for n in self._order if n not in case]
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
    ordered = sorted(left, key=lambda pair: sorted(map(repr, pair)))
    rows = [_row(space, left, rng.choice(ordered), rng) for _ in range(TRIES)]
    best = max(rows, key=lambda case: len(pairs_of(case) & left))
    cases.append(best)
    left -= pairs_of(best)
  return _needed(cases)


def params(cases, name, reference):
  """pytest.param of every case, its id name(case); those that share
  reference(case) follow each other, and one worker runs them."""
  return [
    pytest.param(
      case, id=name(case), marks=pytest.mark.xdist_group(reference(case))
    )
    for case in sorted(cases, key=reference)
  ]


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


def _row(space, left, pair, rng):
  """One case around one uncovered pair, made value by value."""
  case = dict(pair)
  full = space.extend(case)
  names = [n for n in space.factors if n not in case]
  rng.shuffle(names)
  for name in names:
    values = list(space.factors[name])
    rng.shuffle(values)
    gain = lambda value, name=name: sum(
      _pair(item, (name, value)) in left for item in case.items()
    )
    for value in sorted(values, key=gain, reverse=True):
      if value == full[name]:  # the last search found this one
        break
      found = space.extend(case | {name: value})
      if found:
        full = found
        break
    case[name] = value
  return full
