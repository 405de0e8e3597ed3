"""Requests of a cache: forgetting some of their tokens, or all.

Keys and values stay where they are, out of every range, and are written over.
A recurrence has one state a row, which its newest token has changed: it goes
back only to a state of before, and forgets all where a request begins again.
"""

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import layer
from paraxis.models.mixers import protocol as mixer


def rollback(model, cache, length_R, before=None):
  """`cache` with at most length_R tokens in each row.

  Args:
    model: models.decoder.Decoder. cache: packed.Cache.
    length_R: int32.
    before: an older `cache` of the same rows, whose recurrent states they take
      back; it has length_R tokens.

  Raises:
    UserError: a layer keeps one state, and there is no `before`.
  """
  states = []
  for i, (kind, state) in enumerate(_states(model, cache)):
    memory, slots = _split(kind, state)
    if memory is not None:
      if before is None:
        raise errors.UserError(
          f'layer {i} (kind {kind[0]}) keeps one state a request, which its '
          'newest token has changed: a rollback needs the cache of before, or '
          'a step that keeps the state of each token (packed.Group.each).'
        )
      memory, _ = _split(kind, before.states[i])
    states.append(_joined(kind, memory, slots))
  return cache._replace(
    states=tuple(states), length=jnp.minimum(cache.length, length_R)
  )


def evict(model, cache, rows_R: jax.Array):
  """`cache` with rows_R (bool) free for requests that begin.

  Slots are not cleared. The state of a recurrence is: where a request begins
  some multiply it by 0, which a number that is not finite survives.
  """
  clear = lambda x: mixer.rows_where(rows_R, jnp.zeros_like(x), x)
  states = []
  for kind, state in _states(model, cache):
    memory, slots = _split(kind, state)
    states.append(_joined(kind, jax.tree.map(clear, memory), slots))
  length = jnp.where(rows_R, 0, cache.length)
  return cache._replace(states=tuple(states), length=length)


def recurrent(model, cache):
  """States of the layers that keep one a row."""
  return [_split(kind, state)[0] for kind, state in _states(model, cache)]


def after(model, before, cache, kept, n_B):
  """`cache` after the first n_b of several steps of one token.

  Args:
    before: packed.Cache before them; cache: after all.
    kept: `recurrent` after each of them, stacked.
    n_B: int32, steps that row b keeps.
  """
  states = []
  pairs = zip(_states(model, before), _states(model, cache), kept, strict=True)
  for (kind, old), (_, new), each in pairs:
    memory, _ = _split(kind, old)
    _, slots = _split(kind, new)
    for c in range(len(jax.tree.leaves(each)[0]) if memory is not None else 0):
      memory = jax.tree.map(
        lambda x, y, c=c: mixer.rows_where(n_B > c, y[c], x), memory, each
      )
    states.append(_joined(kind, memory, slots))
  return cache._replace(states=tuple(states), length=before.length + n_B)


def _states(model, cache):
  return list(zip(model.pattern, cache.states, strict=True))


def _split(kind, state):
  """(what is of one size or None, slots or None)."""
  own = layer.MIXERS[kind[0]].capabilities
  if own.recurs:
    return state
  return (None, state) if own.slots else (state, None)


def _joined(kind, memory, slots):
  own = layer.MIXERS[kind[0]].capabilities
  if own.recurs:
    return memory, slots
  return slots if own.slots else memory
