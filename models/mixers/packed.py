"""Tokens of one step of decoding: whose they are, and what they may see.

A step reads the cache and writes nothing. Its tokens are in flight: keys,
values and states of theirs are returned, and a commit keeps any of them. So a
prompt, a part of one, the next token, a chain of drafts and a tree of them are
the same step. The slot of a token is its position: what is not kept was never
written, and the kept path of a tree is in place.

Requests share what they have in common: a request may read ranges of the rows
of others (`Reads`; decode/cache.py makes forks and merges of them).

A token sees the committed tokens of its request, and of those in flight the
ones of its own lane that

    order <= its own,  group in (0, its own),  bit `node` of its ancestors

allow, a window by positions. A form says what is compiled: groups of lanes. In
an `own` group lane i is row i of the cache, which is read in place; a lane of
another group says whose it is, and its row is copied out.

Legend: R rows of the cache (requests), n lanes, C tokens of a lane, T tokens, P
ranges of other rows that a request reads.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.sharding import annotate

IDS = ('batch', None)  # logical names of every array of `Ids`
FEW = 8  # tokens of a lane; of more, attention runs blockwise
TREE = ('order', 'group', 'node', 'ancestors')


class Group(NamedTuple):
  """Static: `count` lanes of `width` tokens.

  own: lane i is row i of the cache, for all rows. fresh: nothing of these
  requests is committed, and their positions begin at 0. each: recurrences
  return their state after every token, not after the last one alone. tree:
  `TREE` says what is seen; else a lane's positions are consecutive, its
  padding comes last, and a token sees those before it.
  """

  count: int
  width: int
  own: bool = True
  fresh: bool = False
  each: bool = False
  tree: bool = False


Form = tuple[Group, ...]


class Packed(NamedTuple):
  """The tokens: (n, C) each, if the form has one group; else (T, 1), its lanes
  one after the other.

  token: valid ids everywhere. request: row of the cache, R or more: padding.
  position: of the token in its request, its slot. order, group: int32; node:
  0, of no tree, or 1 .. 31; ancestors: uint32, bit i: sees node i; all four
  only for a form with trees. Ancestors of trees with more nodes are (n, C, W):
  W words, of which word w has those of nodes 32 w .. 32 w + 31. hole: (begin,
  end), int32 arrays: the lane sees none of its row's slots begin .. end - 1, as
  tokens in flight stand for them. None: there is none.
  """

  token: Any
  request: Any
  position: Any
  order: Any = None
  group: Any = None
  node: Any = None
  ancestors: Any = None
  hole: Any = None


class Apart(NamedTuple):
  """Ranges that a request reads with a softmax of their own.

    lse = log sum exp(scale q.k / temperature) over all of these keys

  and the other keys' softmax is joined to it as if this were weight temperature
  lse (APE, arXiv:2502.05431; decode/parallel_contexts.py).

  which: (R, P) bool. temperature, weight: (R,).
  """

  which: Any
  temperature: Any
  weight: Any


class Reads(NamedTuple):
  """Where the committed tokens of requests are, their own row apart.

  A request reads slots first .. length - 1 of its row, and of each of P others
  slots begins .. ends - 1 (none: both are 0). Slot s of any row has position s.

  rows, begins, ends: (R, P) int32. first: (R,) int32. apart: `Apart` or None.
  """

  rows: Any
  begins: Any
  ends: Any
  first: Any
  apart: Any = None


class Cache(NamedTuple):
  """What decoding remembers of its requests, one a row.

  states: one entry per layer, as its mixer keeps it. length: (R,) int32, where
  the committed tokens of a request end; they fill the slots of its row from 0
  on, but what its `Reads` (None: no request has any) says of other rows.
  """

  states: Any
  length: jax.Array
  reads: Any = None


class Flight(NamedTuple):
  """What a step leaves for a commit: its tokens, and of each layer."""

  packed: Packed
  layers: Any


class Ids(NamedTuple):
  """What a layer reads of every token; as `Packed`.

  valid: bool. row: of the cache, also of padding. length: where the committed
  tokens of its request end. begin: where they begin, None: at 0. reads: `Reads`
  of its request, laid out so, or None.
  """

  valid: Any
  position: Any
  row: Any
  length: Any
  order: Any = None
  group: Any = None
  node: Any = None
  ancestors: Any = None
  begin: Any = None
  reads: Any = None
  hole: Any = None


class Plan(NamedTuple):
  """A step's form and ids, as layers read them."""

  form: Form
  ids: Ids


def plan(
  form: Form, packed: Packed, length_R: jax.Array, reads: Any = None
) -> Plan:
  """Ids of the tokens, and UserError if the form cannot be run.

  Args:
    length_R, reads: of the cache.
  """
  rows, own = length_R.shape[0], len(form) == 1 and form[0].own
  _check(form, packed, rows)
  valid = packed.request < rows
  row = jnp.where(valid, packed.request, 0)
  if own:  # sharded as the rows of the cache are
    length = jnp.broadcast_to(length_R[:, None], valid.shape)
  else:
    length = length_R[row]
  tree = [getattr(packed, name) for name in TREE]
  ids = Ids(valid, packed.position, row, length, *tree, hole=packed.hole)
  if reads is not None:
    reads = jax.tree.map(lambda x: x[row], reads)
    ids = ids._replace(begin=reads.first, reads=reads)
  return Plan(form, ids)


def _check(form, packed, rows):
  says = f'a step of {len(form)} groups of lanes over {rows} cache rows'
  for group in form:
    if group.own and group.count != rows:
      raise errors.UserError(
        f'{says}: an own group has {group.count} lanes, it needs one a row.'
      )
  if annotate.shards('batch') > 1 and not (len(form) == 1 and form[0].own):
    raise errors.UserError(
      f'{says}: the mesh has {annotate.shards("batch")} shards of rows, and '
      'only lanes that are the rows, in order, can be sharded with them: take '
      'data=1 and fsdp=1, or one own group.'
    )
  size = sum(g.count * g.width for g in form)
  shape = (form[0].count, form[0].width) if len(form) == 1 else (size, 1)
  trees = any(g.tree for g in form)
  of = lambda name, x: x.shape[:2] if name == 'ancestors' else x.shape
  wrong = [
    f'{name} {getattr(x, "shape", None)}'
    for name, x in zip(packed._fields[:-1], packed[:-1], strict=True)
    if (x is None) != (name in TREE and not trees)
    or (x is not None and of(name, x) != shape)
  ]
  if wrong:
    raise errors.UserError(
      f'{says}: expected arrays {shape}, and {"" if trees else "no "}'
      f'{", ".join(TREE)}; given are {", ".join(wrong)}.'
    )


def words_of(sees):
  """uint32, bits of bool (.., nodes): (..) of 32 at most, else (.., words)."""
  spare = -sees.shape[-1] % 32
  bits = np.pad(sees, [(0, 0)] * (sees.ndim - 1) + [(0, spare)])
  bits = bits.reshape(*sees.shape[:-1], -1, 32).astype(np.uint32)
  words = (bits << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)
  return words[..., 0] if words.shape[-1] == 1 else words


def on_path(ids: Ids):
  """(n, C, C) bool: is the node of token j among the ancestors of token i?"""
  node = ids.node.astype(jnp.uint32)[:, None]
  if ids.ancestors.ndim == 2:
    return (ids.ancestors[:, :, None] >> node) & 1 == 1
  out = jnp.zeros((), bool)
  for w in range(ids.ancestors.shape[-1]):
    here = (ids.ancestors[:, :, w, None] >> (node & 31)) & 1 == 1
    out |= here & (node >> 5 == w)
  return out


def in_range(ids: Ids, slots):
  """(n, C, S) bool: is a slot (S,) of the range that the token reads?"""
  ok = slots < ids.length[..., None]
  if ids.begin is not None:
    ok &= slots >= ids.begin[..., None]
  if ids.hole:
    begin, end = (x[..., None] for x in ids.hole)
    ok &= (slots < begin) | (slots >= end)
  return ok


def lanes(form: Form, *trees):
  """[(Group, then of each tree its (n, C, ...) arrays of that group)].

  Args:
    trees: of arrays laid out as `Packed`, or None.
  """
  if len(form) == 1:
    return [(form[0], *trees)]
  out, at = [], 0
  for group in form:
    cut = functools.partial(_cut, at, group)
    out.append((group, *(jax.tree.map(cut, tree) for tree in trees)))
    at += group.count * group.width
  return out


def _cut(at, group, x):
  n, c = group.count, group.width
  return _reshape(x[at : at + n * c], n, c)


def join(form: Form, parts):
  """Arrays (n, C, ...) of the groups, laid out as `Packed`."""
  if len(form) == 1:
    return parts[0]
  return jnp.concatenate(
    [_reshape(x, x.shape[0] * x.shape[1], 1) for x in parts]
  )


def _reshape(x, n, c):
  """x, whose tokens no mesh axis shards, with its first dimensions (n, c)."""
  laid = None
  if annotate.mode() == 'explicit' and annotate.sizes():
    sharding = jax.typeof(x).sharding
    laid = sharding.update(spec=jax.P(None, None, *sharding.spec[2:]))
  return jax.lax.reshape(x, (n, c, *x.shape[2:]), out_sharding=laid)
