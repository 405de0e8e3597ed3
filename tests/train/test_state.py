"""The canonical tree of a run: its paths are a promise to old checkpoints."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.models import build
from paraxis.sharding import rules as rules_lib
from paraxis.train import optimizers
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
  state = state_lib.State(params, {'adamw': {'mu': params}}, 0, 0, 0)
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
  state = state_lib.State({}, {'adamw': pair}, 0, 0, 0)
  with pytest.raises(ValueError, match="both named 'optimizer/adamw/mu'"):
    state_lib.flatten(state)


# ------------------------------------------------------- layers on stages

PIPELINES = {
  'even': (4, 'stage=2,fsdp=2', {}),
  'uneven': (5, 'stage=2,fsdp=2', {}),
  'interleaved': (7, 'stage=2,fsdp=2', dict(schedule='interleaved', chunks=2)),
  'v_half': (4, 'stage=2,fsdp=2', dict(schedule='v_half', chunks=2)),
}


STAGED = ('layers/mlp/up', 'layers/mlp_norm/scale')
ENDS = ('embedding', 'norm/scale')


def staged(layers, mesh, pipeline):
  """(Built, {path: (layers in order, as stages hold them)} in NumPy).

  A layer's rows hold its number, each parameter's another fraction.
  """
  config = schema.view(
    dict(
      model=dict(
        vocab_size=32, d_model=16, num_layers=layers, num_heads=2, d_ff=32
      ),
      pipeline=pipeline,
    )
  )  # fmt: skip
  built = build.build(config, mesh, devices=jax.devices()[:4])
  found = {}
  for at, (path, leaf) in enumerate(sorted(built.params.items())):
    if path not in STAGED:
      continue
    shape = layers, *leaf.shape[1:]
    numbers = np.arange(1, layers + 1).reshape(-1, *[1] * (len(shape) - 1))
    in_order = np.broadcast_to(numbers + at / 64, shape).astype(leaf.dtype)
    held = np.zeros(leaf.shape, leaf.dtype)
    rows = built.model.depth.rows.reshape(-1)
    for row, layer in enumerate(rows):
      if layer >= 0:
        held[row] = in_order[layer]
    found[path] = in_order, held
  return built, found


@pytest.mark.parametrize('name', PIPELINES)
def test_in_order_and_back_on_stages(name):
  built, found = staged(*PIPELINES[name])
  model, sizes = built.model, dict(built.mesh.shape)
  with build.layout(built):
    place = lambda x, path: jax.device_put(x, built.params[path].sharding)
    params = {
      path: place(np.zeros(built.params[path].shape, np.float32), path)
      for path in ENDS
    } | {path: place(held, path) for path, (_, held) in found.items()}
    flat = {f'params/{path}': x for path, x in params.items()}
    flat |= {
      f'optimizer/adamw/mu/{path}': 2 * x for path, x in params.items()
    } | {'step': jnp.int32(3)}
    ordered = state_lib.in_order(flat, model)
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      flat,
    )
    told = state_lib.in_order(shapes, model)
    back = state_lib.on_stages(ordered, flat, model)
  assert ordered.keys() == flat.keys() == back.keys() == told.keys()
  for path, (in_order, held) in found.items():
    whole = None, *model.axes[path][1:]
    spec = rules_lib.spec(whole, None, built.rules, sizes)
    for prefix, times in (('params/', 1), ('optimizer/adamw/mu/', 2)):
      x, y = ordered[prefix + path], back[prefix + path]
      np.testing.assert_array_equal(jax.device_get(x), times * in_order)
      np.testing.assert_array_equal(jax.device_get(y), times * held)
      # What a checkpoint is read into is what is saved.
      assert x.shape == told[prefix + path].shape
      for leaf in (x, told[prefix + path]):
        assert leaf.sharding.is_equivalent_to(
          jax.NamedSharding(built.mesh, spec), x.ndim
        )
      assert y.sharding == built.params[path].sharding
  for path in (*(f'params/{p}' for p in ENDS), 'step'):
    assert ordered[path] is flat[path] and back[path] is ordered[path]


def test_one_stage_moves_nothing():
  config = schema.view(dict(model=dict(vocab_size=32, d_model=16, num_heads=2)))
  built = build.build(config, 'data=4', devices=jax.devices()[:4])
  flat = {'params/layers/mlp/up': np.zeros(3)}
  assert state_lib.in_order(flat, built.model) == flat
  assert state_lib.on_stages(flat, flat, built.model) == flat


def test_rows_of_another_schedule_are_another_order():
  """A tree of one placement read as if it were of another is wrong."""
  built, found = staged(*PIPELINES['interleaved'])
  other, _ = staged(7, 'stage=2,fsdp=2', {})
  path = 'layers/mlp/up'
  in_order, held = found[path]
  rows = other.model.rows[path]
  assert len(rows) == len(held) == 8  # the shapes do not tell
  wrong = np.array([held[i] for i in np.argsort(rows)[1:]])
  assert wrong.shape == in_order.shape and (wrong != in_order).any()
