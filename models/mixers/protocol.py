"""What mixes the tokens of a layer: one protocol for attention and recurrences.

A mixer is a Flax module with

    name                    under which a layer holds its parameters
    capabilities            what its state allows (`Capabilities`)
    __init__(config, rngs, kind, layout)
    __call__(x_BTD, see, state=None) -> (y_BTD, state)
    init_state(batch, slots, dtype) -> state     for decoding
    grow(state, slots) -> state                  with room for `slots` tokens
    check(config), check_context(config, T)      UserError, static: T tokens of
                                                 a shard of the length
    mixing_flops(config, kind, T)                static: of a forward pass over
                                                 a row, projections left out

x is a packed row: `see.segments` (0: padding) says which document a token is
of, `see.positions` where it stands there. A recurrence forgets where a document
begins, `resets`, and a padding token is the identity map on its state, so a
slot needs no clearing and short rows no care. A row that is called with a state
has its tokens first and its padding behind. Who goes on from there with one
token a row moves the padding to the front of the slots first (`shift_slots`):
what such a token sees are the slots right before its own.

The length may be split over the mesh axis `context`: what crosses shards is in
sharding/sequence/attention.py for attention, for recurrences in
models/mixers/recurrence.py and sharding/sequence/scan.py.

Legend: B rows, T tokens, D model, N heads, K key width, V value width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from paraxis.sharding import annotate

ROWS = ('batch', 'length')
RESIDUAL = ('batch', 'residual_length', 'hidden')
HEADS = ('batch', 'length', 'heads', 'head_dim')
STATE = ('batch', 'heads', None, None)


class Capabilities(NamedTuple):
  """What decoding may ask of the state of a mixer.

  slots: it grows with the tokens (else it has one size). tree: tokens may share
  a prefix and not see one another. random_write: a token may be written again.
  bidirectional: a token may see those after it. exact: prefill and steps give
  what the whole sequence gives.
  """

  slots: bool
  tree: bool
  random_write: bool
  bidirectional: bool
  exact: bool = True


SLOTS = Capabilities(True, True, True, True)
RECURRENT = Capabilities(False, False, False, False)


def valid(see):
  """(B, T) bool: a token, no padding."""
  return see.segments > 0


def resets(see):
  """(B, T) bool: the first token of a document."""
  return (see.positions == 0) & valid(see)


def state(names, *shape, dtype):
  """Zeros, laid out by logical names."""
  return annotate.put(jnp.zeros(shape, dtype), names)


def more_slots(x, slots):
  """A state (B, S, ...) with zeros behind it up to `slots`."""
  more = [(0, 0)] * x.ndim
  more[1] = (0, slots - x.shape[1])
  return jnp.pad(x, more)


def shift_slots(x, by_B):
  """x (B, S, ...) with row b moved by_B slots on, its last slots in front."""
  roll = jax.vmap(lambda x_S, by: jnp.roll(x_S, by, 0))
  if annotate.mode() != 'explicit' or not annotate.sizes():
    return roll(x, by_B)
  laid = lambda y: jax.typeof(y).sharding.spec  # a region: rows are local
  return jax.shard_map(
    roll, in_specs=(laid(x), laid(by_B)), out_specs=laid(x), check_vma=False
  )(x, by_B)
