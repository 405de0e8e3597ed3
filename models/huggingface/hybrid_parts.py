"""Parameters of blocks that layers share, as parts.py has those of mixers.

A file has a block under the first layer that uses it, with what later layers
add to it. Legend: D model, N heads, K kv heads, H head width, F hidden width,
R rank.
"""

import re

from paraxis.configs.base import mixers
from paraxis.models import layer as layer_lib
from paraxis.models.ffn import mlp as mlp_lib
from paraxis.models.huggingface import parameter_row
from paraxis.models.huggingface import transforms
from paraxis.models.mixers import attention as attention_lib

row = parameter_row.row
_COPY = re.compile(r'model\.layers\.(\d+)\.shared_transformer\.')


def is_copy(name, model) -> bool:
  """Is a tensor a block as a layer has it that is not its first?"""
  found = _COPY.match(name)
  if not found:
    return False
  kinds = layer_lib.kinds_of(model)[1]
  users = [i for i, k in enumerate(kinds) if mixers.TABLE[k[0]].shares]
  return int(found[1]) in users[model.hybrid.blocks :]


def shared(model, at, users, names):
  """Rows of a layer beside its mixer; the block's own with its first user.

  Args:
    at: name of the layer. users: numbers of the layers up to this that share
    blocks.
  """
  own, d, use = model.hybrid, model.d_model, len(users) - 1
  home = names['layer'].format(users[use % own.blocks])
  home = f'{home}.{names["block"]}'
  out = [row('join', f'{at}.{names["join"]}.weight', transforms.matrix((d, d)))]
  if use < own.blocks:
    out += _block(model, home, names)
  if own.attention_rank:
    out += _attention_adapters(model, f'{home}.self_attn', use)
  if own.mlp_rank:
    out += _mlp_adapters(model, f'{home}.{names["mlp"]}', use)
  return out


def _heads(model):
  """{matrix: its heads}."""
  k = attention_lib.num_kv_heads(model)
  return dict(query=model.num_heads, key=k, value=k)


def _halves(model, inputs):
  """{matrix: the part of both that is its own}; inputs: their width."""
  f = model.hybrid.d_ff or model.d_ff
  names = ('up',) if model.hybrid.mlp in mlp_lib.PLAIN else ('gate', 'up')
  rows = len(names) * f
  cut = lambda i: transforms.Cut((rows, inputs), (len(names), f, inputs), (i,))
  return {name: cut(i) for i, name in enumerate(names)}, f


def _block(model, at, names):
  """Norms, attention of twice the width, mlp."""
  d, n, h = model.d_model, model.num_heads, model.head_width
  matrix, keep = transforms.matrix, transforms.kept
  norm = lambda name: f'{at}.{names[name]}.weight'
  out = [
    row('block/attention_norm/scale', norm('mixer_norm'), keep((2 * d,))),
    row('block/mlp_norm/scale', norm('mlp_norm'), keep((d,))),
  ]
  for what, heads in _heads(model).items():
    name = f'{at}.self_attn.{names[what]}.weight'
    out.append(row(f'block/attention/{what}', name, matrix((2 * d, heads, h))))
  name = f'{at}.self_attn.{names["output"]}.weight'
  out.append(row('block/attention/output', name, matrix((n, h, d), 2)))
  cuts, f = _halves(model, d)
  mlp = f'{at}.{names["mlp"]}'
  for what, cut in cuts.items():
    name = f'{mlp}.{names["gate_up"]}.weight'
    out.append(row(f'block/mlp/{what}', name, matrix((d, f)), cut))
  name = f'{mlp}.{names["down"]}.weight'
  return [*out, row('block/mlp/down', name, matrix((f, d)))]


def _attention_adapters(model, at, use):
  """An A and a B for queries, keys and values each."""
  d, r, h = model.d_model, model.hybrid.attention_rank, model.head_width
  matrix, out = transforms.matrix, []
  for what, heads in _heads(model).items():
    name = f'{at}.linear_{what[0]}_adapter_list.{use}'
    ours = f'block/attention/{what}_adapter'
    out.append(row(f'{ours}_a', f'{name}.0.weight', matrix((2 * d, r))))
    out.append(row(f'{ours}_b', f'{name}.1.weight', matrix((r, heads, h))))
  return out


def _mlp_adapters(model, at, use):
  """One A for gate and up, and a B for each."""
  d, r = model.d_model, model.hybrid.mlp_rank
  cuts, f = _halves(model, r)
  name = f'{at}.gate_up_proj_adapter_list.{use}'
  ours = f'block/mlp/{"_".join(cuts)}_adapter_a'
  out = [row(ours, f'{name}.0.weight', transforms.matrix((d, r)))]
  for what, cut in cuts.items():
    change = transforms.matrix((r, f))
    ours = f'block/mlp/{what}_adapter_b'
    out.append(row(ours, f'{name}.1.weight', change, cut))
  return out
