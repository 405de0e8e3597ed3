"""config.json both ways: exact, or one line that names a field."""

import dataclasses

import hf_families
import pytest
import support

from paraxis.configs import quickstart
from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers
from paraxis.models import layer
from paraxis.models.huggingface import config as config_lib
from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import known
from paraxis.models.huggingface.families import reader
from paraxis.models.huggingface.families import rows

QUICKSTART = schema.view(quickstart.get_config()).model
EXPERTS = schema.Model().experts
# The examples of README and every kind of layer, with an mlp and without.
PATTERNS = [
  'WWF', 'M-M-*-', 'M-*', *mixers.TABLE, *(f'{x}-{x}' for x in mixers.TABLE),
]  # fmt: skip
OTHERS = [
  {},
  dict(norm_placement='sandwich', qk_norm='all'),
  dict(position='none', mlp='relu2'),
  dict(
    position='learned', max_positions=9, norm='layernorm', residual='shared'
  ),
  dict(experts=dataclasses.replace(EXPERTS, count=4, shared=1)),
  dict(experts=dataclasses.replace(EXPERTS, count=4, pattern='DEP')),
  dict(logit_scale=0.0, residual_scale=0.0, attention_scale=0.0),
]


def models(pattern):
  """schema.Models of a pattern; OTHERS take turns."""
  yield dataclasses.replace(QUICKSTART, pattern=pattern, window=8)
  at = PATTERNS.index(pattern)
  for change in (OTHERS[at % len(OTHERS)], OTHERS[(at + 3) % len(OTHERS)]):
    model = schema.Model(pattern=pattern, window=8, num_layers=6)
    yield dataclasses.replace(model, **change)


def exact_or_refused(model, model_type=''):
  """The config.json, which says all of the model; {}: a field is named."""
  try:
    config = config_lib.from_model(model, model_type)
  except errors.UserError as error:
    line = str(error)
    assert 'model.' in line or 'config.json: ' in line, line
    assert '\n' not in line
    return {}
  same = config_lib.canonical
  assert same(config_lib.to_model(config)) == same(model)
  return config


@pytest.mark.parametrize('pattern', PATTERNS)
def test_an_export_is_exact_or_names_a_field(pattern):
  for model in models(pattern):
    exact_or_refused(model)
    for name in known.FAMILIES:
      exact_or_refused(model, name)


def test_both_ends_of_it_happen():
  """Neither everything nor nothing is refused."""
  assert exact_or_refused(schema.Model())['model_type'] == 'llama'
  assert not exact_or_refused(QUICKSTART)
  assert not exact_or_refused(schema.Model(pattern='G'))


def test_the_nearest_family_has_the_fewest_other_fields():
  with support.refused("'granite'", "model.qk_norm='head' (there 'none')") as e:
    config_lib.from_model(QUICKSTART)
  faults = {n: config_lib._written(QUICKSTART, n)[1] for n in known.FAMILIES}
  assert min(map(len, faults.values())) == len(faults['granite']) == 1
  assert len(faults['llama']) == 3
  del e


def test_every_difference_is_named():
  model = dataclasses.replace(QUICKSTART, sinks=True, head_bias=True)
  fields = ('embedding_scale', 'attention_scale', 'sinks', 'head_bias')
  with support.refused("'qwen3'", *(f'model.{f}=' for f in fields)):
    config_lib.from_model(model, 'qwen3')


@pytest.mark.parametrize(
  'change, field',
  [
    (dict(position='none'), 'position'),
    (dict(pattern='FN'), 'pattern'),
    (dict(pattern='W', window=8), 'pattern'),
    (dict(rope_theta=500.0, rope_fraction=0.5), 'rope_fraction'),
    (dict(residual_scale=0.5), 'residual_scale'),
  ],
)
def test_what_llama_does_not_say(change, field):
  """A model with another value is another model: it is not written as one."""
  model = dataclasses.replace(schema.Model(), **change)
  with support.refused('llama', f'model.{field}='):
    config_lib.from_model(model, 'llama')


# Their classes have matrices of the whole width, whatever config.json says.
WHOLE = dict(gpt_neox=1, helium=2, olmoe=2, persimmon=1, stablelm=2)


@pytest.mark.parametrize('name', WHOLE)
def test_heads_that_a_class_does_not_know_are_refused(name):
  model = config_lib.to_model(hf_families.read_golden(name)['config'])
  n, width = model.num_heads, model.d_model // model.num_heads
  assert exact_or_refused(model, name)['head_dim'] == width
  other = dataclasses.replace(model, head_dim=2 * width)
  with support.refused(f'model.head_dim={2 * width} (there {width})'):
    config_lib.from_model(other, name)
  assert exact_or_refused(other).get('model_type') not in WHOLE
  other = dataclasses.replace(model, num_kv_heads=n // 2)
  assert bool(exact_or_refused(other, name)) == (WHOLE[name] > 1)
  if not exact_or_refused(other, name):
    with support.refused(f'model.num_kv_heads={n // 2} (there {n})'):
      config_lib.from_model(other, name)
    assert exact_or_refused(other).get('model_type') not in WHOLE


LINEAR = dict(rope_scaling='linear', rope_factor=2.0)
LLAMA3 = LINEAR | dict(
  rope_scaling='llama3', rope_low_frequency=1.0, rope_high_frequency=4.0,
  rope_original_length=16,
)  # fmt: skip
YARN = LLAMA3 | dict(rope_scaling='yarn', rope_high_frequency=32.0)
# (family, fields of its golden's model, what the refusal says)
NOT_OF_ITS_CLASS = [
  ('gemma3_text', dict(attention_softcap=2.0),
   'model.attention_softcap=2.0 (there 0.0)'),
  ('nemotron_h', dict(attention_bias=True, attention_output_bias=True),
   'model.attention_bias=True (there False)'),
  *(('phi3', x, f"rope_type='{x['rope_scaling']}'")
    for x in (LINEAR, LLAMA3, YARN)),
  ('recurrent_gemma', dict(logit_softcap=0.0), 'logits_soft_cap=0.0'),
  *(('recurrent_gemma', x, f"rope_type='{x['rope_scaling']}' is not default,")
    for x in (LINEAR, LLAMA3, YARN)),
]  # fmt: skip


@pytest.mark.parametrize('name, change, words', NOT_OF_ITS_CLASS)
def test_what_a_class_does_not_compute_is_not_exported(name, change, words):
  model = config_lib.to_model(hf_families.read_golden(name)['config'])
  assert exact_or_refused(model, name)
  model = dataclasses.replace(model, **change)
  with support.refused(words):
    config_lib.from_model(model, name)
  assert exact_or_refused(model).get('model_type') != name


DIVIDE = (
  'arcee aria_text cwm deepseek_v2 gemma2 gemma3_text gpt_neox hyperclovax '
  'internlm3 iquestcoder jais2 llama minicpm3 vaultgemma'
)


@pytest.mark.parametrize('name', DIVIDE.split())
def test_heads_that_a_class_wants_to_divide_the_width(name):
  config = hf_families.read_golden(name)['config']
  model = config_lib.to_model(config)
  heads = dict(num_attention_heads=3, num_key_value_heads=3)
  says = f'num_attention_heads=3 does not divide hidden_size={model.d_model}'
  with support.refused(says):
    config_lib.to_model(config | heads)
  own = dict(num_heads=3, num_kv_heads=3, head_dim=model.head_width)
  with support.refused(says):
    config_lib.from_model(dataclasses.replace(model, **own), name)


def test_heads_of_any_number_are_mistral():
  model = schema.Model(d_model=160, num_heads=6, head_dim=32)
  assert exact_or_refused(model)['model_type'] == 'mistral'
  model = dataclasses.replace(model, num_heads=5)
  assert exact_or_refused(model)['model_type'] == 'llama'


@pytest.mark.parametrize('scaled', [{}, LINEAR, LLAMA3, YARN])
def test_half_a_head_that_is_scaled_is_no_phi3(scaled):
  model = schema.Model(rope_fraction=0.5, **scaled)
  found = exact_or_refused(model)['model_type']
  assert found == ('glm' if scaled else 'phi3')


@pytest.mark.parametrize('name', ['deepseek_v2', 'deepseek_v3', 'youtu'])
def test_a_cap_on_scores_of_latents_is_no_default(name):
  model = config_lib.to_model(hf_families.read_golden(name)['config'])
  model = dataclasses.replace(model, attention_softcap=2.0)
  for given in (name, ''):
    with support.refused('model.attention_softcap=2.0 (there 0.0)'):
      config_lib.from_model(model, given)


def test_models_that_compute_the_same_are_the_same():
  same = lambda **fields: config_lib.canonical(schema.Model(**fields))
  assert same(position='none') == same(pattern='N')
  assert same(position='none', rope_theta=5.0) == same(position='none')
  assert same(position='none') != same()
  assert same(pattern='W', window=4) != same()
  assert same(head_dim=40, num_kv_heads=4) == same()


# ------------------------------------------------------------------ unknown

UNKNOWN = dict(
  own_flag=True, own_count=1, own_share=1.0, own_name='x', own_list=[0],
  own_table=dict(a=0),
)  # fmt: skip


@pytest.mark.parametrize('name', hf_families.TINY)
def test_a_field_that_nothing_reads_is_refused(name):
  """True is not 1, and neither is 1.0."""
  config = hf_families.read_golden(name)['config']
  for field, value in UNKNOWN.items():
    with support.refused(
      f'config.json: {field}={value!r}', config['model_type']
    ):
      config_lib.to_model(config | {field: value})
  off = dict.fromkeys(UNKNOWN) | dict(a=False, b=0, c=0.0, d='', e=[], f={})
  same = config_lib.canonical
  assert same(config_lib.to_model(config | off)) == same(
    config_lib.to_model(config)
  )


@pytest.mark.parametrize(
  'field', ['alibi', 'use_qk_norm', 'parallel_attn', 'own_flag']
)
def test_llama_with_parts_of_others(field):
  config = hf_families.read_golden('llama')['config']
  with support.refused(f'config.json: {field}=True'):
    config_lib.to_model(config | {field: True})


def test_a_rotary_parameter_that_nothing_reads_is_refused():
  config = hf_families.read_golden('llama')['config']
  rope = config['rope_parameters'] | dict(mrope_section=[1, 1])
  with support.refused('rope_parameters: mrope_section=[1, 1]'):
    config_lib.to_model(config | dict(rope_parameters=rope))


def unread(config):
  """Fields of a config.json that no row of its family asks for."""
  family = known.find(config['model_type'])
  found = reader.Reader(config)
  found.partial = any(isinstance(row, rows.Fraction) for row in family.rows)
  for row in family.rows:
    row.read(found)
  out = set(config) - found.used - {'model_type', 'architectures'}
  for name, inner in found._inside.items():
    fields = inner.config.keys() - inner.used if inner else ()
    out |= {f'{name}.{x}' for x in fields}
  return out


@pytest.mark.parametrize('name', hf_families.TINY)
def test_rows_read_what_they_write(name):
  """Each field that a row writes is one that a row reads."""
  config = hf_families.read_golden(name)['config']
  model = config_lib.to_model(config)
  written = config_lib.from_model(model, config['model_type'])
  assert not unread(written)
  assert unread(written | dict(own_field=None)) == {'own_field'}


def test_llada_says_its_length_again():
  name = 'max_sequence_length'
  config = hf_families.read_golden('llada')['config']
  written = config_lib.from_model(config_lib.to_model(config), 'llada')
  assert written[name] == config[name] == 64


def test_families_and_mixers_are_all_there():
  for name, family in known.FAMILIES.items():
    assert isinstance(family, kin.Family), name
  assert set(layer.MIXERS) == set(mixers.TABLE)


THETA = dict(rope_theta=5e5)


@pytest.mark.parametrize(
  'name, change',
  [
    ('llama', THETA | LLAMA3),
    ('gpt_neox', THETA),
    ('stablelm', THETA | LINEAR),
    ('phi3', THETA),
    ('glm4_moe', THETA | YARN | dict(rope_fraction=0.5)),
    ('gemma3_text', THETA | LINEAR | dict(rope_local_theta=1e3)),
    ('olmo3', THETA | LLAMA3 | dict(rope_local_theta=5e5)),
    ('deepseek_v3', THETA),
  ],
)
def test_readers_of_older_fields_rotate_alike(name, change):
  """transformers 4 knows no rope_parameters, and says nothing of them."""
  config = hf_families.read_golden(name)['config']
  model = dataclasses.replace(config_lib.to_model(config), **change)
  written = config_lib.from_model(model, config['model_type'])
  old = {k: x for k, x in written.items() if k != 'rope_parameters'}
  same = config_lib.canonical
  assert same(config_lib.to_model(old)) == same(model)


def test_older_fields_that_say_another_rotation():
  config = hf_families.read_golden('gemma3_text')['config']
  config = config_lib.from_model(config_lib.to_model(config), 'gemma3_text')
  for name in ('rope_theta', 'rope_local_base_freq'):
    with support.refused(f'{name}=7.0 and rope_parameters are there'):
      config_lib.to_model(config | {name: 7.0})
