"""Many tokens at once, each a few passes over the core deeper than the next.

A model with model.recurrence draws a token after r passes over its core, but
its state says much of that earlier. Here a call makes `inner` passes for all
places of a wavefront: W consecutive tokens of a row, of which only the first is
known to be right (arXiv:2510.14961, section 3, and its published code):

    states = noise, of places that come new (or some of it is mixed in)
    states = `inner` passes; draw a token behind every place
    the first places become text whose states no longer change:
        |s - s'| < threshold |s|,  or r passes have read the token they hold,
        and the place before was right about that token
    places move up; `headway` new ones begin with the last draw

A place whose token is drawn anew keeps its state. Keys and values of places
that are not text belong to the call; the cache has those of the last `inner`
passes of the text. A draw's noise belongs to its place, so that text converges.

With W = 1 and inner = r this is decoding one token after the other. Lossless of
nothing else: a token may become text before its state has settled, and the
cache of a model with inner < r is not that of a whole pass.

Legend: B rows, S tokens of a row, W places of the wavefront, D model.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.decode import judges
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.decode import trace as trace_lib
from paraxis.decode import trees
from paraxis.decode.unmask import canvas
from paraxis.models import decoder
from paraxis.models import recurrent_depth
from paraxis.models.mixers import packed as packed_lib
from paraxis.models.mixers import protocol as mixer
from paraxis.sharding import annotate

ROWS = proposal.ROWS


class Front(NamedTuple):
  """Of every row; a method's own state.

  row: (B, S) int32, prompt, text, and draws that are not text yet. logprobs:
  (B, S) float32, of the text. start, end: (B,) int32, of the new text. at: (B,)
  int32, position of the first place. width: (B,) int32, places in use. state:
  (B, W, D). visits: (B, W) int32, calls that a place has had. age: (B, W)
  int32, of them, since its token changed.
  """

  row: Any
  logprobs: Any
  start: Any
  end: Any
  at: Any
  width: Any
  state: Any
  visits: Any
  age: Any


class Wavefront(proposal.Method):
  """The calls of a model with a core."""

  fills = True

  def __init__(self, model, options):
    """options: configs.base.decode.Wavefront.

    Raises:
      UserError: the model has no core; the passes are no whole calls.
    """
    own = model.config.recurrence
    if not own.core:
      raise errors.UserError(
        'decode.method=wavefront makes passes over a core, and '
        'model.recurrence.core=0: take decode.method=autoregressive.'
      )
    if own.iterations % options.inner:
      raise errors.UserError(
        f'decode.wavefront.inner={options.inner} passes a call do not divide '
        f'model.recurrence.iterations={own.iterations}, which a prompt has.'
      )
    self._options, self._most = options, own.iterations // options.inner
    few = dataclasses.replace(own, iterations=options.inner)
    config = dataclasses.replace(model.config, recurrence=few)
    self._model = decoder.Decoder(config, layout=model.layout)
    self.tree = trees.chain(options.width - 1)

  def calls(self, new):
    return new * self._most

  def open(self, params, prompt, limit, room):
    """(cache, Front) before the first call; as `program.Program.begin`."""
    (tokens, lengths), (slots, new) = prompt, room
    width, count = self._options.width, len(tokens)
    first = jnp.maximum(lengths - 1, 0)
    form = (packed_lib.Group(*tokens.shape, fresh=True),)
    cache = self._model.init_cache(count, slots)
    packed = step.rows(tokens, first)
    once = lambda state: recurrent_depth.step(
      self._model, params, cache, packed, form, state
    )
    _, state, flight = once(None)
    for _ in range(self._most - 1):
      _, state, flight = once(state)
    cache = self._model.commit(cache, flight, form, packed.request < count)
    size = tokens.shape[1] + new + 2 * width
    row = jnp.pad(tokens, ((0, 0), (0, size - tokens.shape[1])))
    none = annotate.put(jnp.zeros((count, width), jnp.int32), ROWS)
    empty = jnp.zeros((count, width, state.shape[-1]), state.dtype)
    return cache, Front(
      annotate.put(row, ROWS),
      annotate.put(jnp.zeros(row.shape, jnp.float32), ROWS),
      lengths, lengths + limit, first, jnp.ones_like(lengths),
      annotate.put(empty, (*ROWS, None)), none, none,
    )  # fmt: skip

  def call(self, params, state, draws, live, ends):
    """program.DecodeState after one call of the model.

    Args:
      params: proposal.Params. draws: judges.Draws. live: (B,) bool. ends: ids
        that end a row.
    """
    own, options, width = state.own, self._options, self._options.width
    order = jnp.arange(width, dtype=jnp.int32)
    place = own.at[:, None] + order
    # Behind the last place but one no token is wanted.
    there = live[:, None] & (order < own.width[:, None])
    there &= place < own.end[:, None] - 1
    held = canvas.window(own.row, own.at, width)
    packed = step.rows(held, there.sum(1, dtype=jnp.int32), own.at)
    form = (packed_lib.Group(len(held), width, each=width > 1),)
    mixed = options.noise / (1 + options.inner * own.visits)
    mixed = jnp.where(own.visits == 0, 1.0, mixed)
    x, after, flight = recurrent_depth.step(
      self._model, params.model, state.cache, packed, form, own.state, mixed
    )
    z = self._model.logits(params.model, x)
    z = annotate.put(z, (*ROWS, None))
    sound = jnp.isfinite(z).all(-1)
    tokens = self._drawn(z, own, place, draws)
    age = own.age + 1
    settled = _change(own.state, after) < options.threshold
    settled &= own.visits > 0
    ready = there & sound & (settled | (age >= self._most))
    agrees = held[:, 1:] == tokens[:, :-1]
    ready &= jnp.pad(agrees, ((0, 0), (1, 0)), constant_values=True)
    final = jnp.cumsum(~ready, 1) == 0
    cache = self._model.commit(state.cache, flight, form, final)
    logprobs = sampling.logprob(z, tokens)
    made = Made(held, there, tokens, final, z, logprobs)
    # Rows that wait for others, between two looks of the host, stand still.
    moved = self._moved(own, made, after, age)
    own = jax.tree.map(functools.partial(mixer.rows_where, live), moved, own)
    bad = live & ~sound[:, 0]
    state = state._replace(cache=cache, own=own)
    return canvas.counted(state, made, final, (live, bad), ends)

  def _drawn(self, z, own, place, draws):
    """(B, W) tokens behind the places, by the noise of their numbers."""
    index = jnp.maximum(place + 1 - own.start[:, None], 0).astype(jnp.uint32)

    def one(given):
      z_BV, index_B = given
      return sampling.sample(
        z_BV, draws.form, draws.values, draws.request, index_B
      )[0]

    found = jax.lax.map(one, (jnp.moveaxis(z, 1, 0), index.T))
    return annotate.put(found.T, ROWS)

  def _moved(self, own, made, state, age):
    """Front with the new draws; what is text now has left it."""
    width, count = self._options.width, made.final.sum(1, dtype=jnp.int32)
    many, behind = made.there.sum(1, dtype=jnp.int32), own.at + 1
    # New places, of up to twice the width, repeat the last draw, as those of
    # jacobi.py do.
    old = canvas.window(own.row, behind, 2 * width)
    last = judges.at(made.tokens, jnp.maximum(many - 1, 0))[:, None]
    draws = jnp.concatenate([made.tokens, jnp.tile(last, (1, width))], 1)
    order = jnp.arange(2 * width, dtype=jnp.int32)
    row = jnp.where(order < many[:, None], draws, last)
    logs = canvas.window(own.logprobs, behind, width)
    logs = jnp.where(made.there, made.logprobs, logs)
    # A place's token is the draw of the place before.
    same = row[:, : width - 1] == old[:, : width - 1]
    same = jnp.pad(same, ((0, 0), (1, 0)), constant_values=True)
    age = jnp.where(same, age, 0)
    up = lambda x: canvas.window(
      jnp.pad(x, ((0, 0), (0, width)) + ((0, 0),) * (x.ndim - 2)), count, width
    )
    there = lambda x: jnp.where(made.there, x, 0)
    places = many - count + self._options.headway
    return own._replace(
      row=canvas.placed(own.row, row, behind),
      logprobs=canvas.placed(own.logprobs, logs, behind),
      at=own.at + count,
      width=jnp.clip(places, 1, width),
      state=up(state),
      visits=up(there(own.visits + 1)),
      age=up(there(age)),
    )


class Made(NamedTuple):
  """What a call made, (B, W) each, z: (B, W, V).

  held: ids of the places. there: bool, in use. tokens: drawn behind them.
  final: bool, text from now on. logprobs: float32, of the tokens.
  """

  held: Any
  there: Any
  tokens: Any
  final: Any
  z: Any
  logprobs: Any

  def after(self):
    """Ids behind the places."""
    return self.tokens

  def record(self):
    """The fields of a trace.Trace."""
    none = jnp.full_like(self.held[:, :1], trace_lib.NOTHING)
    held = jnp.concatenate([self.held[:, 1:], none], 1)
    next_there = jnp.pad(self.there[:, 1:], ((0, 0), (0, 1)))
    before = jnp.where(next_there, held, trace_lib.NOTHING)
    sure = jax.nn.softmax(self.z.astype(jnp.float32), -1).max(-1)
    return before, self.tokens, self.final, sure, self.logprobs


def _change(before, after):
  """(B, W): |s' - s| / |s'|."""
  norm = lambda x: jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1))
  return norm(after - before) / jnp.maximum(norm(after), 1e-30)
