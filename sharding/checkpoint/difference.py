"""How two steps on disk differ: which leaves, and by how much.

Fingerprints say which leaves differ, in the manifests alone; those are read, a
block of both at a time, and verified first.
"""

import math
from typing import NamedTuple

import numpy as np

from paraxis.configs.base import field
from paraxis.sharding.checkpoint import stored


class Difference(NamedTuple):
  """One leaf that is not the same.

  Attributes:
    path: of the leaf. what: 'values', or what keeps them from being compared,
      in words.
    changed, size: elements whose bits differ, elements; None: not compared.
    largest: max |a - b|. relative: that, over the largest |a| or |b|.
  """

  path: str
  what: str
  changed: int | None = None
  size: int | None = None
  largest: float | None = None
  relative: float | None = None


def _entry(leaf):
  return leaf['dtype'], tuple(leaf['shape']), tuple(leaf.get('axes') or ())


def same(a: dict, b: dict) -> bool:
  """Whether two manifests' leaves are alike: type, shape, axes, fingerprint."""
  key = lambda leaf: (*_entry(leaf), leaf['fingerprint'])
  return a.keys() == b.keys() and all(key(a[p]) == key(b[p]) for p in a)


def _values(path, a, b):
  """Difference of two leaves of one shape, read block by block."""
  one, other = a.leaf(path), b.leaf(path)
  block = max([*one.block[:1], *other.block[:1], 1])
  changed, largest, most = 0, 0.0, 0.0
  blocks = (x.leaf(path, block).blocks() for x in (a, b))
  for (_, x), (_, y) in zip(*blocks, strict=True):
    alike = x.dtype == y.dtype
    words = [np.atleast_1d(z).view(f'u{z.dtype.itemsize}') for z in (x, y)]
    x, y = x.astype(np.float64), y.astype(np.float64)
    changed += int(np.sum(words[0] != words[1] if alike else x != y))
    largest = max(largest, float(np.abs(x - y).max()))
    most = max(most, float(np.abs(x).max()), float(np.abs(y).max()))
  relative = largest / most if largest else 0.0
  return changed, one.size, largest, relative


def leaves(a: stored.Step, b: stored.Step) -> list[Difference]:
  """Every leaf in which two steps differ, by path.

  IntegrityError: one that is read is damaged.
  """
  out = []
  for path in sorted({*a.leaves, *b.leaves}):
    if path not in a.leaves or path not in b.leaves:
      here, there = ('A', b) if path in a.leaves else ('B', a)
      near = field.suggest(path, there.leaves, 0.8)
      near = near.replace('Did you mean', 'The other has').replace('?', '.')
      out.append(Difference(path, f'only in {here}.{near}'))
      continue
    one, other = a.leaves[path], b.leaves[path]
    if same({path: one}, {path: other}):
      continue
    said = [
      f'{name} {x} and {y}'
      for name, x, y in zip(
        ('dtype', 'shape', 'axes'), _entry(one), _entry(other), strict=True
      )
      if x != y
    ]
    if one['shape'] != other['shape']:
      out.append(Difference(path, ', '.join(said)))
      continue
    for step in (a, b):
      step.check(path)
    numbers = (0, 0, 0.0, 0.0)
    if math.prod(one['shape']):
      numbers = _values(path, a, b)
    out.append(Difference(path, ', '.join(said) or 'values', *numbers))
  return out


def first_step(a: dict[int, dict], b: dict[int, dict]) -> int | None:
  """The first step at which two runs differ, of those that both have.

  a, b: {step: manifest}. None: they are alike at all of them.
  """
  common = sorted(a.keys() & b.keys())
  unlike = (n for n in common if not same(a[n]['leaves'], b[n]['leaves']))
  return next(unlike, None)
