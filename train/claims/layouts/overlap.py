"""Claims about what overlapping a product with its collective gains (SIM).

Computed from the model of sharding/planner/overlap.py, not measured.
"""

import collections
import statistics

from paraxis.sharding.planner import overlap
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts

# Sublayers that end in a reduce-scatter: contracted width / hidden size.
_SUBLAYERS = {'OP': 1, 'FC-2': 4, 'FC-1 backward': 4, 'IP backward': 3}


def sequential():
  """Knock-out: messages start when the product has ended."""
  return knockouts.patched(overlap, 'overlapped', overlap.sequential)


def not_fused():
  """Knock-out: the ring reads and adds what the product wrote to memory."""
  moved = overlap.moved_bytes
  apart = lambda layer, fused: moved(layer, False)
  return knockouts.patched(overlap, 'moved_bytes', apart)


def _sublayers(models):
  """{name: overlap.Sublayer} of {model: [hidden size, tokens, [shards]]}."""
  return {
    f'{name} {part} on {n}': overlap.Sublayer(
      tokens, factor * hidden // n, hidden, n
    )
    for name, (hidden, tokens, shards) in models.items()
    for n in shards
    for part, factor in _SUBLAYERS.items()
  }


def overlap_gain(run, *, machine, models, batches, geomean, most, within):
  """SIM: speedup of sublayers from overlapping products with their ring.

  Args:
    machine: fields of overlap.Machine.
    models: {name: [hidden size, tokens, [shards, ...]]}.
    batches: multiples of the tokens, where the paper does not tell them.
    geomean, most: the paper's; `direction only` if `most` is further off.
  """
  found, machine = {}, overlap.Machine(**machine)
  for times in batches:
    sizes = {m: [h, int(times * t), n] for m, (h, t, n) in models.items()}
    layers = _sublayers(sizes)
    found[times] = [overlap.speedup(x, machine) for x in layers.values()]
  means = [statistics.geometric_mean(gains) for gains in found.values()]
  tops = list(map(max, found.values()))
  best = list(layers)[found[times].index(tops[-1])]
  slow = machine._replace(link=machine.link / 2)
  half = statistics.geometric_mean(
    [overlap.speedup(layer, slow) for layer in layers.values()]
  )
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


def movement_saved(run, *, models, geomean, most, within):
  """SIM: share of memory traffic that fusion and adding in memory save.

  Args:
    models: as in `overlap_gain`. geomean, most: the paper's shares; `direction
      only` if `most` is further off.
  """
  left, reads = [], collections.defaultdict(set)
  for layer in _sublayers(models).values():
    fused, apart = (overlap.moved_bytes(layer, how) for how in (True, False))
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
