"""What a product gains that is overlapped with its collective: a model.

Used by claims only; the rings that overlap are sharding/tensor/rings.py. Of T3
(arXiv:2401.16677): deterministic, it knows only products, links and bytes. With
n devices, a product that takes g and a message that takes s:

    sequential   t = g + (n - 1) s + gather
    overlapped   message k leaves when its chunk is made and the sum it joins
                 has arrived:  done_k = max(done_{k-1}, (k + 1) g / n) + s
                 t = max(done_{n-2}, g) + gather,   gather = (n - 1) s

T3's hardware also adds in memory what arrives, so that the ring neither reads
nor writes it once more (`moved_bytes`).

Legend: m tokens, k inner (contracted) width of a device, h hidden size.
"""

from typing import NamedTuple

BYTES = 2  # of a number on the machine of the model


class Machine(NamedTuple):
  """flops: 1 / s. memory: B / s. link: B / s from one device to the next.
  latency: s of a message."""

  flops: float
  memory: float
  link: float
  latency: float


class Sublayer(NamedTuple):
  """One product of (tokens, inner) and (inner, hidden) on each of n devices,
  summed over them."""

  tokens: int
  inner: int
  hidden: int
  n: int


def times(layer: Sublayer, machine: Machine) -> tuple[float, float]:
  """Seconds of (the product, one message of 1 / n of its output)."""
  m, k, h, n = layer
  moved = BYTES * (m * k + k * h + m * h)
  product = max(2 * m * k * h / machine.flops, moved / machine.memory)
  return product, BYTES * m * h / n / machine.link + machine.latency


def sequential(product: float, send: float, n: int) -> float:
  """Seconds of a product, and of the reduce-scatter behind it."""
  return product + (n - 1) * send


def overlapped(product: float, send: float, n: int) -> float:
  """Seconds of a product whose n chunks are sent as they are made."""
  done = 0.0
  for k in range(n - 1):
    done = max(done, (k + 1) * product / n) + send
  return max(done, product)


def speedup(layer: Sublayer, machine: Machine) -> float:
  """Sequential over overlapped time of a sublayer, all-gather included."""
  n, (product, send) = layer.n, times(layer, machine)
  gather = (n - 1) * send
  before = sequential(product, send, n) + gather
  return before / (overlapped(product, send, n) + gather)


def moved_bytes(layer: Sublayer, fused: bool) -> dict[str, int]:
  """{part: bytes through one device's memory} of a sublayer, without a cache.

  In chunks of the output, n on each device: the product reads its inputs and
  writes n. The ring sends one of them (1 read); n - 1 arrive (written), each is
  read with the own chunk that it joins, and the sum goes on, the last one to
  memory (1 written). Fused, the first chunk goes to the neighbour as it is
  made, and what arrives is added in memory: n - 1 written by the product, n - 1
  arrive, n - 2 are read to send. The all-gather is the same in both.
  """
  m, k, h, n = layer
  chunk = BYTES * m * h // n
  return {
    'inputs': BYTES * (m * k + k * h),
    'product writes': chunk * (n - 1 if fused else n),
    'ring reads': chunk * (n - 2 if fused else 2 * n - 1),
    'ring writes': chunk * (n - 1 if fused else n),
    'gather': chunk * 2 * (n - 1),
  }
