"""Which mesh axes carry which logical axis: the only place where they meet.

Models name logical axes; a `Rules` table maps each to a tuple of mesh axes.

    preset    name, perhaps with changes   -> Rules
    of        schema.Mesh and a model      -> Rules of a run (kv heads, ZeRO-3,
                                              sequence parallelism, experts)
    region    'context+tensor'             -> mesh axes that shard the experts
    spec      names of an array's axes     -> PartitionSpec
    stored    the same                     -> that of its gradient or optimizer
                                              state (ZeRO)

Parameters and activations use different names for the model width ('embed',
'hidden'), so that parameters are sharded over fsdp while activations keep their
batch sharded (ZeRO stage 3, arXiv:1910.02054). An axis that does not divide is
an error that names both numbers, and so is a mesh axis that no rule uses, which
would leave devices idle. Only kv heads may be fewer than their shards: then
every shard computes all of them.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math

from jax.sharding import PartitionSpec

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.sharding import mesh as mesh_lib

REPLICAS = 'replicas'
LOGICAL = {
  REPLICAS: 'copies that step alone (train/steps/replicas.py)',
  'twins': 'both sides of a direction (train/steps/zeroth_order.py)',
  'batch': 'rows of a step',
  'length': 'tokens of a row, inside a sublayer',
  'residual_length': 'tokens of a row, between sublayers and in norms',
  'slots': 'tokens of a row of a cache, while decoding',
  'slot_heads': 'query heads where they read slots; as heads, if not given',
  'hidden': 'width of activations',
  'embed': 'width of the model in parameters',
  'layers': 'depth',
  'heads': 'query heads',
  'kv_heads': 'key/value heads',
  'head_dim': 'width of a head',
  'mlp': 'hidden width of the mlp',
  'vocab': 'vocabulary',
  'norm': 'scales and biases of norms',
  'positions': 'rows of a learned position table',
  'experts': 'experts of a layer',
  'choices': 'experts as their router scores and counts them',
  'expert_embed': 'width of the model in matrices of experts',
  'expert_mlp': 'hidden width of an expert',
  'statistics': 'a side of what an update rule keeps of a matrix',
  'expert_statistics': 'the same of a matrix of an expert',
}

_BATCH = {
  REPLICAS: ('replica',),
  'batch': ('replica', 'data', 'fsdp'),
  'length': ('context',),
  'residual_length': ('context',),
}
# The vocabulary is sharded over stages like the depth: then all stages hold
# equal parts of the embedding and of the head (arXiv:2411.05288).
_STAGE = {'layers': ('stage',), 'vocab': ('stage',)}
_FSDP = {'embed': ('fsdp',)}
_TENSOR: dict[str, tuple[str, ...]] = {
  a: ('tensor',) for a in ('heads', 'kv_heads', 'mlp')
}
_TENSOR['vocab'] = ('stage', 'tensor')


@dataclasses.dataclass(frozen=True)
class Rules:
  """Logical axis -> mesh axes. Axes that the table lacks are not sharded.

  zero: ZeRO stage, what is also sharded over `data`: 1 optimizer state, 2 and
  the sums of gradients, 3 and parameters (these are then in the table).
  """

  name: str
  table: dict[str, tuple[str, ...]]
  zero: int = 0

  def axes(self, logical: str | None) -> tuple[str, ...]:
    """Mesh axes of a logical axis (None: not sharded)."""
    if logical is None:
      return ()
    if logical not in LOGICAL:
      raise ValueError(
        f'{logical!r} is not a logical axis.' + schema.suggest(logical, LOGICAL)
      )
    if logical == 'slot_heads' and logical not in self.table:
      logical = 'heads'
    return self.table.get(logical, ())

  def check_used(self, sizes: Mapping[str, int]) -> None:
    """UserError if a mesh axis larger than 1 carries nothing."""
    if self.name == 'replicated':
      return  # asked for by name: every device does the same
    # Those of slot_heads shard queries that every device has computed; those of
    # replicas say how arrays of all of them lie, not what each has to do.
    passive = 'slot_heads', REPLICAS
    used = {
      a for n, axes in self.table.items() if n not in passive for a in axes
    }
    for axis, size in sizes.items():
      if size > 1 and axis not in used:
        raise errors.UserError(
          f'mesh axis {axis}={size}: the rules {self.name!r} put nothing on '
          f'it, so its devices would repeat each other; they use '
          f'{", ".join(sorted(used)) or "no axis"}.'
        )


AUTO = 'auto'
PRESETS = {
  r.name: r
  for r in (
    Rules('replicated', {}),
    Rules('data', _BATCH | _STAGE),
    Rules('fsdp', _BATCH | _STAGE | _FSDP),
    Rules('tensor', _BATCH | _STAGE | _TENSOR),
    Rules('fsdp_tensor', _BATCH | _STAGE | _FSDP | _TENSOR),
    # What a model has comes from its program (planner/auto_rules.py).
    Rules(AUTO, _BATCH | _STAGE | _TENSOR),
  )
}


def preset(text: str) -> Rules:
  """The rules of that name, perhaps changed: 'fsdp_tensor vocab=tensor mlp='.

  A change is LOGICAL=AXIS+AXIS, or LOGICAL= for none.

  Raises:
    UserError: an unknown name or axis, and it lists the known ones; a change
      without =.
  """
  name, *changes = text.split() or ['']
  if name not in PRESETS:
    raise errors.UserError(
      f'mesh.rules={text!r} is not one of {", ".join(PRESETS)}.'
      + schema.suggest(name, PRESETS)
    )
  if changes and name == AUTO:
    raise errors.UserError(
      f'mesh.rules={text!r}: auto takes no changes, it finds its axes in the '
      "program; take 'tensor' with them."
    )
  table = dict(PRESETS[name].table)
  for change in changes:
    logical, equals, axes = change.partition('=')
    if logical not in LOGICAL:
      raise errors.UserError(
        f'mesh.rules={text!r}: {logical!r} is not a logical axis '
        f'({", ".join(LOGICAL)}).' + schema.suggest(logical, LOGICAL)
      )
    if not equals:
      raise errors.UserError(
        f'mesh.rules={text!r}: {change!r} names no mesh axis; write '
        f'{logical}=AXIS+AXIS, or {logical}= to shard it over none.'
      )
    if logical == 'slots':
      raise errors.UserError(
        f'mesh.rules={text!r}: slots are sharded over context, by decoding '
        'itself (--mesh=context=N); leave them out.'
      )
    if logical == REPLICAS:
      raise errors.UserError(
        f'mesh.rules={text!r}: replicas are the places of mesh.replica; leave '
        'them out.'
      )
    if logical == 'head_dim' and axes:
      raise errors.UserError(
        f'mesh.rules={text!r}: scores sum over the width of a head, which '
        f'{change} would cut; shard heads, and leave head_dim out.'
      )
    table[logical] = tuple(filter(None, axes.split('+')))
    for axis in table[logical]:
      if axis not in mesh_lib.AXES:
        raise errors.UserError(
          f'mesh.rules={text!r}: {axis!r} is not a mesh axis '
          f'({", ".join(mesh_lib.AXES)}).' + schema.suggest(axis, mesh_lib.AXES)
        )
  return Rules(text, table) if changes else PRESETS[name]


def region(text: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
  """'context+tensor' -> the mesh axes larger than 1 that shard the experts."""
  axes = tuple(filter(None, text.replace(' ', '').split('+')))
  allowed = tuple(a for a in mesh_lib.AXES if a not in ('replica', 'stage'))
  for axis in axes:
    if axis not in allowed or axes.count(axis) > 1:
      raise errors.UserError(
        f'model.experts.region={text!r}: {axis!r} is not one of '
        f'{", ".join(allowed)}, each once, joined by +.'
        + schema.suggest(axis, allowed)
      )
  return tuple(a for a in axes if sizes.get(a, 1) > 1)


def of(
  mesh: schema.Mesh,
  sizes: Mapping[str, int],
  kv_heads: int,
  experts: str = '',
  found: Mapping[str, tuple[str, ...]] | None = None,
) -> Rules:
  """The rules of a schema.Mesh whose axes have `sizes`, for a model.

  Args:
    mesh: schema.Mesh (rules, zero, sequence).
    sizes: mesh axis -> size.
    kv_heads: of the model. If the shards of the query heads do not divide them,
      every shard computes all of them and takes those it needs.
    experts: schema.Experts.region of the model.
    found: table that auto_rules found, if the rules are 'auto'.
  """
  rules = preset(mesh.rules)
  table = dict(rules.table) | dict(found or {})
  tensor = table.get('mlp', ())
  if mesh.sequence and table:
    length = table.get('residual_length', ())
    more = (a for a in tensor if a not in length)
    table['residual_length'] = (*length, *more)
  if mesh.zero == 3 and 'embed' in table:
    fsdp = table['embed']
    table['embed'] = fsdp if 'data' in fsdp else (*fsdp, 'data')
  elif mesh.zero == 3:
    raise errors.UserError(
      f'mesh.zero=3 shards parameters over data by their width, but the rules '
      f'{rules.name!r} do not shard it; take fsdp or fsdp_tensor.'
    )
  over = lambda name: [a for a in table.get(name, ()) if sizes.get(a, 1) > 1]
  shards = math.prod(sizes.get(a, 1) for a in table.get('kv_heads', ()))
  if kv_heads % shards or over('kv_heads') != over('heads'):
    table['kv_heads'] = ()
  if table:
    table['experts'] = region(experts, sizes)
    table['expert_embed'] = tuple(
      a for a in table.get('embed', ()) if a not in table['experts']
    )
    wide = dict.fromkeys((*table.get('embed', ()), *tensor))
    table['statistics'] = tuple(wide)
    table['expert_statistics'] = tuple(
      a for a in wide if a not in table['experts']
    )
  return Rules(rules.name, table, mesh.zero)


def spec(
  names: Sequence[str | None],
  shape: Sequence[int] | None,
  rules: Rules,
  sizes: Mapping[str, int],
  where: str = '',
) -> PartitionSpec:
  """Logical names of an array's dimensions -> PartitionSpec.

  Args:
    names: one logical axis (or None) per dimension.
    shape: the array's global shape, or None to skip the divisibility check.
    rules: a `Rules`.
    sizes: mesh axis -> size; axes of size 1 are dropped from the spec.
    where: what the array is, for the error.

  Raises:
    UserError: a dimension that its mesh axes do not divide, with both numbers
      and the nearest that would; one mesh axis on two dimensions.
  """
  used, out = {}, []
  for i, name in enumerate(names):
    axes = tuple(a for a in rules.axes(name) if sizes.get(a, 1) > 1)
    for axis in axes:
      if axis in used:
        raise errors.UserError(
          f'{where or names}: mesh axis {axis!r} serves both '
          f'{used[axis]!r} and {name!r}; the rules {rules.name!r} may use it '
          'for one of them.'
        )
      used[axis] = name
    n = math.prod(sizes[a] for a in axes)
    if shape is not None and shape[i] % n:
      nearest = max(d for d in range(1, n) if shape[i] % d == 0)
      low = shape[i] // n
      raise errors.UserError(
        f'{where + ": " if where else ""}{name!r} has size {shape[i]}, which '
        f'{" x ".join(f"{a}={sizes[a]}" for a in axes)} does not divide '
        f'({n} shards); the nearest that does is {nearest}. Sizes that {n} '
        f'divides: {", ".join(f"{m * n}" for m in {low, low + 1} if m)}.'
      )
    out.append(axes[0] if len(axes) == 1 else axes or None)
  return PartitionSpec(*out)


# The ZeRO stage from which each is also sharded over data. From stage 1 on a
# gradient leaves the step in the optimizer's layout; its sums over microbatches
# are whole until stage 2.
OPTIMIZER, GRADIENTS, SUMS = 1, 1, 2


def stored(
  names: Sequence[str | None],
  shape: Sequence[int],
  rules: Rules,
  sizes: Mapping[str, int],
  stage: float,
  where: str = '',
) -> PartitionSpec:
  """PartitionSpec of a parameter's gradient or optimizer state.

  It is the parameter's own, and from ZeRO stage `stage` on also `data` on the
  first dimension that `data` divides: shards are then long runs of memory, or
  whole matrices if the depth divides. If none divides: the parameter's own.
  """
  own = spec(names, shape, rules, sizes, where)
  data = sizes.get('data', 1)
  taken = [axes if isinstance(axes, tuple) else (axes,) for axes in own]
  if rules.zero < stage or data == 1 or any('data' in a for a in taken):
    return own
  for i in range(len(names)):
    held = tuple(a for a in taken[i] if a)
    if 'stage' in held:
      continue  # a microbatch's gradient has the rows of one chunk alone
    if shape[i] % (data * math.prod(sizes[a] for a in held)) == 0:
      whole = (*held, 'data')
      return PartitionSpec(*own[:i], whole if held else 'data', *own[i + 1 :])
  return own
