"""Times of the roofline, from figures that can be computed by hand."""

import types

import numpy as np
import pytest

from paraxis.sharding.meter import aot
from paraxis.sharding.meter import hlo
from paraxis.sharding.meter import roofline
from paraxis.sharding.meter import target

AXES = ('data', 'tensor')


def topology(kind, cores=1):
  return aot.Topology(kind, kind, target.CHIPS[kind], 1, (), cores)


def mesh(slices=1, hosts=1):
  """data=2, tensor=4; slices and hosts divide data."""
  device = lambda k: types.SimpleNamespace(
    platform='tpu' if hosts == 1 else 'gpu',
    slice_index=k // 4 if slices == 2 else 0,
    process_index=k // 4 if hosts == 2 else 0,
  )
  devices = np.array([device(k) for k in range(8)]).reshape(2, 4)
  return types.SimpleNamespace(devices=devices, axis_names=AXES)


def collective(kind, axes, size, count=1):
  return hlo.Collective(kind, axes, 2, size, count, size, size, '')


@pytest.mark.parametrize(
  'kind, where, axes, one_way, expected',
  [
    ('v5p', mesh(), ('tensor',), False, 200e9),  # a ring in both directions
    ('v5p', mesh(), ('tensor',), True, 100e9),
    ('v5e', mesh(), AXES, False, 100e9),
    ('v5e', mesh(slices=2), ('data',), False, 3.125e9),
    ('v5e', mesh(slices=2), ('tensor',), False, 100e9),
    ('v5e', mesh(slices=2), AXES, False, 3.125e9),
    ('h200', mesh(), ('data',), False, 450e9),
    ('h200', mesh(hosts=2), ('tensor',), True, 450e9),
    ('h200', mesh(hosts=2), ('data',), False, 50e9),
  ],
)
def test_bandwidth(kind, where, axes, one_way, expected):
  found = roofline.bandwidth(topology(kind), where, axes, one_way)
  assert found == expected
  half = roofline.bandwidth(topology(kind, cores=2), where, axes, one_way)
  assert half == expected / 2


def test_times():
  found = roofline.times(
    topology('v5p'),
    mesh(),
    flops=459e12 / 10,
    hbm_bytes=2765e9 / 5,
    collectives=[
      collective('all-gather', ('tensor',), int(1e9), 20),
      collective('all-reduce', ('data',), int(2e9)),
      collective('collective-permute', ('data',), int(3e9)),
    ],
  )
  assert found.compute == pytest.approx(0.1)
  assert found.memory == pytest.approx(0.2)
  # 20 GB at 200 GB/s; 2 GB at 200 and 3 GB at 100.
  assert found.links == pytest.approx(dict(tensor=0.1, data=0.01 + 0.03))
  assert found.parts['links'] == pytest.approx(0.14)
  assert (found.least, found.most) == pytest.approx((0.2, 0.44))
