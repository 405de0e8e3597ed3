"""What is slow: a link, a sender, a receiver, or a rank. After C4D.

C4D (arXiv:2406.04594, section on slow communication) compares the transfer
times of all pairs of ranks: one hot cell of the matrix is a bad link, a hot row
a bad sender, a hot column a bad receiver; and a rank whose transfers are as
fast as all others' but which arrives late at every barrier computes slowly.

All four are one test, of n groups of k numbers, of which few groups may be odd:

    group of      numbers x, of r ranks                       n          k
    sender i      log delay(i, j), all j                      r          r - 1
    receiver j    log delay(i, j), all i                      r          r - 1
    link (i, j)   log delay(i, j)                             r (r - 1)  1
    rank i        lateness of i at each of b barriers, less   r          b
                  the median of all ranks at that barrier

    excess_g = median(x_g) - median over groups of median(x_g)
    noise    = 1.4826 median |x - median(x)|, of all n k numbers
    scale    = max(noise min(1, 1.2533 / sqrt(k)),
                   1.4826 median |excess|)
    g is odd <=> excess_g > t scale

Medians do not see a few odd groups, however odd, nor the cells in which an odd
row crosses a good column. 1.4826 makes the median of |x| the standard deviation
of normal noise, 1.2533 / sqrt(k) is that of a median of k. The second scale is
for groups that differ by themselves, as network cards do: what is usual among
the groups is no fault. Logarithms, since noise of a delay is in proportion to
it. Cells of an odd sender or receiver are not looked at as links.

Threshold t, from the number of tests alone. Let a call that has nothing to find
raise an alarm with probability alpha at most; with m tests in it, alpha / m is
left for each (Bonferroni). For normal noise of a known scale t would be the
normal quantile z at 1 - alpha / m. The scale is estimated, from N = n k
numbers, and the median absolute deviation is worth 0.3675 N of them (its
efficiency, Rousseeuw and Croux 1993), so excess / scale has about the tail of
Student's t with nu = 0.3675 N degrees of freedom, whose quantile is, by Wallace
(1959),

    t = sqrt(nu (exp((z (8 nu + 3) / (8 nu + 1))^2 / nu) - 1))

Nothing here was fitted to data. With noise s of a delay a link is found from
about exp(t s) times as slow, a sender from exp(1.25 t s / sqrt(ranks - 1)). For
alpha = 1e-6 and s = 5%: 1.5 and 1.2 times with 8 ranks, 1.4 and 1.1 with 32.
Few numbers need a large t: of one barrier of 8 ranks it is 340, so give ranks
several barriers, or a larger alpha.
"""

import math
import statistics
from typing import NamedTuple

import numpy as np

from paraxis.configs.base import errors

LEAST = 4  # ranks; among fewer the odd one is no outlier
ALPHA = 1e-6  # false alarms in a call without a fault: one in a million
_DEVIATION = 1.4826  # standard deviation / median absolute deviation
_EFFICIENCY = 0.3675  # of the latter, against the standard deviation
_MEDIAN = 1.2533  # standard deviation of a median of k, times sqrt(k)


class Finding(NamedTuple):
  """One fault.

  Attributes:
    kind: 'link', 'sender', 'receiver' or 'rank'.
    ranks: (from, to) of a link, else (rank,).
    excess: of a rank: seconds late; of others: times the usual delay.
    margin: excess / the threshold, above 1.
  """

  kind: str
  ranks: tuple
  excess: float
  margin: float

  def __str__(self):
    if self.kind == 'rank':
      return f'slow rank {self.ranks[0]}: {self.excess:.3g} s late at barriers'
    who = ' -> '.join(map(str, self.ranks))
    return f'bad {self.kind} {who}: {self.excess:.3g} times the usual delay'


def find(
  delays: np.ndarray | None = None,
  lateness: np.ndarray | None = None,
  alpha: float = ALPHA,
  resolution: float = 0.0,
) -> tuple[Finding, ...]:
  """All faults, the plainest first; (): nothing.

  Args:
    delays: (ranks, ranks) seconds of a transfer from row to column, above 0;
      the diagonal is not read. Where pairs differ by design (within a host and
      between hosts), divide by what each should take.
    lateness: (ranks,) or (barriers, ranks) seconds at which each rank arrived,
      after any common start, such as the first arrival.
    alpha: probability of an alarm where there is no fault.
    resolution: seconds; noise is taken to be no smaller. For clocks that tick.

  Raises:
    UserError: another shape, fewer than LEAST ranks, a number that is missing
      or a delay that is not above 0, a probability that is none.
  """
  if not 0 < alpha < 1:
    raise errors.UserError(f'alpha={alpha} is no probability above 0, below 1.')
  late = None if lateness is None else _lateness(lateness)
  x = None if delays is None else _delays(delays)
  ranks = [len(a) for a in (x, late) if a is not None]
  if len(set(ranks)) > 1:
    raise errors.UserError(
      f'delays of {ranks[0]} ranks, but lateness of {ranks[1]}.'
    )
  tests = 0 if x is None else len(x) * (len(x) + 1)
  tests += 0 if late is None else len(late)
  found = []
  if x is not None:
    tick = resolution / math.exp(np.median(_without_diagonal(x)))
    judge = lambda groups: odd(groups, alpha / tests, tick)
    found = senders(x, judge) + receivers(x, judge)
    found += links(x, judge, found)
  if late is not None:
    found += late_ranks(late, lambda g: odd(g, alpha / tests, resolution))
  return tuple(sorted(found, key=lambda f: (-f.margin, f.kind, f.ranks)))


def odd(groups, alpha, resolution=0.0):
  """(excess, margin) of each of n groups of k numbers; odd: margin > 1.

  Args:
    groups: (n, k). alpha: probability that one group without a fault is odd.
    resolution: the noise is taken to be no smaller.
  """
  n, k = groups.shape
  noise = _DEVIATION * np.median(abs(groups - np.median(groups)))
  noise = max(noise, resolution) * min(1, _MEDIAN / math.sqrt(k))
  medians = np.median(groups, 1)
  excess = medians - np.median(medians)
  scale = max(noise, _DEVIATION * np.median(abs(excess)))
  bound = threshold(alpha, n * k) * scale
  if not bound:  # numbers without any noise
    return excess, np.where(excess > 0, np.inf, 0.0)
  return excess, excess / bound


def threshold(alpha: float, numbers: int) -> float:
  """t above: deviations that a group reaches with probability alpha, where the
  deviation is estimated from so many numbers."""
  z = statistics.NormalDist().inv_cdf(1 - alpha)
  nu = _EFFICIENCY * numbers
  exponent = (z * (8 * nu + 3) / (8 * nu + 1)) ** 2 / nu
  return math.sqrt(nu * math.expm1(min(exponent, 600.0)))


def senders(x, judge):
  """[Finding] of rows of (ranks, ranks) log delays; judge(groups) is `odd`."""
  return _groups('sender', _without_diagonal(x), judge, math.exp)


def receivers(x, judge):
  """[Finding] of columns, as `senders`."""
  return _groups('receiver', _without_diagonal(x.T), judge, math.exp)


def links(x, judge, found):
  """[Finding] of cells, but for those of senders and receivers in `found`."""
  left = ~np.eye(len(x), dtype=bool)
  for other in found:
    if other.kind == 'sender':
      left[other.ranks] = False
    else:
      left[:, other.ranks] = False
  cells = np.argwhere(left)
  if len(cells) < LEAST:
    return []
  bad = _groups('link', x[left][:, None], judge, math.exp)
  return [f._replace(ranks=tuple(map(int, cells[f.ranks[0]]))) for f in bad]


def late_ranks(late, judge):
  """[Finding] of (ranks, barriers) seconds after the median arrival."""
  return _groups('rank', late, judge, float)


def _groups(kind, groups, judge, unit):
  """[Finding] of the odd ones."""
  excess, margins = judge(groups)
  return [
    Finding(kind, (int(g),), unit(excess[g]), float(margins[g]))
    for g in np.flatnonzero(margins > 1)
  ]


def _without_diagonal(x):
  """(ranks, ranks) -> (ranks, ranks - 1)."""
  return x[~np.eye(len(x), dtype=bool)].reshape(len(x), -1)


def _delays(delays):
  """(ranks, ranks) logarithms, the diagonal 0."""
  x = np.array(delays, float)
  if x.ndim != 2 or x.shape[0] != x.shape[1] or len(x) < LEAST:
    raise errors.UserError(
      f'delays of shape {x.shape}: give (ranks, ranks), {LEAST} ranks or more.'
    )
  np.fill_diagonal(x, 1.0)
  wrong = np.argwhere(~(np.isfinite(x) & (x > 0)))
  if len(wrong):
    i, j = wrong[0]
    raise errors.UserError(
      f'delay from rank {i} to {j}: {x[i, j]} is no time above 0.'
    )
  return np.log(x)


def _lateness(lateness):
  """(ranks, barriers) seconds after the median arrival."""
  x = np.atleast_2d(np.array(lateness, float))
  if x.ndim != 2 or not len(x) or x.shape[1] < LEAST:
    raise errors.UserError(
      f'lateness of shape {np.shape(lateness)}: give (ranks,) or (barriers, '
      f'ranks), {LEAST} ranks or more.'
    )
  wrong = np.argwhere(~np.isfinite(x))
  if len(wrong):
    b, i = wrong[0]
    raise errors.UserError(
      f'lateness of rank {i} at barrier {b}: {x[b, i]} is no time.'
    )
  return (x - np.median(x, 1, keepdims=True)).T
