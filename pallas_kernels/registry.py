"""Which implementation of an op runs here, and why the others do not.

An op is a name and a list of implementations in order of preference. The choice
is made while tracing, from the device that the program is compiled for (not
from the host that traces it), so an ahead-of-time compile for a TPU chooses
what the TPU would run. The choice can be printed and is never silent: naming an
implementation that cannot run is an error with the reason.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import re
from typing import Any

import jax

from paraxis.configs.base import errors


@dataclasses.dataclass(frozen=True)
class Target:
  """The device a program is compiled for, e.g. ('tpu', 'TPU v5 lite')."""

  platform: str  # cpu | tpu | gpu
  device_kind: str

  def __str__(self):
    return f'{self.platform} ({self.device_kind})'


@dataclasses.dataclass(frozen=True)
class Implementation:
  """One way to compute an op: two pure functions without autodiff.

  `supports(spec, target)` returns None if the implementation can run, else the
  reason in one line. `spec` is the op's record of shapes, dtypes and options
  (never values), or None to ask about the target alone. `takes` names what
  forward computes itself, where the op else does so around it.
  """

  name: str
  forward: Callable
  backward: Any = None  # Callable; None: no gradient
  supports: Callable[[Any, Target], str | None] = lambda spec, target: None
  takes: tuple[str, ...] = ()


SPREAD = 'arrays are spread over a mesh: call it in a manual region'


def spread(x) -> bool:
  """May the compiler spread x over devices? A kernel then cannot take it."""
  mesh = jax.typeof(x).sharding.mesh
  manual = jax.sharding.AxisType.Manual
  kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
  return any(size > 1 and kind != manual for size, kind in kinds)


def kernel(platform: str, module) -> Implementation:
  """The `Implementation` of a kernel's module: 'pallas_tpu', 'pallas_gpu'.

  It refuses another platform, a dtype that is not one of module.DTYPES, arrays
  that are spread over a mesh, and what module.unfit(target) and
  module.limits(spec, target) say: the reason in one line, or None. A module may
  have none of these two, of `backward` (no gradient), TAKES
  (`Implementation.takes`) and NAME (another name).
  """
  unfit = getattr(module, 'unfit', lambda target: None)
  limits = getattr(module, 'limits', lambda spec, target: None)

  def supports(spec, target):
    if target.platform != platform:
      return f'needs a {platform.upper()}, target is {target.device_kind}'
    if (reason := unfit(target)) or spec is None:
      return reason
    if spec.dtype not in module.DTYPES:
      takes = (' and ' if len(module.DTYPES) == 2 else ', ').join(module.DTYPES)
      return f'computes in float32, takes {takes}, not {spec.dtype}'
    if getattr(spec, 'sharded', False):
      return SPREAD
    return limits(spec, target)

  backward = getattr(module, 'backward', None)
  return Implementation(
    getattr(module, 'NAME', f'pallas_{platform}'),
    module.forward, backward, supports,
    getattr(module, 'TAKES', ()),
  )  # fmt: skip


_CONFIG: Any = jax.config  # type checkers do not know its options
_OPS: dict[str, tuple[Implementation, ...]] = {}
_records: list[dict[str, dict[str, None]]] = []  # of `recording`, open ones


def register(op: str, *implementations: Implementation) -> None:
  """Declares an op; `implementations` are in order of preference."""
  _OPS[op] = implementations


def ops() -> tuple[str, ...]:
  """Names of the ops whose modules have been imported so far."""
  return tuple(_OPS)


def _platform(name, kind):
  if kind.startswith('TPU'):
    return 'tpu'
  if name in ('cuda', 'rocm', 'gpu') or re.search('NVIDIA|AMD|Tesla', kind):
    return 'gpu'
  return name or 'cpu'


def current_target() -> Target:
  """The mesh's device, else the default device, else the first device."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  if device is None:
    device = _CONFIG.jax_default_device
    if isinstance(device, str):  # the option also takes a platform's name
      device = jax.devices(device)[0]
    device = device or jax.devices()[0]
  kind = device.device_kind
  return Target(_platform(getattr(device, 'platform', ''), kind), kind)


def _implementations(op):
  if op not in _OPS:
    raise KeyError(f'no op {op!r} is registered; have {sorted(_OPS)}')
  return _OPS[op]


def resolve(
  op: str, name: str = 'auto', spec=None, target: Target | None = None
) -> Implementation:
  """The implementation to run: the first that can run, or the named one.

  Raises:
    errors.UserError: the named implementation is unknown or cannot run, or
      none can run, with the reasons.
  """
  target = target or current_target()
  known = _implementations(op)
  if name != 'auto' and name not in [i.name for i in known]:
    names = ', '.join(i.name for i in known)
    raise errors.UserError(
      f'{op}: no implementation {name!r}; have auto, {names}'
    )
  reasons = []
  for i in known:
    if name in ('auto', i.name):
      reason = i.supports(spec, target)
      if reason is None:
        for record in _records:
          record.setdefault(op, {})[i.name] = None
        return i
      reasons.append(f'{i.name}: {reason}')
  raise errors.UserError(
    f'{op}: cannot run on {target}: {"; ".join(reasons)}; '
    f"use impl='auto' or another target"
  )


@contextlib.contextmanager
def recording():
  """Gives {op: {name of an implementation: None}}, filled within the block.

  By `resolve`, in the order of first use: what a program that is traced there
  runs, for its own shapes.
  """
  found = {}
  _records.append(found)
  try:
    yield found
  finally:
    _records[:] = [r for r in _records if r is not found]


def explain(
  op: str, target: Target | None = None, spec=None
) -> list[tuple[str, bool, str]]:
  """[(name, chosen, reason)] of all implementations; reason '': can run."""
  target = target or current_target()
  rows, free = [], True
  for i in _implementations(op):
    reason = i.supports(spec, target)
    rows.append((i.name, free and reason is None, reason or ''))
    free = free and reason is not None
  return rows
