"""Shrinks a configuration and its mesh until a laptop can certify them.

The structure is kept: layer pattern, mesh axes in use, query heads per kv head
and whether kv heads are fewer than their shards, norms, biases, positions,
windows shorter than a row, tied tables, optimizer, layout. The sizes shrink:
widths, depth, vocabulary, length, batch, and the mesh to the available devices.
Every small size is a multiple of the devices, so that it divides wherever the
full one does; `check_fits` checks the full one first.
"""

import dataclasses
import math

import jax

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers
from paraxis.models import depth
from paraxis.models import layer
from paraxis.models.mixers import attention
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.train import program

# What a note adds where a smaller size is not all.
NOTES = {
  'model.experts.capacity_factor': ' (slots for the same share of the tokens)',
}


def mesh(sizes, devices):
  """Mesh axis -> size on at most `devices` devices, the same axes used.

  Args:
    sizes: axis -> size, all positive.
    devices: number of devices.

  Raises:
    UserError: the axes in use need more devices, even at their smallest.
  """
  if math.prod(sizes.values()) <= devices:
    return dict(sizes)
  factor = lambda n: next(p for p in range(2, n + 1) if n % p == 0)
  small = {a: factor(n) if n > 1 else 1 for a, n in sizes.items()}
  if math.prod(small.values()) > devices:
    raise errors.UserError(
      f'mesh {mesh_lib.describe(sizes)} uses '
      f'{sum(n > 1 for n in sizes.values())} axes, at their smallest '
      f'{mesh_lib.describe(small)}: {math.prod(small.values())} devices, there '
      f'are {devices}; --devices={math.prod(small.values())} gives them.'
    )
  while True:
    grow = [
      a
      for a, n in small.items()
      if sizes[a] % (2 * n) == 0 and 2 * math.prod(small.values()) <= devices
    ]
    if not grow:
      return small
    # The smallest axis first; among equals the last one, tensor.
    a = min(reversed(grow), key=lambda a: small[a])
    small[a] *= 2


def check_fits(config, sizes):
  """UserError, as of `paraxis train`, if the full config cannot run.

  It is traced from shapes, on a mesh without devices. float64 is on where the
  config names it: whether the environment has it is no matter of the layout.

  Args:
    config: schema.Config, as the user gave it.
    sizes: mesh axis -> size, as the user gave it.
  """
  mesh = dataclasses.replace(config.mesh, **sizes)
  full = dataclasses.replace(config, mesh=mesh)
  named = (config.model.dtype, config.model.param_dtype)
  on = jax.dtypes.canonicalize_dtype('float64') == 'float64'
  with jax.enable_x64(on or 'float64' in named):
    program.of_shapes(full, abstract=True)


def _up(value, multiple):
  return -(-value // multiple) * multiple


def _size(full, target, multiple):
  """The full size if it is small and a multiple, else about `target`."""
  fits = full <= target and full % multiple == 0
  return full if fits else _up(target, multiple)


def _length(full, devices):
  """Tokens of a row; of half a row too, if rows are cut, any order fits."""
  whole = 4 if full.train.shape_cycle else 2
  return _size(full.data.sequence_length, 64, whole * devices)


def _heads(full, model, sizes, asked):
  """(query heads, kv heads): fewer, in the same ratio and the same relation."""
  n, k = model.num_heads, attention.num_kv_heads(model)
  shards = lambda sizes: math.prod(
    sizes.get(a, 1) for a in rules_lib.of(full.mesh, {}, k).axes('heads')
  )
  need = shards(sizes)
  if full.mesh.context_form in ('ulysses', 'usp'):
    need *= sizes.get('context', 1)
  whole = k % shards(asked) == 0
  few = min(n, 4), min(k, 2)  # one head would hide many mistakes
  for f in range(math.gcd(n, k), 1, -1):
    heads, kv_heads = n // f, k // f
    fits = n % f == k % f == heads % need == 0
    same = (kv_heads % shards(sizes) == 0) == whole
    if fits and same and (heads, kv_heads) >= few and kv_heads >= few[1]:
      return heads, kv_heads
  return n, k


def _parts(full, sizes):
  """Runs of layers: stages x chunks; 1 without stages."""
  return sizes['stage'] * full.pipeline.chunks if sizes['stage'] > 1 else 1


def _microbatches(full, sizes, asked):
  """Microbatches of a pipeline: fewer than, equal to or more than its stages,
  as in the full configuration."""
  m, stages = full.pipeline.microbatches, sizes['stage']
  if asked['stage'] == 1:
    return min(m, 2)  # accumulation slices, like train.microbatches
  if m in (0, asked['stage']):
    return min(m, stages)
  return 2 * stages if m > asked['stage'] else min(m, max(stages - 1, 1))


def _model(full, sizes, asked):
  model, devices = full.model, math.prod(sizes.values())
  length = _length(full, devices)
  heads, kv_heads = _heads(full, model, sizes, asked)
  shorter = lambda size: (  # than a row, if it is
    min(size, 3 * length // 8) if size < full.data.sequence_length else size
  )
  first, vocab = model.position_offset, _size(model.vocab_size, 64, devices)
  core, layers = _recurrence(model)
  few = min(
    model.num_layers, _depth(model, _parts(full, asked), _parts(full, sizes))
  )
  few = _up(max(few, layers), model.group_layers)
  small = dataclasses.replace(
    model,
    vocab_size=vocab,
    mask_id=min(model.mask_id, vocab - 1),
    block=min(shorter(model.block), length),
    d_model=_size(model.d_model, 32, devices),
    num_layers=few,
    groups=few // model.group_layers if model.groups else 0,
    recurrence=core,
    num_heads=heads,
    num_kv_heads=kv_heads if model.num_kv_heads else 0,
    head_dim=_head_dim(model),
    d_ff=_size(model.d_ff, 64, devices),
    window=shorter(model.window),
    attention_chunk=shorter(model.attention_chunk),
    max_positions=first + length if model.max_positions else 0,
    rope_original_length=_extended_at(model, length),
    rope_short_factors=_factors(model, model.rope_short_factors),
    rope_long_factors=_factors(model, model.rope_long_factors),
    attention_block=min(model.attention_block, 16),
    experts=_experts(model.experts, devices),
  )
  return schema.with_values(small, _mixers(model, devices))


def _recurrence(model):
  """(model.recurrence with few layers and passes, layers that it needs)."""
  own = model.recurrence
  if not own.core:
    return own, 0
  coda = model.num_layers - own.prelude - own.core
  small = dataclasses.replace(
    own,
    prelude=min(own.prelude, 1),
    core=min(own.core, 2),
    iterations=min(own.iterations, 3),
    gradients=min(own.gradients, 2),
  )
  return small, small.prelude + small.core + min(coda, 1)


def _depth(model, asked, parts):
  """Few layers, which chunks share out as they do the full depth."""
  unit, kinds = layer.kinds_of(model)
  if depth.repeats(kinds, asked, len(unit)):
    # Uneven if the full depth is; two units to scan over where stages allow.
    uneven = model.num_layers % (len(unit) * asked) > 0
    return len(unit) * max(parts, 2) + uneven
  # Layers of every kind, and then one more a chunk.
  return 1 + max(kinds.index(kind) for kind in set(kinds)) + parts


def _head_dim(model):
  """4, or the least width of which the rotated part is whole pairs."""
  if model.position != 'rope':
    return 3
  rotated = lambda h: int(h * model.rope_fraction + 1e-6)
  return next(
    (h for h in range(4, 65, 4) if rotated(h) and rotated(h) % 2 == 0), 64
  )


def _extended_at(model, length):
  """Within the small length where queries grow from there on."""
  least = min(model.rope_original_length, max(length // 4, 1))
  return least if model.query_growth else model.rope_original_length


def _factors(model, text):
  """Of LongRoPE, as many as a small head has pairs of columns that rotate."""
  pairs = int(_head_dim(model) * model.rope_fraction + 1e-6) // 2
  return ','.join(text.split(',')[:pairs])


def _mixers(model, devices):
  """{section: its small form} of the mixers in use, by their table rows."""
  few = lambda n, target: _size(n, target, devices) if n else 0
  sections = {}
  for letter in mixers.inside(mixers.of_pattern(model.pattern)[0]):
    kind = mixers.TABLE[letter]
    if kind.shrink:
      own = schema.value(model, kind.section)
      small = dataclasses.replace(own, **kind.shrink(model, few))
      sections[kind.section] = small
  return sections


def _expert_order(mesh, model):
  """mesh.expert_order of fewer experts, or more, in the same relation."""
  if not mesh.expert_order:
    return ''
  count = model.experts.count
  kept = [int(e) for e in mesh.expert_order.split(',') if int(e) < count]
  return ','.join(map(str, [*kept, *range(len(kept), count)]))


def _experts(experts, devices):
  """Few experts, and of those some hot, if any are; each with slots for the
  same share of the tokens, so that what drops nothing still does not."""
  if not experts.count:
    return experts
  # Those of the groups that a token chooses from are enough for it.
  chosen = -(-experts.top_k // experts.top_groups) * experts.groups
  few = max(16, 2 * experts.top_k, chosen)
  count = _size(experts.count, few, math.lcm(devices, experts.groups))
  return dataclasses.replace(
    experts,
    count=count,
    capacity_factor=experts.capacity_factor * count / experts.count,
    d_ff=min(experts.d_ff, 32),
    hot=min(experts.hot, max(count // 4, 1)),
  )


def config(full, sizes, asked, dtype):
  """The small schema.Config, on a mesh of `sizes`.

  Args:
    full: schema.Config that passed `check_fits` for `asked`.
    sizes, asked: mesh axis -> size, small and as the user gave it.
    dtype: of the arithmetic, 'float64', 'float32' or 'bfloat16'; parameters
      are float64 or float32.
  """
  devices = math.prod(sizes.values())
  model = _model(full, sizes, asked)
  microbatches = min(full.train.microbatches, 2)
  stages = sizes['stage']
  in_pipeline = _microbatches(full, sizes, asked)
  shards = math.prod(sizes.get(a, 1) for a in ('replica', 'data', 'fsdp'))
  # Accumulation is compared with twice as many slices: they must divide too.
  least = 2 * (in_pipeline or stages) * shards
  rows, ramp = _up(max(2 * devices, 8), least), full.train.batch_ramp
  parts = microbatches * (in_pipeline or stages)
  fewer = (parts - 1) // stages * stages or parts // 2
  start = rows // parts * fewer or rows // 2
  return dataclasses.replace(
    full,
    mesh=dataclasses.replace(
      full.mesh, **sizes, expert_order=_expert_order(full.mesh, model)
    ),
    model=dataclasses.replace(
      model,
      dtype=dtype,
      param_dtype='float64' if dtype == 'float64' else 'float32',
    ),
    data=dataclasses.replace(
      full.data,
      sequence_length=_length(full, devices),
    ),
    pipeline=dataclasses.replace(full.pipeline, microbatches=in_pipeline),
    train=dataclasses.replace(
      full.train,
      batch_size=rows,
      microbatches=microbatches,
      eval_batches=min(full.train.eval_batches, 1),
      batch_ramp=ramp and f'{start}:{start}:1',
      shape_cycle=full.train.shape_cycle and '1:1,2:1',
    ),
  )
