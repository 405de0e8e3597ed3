"""Continuous batching of any method: a row that ends is given to a request.

The programs are those of prompts that begin together (program.py). Prompts are
read whole, a few at a time, in rows of their own, which then take the places of
rows that have ended. Rows make tokens until one of them ends while a request
waits, or as many as the host asks for. A row's numbers depend on no other row,
and there is one program of each kind: so on one device the numbers of a request
are bitwise the same, whatever comes with it, in whatever order and place, if
the prompts are padded to the same length. Where a call takes as much work as
its rows need together they agree within rounding (sub-blocks of a canvas) or
within the tolerance (layers of kinds R and L).

scheduler.py, for one token a call, reads prompts in chunks while other rows
decode. Here the others wait for that: a tree or a chain beside chunks would be
a form, and a program, for each method.

Cost: a call computes all rows, used or not. An admission reads all n lanes,
used or not, holds a cache of n rows besides, and copies that of R. Where rows
are sharded n is R, so that no row moves between devices.
Legend: R rows, n lanes of prompts, T prompt tokens (padded).
"""

import functools
import math
from typing import NamedTuple

import jax
import numpy as np

from paraxis.decode import program
from paraxis.decode import step
from paraxis.decode import transcript
from paraxis.models.mixers import protocol as mixer
from paraxis.sharding import annotate


class Sizes(NamedTuple):
  """rows: R. budget: tokens of prompts that are read at once. length: T. limit:
  new tokens of a request. chunk: of a row between two looks of the host.
  shards: of rows, on the mesh."""

  rows: int
  budget: int
  length: int
  limit: int
  chunk: int
  shards: int = 1

  @property
  def lanes(self):
    """n, at least one."""
    if self.shards > 1:
      return self.rows
    return min(max(self.budget // self.length, 1), self.rows)


def unsharded(decode, split):
  """Why shared rows cannot be sharded as a mesh would, and what to do; '': they
  can, or no rows are shared.

  decode: schema.Decode. split: {mesh axis, larger than 1: size} of rows.
  """
  count, shards = decode.requests, math.prod(split.values())
  if not count or shards == 1:
    return ''
  if decode.method == 'autoregressive':  # scheduler.py
    return (
      f'decode.requests={count} rows are shared by all prompts, and '
      f'{" and ".join(split)} would shard them; use tensor'
    )
  if count % shards:
    return (
      f'decode.requests={count} rows on {shards} batch shards: take a multiple '
      f'of {shards}, or another mesh'
    )
  return ''


@functools.partial(jax.jit, donate_argnums=0)
def admit(state, fresh, index_R, new_R):
  """(program.DecodeState, what the host reads of it) with new rows.

  Args:
    state: of R rows, or None: all have ended. fresh: of n rows.
    index_R: int32, which of them row r is; None: n is R, row r.
    new_R: bool, where that holds; other rows stay.
  """
  if index_R is not None:
    of_R = functools.partial(_rows, index_R, len(fresh.done))
    fresh = jax.tree.map(of_R, fresh)
  if state is None:
    fresh = fresh._replace(done=fresh.done | ~new_R)
  else:
    pick = functools.partial(mixer.rows_where, new_R)
    fresh = jax.tree.map(pick, fresh, state)
  return fresh, program.for_host(fresh)


def _rows(index_R, n, x):
  """x[index_R], laid out as x, whose rows are not sharded: n, or several for
  each of n (models/streams.py)."""
  if copies := len(x) // n - 1:
    own = np.arange(copies + 1, dtype=np.int32)
    index_R = (index_R[:, None] * (copies + 1) + own).reshape(-1)
  if annotate.mode() == 'explicit' and annotate.sizes():
    return x.at[index_R].get(out_sharding=jax.typeof(x).sharding)
  return x[index_R]


class Served:
  """Requests that wait, and the rows of those that are decoded."""

  def __init__(self, requests, sizes, hooks):
    """As for `serve`."""
    self._ids, self._rows = requests
    self.waiting = list(range(len(self._ids)))
    self._sizes, self._hooks, self._bad = sizes, hooks, []
    self._held = [None] * sizes.rows  # number of the request of each row
    self._made = [0] * sizes.rows

  @property
  def free(self):
    """Rows without a request."""
    return [r for r, number in enumerate(self._held) if number is None]

  def next(self):
    """((tokens_nT, lengths_n, request_n), index_R, new_R) of requests, first
    come first served, that get a row."""
    sizes, lanes = self._sizes, self._sizes.lanes
    rows, shape = sizes.rows, (lanes, sizes.length)
    tokens, lengths = np.zeros(shape, np.int32), np.zeros(lanes, np.int32)
    numbers, index = np.zeros(lanes, np.uint32), np.zeros(rows, np.int32)
    new, aligned = np.zeros(rows, bool), lanes == rows
    for lane, row in enumerate(self.free[:lanes]):
      if not self.waiting:
        break
      number = self.waiting.pop(0)
      at = row if aligned else lane
      prompt = self._ids[number]
      tokens[at, : len(prompt)], lengths[at] = prompt, len(prompt)
      numbers[at], index[row], new[row] = number, at, True
      self._held[row], self._made[row] = number, 0
    return (tokens, lengths, numbers), None if aligned else index, new

  def until(self):
    """program.Until of what the host wants next."""
    more = np.array(self._made) + self._sizes.chunk
    limit = np.minimum(more, self._sizes.limit)
    ended = np.array([number is None for number in self._held])
    return limit.astype(np.int32), ended, np.bool_(bool(self.waiting))

  def take(self, seen):
    """Gives the requests their tokens, and frees the rows of those that end."""
    held, hooks = list(self._held), self._hooks
    of_row = lambda call: call and (lambda r, *rest: call(held[r], *rest))
    hooks = hooks._replace(
      on_text=of_row(hooks.on_text), ended=of_row(hooks.ended)
    )
    texts = [None if i is None else self._rows[i] for i in held]
    self._made, bad = transcript.read(seen, texts, self._made, hooks)
    self._bad += [(at, held[row]) for at, row in bad]
    for row, text in enumerate(texts):
      if text and text.finish:
        self._held[row] = None

  def check(self):
    """IntegrityError if logits of a request were not finite."""
    transcript.check_sound(self._bad, len(self._ids), 'request')


def serve(start, run, requests, sizes, hooks, mesh):
  """Runs requests, in their order, until all have ended.

  Args:
    start: prompt -> (state, seen), program.Program.begin of n rows.
    run: (state, program.Until) -> (state, seen), program.Program.loop.
    requests: ([token ids], [transcript.Transcript], which it fills).
    sizes: Sizes. hooks: transcript.Hooks. mesh: of the model.

  Raises:
    IntegrityError: logits of a request are not finite; others go on until they
      have ended.
  """
  served, state = Served(requests, sizes, hooks), None
  put = lambda x: step.put(x, mesh)
  while served.waiting or len(served.free) < sizes.rows:
    while served.waiting and served.free:
      prompt, index, new = served.next()
      prompt = tuple(map(put, prompt))
      # No name holds the new rows, so that their cache is freed.
      state, seen = admit(state, start(prompt)[0], index, put(new))
      served.take(jax.device_get(seen))
    if len(served.free) < sizes.rows:
      limit, ended, one = served.until()
      most = np.int32(sizes.limit)
      until = program.Until(put(limit), put(ended), one, most)
      state, seen = run(state, until)
      served.take(jax.device_get(seen))
  served.check()
