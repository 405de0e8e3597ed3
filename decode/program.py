"""The device's side of decoding: a prompt and its first token, then a loop.

    while a row has tokens to make:
      drafts = propose(state)                            methods.py
      logits = step(cache, last token and drafts)
      new tokens = judge(logits, drafts)                 judges.py
      cache = commit(those tokens that are kept)

One token after the other is the method without drafts. A row whose logits are
not finite ends there: a token drawn from NaN would look like any other.

Cost: each call reads every parameter and the row's cache once.
Legend: B rows, T prompt tokens, S cache slots, M new tokens, C drafts, V
vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.decode import judges
from paraxis.decode import methods
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.sharding import annotate


class DecodeState(NamedTuple):
  """The loop's carry.

  cache: packed.Cache. own: the method's state. token: (B,) int32, last tokens,
  which are not yet in the cache. done: (B,) rows that have ended. broken: (B,)
  int32, number of the new token whose logits were not finite, -1: none. made,
  calls: (B,) int32, new tokens, and calls of the model after the prompt.
  tokens: (B, M) int32. logprobs: (B, M) float32.
  """

  cache: Any
  own: Any
  token: Any
  done: Any
  broken: Any
  made: Any
  calls: Any
  tokens: Any
  logprobs: Any


class Static(NamedTuple):
  """What a program is compiled for: sampling.SamplingForm, a judge's name."""

  form: Any
  judge: str


class Program:
  """Pure functions of a model; `ends`: ids that end a row."""

  def __init__(self, model, ends):
    self._model, self._ends = model, ends

  def begin(
    self, params, tokens_BT, lengths_B, values, method, static, slots, new
  ):
    """Prefill and the first token -> (DecodeState, what the host reads)."""
    x, cache = step.prefill(self._model, params, tokens_BT, lengths_B, slots)
    logits = self._model.logits(params, step.last(x, lengths_B))
    rows, zeros = tokens_BT.shape[0], jnp.zeros_like(lengths_B)
    fill = lambda dtype: annotate.put(
      jnp.zeros((rows, new), dtype), ('batch', None)
    )
    state = DecodeState(
      cache,
      method.start(params, tokens_BT, lengths_B, slots),
      zeros,
      lengths_B == 0,
      jnp.full_like(lengths_B, -1),
      zeros,
      zeros,
      fill(jnp.int32),
      fill(jnp.float32),
    )
    live, first = ~state.done, methods.Autoregressive()
    drafts, _ = first.propose(params, (), zeros, live, None)
    draws = self._draws(state, values, static)
    tokens, n, state = self._judged(
      state, logits, live, drafts, draws, static, jnp.int32(new)
    )
    own = method.first(state.own, tokens, n)
    state = state._replace(own=own, calls=zeros)
    return state, for_host(state)

  def _draws(self, state, values, static):
    rows = jnp.arange(len(state.done), dtype=jnp.uint32)
    rows = annotate.put(rows, ('batch',))
    return judges.Draws(
      static.form, values, rows, state.made.astype(jnp.uint32)
    )

  def _judged(self, state, logits, live, drafts, draws, static, limit):
    """(tokens (B, C + 1), how many are new n_B, the state with them).

    Args:
      logits: (B, C + 1, V). live: (B,) rows that make tokens. limit: of them.
    """
    z = annotate.put(logits, (*sampling.ROWS[:1], None, *sampling.ROWS[1:]))
    sound = jnp.isfinite(z).all(-1)
    # What follows a row that is not finite is not judged; if it is the first
    # one, the request is broken.
    whole = judges.accepted(sound, jnp.full_like(state.made, z.shape[1]))
    drafts = drafts._replace(count=jnp.clip(whole - 1, 0, drafts.count))
    tokens, n = judges.JUDGES[static.judge].run(z, drafts, draws)
    bad = live & ~sound[:, 0]
    n = jnp.minimum(n + 1, limit - state.made)
    ends = jnp.isin(tokens, jnp.asarray(self._ends, jnp.int32))
    width = tokens.shape[1]
    upto = judges.accepted(~ends, jnp.full_like(n, width)) + 1
    ended = upto <= n
    n = jnp.where(live & ~bad, jnp.minimum(n, upto), 0)
    logprobs = [sampling.logprob(z[:, c], tokens[:, c]) for c in range(width)]
    last = jnp.zeros_like(state.token)
    for c in range(width):
      last = jnp.where(c == n - 1, tokens[:, c], last)
    write = functools.partial(methods.written, at_B=state.made, n_B=n)
    done = state.done | bad | (live & ended)
    state = state._replace(
      token=jnp.where(n > 0, last, jnp.where(live, 0, state.token)),
      done=done,
      broken=jnp.where(bad, state.made, state.broken),
      made=state.made + n,
      calls=state.calls + live.astype(jnp.int32),
      tokens=write(state.tokens, tokens),
      logprobs=write(state.logprobs, jnp.stack(logprobs, 1)),
    )
    return tokens, n, state

  def loop(self, params, state, values, limit, stopped_B, method, static):
    """Tokens until every row has `limit` of them or has ended."""
    live_of = lambda state: ~state.done & (state.made < limit)
    width = method.width + 1

    def body(state):
      live, draws = live_of(state), self._draws(state, values, static)
      drafts, held = method.propose(params, state.own, state.token, live, draws)
      z, flight = step.extend(
        self._model, params, state.cache, state.token, drafts, live
      )
      tokens, n, after = self._judged(
        state, z, live, drafts, draws, static, limit
      )
      order = jnp.arange(width, dtype=jnp.int32)
      form = step.chain(len(live), width)
      cache = self._model.commit(state.cache, flight, form, order < n[:, None])
      return after._replace(cache=cache, own=method.settle(held, tokens, n))

    state = state._replace(done=state.done | stopped_B)
    more = lambda state: jnp.any(live_of(state))
    state = jax.lax.while_loop(more, body, state)
    return state, for_host(state)


def for_host(state):
  """Copies that every process can read."""
  whole = lambda x: annotate.put(x, (None,) * x.ndim)
  kept = state.tokens, state.logprobs, state.broken, state.made, state.calls
  return tuple(map(whole, kept))
