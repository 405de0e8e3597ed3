"""Which devices a compiled collective joins, and along which mesh axes.

The compiler writes the groups of a collective in one of three notations:

    {{0,4},{1,5}}                                    listed
    [2,4]<=[4,2]T(1,0)                               iota, reshaped, transposed
    mesh['a'=4,'b'=2] {'a':(1)2}                     axes of a mesh of its own

(openxla: hlo/ir/replica_group.cc, mesh_and_axis.cc.) Numbers are places in the
program, so device k is the k-th of mesh.devices.flat, whatever its id. A
program for several TPU slices is compiled once for a slice: its numbers count
the devices of one slice, and what crosses slices names device ids instead, as
lists, as pairs 'a->b', or as '{1,2}x{0:15}', slices times devices.
"""

import math
import re

import jax
import numpy as np

from paraxis.sharding import placement

_LISTED = r'replica_groups=(\{[\d{}, ]*\})'
_IOTA = r'replica_groups=(\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?)'
_MESH = r'replica_groups=(mesh\[[^\]]*\](?:, device_ids=\([^{]*\))? \{[^}]*\})'
_PAIRS = r'source_target_pairs=(\{[\d{}, ]*\})'
_TARGET = r'_xla_megascale_target="?(\{[^=]*\})"?,_xla_megascale_transfer'
_SLICE = 100000  # device ids of a slice start at a multiple of this


def groups(i, partitions):
  """Replica groups of a compiled.Instruction: array (groups, members).

  Raises:
    ValueError: the instruction has no groups in a notation known here.
  """
  if text := i.attribute(_MESH):
    return _mesh_groups(text)
  if text := i.attribute(_IOTA):
    shape = _iota_parts(text)[0]
    return _iota(text).reshape(shape)
  if text := i.attribute(_LISTED):
    rows = _rows(text[1:-1])
    return np.array(rows or [range(partitions)])
  raise ValueError(f'{i.name}: no replica groups that are understood.')


def pairs(i):
  """(source, target) of a collective-permute: array (pairs, 2)."""
  rows = _rows(i.attribute(_PAIRS)[1:-1])
  return np.array(rows, dtype=int).reshape(-1, 2)


def target(i):
  """Device ids of a transfer between slices: array (groups, members)."""
  text = i.attribute(_TARGET)
  if match := re.fullmatch(r'\{([\d,]+)\}x\{(\d+):(\d+)\}', text):
    slices, first, last = _integers(match[1]), int(match[2]), int(match[3])
    return np.array(
      [[s * _SLICE + d for s in slices] for d in range(first, last + 1)]
    )
  rows = _rows(text[1:-1])
  if not rows:
    raise ValueError(f'{i.name}: transfer target {text!r} is not understood.')
  return np.array(rows)


def _rows(text):
  rows = [_integers(r) for r in re.findall(r'\{([^{}]*)\}', text)]
  return [r for r in rows if r]


def _integers(text):
  return [int(n) for n in re.findall(r'\d+', text)]


def _parts(pattern, text):
  """Groups of `pattern` at the start of a text; ValueError if it is none."""
  match = re.match(pattern, text)
  if match is None:
    raise ValueError(f'{text!r}: a notation of devices that is not known here.')
  return match.groups()


def _iota_parts(text):
  """'[2,4]<=[4,2]T(1,0)' -> ([2, 4], [4, 2], [1, 0])."""
  shape, dims, order = _parts(
    r'\[([\d,]*)\](?:<=\[([\d,]*)\])?(?:T\(([\d,]*)\))?', text
  )
  return _integers(shape), _integers(dims or shape), _integers(order or '')


def _iota(text):
  """The numbers of an iota notation, in order."""
  _, dims, order = _iota_parts(text)
  devices = np.arange(math.prod(dims)).reshape(dims)
  return devices.transpose(order) if order else devices


def _mesh_groups(text):
  """The third notation; 'a':(before)size is a part of axis a.

  With a as (before, size, rest), it is the middle one.
  """
  head, order, chosen = _parts(
    r'mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}', text
  )
  axes = {n: int(s) for n, s in re.findall(r"'?([\w.]+)'?=(\d+)", head)}
  devices = np.arange(math.prod(axes.values()))
  if order:
    devices = _iota(order) if '[' in order else np.array(_integers(order))
  cuts = {name: {1, size} for name, size in axes.items()}
  wanted = []
  for part in filter(None, chosen.split(',')):
    name, before, size = _parts(
      r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?$", part.strip()
    )
    start = int(before or 1)
    end = start * int(size or axes[name])
    cuts[name] |= {start, end}
    wanted.append((name, start, end))
  shape, taken = [], []
  for name in axes:
    edges = sorted(cuts[name])
    for low, high in zip(edges, edges[1:], strict=False):
      if any(a == name and s <= low and high <= e for a, s, e in wanted):
        taken.append(len(shape))
      shape.append(high // low)
  rest = [d for d in range(len(shape)) if d not in taken]
  members = math.prod(shape[d] for d in taken)
  return devices.reshape(shape).transpose(rest + taken).reshape(-1, members)


class Places:
  """Where the devices of a program are in its mesh.

  Attributes:
    sizes: mesh axis -> size. slices: TPU slices that the mesh spans.
  """

  def __init__(self, mesh):
    """mesh: jax Mesh or AbstractMesh."""
    self.sizes = dict(mesh.shape)
    abstract = isinstance(mesh, jax.sharding.AbstractMesh)
    flat = [] if abstract else list(mesh.devices.flat)
    slice_of = [placement.slice_of(d) for d in flat]
    self.slices = len(set(slice_of)) or 1
    self._ids = {d.id: k for k, d in enumerate(flat)}
    self._own = np.arange(math.prod(self.sizes.values()))
    if self.slices > 1:  # numbers count the devices of one slice
      self._own = self._own[np.array(slice_of) == slice_of[0]]

  @property
  def partitions(self):
    """Devices that a compiled program numbers."""
    return len(self._own)

  def axes(self, rows):
    """Mesh axes along which the members of groups of the program differ."""
    return self._differ(self._own[rows])

  def axes_of_ids(self, rows):
    """The same for groups of device ids."""
    place = np.vectorize(self._ids.__getitem__)
    return self._differ(place(rows))

  def span(self, axes):
    """Devices along some axes together."""
    return math.prod(self.sizes[a] for a in axes)

  def _differ(self, rows):
    shape = tuple(self.sizes.values())
    at = np.stack(np.unravel_index(rows, shape), -1)
    differ = (at != at[:, :1]).any((0, 1))
    return tuple(a for a, d in zip(self.sizes, differ, strict=True) if d)
