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

With unmask.sub_block a block is decoded in sub-blocks from left to right, and a
canvas is such a one; every call reads the whole block (but: sub_blocks.py).
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
  where the block is. calls: (B,) int32, that the canvas has had; all: (B,)
  int32, of the row. before: (B, D) features of the token before the block, or
  (). credit: (B, C, V) float32, or (). read, edge: of sub_blocks.py, or ().
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
  read: Any = ()
  edge: Any = ()


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
    self.block = config.block if self._cached else policy.block
    self.width = policy.sub_block or self.block
    self.lane = self.block if self._cached else 0
    self.tree = trees.chain(self.width - 1)

  def calls(self, new):
    # One at least of a block's tokens, and one for its commit.
    return new + -(-new // self.block) + 1

  def open(self, params, prompt, limit, room):
    """(cache, Canvas) before the first call; as `program.Program.begin`."""
    (tokens, lengths), (slots, new) = prompt, room
    model, width = self._model, self.block
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
      shape = (len(tokens), self.width, model.config.vocab_size)
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
    at = self._canvas(own)
    place = at[:, None] + jnp.arange(self.width, dtype=jnp.int32)
    there = live[:, None] & (place < own.end[:, None])
    held = window(own.row, at, self.width)
    masks = there & (held == self._mask)
    x, sound, settle = self._passed(params.model, state, at, masks, live)
    z = self._model.logits(params.model, x)
    z = annotate.put(z, (*ROWS, None))
    bad = live & ~((jnp.isfinite(z).all(-1) | ~there).all(-1) & sound)
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
    # A block without masks was read to be committed.
    moves = live & ~bad & ~some if self._cached else whole
    cache, own = settle(moves)
    if policy.credit_weight:  # of this canvas alone
      credit = jnp.where((whole | moves)[:, None, None], 0, credit)
    own = self._moved(own, made, at, (whole, moves, live))
    state = state._replace(cache=cache, own=own._replace(credit=credit))
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

  def _canvas(self, own):
    """(B,) where canvases begin: the sub-block with a block's first mask."""
    if self.width == self.block:
      return own.at
    place = own.at[:, None] + jnp.arange(self.block, dtype=jnp.int32)
    masks = window(own.row, own.at, self.block) == self._mask
    masks &= place < own.end[:, None]
    first = jnp.argmax(masks, 1).astype(jnp.int32)  # 0 without any
    return own.at + first // self.width * self.width

  def _passed(self, params, state, at, masks, live):
    """What a pass of the model leaves.

    Args:
      at: of `_canvas`. masks: (B, C) bool, of the canvas. live: (B,) bool.

    Returns:
      (x (B, C, D) that its tokens are drawn from, (B,) bool: is all that the
      cache may get finite, settle: (B,) bool, rows that leave their block ->
      (cache, Canvas)).
    """
    own = state.own
    if not self._cached:
      return self._row(params, own, live), True, lambda _: (state.cache, own)
    place = own.at[:, None] + jnp.arange(self.block, dtype=jnp.int32)
    there = live[:, None] & (place < own.end[:, None])
    x, flight = self._block(params, state, there)
    sound = (jnp.isfinite(x).all(-1) | ~there).all(1)

    def settle(moves):
      keep, before = moves[:, None] & there, own.before
      cache = self._model.commit(state.cache, flight, self._form(own), keep)
      if self._shift:
        last = x[:, -1].astype(before.dtype)
        before = jnp.where(moves[:, None], last, before)
      return cache, own._replace(before=before)

    return self._read(x, own.before, at - own.at), sound, settle

  def _row(self, params, own, live):
    """Features of the canvas, of whole rows in flight."""
    count, size = own.row.shape
    form = (packed_lib.Group(count, size, fresh=True),)
    packed = step.rows(own.row, jnp.where(live, own.end, 0))
    empty = self._model.init_cache(count, step.slots(1))
    x, _ = self._model.step(params, empty, packed, form)
    return window(x, own.at - int(self._shift), self.width)

  def _form(self, own):
    return (packed_lib.Group(len(own.row), self.block),)

  def _block(self, params, state, there):
    """(features of the block over those before it, packed.Flight)."""
    own, count = state.own, there.sum(1, dtype=jnp.int32)
    packed = step.rows(window(own.row, own.at, self.block), count, own.at)
    return self._model.step(params, state.cache, packed, self._form(own))

  def _read(self, x, before, first):
    """Features that a canvas is drawn from; it begins `first` places behind
    x (B, .., D), with mask_shift a place earlier: `before` (B, D)."""
    if self._shift:
      x = jnp.concatenate([before[:, None].astype(x.dtype), x[:, :-1]], 1)
    return x if x.shape[1] == self.width else window(x, first, self.width)

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

  def _moved(self, own, made, at, rows):
    """Canvas with the tokens that are final.

    Args:
      at: (B,), of the canvas. rows: (B,) bool each, whose canvas has no masks
        left, that leave their block, and that the call was for.
    """
    whole, moves, live = rows
    once, old = live.astype(jnp.int32), window(own.logprobs, at, self.width)
    logprobs = jnp.where(made.final, made.logprobs, old)
    return own._replace(
      row=placed(own.row, made.after(), at),
      logprobs=placed(own.logprobs, logprobs, at),
      at=own.at + jnp.where(moves, self.block, 0),
      calls=jnp.where(whole | moves, 0, own.calls + once),
      all=own.all + once,
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
