"""SE-MoE: exchanges axis by axis, devices assigned to tasks by load

paper: arXiv:2205.10034
mechanism: sharding/experts/dispatch.py, sharding/tensor/lookup.py,
  sharding/planner/task_devices.py
test: tests/train/claims/experts/test_layer.py,
  tests/sharding/planner/test_task_devices.py
run: paraxis reproduce se_moe
cost: 20 CPU-seconds
expect: EQ 3e-15, and the same bits as a single exchange; HLO bytes of each axis
  by formula, 7 -> 3 peers; SIM the slowest task 2 and 1.25 times as fast with
  devices by load, direction only (the paper: +64% throughput of one such case).
partial: devices by load of tasks are in claims only, as a count.
differs: built here: the exchange axis by axis, vocabulary tables sharded over
  devices (sharding/tensor/lookup.py, as in any model), and devices by load of
  tasks, as a count and in claims only: no training places tasks so. Not built:
  prefetching of experts in two dimensions, with SSDs and a cache of the
  busiest; one flat buffer for the parameters of a layer; inference in a ring of
  slots. No throughput.
"""

from paraxis.configs import presets


def get_config():
  """8 experts on data=2,context=2,tensor=2, exchanged axis by axis."""
  config = presets.tiny()
  config.mesh.update(data=2, context=2, tensor=2)
  experts = config.model.experts
  experts.update(count=8, top_k=1, normalise=False)
  experts.update(region='data+context+tensor', hierarchical=True)
  config.train.batch_size = 8
  return config


def claims():
  """What `paraxis reproduce se_moe` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.experts import layer
  from paraxis.train.claims.experts import loads
  from paraxis.train.claims.experts import messages

  mesh = 'data=2,context=2,tensor=2'
  equal = experiment.on_layouts(mesh)
  bitwise = dict(check=layer.axis_by_axis_is_bitwise, meshes=[mesh], tokens=16)
  sent = dict(
    check=messages.axis_by_axis,
    mesh=mesh, region='data+context+tensor',
  )  # fmt: skip
  case = lambda loads, devices, shares, times: dict(
    loads=loads, devices=devices, shares=shares, times=times
  )
  four = lambda times: case([4, 2, 1, 1], 8, [4, 2, 1, 1], times)
  tasks = dict(
    check=loads.elastic_tasks,
    cases=[four(2), case([5, 3, 2], 12, [6, 4, 2], 1.25)],
    draws=50,
    published=dict(cases=[four(1.64)]),
  )
  return [
    ('exchanges axis by axis equal one device', 'EQ', equal, None),
    ('axis by axis equals at once', 'EQ', bitwise, None),
    ('bytes axis by axis', 'HLO', sent, None),
    ('devices of tasks by load', 'SIM', tasks, '+64% throughput'),
  ]


def knockouts():
  """One exchange over all axes, or in the wrong order; as many devices for
  each task."""
  from paraxis.train.claims.experts import layer
  from paraxis.train.claims.experts import loads
  from paraxis.train.claims.experts import messages

  return [
    ('axis_order', 'axis by axis equals at once', layer.wrong_order),
    ('at_once', 'bytes axis by axis', messages.at_once),
    ('evenly', 'devices of tasks by load', loads.evenly),
  ]
