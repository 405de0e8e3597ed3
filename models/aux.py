"""What layers return beside features: terms of the loss, tallies and counts.

    loss = sum of nats / denominator + sum of terms

Values like features: nothing leaves a layer through a cotangent, so the
gradient of the loss is that of its value, scaled, subtracted or perturbed.

Inside a layer every array has one more, first axis, the parts of the devices:
one in a manual region; on an explicit mesh one for each device, laid out over
all of them (`annotate.everywhere`). Parts are disjoint, and terms are divided
by the tokens of the step, so sums over parts, layers and microbatches are the
numbers of the whole step. `whole` adds up the parts, after the last layer:
one message for all layers.

    part        in a layer          add, select, stacked   over layers of a unit
    of_units    after a scan        joined                 consecutive layers
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors


class Aux(NamedTuple):
  """terms: {name: ()}, differentiated: 'balance', 'z'; of a step also 'nats'.

  tallies: {name: array}, summed over layers: 'newton'; of a step along one
  direction also 'draw' (train/steps/zeroth_order.py). counts: {path of the
  parameter that keeps them: (layers that have it, ...)}; of one layer without
  that axis. Neither has a gradient.

  A run writes a term as train/NAME_loss, any other tally, (), as tally/NAME.
  """

  terms: Any
  tallies: Any
  counts: Any


NOTHING = Aux({}, {}, {})
OURS = 'nats', 'newton', 'draw', 'targets'  # names with a meaning of their own


def check(says, aux):
  """UserError unless parts of a layer of a user's mixer can be added up.

  says: who returns it.
  """
  if not isinstance(aux, Aux):
    raise errors.UserError(
      f'{says} returns {type(aux).__name__} as the third; aux.NOTHING if there '
      'is no loss of its own.'
    )
  if aux.counts:
    raise errors.UserError(
      f'{says} counts {", ".join(aux.counts)}: experts alone have counts; '
      'aux.tallies are summed and written.'
    )
  for name, x in (*aux.terms.items(), *aux.tallies.items()):
    shape = jnp.shape(x)
    if name in OURS and len(shape) != 2:
      raise errors.UserError(f'{says}: aux has {name!r} of its own; rename it.')
    if name not in OURS and len(shape) != 1:
      raise errors.UserError(
        f'{says} returns {name!r} {shape}, not (parts,), a number of every '
        'device: aux.part(x) is that of one.'
      )


def of_loss(nats):
  """`Aux` of a loss without terms of layers."""
  return NOTHING._replace(terms={'nats': nats})


def total(aux, dtype) -> jax.Array:
  """() of `dtype`: the sum of the terms."""
  return sum(aux.terms.values(), jnp.zeros((), dtype)).astype(dtype)


def part(tree):
  """What one device found, as one part."""
  return jax.tree.map(lambda x: x[None], tree)


def _union(a, b):
  return a | {k: a[k] + x if k in a else x for k, x in b.items()}


def add(a, b):
  """Of two parts of a layer, or runs of layers, that count different paths."""
  terms, tallies = _union(a.terms, b.terms), _union(a.tallies, b.tallies)
  return Aux(terms, tallies, a.counts | b.counts)


def select(on, aux):
  """aux, or zeros where a row holds no layer."""
  return jax.tree.map(lambda x: jnp.where(on, x, jnp.zeros((), x.dtype)), aux)


def stacked(found):
  """Of consecutive layers, unrolled; counts {path: (layers, parts, ...)}."""
  out, counts = NOTHING, {}
  for aux in found:
    out = add(out, aux._replace(counts={}))
    for path, count in aux.counts.items():
      counts.setdefault(path, []).append(count)
  return out._replace(counts={p: jnp.stack(c) for p, c in counts.items()})


def of_units(aux):
  """What a scan over units stacked, as `stacked` gives it."""
  of_all = lambda tree: jax.tree.map(lambda x: x.sum(0), tree)
  rows = lambda x: x.reshape(-1, *x.shape[2:])
  counts = jax.tree.map(rows, aux.counts)
  return Aux(of_all(aux.terms), of_all(aux.tallies), counts)


def joined(a, b):
  """Of consecutive runs of layers: counts of b after those of a."""
  counts = {
    p: jnp.concatenate([x.counts[p] for x in (a, b) if p in x.counts])
    for p in a.counts | b.counts
  }
  return add(a, b)._replace(counts=counts)


def whole(aux):
  """Sums over parts."""
  over = lambda axis: lambda tree: jax.tree.map(lambda x: x.sum(axis), tree)
  return Aux(over(0)(aux.terms), over(0)(aux.tallies), over(1)(aux.counts))
