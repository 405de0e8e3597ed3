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
from paraxis.models import depth
from paraxis.sharding import annotate
from paraxis.sharding import rules
from paraxis.train import program
from paraxis.train import state as state_lib
from paraxis.train.updates import optimizers

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
  """(model, state of shapes, axes of the optimizer's own) of the quickstart."""
  config = schema.view(command_line.load('quickstart'))
  model = build.build(config, 'data=8').model
  optimizer = optimizers.Optimizer(config.optimizer, 480, model)
  init = lambda: state_lib.init(model, optimizer, jax.random.key(0))
  state = jax.eval_shape(init)
  return model, state, optimizer.axes(state.params)


def test_the_paths_of_the_quickstart(quickstart):
  """A change here makes every older checkpoint unreadable."""
  assert set(state_lib.flatten(quickstart[1])) == GOLDEN


def test_every_leaf_has_its_axes(quickstart):
  model, state, own = quickstart
  flat = state_lib.flatten(state)
  axes = state_lib.axes(state_lib.leaves(state, model, own))
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
    axes={'norm/scale': ('norm',), 'layers/norm/scale': ('layers', 'norm')},
    held={},
  )
  params = {'layers/norm/scale': jnp.zeros((2, 3)), 'norm/scale': jnp.zeros(3)}
  axes = state_lib.axes(state_lib.leaves(_state(params, mu=params), model))
  for folder in ('params', 'optimizer/adamw/mu'):
    assert axes[f'{folder}/layers/norm/scale'] == ('layers', 'norm')
    assert axes[f'{folder}/norm/scale'] == ('norm',)


def _state(params, **adamw):
  state = state_lib.State(params, {}, {'adamw': adamw}, 0, 0, 0)
  return jax.tree.map(jnp.asarray, state)


UP = 'layers/mlp/up'
HELD = depth.Held((1, -1, 0), None)  # 2 layers on rows of stages
MATRICES_ONLY = types.SimpleNamespace(
  axes={UP: ('layers', 'embed', 'mlp')}, held={UP: HELD}
)
PRECONDITIONER = ('layers', 'embed', None)


def test_a_leaf_of_another_shape_is_no_mirror():
  """(layers, in, in) beside a matrix (layers, in, out): the optimizer says."""
  state = _state(
    {UP: jnp.zeros((3, 4, 6))},
    mu={UP: jnp.zeros((3, 4, 6))},
    left={UP: jnp.zeros((3, 4, 4))},
  )
  path = f'optimizer/adamw/left/{UP}'
  with pytest.raises(ValueError, match=rf'{path} \(3, 4, 4\) mirrors no'):
    state_lib.leaves(state, MATRICES_ONLY)
  found = state_lib.leaves(state, MATRICES_ONLY, {path: PRECONDITIONER})
  assert found[path] == state_lib.Leaf(PRECONDITIONER, HELD)
  assert found[f'optimizer/adamw/mu/{UP}'].axes == ('layers', 'embed', 'mlp')
  # Its layers are put in order as those of the matrix; other axes have none.
  flat = {path: jnp.arange(3.0)[:, None, None] * jnp.ones((3, 4, 4))}
  with jax.set_mesh(jax.make_mesh((1,), ('data',), devices=jax.devices()[:1])):
    flat = {p: jax.device_put(x, jax.P()) for p, x in flat.items()}
    with annotate.use(rules.PRESETS['data']):
      ordered = state_lib.in_order(flat, found)
      back = state_lib.on_stages(ordered, flat, found)
      alone = state_lib.leaves(state, MATRICES_ONLY, {path: (None,) * 3})
      assert state_lib.in_order(flat, alone) == flat
  assert ordered[path][:, 0, 0].tolist() == [2, 0]
  assert back[path][:, 0, 0].tolist() == [0, 0, 2]


@pytest.mark.parametrize(
  'held, wanted',
  [
    (depth.Held((0, 3, 1, 2)), jax.P('stage', 'data', None)),
    (depth.Held((0, 2, 1, -1)), jax.P(None, ('data', 'stage'), None)),
    (depth.Held((0, 3, 1, 2), (1, (3, 0, 2, 1))), jax.P('stage', 'data', None)),
    (depth.Held(None, (1, (3, 0, 2, 1))), jax.P('stage', 'data', None)),
    (depth.Held((-1, 0, -1, -1)), jax.P(None, ('data', 'stage'), None)),
  ],
)
def test_what_is_in_order_is_sharded_as_finely(held, wanted):
  """4 rows on 2 stages; 3 layers and 1 layer do not divide, others do."""
  value = np.arange(4 * 4 * 6.0).reshape(4, 4, 6)
  if held.rows:
    value[[row < 0 for row in held.rows]] = 0  # empty rows
  mesh = jax.make_mesh((2, 2), ('stage', 'data'), devices=jax.devices()[:4])
  with jax.set_mesh(mesh):
    leaf = jax.device_put(value, jax.P('stage', 'data'))
    shapes = jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=leaf.sharding
    )
    leaves = {UP: state_lib.Leaf((None,) * 3, held)}
    found = state_lib.in_order({UP: leaf}, leaves)
    like = state_lib.in_order({UP: shapes}, leaves)[UP]
    back = state_lib.on_stages(found, {UP: leaf}, leaves)
  np.testing.assert_array_equal(found[UP], depth.to_order(value, *held))
  assert found[UP].sharding.spec == wanted
  assert (like.shape, like.sharding) == (found[UP].shape, found[UP].sharding)
  bytes_ = {shard.data.nbytes for shard in found[UP].addressable_shards}
  assert bytes_ == {found[UP].nbytes // 4}
  np.testing.assert_array_equal(back[UP], value)
  assert back[UP].sharding.is_equivalent_to(leaf.sharding, 3)


def test_what_nothing_divides_is_whole():
  """3 layers of 5 by 7: two stages divide no dimension."""
  held = depth.Held((0, 2, 1, -1))
  mesh = jax.make_mesh((2,), ('stage',), devices=jax.devices()[:2])
  with jax.set_mesh(mesh):
    leaf = jax.device_put(np.ones((4, 5, 7)), jax.P('stage'))
    leaves = {UP: state_lib.Leaf((None,) * 3, held)}
    found = state_lib.in_order({UP: leaf}, leaves)[UP]
  assert found.shape == (3, 5, 7) and found.sharding.is_fully_replicated


def test_a_square_matrix_has_no_mirrors_by_chance():
  """What the optimizer says counts, also where the shape would fit."""
  square = {UP: jnp.zeros((3, 4, 4))}
  path = f'optimizer/adamw/left/{UP}'
  own = {path: PRECONDITIONER}
  found = state_lib.leaves(_state(square, left=square), MATRICES_ONLY, own)
  assert found[path].axes == PRECONDITIONER


@pytest.mark.parametrize(
  'own, words',
  [
    ({f'optimizer/adamw/left/{UP}': ('layers', None)}, r'axes \(.layers., No'),
    ({'optimizer/adamw/right': ('layers',)}, 'no leaves of the state'),
    ({'optimizer/adamw/each': ('layers',)}, 'layers or experts of which'),
  ],
)
def test_axes_that_do_not_fit(own, words):
  right = {
    f'optimizer/adamw/left/{UP}': PRECONDITIONER,
    'optimizer/adamw/each': (None,),
  }
  state = _state(
    {UP: jnp.zeros((3, 4, 6))},
    left={UP: jnp.zeros((3, 4, 4))},
    each=jnp.zeros(3),
  )
  assert state_lib.leaves(state, MATRICES_ONLY, right)
  with pytest.raises(ValueError, match=words):
    state_lib.leaves(state, MATRICES_ONLY, {**right, **own})


def test_flatten_and_back(quickstart):
  _, shapes, _ = quickstart
  state = jax.tree.map(lambda x: np.full(x.shape, 2, x.dtype), shapes)
  flat = state_lib.flatten(state)
  mixed = dict(reversed(flat.items()))
  back = state_lib.unflatten(shapes, mixed)
  assert jax.tree.structure(back) == jax.tree.structure(shapes)
  jax.tree.map(np.testing.assert_array_equal, back, state)
  mixed.pop('params/embedding')
  with pytest.raises(KeyError, match='params/embedding'):
    state_lib.unflatten(shapes, mixed)


def test_leaves_of_a_tuple_have_names_of_their_own():
  """A position is named where two elements hold leaves, and only there."""
  pair = ({'mu': 1}, (), {'mu': {'norm/scale': (2, 3)}})
  state = state_lib.State({}, {}, {'adamw': pair, 'muon': ((), 4)}, 5, 6, 7)
  flat = state_lib.flatten(state)
  first = 'optimizer/adamw/2/mu/norm/scale'
  assert flat == {
    'optimizer/adamw/0/mu': 1, f'{first}/0': 2, f'{first}/1': 3,
    'optimizer/muon': 4, 'step': 5, 'skipped': 6, 'skipped_in_a_row': 7,
  }  # fmt: skip
  assert state_lib.unflatten(state, flat) == state


def test_two_leaves_of_one_name_are_refused():
  twins = {'mu/0': 1, 'mu': (2, 3)}
  state = state_lib.State({}, {}, {'adamw': twins}, 0, 0, 0)
  with pytest.raises(ValueError, match="both named 'optimizer/adamw/mu/0'"):
    state_lib.flatten(state)


def test_one_stage_moves_nothing():
  config = schema.view(dict(model=dict(vocab_size=32, d_model=16, num_heads=2)))
  built = build.build(config, 'data=4', devices=jax.devices()[:4])
  state = _state({UP: np.zeros(built.params[UP].shape)})
  leaves = state_lib.leaves(state, built.model)
  flat = {f'params/{UP}': np.zeros(3)}
  assert state_lib.in_order(flat, leaves) == flat
  assert state_lib.on_stages(flat, flat, leaves) == flat


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
