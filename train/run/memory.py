"""What a step needs of a device's memory, said before it does not fit.

Where a device states its limit, the compiled programs are compared with it
before the first step. Otherwise, and for what no program shows, the runtime's
own error is turned into the same lines.
"""

import contextlib
import math

import jax

from paraxis.configs.base import errors

LISTED = 8  # arrays in a message
ADVICE = (
  'more devices along fsdp or tensor, train.remat, train.microbatches or a '
  'smaller batch need less; `paraxis check` says how much.'
)


def limit(device) -> int | None:
  """Bytes that a device may allocate; None: it does not say."""
  return (device.memory_stats() or {}).get('bytes_limit')


def needed(compiled) -> int | None:
  """Bytes of a compiled program on one device; None: it does not say."""
  found = compiled.memory_analysis()
  if found is None:
    return None
  sizes = (
    found.argument_size_in_bytes,
    found.temp_size_in_bytes,
    found.output_size_in_bytes,
  )
  return sum(sizes) - found.alias_size_in_bytes


def _bytes(x):
  """Bytes of an array on one device."""
  return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def device_bytes(tree):
  """Bytes of a tree of arrays, or of their shapes, on one device."""
  return sum(map(_bytes, jax.tree.leaves(tree)))


def largest(flat) -> str:
  """The largest arrays of a state, as many bytes as one device holds of each.

  flat: {path: array}.
  """
  sizes = sorted(((_bytes(x), p) for p, x in flat.items()), reverse=True)
  rest = sum(n for n, _ in sizes[LISTED:])
  rows = [f'  {n / 2**20:10.1f} MiB  {p}' for n, p in sizes[:LISTED]]
  if rest:
    rows.append(f'  {rest / 2**20:10.1f} MiB  {len(sizes) - LISTED} others')
  return '\n'.join(rows)


def check(programs, device, flat, beside=None) -> None:
  """UserError if one of some programs does not fit a device.

  Args:
    programs: {name: compiled}. flat: {path: array} of the state.
    beside: {name: (trees, part)}: arrays that are there while a program runs,
      and the part of them that are arguments of it.
  """
  most, beside = limit(device), beside or {}
  for name, compiled in programs.items():
    size = needed(compiled)
    if size is not None:
      there, read = map(device_bytes, beside.get(name, ({}, {})))
      size += there - read
    if most and size and size > most:
      raise errors.UserError(
        f'{name} needs {size} bytes on a device, {device.device_kind} has '
        f'{most}: {ADVICE} The state on a device:\n{largest(flat)}'
      )


@contextlib.contextmanager
def explained(flat, first):
  """Turns a device's lack of memory into one line and the largest arrays.

  flat: () -> {path: array} of the state. first: () -> whether no step was done.
  Before the first step it is bad input (2), later a crash (13).
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as e:
    if 'RESOURCE_EXHAUSTED' not in str(e):
      raise
    why = str(e).partition('\n')[0][:200]
    kind = errors.UserError if first() else errors.CrashError
    table = f'The state on a device:\n{largest(flat())}'
    raise kind(f'out of memory: {why}: {ADVICE} {table}') from e
