"""Groups of devices in every notation, and the mesh axes that they span."""

import itertools
import types

import jax
import numpy as np
import pytest

from paraxis.sharding import replica_groups
from paraxis.sharding.meter import compiled


def instruction(rest):
  return compiled.Instruction('c', 'all-reduce.1', 'all-reduce', '', '', rest)


def groups(text, partitions=8):
  found = replica_groups.groups(
    instruction(f', {text}, to_apply=%a'), partitions
  )
  return sorted(tuple(sorted(g)) for g in found.tolist())


@pytest.mark.parametrize(
  'text, expected',
  [
    ('{{0,4},{1,5},{2,6},{3,7}}', [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ('{}', [tuple(range(8))]),
    ('[2,4]<=[8]', [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ('[4,2]<=[2,4]T(1,0)', [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ('[4,2]<=[2,2,2]T(0,2,1)', [(0, 2), (1, 3), (4, 6), (5, 7)]),
    ("mesh['a'=2,'b'=1,'c'=4] {'a','b'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ("mesh['a'=8] {'a':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
    ('mesh[a=8] {a:(1)2}', [(0, 4), (1, 5), (2, 6), (3, 7)]),
    (
      "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
      [(0, 1, 2, 3), (4, 5, 6, 7)],
    ),
    (
      "mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}",
      [(0, 2), (1, 3)],
    ),
  ],
)
def test_notations(text, expected):
  assert groups(f'replica_groups={text}') == expected


def test_mesh_notation_against_loops():
  """mesh['a'=2,'b'=6,'c'=2] grouped over c and the middle part of b."""
  found = groups("replica_groups=mesh['a'=2,'b'=6,'c'=2] {'c','b':(3)2}", 24)
  expected = {}
  for a, b, c in itertools.product(range(2), range(6), range(2)):
    expected.setdefault((a, b // 2), []).append(12 * a + 2 * b + c)
  assert found == sorted(map(tuple, expected.values()))


def test_unknown_notation_is_an_error():
  with pytest.raises(ValueError, match='all-reduce.1: no replica groups'):
    groups('replica_groups=everyone')


SIZES = dict(replica=1, data=2, fsdp=4, tensor=2)


def places(devices=None):
  mesh = jax.sharding.AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
  if devices is not None:
    mesh = types.SimpleNamespace(shape=SIZES, devices=devices)
  return replica_groups.Places(mesh)


@pytest.mark.parametrize(
  'rows, expected',
  [
    ([[0, 1], [2, 3]], ('tensor',)),
    ([[0, 2, 4, 6]], ('fsdp',)),
    ([[0, 4]], ('fsdp',)),  # a part of the axis
    ([[0, 8]], ('data',)),
    ([[0, 1, 8, 9]], ('data', 'tensor')),
    ([list(range(16))], ('data', 'fsdp', 'tensor')),
    ([[5]], ()),
  ],
)
def test_axes(rows, expected):
  assert places().axes(np.array(rows)) == expected
  assert places().span(expected) == np.prod([SIZES[a] for a in expected])


def test_numbers_are_places_in_the_mesh_not_device_ids():
  """On a mesh of permuted devices; ids would give the other axis."""
  devices = np.array(jax.devices()[:8]).reshape(2, 4).T.reshape(2, 4)
  mesh = jax.sharding.Mesh(devices, ('data', 'tensor'))
  f = jax.shard_map(
    lambda x: jax.lax.psum(x, 'tensor'),
    mesh=mesh,
    in_specs=jax.P(('data', 'tensor')),
    out_specs=jax.P('data'),
    check_vma=False,
  )
  text = jax.jit(f).lower(np.zeros(8, np.float32)).compile().as_text()
  runs = compiled.CompiledProgram(text).runs(len)
  found = [r.instruction for r in runs if r.instruction.opcode == 'all-reduce']
  rows = replica_groups.groups(*found, 8)
  assert replica_groups.Places(mesh).axes(rows) == ('tensor',)
  assert replica_groups.Places(mesh).axes_of_ids(rows) != ('tensor',)


def _two_slices():
  """16 devices: slice 1 has ids 100000.., slice 2 200000.., data across."""
  device = lambda s, d: types.SimpleNamespace(
    id=100000 * s + d, slice_index=s - 1, platform='tpu'
  )
  flat = [device(s, d) for s in (1, 2) for d in (0, 1, 3, 2, 4, 5, 6, 7)]
  out = np.empty(16, object)
  out[:] = flat
  return out.reshape(tuple(SIZES.values()))


def test_slices():
  """Numbers count one slice; transfers between slices name device ids."""
  p = places(_two_slices())
  assert (p.slices, p.partitions) == (2, 8)
  assert p.axes(np.array([[0, 2, 4, 6], [1, 3, 5, 7]])) == ('fsdp',)
  target = '_xla_megascale_target={},_xla_megascale_transfer_type="ALL_REDUCE"'
  for text in (
    '"{1,2}x{0:7}"',
    '{{100000,200000},{100003,200003}}',
    '{{100000->200000},{200000->100000}}',
  ):
    rows = replica_groups.target(instruction(target.format(text)))
    assert rows[0].tolist() == [100000, 200000]
    assert p.axes_of_ids(rows) == ('data',)
  with pytest.raises(ValueError, match='not understood'):
    replica_groups.target(instruction(target.format('"{}"')))
