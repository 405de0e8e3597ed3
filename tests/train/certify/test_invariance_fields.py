"""Fields that Hugging Face families need change no number on any layout.

Every case on 8 virtual devices and on one, in float64 (test_invariance.py).
"""

import dataclasses

import pytest
import support

from paraxis.configs import schema

MODELS = {
  'phi': dict(
    residual='shared', rope_fraction=0.5, norm='layernorm', mlp='gelu_exact',
    mlp_bias=True, head_bias=True, tied_embedding=False,
  ),
  'neox': dict(
    residual='parallel', rope_fraction=0.5, norm='layernorm_unbiased',
    mlp='relu2', logit_scale=0.25, residual_scale=0.5,
  ),
  'olmo': dict(norm='layernorm_bare', mlp='geglu_exact', logit_scale=2.0),
}  # fmt: skip
MESHES = {
  'stages': dict(stage=2, fsdp=2, tensor=2),
  'context': dict(data=2, context=2, tensor=2, collectives='explicit'),
}


def config_of(name, mesh, **fields):
  config = support.piped(mesh=MESHES[mesh])
  small = dict(num_layers=4, num_kv_heads=4, vocab_size=32, d_model=32, d_ff=32)
  model = dataclasses.replace(config.model, **small | MODELS[name] | fields)
  return dataclasses.replace(config, model=model)


@pytest.mark.parametrize('mesh', MESHES)
@pytest.mark.parametrize('name', MODELS)
def test_equals_one_device(name, mesh):
  rows = support.certify(config_of(name, mesh))
  assert len(rows) == 3 and all(row.passed for row in rows), rows


@pytest.mark.parametrize(
  'name, schedule', [('phi', 'one_f_one_b'), ('olmo', 'zero_bubble')]
)
def test_ends_whole_on_every_stage(name, schedule):
  """A vocabulary that tensor divides, and stages do not."""
  config = schema.with_values(
    config_of(name, 'stages', vocab_size=34),
    {
      'mesh.rules': 'fsdp_tensor vocab=tensor',
      'pipeline.schedule': schedule,
    },
  )
  rows = support.certify(config)
  assert len(rows) == 3 and all(row.passed for row in rows), rows


@pytest.mark.parametrize('loss', ['logits', 'chunked'])
def test_forms_of_the_loss(loss):
  rows = support.certify(config_of('neox', 'context', loss=loss))
  assert all(row.passed for row in rows), rows


@pytest.mark.parametrize(
  'fields, words',
  [
    (dict(residual='shared', norm_placement='post'), ['shared', 'post']),
    (dict(loss='chunked', head_bias=True), ['chunked', 'head_bias']),
    (dict(rope_fraction=0.1), ['rope_fraction=0.1', 'head_dim=4']),
  ],
)
def test_what_contradicts(fields, words):
  from paraxis.models import checks

  with support.refused(*words):
    checks.check_model(schema.Model(d_model=16, num_heads=4, **fields))
