"""The device's side of decoding: a prompt and its first token, then a loop.

    while a row has tokens to make:
      drafts = propose(state)                            methods.py
      logits = step(cache, last token and drafts)        a chain or a tree
      new tokens = judge(logits, drafts)                 judges.py
      cache = commit(those tokens that are kept)

One token after the other is the method without drafts. A row whose logits are
not finite ends there: a token drawn from NaN would look like any other.

Cost: each call reads every parameter and the row's cache once; but a mixer with
a state of one size runs token by token over a chain of drafts, and its
parameters are read C + 1 times (models/mixers/protocol.py: `lanes`).
Legend: B rows, T prompt tokens, S cache slots, M new tokens, C drafts, D drafts
of the longest path, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.decode import judges
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.decode import trace as trace_lib
from paraxis.sharding import annotate


class DecodeState(NamedTuple):
  """The loop's carry.

  cache: packed.Cache. own: the method's state. token: (B,) int32, last tokens,
  which are not yet in the cache. done: (B,) rows that have ended. broken: (B,)
  int32, number of the new token whose logits were not finite, -1: none. made:
  (B,) int32, new tokens. lengths: (B, D + 2) int32, calls of the model after
  the prompt that made 0, 1, .. tokens. tokens: (B, M) int32. logprobs: (B, M)
  float32. request: (B,) uint32, for draws. trace: trace.Trace, or None.
  """

  cache: Any
  own: Any
  token: Any
  done: Any
  broken: Any
  made: Any
  lengths: Any
  tokens: Any
  logprobs: Any
  request: Any
  trace: Any = None


class Shown(NamedTuple):
  """What the host reads, as in `DecodeState`."""

  tokens: Any
  logprobs: Any
  broken: Any
  made: Any
  lengths: Any
  trace: Any


class Until(NamedTuple):
  """When a loop returns. limit: () or (B,) int32, new tokens of a row behind
  which it has no further call. stopped: (B,) bool, rows that the host ended.
  one: () bool, as soon as one more row has ended or has its tokens; else when
  all have. most: () int32, new tokens that a row is cut to: with less than it
  may make, the draws of its next call would depend on when the host looks."""

  limit: Any
  stopped: Any
  one: Any
  most: Any


class Static(NamedTuple):
  """What a program is compiled for: sampling.SamplingForm, a judge's name,
  whether calls are recorded (trace.py)."""

  form: Any
  judge: str
  trace: bool = False


class Program:
  """Pure functions of a model; `ends`: ids that end a row.

  params: proposal.Params. method: of methods.py. static: Static.
  """

  def __init__(self, model, ends):
    self._model, self._ends = model, ends

  def begin(self, params, prompt, values, limit, method, static, room):
    """Prefill and, of methods that draft, the first token.

    Args:
      prompt: (tokens_BT, lengths_B, request_B). values:
        sampling.SamplingValues. limit: () int32, new tokens of a row. room:
        static (S, M).

    Returns:
      (DecodeState, what the host reads).
    """
    (tokens_BT, lengths_B, _), (slots, new), model = prompt, room, self._model
    if method.fills:
      opened = method.open(params.model, prompt[:2], limit, room)
      state = self._empty(prompt, opened, method, static, room)
      return state, for_host(state)
    last = functools.partial(step.last, lengths_B=lengths_B)
    x, cache = step.prefill(model, params.model, tokens_BT, lengths_B, slots)
    logits = model.logits(params.model, last(x))
    own = method.start(params, tokens_BT, lengths_B, slots, x)
    state = self._empty(prompt, (cache, own), method, static, room)
    live, first = ~state.done, proposal.Autoregressive()
    drafts, _ = first.propose(params, (), state.token, live, None)
    draws = self._draws(state, values, static)
    seen, after = self._judged(
      state, (last(x), logits), drafts, draws, static,
      first.tree, Until(new, None, None, new),
    )  # fmt: skip
    state = after._replace(own=method.first(state.own, seen))
    return state, for_host(state)

  def _empty(self, prompt, held, method, static, room):
    """DecodeState before the first token; held: (its cache, its own)."""
    (tokens_BT, lengths_B, request), (cache, own), new = prompt, held, room[1]
    rows, zeros = tokens_BT.shape[0], jnp.zeros_like(lengths_B)
    places, calls = method.tree.depth + 1, method.calls(new)
    fill = lambda width, dtype: annotate.put(
      jnp.zeros((rows, width), dtype), proposal.ROWS
    )
    return DecodeState(
      cache,
      own,
      zeros,
      lengths_B == 0,
      jnp.full_like(lengths_B, -1),
      zeros,
      fill(places + 1, jnp.int32),
      fill(new, jnp.int32),
      fill(new, jnp.float32),
      request,
      trace_lib.Trace.empty(rows, calls, places) if static.trace else None,
    )

  def _draws(self, state, values, static):
    index = state.made.astype(jnp.uint32)
    return judges.Draws(static.form, values, state.request, index)

  def _judged(self, state, out, drafts, draws, static, tree, until):
    """(proposal.Seen, the state with its new tokens).

    Args:
      out: features (B, C + 1, D), logits (B, C + 1, V). until: Until.
    """
    (x, logits), live = out, _live(state, until.limit)
    z = annotate.put(logits, (*sampling.ROWS[:1], None, *sampling.ROWS[1:]))
    sound = jnp.isfinite(z).all(-1)
    # A draft whose logits are not finite is not kept; if those of the last
    # token are not, the request is broken.
    kept = drafts.valid & sound[:, 1:] & (drafts.tokens >= 0)
    drafts = drafts._replace(valid=kept)
    tokens, n, at = judges.JUDGES[static.judge].run(z, drafts, draws, tree)
    bad = live & ~sound[:, 0]
    n = jnp.minimum(n + 1, until.most - state.made)
    ends = jnp.isin(tokens, jnp.asarray(self._ends, jnp.int32))
    upto = judges.accepted(~ends) + 1
    ended = upto <= n
    n = jnp.where(live & ~bad, jnp.minimum(n, upto), 0)
    width = tokens.shape[1]
    logprobs = [
      sampling.logprob(
        z[:, c] if tree.is_chain else judges.at(z, at[:, c]), tokens[:, c]
      )
      for c in range(width)
    ]
    last = judges.at(tokens, n - 1)
    write = functools.partial(proposal.written, at_B=state.made, n_B=n)
    done = state.done | bad | (live & ended)
    state = state._replace(
      token=jnp.where(live, last, state.token),
      done=done,
      broken=jnp.where(bad, state.made, state.broken),
      made=state.made + n,
      tokens=write(state.tokens, tokens),
      logprobs=write(state.logprobs, jnp.stack(logprobs, 1)),
    )
    return proposal.Seen(tokens, n, at, x, z, draws), state

  def loop(self, params, state, values, until, method, static):
    """Tokens until every row has enough or has ended; until: Until."""
    limit = until.limit

    def body(state):
      live, draws = _live(state, limit), self._draws(state, values, static)
      if method.fills:
        return method.call(params, state, draws, live, self._ends)
      drafts, held = method.propose(params, state.own, state.token, live, draws)
      x, z, flight = step.extend(
        self._model, params.model, state.cache, state.token, drafts, live,
        method.tree, method.begin(params),
      )  # fmt: skip
      seen, after = self._judged(
        state, (x, z), drafts, draws, static, method.tree, until
      )
      form = step.drafted(len(live), method.tree)
      cache = self._model.commit(state.cache, flight, form, seen.kept())
      n = jnp.arange(state.lengths.shape[1], dtype=jnp.int32)
      called = live[:, None] & (n == seen.n[:, None])
      if static.trace:
        trace = state.trace.add(live, drafts, seen, method.tree)
        after = after._replace(trace=trace)
      return after._replace(
        cache=cache,
        own=method.settle(held, seen),
        lengths=state.lengths + called,
      )

    state = state._replace(done=state.done | until.stopped)
    began = _live(state, limit)

    def more(state):
      live = _live(state, limit)
      return jnp.any(live) & ~(until.one & jnp.any(began & ~live))

    state = jax.lax.while_loop(more, body, state)
    return state, for_host(state)


def _live(state, limit):
  """(B,) bool: rows that make tokens."""
  return ~state.done & (state.made < limit)


def for_host(state):
  """Shown: copies that every process can read."""
  whole = lambda x: annotate.put(x, (None,) * x.ndim)
  kept = {name: getattr(state, name) for name in Shown._fields}
  return Shown(**jax.tree.map(whole, kept))
