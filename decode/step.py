"""Steps of the model over a cache of requests: whole prompts, or next tokens.

A row of the cache is a request, and token t of it is in slot t, whatever other
rows hold (models/mixers/packed.py). Here every row has one lane: of its prompt,
right-padded, or of its next token. A row that has ended has padding. A row's
numbers do not depend on other rows.

Legend: B rows, T prompt tokens (padded), S cache slots, D model, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.models.mixers import packed as packed_lib
from paraxis.sharding import annotate


def place(ids, length, mesh):
  """Prompts on a mesh whose rules are in force, with as few empty rows behind
  them as make the batch shards divide B.

  Args:
    ids: lists of at most `length` token ids.

  Returns:
    (tokens_BT, 0 behind each prompt; lengths_B), int32.
  """
  shards = annotate.shards('batch')
  rows = -(-len(ids) // shards) * shards
  tokens, lengths = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
  for i, row in enumerate(ids):
    tokens[i, : len(row)], lengths[i] = row, len(row)
  return put(tokens, mesh), put(lengths, mesh)


def slots(count):
  """The least slots of a row, at least `count`, that their shards divide."""
  shards = annotate.shards('slots')
  return -(-count // shards) * shards


def put(x, mesh):
  """x (B, ...) with its rows sharded by the rules in force."""
  spec = annotate.spec(('batch',) + (None,) * (x.ndim - 1), x.shape)
  return jax.device_put(x, jax.NamedSharding(mesh, spec))


def rows(tokens_BC, lengths_B, first_B: Any = 0):
  """packed.Packed of an own group: a lane of consecutive tokens a row.

  Args:
    tokens_BC: int32, valid ids everywhere.
    lengths_B: int32, tokens of each lane; the rest is padding.
    first_B: position of each lane's first token.
  """
  count, width = tokens_BC.shape
  order = jnp.arange(width, dtype=jnp.int32)
  here = order < lengths_B[:, None]
  row = jnp.arange(count, dtype=jnp.int32)[:, None]
  first = jnp.broadcast_to(jnp.asarray(first_B, jnp.int32), (count,))[:, None]
  fields = (
    tokens_BC,
    jnp.where(here, row, count),
    jnp.where(here, first + order, 0),
  )
  return packed_lib.Packed(
    *(annotate.put(x.astype(jnp.int32), ('batch', None)) for x in fields)
  )


def pack(form, rows, lanes):
  """packed.Packed, as NumPy arrays, of what each lane holds.

  Args:
    form: packed.Form. rows: R, of the cache.
    lanes: one entry for each lane of all groups: None, or (request, tokens,
      position of the first); with trees a dict of packed.TREE as a fourth, of
      lists as long as the tokens, and `position` among them if they are not
      consecutive.

  Raises:
    UserError: a lane that is too short, or whose row has another lane.
  """
  widths = [(group, row) for group in form for row in range(group.count)]
  trees = any(g.tree for g in form)
  names = packed_lib.Packed._fields[: 7 if trees else 3]
  out = {name: [] for name in names}
  taken = [lane[0] for lane in lanes if lane]
  if len(lanes) != len(widths) or len(set(taken)) < len(taken):
    raise errors.UserError(
      f'{len(lanes)} lanes for the requests {taken}: the form has '
      f'{len(widths)}, and a request has one at most.'
    )
  for i, ((group, own), lane) in enumerate(zip(widths, lanes, strict=True)):
    request, tokens, first, *more = lane or (rows, (), 0)
    n, width = len(tokens), group.width
    if n > width or (group.own and lane and request != own):
      raise errors.UserError(
        f'lane {i}: {n} tokens of request {request}; it has {width} tokens'
        + (f' and is row {own}.' if group.own else '.')
      )
    place = np.arange(first, first + n)
    row = dict(
      token=tokens, request=[request] * n, position=place, order=place,
      group=[0] * n, node=[0] * n, ancestors=[1] * n,
    ) | (more[0] if more else {})  # fmt: skip
    for name in names:
      fill = rows if name == 'request' else 0
      out[name].append([*row[name], *[fill] * (width - n)])
  flat = {
    name: np.concatenate([np.ravel(x) for x in each]).astype(np.int32)
    for name, each in out.items()
    if name != 'ancestors'
  }
  if trees:
    flat['ancestors'] = _nodes([x for each in out['ancestors'] for x in each])
  shape = (form[0].count, form[0].width) if len(form) == 1 else (-1, 1)
  flat = {k: x.reshape(*shape, *x.shape[1:]) for k, x in flat.items()}
  return packed_lib.Packed(**flat)


def _nodes(sets):
  """packed.words_of sets of nodes: numbers of any size, bit i: node i."""
  size = max(int(x).bit_length() for x in sets)
  bits = [[int(x) >> i & 1 for i in range(size)] for x in sets]
  return packed_lib.words_of(np.array(bits, bool))


def prefill(model, params, tokens_BT, lengths_B, slots, begin=None):
  """Features of the prompts, and a cache that holds them.

  Args:
    model: models.decoder.Decoder.
    params: as `model.unstack` gives them.
    tokens_BT: int32, valid ids everywhere.
    lengths_B: int32, tokens of each row; 0: an empty row.
    slots: S >= T, tokens that a row of the cache has room for.
    begin: as for `Decoder.step`.

  Returns:
    (x_BTD, padded as the tokens; packed.Cache).
  """
  form = (packed_lib.Group(*tokens_BT.shape, fresh=True),)
  cache = model.init_cache(len(tokens_BT), slots)
  packed = rows(tokens_BT, lengths_B)
  x_BTD, flight = model.step(params, cache, packed, form, begin)
  every = packed.request < len(tokens_BT)
  return x_BTD, model.commit(cache, flight, form, every)


def last(x_BTD, lengths_B):
  """Features of the last token of every row: (B, 1, D); empty rows: 0."""
  order = jnp.arange(x_BTD.shape[1], dtype=jnp.int32)
  here = (order == lengths_B[:, None] - 1)[:, :, None]
  return jnp.sum(jnp.where(here, x_BTD, 0), 1, keepdims=True)


def drafted(count, tree):
  """packed.Form of the last token and its drafts in every row."""
  width, chain = tree.width + 1, tree.is_chain
  return (
    packed_lib.Group(count, width, each=chain and width > 1, tree=not chain),
  )


def extend(model, params, cache, token_B, drafts, live_B, tree, begin=None):
  """Features and logits after the last token of every row and each draft.

  Args:
    model, params: as for `prefill`.
    cache: packed.Cache, without these tokens.
    token_B: int32. drafts: judges.Drafts, an id below 0 is fed as 0.
    live_B: bool. tree: trees.Tree. begin: as for `Decoder.step`.

  Returns:
    (x (B, C + 1, D), z (B, C + 1, V), packed.Flight of the form `drafted`).
  """
  tokens = jnp.concatenate([token_B[:, None], drafts.tokens], 1)
  tokens = jnp.maximum(tokens, 0)
  if tree.is_chain:
    there = drafts.valid.sum(1, dtype=jnp.int32)
    packed = rows(tokens, jnp.where(live_B, 1 + there, 0), cache.length)
  else:
    packed = _tree_rows(tokens, drafts.valid, live_B, cache.length, tree)
  form = drafted(len(tokens), tree)
  x, flight = model.step(params, cache, packed, form, begin)
  return x, model.logits(params, x), flight


def _tree_rows(tokens_BC, valid, live_B, length_B, tree):
  """packed.Packed of a lane a row: the last token and a tree of drafts."""
  here = jnp.concatenate([jnp.ones_like(valid[:, :1]), valid], 1)
  here &= live_B[:, None]
  count, width = tokens_BC.shape
  row = jnp.arange(count, dtype=jnp.int32)[:, None]
  place = jnp.where(here, length_B[:, None] + tree.depths(), 0)
  every = lambda x: jnp.broadcast_to(jnp.asarray(x), (count, *x.shape))
  fields = (
    tokens_BC,
    jnp.where(here, row, count),
    place,
    place,
    jnp.zeros_like(place),
    every(np.arange(width, dtype=np.int32)),
    every(tree.ancestors()),
  )
  names = lambda x: ('batch', *(None,) * (x.ndim - 1))
  return packed_lib.Packed(*(annotate.put(x, names(x)) for x in fields))


def advance(model, params, cache, token_B, live_B, say=None, together=1):
  """Feeds the next token of every row -> (logits_BV, cache).

  Args:
    model, params: as for `prefill`.
    cache: packed.Cache with a free slot in every row.
    token_B: int32. live_B: bool, False: an ended or empty row.
    say: (B, 1, D) features -> logits; None: the model's own.
    together: as for `Decoder.step`.

  A row whose logits are not finite keeps nothing.
  """
  form = (packed_lib.Group(len(token_B), 1),)
  packed = rows(token_B[:, None], live_B.astype(jnp.int32), cache.length)
  x_B1D, flight = model.step(params, cache, packed, form, together=together)
  logits = say(x_B1D) if say else model.logits(params, x_B1D)
  sound = annotate.put(jnp.isfinite(logits).all(-1), ('batch', None))
  return logits[:, 0], model.commit(cache, flight, form, sound)
