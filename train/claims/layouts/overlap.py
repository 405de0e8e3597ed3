"""What overlap of a product with its collective can gain: a model (SIM).

Of T3 (arXiv:2401.16677): deterministic, it knows only products, links and
bytes. With n devices, a product that takes g and a message that takes s:

    sequential   t = g + (n - 1) s + gather
    overlapped   message k leaves when its chunk is made and the sum it joins
                 has arrived:  done_k = max(done_{k-1}, (k + 1) g / n) + s
                 t = max(done_{n-2}, g) + gather,   gather = (n - 1) s
"""

import collections
import statistics
import sys
from typing import NamedTuple

from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts

_BYTES = 2  # of a number on the machine of the model
# Sublayers that end in a reduce-scatter: contracted width / hidden size.
_SUBLAYERS = {'OP': 1, 'FC-2': 4, 'FC-1 backward': 4, 'IP backward': 3}


def sequential():
  """Knock-out: messages start when the product has ended."""
  return knockouts.patched(
    sys.modules[__name__],
    'overlapped',
    lambda product, send, n: product + (n - 1) * send,
  )


def not_fused():
  """Knock-out: the ring reads and adds what the product wrote to memory."""
  apart = lambda layer, fused: moved(layer, False)
  moved = moved_bytes
  return knockouts.patched(sys.modules[__name__], 'moved_bytes', apart)


class _Sublayer(NamedTuple):
  """One product of (tokens, inner) and (inner, hidden) on each of n devices."""

  name: str
  tokens: int
  inner: int
  hidden: int
  n: int


def _sublayers(models):
  """Of {name: [hidden size, tokens, [shards, ...]]}."""
  for name, (hidden, tokens, shards) in models.items():
    for n in shards:
      for part, factor in _SUBLAYERS.items():
        yield _Sublayer(
          f'{name} {part} on {n}', tokens, factor * hidden // n, hidden, n
        )


def _times(layer, machine):
  """Seconds of (the product, one message) of a sublayer on a machine."""
  m, k, h = layer.tokens, layer.inner, layer.hidden
  moved = _BYTES * (m * k + k * h + m * h)
  product = max(2 * m * k * h / machine['flops'], moved / machine['memory'])
  chunk = _BYTES * m * h / layer.n
  return product, chunk / machine['link'] + machine['latency']


def overlapped(product, send, n):
  """Seconds of a product whose n chunks are sent as they are made."""
  done = 0.0
  for k in range(n - 1):
    done = max(done, (k + 1) * product / n) + send
  return max(done, product)


def speedup(layer, machine):
  """Sequential over overlapped time of a sublayer, all-gather included."""
  n, (product, send) = layer.n, _times(layer, machine)
  gather = (n - 1) * send
  return (product + 2 * gather) / (overlapped(product, send, n) + gather)


def overlap_gain(run, *, machine, models, batches, geomean, most, within):
  """SIM: speedup of sublayers from overlapping products with their ring.

  Args:
    machine: {'flops': 1 / s, 'memory': B / s, 'link': B / s from one device to
      the next, 'latency': s of a message}.
    models: {name: [hidden size, tokens, [shards, ...]]}.
    batches: multiples of the tokens, where the paper does not tell them.
    geomean, most: the paper's; `direction only` if `most` is further off.
  """
  found = {}
  for times in batches:
    sizes = {m: [h, int(times * t), n] for m, (h, t, n) in models.items()}
    layers = list(_sublayers(sizes))
    found[times] = [speedup(layer, machine) for layer in layers]
  means = [statistics.geometric_mean(gains) for gains in found.values()]
  tops = list(map(max, found.values()))
  best = layers[found[times].index(tops[-1])].name
  slow = {**machine, 'link': machine['link'] / 2}
  half = statistics.geometric_mean([speedup(layer, slow) for layer in layers])
  off = lambda values, paper: max(abs(value - paper) for value in values)
  text = lambda values: '-'.join(
    sorted({f'{value:.2f}' for value in (min(values), max(values))})
  )
  right, whole = off(means, geomean) <= within, off(tops, most) <= within
  return claims.Outcome(
    f'{geomean:.2f}, max {most:.2f}; the mean +-{within:.2f}',
    f'{text(means)}, max {text(tops)}',
    f'model, not measured: {len(layers)} sublayers, most in {best}; batches '
    f'{experiment.numbers(batches, "g")} times those given; no contention for '
    f'memory; with half the link {half:.2f}. '
    + ('' if whole else 'The largest is not that of the paper'),
    right,
    'direction only' if right and not whole else '',
  )


def moved_bytes(layer, fused):
  """{part: bytes through one device's memory} of a sublayer, without a cache.

  In chunks of the output, n on each device: the product reads its inputs and
  writes n. The ring sends n - 1 (read) and receives n - 1 (written); it adds n
  - 1 times (reads both, writes the sum, which the next message reads). Fused,
  the first chunk goes to the neighbour as it is made, and what arrives is added
  in memory: n - 1 written by the product, n - 1 arrive, n - 2 are read to send.
  The all-gather is the same in both.
  """
  m, k, h, n = layer.tokens, layer.inner, layer.hidden, layer.n
  chunk = _BYTES * m * h // n
  return {
    'inputs': _BYTES * (m * k + k * h),
    'product writes': chunk * (n - 1 if fused else n),
    'ring reads': chunk * (n - 2 if fused else 2 * n - 1),
    'ring writes': chunk * (n - 1 if fused else n),
    'gather': chunk * 2 * (n - 1),
  }


def movement_saved(run, *, models, geomean, most, within):
  """SIM: share of memory traffic that fusion and adding in memory save.

  Args:
    models: as in `overlap_gain`. geomean, most: the paper's shares; `direction
      only` if `most` is further off.
  """
  left, reads = [], collections.defaultdict(set)
  for layer in _sublayers(models):
    fused, apart = moved_bytes(layer, True), moved_bytes(layer, False)
    left.append(sum(fused.values()) / sum(apart.values()))
    reads[layer.n].add(round(apart['ring reads'] / fused['ring reads'], 1))
  saved = 1 - statistics.geometric_mean(left)
  rings = '; '.join(f'{n}: {max(r)}x' for n, r in reads.items())
  top, right = 1 - min(left), abs(saved - geomean) <= within
  return claims.Outcome(
    f'{geomean:.2f}, max {most:.2f}; the mean +-{within:.2f}',
    f'{saved:.2f}, max {top:.2f}',
    f'model, not measured: fewer reads of the ring by shards {rings} (the '
    "paper's 2.5x on 8, 2.2x on 16); no cache here, while the paper's largest "
    'saving has inputs that stay in it',
    right,
    'direction only' if right and abs(top - most) > within else '',
  )
