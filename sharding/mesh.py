"""The one mesh of a program: six named axes, always all present.

    make('data=2,fsdp=2,tensor=2') -> Mesh(replica=1, stage=1, data=2, fsdp=2,
                                           context=1, tensor=2)

Axes are Explicit: shardings are part of array types, and a layout that does not
fit is an error while tracing. Axes of size 1 stay in the mesh and are dropped
from specs (sharding/rules.py), so one device is the same program.

Texts are read without jax, which only a mesh starts: `--mesh=dta=2` is refused
at once.
"""

from collections.abc import Mapping, Sequence
import math
import typing

from paraxis.configs import schema
from paraxis.configs.base import errors

if typing.TYPE_CHECKING:
  import jax

AXES = ('replica', 'stage', 'data', 'fsdp', 'context', 'tensor')
MOST = 2**17  # devices; every size of an axis is tried for what divides


def parse(text: str) -> dict[str, int]:
  """'data=2,tensor=-1' -> {'data': 2, 'tensor': -1}; unnamed axes are 1.

  Args:
    text: comma-separated axis=size pairs; at most one size is -1 (the rest).

  Raises:
    UserError: an unknown axis, a repeated one, or a size that is no number.
  """
  sizes = {}
  for part in filter(None, text.replace(' ', '').split(',')):
    name, _, value = part.partition('=')
    if name not in AXES:
      raise errors.UserError(
        f'--mesh={text}: {name!r} is not a mesh axis '
        f'({", ".join(AXES)}).' + schema.suggest(name, AXES)
      )
    if name in sizes:
      raise errors.UserError(f'--mesh={text}: axis {name!r} is given twice.')
    try:
      sizes[name] = int(value)
    except ValueError:
      raise errors.UserError(
        f'--mesh={text}: the size of {name!r} is {value!r}, not a number.'
      ) from None
  return sizes


def virtual_devices(sizes: Mapping[str, int]) -> int:
  """Virtual CPU devices where no accelerator is: one for each place of a mesh.

  8 for more places than that, which --devices= must ask for, and for an axis of
  all that are left.
  """
  places = math.prod(sizes.values())
  return places if 0 < places < 8 else 8


def describe(sizes: Mapping[str, int]) -> str:
  """{'data': 2, 'tensor': 1} -> 'data=2' (axes of size 1 are left out)."""
  shown = [f'{a}={sizes[a]}' for a in AXES if sizes.get(a, 1) != 1]
  return ','.join(shown) or 'data=1'


def factorisations(n: int, axes: Sequence[str]) -> list[str]:
  """Six ways to spread n devices over `axes`, most even first, as texts."""

  def spread(n, axes):
    if len(axes) == 1:
      yield {axes[0]: n}
      return
    for d in range(1, n + 1):
      if n % d == 0:
        for rest in spread(n // d, axes[1:]):
          yield {axes[0]: d, **rest}

  found = sorted(spread(n, list(axes)), key=lambda s: max(s.values()))
  return [describe(s) for s in found[:6]]


def resolve(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
  """Fills in -1 and the unnamed axes; every device must have a place.

  Args:
    sizes: axis -> size, at most one of them -1.
    num_devices: devices to place.

  Returns:
    Axis -> size for all six axes, with product `num_devices`.

  Raises:
    UserError: the product is not `num_devices`; it names layouts that fit.
  """
  full = {a: int(sizes.get(a, 1)) for a in AXES}
  wild = [a for a in AXES if full[a] == -1]
  bad = [a for a in AXES if full[a] < 1 and full[a] != -1]
  named = ','.join(f'{a}={full[a]}' for a in AXES if full[a] != 1) or 'data=1'
  if bad or len(wild) > 1:
    raise errors.UserError(
      f'mesh {named}: sizes must be positive, and at most one may be -1.'
    )
  known = math.prod(s for s in full.values() if s > 0)
  if wild and num_devices % known == 0:
    full[wild[0]] = num_devices // known
  if math.prod(full.values()) != num_devices:
    asked = [a for a in AXES if full[a] != 1] or ['data']
    fits = ' | '.join(factorisations(num_devices, asked))
    raise errors.UserError(
      f'mesh {named} needs {"a multiple of " * bool(wild)}{known} devices, but '
      f'{num_devices} are present, and none may be idle; these fit: {fits}. '
      f'Give one as --mesh=. (--devices={known} asks for '
      f'{known} virtual CPU devices; with paraxis launch, '
      f'--devices_per_process=N, {known} in all processes.)'
    )
  return full


def make(sizes: str | Mapping[str, int], devices=None) -> 'jax.sharding.Mesh':
  """A mesh of all `devices` with Explicit axes.

  Args:
    sizes: text as for `parse`, or axis -> size.
    devices: default all devices of all processes.

  Raises:
    UserError: as `parse` and `resolve`.
  """
  import jax

  from paraxis.sharding import placement

  devices = jax.devices() if devices is None else devices
  sizes = parse(sizes) if isinstance(sizes, str) else sizes
  placed = placement.place(resolve(sizes, len(devices)), devices)
  explicit = (jax.sharding.AxisType.Explicit,) * len(AXES)
  return jax.sharding.Mesh(placed, AXES, axis_types=explicit)


def abstract(sizes: Mapping[str, int]) -> 'jax.sharding.AbstractMesh':
  """The same mesh without devices, of any number: to check a layout by types.

  Args:
    sizes: axis -> size, every one known (no -1).
  """
  import jax

  full = {a: int(sizes.get(a, 1)) for a in AXES}
  bad = [f'{a}={n}' for a, n in full.items() if n < 1]
  if bad:
    raise errors.UserError(
      f'mesh {",".join(bad)}: without devices every size must be given.'
    )
  if (places := math.prod(full.values())) > MOST:
    text = f'mesh {describe(full)} needs {places:,} devices, more than {MOST:,}'
    raise errors.UserError(f'{text}: take smaller sizes.')
  explicit = (jax.sharding.AxisType.Explicit,) * len(AXES)
  return jax.sharding.AbstractMesh(
    tuple(full.values()), AXES, axis_types=explicit
  )
