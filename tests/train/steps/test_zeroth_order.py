"""Steps along a direction: the two losses, the direction, the log.

References: directions by jax.random.bits and SciPy; losses of moved parameters
on one device; NumPy for the update.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import support

from paraxis.configs import schema
from paraxis.models import aux as aux_lib
from paraxis.sharding import mesh as mesh_lib
from paraxis.train import loop
from paraxis.train import loss as loss_lib
from paraxis.train import program
from paraxis.train import step as step_lib
from paraxis.train.certify import check
from paraxis.train.certify import inputs
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.run import metrics
from paraxis.train.steps import zeroth_order

ON = {'train.estimator': 'zeroth_order', 'optimizer.warmup_steps': 1}
EPSILON = 1e-2


def config_of(mesh='', **changes):
  """schema.Config of a small model; changes: 'section__field'."""
  more = {name.replace('__', '.'): x for name, x in changes.items()}
  given = ON | {'train.perturbation': EPSILON, 'model.num_layers': 2} | more
  return schema.with_values(support.piped(mesh_lib.parse(mesh)), given)


def direction(shape, draw, leaf, layer=None):
  """NumPy (shape) of normal numbers: what a leaf, or a layer of it, draws."""
  key = jax.random.fold_in(jax.random.key(draw, impl='threefry2x32'), leaf)
  key = key if layer is None else jax.random.fold_in(key, layer)
  bits = np.asarray(jax.random.bits(key, shape, 'uint32'))
  uniform = (2 * ((bits >> 9) + 0.5) - 2**23) / 2**23
  return 2**0.5 * scipy.special.erfinv(uniform)


def directions(params, frozen, draw):
  """{path: direction} of NumPy parameters; stacks layer by layer."""
  out = {}
  for leaf, path in enumerate(sorted(set(params) - set(frozen))):
    x = params[path]
    if path.startswith('layers/'):
      rows = [direction(x.shape[1:], draw, leaf, i) for i in range(len(x))]
      out[path] = np.stack(rows)
    else:
      out[path] = direction(x.shape, draw, leaf)
  return out


def near(found, wanted):
  np.testing.assert_allclose(float(found), float(wanted), rtol=1e-9)


@pytest.fixture
def runner():
  return functools.cache(
    lambda **changes: trial.Runner(config_of(**changes), jax.devices()[:1])
  )


@pytest.mark.usefixtures('float64')
@pytest.mark.parametrize(
  'changes',
  [
    dict(optimizer__clip_norm=0.0),
    dict(train__freeze='embedding,layers/mlp/*', model__unroll=2,
         optimizer__clip_norm=0.01, optimizer__weight_decay=0.3,
         optimizer__learning_rate=0.01),
    dict(model__pattern='WF', model__window=8, model__tied_embedding=False,
         model__num_layers=3),
  ],
  ids=['all', 'frozen', 'unit'],
)  # fmt: skip
def test_a_step_equals_numpy(runner, changes):
  runner = runner(**changes)
  c, model = runner.config.optimizer, runner.job.model
  params, batch = inputs.parameters(runner), trial.batches(runner.config, True)
  state, batch = runner.start(params), batch[0]
  z = directions(params, model.frozen, int(batch.draw))

  def loss(sign, z):
    there = params | {p: params[p] + sign * EPSILON * z[p] for p in z}
    return float(loss_lib.next_token(model, there, batch))

  slope_of = lambda z: (loss(1, z) - loss(-1, z)) / (2 * EPSILON)
  slope = slope_of(z)
  found, grads, aux = runner.gradients(state, batch)
  near(grads['slope'], slope)
  near(found, (loss(1, z) + loss(-1, z)) / 2)
  after = runner.update(state, found, grads, aux)
  clip = min(1, c.clip_norm / abs(slope)) if c.clip_norm else 1
  assert c.clip_norm in (0, 1) or clip < 0.5
  rate = float(np.float32(c.learning_rate))  # of the first step
  wanted = dict(params)
  for p in z:
    decay = c.weight_decay * (model.kinds[p] != 'vector')
    wanted[p] = params[p] - rate * (clip * slope * z[p] + decay * params[p])
  support.close(jax.device_get(after.params), wanted, 1e-10)
  # Of another key it is another step.
  other = directions(params, model.frozen, int(batch.draw) + 1)
  assert abs(slope_of(other) - slope) > 1e-3 * abs(slope)


def test_directions_are_normal_and_apart():
  keys = jax.random.key_data(jax.random.key(7, impl='threefry2x32'))
  names = (None, None)
  one = zeroth_order.Moved(jnp.zeros((200, 300)), keys, jnp.ones(()), names)
  z = np.asarray(one[...], np.float64)
  assert abs(z.mean()) < 4 / 60_000**0.5
  assert abs((z**2).mean() - 1) < 0.03 and abs((z**4).mean() - 3) < 0.25
  assert len(np.unique(z)) > 0.99 * z.size
  bits = zeroth_order.bits(keys, jnp.arange(50, dtype=jnp.uint32))
  wanted = jax.random.bits(jax.random.wrap_key_data(keys), (50,), 'uint32')
  np.testing.assert_array_equal(bits, wanted)


LAYOUTS = {
  'twins': ('replica=2,data=2,fsdp=2', dict(mesh__zero=1,
                                            train__microbatches=2)),
  'twins, tensor': ('replica=2,context=2,tensor=2', {}),
  'explicit': ('data=2,fsdp=2,tensor=2', dict(mesh__collectives='explicit')),
  'adapters': ('fsdp=4,tensor=2', dict(train__lora__rank=2)),
  'experts': (
    'replica=2,fsdp=4',
    dict(model__experts__count=4, model__experts__top_k=2,
         model__experts__region='fsdp', mesh__expert_order='3,0,2,1',
         model__num_layers=1),
  ),
}  # fmt: skip


@pytest.mark.usefixtures('float64')
@pytest.mark.sampled(5)
@pytest.mark.parametrize('name', LAYOUTS)
def test_a_layout_equals_one_device(name):
  mesh, changes = LAYOUTS[name]
  checked = 'loss', 'gradients', 'update', 'layout', 'steps'
  found = support.certify(config_of(mesh, **changes), True, checked)
  assert all(v.word == 'PASS' for v in found), [v.line() for v in found]


@pytest.mark.usefixtures('float64')
def test_both_sides_end_a_newton_scan_together():
  newton = dict(model__pattern='R', model__recurrent__heads=4)
  sent = check.check(config_of('replica=2,context=2', **newton)).messages
  loops = [c.axes for c in sent if c.what == 'f64[] -> f64[]' and c.count > 1]
  assert loops and all('replica' in axes for axes in loops)


def test_the_slope_is_an_estimate_of_the_gradient(float64):
  """Over many keys slope z has the gradient as its mean, within its error."""
  runner = trial.Runner(
    config_of(
      train__freeze='embedding,layers/*', model__num_layers=1,
      train__perturbation=1e-4,
    ),
    jax.devices()[:1],
  )  # fmt: skip
  params, batch = inputs.parameters(runner), trial.batches(runner.config, True)
  state, batch, frozen = runner.start(params), batch[0], runner.job.model.frozen
  (path,) = set(params) - frozen
  rows = []
  for draw in range(300):
    own = batch._replace(draw=np.int32(draw))
    slope = float(runner.gradients(state, own)[1]['slope'])
    rows.append(slope * directions(params, frozen, draw)[path])
  of = lambda x: loss_lib.next_token(
    runner.job.model, params | {path: x}, batch
  )
  exact, found = jax.grad(of)(params[path]), np.mean(rows, 0)
  error = np.std(rows, 0) / len(rows) ** 0.5
  assert np.abs((found - exact) / error).max() < 5
  assert np.abs(found + exact).max() > 5 * error.max()  # not the other way


def test_a_run_resumes_and_is_made_again_from_its_log(tiny, tmp_path):
  """6 steps, the last 3 in another process' place: slopes and keys suffice."""
  given = ON | {
    'mesh.data': 1, 'mesh.fsdp': 2, 'mesh.tensor': 1, 'mesh.replica': 2,
    'checkpoint.every': 3,
  }  # fmt: skip
  devices = jax.devices()[:4]
  run = lambda folder, steps, **more: tiny.run(
    folder, given | {'train.steps': steps, 'optimizer.schedule': 'constant'},
    devices=devices, **more,
  )  # fmt: skip
  states = {}

  def keep(step, values, job):
    states['job'] = job

  run(tmp_path / 'whole', 6, callbacks=[keep])
  run(tmp_path / 'parts', 3)
  run(tmp_path / 'parts', 6)
  rows, again = (metrics.read(tmp_path / n) for n in ('whole', 'parts'))
  log = [(r['train/slope'], r['train/draw'], r['train/loss']) for r in
         rows.values()]  # fmt: skip
  assert log == [
    (r['train/slope'], r['train/draw'], r['train/loss']) for r in again.values()
  ]
  assert len({draw for _, draw, _ in log}) == 6
  found = support.fingerprints(tmp_path / 'parts', 6)
  assert found == support.fingerprints(tmp_path / 'whole', 6)
  job = states['job']
  with job.context():
    made = step_lib.make(job.built, job.optimizer, 1.0)
    state = zeroth_order.replayed(made.update, job.initial_state(), log)
    wanted = experiment.restored(job, tmp_path / 'whole')
  for path, x in jax.device_get(state.params).items():
    np.testing.assert_array_equal(x, jax.device_get(wanted[path]), path)


def test_a_step_that_is_not_finite_names_all_that_it_would_move(tiny, tmp_path):
  def poisoned(*given):
    step = step_lib.make(*given)
    nan = lambda *args: jax.tree.map(
      lambda x: x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x,
      step.grads(*args),
    )
    return step._replace(grads=nan)

  said = []
  with pytest.raises(Exception, match='2 steps in a row are not finite'):
    loop.run(
      tiny.config(
        ON | {'train.steps': 4, 'train.max_nonfinite_steps': 2,
              'mesh.data': 1, 'mesh.fsdp': 1, 'mesh.tensor': 1}
      ),
      tmp_path / 'run', make_step=poisoned, say=said.append,
      devices=jax.devices()[:1],
    )  # fmt: skip
  (line,) = (line for line in said if line.startswith('step 1 is skipped'))
  assert 'gradients not finite: embedding, layers/' in line


@pytest.mark.usefixtures('float64')
@pytest.mark.parametrize(
  ('mesh', 'changes', 'words'),
  [
    ('replica=4', {}, ('mesh.replica=4', 'replica=1 or 2')),
    ('stage=2', {}, ('mesh.stage=2', 'stage=1')),
    ('', dict(optimizer__name='muon'), ('optimizer.name=muon',)),
    ('', dict(optimizer__ema_decay=0.9), ('optimizer.ema_decay=0.9',)),
    (
      'replica=2', dict(outer=schema.Outer('mean', 4)),
      ('outer.exchange=mean', 'exchange=none'),
    ),
  ],
)  # fmt: skip
def test_what_cannot_be_is_refused(mesh, changes, words):
  count = math.prod(mesh_lib.parse(mesh).values())
  with support.refused('train.estimator=zeroth_order', *words):
    program.on_devices(config_of(mesh, **changes), '', jax.devices()[:count])


def test_the_loss_of_a_log_is_that_of_aux():
  """What `replayed` gives an update has the form of what a step gives."""
  found = zeroth_order.logged(0.5, 3, 2.0)
  loss, grads, aux = found
  assert float(loss) == 2.0 and float(grads['slope']) == 0.5
  assert isinstance(aux, aux_lib.Aux) and int(aux.tallies['draw']) == 3


def test_a_step_counts_two_forward_passes():
  narrow = dict(model__dtype='float32', model__param_dtype='float32')
  found = loop.cost(config_of(**narrow)).flops
  pulled = loop.cost(config_of(train__estimator='backprop', **narrow)).flops
  assert found == pytest.approx(pulled * 2 / 3)
