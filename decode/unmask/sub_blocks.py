"""Sub-blocks of a block, which are read alone: Fast-dLLM v2's cache in a block.

A canvas is a sub-block (unmask.sub_block). Its first call reads the whole block
over the cache of those before it, and puts keys and values of every token into
the block's slots, of the masks too; further calls read the sub-block alone, and
the slots of the others:

    call           tokens in flight   slots that they see
    first          the block          those before it
    further        the sub-block      those before it, the rest of the block
    without masks  the block          those before it, and is committed

What the others saw of the sub-block's masks is old when those become text, so
the cache is approximate within a block (arXiv:2509.26328, section 3.3), but for
models of one layer without mask_shift, whose keys depend on a token alone.
Between blocks it stays exact. With model.mask_shift a sub-block's first token
is drawn from features of the token before it, those of its first call.

A step is compiled twice, and is as narrow as a sub-block where no row of the
batch needs more: a row's numbers depend on others by rounding alone, which may
decide between two tokens that are as likely (in bfloat16, more often).
"""

import functools

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.decode import step
from paraxis.decode.unmask import canvas
from paraxis.models.mixers import packed as packed_lib
from paraxis.sharding import annotate


class SubBlocks(canvas.Unmask):
  """Calls of a masked model that read a sub-block.

  The canvas's `read`: (B,) int32, where the canvas began for which the block
  was read, -1: none; `edge`: (B, D), features of the token before that, or ().
  """

  def open(self, params, prompt, limit, room):
    cache, own = super().open(params, prompt, limit, room)
    # A lane as long as a block may begin at its last sub-block.
    spare = self.block - self.width
    row, logprobs = (
      jnp.pad(x, ((0, 0), (0, spare)), constant_values=fill)
      for x, fill in ((own.row, self._mask), (own.logprobs, 0))
    )
    none = jnp.full_like(own.at, -1)
    return cache, own._replace(
      row=annotate.put(row, canvas.ROWS),
      logprobs=annotate.put(logprobs, canvas.ROWS),
      read=none, edge=own.before,
    )  # fmt: skip

  def _passed(self, params, state, at, masks, live):
    own = state.own
    whole = live & (~masks.any(1) | (own.read != at))
    # Only reads of the cache: XLA would copy what a branch writes.
    run = lambda width: functools.partial(self._lanes, params, width)
    x, last, sound, layers = jax.lax.cond(
      whole.any(), run(self.block), run(self.width), state, at, whole, live
    )
    place = own.at[:, None] + jnp.arange(self.block, dtype=jnp.int32)
    there = whole[:, None] & (place < own.end[:, None])
    ids = canvas.window(own.row, own.at, self.block)
    packed = step.rows(ids, there.sum(1, dtype=jnp.int32), own.at)
    flight = packed_lib.Flight(packed, layers)
    cache = self._reads(state, whole)
    cache = self._model.commit(
      cache, flight, self._form(own), there & sound[:, None]
    )
    own = own._replace(read=jnp.where(whole, at, own.read))

    def settle(moves):
      if not self._shift:
        return cache, own
      before = jnp.where(moves[:, None], last, own.before)
      return cache, own._replace(before=before, edge=x[:, 0])

    return x, sound, settle

  def _reads(self, state, whole):
    """The cache up to a block, or to its end for what reads a sub-block."""
    own = state.own
    end = jnp.minimum(own.at + self.block, own.end)
    return state.cache._replace(length=jnp.where(whole, own.at, end))

  def _lanes(self, params, width, state, at, whole, live):
    """(x as of `_passed`, features (B, D) of the last token, sound, layers of a
    packed.Flight as of lanes of a block).

    Args:
      width: static, of lanes; a sub-block's if no row is read as a whole.
      whole: (B,) bool, rows whose lane is the block.
    """
    own = state.own
    begin = jnp.where(whole, own.at, at)
    size = jnp.where(whole, self.block, self.width)
    count = jnp.where(live, jnp.clip(own.end - begin, 0, size), 0)
    packed = step.rows(canvas.window(own.row, begin, width), count, begin)
    there = packed.request < len(at)
    hole = jnp.where(whole, 0, at), jnp.where(whole, 0, at + self.width)
    packed = packed._replace(
      hole=tuple(
        annotate.put(jnp.where(there, x[:, None], 0), canvas.ROWS) for x in hole
      )
    )
    form = (packed_lib.Group(len(at), width),)
    x, flight = self._model.step(
      params, self._reads(state, whole), packed, form
    )
    sound = (jnp.isfinite(x).all(-1) | ~there).all(1)
    before = own.before
    if self._shift:
      before = jnp.where(whole[:, None], before, own.edge)
    first = jnp.where(whole, at - own.at, 0)
    spare = self.block - width
    layers = jax.tree.map(
      lambda y: jnp.pad(y, [(0, 0), (0, spare)] + [(0, 0)] * (y.ndim - 2)),
      flight.layers,
    )
    return self._read(x, before, first), x[:, -1], sound, layers


def check(model, policy):
  """UserError if a block of the model has no such sub-blocks."""
  size, says = policy.sub_block, f'decode.unmask.sub_block={policy.sub_block}'
  if policy.sub_cache and not size:
    raise errors.UserError(
      'decode.unmask.sub_cache caches sub-blocks, and decode.unmask.sub_block '
      'is 0: name their length.'
    )
  if size and policy.score == 'filter':
    raise errors.UserError(
      f'{says}: filters (decode.unmask.score=filter) are trained on whole '
      'blocks: take another score, or leave sub_block out.'
    )
  if size and model.visibility != 'block':
    raise errors.UserError(
      f'{says} divides blocks of model.visibility=block, and this model has '
      f'visibility={model.visibility}: take decode.unmask.block={size}.'
    )
  if size and model.block % size:
    raise errors.UserError(f'{says} does not divide model.block={model.block}.')
