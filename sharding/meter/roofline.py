"""The least time a step can take on a chip: a model, not a measurement.

    compute  = floating-point operations of a device / its peak (bfloat16)
    memory   = bytes to and from its memory / bandwidth
    links    = sum over collectives: bytes received / bandwidth of their axes

A step takes at least the largest of the three (all overlap) and, as far as the
model goes, at most their sum (none do). Peaks are the makers' (target.py);
real programs reach a part of them.

Bandwidth of mesh axes: within a TPU slice one ring in both directions, two
links of a chip, however many dimensions of the torus the axes span; a permute
sends one way, one link. Between slices and between the hosts of GPUs: the
network's. A collective over several axes runs at the speed of the slowest.
"""

from typing import NamedTuple

from paraxis.sharding import placement


class Times(NamedTuple):
  """Seconds of one device: compute, memory, {mesh axes: links}."""

  compute: float
  memory: float
  links: dict

  @property
  def parts(self):
    """{'compute': s, 'memory': s, 'links': s}."""
    links = sum(self.links.values())
    return dict(compute=self.compute, memory=self.memory, links=links)

  @property
  def least(self):
    """If everything overlaps."""
    return max(self.parts.values())

  @property
  def most(self):
    """If nothing overlaps."""
    return sum(self.parts.values())


def bandwidth(topology, mesh, axes, one_way=False):
  """Bytes per second that a device receives over mesh axes.

  Args:
    topology: aot.Topology.
    mesh: jax Mesh of its devices.
    axes: names of mesh axes.
    one_way: the collective sends in one direction only.
  """
  chip = topology.chip
  numbers = tuple(mesh.axis_names.index(a) for a in axes)
  tpu = chip.platform == 'tpu'
  where = placement.slice_of if tpu else placement.host_of
  if placement.crosses(mesh.devices, numbers, where):
    return chip.network / topology.cores
  ring = chip.link * (2 if tpu and not one_way else 1)
  return ring / topology.cores


def times(topology, mesh, flops, hbm_bytes, collectives):
  """`Times` of a program.

  Args:
    topology: aot.Topology. mesh: jax Mesh of its devices.
    flops: executed by one device.
    hbm_bytes: moved by one device (traffic.hbm_bytes).
    collectives: list of hlo.Collective.
  """
  links = {}
  for c in collectives:
    speed = bandwidth(
      topology, mesh, c.axes, one_way=c.kind == 'collective-permute'
    )
    key = ','.join(c.axes)
    links[key] = links.get(key, 0.0) + c.total / speed
  chip, cores = topology.chip, topology.cores
  return Times(
    flops / (chip.flops / cores),
    hbm_bytes / (chip.hbm_bandwidth / cores),
    dict(sorted(links.items())),
  )
