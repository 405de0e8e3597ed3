"""Scopes name what operations are of, and change none of them."""

import contextlib
import re

import jax
import pytest

from paraxis.configs import schema
from paraxis.configs.base import model as model_schema
from paraxis.train import program
from paraxis.train import step as step_lib
from paraxis.train.run import profile

MODEL = dict(
  vocab_size=32, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24,
  num_layers=4, attention_block=8,
)  # fmt: skip
MOE = model_schema.Experts(count=4, pattern='DE')
BOTH = {'layer_F/attention', 'layer_F/mlp', 'loss/head'}
CASES = {
  # mesh, fields of the model, other fields, scopes of the gradient
  'annotated': (
    'data=2,fsdp=2,tensor=2', {}, {},
    BOTH | {'embed', 'layer_F/attention_norm', 'final_norm', 'positions'},
  ),
  'explicit': (
    'data=4,tensor=2', {}, {'mesh.collectives': 'explicit'},
    BOTH | {'gradients'},
  ),
  'experts': (
    'data=8', dict(pattern='FG', experts=MOE), {'train.remat': 'full'},
    {'layer_GE/gated_linear', 'layer_GE/moe', 'router', 'experts'},
  ),
  'stages': (
    'stage=2,data=4', {}, {'pipeline.microbatches': 2},
    {'backward/layer_F/attention', 'embed/embed', 'loss/loss/head'},
  ),
}  # fmt: skip


def _texts(case, debug=False):
  """StableHLO of the gradient and the update of a case."""
  mesh, model, fields, _ = CASES[case]
  config = schema.Config(
    model=schema.Model(**MODEL | model), data=schema.Data(sequence_length=16),
    optimizer=schema.Optimizer(name='muon'),
  )  # fmt: skip
  job = program.on_devices(schema.with_values(config, fields), mesh)
  made = step_lib.make(job.built, job.optimizer, 1.0)
  with job.context():
    gradient = jax.jit(made.grads).lower(
      job.state.variables, job.batch_shapes()
    )
    found = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), gradient.out_info
    )
    update = jax.jit(made.update).lower(job.state, *found)
  return [x.as_text(debug_info=debug) for x in (gradient, update)]


def _scopes(text):
  """Scopes of every location of a text, and every part of them."""
  paths = re.findall(r'loc\("([^".]*/[^".]*)"', text)
  return {profile.scope(path) for path in paths}


@pytest.mark.parametrize('case', CASES)
def test_operations_name_their_scopes(case):
  gradient, update = _texts(case, debug=True)
  assert CASES[case][3] <= _scopes(gradient)
  assert 'backward loss' in ' '.join(_scopes(gradient))
  assert {'gradient_norm', 'update/adamw', 'update/muon'} <= _scopes(update)


@pytest.mark.parametrize('case', CASES)
def test_scopes_change_no_operation(case, monkeypatch):
  named = _texts(case)
  assert not any('layer_F' in text for text in named)
  with monkeypatch.context() as m:
    m.setattr(jax, 'named_scope', lambda name: contextlib.nullcontext())
    assert _texts(case) == named
    assert 'layer_' not in _texts(case, debug=True)[0]
  changed = dict(MODEL, norm_epsilon=1e-5)  # the comparison can fail
  monkeypatch.setitem(globals(), 'MODEL', changed)
  assert _texts(case)[0] != named[0]
