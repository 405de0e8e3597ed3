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
    model: models.decoder.Decoder. cache: decoder.Cache.
    length_R: int32.
    before: an older `cache` of the same rows, whose recurrent states they take
      back; it has length_R tokens.

  Raises:
    UserError: a layer keeps one state, and there is no `before`.
  """
  states = list(cache.states)
  for i, kind in enumerate(model.pattern):
    own = layer.MIXERS[kind[0]].capabilities
    if own.slots and not own.recurs:
      continue
    if before is None:
      raise errors.UserError(
        f'layer {i} (kind {kind[0]}) keeps one state a request, which its '
        'newest token has changed: a rollback needs the cache of before, or a '
        'step that keeps the state of each token (packed.Group.each).'
      )
    if own.recurs:
      states[i] = before.states[i][0], cache.states[i][1]
    else:
      states[i] = before.states[i]
  return cache._replace(
    states=tuple(states), length=jnp.minimum(cache.length, length_R)
  )


def evict(model, cache, rows_R: jax.Array):
  """`cache` with rows_R (bool) free for requests that begin.

  Slots are not cleared. The state of a recurrence is: where a request begins
  some multiply it by 0, which a number that is not finite survives.
  """
  clear = lambda x: mixer.rows_where(rows_R, jnp.zeros_like(x), x)
  states = list(cache.states)
  for i, kind in enumerate(model.pattern):
    own = layer.MIXERS[kind[0]].capabilities
    if own.recurs:
      memory, slots = cache.states[i]
      states[i] = jax.tree.map(clear, memory), slots
    elif not own.slots:
      states[i] = jax.tree.map(clear, cache.states[i])
  length = jnp.where(rows_R, 0, cache.length)
  return cache._replace(states=tuple(states), length=length)
