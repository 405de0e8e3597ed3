"""The law of parallel streams, fitted: what P streams of N parameters reach.

    L(N, P) = E + (A / (N (k ln P + 1)))^alpha

(ParScale, arXiv:2505.10475, section 4.) Fitted as there, to the sum of Huber's
loss of ln L - ln found, delta 1e-3, over E, A, alpha, k > 0, from many starts;
here by trust regions, in the logarithms of the four. Cost: 0.1 s a start.

Legend: M measurements.
"""

import functools
import itertools

import numpy as np
from scipy import optimize

from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import families
from paraxis.train.claims import harness as claims

DELTA = 1e-3
UNIT = 1e9  # parameters in which A is counted
NAMES = ('E', 'A', 'alpha', 'k')
STARTS = tuple(
  itertools.product((0.4, 1.0), (0.02, 0.14, 1.0), (0.1, 0.5), (0.2, 0.8))
)


def law(constants, n_M, p_M):
  """L (M,); constants: of NAMES."""
  e, a, alpha, k = constants
  return e + (a * UNIT / (n_M * (k * np.log(p_M) + 1))) ** alpha


def fit(n_M, p_M, found_M):
  """Constants of NAMES whose law is nearest to losses found."""
  wanted = np.log(found_M)
  error = lambda x: np.log(law(np.exp(x), n_M, p_M)) - wanted
  run = functools.partial(
    optimize.least_squares, error, jac='3-point', loss='huber', f_scale=DELTA,
    ftol=1e-15, xtol=1e-15, gtol=1e-15,
  )  # fmt: skip
  with np.errstate(all='ignore'):
    ends = map(run, map(np.log, STARTS))
    return np.exp(min(ends, key=lambda end: end.cost).x)


def _rows(sizes, losses):
  """(n, p, found), (M,) each, of {P: [N]} and {P: [loss]}."""
  n = np.concatenate([sizes[p] for p in losses]).astype(float)
  p = np.repeat([float(p) for p in losses], [len(x) for x in losses.values()])
  return n, p, np.concatenate([*losses.values()])


def planted(run, *, sizes, constants, within):
  """EQ: the fit of losses that the law made gives its constants back.

  Args:
    sizes: {P: [N]}. constants: list of [E, A, alpha, k].
  """
  gaps, (n, p, _) = [], _rows(sizes, sizes)
  for wanted in constants:
    found = fit(n, p, law(wanted, n, p))
    gaps.append(abs(found / wanted - 1).max())
  return experiment.equal(gaps, within, f'{len(n)} losses each')


def published(run, *, sizes, losses, constants, within):
  """EQ: the fit of published losses gives the published constants.

  Args:
    sizes: {P: [N]}. losses: {text: {P: [loss]}}. constants: {text: of NAMES}.
    within: largest relative difference.
  """
  found = {text: fit(*_rows(sizes, rows)) for text, rows in losses.items()}
  gap = max(abs(found[t] / c - 1).max() for t, c in constants.items())
  shown = '; '.join(
    f'{text} {experiment.numbers(row, ".4f")}' for text, row in found.items()
  )
  return claims.Outcome(
    f'within {within:.0%}', f'{gap:.2%}', f'{", ".join(NAMES)}: {shown}',
    bool(gap <= within),
  )  # fmt: skip


def falls(run, *, streams, fields, seeds):
  """LEARN: held-out bits per byte fall with ln P, in every seed.

  Args:
    streams: [P]; of one the row is a standard one. fields: {'section.field':
      value} of all trainings. seeds: of the trainings.
  """
  configs = {
    f'{p} streams': experiment.fields(run.config, fields, {'model.streams': p})
    for p in streams
  }
  found, seconds = families.train(run, configs, seeds)
  rows = np.array(list(found.values()))
  slopes = np.polyfit(np.log(streams), rows, 1)[0]
  finding = ablation.at_most('slope by ln P', slopes, 0.0, seconds)
  if not (slopes < 0).all():
    finding = finding._replace(passed=False, verdict=claims.VERDICTS[2])
  return ablation.outcome(
    run, found, [finding], 'bits per byte',
    f'{families.tokens(run.config):,} tokens; slopes of the seeds '
    f'{experiment.numbers(slopes, ".4f")}',
    seconds,
  )  # fmt: skip
