"""Which parts of shards each device sends to which, from one layout to another.

Of an array device d holds a box of global indices, S_d, and wants the box T_d.
It keeps what it holds and receives the rest once. The distinct S are blocks of
a grid, so that T_d is a grid of pieces, each in one block; the devices that
hold a block send its pieces in turn. Parts for the same devices are one
message. Used by reallocate.py, which moves the arrays.
"""

import collections
from collections.abc import Iterator
import functools
import math
from typing import Any, NamedTuple

Device = Any  # Device, which type checkers do not know
FLAT = (
  2**16
)  # bytes of a part; to flatten larger ones costs more than a message
Box = tuple[tuple[int, int], ...]  # (first, last + 1) of each dimension


class Part(NamedTuple):
  """A box of a leaf as it lies in some array, and what is wanted of it.

  first: row of a message at which the box begins; None: the array is the box.
  flat: a row of the message is a number, not a row of the leaf.
  """

  box: Box
  part: Box
  first: int | None = None
  flat: bool = False


class Message(NamedTuple):
  """What one device sends to others: a row of ((leaf, what of its shard), ...).

  Parts are of one type, and equal but for their first dimension, along which
  they are joined; or flat.
  """

  sender: Device
  receivers: tuple[Device, ...]
  parts: tuple[tuple[int, Part], ...]

  @property
  def whole(self):
    """Whether it is one shard as it lies there."""
    (_, part), *more = self.parts
    return part.box == part.part and not more


# Where a device finds an array: (SHARD, leaf), or (MESSAGE, its number).
Key = tuple[str, int]
SHARD, MESSAGE = 'shard', 'message'


class Plan(NamedTuple):
  """Messages, and {device: {leaf: what makes its new shard}}."""

  messages: list[Message]
  shards: dict[Device, dict[int, list[tuple[Key, Part]]]]


def overlap(a: Box, b: Box) -> Box | None:
  """The box of the indices that are in both; None: there are none."""
  both = tuple(
    (max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True)
  )
  return both if all(first < end for first, end in both) else None


def size(box: Box) -> int:
  """Elements of a box."""
  return math.prod(shape(box))


def shape(box: Box) -> tuple[int, ...]:
  """Its sizes."""
  return tuple(end - first for first, end in box)


def sent(block: Box, part: Box) -> Box:
  """What of a block is sent for a part that is wanted: that part."""
  del block
  return part


def _pieces(held, wanted) -> Iterator[tuple]:
  """(sender, receiver, block, part) of all pieces that make an array.

  What is kept is among them: its sender is its receiver. The holders of a block
  send it in turn.
  """
  holders, turn = {}, collections.Counter()
  for device, block in held.items():
    holders.setdefault(block, []).append(device)
  for receiver, box in wanted.items():
    for block, devices in holders.items():
      part = overlap(block, box)
      if part is None:
        continue
      sender = receiver
      if receiver not in devices:
        sender = devices[turn[block] % len(devices)]
        turn[block] += 1
      yield sender, receiver, block, part


@functools.lru_cache(maxsize=16)
def plan_of(layouts) -> Plan:
  """layouts: (dtype, ((device, box held), ...), the same of wanted) a leaf."""
  plan, packed = Plan([], {}), {}

  def want(device, leaf, key, part):
    mine = plan.shards.setdefault(device, {})
    mine.setdefault(leaf, []).append((key, part))

  for leaf, (dtype, held, wanted) in enumerate(layouts):
    copies = {}  # what is sent: to whom, and for which part of the new shard
    for sender, receiver, block, part in _pieces(dict(held), dict(wanted)):
      if sender == receiver:
        want(receiver, leaf, (SHARD, leaf), Part(block, part))
      else:
        out = Part(block, sent(block, part))
        copies.setdefault((sender, out), {})[receiver] = part
    for (sender, out), to in copies.items():
      flat = size(out.part) * dtype.itemsize <= FLAT
      rest = None if flat else shape(out.part)[1:]
      key = sender, tuple(to), dtype, rest
      packed.setdefault(key, []).append((leaf, out, to))
  for (sender, receivers, _, rest), parts in packed.items():
    key, first, flat = (MESSAGE, len(plan.messages)), 0, rest is None
    for leaf, out, to in parts:
      at = None if len(parts) == 1 else first
      for device, part in to.items():
        want(device, leaf, key, Part(out.part, part, at, flat))
      first += size(out.part) if flat else shape(out.part)[0]
    flat &= len(parts) > 1
    sends = tuple((leaf, out._replace(flat=flat)) for leaf, out, _ in parts)
    plan.messages.append(Message(sender, receivers, sends))
  return plan
