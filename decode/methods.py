"""Methods of decoding: what is proposed before a call of the model.

    autoregressive  nothing: a call makes one token
    prompt_lookup   the tokens that followed the last ones when these stood in
                    the text before (the copying of aggressive decoding,
                    arXiv:2205.10350, without a source text)
    speculative     the draws of a smaller model: the first layers of the same
                    one, with its norm and head (arXiv:2211.17192)

A method is an object with `width` drafts a call and four pure functions:

    start(params, tokens_BT, lengths_B, slots)   -> its own state
    first(own, token_B1, n_B)                    -> with the first new token
    propose(params, own, token_B, live_B, draws) -> (judges.Drafts, held)
    settle(held, token_BC, n_B)                  -> its own state, when n of the
                                                    C + 1 tokens are new

token_B is the last token of each row, which no cache holds yet. Legend: B rows,
T prompt tokens, C drafts, S slots, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.decode import cache as cache_lib
from paraxis.decode import judges
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.models import decoder
from paraxis.sharding import annotate

ROWS = ('batch', None)
LONGEST = 3  # tokens that a lookup compares, at most


def of(model, method, drafts, draft_layers, judge):
  """The method of these fields of schema.Decode, for a decoder.Decoder."""
  if method == 'autoregressive':
    return Autoregressive()
  if method == 'prompt_lookup':
    return Lookup(drafts)
  most = model.config.num_layers
  if not 0 < draft_layers < most:
    advice = f'take 1 to {most - 1}' if most > 1 else 'one layer is too few'
    raise errors.UserError(
      'decode.method=speculative drafts with the first layers of the model: '
      f'decode.draft_layers={draft_layers} of {most}; {advice}.'
    )
  small = dataclasses.replace(model.config, num_layers=draft_layers)
  small = decoder.Decoder(small, layout=model.layout)
  return Speculative(small, drafts, judges.JUDGES[judge].coupled)


class Autoregressive:
  """No drafts."""

  width = 0

  def start(self, params, tokens_BT, lengths_B, slots):
    del params, tokens_BT, lengths_B, slots
    return ()

  def first(self, own, token_B1, n_B):
    del token_B1, n_B
    return own

  def propose(self, params, own, token_B, live_B, draws):
    del params, own, live_B, draws
    none = annotate.put(jnp.zeros((len(token_B), 0), jnp.int32), ROWS)
    return judges.Drafts(none, jnp.zeros_like(token_B)), ()

  def settle(self, held, token_BC, n_B):
    del held, token_BC, n_B
    return ()


class Lookup:
  """own: (text_BS, length_B), all tokens that a row has."""

  def __init__(self, width):
    self.width = width

  def start(self, params, tokens_BT, lengths_B, slots):
    del params
    more = slots + 1 - tokens_BT.shape[1]  # the last token has no slot
    return jnp.pad(tokens_BT, ((0, 0), (0, more))), lengths_B

  def first(self, own, token_B1, n_B):
    return self.settle(own, token_B1, n_B)

  def propose(self, params, own, token_B, live_B, draws):
    del params, token_B, live_B, draws
    find = jax.vmap(functools.partial(_found, self.width))
    run = annotate.region(find, (ROWS, ('batch',)), (ROWS, ('batch',)))
    return judges.Drafts(*run(*own)), own

  def settle(self, held, token_BC, n_B):
    text, length = held
    return written(text, token_BC, length, n_B), length + n_B


def _found(width, text_S, length):
  """(the `width` tokens that followed the last ones, how many): the latest
  place where the most of the last `LONGEST` tokens stood before."""
  size = text_S.shape[0]
  place = jnp.arange(size, dtype=jnp.int32)
  best = jnp.full(
    (), -1, jnp.int32
  )  # agreeing tokens x size + place after them
  same = place < length - 1  # place: of the last agreeing token
  for n in range(LONGEST):
    # Token `length - 1 - n` against the one n before each place.
    back = jnp.where(place >= n, jnp.roll(text_S, n), -1)
    same &= (back == text_S[jnp.maximum(length - 1 - n, 0)]) & (n < length)
    found = jnp.max(jnp.where(same, (n + 1) * size + place + 1, -1))
    best = jnp.maximum(best, found)
  first = best % size
  count = jnp.where(best > 0, jnp.minimum(width, length - first), 0)
  at = jnp.minimum(first + jnp.arange(width, dtype=jnp.int32), size - 1)
  return text_S[at], count.astype(jnp.int32)


def written(x_BS, new_BC, at_B, n_B):
  """x_BS with the first n_b of new_BC in the places from at_b on."""
  place = jnp.arange(x_BS.shape[1], dtype=jnp.int32)
  for c in range(new_BC.shape[1]):
    here = (place == at_B[:, None] + c) & (c < n_B)[:, None]
    x_BS = jnp.where(here, new_BC[:, c, None].astype(x_BS.dtype), x_BS)
  return x_BS


class Speculative:
  """own: the draft model's packed.Cache, as long as the target's."""

  def __init__(self, model, width, coupled):
    """coupled: it draws by the noise of the target's tokens."""
    self.width, self._model = width, model
    self._purpose = 0 if coupled else judges.DRAFT

  def start(self, params, tokens_BT, lengths_B, slots):
    return step.prefill(self._model, params, tokens_BT, lengths_B, slots)[1]

  def first(self, own, token_B1, n_B):
    del token_B1, n_B
    return own

  def propose(self, params, own, token_B, live_B, draws):
    """The last draft is fed, too: all of them may be kept."""
    states = functools.partial(cache_lib.recurrent, self._model)

    def one(carry, c):
      cache, token = carry
      z, cache = step.advance(self._model, params, cache, token, live_B)
      z = annotate.put(z, sampling.ROWS)
      drawn, _ = sampling.sample(
        z, draws.form, draws.values, *draws.at(c), purpose=self._purpose
      )
      return (cache, drawn), (drawn, z, states(cache))

    order = jnp.arange(self.width + 1, dtype=jnp.uint32)
    (cache, _), (tokens, z, kept) = jax.lax.scan(one, (own, token_B), order)
    tokens = jnp.moveaxis(tokens, 0, 1)[:, :-1]
    z = jnp.moveaxis(z, 0, 1)[:, :-1]
    count = jnp.full_like(token_B, self.width)
    return judges.Drafts(tokens, count, z), (own, cache, kept)

  def settle(self, held, token_BC, n_B):
    del token_BC
    before, cache, kept = held
    return cache_lib.after(self._model, before, cache, kept, n_B)
