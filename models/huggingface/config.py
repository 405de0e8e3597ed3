"""config.json of a Hugging Face model <-> schema.Model."""

import dataclasses
import functools
from typing import Any

from paraxis.configs.base import errors
from paraxis.configs.base import extra
from paraxis.configs.base import mixers
from paraxis.configs.base import model as model_schema
from paraxis.models import layer as layer_lib
from paraxis.models.huggingface.families import defaults
from paraxis.models.huggingface.families import known
from paraxis.models.huggingface.families import reader as reader_lib
from paraxis.models.huggingface.families import rows
from paraxis.models.mixers import attention
from paraxis.models.mixers import gated_delta
from paraxis.models.mixers import mamba
from paraxis.models.mixers import rg_lru

# Fields of config.json that change no number of a forward pass in evaluation.
SILENT = frozenset(
  """
  _name_or_path architectures attention_dropout attn_pdrop auto_map
  attn_implementation bos_token_id chunk_size_feed_forward
  decoder_start_token_id dropout dtype embd_pdrop eos_token_id finetuning_task
  hidden_dropout id2label initializer_range is_decoder is_llama_config label2id
  max_length max_position_embeddings max_window_layers model_type n_positions
  num_labels output_router_logits pad_token_id pretraining_tp problem_type
  resid_pdrop return_dict router_aux_loss_coef router_jitter_noise
  rope_interleaved sep_token_id summary_activation summary_first_dropout
  summary_proj_to_labels summary_type summary_use_proj task_specific_params
  torch_dtype transformers_version use_cache use_mamba_kernels use_mambapy
  use_associative_scan time_step_rank time_step_scale time_step_min
  time_step_max time_step_init_scheme time_step_floor residual_in_fp32
  rescale_prenorm_residual chunk_size num_nextn_predict_layers
  transformers.js_config resid_dropout embedding_dropout hidden_dropout_prob
  attention_probs_dropout_prob cache_implementation tokenizer_class
  """.split()
)
# Of a schema.Model: how it is computed and drawn, not what it computes.
NUMERICS = frozenset(
  """
  dtype param_dtype unroll loss attention attention_block scan init_std
  embedding_init_std experts.capacity_factor experts.drop_limit experts.region
  experts.hierarchical experts.hot experts.balance experts.balance_scope
  experts.router_z mamba.dt_min mamba.dt_max rope_long
  """.split()
)


SHOWN = 6  # differences that a message lists


def to_model(config: dict[str, Any]) -> model_schema.Model:
  """schema.Model of a parsed config.json; fields of training are defaults.

  UserError: a field, with its value, that is malformed or that no model here
  expresses, or a model_type that is not known.
  """
  model, faults = _read(config)
  if faults:
    raise next(iter(faults.values()))
  return model


def _read(config):
  """(schema.Model, {our field, or a row's: UserError of what does not read}).

  A field that does not read has its default.
  """
  name = config.get('model_type')
  family = known.find(name)
  config = defaults.filled(config)
  reader = reader_lib.Reader(config)
  reader.partial = any(isinstance(r, rows.Fraction) for r in family.rows)
  values, faults = {}, {}
  for row in family.rows:
    try:
      values |= row.read(reader)
    except errors.UserError as error:
      faults[getattr(row, 'ours', row)] = error
  try:
    reader.refuse_unread(
      SILENT | set(family.silent),
      f'is no field that model_type={name!r} has here',
    )
  except errors.UserError as error:
    faults[''] = error
  model = model_schema.Model()
  for path, value in values.items():
    try:
      what = f'{_givers(config, value)} model.{path}'
      model = _with(model, path, reader.checked(what, value, path))
    except errors.UserError as error:
      faults[path] = error
  return model, faults


def _givers(config, value):
  """'NAME make': the fields of config.json that have a value, else all."""
  inner = [x for x in config.values() if isinstance(x, dict)]
  given = [pair for table in (config, *inner) for pair in table.items()]
  same = lambda x: type(x) is type(value) and x == value
  if found := dict.fromkeys(name for name, x in given if same(x)):
    return f'{", ".join(found)} make'
  numbers = [(x, name) for name, x in given if type(x) in (int, float)]
  most, name = max(numbers, default=(0, 'none'))
  return (
    f'its fields, of which {name}={reader_lib.shown(most)} is largest, make'
  )


def _with(model, path, value):
  """A section with another value of a dotted field."""
  head, _, rest = path.partition('.')
  new = _with(getattr(model, head), rest, value) if rest else value
  return dataclasses.replace(model, **{head: new})


def from_model(
  model: model_schema.Model, model_type: str = ''
) -> dict[str, Any]:
  """config.json of a schema.Model, as a dictionary.

  Args:
    model_type: the family to write; '': the plainest one that expresses it.

  Raises:
    UserError: the family does not express a field of the model, or no family
      does; or the model_type is not known.
  """
  if model_type:
    config, faults = _written(model, model_type)
    if faults:
      raise errors.UserError(
        f'model_type={model_type!r} does not express {_listed(faults)}.'
      )
    return config
  tried = {}
  for name in known.FAMILIES:
    config, faults = _written(model, name)
    if not faults:
      return config
    tried[name] = faults
  nearest = min(tried, key=lambda name: len(tried[name]))
  raise errors.UserError(
    f'no Hugging Face family expresses this model; the nearest, {nearest!r}, '
    f'differs in {_listed(tried[nearest])}.'
  )


def _listed(faults):
  more = f', and {len(faults) - SHOWN} more' if faults[SHOWN:] else ''
  return ', '.join(faults[:SHOWN]) + more


def _written(model, name):
  """(config.json, [field of the model that it does not say]).

  What was written is read back: what does not read, or reads as another value,
  is what the family does not express.
  """
  family = known.find(name)
  config: dict[str, Any] = dict(
    model_type=name, architectures=[family.architecture]
  )
  for row in family.rows:
    config |= row.write(model)
  back, unread = _read(config)
  wanted, found = canonical(model), canonical(back)
  shown, faults = reader_lib.shown, []
  for field, value in wanted.items():
    if found[field] != value:
      it_has = f' (there {shown(found[field])})' if field not in unread else ''
      faults.append(f'model.{field}={shown(value)}{it_has}')
      unread.pop(field, None)
  for field, error in unread.items():
    of_ours = isinstance(field, str) and field
    faults.append(
      f'model.{field}={shown(rows.value(model, field))}'
      if of_ours
      else str(error).rstrip('.')
    )
  return config, faults


def canonical(model) -> dict[str, Any]:
  """{dotted field: value} of what a model computes.

  Models that compute the same have the same: defaults that stand for another
  value are that value, and fields that nothing reads are their defaults.
  """
  kinds = layer_lib.kinds_of(model)[1]
  letters = set(mixers.inside(''.join(kind[0] for kind in kinds)))
  out, unread = _fields_of(model), _defaults()
  out['pattern'] = ' '.join(kinds)
  out['num_kv_heads'] = attention.num_kv_heads(model)
  out['head_dim'] = model.head_width
  drop = []
  if not any(k[1:] in ('E', 'P') for k in kinds):
    drop += [name for name in out if name.startswith('experts.')]
  elif not model.experts.d_ff:
    out['experts.d_ff'] = model.d_ff
  out['experts.pattern'] = ''
  if all(k[1:] for k in kinds):
    drop += ['d_ff']  # the mlp of a shared block reads mlp_bias
    drop += [] if 'H' in letters else ['mlp_bias']
  if all(k[1:] == '.' for k in kinds):
    drop += ['mlp']
  if model.mlp != 'clamped':
    drop += ['mlp_limit', 'mlp_slope']
  out['experts.bias_rate'] = bool(out['experts.bias_rate'])
  drop += [] if model.experts.normalise else ['experts.sum_epsilon']
  if model.experts.groups == 1:
    drop += ['experts.top_groups', 'experts.group_best']
  drop += [] if 'W' in letters else ['window', 'rope_local_theta']
  if 'W' in letters and not model.rope_local_theta:
    out['rope_local_theta'] = 0.0
  if model.position != 'learned':
    drop += ['max_positions', 'position_offset']
  drop += [] if 'K' in letters else ['attention_chunk']
  if model.position != 'rope' or not letters & set('FWKA'):
    read = {'rope_original_length'} if model.query_growth else set()
    drop += [n for n in out if n.startswith('rope_') and n not in read]
    out['pattern'] = out['pattern'].replace('N', 'F')  # both do not rotate
    if model.position == 'rope':
      out['position'] = 'none'
  drop += _unread_scaling(model)
  if not letters & set('FWKN'):
    drop += ['attention_bias', 'attention_output_bias', 'qk_norm', 'head_dim']
    drop += ['num_kv_heads', 'sinks', 'attention_gate', 'query_growth']
    drop += ['qkv_clip']
  if not model.query_growth:
    drop += ['query_growth_kinds']
  if not letters & set('FWKNA'):
    drop += ['num_heads', 'attention_scale', 'attention_softcap']
  drop += _unread_sections(model, letters, out)
  return {
    name: unread[name] if name in drop else value for name, value in out.items()
  }


def _unread_scaling(model):
  kind = model.rope_scaling
  drop = [] if kind != 'none' else ['rope_factor']
  if kind not in ('llama3', 'yarn'):
    drop += ['rope_low_frequency', 'rope_high_frequency']
  if kind not in ('llama3', 'yarn', 'longrope') and not model.query_growth:
    drop += ['rope_original_length']
  if kind != 'longrope':
    drop += ['rope_short_factors', 'rope_long_factors', 'rope_attention_factor']
  if kind != 'yarn':
    drop += ['rope_mscale', 'rope_truncate']
  return drop


def _unread_sections(model, letters, out):
  """Sections of mixers that the model has not."""
  sections = dict(
    G='gated_linear',
    C='tcn',
    A='latent',
    V='short_conv',
    U='rg_lru',
    D='gated_delta',
    H='hybrid',
  )
  drop = [s for letter, s in sections.items() if letter not in letters]
  drop += [] if letters & set('MS') else ['mamba']
  drop += [] if letters & set('RL') else ['recurrent']
  names = [n for n in out if n.split('.')[0] in drop and '.' in n]
  if 'M' not in letters:
    names += ['mamba.heads', 'mamba.head_dim', 'mamba.groups']
    names += ['mamba.step_floor']
  else:
    out['mamba.heads'] = mamba.num_heads(model)
    names += [] if 'S' in letters else ['mamba.expand']
  if 'S' not in letters:
    names += ['mamba.dt_rank', 'mamba.inner_norm']
  elif not model.mamba.dt_rank:
    out['mamba.dt_rank'] = -(-model.d_model // 16)
  if 'U' in letters:
    heads, width = rg_lru.sizes(model)
    out['rg_lru.heads'], out['rg_lru.width'] = heads, heads * width
  if 'D' in letters:
    found = gated_delta.sizes(model)
    for name, size in zip(
      ('heads', 'value_heads', 'key_dim', 'value_dim'), found, strict=True
    ):
      out[f'gated_delta.{name}'] = size
  inner = 'S' in letters and model.mamba.inner_norm
  names += [] if inner else ['mamba.inner_norm_scale']
  names += [] if inner or 'M' in letters else ['mamba.norm_epsilon']
  if 'H' in letters:
    out['hybrid.d_ff'] = model.hybrid.d_ff or model.d_ff
  for section in ('mamba', 'latent'):
    name = f'{section}.norm_epsilon'
    out[name] = out[name] or model.norm_epsilon
  return names


def _fields(section, prefix=''):
  """(dotted name, value) of what a section of a model computes."""
  for f in dataclasses.fields(section):
    value, name = getattr(section, f.name), prefix + f.name
    if dataclasses.is_dataclass(value):
      yield from _fields(value, f'{name}.')
    elif name not in NUMERICS:
      yield name, value


@functools.cache
def _defaults():
  return _fields_of(model_schema.Model())


def _fields_of(model):
  """Without what only a user's own mixers read."""
  return {
    name: value
    for name, value in _fields(model)
    if not name.startswith(extra.NAME)
  }
