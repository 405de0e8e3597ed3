"""Mesh text, the places of devices, and what every mistake says."""

import jax
from jax.sharding import AxisType
import pytest
import support

from paraxis.configs.base import errors
from paraxis.sharding import mesh


def test_parse():
  assert mesh.parse('data=2, tensor=-1') == {'data': 2, 'tensor': -1}
  assert mesh.parse('') == {}


def test_resolve_names_all_axes_in_order():
  sizes = mesh.resolve({'tensor': 2, 'data': -1}, 8)
  assert list(sizes) == list(mesh.AXES)
  assert sizes == dict(replica=1, stage=1, data=4, fsdp=1, context=1, tensor=2)
  assert set(mesh.resolve({}, 1).values()) == {1}


def test_virtual_devices_are_as_many_as_places():
  found = [
    mesh.virtual_devices(sizes)
    for sizes in (
      {}, {'data': 2, 'tensor': 3}, {'fsdp': 8}, {'data': 16},
      {'fsdp': -1}, {'fsdp': -1, 'data': 2}, {'data': 0},
    )
  ]  # fmt: skip
  assert found == [1, 6, 8, 8, 8, 8, 8]


def test_factorisations_are_the_most_even_first():
  found = mesh.factorisations(8, ('data', 'fsdp', 'tensor'))
  assert found[0] == 'data=2,fsdp=2,tensor=2' and len(found) == 6
  assert all(mesh.resolve(mesh.parse(text), 8) for text in found)


def test_describe():
  assert mesh.describe(dict(tensor=2, data=4, fsdp=1)) == 'data=4,tensor=2'
  assert mesh.describe({}) == 'data=1'
  for text in ('data=2,fsdp=2,tensor=2', 'context=8'):
    assert mesh.describe(mesh.parse(text)) == text


def test_make_places_every_device_once():
  made = mesh.make('data=2,tensor=-1')
  assert made.axis_names == mesh.AXES
  assert dict(made.shape)['tensor'] == 4
  assert made.axis_types == (AxisType.Explicit,) * 6
  assert sorted(d.id for d in made.devices.flat) == list(range(8))
  one = mesh.make({}, jax.devices()[:1])
  assert one.size == 1 and one.axis_names == mesh.AXES
  with pytest.raises(errors.UserError, match='2 devices, but 8'):
    mesh.make('data=2')


def test_abstract_needs_no_devices():
  """4096 places on a machine of 8."""
  made = mesh.abstract(dict(data=64, tensor=64))
  assert made.axis_names == mesh.AXES and made.size == 4096
  assert dict(made.shape) == mesh.resolve(dict(data=64, tensor=64), 4096)
  assert made.axis_types == (AxisType.Explicit,) * 6
  assert mesh.abstract({}).size == 1


@pytest.mark.parametrize(
  'function, given, words',
  [
    (mesh.parse, ('tensr=2',),
     ['--mesh=tensr=2', "'tensr' is not a mesh axis", "mean 'tensor'?"]),
    (mesh.parse, ('data=2,data=4',),
     ['--mesh=data=2,data=4', "'data' is given twice"]),
    (mesh.parse, ('data=two',), ["size of 'data' is 'two', not a number"]),
    (mesh.parse, ('data',), ['--mesh=data', "of 'data' is '', not a number"]),
    (mesh.resolve, (dict(data=3, tensor=2), 8),
     ['mesh data=3,tensor=2 needs 6 devices, but 8', '--devices=6',
      'data=2,tensor=4 | data=4,tensor=2']),
    (mesh.resolve, ({}, 8),
     ['mesh data=1 needs 1 devices, but 8', 'fit: data=8.']),
    (mesh.resolve, (dict(data=3, fsdp=-1), 8),
     ['data=3,fsdp=-1', 'data=2,fsdp=4']),
    (mesh.resolve, (dict(data=16), 8),
     ['data=16 needs 16 devices, but 8', 'fit: data=8.',
      'launch, --devices_per_process=N, 16 in all']),
    (mesh.resolve, (dict(data=-1, fsdp=-1), 8), ['at most one may be -1']),
    (mesh.resolve, (dict(data=0), 8),
     ['mesh data=0: sizes must be positive']),
    (mesh.resolve, (dict(data=-2), 8),
     ['mesh data=-2: sizes must be positive']),
    (mesh.abstract, (dict(data=-1, tensor=4),),
     ['mesh data=-1: ', 'every size must be given']),
    (mesh.abstract, (dict(data=0, fsdp=-2),), ['mesh data=0,fsdp=-2']),
    (mesh.abstract, (dict(data=2**31 - 1, tensor=2),),
     ['data=2147483647,tensor=2 needs 4,294,967,294', '131,072']),
  ],
)  # fmt: skip
def test_what_is_no_mesh_is_an_error(function, given, words):
  with support.refused(*words):
    function(*given)
