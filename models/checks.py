"""Can the fields of a model stand together? In plain integers, before a mesh.

Every contradiction is a UserError with both numbers. Importing this file starts
no jax: the command line refuses what `check_fields` finds at once.
"""

import math

from paraxis.configs.base import errors
from paraxis.configs.base import mixers

EXPERTS = 'EPD'  # letters of model.experts.pattern
ATTENTION = 'FWKNA'  # letters of the mixers that attend to a whole row
PREFIXED = 'FWKN'  # those that may have prefix keys
BIDIRECTIONAL = 'FN'  # those that may see what is behind a token
MOST_BLOCKS = 2**12  # of a row: attention lists their pairs, 8 million of these


def need(condition, text):
  """UserError(text) unless the condition holds."""
  if not condition:
    raise errors.UserError(text)


def check_model(model):
  """`check_fields`, then what kernels and the mixers themselves refuse."""
  import jax

  from paraxis.models import layer
  from paraxis.pallas_kernels import registry
  from paraxis.pallas_kernels.attention import op as attention_op
  from paraxis.pallas_kernels.scans import gated as gated_scan

  check_fields(model)
  need(
    'float64' not in (model.dtype, model.param_dtype)
    or jax.dtypes.canonicalize_dtype('float64') == 'float64',
    'model.dtype or model.param_dtype is float64, which jax has switched off: '
    'set JAX_ENABLE_X64=1 in the environment.',
  )
  attention_op.choose(model.attention)
  letters = {*mixers.of_pattern(model.pattern)[0]}
  inside = {*mixers.inside(''.join(letters))}
  if 'D' not in inside or inside & {'G', 'M'}:  # D asks for its own scan
    registry.resolve(gated_scan.OP, model.scan)
  for letter in sorted(letters):
    layer.MIXERS[letter].check(model)


def check_fields(model):
  """UserError if the fields of a schema.Model contradict each other."""
  d, n = model.d_model, model.num_heads
  k = model.num_kv_heads or n
  need(
    model.head_dim or d % n == 0,
    f'model.d_model={d} is not divisible by model.num_heads={n}; set '
    'model.head_dim, or change one of them.',
  )
  need(
    n % k == 0,
    f'model.num_heads={n} is not divisible by model.num_kv_heads={k}.',
  )
  _check_rope(model)
  letters, _ = mixers.of_pattern(model.pattern)
  need(
    model.residual == 'sequential' or model.norm_placement == 'pre',
    f'model.residual={model.residual!r} has norms before its parts, but '
    f'model.norm_placement={model.norm_placement!r}.',
  )
  _check_wiring(model, letters)
  need(
    model.loss != 'chunked' or not model.head_bias,
    "model.loss='chunked' knows no model.head_bias: take model.loss='logits'.",
  )
  need(
    model.mlp != 'none' or '-' not in model.pattern,
    f"model.pattern={model.pattern!r} asks for an mlp, and model.mlp='none'.",
  )
  need(
    model.mlp not in ('none', 'xielu') or not model.experts.count,
    f'model.experts.count={model.experts.count} experts are mlps, and '
    f'model.mlp={model.mlp!r} names no form for them.',
  )
  for letter in sorted(set(letters)):
    _check_reach(model, letter)
  _check_visibility(model, letters)
  need(
    model.position != 'learned' or model.max_positions,
    "model.position='learned' needs model.max_positions, rows of its table.",
  )
  if model.experts.count:
    _check_experts(model.experts)
  if model.recurrence.core or model.recurrence.prelude:
    _check_recurrence(model, letters)


def _check_wiring(model, letters):
  """UserError if layers cannot be joined so (wiring.py)."""
  says = f'model.wiring={model.wiring!r}'
  need(
    model.wiring == 'standard' or model.residual == 'sequential',
    f'{says} says what mixer and mlp read, and so does model.residual='
    f'{model.residual!r}: leave one of them at its default.',
  )
  need(
    model.wiring != 'parallel' or model.norm_placement == 'pre',
    f'{says} has norms before its parts, but model.norm_placement='
    f'{model.norm_placement!r}.',
  )
  need(
    (model.wiring == 'groups') == bool(model.groups)
    and (not model.groups or model.num_layers % model.groups == 0),
    f'{says} and model.groups={model.groups}: wiring=groups alone has groups, '
    f'1 or more, and they are to divide model.num_layers={model.num_layers}.',
  )
  if model.streams or model.wiring == 'streams':
    _check_streams(model, letters)
  own = sorted({k for k in letters if not mixers.TABLE[k].sums_last})
  need(
    model.wiring != 'ladder' or not own,
    f'{says} leaves what a mixer gives pending, a sum over devices, and layers '
    f'of kind {", ".join(own)} (model.pattern={model.pattern!r}) have no '
    'separate output sum: they read it themselves; take other kinds.',
  )
  core = model.recurrence.core
  need(
    model.wiring in ('standard', 'parallel') or not core,
    f'{says} carries more than the features of a row, and a pass over '
    f'model.recurrence.core={core} layers hands over them alone: take '
    "model.wiring='standard'.",
  )


def _check_streams(model, letters):
  """UserError if a row cannot have copies with prefix keys."""
  says = f'model.streams={model.streams}'
  need(
    model.wiring == 'streams' and model.streams,
    f'{says} and model.wiring={model.wiring!r}: wiring=streams alone has '
    'streams, 1 or more.',
  )
  other = mixers.others(letters, PREFIXED)
  need(
    not other,
    f'{says}: prefix keys are of attention, and layers of kind '
    f'{", ".join(other)} (model.pattern={model.pattern!r}) have none: take '
    f'layers of kind {", ".join(PREFIXED)}.',
  )
  need(
    not model.experts.count,
    f'{says}: experts would be loaded by every copy of a token, and are '
    f'balanced by one (model.experts.count={model.experts.count}).',
  )
  need(
    model.visibility != 'block' and not model.features,
    f'{says} are copies of rows of tokens, and model.visibility='
    f'{model.visibility} with model.features={model.features} reads rows in '
    'pairs, or frames: neither has copies.',
  )


def _check_reach(model, letter):
  """UserError if layers of a kind see no tokens."""
  kind = mixers.TABLE[letter]
  reach = dict(window=kind.windowed, attention_chunk=kind.chunked)
  for field, read in reach.items():
    need(
      getattr(model, field) or not read,
      f'model.pattern={model.pattern!r} has {letter} layers but '
      f'model.{field}=0.',
    )


def _check_visibility(model, letters):
  """UserError if layers are causal and the model is not."""
  seen, block = model.visibility, model.block
  causal = mixers.others(letters, BIDIRECTIONAL)
  need(
    seen == 'causal' or not causal,
    f'model.visibility={seen}: layers of kind {", ".join(causal)} '
    f'(model.pattern={model.pattern!r}) see nothing behind a token; take '
    f'layers of kind {", ".join(BIDIRECTIONAL)}, or causal.',
  )
  need(
    (seen == 'block') == bool(block),
    f'model.visibility={seen} and model.block={block}: blocks have 1 token or '
    'more, and only visibility=block has them.',
  )


def _check_recurrence(model, letters):
  """UserError if a core cannot run several times."""
  own, depth = model.recurrence, model.num_layers
  says = f'model.recurrence.core={own.core}'
  need(
    own.core and own.prelude + own.core <= depth,
    f'{says} layers behind model.recurrence.prelude={own.prelude}, of '
    f'model.num_layers={depth}: a core has 1 or more, and prelude, core and '
    'coda together are the layers.',
  )
  need(
    not model.experts.count,
    f'{says}: experts would be loaded by every pass, and are balanced by one '
    f'(model.experts.count={model.experts.count}): take plain mlps.',
  )
  sharing = sorted({k for k in letters if mixers.TABLE[k].shares})
  need(
    not sharing,
    f'{says}: layers of kind {", ".join(sharing)} (model.pattern='
    f'{model.pattern!r}) read the embeddings again, and a pass over the core '
    'has others: take other kinds.',
  )
  need_causal(model, says)


def need_causal(model, what):
  """UserError if tokens of a schema.Model see those behind them."""
  need(
    model.visibility == 'causal',
    f'{what} goes from left to right, and a token of model.visibility='
    f'{model.visibility} sees those behind it, too.',
  )


def _check_experts(experts):
  for letter in experts.pattern or ' ':
    need(
      letter in EXPERTS,
      f'model.experts.pattern={experts.pattern!r}: {letter!r} is not one of '
      'E (experts), P (twice as many), D (a plain mlp).',
    )
  need(
    experts.top_k <= experts.count,
    f'model.experts.top_k={experts.top_k} is above model.experts.count='
    f'{experts.count}.',
  )
  need(
    experts.count % experts.groups == 0,
    f'model.experts.count={experts.count} is not divisible by '
    f'model.experts.groups={experts.groups}.',
  )
  chosen = experts.count // experts.groups * experts.top_groups
  need(
    experts.top_groups <= experts.groups and experts.top_k <= chosen,
    f'model.experts.top_groups={experts.top_groups} of model.experts.groups='
    f'{experts.groups} leave {chosen} experts to choose '
    f'model.experts.top_k={experts.top_k} from.',
  )
  need(
    not (experts.residual and experts.shared),
    f'model.experts.residual and model.experts.shared={experts.shared} both '
    'put an mlp beside the experts: take one of them.',
  )
  need(
    experts.shared or not experts.shared_gate,
    'model.experts.shared_gate gates shared experts, but model.experts.shared='
    '0.',
  )
  need(
    experts.hot <= experts.count,
    f'model.experts.hot={experts.hot} is above model.experts.count='
    f'{experts.count}.',
  )


def check_stages(model, stages):
  """UserError if layers of several stages would share parameters."""
  letters = mixers.of_pattern(model.pattern)[0]
  sharing = sorted({k for k in letters if mixers.TABLE[k].shares})
  need(
    not sharing,
    f'model.pattern={model.pattern!r}: layers of kind {", ".join(sharing)} '
    f'share model.hybrid.blocks={model.hybrid.blocks}, and mesh.stage={stages} '
    'would put their uses on several stages: take mesh.stage=1.',
  )
  core = model.recurrence.core
  need(
    not core,
    f'model.recurrence.core={core} layers run again and again, and mesh.stage='
    f'{stages} would put their passes on several stages: take mesh.stage=1.',
  )


def check_region(model, rules, sizes):
  """UserError if the region of experts does not divide them."""
  experts = model.experts
  if not experts.count:
    return
  region = [a for a in rules.axes('experts') if sizes[a] > 1]
  ranks = math.prod(sizes[a] for a in region)
  nearest = max(
    d
    for d in range(1, experts.count + 1)
    if experts.count % d == 0 and d <= ranks
  )
  need(
    experts.count % ranks == 0,
    f'model.experts.count={experts.count} is not divisible by its region '
    f'{" x ".join(f"{a}={sizes[a]}" for a in region)} ({ranks} ranks); the '
    f'nearest number of ranks that divides it is {nearest}.',
  )


def expert_order(mesh, model):
  """Expert of every slot, of a schema.Mesh and Model; (): in order.

  Raises:
    UserError: mesh.expert_order is no permutation of the experts, or some of
      them are not free to move.
  """
  text, count = mesh.expert_order, model.experts.count
  if not text:
    return ()
  says = f'mesh.expert_order={text!r}'
  parts = [p.strip() for p in text.split(',')]
  order = tuple(int(p) for p in parts if p.isdecimal())
  need(
    len(order) == len(parts) and sorted(order) == list(range(count)),
    f'{says} names {len(parts)} experts; it is to name each of 0 to '
    f'{count - 1}, of model.experts.count={count}, once.',
  )
  need(
    model.experts.groups == 1,
    f'{says} would take experts out of their model.experts.groups='
    f'{model.experts.groups}: leave it empty.',
  )
  need(
    'P' not in model.experts.pattern,
    f'{says} is of {count} experts, and layers of kind P have {2 * count} '
    f'(model.experts.pattern={model.experts.pattern!r}): leave it empty.',
  )
  return () if order == tuple(range(count)) else order


def _check_rope(model):
  low, high = model.rope_low_frequency, model.rope_high_frequency
  need(
    model.rope_scaling not in ('llama3', 'yarn') or 0 < low < high,
    f'model.rope_scaling={model.rope_scaling!r} needs 0 < '
    f'model.rope_low_frequency={low} < model.rope_high_frequency={high}.',
  )
  need(
    model.rope_scaling != 'yarn' or model.rope_theta > 1,
    f"model.rope_scaling='yarn' needs model.rope_theta={model.rope_theta} "
    'above 1.',
  )
  need(
    model.rope_scaling != 'none' or model.rope_factor == 1,
    f'model.rope_factor={model.rope_factor} extends nothing where '
    "model.rope_scaling='none': name one, as 'yarn', or leave it out.",
  )
  if model.rope_scaling == 'longrope' and model.position == 'rope':
    _check_longrope(model, mixers.of_pattern(model.pattern)[0])


def _check_longrope(model, letters):
  """One factor for each pair of columns that rotates."""
  for letter in sorted(set(letters)):
    kind = mixers.TABLE[letter]
    if not kind.rotary or (kind.windowed and model.rope_local_theta):
      continue
    pairs = kind.rotary(model) // 2
    for name in ('rope_short_factors', 'rope_long_factors'):
      found = len(mixers.factors(getattr(model, name)))
      need(
        found == pairs,
        f"model.{name} has {found} factors; model.rope_scaling='longrope' "
        f'needs one for each of {pairs} pairs of columns that {letter} layers '
        'rotate.',
      )


def check_length(model, length, what):
  """UserError if a model's positions or blocks are not for `length` tokens."""
  blocks = -(-length // model.attention_block)
  letters = mixers.inside(mixers.of_pattern(model.pattern)[0])
  attends = set(ATTENTION) & set(letters)
  need(
    not attends or blocks <= MOST_BLOCKS,
    f'{what} is {length} tokens, {blocks:,} blocks of model.attention_block='
    f'{model.attention_block}, of which attention lists every pair: at most '
    f'{MOST_BLOCKS:,}; take larger blocks, or fewer tokens.',
  )
  if model.position == 'rope' and model.rope_scaling == 'longrope':
    need(
      model.rope_long or length <= model.rope_original_length,
      f'{what} is {length} tokens, beyond model.rope_original_length='
      f'{model.rope_original_length}: model.rope_long=True takes the long '
      'factors of LongRoPE.',
    )
  if model.position == 'learned':
    first = model.position_offset
    more = f', of which the first {first} are unused' if first else ''
    need(
      length + first <= model.max_positions,
      f'{what} is {length} tokens, but model.max_positions='
      f'{model.max_positions} is the length of the position table{more}.',
    )
