"""Continuous batching: many requests share the rows of one cache.

One compiled step serves all of them. It has a lane of one token for each row,
and a few lanes of `CHUNK` tokens for prompts: rows whose prompt is read decode,
while others are read chunk by chunk (SplitFuse; DeepSpeed-FastGen,
arXiv:2401.08671), and a row that ends is given to the next request. A request
has one lane: a prompt of n tokens takes n / `CHUNK` steps, however many there
are (decode.budget), and those that no prompt needs are computed empty.
Chunks begin at multiples of `CHUNK` tokens of a prompt, and what a lane
computes depends on nothing of the others. So on one device the numbers of a
request are bitwise the same, whatever comes with it, in whatever order and
place, in caches of as many slots (`generate`: as the longest prompt of a call
needs) and where a row's slots are read by that row alone: the decode kernels of
accelerators share tiles over rows (stream-K), and agree within rounding.

Cost: a step computes all its lanes, used or not, and returns to the host.
Legend: R rows of the cache, n lanes of prompts, F flagged tokens (R + n), V
vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.decode import cache as cache_lib
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.decode import transcript
from paraxis.models.mixers import packed as packed_lib
from paraxis.sharding.meter import compiling

CHUNK = 64  # tokens of a prompt that a lane reads in a step


class Request:
  """A prompt on its way. number: of the request, for its draws. row: of the
  cache, None: it waits. read: tokens of the prompt that are in the cache."""

  def __init__(self, number, ids, transcript):
    self.number, self.ids, self.transcript = number, ids, transcript
    self.row, self.read, self.steps, self.last = None, 0, 0, None

  def lane(self):
    """(row, tokens, position of the first), the next of the prompt, or the last
    new token."""
    if self.last is not None:
      made = len(self.transcript.tokens)
      return self.row, [self.last], len(self.ids) + made - 1
    return self.row, self.ids[self.read : self.read + CHUNK], self.read


class Scheduler:
  """Steps of one form, for requests of one model.

  A program is compiled per (rows, lanes, slots, filters).
  """

  def __init__(self, model, rows, lanes):
    """rows: R. lanes: of prompts."""
    self._model, self.rows, self.lanes = model, rows, lanes
    self.form = (
      packed_lib.Group(rows, 1),
      packed_lib.Group(lanes, CHUNK, own=False),
    )
    jit = compiling.jit_for(model.config.dtype)
    self._step = jit(self._run, static_argnames='form', donate_argnames='cache')
    self._evict = jit(
      functools.partial(cache_lib.evict, model), donate_argnums=0
    )
    self._empty = jit(model.init_cache, static_argnums=(0, 1))

  def _run(self, params, cache, packed, at_F, draws, values, form) -> tuple:
    """One step -> (next token_F, its logprob_F, sound_F, cache).

    at_F: int32, the last token of each lane. draws: (request_F, index_F).
    """
    x, flight = self._model.step(params, cache, packed, self.form)
    z = self._model.logits(params, x[at_F])[:, 0]
    sound = jnp.isfinite(z).all(-1)
    request_F, index_F = draws
    token, logprob = sampling.sample(z, form, values, request_F, index_F)
    widths = np.repeat(
      [g.width for g in self.form], [g.count for g in self.form]
    )
    keep = jnp.repeat(sound, widths, total_repeat_length=int(widths.sum()))
    cache = self._model.commit(cache, flight, self.form, keep[:, None])
    return token, logprob, sound, cache

  def serve(
    self, params, requests, slots, form, values, on_text=None, on_end=None
  ):
    """Runs requests, in their order, until all have ended.

    Args:
      params: as `model.unstack` gives them. requests: [Request].
      slots: of a row, as many as any request needs.
      form, values: as sampling.check returns them.
      on_text: called as on_text(number, piece) with new text.
      on_end: called as on_end(request) when it has ended.

    Returns:
      steps of the model.

    Raises:
      IntegrityError: logits of a request are not finite; others go on until
        they have ended.
    """
    cache = self._empty(self.rows, step.slots(max(slots, CHUNK)))
    waiting, active, bad, steps = list(requests), [], [], 0
    while waiting or active:
      cache = self._admit(cache, waiting, active)
      lanes, flagged = self._lanes(active)
      packed = step.pack(self.form, self.rows, lanes)
      found = self._step(
        params, cache, packed, *_flags(self.form, lanes, flagged),
        values, form=form,
      )  # fmt: skip
      cache, steps = found[-1], steps + 1
      tokens, logprobs, sound = jax.device_get(found[:-1])
      bad += _take(flagged, lanes, tokens, logprobs, sound, on_text)
      for request in active:
        if on_end and request.transcript.finish not in ('', 'broken'):
          on_end(request)
      active[:] = [r for r in active if not r.transcript.finish]
    transcript.check_sound(bad, len(requests), 'request')
    return steps

  def _admit(self, cache, waiting, active):
    """Gives free rows to those that wait, first come first served."""
    free = sorted(set(range(self.rows)) - {r.row for r in active})
    new = np.zeros(self.rows, bool)
    for row in free[: len(waiting)]:
      request = waiting.pop(0)
      request.row, new[row] = row, True
      active.append(request)
    return self._evict(cache, new) if new.any() else cache

  def _lanes(self, active):
    """(what each lane holds, the Request of each): tokens first, then prompts
    as far as there are lanes."""
    lanes, flagged = [None] * (self.rows + self.lanes), {}
    place = self.rows
    for request in active:
      i = request.row
      if request.last is None:
        if place == len(lanes):
          continue
        i, place = place, place + 1
      lanes[i], flagged[i] = request.lane(), request
    return lanes, flagged


def _flags(form, lanes, flagged):
  """(index of the last token of each lane; (requests, indices) of draws)."""
  widths = np.repeat([g.width for g in form], [g.count for g in form])
  starts = np.cumsum(widths) - widths
  used = np.array([len(lane[1]) if lane else 1 for lane in lanes])
  draws = np.zeros((2, len(lanes)), np.uint32)
  for i, request in flagged.items():
    draws[:, i] = request.number, len(request.transcript.tokens)
  return (starts + used - 1).astype(np.int32), tuple(draws)


def _take(flagged, lanes, tokens, logprobs, sound, on_text):
  """Gives the requests their tokens; -> [(number of the token, request)] of
  those whose logits are not finite."""
  bad = []
  for i, request in flagged.items():
    row = request.transcript
    request.steps += request.last is not None
    if not sound[i]:
      bad.append((len(row.tokens), request.number))
      row.finish = 'broken'
    else:
      if request.last is None:
        request.read += len(lanes[i][1])
        if request.read < len(request.ids):
          continue
      request.last = int(tokens[i])
      row.extend([request.last], [logprobs[i]])
    if on_text and (piece := row.fresh()):
      on_text(request.number, piece)
  return bad
