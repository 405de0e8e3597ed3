"""Fields of a configuration with which the layout changes the numbers.

They are legal. `paraxis verify` certifies the configuration without them, then
says for each:

    CHANGES THE NUMBERS   how much it alone does, against one device and one
                          microbatch
    NOT CERTIFIED         it decides, with the layout, what is computed at all

A tolerance of the configuration is certified too, to itself. What is said is of
the configuration as written: its shrunk form has other sizes, and so other
limits.
"""

from typing import NamedTuple

from paraxis.configs import schema
from paraxis.configs.base import mixers

SCOPE = 'model.experts.balance_scope'
CAPACITY = 'model.experts.capacity_factor'
TOLERANCE = 'model.recurrent.tolerance'
EXACT = 1e-13  # a residual that float64 reaches
_OWN_LOADS = 'a microbatch counts its own loads, and the layout makes them'
# balance_scope -> (the scope to try, why it changes the numbers).
_SCOPES = {
  'microbatch': ('microbatch', _OWN_LOADS),
  'device': (
    'device',
    'a device counts the loads of its own tokens, which the layout gives it',
  ),
  'running': (
    'microbatch',
    f'in the first step, which has no step before it, {_OWN_LOADS}',
  ),
}


class Change(NamedTuple):
  """A field without which the other properties are certified.

  field: dotted name. value: of the configuration. instead: what it is for the
  other properties. why: a sentence without its end.
  tried: {field: value} that shows the change; empty: not certified.
  bound: of the difference that it may make; 0: that of the arithmetic.
  """

  field: str
  value: object
  instead: object
  why: str
  tried: dict = {}  # noqa: RUF012
  bound: float = 0.0


def _balance(config, parts):
  """Loads that are counted over less than a step, of `parts` microbatches."""
  experts = config.model.experts
  scope = experts.balance_scope
  if not (experts.count and experts.balance and scope in _SCOPES):
    return
  as_tried, why = _SCOPES[scope]
  more = {}
  if parts == 1:  # verify accumulates too, and claims the same
    parts, more = 2, {'train.microbatches': 2}
  instead = scope if scope == 'running' else 'step'
  why += f' (tried: {parts} microbatches)'
  yield Change(SCOPE, scope, instead, why, {SCOPE: as_tried} | more)


def _capacity(config):
  """Assignments to experts that may find no slot."""
  experts = config.model.experts
  most = experts.count * (2 if 'P' in experts.pattern else 1) / experts.top_k
  if experts.count and 0 < experts.capacity_factor < most:
    why = (
      'a device drops what is beyond the slots of its own tokens, so the '
      f'layout decides which assignments; from {most:g} on, or with 0, none '
      'is dropped'
    )
    yield Change(CAPACITY, experts.capacity_factor, 0.0, why)


def _skipped(config):
  """Stages that a microbatch leaves out."""
  fraction = config.pipeline.skip_fraction
  if fraction:
    why = 'one device has no stages to leave out'
    yield Change('pipeline.skip_fraction', fraction, 0.0, why)


def _tolerance(config, dtype):
  """Solutions that end at a residual; float64 alone would see it."""
  own = config.model.recurrent
  solved = set('RL').intersection(mixers.of_pattern(config.model.pattern)[0])
  seen = dtype == 'float64' and own.tolerance > EXACT
  if solved and seen and own.solver == 'newton':
    why, tried = 'shards stop at other residuals', {TOLERANCE: own.tolerance}
    yield Change(TOLERANCE, own.tolerance, EXACT, why, tried, own.tolerance)


def find(config, small):
  """(the schema.Config to certify, the `Change`s of it).

  Args:
    config: schema.Config as the user wrote it, which is judged.
    small: the same shrunk, which runs: how many microbatches, in which dtype.
  """
  found = (
    *_balance(config, small.microbatches),
    *_capacity(config),
    *_skipped(config),
    *_tolerance(config, small.model.dtype),
  )
  instead = {change.field: change.instead for change in found}
  return schema.with_values(small, instead), found
