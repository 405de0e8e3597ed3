"""Runs whose replicas step alone: schedule, resuming, what is refused."""

import math

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.decode import load
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train import program
from paraxis.train import start
from paraxis.train import state as state_lib
from paraxis.train.run import metrics
from paraxis.train.run import origin
from paraxis.train.steps import replicas


def due(loop, kind):
  """[(step, fragment)] of a kind, in 40 steps."""
  found = [(t, *what) for t in range(1, 41) for what in loop.due(t)]
  return [(t, p) for t, k, p in found if k == kind]


def test_what_is_due_depends_on_the_step_alone():
  plain = schema.Outer('mean', 10, fragments=2)
  assert due(plain, 'exchange') == [
    (5, 1), (10, 0), (15, 1), (20, 0), (25, 1), (30, 0), (35, 1), (40, 0)
  ]  # fmt: skip
  late = schema.Outer('mean', 10, fragments=2, delay=7)
  assert due(late, 'send') == due(plain, 'exchange')
  assert due(late, 'land') == [
    (12, 1), (17, 0), (22, 1), (27, 0), (32, 1), (37, 0)
  ]  # fmt: skip
  assert not schema.Outer().due(10)
  whole = schema.Outer('mean', 10, delay=10)
  assert due(whole, 'turn') == [(10, 0), (20, 0), (30, 0), (40, 0)]
  assert [whole.missed(n) for n in (9, 10, 20, 25)] == [9, 10, 10, 15]
  assert due(schema.Outer('pairs', 20), 'pair') == [(20, 0), (40, 0)]
  assert [plain.missed(n) for n in (40, 44, 45, 9)] == [5, 9, 5, 9]
  assert schema.Outer('mean', 10).missed(40) == 0


STREAMED = {
  'outer.exchange': 'mean', 'outer.period': 2, 'outer.delay': 1,
  'outer.mixing': 0.5, 'outer.fragments': 2, 'train.steps': 8,
  'checkpoint.every': 3, 'checkpoint.asynchronous': False,
}  # fmt: skip
ON = 'replica=2,fsdp=2,tensor=2'


SHARDED = STREAMED | {  # anchor and momentum, over replicas
  'outer.delay': 0, 'outer.mixing': 0.0, 'outer.fragments': 1,
}  # fmt: skip
PAIRED = {
  'outer.exchange': 'pairs', 'outer.period': 2, 'outer.pull': 0.7,
  'outer.momentum': 0.5, 'outer.nesterov': False, 'train.steps': 8,
  'checkpoint.every': 3, 'checkpoint.asynchronous': False,
}  # fmt: skip


@pytest.mark.parametrize(
  ('loop', 'kept'),
  [
    ('streamed', 'outer/flight/embedding'),
    ('sharded', 'outer/momentum/embedding'),
    ('pairs', 'outer/each/anchor/embedding'),
  ],
)
def test_a_killed_run_resumes_bitwise(tiny, tmp_path, loop, kept):
  loops = dict(streamed=STREAMED, sharded=SHARDED, pairs=PAIRED)
  fields = loops[loop]
  _, said = tiny.run(tmp_path / 'whole', fields, ON)
  assert any(
    line.startswith('replicas') or '\nreplicas' in line for line in said
  )
  with pytest.raises(support.KilledError):
    tiny.run(tmp_path / 'cut', fields, ON, callbacks=[support.crash_at(7)])
  _, said = tiny.run(tmp_path / 'cut', fields, ON)
  assert any('resumed from step 6' in line for line in said)
  whole, cut = (support.fingerprints(tmp_path / n, 8) for n in ('whole', 'cut'))
  assert whole == cut
  assert {'outer/params/embedding', kept} <= set(whole)
  assert support.losses(tmp_path / 'whole') == support.losses(tmp_path / 'cut')
  last = metrics.read(tmp_path / 'whole')[8]
  both = last['eval/bits_per_byte'], last['eval/mean/bits_per_byte']
  assert (both[0] == both[1]) == (loop != 'streamed')  # they have just met
  own = {p: x for p, x in saved(tmp_path / 'whole', 8).items() if '/' in p}
  each = [x for p, x in own.items() if p.startswith('outer/params/')]
  means = [x.mean(0) for x in each]
  away = sum(((x - m) ** 2).sum() for x, m in zip(each, means, strict=True))
  length = sum((m**2).sum() for m in means)
  wanted = math.sqrt(away / 2 / length)
  np.testing.assert_allclose(last['eval/spread'], wanted, rtol=1e-4)


def saved(folder, step):
  """{path: array} of a checkpoint of a run, on one device."""
  with store_lib.Store(folder / 'checkpoints', read_only=True) as store:
    leaves = store.read_manifest(step)['leaves']
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {
      path: jax.ShapeDtypeStruct(leaf['shape'], leaf['dtype'], sharding=one)
      for path, leaf in leaves.items()
    }
    return jax.device_get(store.restore(step, like)[0])


@pytest.mark.parametrize('loop', [STREAMED, SHARDED], ids=['late', 'sharded'])
def test_other_replicas_begin_with_the_mean(tiny, tmp_path, loop):
  tiny.run(tmp_path, loop | {'train.steps': 3}, ON)
  before = saved(tmp_path, 3)
  job = tiny.job(loop | {'train.steps': 8}, 'replica=4,fsdp=2')
  said = []
  with job.context(), store_lib.Store(tmp_path / 'checkpoints') as store:
    state, first, _ = start.state(job, store, None, said.append)
  after = state_lib.flatten(jax.device_get(state))
  assert first == 3 and any('2, this run has 4' in line for line in said)
  for path, x in before.items():
    if after[path].shape == x.shape:
      np.testing.assert_array_equal(after[path], x, path)
      continue
    whole = np.issubdtype(x.dtype, np.integer)
    one = x.max(0) if whole else x.mean(0, dtype='f8')
    for own in after[path]:
      np.testing.assert_allclose(own, one, rtol=1e-6, atol=1e-8)
  assert after['outer/params/embedding'].shape[0] == 4
  _, said = tiny.run(tmp_path, loop, 'replica=4,fsdp=2')
  assert any(line.startswith('step 8/8') for line in said)


def test_a_damaged_checkpoint_of_other_replicas_is_passed_over(tiny, tmp_path):
  changed = 'replica=4,fsdp=2'
  tiny.run(tmp_path, STREAMED | {'train.steps': 3}, ON)
  tiny.run(tmp_path, STREAMED | {'train.steps': 6}, changed)
  files = (tmp_path / 'checkpoints' / '6').rglob('d/*')
  largest = max(files, key=lambda path: path.stat().st_size)
  largest.write_bytes(bytes(largest.stat().st_size))
  job, said = tiny.job(STREAMED, changed), []
  with (
    job.context(),
    store_lib.Store(tmp_path / 'checkpoints', say=said.append) as store,
  ):
    state, step, _ = start.state(job, store, None, said.append)
  assert step == 3 and state.replicas == 4
  assert '6 is damaged' in said[0] and 'Trying an older one' in said[0]
  assert 'is of 2, this run has 4' in said[1]
  own = jax.device_get(state.outer.params['embedding'])
  before = saved(tmp_path, 3)['outer/params/embedding']
  for one in own:
    np.testing.assert_allclose(one, before.mean(0), rtol=1e-6, atol=1e-8)


def test_replicas_begin_with_the_weights_of_another_run(tiny, tmp_path):
  tiny.run(tmp_path / 'old', {'train.steps': 3}, 'data=2')
  source = origin.Run(str(tmp_path / 'old'))
  new = STREAMED | {'train.steps': 3, 'optimizer.learning_rate': 0.0}
  tiny.run(tmp_path / 'new', new, ON, source=source)
  old, new = saved(tmp_path / 'old', 3), saved(tmp_path / 'new', 3)
  for path in (p for p in old if p.startswith('params/')):
    for own in (new[path], *new[f'outer/{path}']):
      np.testing.assert_allclose(own, old[path], rtol=0, atol=1e-6)


PAIRS = schema.Outer('pairs', 4)
WIDE = schema.Outer('mean', 8, fragments=5)
MASKED = {
  'train.objective': 'masked', 'model.mask_id': 3, 'model.visibility': 'full'
}  # fmt: skip


def test_a_run_of_other_replicas_goes_back_to_a_former_checkpoint(
  tiny, tmp_path
):
  tiny.run(tmp_path, STREAMED | {'train.steps': 3}, ON)
  job = tiny.job(STREAMED, 'replica=4,fsdp=2')
  with job.context(), store_lib.Store(tmp_path / 'checkpoints') as store:
    state, step, _ = start.back(job, store, [3])
  assert step == 3 and state.replicas == 4
  own = jax.device_get(state.outer.params['embedding'])
  before = saved(tmp_path, 3)['outer/params/embedding']
  for one in own:
    np.testing.assert_allclose(one, before.mean(0), rtol=1e-6, atol=1e-8)


def test_the_optimizer_of_other_replicas_is_not_taken(tiny, tmp_path):
  tiny.run(tmp_path / 'old', STREAMED | {'train.steps': 3}, ON)
  source = origin.Run(str(tmp_path / 'old'), optimizer=True)
  with support.refused('2 replicas step alone there, 4 here', 'leave out'):
    tiny.run(tmp_path / 'new', STREAMED, 'replica=4,fsdp=2', source=source)


def test_the_anchor_is_decoded_on_any_mesh(tiny, tmp_path):
  tiny.run(tmp_path, STREAMED | {'train.steps': 3}, ON)
  with load.Checkpoint(str(tmp_path), say=lambda line: None) as checkpoint:
    config = schema.view(checkpoint.config())
    parts = checkpoint.parts(config, 'data=4,tensor=2')
  anchor = saved(tmp_path, 3)['params/embedding']
  params = next(x for x in parts if isinstance(x, dict) and 'embedding' in x)
  np.testing.assert_array_equal(params['embedding'], anchor)


def test_numbers_of_replicas_are_those_that_stepped():
  numbers = dict(
    loss=np.array([2.0, np.nan, 4.0]), grad_norm=np.array([1.0, np.inf, 3.0]),
    skipped=np.array([0, 5, 1]), skipped_in_a_row=np.array([0, 2, 0]),
    squares=np.array([[1.0, 2.0], [np.nan, 3.0], [4.0, 5.0]]),
    learning_rate_adamw=np.array([0.1, 0.1, 0.1]),
    targets=np.array([10, 20, 30]),
  )  # fmt: skip
  found = replicas.together(numbers)
  # Over their targets, not a mean of means.
  assert found['loss'] == (2 * 10 + 4 * 30) / 40 and found['grad_norm'] == 2
  assert found['skipped'] == 5 and found['skipped_in_a_row'] == 2
  assert found['replicas'] == [1]
  np.testing.assert_array_equal(found['squares'], [np.nan, 10])
  numbers['skipped_in_a_row'] = np.array([1, 2, 1])
  assert np.isnan(replicas.together(numbers)['loss'])


REFUSED = [
  ('replica=2,stage=2', {}, ('outer.exchange=mean', 'mesh.stage=2')),
  ('fsdp=2', {'outer': PAIRS}, ('outer.exchange=pairs', 'mesh.replica=1')),
  (
    'replica=2',
    {'outer': schema.Outer('mean', 4, fragments=2), 'train.freeze': 'layers/*'},
    ('outer.fragments=2', 'no layer is learned'),
  ),
  ('replica=2', {'optimizer.name': 'muon'}, ('muon', 'adamw')),
  ('replica=2', {'optimizer.ema_decay': 0.9}, ('ema_decay=0.9',)),
  ('replica=2', MASKED, ('train.objective=masked',)),
  ('replica=2', {'model.experts.count': 4}, ('experts.count=4',)),
  ('replica=2,tensor=2', {'mesh.sequence': False}, ('mesh.sequence=True',)),
  (
    'replica=2,fsdp=2',
    {'mesh.rules': 'fsdp embed=fsdp+replica'},
    ("rules='fsdp embed=fsdp+replica': embed of", 'leave replica out'),
  ),
  (
    'replica=2',
    {'mesh.rules': 'data layers=replica'},
    ('layers are over replica', 'stages alone'),
  ),
  ('replica=2', {'outer': WIDE}, ('outer.fragments=5', 'has 4 layers')),
]


@pytest.mark.parametrize(('mesh', 'changes', 'words'), REFUSED)
def test_what_replicas_cannot_do_is_refused(mesh, changes, words):
  sizes = mesh_lib.parse(mesh)
  narrow = {'model.dtype': 'float32', 'model.param_dtype': 'float32'}
  given = {'outer': schema.Outer('mean', 4)} | narrow | changes
  config = schema.with_values(support.piped(sizes), given)
  with support.refused(*words):
    program.on_devices(
      config, devices=jax.devices()[: math.prod(sizes.values())]
    )


def test_fields_that_contradict_each_other_are_refused():
  for fields, words in (
    (('mean', 0), ('outer.period=0', 'at least 1')),
    (('none', 5), ('outer.period=5', 'none has the period 0')),
    (('mean', 5, 0.7, 0.9, True, 1, 6), ('outer.delay=6', 'outer.period=5')),
    (('mean', 5, 0.7, 0.9, True, 6), ('outer.fragments=6', 'outer.period=5')),
    (('none', 0, 0.5), ('outer.exchange=none', 'outer.rate=0.5')),
  ):
    with support.refused(*words):
      schema.Outer(*fields)
  for exchange, fields, words in (
    ('pairs', dict(delay=3), ('outer.delay=3', 'numbers as they are')),
    ('pairs', dict(codec='e3m0'), ("outer.codec='e3m0'",)),
    ('mean', dict(pull=0.7), ('outer.pull=0.7', 'one anchor')),
    ('pairs', dict(pull=0.7, rate=0.0), ('outer.rate=0', 'above 0')),
    ('mean', dict(penalty=True, nesterov=False), ('outer.delay=0', 'period=5')),
    ('mean', dict(penalty=True, delay=5), ('outer.nesterov=False',)),
    ('pairs', dict(penalty=True), ('outer.penalty', 'nothing is late')),
  ):
    with support.refused(*words):
      schema.Outer(exchange, 5, **fields)
