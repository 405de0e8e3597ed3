"""Replicas that step alone: each as one device would, and their exchanges.

References: one device, plain, on the rows of a replica; NumPy for exchanges.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import hlo
from paraxis.train import program
from paraxis.train import step as step_lib
from paraxis.train.certify import check
from paraxis.train.certify import inputs
from paraxis.train.certify import trial
from paraxis.train.steps import outer

pytestmark = pytest.mark.usefixtures('float64')

MEAN = schema.Outer('mean', 4)
STREAMED = schema.Outer('mean', 4, fragments=2, delay=3, mixing=0.25)
LATE = schema.Outer(
  'mean', 2, 1.0, 0.5, False, delay=2, clip=4e-3, penalty=True
)
LAYOUTS = {
  'replica=2,fsdp=2,tensor=2': {},
  'replica=4,data=2': {},
  'replica=2,data=2,fsdp=2': {
    'mesh.zero': 2,
    'train.microbatches': 2,
    'train.batch_size': 16,
  },
  'replica=2,context=2,tensor=2': {},
}
# Other programs of a step, each with messages of its own.
INNER = {
  'replica=2,tensor=2 matmul': {'mesh.collective_matmul': 'all'},
  'replica=2,context=2 ulysses': {'mesh.context_form': 'ulysses'},
  'replica=2,context=4 usp': {'mesh.context_form': 'usp'},
  'replica=2,data=4 zero=1': {'mesh.zero': 1},
  'replica=2,data=4 zero=3': {'mesh.zero': 3},
  'replica=2,fsdp=2 offload': {'train.memory': 'attention=offload'},
}
EVERY = LAYOUTS | INNER
STEPS = 2


def config_of(mesh, changes=(), loop=MEAN):
  """schema.Config of a small model, its first update at the full rate."""
  config = support.piped(mesh_lib.parse(mesh))
  changes = {'outer': loop, 'optimizer.warmup_steps': 1} | dict(changes)
  return schema.with_values(config, changes)


def runner_of(config):
  """trial.Runner on as many devices as its mesh has places."""
  places = math.prod(getattr(config.mesh, a) for a in mesh_lib.AXES)
  return trial.Runner(config, jax.devices()[:places])


def even(config, seed=0):
  """trial.batches, all of whose slots count: replicas have equal targets."""
  return trial.batches(config, packed=False, seed=seed)


def rows_of(batch, config, r):
  """The rows of replica r: its part of every microbatch."""
  n, parts = config.mesh.replica, config.microbatches

  def cut(x):
    folded = x.reshape(parts, n, -1, x.shape[-1])[:, r]
    return folded.reshape(-1, x.shape[-1])

  rows = type(batch)(*map(cut, batch[:5]), denominator=0)
  return rows._replace(denominator=max(rows.weights.sum(), 1))


def step(runner, state, batch):
  """(State after a step, loss, gradients)."""
  loss, gradients, aux = runner.gradients(state, batch)
  return runner.update(state, loss, gradients, aux), loss, gradients


@pytest.fixture(scope='module')
def stepped(float64):
  """Name in EVERY -> (runner, first parameters, batches, [(State, loss,
  gradients) of each step])."""
  made = {}

  def of(name):
    if name not in made:
      runner = runner_of(config_of(name.split()[0], EVERY[name]))
      params = inputs.parameters(runner)
      batches = trial.batches(runner.config, packed=True)[:STEPS]
      state, rows = runner.start(params), []
      for batch in batches:
        state, *found = step(runner, state, batch)
        rows.append((state, *found))
      made[name] = runner, params, batches, rows
    return made[name]

  return of


@pytest.mark.parametrize('mesh', EVERY)
def test_a_replica_steps_as_one_device_does_on_its_rows(stepped, mesh):
  runner, params, batches, rows = stepped(mesh)
  n = runner.config.mesh.replica
  small = {'train.batch_size': runner.config.train.batch_size // n}
  alone = runner_of(config_of('', small, schema.Outer()))
  for r in range(n):
    state = alone.start(params)
    of = lambda tree, r=r: jax.tree.map(lambda x: x[r], jax.device_get(tree))
    for batch, (after, loss, gradients) in zip(batches, rows, strict=True):
      mine = rows_of(batch, runner.config, r)
      state, own_loss, own_gradients = step(alone, state, mine)
      support.close(of(loss), jax.device_get(own_loss))
      support.close(of(gradients), jax.device_get(own_gradients))
      support.close(of(after.outer.params), jax.device_get(state.params))
      support.close(of(after.optimizer), jax.device_get(state.optimizer))
  support.close(jax.device_get(after.params), params, 0)  # the anchor
  first, second = (
    jax.device_get(after.outer.params['embedding'])[i] for i in (0, 1)
  )
  assert np.abs(first - second).max() > 1e-4  # they have drifted apart


@pytest.mark.parametrize(
  ('mesh', 'clip'),
  # A norm is summed in another order where parameters are sharded.
  [('', 1.0), ('fsdp=2,tensor=2', 0.0)],
)
def test_one_replica_steps_bitwise_as_without_an_outer_loop(mesh, clip):
  never = dataclasses.replace(MEAN, period=10**6)
  given = {'optimizer.clip_norm': clip}
  one = runner_of(config_of(mesh, given, never))
  explicit = given | {'mesh.collectives': 'explicit'}
  plain = runner_of(config_of(mesh, explicit, schema.Outer()))
  params = inputs.parameters(one)
  state, wanted = one.start(params), plain.start(params)
  same = lambda found, wanted: support.close(
    jax.tree.map(lambda x: x[0], jax.device_get(found)),
    jax.device_get(wanted), 0,
  )  # fmt: skip
  for batch in trial.batches(one.config, packed=True):
    state, *found = step(one, state, batch)
    wanted, *own = step(plain, wanted, batch)
    same(found, own)  # loss and gradients
    same(state.outer.params, wanted.params)
    same(state.optimizer, wanted.optimizer)
  assert np.abs(wanted.params['embedding'] - params['embedding']).max() > 1e-4


@pytest.mark.parametrize(
  'changes',
  [{'train.freeze': 'embedding,layers/mlp/*'}, {'train.lora.rank': 2}],
  ids=str,
)
def test_what_is_frozen_stays_in_all_replicas(changes):
  mesh = 'replica=2,data=2,fsdp=2'
  runner = runner_of(config_of(mesh, changes | {'mesh.zero': 1}, MEAN))
  params, run = inputs.parameters(runner), exchanged(runner)
  state = runner.start(params)
  for batch in even(runner.config)[:STEPS]:
    state, *_ = step(runner, state, batch)
  with runner.job.context():
    state, _ = run(MEAN.period, state, None)
  found = jax.device_get(state)
  frozen = runner.job.model.frozen
  assert frozen and not frozen & set(found.outer.momentum)
  for path, x in params.items():
    each = found.params[path], *found.outer.params[path]
    if path in frozen:
      assert all(np.array_equal(x, one) for one in each), path
    else:
      assert all(np.abs(x - one).max() > 1e-5 for one in each), path


def crossing(runner, state, batch):
  """hlo.Collective over `replica`, of the gradient and the update."""
  with runner.job.context():
    batch = runner.put(batch)
    gradient = runner._grads.lower(state.inner, batch).compile()
    found = gradient(state.inner, batch)
    update = runner._update.lower(state, *found).compile()
  texts = [program.as_text() for program in (gradient, update)]
  each = [c for t in texts for c in hlo.collectives(t, runner.job.mesh)]
  return [c for c in each if 'replica' in c.axes]


@pytest.mark.parametrize('mesh', EVERY)
def test_no_message_of_a_step_crosses_replicas(stepped, mesh):
  runner, _, batches, rows = stepped(mesh)
  assert not crossing(runner, rows[-1][0], batches[0])


def test_replicas_end_a_newton_scan_together():
  """By a number an iteration, and nothing else crosses them."""
  newton = {'model.pattern': 'R', 'model.recurrent.heads': 4}
  sent = check.check(config_of('replica=2,context=2', newton)).messages
  across = {c.what for c in sent if 'replica' in c.axes}
  assert across == {'f64[] -> f64[]'}


def test_without_an_outer_loop_messages_cross_replicas():
  plain = runner_of(config_of('replica=2,data=2', loop=schema.Outer()))
  state = plain.start(inputs.parameters(plain))
  assert crossing(plain, state, even(plain.config)[0])


def exchanged(runner):
  """outer.Exchange of a runner, compiled."""
  made = outer.Exchange(runner.job)
  with runner.job.context():
    made.compile()
  return made


def test_an_exchange_sends_each_part_once_and_landing_nothing_over_replicas():
  runner = runner_of(config_of('replica=2,fsdp=2,tensor=2', loop=STREAMED))
  found = {
    name: hlo.collectives(program.as_text(), runner.job.mesh)
    for name, program in exchanged(runner).programs.items()
  }
  whole = sum(
    8 * math.prod(x.sharding.shard_shape(x.shape))
    for x in runner.job.state.params.values()  # the anchor's parts
  )
  sent = [found[f'send of fragment {p}'] for p in (0, 1)]
  assert all({c.axes for c in each} == {('replica',)} for each in sent)
  assert sum(c.bytes for each in sent for c in each) == whole
  landed = [c for p in (0, 1) for c in found[f'land of fragment {p}']]
  assert landed and {c.kind for c in landed} == {'all-gather'}
  assert not any('replica' in c.axes for c in landed)


def by_numpy(loop, done, anchor, momentum, replicas, flight):
  """What is due after a step, in place, by the equations of the papers."""
  parts = range(loop.fragments)
  first = lambda p: p * loop.period // loop.fragments
  at = lambda t, p: t > 0 and (t - first(p)) % loop.period == 0
  most = loop.clip or np.inf

  def pick(path, p):
    if path.startswith('layers/'):
      return slice(p, None, loop.fragments)
    return slice(None) if p == loop.fragments - 1 else slice(0)

  def length(tree, p):
    cut = [x[pick(path, p)].ravel() for path, x in tree.items()]
    return np.linalg.norm(np.concatenate(cut))

  def land(p, gaps):
    fewer = 1.0
    if loop.penalty and gaps:
      size = np.linalg.norm(np.concatenate([g.ravel() for g in gaps.values()]))
      fewer = 1 + loop.rate * length(momentum, p) / size
    for path in anchor:
      at = pick(path, p)
      gap = gaps[path] / fewer if gaps else 0
      m = loop.momentum * momentum[path][at] + gap
      m = momentum[path][at] = np.clip(m, -most, most)
      move = loop.momentum * m + gap if loop.nesterov else m
      anchor[path][at] -= loop.rate * move
      own = replicas[path][:, at]
      own[:] = (1 - loop.mixing) * anchor[path][at] + loop.mixing * own

  whole_period = loop.delay == loop.period
  for p in parts:
    if loop.delay and not whole_period and at(done - loop.delay, p):
      land(p, flight.pop(p))
  for p in parts:
    if at(done, p):
      gaps = {
        path: (x[pick(path, p)] - replicas[path][:, pick(path, p)]).mean(0)
        for path, x in anchor.items()
      }
      if whole_period:  # of the first one nothing is under way
        land(p, flight.get(p))
      if loop.delay:
        flight[p] = gaps
      else:
        land(p, gaps)


LOOPS = {
  'diloco': schema.Outer('mean', 2),
  'heavy ball': schema.Outer('mean', 2, nesterov=False),
  'local sgd': schema.Outer('mean', 2, rate=1.0, momentum=0.0),
  'fragments': schema.Outer('mean', 4, fragments=3),
  'late by a period': schema.Outer('mean', 2, delay=2, mixing=0.5),
  'streamed': STREAMED,
  'co2': LATE,
  'co2, without clip or penalty': schema.Outer(
    'mean', 3, 1.0, 0.5, False, delay=3
  ),
  'co2, fragments': dataclasses.replace(LATE, fragments=2),
}


@pytest.mark.parametrize('name', LOOPS)
def test_exchanges_equal_numpy(name):
  follows_numpy(LOOPS[name], 'replica=2,fsdp=2')


@pytest.mark.parametrize(
  ('name', 'mesh'),
  [
    ('diloco', 'replica=2,data=2,tensor=2'),  # each on a dimension of its own
    ('diloco', 'replica=2,context=2,fsdp=2'),
    ('fragments', 'replica=4,data=2'),
    ('streamed', 'replica=2,data=2,context=2'),
    ('co2, fragments', 'replica=2,data=2,fsdp=2'),  # a norm over parts
    ('local sgd', 'replica=3'),  # divides no dimension
    ('diloco', ''),
  ],
)
def test_an_anchor_in_shards_moves_as_in_numpy(name, mesh):
  follows_numpy(LOOPS[name], mesh)


def follows_numpy(loop, mesh):
  """Steps and exchanges of a loop on a mesh, beside `by_numpy`."""
  changes = {'train.batch_size': 12} if 'replica=3' in mesh else {}
  runner = runner_of(config_of(mesh, changes, loop))
  run, params = exchanged(runner), inputs.parameters(runner)
  state, batches = runner.start(params), even(runner.config)
  anchor = {p: np.array(x) for p, x in params.items()}
  momentum, flight = {p: 0 * x for p, x in anchor.items()}, {}
  moved, largest = 0, 0
  for done in range(1, 9):
    state, *_ = step(runner, state, batches[done % 2])
    own = jax.tree.map(np.array, jax.device_get(state.outer.params))
    by_numpy(loop, done, anchor, momentum, own, flight)
    with runner.job.context():
      state, _ = run(done, state, None)
    found = jax.device_get(state)
    support.close(found.params, anchor)
    support.close(found.outer.params, own)
    support.close(found.outer.momentum, momentum)
    moved = max(moved, *(np.abs(anchor[p] - params[p]).max() for p in params))
    largest = max(largest, *(np.abs(m).max() for m in momentum.values()))
  assert moved > 1e-3 and (not loop.clip or largest == loop.clip)


def nearest(x):
  """x in four bits: of {0, 1/4, .. 16} max|x| / 16, the nearest."""
  sizes = np.array([0, 0.25, 0.5, 1, 2, 4, 8, 16]) * np.abs(x).max() / 16
  pick = np.abs(np.abs(x)[..., None] - sizes).argmin(-1)
  return np.sign(x) * sizes[pick]


def test_codes_are_summed_after_they_have_arrived():
  """In an eighth of the bytes; the mean of codes would be no code."""
  loop = schema.Outer('mean', 1, rate=1.0, momentum=0.0, codec='e3m0')
  runner = runner_of(config_of('replica=4', loop=loop))
  run, params = exchanged(runner), inputs.parameters(runner)
  state = runner.start(params)
  for batch in even(runner.config):  # of one step of AdamW all gaps are alike
    state, *_ = step(runner, state, batch)
  own = jax.tree.map(np.array, jax.device_get(state.outer.params))
  with runner.job.context():
    state, _ = run(1, state, None)
  found = jax.device_get(state.params)
  for path, x in params.items():
    gaps = [nearest(x - one) for one in own[path]]
    wanted = x - np.mean(gaps, 0)
    np.testing.assert_allclose(found[path], wanted, rtol=0, atol=1e-8)
    assert np.abs(wanted - own[path].mean(0)).max() > 1e-5
  (program,) = run.programs.values()
  sent = hlo.collectives(program.as_text(), runner.job.mesh)
  assert {c.kind for c in sent} == {'all-gather'}
  count = sum(x.size for x in params.values())
  codes = sum(c.result_bytes for c in sent)
  assert 4 * count / 2 <= codes <= 4 * (count / 2 + 5 * len(params))


class Sgd:
  """An update rule without a state: p - rate g."""

  def __init__(self, rate):
    self._rate = rate

  def init(self, params):
    return {}

  def rates(self, step):
    return {'sgd': jnp.asarray(self._rate)}

  def update(self, grads, state, params, step, skipped=0):
    return params | {
      p: params[p] - self._rate * g for p, g in grads.items()
    }, {}


def by_sgd(mesh, loop, batches):
  """Parameters of replica 0 after a step on each batch, without clipping."""
  config = config_of(mesh, {'optimizer.clip_norm': 0.0}, loop)
  runner = runner_of(config)
  params = inputs.parameters(runner)
  vars(runner.job)['optimizer'] = rule = Sgd(0.1)
  made = step_lib.make(runner.job.built, rule, 0.0)
  runner._init, runner._update = rule.init, jax.jit(made.update)
  run = outer.Exchange(runner.job)
  state = runner.start(params)
  with runner.job.context():
    vars(runner.job)['state'] = program.with_layouts(
      runner.job.mesh, jax.eval_shape(lambda: state)
    )
    run.compile()
  for done, batch in enumerate(batches, 1):
    state, *_ = step(runner, state, batch)
    with runner.job.context():
      state, _ = run(done, state, None)
  return jax.device_get(state.params)


def test_one_step_of_sgd_and_its_mean_are_data_parallel():
  every = schema.Outer('mean', 1, rate=1.0, momentum=0.0)
  batches = even(config_of(''))[:STEPS]
  found = by_sgd('replica=4,data=2', every, batches)
  wanted = by_sgd('', schema.Outer(), batches)
  support.close(found, wanted, 1e-12)
  uneven = trial.batches(config_of(''), packed=True)[:STEPS]
  other = by_sgd('replica=4,data=2', every, uneven)
  wanted = by_sgd('', schema.Outer(), uneven)
  with pytest.raises(AssertionError):  # targets of replicas differ in number
    support.close(other, wanted, 1e-6)


def test_what_is_sent_and_landed_at_once_is_an_exchange():
  runner = runner_of(config_of('replica=2,fsdp=2', loop=STREAMED))
  state = runner.start(inputs.parameters(runner))
  state, *_ = step(runner, state, even(runner.config)[0])
  plan = outer.plan_of(runner.config, runner.job.model)
  with runner.job.context():
    one = jax.jit(lambda s: outer.exchange(plan, 1, s))(state)
    two = jax.jit(lambda s: outer.land(plan, 1, outer.send(plan, 1, s)))(state)
  support.close(jax.device_get(two.params), jax.device_get(one.params), 0)
  support.close(
    jax.device_get(two.outer.params), jax.device_get(one.outer.params), 0
  )


def test_a_replica_alone_skips_what_is_not_finite():
  runner = runner_of(config_of('replica=2,data=2'))
  state = runner.start(inputs.parameters(runner))
  batch = even(runner.config)[0]
  good, *_ = step(runner, state, batch)
  weights = np.array(batch.weights)
  weights[-1] = np.nan  # of the last replica
  bad, loss, _ = step(runner, state, batch._replace(weights=weights))
  assert np.isfinite(np.asarray(loss)).tolist() == [True, False]
  assert np.asarray(bad.skipped).tolist() == [0, 1]
  before, after, plain = (
    jax.device_get(s.outer.params) for s in (state, bad, good)
  )
  for path, x in after.items():
    np.testing.assert_array_equal(x[0], plain[path][0])
    np.testing.assert_array_equal(x[1], before[path][1])
