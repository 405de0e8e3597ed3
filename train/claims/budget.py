"""`paraxis reproduce --all --budget=30m`: configs that fit, cheap ones first.

What a config takes is the `cost:` of its header; what is spent is measured, so
that trainings which are kept leave room for more. What is left out is named.
"""

import math
import re
import resource
import time

from paraxis.configs.base import errors
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.claims import papers

UNITS = {'s': 1, 'm': 60, 'h': 3600}


def seconds(text: str) -> float:
  """CPU-seconds of '90s', '30m' or '1.5h'; UserError: it is none of them."""
  match = re.fullmatch(r'(\d+(?:\.\d+)?)([smh])', text)
  if not match:
    raise errors.UserError(
      f'--budget={text}: a number with s, m or h, in CPU time: --budget=30m.'
    )
  return float(match[1]) * UNITS[match[2]]


def reproduce(budget='', fresh=False, say=print):
  """Runs the claims of all configs that fit -> exit code.

  0: no claim failed; 1: one did; 2: a config could not be run.

  Args:
    budget: as for `seconds`; '': no limit. fresh: as for harness.run_of.

  Raises:
    UserError: not even the cheapest config fits.
  """
  limit = seconds(budget) if budget else math.inf
  costs = {p.name: papers.cost(p) for p in papers.index()}
  costs = dict(sorted(costs.items(), key=lambda item: (item[1], item[0])))
  name, least = next(iter(costs.items()))
  if least > limit:
    raise errors.UserError(
      f'--budget={budget} is {limit:g} CPU-seconds, the cheapest config '
      f'({name}) takes {least:,}: give --budget={least}s or more.'
    )
  hours = sum(costs.values()) / 3600
  say(f'=== {len(costs)} configs take {hours:.1f} CPU-hours by their headers')
  start, codes, left = spent(), {}, []
  for name, cost in costs.items():
    rest = limit - (spent() - start)
    if cost > rest:
      left.append(
        f'{name}: {cost:,} CPU-seconds, {max(rest, 0):,.0f} of {limit:,.0f} '
        'are left'
      )
      continue
    say(f'=== {name}')
    codes[name] = _code(name, fresh, say)
    knockouts.forget()  # programs of one config are of no use to the next
  return _end(codes, left, (spent() - start) / 3600, say)


def spent() -> float:
  """CPU-seconds of this process and of those that it started and awaited."""
  children = resource.getrusage(resource.RUSAGE_CHILDREN)
  return time.process_time() + children.ru_utime + children.ru_stime


def _code(name, fresh, say):
  try:
    return claims.reproduce(name, fresh=fresh)
  except (errors.UserError, errors.IntegrityError, errors.CrashError) as e:
    say(f'paraxis: {e}')
    return None


def _end(codes, left, hours, say):
  named = lambda code: [n for n, c in codes.items() if c == code]
  failed, wrong = named(errors.EXIT_DIFFERENT), named(None)
  unchecked = named(errors.EXIT_SKIPPED)
  say(f'=== {len(codes)} configs were run in {hours:.2f} CPU-hours')
  for text, names in (
    ('claims FAILED in', failed),
    ('could not be run:', wrong),
    ('no claim could be checked here:', unchecked),
  ):
    if names:
      say(f'{text} {", ".join(names)}')
  for text in left:
    say(f'left out: {text}')
  if failed:
    return errors.EXIT_DIFFERENT
  return errors.EXIT_USER if wrong else errors.EXIT_OK
