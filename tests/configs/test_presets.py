"""Presets: small_text is the quickstart's model, and fields are checked."""

import pytest

from paraxis.configs import presets
from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.train.claims import experiment


def test_small_text_is_the_quickstart_but_for_mesh_and_steps():
  found = presets.small_text(qk_norm='head')
  found.mesh.update(data=2, fsdp=2, tensor=2)
  found.optimizer.warmup_steps, found.train.steps = 40, 480
  assert schema.view(found) == schema.view(command_line.load('quickstart'))
  plain = presets.small_text(d_model=64)
  assert plain.model.embedding_scale == 8 and not plain.model.attention_scale


@pytest.mark.parametrize(
  'preset', [presets.tiny, presets.small_text, presets.llama]
)
def test_a_preset_takes_fields_of_the_model(preset):
  config = preset(num_heads=8, experts=dict(count=4))
  assert schema.view(config).model.num_heads == 8
  assert config.model.experts.count == 4
  with pytest.raises(KeyError, match='num_head'):
    preset(num_head=8)


def test_a_layout_is_a_text_or_a_mesh_with_fields():
  case = {'mesh': 'stage=2', 'model.num_layers': 6}
  assert experiment.on_layouts('data=2', case) == dict(
    check=experiment.equals_one_device,
    cases=[dict(mesh='data=2'), case],
    within=1e-9,
  )
