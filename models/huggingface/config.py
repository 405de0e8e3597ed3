"""config.json of a Hugging Face model <-> schema.Model."""

import dataclasses
from typing import Any

from paraxis.configs.base import errors
from paraxis.configs.base import model as model_schema
from paraxis.models import layer as layer_lib
from paraxis.models.huggingface import families
from paraxis.models.huggingface import rows
from paraxis.models.mixers import attention

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
  attention_probs_dropout_prob
  """.split()
)
# Of a schema.Model: how it is computed and drawn, not what it computes.
NUMERICS = frozenset(
  """
  dtype param_dtype unroll loss attention attention_block scan init_std
  embedding_init_std experts.capacity_factor experts.drop_limit experts.region
  experts.hierarchical experts.hot experts.balance experts.balance_scope
  experts.router_z mamba.dt_min mamba.dt_max
  """.split()
)


def to_model(config: dict[str, Any]) -> model_schema.Model:
  """schema.Model of a parsed config.json; fields of training are defaults.

  UserError: a field, with its value, that no model here expresses, or a
  model_type that is not known.
  """
  name = config.get('model_type')
  family = families.find(name or '')
  reader, values = rows.Reader(config), {}
  reader.partial = any(isinstance(r, rows.Fraction) for r in family.rows)
  for row in family.rows:
    values |= row.read(reader)
  known = SILENT | reader.used | set(family.silent)
  for field, value in config.items():
    if field not in known and value not in (None, False, 0, '', [], {}, 1.0):
      reader.refuse(field, f'is no field that model_type={name!r} has here')
  model = model_schema.Model()
  for path, value in values.items():
    model = _with(model, path, value)
  return model


def _with(model, path, value):
  """A section with the value of a dotted field, of the field's type."""
  head, _, rest = path.partition('.')
  old = getattr(model, head)
  new = _with(old, rest, value) if rest else type(old)(value)
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
    config, fault = _written(model, model_type)
    if fault:
      raise errors.UserError(
        f'{fault}, which model_type={model_type!r} does not express.'
      )
    return config
  faults = {}
  for name in families.FAMILIES:
    config, fault = _written(model, name)
    if not fault:
      return config
    faults[name] = fault
  nearest = next(iter(faults))
  raise errors.UserError(
    f'no Hugging Face family expresses this model; of {nearest!r} it '
    f'differs in {faults[nearest]}.'
  )


def _written(model, name):
  """(config, '' or a field of the model that it does not say)."""
  family = families.find(name)
  config: dict[str, Any] = dict(
    model_type=name, architectures=[family.architecture]
  )
  for row in family.rows:
    config |= row.write(model)
  try:
    back = to_model(config)
  except errors.UserError as error:
    return config, f'the model makes {error}'.rstrip('.')
  wanted, found = canonical(model), canonical(back)
  for field, value in wanted.items():
    if found[field] != value:
      return config, f'model.{field}={value!r}'
  return config, ''


def canonical(model) -> dict[str, Any]:
  """{dotted field: value} of what a model computes.

  Models that compute the same have the same: defaults that stand for another
  value are that value, and fields that nothing reads are their defaults.
  """
  kinds = layer_lib.kinds_of(model)[1]
  letters = {kind[0] for kind in kinds}
  out, unread = dict(_fields(model)), dict(_fields(model_schema.Model()))
  out['pattern'] = '.'.join(kinds)
  out['num_kv_heads'] = attention.num_kv_heads(model)
  out['head_dim'] = model.head_width
  drop = []
  if not any(k[1:] in ('E', 'P') for k in kinds):
    drop += [name for name in out if name.startswith('experts.')]
  elif not model.experts.d_ff:
    out['experts.d_ff'] = model.d_ff
  out['experts.pattern'] = ''
  if all(k[1:] for k in kinds):
    drop += ['d_ff', 'mlp_bias']
  if all(k[1:] == '.' for k in kinds):
    drop += ['mlp']
  out['experts.bias_rate'] = bool(out['experts.bias_rate'])
  drop += [] if model.experts.normalise else ['experts.sum_epsilon']
  if model.experts.groups == 1:
    drop += ['experts.top_groups', 'experts.group_best']
  drop += [] if 'W' in letters else ['window', 'rope_local_theta']
  if 'W' in letters and not model.rope_local_theta:
    out['rope_local_theta'] = 0.0
  if model.position != 'learned':
    drop += ['max_positions']
  if model.position != 'rope' or not letters & set('FWA'):
    drop += [name for name in out if name.startswith('rope_')] + ['position']
  drop += _unread_scaling(model)
  if not letters & set('FWN'):
    drop += ['attention_bias', 'attention_output_bias', 'qk_norm', 'head_dim']
    drop += ['num_kv_heads', 'attention_softcap', 'sinks']
  if not letters & set('FWNA'):
    drop += ['num_heads', 'attention_scale']
  drop += _unread_sections(model, letters, out)
  return {
    name: unread[name] if name in drop else value for name, value in out.items()
  }


def _unread_scaling(model):
  kind = model.rope_scaling
  drop = [] if kind != 'none' else ['rope_factor']
  if kind not in ('llama3', 'yarn'):
    drop += ['rope_low_frequency', 'rope_high_frequency']
    drop += ['rope_original_length']
  if kind != 'yarn':
    drop += ['rope_mscale', 'rope_truncate']
  return drop


def _unread_sections(model, letters, out):
  """Sections of mixers that the model has not."""
  sections = dict(G='gated_linear', C='tcn', A='latent', V='short_conv')
  drop = [s for letter, s in sections.items() if letter not in letters]
  drop += [] if letters & set('MS') else ['mamba']
  drop += [] if letters & set('RL') else ['recurrent']
  names = [n for n in out if n.split('.')[0] in drop and '.' in n]
  if 'M' not in letters:
    names += ['mamba.head_dim', 'mamba.groups']
  if 'S' not in letters:
    names += ['mamba.dt_rank', 'mamba.inner_norm']
  elif not model.mamba.dt_rank:
    out['mamba.dt_rank'] = -(-model.d_model // 16)
  inner = 'S' in letters and model.mamba.inner_norm
  names += [] if inner else ['mamba.inner_norm_scale', 'mamba.norm_epsilon']
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
