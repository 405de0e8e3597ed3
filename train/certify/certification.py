"""A layout under test against one device: what both gave, and how far apart.

    difference of a leaf = max |a - b| / max |b|        (b: one device)

A leaf of the gradient counts as at least FLOOR of the largest gradient: where
positions are learned, the bias of keys has a gradient of rounding alone. Adam
divides gradients by their root, so that rounding moves a parameter as far as
anything else does: one update is compared from identical gradients, and
parameters after independent steps only within 0.05 x learning rate x steps,
without leaves whose gradient is rounding, and not in bfloat16.

bfloat16 rounds each product, so one device is as far from the truth as a
layout. There the truth is float32, from the same parameters, and

    difference of a leaf = its error / one device's own      (trial.excess)

may be 2. Of one draw of parameters and batches that quotient is luck (of 8
draws of one right layout it was 0.5 to 2.5 at its worst leaf), so errors are
pooled over DRAWS of them, leaf by leaf. A sum in bfloat16 that both have is
read off the program (dtypes.py).
"""

import dataclasses
import functools
import math
import textwrap
from typing import NamedTuple

import numpy as np

from paraxis.configs import schema
from paraxis.train import state as state_lib
from paraxis.train.certify import inputs
from paraxis.train.certify import trial

# dtype -> relative bound on (the loss, gradients). Devices sum in another order
# than one does: over all forms and layouts float64 gave 1e-15 and 2e-14,
# float32 6e-7 and 3e-6. Of bfloat16 these are one rounding, and four: for
# numbers that the same layout computes again.
BOUNDS = {
  'float64': (1e-9, 1e-9),
  'float32': (1e-5, 1e-5),
  inputs.NARROW: (2.0**-9, 2.0**-7),
}
EXCESS = 2.0  # error of a layout in bfloat16 over that of one device
DRAWS = 12  # of parameters and batches, over which those errors are pooled
CHAOS = 0.25  # share of the gradient: one device so far off compares nothing
CHANGES, NOT_CERTIFIED = 'CHANGES THE NUMBERS', 'NOT CERTIFIED'


class Verdict(NamedTuple):
  """On one property. bound, measured: floats; worst: the leaf furthest off.

  word: PASS, FAIL, or, with a reason why, CHANGES THE NUMBERS, or, if nothing
  was measured, NOT CERTIFIED.
  """

  name: str
  bound: float
  measured: float
  passed: bool
  worst: str
  why: str = ''

  @property
  def word(self):
    if self.passed:
      return 'PASS'
    return (CHANGES if self.measured else NOT_CERTIFIED) if self.why else 'FAIL'

  def line(self):
    """As a line of the table."""
    if self.word in ('PASS', 'FAIL'):
      text = f'{self.word}  {self.name:46} {self.bound:7.0e}'
      text += f' {self.measured:8.1e}'
      return f'{text}  {self.worst}'.rstrip() if self.measured else text
    text = f'{self.word}: {self.name}, {self.why}'
    if self.measured:
      text += f'; off by {self.measured:.1e}, most in {self.worst}'
    return textwrap.fill(text, 80, subsequent_indent=' ' * 6)


class Certification:
  """A layout under test, its reference, and what both gave so far.

  Attributes:
    runner: trial.Runner in the layout under test. config, devices: of it.
    references: trial.Reference of every draw; reference: the first.
  """

  def __init__(self, runner, packed):
    """packed: as for trial.batches."""
    self.runner, self.packed = runner, packed
    self.config, self.devices = runner.config, runner.devices
    self.again = BOUNDS[self.config.model.dtype]
    self.narrow = self.config.model.dtype == inputs.NARROW
    self.bounds = (EXCESS, EXCESS) if self.narrow else self.again
    self.references = self.references_of(self.config)
    self.reference = self.references[0]

  def references_of(self, config):
    """trial.Reference of a schema.Config, for every draw."""
    device = self.devices[0]
    return [
      trial.reference(config, self.packed, device, seed)
      for seed in range(DRAWS if self.narrow else 1)
    ]

  @functools.cached_property
  def state(self):
    """On the mesh, before the first step."""
    return self.runner.start(self.reference.params)

  @functools.cached_property
  def outcomes(self):
    """[(loss, gradients, aux.Aux)] of batch 0 of every draw, on the mesh."""
    return outcomes_of(self.runner, self.references)

  @property
  def gradients(self):
    """(loss, gradients, aux.Aux) of batch 0, on the mesh."""
    return self.outcomes[0]

  @functools.cached_property
  def updated(self):
    """{path: leaf} of the state after one update from identical gradients.

    And from identical counts: in bfloat16 a token between two experts may go to
    the other one.
    """
    loss, own, aux = self.gradients
    on_mesh, one = self.runner.job.on_mesh, self.reference
    same = on_mesh(one.gradients, own)
    aux = aux._replace(counts=on_mesh(one.aux.counts, aux.counts))
    return state_lib.flatten(self.runner.update(self.state, loss, same, aux))

  def verdict(self, name, difference, bound=None):
    """`Verdict` on a (difference, leaf) against a bound."""
    measured, where = difference
    bound = self.bounds[1] if bound is None else bound
    if self.narrow and measured > bound == EXCESS and self.own_error > CHAOS:
      why = f'one device itself is off by {self.own_error:.0%} of the gradient'
      return Verdict(name, bound, 0.0, False, where, why)
    return Verdict(name, bound, measured, measured <= bound, where)

  @functools.cached_property
  def own_error(self):
    """Error of one device in bfloat16, of all draws and gradients together."""
    size = error = 0.0
    for one in self.references:
      _, exact, _ = one.exact
      for path, x in exact.items():
        x, own = (np.asarray(y, np.float64) for y in (x, one.gradients[path]))
        size, error = size + np.sum(x * x), error + np.sum((own - x) ** 2)
    return math.sqrt(error / size)

  def loss_difference(self, outcomes=None, references=None):
    """Of batch 0; infinite if it is not finite.

    outcomes, references: of another program; of every draw.
    """
    outcomes = self.outcomes if outcomes is None else outcomes
    references = self.references if references is None else references
    (loss, *_), *_ = outcomes
    if self.narrow:
      every = (
        (x for x, *_ in outcomes),
        *zip(*((one.loss, one.exact[0]) for one in references), strict=True),
      )
      found, own, exact = ({'': np.array([*map(float, x)])} for x in every)
      # Of a mean of independent errors four deviations.
      targets = float(references[0].batches[0].denominator)
      floor = 4 * trial.ROUNDING / targets**0.5
      return trial.excess(found, own, exact, floor)[0]
    wanted = references[0].loss
    gap = abs(float(loss) - wanted) / abs(wanted)
    return gap if math.isfinite(gap) else math.inf

  def gradient_difference(self, outcomes=None, references=None):
    """(difference, leaf) of batch 0: gradients, terms of the loss, counts.

    Arguments as of `loss_difference`.
    """
    outcomes = self.outcomes if outcomes is None else outcomes
    references = self.references if references is None else references
    in_order = self.runner.job.in_order
    found = [[*map(in_order, _trees(*x[1:]))] for x in outcomes]
    own = [_trees(one.gradients, one.aux) for one in references]
    if self.narrow:
      exact = [_trees(*one.exact[1:]) for one in references]
      parts = zip(*map(_pooled, (found, own, exact)), strict=True)
      return max(trial.excess(*part) for part in parts if part[1])
    # Apart: counts are hundreds, any gradient would look small beside them.
    floors = trial.FLOOR, 0.0, 0.0
    parts = zip(found[0], own[0], floors, strict=True)
    return max(trial.worst(*part) for part in parts if part[1])

  def changed(self, change):
    """`Verdict` on loss and gradients with what a changes.Change names."""
    name = f'{change.field}={change.value}'
    if not change.tried:
      return Verdict(name, 0.0, 0.0, False, '', change.why)
    config = schema.with_values(self.config, change.tried)
    return self._compared(name, config, change.bound)._replace(why=change.why)

  def variant(self, name, **train):
    """`Verdict` on loss and gradients with other fields of config.train."""
    train = dataclasses.replace(self.config.train, **train)
    return self._compared(name, dataclasses.replace(self.config, train=train))

  def _compared(self, name, config, least=0.0):
    """`Verdict` on loss and gradients of a schema.Config on these devices.

    least: of the bounds.
    """
    of_loss, of_gradients = (max(b, least) for b in self.bounds)
    references = self.references_of(config)
    outcomes = outcomes_of(trial.Runner(config, self.devices), references)
    gap = self.loss_difference(outcomes, references)
    found = self.gradient_difference(outcomes, references)
    gradient = self.verdict(name, found, of_gradients)
    if gradient.passed and gap > of_loss:
      return self.verdict(name, (gap, 'the loss'), of_loss)
    return gradient


def outcomes_of(runner, references, parts=0):
  """[(loss, gradients, aux.Aux)] of batch 0 of every trial.Reference."""
  return [
    runner.gradients(runner.start(one.params), one.batches[0], parts)
    for one in references
  ]


def _trees(gradients, aux):
  """What is compared of a step: three {name: array}."""
  return gradients, aux.terms, aux.counts


def _pooled(draws):
  """Trees of every draw -> trees, each leaf with the draws stacked."""
  stack = lambda trees, path: np.stack([np.asarray(t[path]) for t in trees])
  return [
    {path: stack(trees, path) for path in trees[0]}
    for trees in zip(*draws, strict=True)
  ]
