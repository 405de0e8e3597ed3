"""What Zamba2's files say, and what of it is refused."""

import dataclasses

import hf_families
import peers
import pytest
import support

from paraxis.models.huggingface import config as config_lib
from paraxis.models.huggingface import leaves

pytestmark = pytest.mark.usefixtures('float64')


@pytest.mark.parametrize(
  'change',
  [
    dict(tie_word_embeddings=False), dict(use_long_context=True),
    dict(add_bias_linear=True), dict(hybrid_layer_ids=[1, 3]),
    dict(attention_head_dim=4), dict(mamba_headdim=4),
    dict(num_attention_heads=5), dict(n_mamba_heads=5),
    dict(num_key_value_heads=2), dict(num_hidden_layers=4),
    dict(layers_block_type=['hybrid', 'attention']),
  ],
  ids=str,
)  # fmt: skip
def test_what_is_not_here_is_refused(change):
  config = hf_families.read_golden('zamba2')['config']
  with support.refused('config.json: '):
    config_lib.to_model(config | change)


def test_a_file_without_layers_is_the_usual_one():
  config = hf_families.read_golden('zamba2')['config']
  for name in ('layers_block_type', 'hybrid_layer_ids'):
    config.pop(name, None)
  model = config_lib.to_model(config | dict(num_hidden_layers=54))
  assert model.pattern.count('H') == 9 and model.num_layers == 54


def test_biases_of_a_block_are_not_left_out():
  """Its mlp has those of the model, where no layer has an mlp of its own."""
  model = config_lib.to_model(hf_families.read_golden('zamba2')['config'])
  assert config_lib.from_model(model)['model_type'] == 'zamba2'
  other = dataclasses.replace(model, mlp_bias=True)
  paths = hf_families.shapes_of(other).keys() - hf_families.shapes_of(model)
  assert 'layers/mamba2/block/mlp/up_bias' in paths
  for name in ('zamba2', ''):
    with support.refused('model.mlp_bias=True (there False)'):
      config_lib.from_model(other, name)


def test_copies_of_a_block_are_known():
  config = hf_families.read_golden('zamba2')['config']
  model = config_lib.to_model(config)
  copy = 'model.layers.{}.shared_transformer.self_attn.q_proj.weight'
  found = [i for i in range(9) if leaves.ignored(copy.format(i), model)]
  assert found == [5, 7]
  wanted = {n for leaf in leaves.table(model, 'zamba2') for n in leaf.names}
  assert copy.format(1) in wanted and copy.format(5) not in wanted


@pytest.mark.parametrize(
  'section, change',
  [
    ('hybrid', dict(mlp='swiglu')), ('mamba', dict(norm_epsilon=1e-2)),
    ('mamba', dict(step_floor=0.0)),
  ],
)  # fmt: skip
def test_a_wrong_field_is_seen(section, change):
  name = 'zamba2_one_block'
  model = config_lib.to_model(hf_families.read_golden(name)['config'])
  other = dataclasses.replace(getattr(model, section), **change)
  logits, far = hf_families.against_golden(name, **{section: other})
  assert logits > 100 * peers.TOLERANCE and far
