"""How many devices share an array, as the README says, and no rule of the code.

    axis      shards of parameters
    stage     layers and vocabulary
    tensor    heads, kv heads where it divides them, mlp, vocabulary
    fsdp      the width
    region    experts; fsdp their width, unless it is in the region

What an update rule keeps of a matrix, beside its moments, is shared by fsdp and
tensor; of an expert's by those of them that are not in the region.

With mesh.rules=auto tensor has the rows of learned positions, too.

ZeRO adds data: stage 1 to optimizer state and gradients, stage 3 to the width.
sharding/rules.py says the same; were it asked, a wrong rule would be its own
proof. Only sizes are compared: the layout itself is checked against the rules.
"""

import math

from paraxis.models.mixers import attention
from paraxis.sharding import mesh as mesh_lib

_TENSOR = ('heads', 'kv_heads', 'mlp', 'vocab')
# Preset -> the mesh axes that it shards parameters over.
_USED = {
  'replicated': (),
  'data': ('stage',),
  'fsdp': ('stage', 'fsdp'),
  'tensor': ('stage', 'tensor'),
  'fsdp_tensor': ('stage', 'fsdp', 'tensor'),
  'auto': ('stage', 'tensor'),
}


def axes(config):
  """{logical axis: mesh axes larger than 1} that shard parameters."""
  mesh = config.mesh
  preset, *changes = mesh.rules.split()
  used = _USED[preset]
  table: dict[str, tuple[str, ...]] = {
    name: ('tensor',) for name in _TENSOR if 'tensor' in used
  }
  if 'stage' in used:
    table |= {'layers': ('stage',), 'vocab': ('stage', *table.get('vocab', ()))}
  table['embed'] = ('fsdp',) if 'fsdp' in used else ()
  for change in changes:
    name, _, over = change.partition('=')
    table[name] = tuple(filter(None, over.split('+')))
  if mesh.zero == 3 and 'data' not in table['embed']:
    table['embed'] = (*table['embed'], 'data')
  large = {a for a in mesh_lib.AXES if getattr(mesh, a) > 1}
  region = config.model.experts.region.replace(' ', '').split('+')
  table['experts'] = tuple(region) if used else ()
  if preset == 'auto':  # another table, split by its rows
    table['positions'] = ('tensor',)
  table = {n: tuple(a for a in v if a in large) for n, v in table.items()}
  table['expert_embed'] = tuple(
    a for a in table['embed'] if a not in table['experts']
  )
  both = tuple(dict.fromkeys(table['embed'] + table.get('mlp', ())))
  table['statistics'] = both
  table['expert_statistics'] = tuple(
    a for a in both if a not in table['experts']
  )
  shards = math.prod(getattr(mesh, a) for a in table.get('kv_heads', ()))
  divided = attention.num_kv_heads(config.model) % shards == 0
  if not divided or table.get('kv_heads') != table.get('heads'):
    table['kv_heads'] = ()
  return table


def elements(names, shape, config, zero):
  """Elements of an array that one device holds.

  Args:
    names: logical axis, or None, of each dimension. shape: of the whole array.
    config: schema.Config, its mesh the one in use.
    zero: ZeRO stage from which data shares the array; math.inf: never.
  """
  table, mesh = axes(config), config.mesh
  over = [table.get(name, ()) for name in names]
  shards = [math.prod(getattr(mesh, a) for a in used) for used in over]
  count = math.prod(shape) // math.prod(shards)
  # Once more over data, on any dimension that it divides but the depth.
  fits = any(
    'stage' not in used and size % (mesh.data * n) == 0
    for used, size, n in zip(over, shape, shards, strict=True)
  )
  shared = mesh.zero >= zero and not any('data' in used for used in over)
  return count // mesh.data if shared and fits else count
