"""Which parameters a run learns: `train.freeze`, by patterns of their paths.

A frozen parameter is read as any other. It has no gradient and no state of the
optimizer, and stays bitwise as it was.
"""

import fnmatch
from typing import NamedTuple

from paraxis.configs import schema
from paraxis.configs.base import errors

COUNTED = 'statistic'  # the kind of a leaf that no run learns


class Trained(NamedTuple):
  """What a configuration says of it. freeze: patterns of paths."""

  freeze: tuple = ()


EVERYTHING = Trained()


def of(train):
  """`Trained` of a schema.Train."""
  return Trained(patterns(train.freeze))


def patterns(text):
  """'embedding, layers/mlp/*' -> its patterns; `*` also matches a '/'."""
  return tuple(filter(None, (part.strip() for part in text.split(','))))


def matching(field, given, paths):
  """The paths that a pattern matches.

  Args:
    field: what `given` is the value of, for errors.
    given: `patterns` of it. paths: of all parameters.

  Raises:
    UserError: a pattern matches no path; it names near ones.
  """
  found, paths = set(), sorted(paths)
  for pattern in given:
    matched = fnmatch.filter(paths, pattern)
    if not matched:
      raise errors.UserError(
        f'{field}: {pattern!r} matches no parameter.'
        + (schema.suggest(pattern, paths) or f' There are {", ".join(paths)}.')
      )
    found.update(matched)
  return found


def frozen(trained, kinds):
  """frozenset of the paths that are not learned.

  Args:
    trained: `Trained`. kinds: {path: kind} of every leaf (models/decoder.py).

  Raises:
    UserError: as `matching`; nothing is left to learn.
  """
  paths = [p for p, kind in kinds.items() if kind != COUNTED]
  found = matching('train.freeze', trained.freeze, paths)
  if found.issuperset(p for p in paths if kinds[p] != 'balance'):
    raise errors.UserError(
      f'train.freeze={",".join(trained.freeze)!r} matches all {len(paths)} '
      'parameters: nothing is left to learn.'
    )
  return frozenset(found)
