"""The covering array against brute force over every full case."""

import itertools
import math

import covering
import pytest

# Degrees of a mesh of 8, and options that need an axis of it.
FACTORS = dict(
  data=(1, 2, 4, 8),
  context=(1, 2, 4, 8),
  tensor=(1, 2, 4, 8),
  form=('none', 'ring', 'ulysses', 'usp'),
  zero=(0, 1, 2, 3),
  ring=(False, True),
)
RULES = (
  covering.Rule(('data', 'context', 'tensor'), lambda *n: math.prod(n) == 8),
  covering.Rule(('context', 'form'), lambda n, f: (n > 1) == (f != 'none')),
  covering.Rule(('data', 'zero'), lambda n, zero: n > 1 or not zero),
  covering.Rule(('tensor', 'ring'), lambda n, ring: n > 1 or not ring),
)


def every_case(factors, rules):
  """All full cases that break no rule, by looking at all there are."""
  for values in itertools.product(*factors.values()):
    case = dict(zip(factors, values, strict=True))
    if all(rule.holds(*(case[n] for n in rule.names)) for rule in rules):
      yield case


def every_pair(cases):
  return {
    frozenset(two)
    for case in cases
    for two in itertools.combinations(case.items(), 2)
  }


def test_every_valid_pair_is_covered_and_no_rule_broken():
  wanted = every_pair(every_case(FACTORS, RULES))
  space = covering.Space(FACTORS, RULES)
  cases = covering.cover(space)
  assert space.pairs() == wanted
  assert every_pair(cases) == wanted
  valid = list(every_case(FACTORS, RULES))
  assert all(case in valid for case in cases)
  assert len(cases) < len(valid) / 2


def test_without_rules_the_array_is_small():
  factors = {name: (0, 1, 2) for name in 'abcd'}
  cases = covering.cover(covering.Space(factors, ()))
  assert every_pair(cases) == every_pair(every_case(factors, ()))
  assert 9 <= len(cases) <= 12  # 9 is the fewest possible


def test_the_same_seed_gives_the_same_cases():
  space = covering.Space(FACTORS, RULES)
  assert covering.cover(space, 3) == covering.cover(space, 3)


def test_every_case_is_needed():
  """And what the tests above rest on: a case left out is seen."""
  space = covering.Space(FACTORS, RULES)
  cases, wanted = covering.cover(space), space.pairs()
  for i in range(len(cases)):
    assert every_pair(cases[:i] + cases[i + 1 :]) < wanted


def test_extending():
  space = covering.Space(FACTORS, RULES)
  full = space.extend(dict(context=8))
  assert full['data'] == full['tensor'] == 1 and full['form'] != 'none'
  assert list(full) == list(FACTORS) and space.holds(full)
  assert space.extend(dict(context=8, tensor=2)) is None
  # No rule joins these two: only the search sees that they exclude each other.
  assert space.holds(dict(context=8, zero=3))
  assert space.extend(dict(context=8, zero=3)) is None
  assert space.extend(dict(zero=1, data=1)) is None


def test_a_rule_on_no_factor():
  with pytest.raises(ValueError, match="'stage', which is no factor"):
    covering.Space(FACTORS, (covering.Rule(('stage',), bool),))
