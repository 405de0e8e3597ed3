"""A sequence of gradients from workers of which some are slow, simulated.

Job t is a gradient, which n workers begin in round t; it is to be whole by the
end of round t + delay. A worker that is late in a round delivers nothing of it.
What is computed is not simulated, only who has delivered what:

    Coded        every worker has s + 1 of n chunks, any n - s suffice; delay 0
                 (gradient coding, Tandon et al., ICML 2017)
    Repeated     the same; if too few deliver in round t, as many as are missing
                 try again in round t + burst, the others go on with job t+burst
    Multiplexed  a job is in window - 1 + burst parts, one a round: first all
                 window - 1 of its own, which a worker tries again until they
                 are delivered, then `burst` coded ones, of each of which n -
                 most workers suffice

The last two are SR-SGC and M-SGC of sequential gradient coding (Krishnan et
al., ICLR 2023, section 3), which bear stragglers in bursts: in any `window`
rounds `most` workers at most are late, none over more than `burst` rounds. A
worker's `load` in a round is the share of a job's data that it reads, with k =
window - 1 + burst:

    Coded, Repeated    (s + 1) / n, Repeated with s = ceil(burst most / k)
    Multiplexed        (most + 1) k / (n (burst + (window - 1)(most + 1)))
"""

import math
from typing import NamedTuple

import numpy as np

from paraxis.configs.base import errors


class Bursts(NamedTuple):
  """Stragglers in bursts: see the top."""

  burst: int
  window: int
  most: int

  def holds(self, late) -> bool:
    """Whether the last of some rounds fits; late: (rounds, n) bool."""
    recent = late[-self.window :]
    few = recent.any(0).sum() <= self.most
    return bool(few and not (late[-1] & recent[: -self.burst].any(0)).any())


class Coded:
  """Gradient coding. load, delay: of a worker in a round; rounds."""

  delay = 0

  def __init__(self, n, tolerates):
    """n: workers. tolerates: s."""
    if not 0 <= tolerates < n:
      raise errors.UserError(
        f'a code of {n} workers that tolerates {tolerates} stragglers: give 0 '
        f'to {n - 1}.'
      )
    self.n, self.tolerates, self.rounds = n, tolerates, 0
    self.load = (tolerates + 1) / n
    self.enough = n - tolerates

  def accepts(self, late) -> bool:
    """Whether a round may end, late: (rounds, n), the last is this one."""
    return late[-1].sum() <= self.tolerates

  def round(self, ok) -> bool:
    """One round; ok: (n,) bool. Whether the job that is due is whole."""
    self.rounds += 1
    return bool(ok.sum() >= self.enough)


class Repeated(Coded):
  """Gradient coding, what failed is tried again a burst later."""

  def __init__(self, n, bursts):
    """bursts: `Bursts`; burst divides window - 1."""
    burst, window, most = bursts
    if burst < 1 or (window - 1) % burst:
      raise errors.UserError(
        f'bursts of {burst} in a window of {window} rounds: a part is tried '
        f'again after {burst}, which must divide {window - 1}.'
      )
    super().__init__(n, math.ceil(burst * most / (window - 1 + burst)))
    self.bursts, self.delay = bursts, burst
    self._jobs = [np.ones(n, bool)] * burst  # those before the first

  def accepts(self, late) -> bool:
    fits = super().accepts(late) or self.bursts.holds(late)
    return fits and not (self._again() & late[-1]).any()

  def _again(self):
    """(n,) bool: who tries again what was begun a burst ago."""
    old = self._jobs[self.rounds]
    missing = max(self.enough - int(old.sum()), 0)
    return ~old & (np.cumsum(~old) <= missing)

  def round(self, ok) -> bool:
    again, old = self._again(), self._jobs[self.rounds]
    self._jobs.append(ok & ~again)
    self.rounds += 1
    return bool((old | ok & again).sum() >= self.enough)


class Multiplexed(Coded):
  """Parts that are tried again, and coded ones, over a diagonal of rounds."""

  def __init__(self, n, bursts):
    """bursts: `Bursts`; most < n, burst < window."""
    burst, window, most = bursts
    if not 1 <= burst < window:
      raise errors.UserError(
        f'bursts of {burst} in a window of {window} rounds: give 1 to '
        f'{window - 1}.'
      )
    super().__init__(n, most)
    self.bursts, self.delay = bursts, window - 2 + burst
    slots = window - 1 + burst
    self.load = (most + 1) * slots / (n * (burst + (window - 1) * (most + 1)))
    self._own, self._coded = [], []  # of each job: (n,) and (burst,) counts

  def accepts(self, late) -> bool:
    return self.bursts.holds(late)

  def round(self, ok) -> bool:
    first = self.bursts.window - 1
    self._own.append(np.zeros(self.n, int))
    self._coded.append(np.zeros(self.bursts.burst, int))
    for slot in range(min(self.rounds, self.delay) + 1):
      own = self._own[self.rounds - slot]
      trying = ok if slot < first else ok & (own < first)
      if slot >= first:
        coded = ok & (own >= first)
        self._coded[self.rounds - slot][slot - first] += coded.sum()
      own += trying
    self.rounds += 1
    job = self.rounds - 1 - self.delay
    if job < 0:
      return True
    few = self._coded[job].min() >= self.enough
    return bool(few and self._own[job].min() >= first)


def delays(rng, rounds, n, start=0.02, end=0.4, slow=6.0, jitter=0.05):
  """(rounds, n) times by which workers take longer: slow ones in bursts.

  A worker becomes slow in a round with probability `start`, and stops with
  `end` (Gilbert and Elliott); it then takes `slow` times as long. The rest is
  log-normal.
  """
  bad, out = rng.random(n) < start / (start + end), []
  for _ in range(rounds):
    change = rng.random(n)
    bad = np.where(bad, change >= end, change < start)
    out.append(np.where(bad, slow, 1.0))
  return np.stack(out) * rng.lognormal(0.0, jitter, (rounds, n))


def makespan(scheme, times, fixed, patience=1.0):
  """Seconds of some rounds; a job of 1 second of work at a load of 1 / n.

  A worker's round takes `fixed` + load n seconds, times `times` (rounds, n).
  The master waits for (1 + patience) of the fastest, and, one by one, for those
  after it until the scheme accepts the round; of `Coded` for the fastest n - s.

  Raises:
    UserError: a job is not whole when it is due.
  """
  late, total = np.zeros((0, scheme.n), bool), 0.0
  for row in times * (fixed + scheme.load * scheme.n):
    order = np.argsort(row)
    first = scheme.enough
    if type(scheme) is not Coded:
      first = int((row <= (1 + patience) * row.min()).sum())
    now, count = np.zeros(scheme.n, bool), scheme.n
    for count in range(first, scheme.n + 1):
      now = np.ones(scheme.n, bool)
      now[order[:count]] = False
      if scheme.accepts(np.vstack([late, now])):
        break
    late = np.vstack([late, now])[-64:]
    total += row[order[count - 1]]
    if not scheme.round(~now):
      raise errors.UserError(
        f'job {scheme.rounds - 1 - scheme.delay} is not whole after round '
        f'{scheme.rounds - 1}: {int(now.sum())} of {scheme.n} workers are late.'
      )
  return total
