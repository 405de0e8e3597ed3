"""Placement of devices in a mesh, by the links between them.

Mesh axes that come last (tensor, context) exchange most and get neighbours in
the torus, or the GPUs of one host. TPU slices are joined by the data center
network alone, a hundred times slower than links: they are spread over the mesh
axes that come first (replica, stage, data, then fsdp), each as far as its size
allows, and never over context or tensor, which exchange in every layer.
"""

from collections.abc import Callable, Mapping
import math

from jax.experimental import mesh_utils
import numpy as np

from paraxis.configs.base import errors

_INNER = ('context', 'tensor')


def slice_of(device) -> int:
  """Number of the TPU slice that a device is in; 0 where there are none."""
  return getattr(device, 'slice_index', 0) if device.platform == 'tpu' else 0


def host_of(device) -> int:
  """Number of a device's host; devices of one host have fast links."""
  return device.process_index


def place(sizes: Mapping[str, int], devices) -> np.ndarray:
  """Array of `devices` with the shape of a mesh.

  Args:
    sizes: mesh axis -> size, in order; their product is len(devices).
    devices: of one platform, in one or several slices.

  Raises:
    UserError: the leading axes cannot be divided among the slices.
  """
  shape = tuple(sizes.values())
  asked = ','.join(f'{a}={n}' for a, n in sizes.items() if n > 1)
  slices = len({slice_of(d) for d in devices})
  # A torus axis may have to be split to serve two mesh axes.
  options = dict(allow_split_physical_axes=True)
  if slices == 1:
    try:
      return mesh_utils.create_device_mesh(shape, devices, **options)
    except (NotImplementedError, TypeError) as e:  # both, by its version
      raise errors.UserError(
        f'the mesh axes {asked} have no place on the torus of {len(devices)} '
        'devices: take sizes that its sides are made of.'
      ) from e
  across, left = [], slices
  for axis, size in sizes.items():
    across.append(1 if axis in _INNER else math.gcd(size, left))
    left //= across[-1]
  if left > 1:
    raise errors.UserError(
      f'{slices} slices: the mesh axes {asked} cannot be divided among them; '
      f'give data a multiple of {slices}.'
    )
  within = [n // a for n, a in zip(shape, across, strict=True)]
  return mesh_utils.create_hybrid_device_mesh(
    within, across, devices, **options
  )


def crosses(
  devices: np.ndarray, axes: tuple[int, ...], where: Callable
) -> bool:
  """Whether devices that differ along mesh axes differ in `where`.

  Args:
    devices: array of devices in the shape of the mesh.
    axes: numbers of the array's dimensions.
    where: `slice_of` or `host_of`.
  """
  at = np.vectorize(where, otypes=[int])(devices)
  low, high = at.min(axes, keepdims=True), at.max(axes, keepdims=True)
  return bool((low != high).any())
