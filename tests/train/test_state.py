"""The canonical tree of a run: its paths are a promise to old checkpoints.

Layers on stages, in order and back: the updates of certify/test_invariance.py,
the runs of test_pipeline_step.py.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import model as model_schema
from paraxis.models import build
from paraxis.train import optimizers
from paraxis.train import program
from paraxis.train import state as state_lib

MATRICES = """
  layers/attention/key layers/attention/output layers/attention/query
  layers/attention/value layers/mlp/down layers/mlp/gate layers/mlp/up
""".split()
OTHERS = """
  embedding layers/attention/key_norm layers/attention/query_norm
  layers/attention_norm/scale layers/mlp_norm/scale norm/scale
""".split()
GOLDEN = {
  'step',
  'skipped',
  'skipped_in_a_row',
  'optimizer/adamw/count',
  'optimizer/muon/count',
  'optimizer/muon/ns_coeffs',
  *(f'params/{p}' for p in MATRICES + OTHERS),
  *(f'optimizer/adamw/mu/{p}' for p in OTHERS),
  *(f'optimizer/adamw/nu/{p}' for p in OTHERS),
  *(f'optimizer/muon/mu/{p}' for p in MATRICES),
}


@pytest.fixture(scope='module')
def quickstart():
  """(model, state of shapes) of the quickstart."""
  config = schema.view(command_line.load('quickstart'))
  model = build.build(config, 'data=8').model
  optimizer = optimizers.Optimizer(config.optimizer, 480, model)
  init = lambda: state_lib.init(model, optimizer, jax.random.key(0))
  return model, jax.eval_shape(init)


def test_the_paths_of_the_quickstart(quickstart):
  """A change here makes every older checkpoint unreadable."""
  assert set(state_lib.flatten(quickstart[1])) == GOLDEN


def test_every_leaf_has_its_axes(quickstart):
  model, state = quickstart
  flat, axes = state_lib.flatten(state), state_lib.axes(state, model)
  assert axes.keys() == flat.keys()
  assert all(len(axes[p]) == len(flat[p].shape) for p in flat)
  assert axes['params/embedding'] == ('vocab', 'embed')
  query = ('layers', 'embed', 'heads', 'head_dim')
  assert axes['params/layers/attention/query'] == query
  assert axes['optimizer/muon/mu/layers/attention/query'] == query
  assert axes['optimizer/adamw/nu/norm/scale'] == ('norm',)
  assert axes['step'] == () and axes['optimizer/muon/ns_coeffs'] == (None,)


def test_the_longest_name_owns_a_leaf():
  model = types.SimpleNamespace(
    axes={'norm/scale': ('norm',), 'layers/norm/scale': ('layers', 'norm')}
  )
  params = {'layers/norm/scale': jnp.zeros((2, 3)), 'norm/scale': jnp.zeros(3)}
  state = state_lib.State(params, {}, {'adamw': {'mu': params}}, 0, 0, 0)
  state = jax.tree.map(jnp.asarray, state)
  axes = state_lib.axes(state, model)
  for folder in ('params', 'optimizer/adamw/mu'):
    assert axes[f'{folder}/layers/norm/scale'] == ('layers', 'norm')
    assert axes[f'{folder}/norm/scale'] == ('norm',)


def test_flatten_and_back(quickstart):
  _, shapes = quickstart
  state = jax.tree.map(lambda x: np.full(x.shape, 2, x.dtype), shapes)
  flat = state_lib.flatten(state)
  mixed = dict(reversed(flat.items()))
  back = state_lib.unflatten(shapes, mixed)
  assert jax.tree.structure(back) == jax.tree.structure(shapes)
  jax.tree.map(np.testing.assert_array_equal, back, state)
  mixed.pop('params/embedding')
  with pytest.raises(KeyError, match='params/embedding'):
    state_lib.unflatten(shapes, mixed)


def test_two_leaves_of_one_name_are_refused():
  pair = ({'mu': 1}, {'mu': 2})  # positions in a tuple are no names
  state = state_lib.State({}, {}, {'adamw': pair}, 0, 0, 0)
  with pytest.raises(ValueError, match="both named 'optimizer/adamw/mu'"):
    state_lib.flatten(state)


def test_one_stage_moves_nothing():
  config = schema.view(dict(model=dict(vocab_size=32, d_model=16, num_heads=2)))
  built = build.build(config, 'data=4', devices=jax.devices()[:4])
  flat = {'params/layers/mlp/up': np.zeros(3)}
  assert state_lib.in_order(flat, built.model) == flat
  assert state_lib.on_stages(flat, flat, built.model) == flat


def test_what_experts_count_is_no_parameter():
  """What maps over parameters leaves it alone; on disk it stands among them."""
  model = schema.Model(
    vocab_size=32, d_model=16, num_layers=2, num_heads=2, d_ff=16,
    experts=model_schema.Experts(count=4, bias_rate=0.01),
  )  # fmt: skip
  config = schema.Config(model=model, data=schema.Data(sequence_length=16))
  job = program.on_devices(config, devices=jax.devices()[:1], abstract=True)
  counted = {'layers/moe/load', 'layers/moe/bias'}
  assert set(job.state.counts) == counted
  assert not counted & set(job.state.params)
  assert set(job.state.variables) == set(job.built.params)
  flat = state_lib.flatten(job.state)
  assert {f'params/{path}' for path in job.built.params} <= set(flat)
  assert not any(path.startswith('counts') for path in flat)
  again = state_lib.unflatten(job.state, flat)
  assert again.counts['layers/moe/bias'] is flat['params/layers/moe/bias']
