"""Devices in a mesh: slices first (one slice: test_mesh.py)."""

import types

import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.sharding import placement
from paraxis.sharding.meter import aot


def test_crosses():
  device = lambda host: types.SimpleNamespace(process_index=host)
  hosts = np.array([device(k // 4) for k in range(8)]).reshape(2, 2, 2)
  crosses = lambda *axes: placement.crosses(hosts, axes, placement.host_of)
  assert crosses(0) and crosses(0, 1) and crosses(0, 1, 2)
  assert not crosses(1) and not crosses(1, 2) and not crosses()


@support.compiles('tpu')
@pytest.mark.parametrize(
  'sizes, across',
  [
    (dict(replica=1, data=4, fsdp=2, tensor=2), ('data',)),
    (dict(replica=2, data=2, fsdp=2, tensor=2), ('replica', 'data')),
    (dict(replica=1, data=2, fsdp=4, tensor=2), ('data', 'fsdp')),
  ],
)
def test_slices_are_divided_among_the_first_axes(sizes, across):
  devices = aot.topology('v5e:2x2', 4).devices
  placed = placement.place(sizes, devices)
  assert placed.shape == tuple(sizes.values())
  for k, axis in enumerate(sizes):
    crosses = placement.crosses(placed, (k,), placement.slice_of)
    assert crosses == (axis in across), axis


def test_slices_that_do_not_divide():
  of = lambda i: types.SimpleNamespace(platform='tpu', slice_index=i)
  devices = [of(i // 4) for i in range(12)]
  with pytest.raises(errors.UserError, match='3 slices: .*data=4,tensor=3'):
    placement.place(dict(data=4, tensor=3), devices)
