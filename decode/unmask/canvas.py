"""A block of masks at a time: each call makes some of them text.

A row is its prompt and, behind it, masks. Its blocks are decoded from left to
right, the masks of a block in the order that a policy says (policies.py): a
call reads the block, draws a token at every mask, and keeps those that the
policy takes. A canvas is the block that a row is at.

    model.visibility=full    every call reads the whole row, masks of the blocks
                             to come with it (LLaDA, arXiv:2502.09992): nothing
                             is cached, as any token may change all features
    model.visibility=block   earlier blocks are in the cache: a call reads the C
                             tokens of the canvas over it. A finished block is
                             read once more, without masks, and committed (Fast-
                             dLLM v2, arXiv:2509.26328): the cache is exact

With model.mask_shift a mask is drawn from the features of the token before it.
Lossless of nothing: the text depends on the block and on the policy.

Legend: B rows, S tokens of a row, C places of a canvas, D model, V vocabulary.
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
from paraxis.decode import trees
from paraxis.decode.unmask import filters
from paraxis.decode.unmask import policies
from paraxis.models.mixers import packed as packed_lib
from paraxis.sharding import annotate

ROWS = proposal.ROWS


class Canvas(NamedTuple):
  """Of every row; a method's own state.

  row: (B, S) int32, the prompt, text and masks. logprobs: (B, S) float32, of
  the text. start, end: (B,) int32, of the text in the row. at: (B,) int32,
  where the canvas is. calls: (B,) int32, that the canvas has had; all: (B,)
  int32, of the row. before: (B, D) features of the token before the canvas, or
  (). credit: (B, C, V) float32, or ().
  """

  row: Any
  logprobs: Any
  start: Any
  end: Any
  at: Any
  calls: Any
  all: Any
  before: Any
  credit: Any


class Unmask(proposal.Method):
  """The calls of a masked model.

  tree: of as many drafts as make a canvas's places, less one; for `Trace`.
  """

  fills = True

  def __init__(self, model, policy):
    """policy: configs.base.decode.Unmask; block: of model.visibility=full."""
    config = model.config
    self._model, self._policy = model, policy
    self._mask, self._shift = config.mask_id, config.mask_shift
    self._cached = config.visibility == 'block'
    self.width = config.block if self._cached else policy.block
    self.tree = trees.chain(self.width - 1)

  def calls(self, new):
    # One at least of a block's tokens, and one for its commit.
    return new + -(-new // self.width) + 1

  def open(self, params, prompt, limit, room):
    """(cache, Canvas) before the first call; as `program.Program.begin`."""
    (tokens, lengths), (slots, new) = prompt, room
    model, width = self._model, self.width
    cache, at, before = (), lengths, ()
    if self._cached:
      at = lengths // width * width
      x, cache = step.prefill(model, params, tokens, at, slots)
      if model.config.mask_shift:
        before = step.last(x, at)[:, 0]
    size = tokens.shape[1] + new + width
    place = jnp.arange(size, dtype=jnp.int32)
    row = jnp.pad(tokens, ((0, 0), (0, size - tokens.shape[1])))
    masks = place >= lengths[:, None]
    row = jnp.where(masks, model.config.mask_id, row).astype(jnp.int32)
    zeros = jnp.zeros_like(lengths)
    credit: Any = ()
    if self._policy.credit_weight:
      shape = (len(tokens), width, model.config.vocab_size)
      credit = annotate.put(jnp.zeros(shape, jnp.float32), (*ROWS, None))
    return cache, Canvas(
      annotate.put(row, ROWS),
      annotate.put(jnp.zeros(row.shape, jnp.float32), ROWS),
      lengths, lengths + limit, at, zeros, zeros, before, credit,
    )  # fmt: skip

  def call(self, params, state, draws, live, ends):
    """program.DecodeState after one call of the model.

    Args:
      params: proposal.Params. draws: judges.Draws. live: (B,) bool. ends: ids
        that end a row.
    """
    own, policy = state.own, self._policy
    place = own.at[:, None] + jnp.arange(self.width, dtype=jnp.int32)
    there = live[:, None] & (place < own.end[:, None])
    held = window(own.row, own.at, self.width)
    masks = there & (held == self._mask)
    x, flight = self._features(params.model, state, held, there)
    z = self._model.logits(params.model, self._read(own, x))
    z = annotate.put(z, (*ROWS, None))
    bad = live & ~(jnp.isfinite(z).all(-1) | ~there).all(-1)
    # A mask is no text.
    z = jnp.where(jnp.arange(z.shape[-1]) == self._mask, -jnp.inf, z)
    believed, credit = z, own.credit
    if policy.credit_weight:
      believed, credit = policies.credited(policy, z, credit, masks)
    tokens, noise = self._drawn(believed, own, draws)
    score = policies.score(policy, believed, tokens, noise)
    ending = jnp.isin(tokens, jnp.asarray(ends, jnp.int32))
    text = there & (place >= own.start[:, None])
    ranked = self._ranked(params.own, score, masks, text, ending)
    final = policies.chosen(policy, ranked, masks, own.calls) & ~bad[:, None]
    made = Made(held, masks, tokens, final, score, sampling.logprob(z, tokens))
    some = live & ~bad & masks.any(1)
    whole = some & ~(masks & ~final).any(1)
    # A canvas without masks was read to be committed.
    moves = live & ~bad & ~some if self._cached else whole
    cache = state.cache
    if self._cached:
      keep = moves[:, None] & there
      cache = self._model.commit(cache, flight, self._form(own), keep)
    if policy.credit_weight:  # of this canvas alone
      credit = jnp.where(moves[:, None, None], 0, credit)
    own = self._moved(own, made, x, moves, live)._replace(credit=credit)
    state = state._replace(cache=cache, own=own)
    count = made.final.sum(1, dtype=jnp.int32)
    text &= whole[:, None]
    return counted(state, made, text, (live, bad), ends, count)

  def _ranked(self, own, score, masks, text, ending):
    """Scores by which masks are taken, (B, C).

    Args:
      own: of a filter, or (). text: bool, places behind the prompt. ending:
        bool, drawn ends.
    """
    if self._policy.score == 'filter':
      score = filters.score(own, score, masks)
    if self._policy.end_weight < 1:
      left = masks.sum(1) / jnp.maximum(text.sum(1), 1)
      score = policies.later_ends(self._policy, score, ending, 1 - left)
    return score

  def _form(self, own):
    count, size = own.row.shape
    if self._cached:
      return (packed_lib.Group(count, self.width),)
    return (packed_lib.Group(count, size, fresh=True),)

  def _features(self, params, state, held, there):
    """(features (B, C, D) of the canvas, packed.Flight). Of a row in flight
    with mask_shift: of the places before those."""
    own, form = state.own, self._form(state.own)
    if self._cached:
      count = there.sum(1, dtype=jnp.int32)
      packed, cache = step.rows(held, count, own.at), state.cache
      return self._model.step(params, cache, packed, form)
    packed = step.rows(own.row, jnp.where(there.any(1), own.end, 0))
    empty = self._model.init_cache(len(held), 1)
    x, flight = self._model.step(params, empty, packed, form)
    return window(x, own.at - int(self._shift), self.width), flight

  def _read(self, own, x):
    """Features that tokens of the canvas are drawn from."""
    if self._cached and self._shift:
      before = own.before[:, None].astype(x.dtype)
      return jnp.concatenate([before, x[:, :-1]], 1)
    return x

  def _drawn(self, z, own, draws):
    """(tokens, noise in [0, 1)), (B, C): drawn anew in every call."""
    first = own.all.astype(jnp.uint32) * jnp.uint32(self.width)

    def one(given):
      z_BV, c = given
      index = first + c
      token, _ = sampling.sample(
        z_BV, draws.form, draws.values, draws.request, index
      )
      if self._policy.score != 'random':
        return token, jnp.zeros_like(z_BV[:, 0])
      key = sampling.keys(
        draws.values.seed, draws.request, index, judges.ACCEPT
      )
      return token, annotate.put(jax.vmap(jax.random.uniform)(key), ROWS[:1])

    places = jnp.arange(self.width, dtype=jnp.uint32)
    found = jax.lax.map(one, (jnp.moveaxis(z, 1, 0), places))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)

  def _moved(self, own, made, x, moves, live):
    """Canvas with the tokens that are final; of rows that move, the next."""
    once, before = live.astype(jnp.int32), own.before
    if self._cached and self._shift:
      before = jnp.where(moves[:, None], x[:, -1].astype(before.dtype), before)
    old = window(own.logprobs, own.at, self.width)
    return own._replace(
      row=placed(own.row, made.after(), own.at),
      logprobs=placed(
        own.logprobs, jnp.where(made.final, made.logprobs, old), own.at
      ),
      at=own.at + jnp.where(moves, self.width, 0),
      calls=jnp.where(moves, 0, own.calls + once),
      all=own.all + once,
      before=before,
    )


class Made(NamedTuple):
  """What a call made at the places of a canvas, (B, C) each.

  held: ids before the call. masks: bool, those to decode. tokens: drawn. final:
  bool, masks whose token is text now. score: float32. logprobs: float32.
  """

  held: Any
  masks: Any
  tokens: Any
  final: Any
  score: Any
  logprobs: Any

  def after(self):
    """Ids after the call."""
    return jnp.where(self.final, self.tokens, self.held)

  def record(self):
    """The fields of a trace.Trace."""
    canvas = jnp.where(self.masks, trace_lib.NOTHING, self.held)
    return canvas, self.tokens, self.final, self.score, self.logprobs


def counted(state, made, text, rows, ends, count=None):
  """program.DecodeState with what a call made.

  Args:
    made: has `after`, ids (B, C), and `record`, the fields of a trace.Trace.
    text: (B, C) bool, places that are text now and were not before.
    rows: (live, bad), (B,) bool: that the call was for; whose logits were not
      finite. ends: ids that end a row.
    count: (B,) int32, tokens that the call made; None: those of the text.
  """
  (live, bad), own, tokens = rows, state.own, made.after()
  ending = text & jnp.isin(tokens, jnp.asarray(ends, jnp.int32))
  first = jnp.cumsum(ending, 1) - ending == 0  # the first end, and all before
  new = (text & first).sum(1, dtype=jnp.int32)
  count = new if count is None else count
  size = jnp.arange(state.lengths.shape[1], dtype=jnp.int32)
  news = state.tokens.shape[1]
  trace = state.trace
  if trace is not None:
    trace = trace.put(live, made.record())
  return state._replace(
    done=state.done | bad | ending.any(1),
    broken=jnp.where(bad, state.made, state.broken),
    made=state.made + new,
    lengths=state.lengths + (live[:, None] & (size == count[:, None])),
    tokens=window(own.row, own.start, news),
    logprobs=window(own.logprobs, own.start, news),
    trace=trace,
  )


def window(x_BS, at_B, width):
  """x (B, S, ..) from at_b on, `width` places of each row."""
  cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=width)
  names = ('batch',) + (None,) * (x_BS.ndim - 1)
  run = annotate.region(
    jax.vmap(cut), (names, names[:1]), (names,), single=True
  )
  return run(annotate.put(x_BS, names), at_B)


def placed(x_BS, new_BC, at_B):
  """x (B, S) with `new` from at_b on."""
  put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
  run = annotate.region(
    jax.vmap(put), (ROWS, ROWS, ROWS[:1]), (ROWS,), single=True
  )
  return run(x_BS, new_BC.astype(x_BS.dtype), at_B)
