"""Which tensors of a file a parameter is made of, for every family.

`table` has one `Leaf` for every slice of every parameter. A leaf with no names
has no tensor (counts of experts): it is zeros in our tree. Several leaves may
read one tensor (queries, keys and values in one matrix): `put` writes the part
that a leaf has into the whole tensor.

Legend: D model, N heads, K kv heads, H head width, F hidden width, E experts.
"""

from collections.abc import Callable
import functools
import math
import re
from typing import Any, NamedTuple

import numpy as np

from paraxis.configs.base import errors
from paraxis.configs.base import mixers
from paraxis.models import layer as layer_lib
from paraxis.models.huggingface import hybrid_parts
from paraxis.models.huggingface import parts
from paraxis.models.huggingface import transforms
from paraxis.models.huggingface.families import known

# Buffers that files have beside the parameters; those of xIELU are constants.
BUFFERS = (
  '.act_fn.beta', '.act_fn.eps',
  'rotary_emb.inv_freq', '.attn.bias', '.attn.masked_bias',
  '.attention.bias', '.attention.masked_bias', '.position_ids',
)  # fmt: skip
_LATER = re.compile(r'(model\.)?mtp[._]')
# How many layers behind the last one predict later tokens, in config.json.
_LATER_LAYERS = 'num_nextn_predict_layers', 'num_mtp_layers'
# Of models that tie them, beside the embedding: Source.check_head compares.
HEADS = ('lm_head.weight', 'embed_out.weight', 'output_projection.weight')


class Leaf(NamedTuple):
  """A slice of a parameter, and its tensors.

  path: of the parameter, as models.decoder.Decoder.init names it.
  layer: index on its leading stacked axis; None: it is not stacked.
  names: of the tensors it is made of, before any lookup of shards.
  ours: (*whole tensors) -> the slice. theirs: the slice -> a tuple of tensors,
    or, where `cuts` has a transforms.Cut, of the part of the tensor (`put`).
  cuts: transforms.Cut of each name, or None: the whole tensor.
  """

  path: str
  layer: int | None
  names: tuple[str, ...]
  ours: Callable[..., np.ndarray]
  theirs: Callable[[Any], tuple[np.ndarray, ...]]
  cuts: tuple[transforms.Cut | None, ...]


def table(model, model_type: str, most: float = math.inf) -> list[Leaf]:
  """Every leaf of a schema.Model as files of a `model_type` store it.

  most: names of tensors; a UserError says that there are more of them, after
  the layer that has too many, or that there is no such model_type.
  """
  family = known.find(model_type)
  out = [_leaf(row.path, None, row) for row in parts.ends(model, family.names)]
  seen: dict[str, int] = {}
  kinds, names = layer_lib.kinds_of(model)[1], 0
  users: list[int] = []  # layers that share blocks
  for kind, at in zip(kinds, parts.places(kinds, family), strict=True):
    users += [at[0]] if mixers.TABLE[kind[0]].shares else []
    for row in parts.layer(model, kind, at, family, users):
      path = f'layers/{row.path}'
      index = seen[path] = seen.get(path, -1) + 1
      out.append(_leaf(path, index, row))
      names += len(row.names)
    if names > most:
      raise errors.UserError(
        f'config.json asks for {names} tensors in a part of its '
        f'{len(kinds)} layers, which is above {most}.'
      )
  return out


def _leaf(path, index, row):
  """row: parts.Row."""
  return Leaf(
    path, index, row.names, functools.partial(_ours, row),
    functools.partial(_theirs, row), (row.cut,) * len(row.names),
  )  # fmt: skip


def _ours(row, *tensors):
  if not tensors:
    return np.zeros(row.shape, np.float32)
  if row.cut is not None:
    tensors = map(row.cut.read, tensors)
  each = [row.change.ours(np.asarray(t)) for t in tensors]
  return each[0] if row.stack is None else np.stack(each, row.stack)


def _theirs(row, array):
  if not row.names:
    return ()
  each = [array] if row.stack is None else np.moveaxis(array, row.stack, 0)
  return tuple(np.ascontiguousarray(row.change.theirs(a)) for a in each)


def put(tensors: dict[str, np.ndarray], leaf: Leaf, array) -> None:
  """Writes what a leaf has of its tensors into {name: whole tensor}.

  A tensor that several leaves share is whole after the last of them.
  """
  for name, part, cut in zip(
    leaf.names, leaf.theirs(array), leaf.cuts, strict=True
  ):
    if cut is None:
      tensors[name] = part
      continue
    if name not in tensors:
      tensors[name] = np.empty(cut.shape, part.dtype)
    cut.write(tensors[name], part)


def ignored(name: str, model=None) -> bool:
  """Is a tensor of a file none that a parameter wants, and rightly so?

  Buffers of positions and masks; with a schema.Model that ties its head to the
  embedding, a copy of the head; of a block that layers share, a copy.
  """
  if name.endswith(BUFFERS):
    return True
  if model is None:
    return False
  tied = model.tied_embedding and name in HEADS
  return tied or hybrid_parts.is_copy(name, model)


def is_later(name: str, config: dict[str, Any]) -> bool:
  """Is a tensor of layers that predict tokens behind the next one?

  They draft for the model and change none of its numbers; transformers passes
  them over, too. config: of config.json, which has been read as a model.
  """
  if _LATER.match(name):
    return True
  at, behind = known.find(config['model_type']).names['layer'].split('{}')
  found = re.match(rf'{re.escape(at)}(\d+){re.escape(behind)}\.', name)
  first = config.get('num_hidden_layers')  # some have a pattern instead
  if not found or first is None:
    return False
  counts = [config.get(field) for field in _LATER_LAYERS]
  count = next((n for n in counts if type(n) is int), 0)
  return first <= int(found[1]) < first + count
