"""Requests of a cache: forgetting tokens, forking a request, merging some.

Keys and values stay where they are, out of every range, and are written over.
A recurrence has one state a row, which its newest token has changed: it goes
back only to a state of before, and forgets all where a request begins again.

A fork goes on from a request without a copy of its keys: it reads the slots of
the rows that hold them (packed.Reads), and writes behind them in its own row. A
merge reads what several requests read, whose tokens do not see each other. Who
is read keeps what is read: `rollback` and `evict` refuse the rest. With
`sharing`, the functions here look at the rows on the host: outside of jit.

No function moves slots: a token's slot is its position in every row, so the
kept path of a tree or a chain is in place, and there are no gaps to close. The
price is that the slots of a fork's row before `first` are not used. Nor are
there pages: every request has a row of as many slots as the longest may need,
so the cache holds R S tokens, however few the requests have.

Legend: R rows, P ranges of other rows that a request may read.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.models import layer
from paraxis.models.mixers import packed as packed_lib
from paraxis.models.mixers import protocol as mixer
from paraxis.sharding import annotate


class Range(NamedTuple):
  """Slots begin .. end - 1 of a row, which are those positions of a text."""

  row: int
  begin: int
  end: int


def sharing(cache, count):
  """`cache`, whose requests may each read `count` ranges of other rows, or so
  many more than they may now.

  A step then reads `count` rows more for every lane, used or not.

  Raises:
    UserError: rows are sharded.
  """
  if (shards := annotate.shards('batch')) > 1:
    raise errors.UserError(
      f'the mesh has {shards} shards of cache rows, and requests that read the '
      'rows of others need all of them on one device: take data=1 and fsdp=1.'
    )
  zeros = jnp.zeros((cache.length.shape[0], count), jnp.int32)
  zeros = annotate.put(zeros, packed_lib.IDS)
  first, each = jnp.zeros_like(cache.length), (zeros, zeros, zeros)
  if (old := cache.reads) is not None:
    _refuse_apart(cache, range(len(old.first)))
    first = old.first
    each = [jnp.concatenate([x, zeros], 1) for x in old[:3]]
  rows, begins, ends = each
  reads = packed_lib.Reads(rows, begins, ends, first)
  return cache._replace(reads=reads)


def rollback(model, cache, length_R, before=None):
  """`cache` with at most length_R tokens in each row.

  Args:
    model: models.decoder.Decoder. cache: packed.Cache.
    length_R: int32.
    before: an older `cache` of the same rows, outside of jit. Rows that go
      back take its recurrent states, and have length_R tokens in it.

  Raises:
    UserError: a layer keeps one state, and there is no `before`; a row goes
      back to another length than it has there; or another request reads what
      would be forgotten.
  """
  states = []
  back_R = None if before is None else _back(cache, length_R, before)
  for i, (kind, state) in enumerate(_states(model, cache)):
    memory, slots = _split(kind, state)
    if memory is not None:
      if before is None:
        raise errors.UserError(
          f'layer {i} (kind {kind[0]}) keeps one state a request, which its '
          'newest token has changed: a rollback needs the cache of before, or '
          'a step that keeps the state of each token (packed.Group.each).'
        )
      old, _ = _split(kind, before.states[i])
      pick = functools.partial(mixer.rows_where, back_R)
      memory = jax.tree.map(pick, old, memory)
    states.append(_joined(kind, memory, slots))
  length = jnp.minimum(cache.length, length_R)
  return _cut(cache._replace(states=tuple(states)), length)


def _back(cache, length_R, before):
  """(R,) bool, rows that go back; UserError if `before` is not as long."""
  back_R = length_R < cache.length
  for row in np.flatnonzero(back_R & (before.length != length_R)):
    raise errors.UserError(
      f'row {row} would go back to {length_R[row]} tokens, and the cache of '
      f'before has {before.length[row]} there: give that of {length_R[row]}.'
    )
  return back_R


def evict(model, cache, rows_R: jax.Array):
  """`cache` with rows_R (bool) free for requests that begin.

  Slots are not cleared. The state of a recurrence is: where a request begins
  kind C gives the values in it a weight of 0, which a number that is not finite
  survives; the others take zeros in its place.

  Raises:
    UserError: another request, which is not evicted, reads such a row.
  """
  clear = lambda x: mixer.rows_where(rows_R, jnp.zeros_like(x), x)
  states = []
  for kind, state in _states(model, cache):
    memory, slots = _split(kind, state)
    states.append(_joined(kind, jax.tree.map(clear, memory), slots))
  length = jnp.where(rows_R, 0, cache.length)
  return _cut(cache._replace(states=tuple(states)), length)


def _cut(cache, length_R):
  """`cache` with that length; UserError if others read what is behind it."""
  cache = cache._replace(length=length_R)
  if cache.reads is None:
    return cache
  # A fork that is shorter than what it shares must not see the rest of it.
  ends = jnp.minimum(cache.reads.ends, length_R[:, None])
  cache = cache._replace(
    reads=cache.reads._replace(
      begins=jnp.minimum(cache.reads.begins, ends), ends=ends,
      first=jnp.minimum(cache.reads.first, length_R),
    )
  )  # fmt: skip
  lengths = np.asarray(length_R)
  for request in range(len(lengths)):
    for row, begin, end in _foreign(cache, request):
      if end > lengths[row]:
        raise errors.UserError(
          f'row {row} would keep {lengths[row]} tokens, and request {request} '
          f'reads its slots {begin} .. {end - 1}: evict that first, or keep '
          f'{end}.'
        )
  return cache


def _refuse_apart(cache, requests):
  """UserError if one reads contexts apart (parallel_contexts.py)."""
  reads = cache.reads
  if reads is None or reads.apart is None:
    return
  which = np.asarray(reads.apart.which & (reads.ends > reads.begins))
  for request in requests:
    if which[request].any():
      raise errors.UserError(
        f'request {request} reads contexts apart from its own tokens, which '
        'other requests cannot share: fork or merge before it joins them.'
      )


def ranges(cache, request) -> list[Range]:
  """Where the committed tokens of a request are; its own row comes last."""
  first = 0 if cache.reads is None else int(cache.reads.first[request])
  own = Range(request, first, int(cache.length[request]))
  return _foreign(cache, request) + [own] * (own.end > own.begin)


def _foreign(cache, request):
  """[Range] of other rows that a request reads, without empty ones."""
  if cache.reads is None:
    return []
  each = (np.asarray(x[request]).tolist() for x in cache.reads[:3])
  return [
    Range(row, begin, end)
    for row, begin, end in zip(*each, strict=True)
    if end > begin
  ]


def fork(model, cache, src: int, dst: list[int]):
  """`cache` with requests dst (free rows) that go on from the request src.

  They share its committed tokens; recurrent states are copied. src may go on,
  be forked again, and forget what is behind this point.

  Raises:
    UserError: a row of dst is not free; or a request would read more ranges
      than `sharing` says.
  """
  _refuse_apart(cache, [src])
  states = []
  for kind, state in _states(model, cache):
    memory, slots = _split(kind, state)
    copy = lambda x: x.at[np.array(dst)].set(x[src])
    states.append(_joined(kind, jax.tree.map(copy, memory), slots))
  cache = cache._replace(states=tuple(states))
  slotted = any(
    layer.MIXERS[kind[0]].capabilities.slots for kind in model.pattern
  )
  found = ranges(cache, src) if slotted else []
  return _share(cache, dst, found, int(cache.length[src]))


def merge(model, cache, children: list[int], dst: int):
  """`cache` with a request dst (a free row) that reads all that children read.

  Its next position is behind the longest of them. A slot that several of them
  read is read once: their common prefix.

  Raises:
    UserError: a layer keeps one state a request; else as `fork`.
  """
  for i, (kind, state) in enumerate(_states(model, cache)):
    if _split(kind, state)[0] is not None:
      raise errors.UserError(
        f'layer {i} (kind {kind[0]}) keeps one state a request, and there is '
        f'none of {len(children)} requests together: only attention merges.'
      )
  _refuse_apart(cache, children)
  found: list[Range] = []
  for one in sorted(r for child in children for r in ranges(cache, child)):
    if found and found[-1].row == one.row and one.begin <= found[-1].end:
      last = found.pop()
      one = last._replace(end=max(last.end, one.end))
    found.append(one)
  end = max(int(cache.length[child]) for child in children)
  return _share(cache, [dst], found, end)


def _share(cache, rows, found, end):
  """`cache` with requests in free rows that read [Range], and go on at end."""
  room = 0 if cache.reads is None else cache.reads.rows.shape[1]
  if len(found) > room:
    raise errors.UserError(
      f'requests {rows} would read {len(found)} ranges of other rows, and the '
      f'cache has room for {room}: say so when it is made (cache.sharing).'
    )
  for row in rows:
    if held := int(cache.length[row]):
      raise errors.UserError(
        f'row {row} holds a request of {held} tokens: evict it first.'
      )
  at = np.array(rows)
  each = np.zeros((3, room), np.int32)
  each[:, : len(found)] = np.array(found, np.int32).reshape(-1, 3).T
  begin = lambda x: x.at[at].set(end)
  reads = cache.reads
  if reads is not None:
    reads = reads._replace(
      rows=reads.rows.at[at].set(each[0]),
      begins=reads.begins.at[at].set(each[1]),
      ends=reads.ends.at[at].set(each[2]),
      first=begin(reads.first),
    )
    if (apart := reads.apart) is not None:  # of whoever had the row
      apart = apart._replace(which=apart.which.at[at].set(False))
      reads = reads._replace(apart=apart)
  return cache._replace(length=begin(cache.length), reads=reads)


def recurrent(model, cache):
  """States of the layers that keep one a row."""
  return [_split(kind, state)[0] for kind, state in _states(model, cache)]


def after(model, before, cache, kept, n_B):
  """`cache` after the first n_b of several steps of one token.

  Args:
    before: packed.Cache before them; cache: after all.
    kept: `recurrent` after each of them, stacked.
    n_B: int32, steps that row b keeps.
  """
  states = []
  pairs = zip(_states(model, before), _states(model, cache), kept, strict=True)
  for (kind, old), (_, new), each in pairs:
    memory, _ = _split(kind, old)
    _, slots = _split(kind, new)
    leaves = jax.tree.leaves(each)
    for c in range(len(leaves[0]) if leaves else 0):
      memory = jax.tree.map(
        lambda x, y, c=c: mixer.rows_where(n_B > c, y[c], x), memory, each
      )
    states.append(_joined(kind, memory, slots))
  return cache._replace(states=tuple(states), length=before.length + n_B)


def _states(model, cache):
  return list(zip(model.stack.cached, cache.states, strict=True))


def _split(kind, state):
  """(what is of one size or None, slots or None)."""
  own = layer.MIXERS[kind[0]].capabilities
  if own.recurs:
    return state
  return (None, state) if own.slots else (state, None)


def _joined(kind, memory, slots):
  own = layer.MIXERS[kind[0]].capabilities
  if own.recurs:
    return memory, slots
  return slots if own.slots else memory
