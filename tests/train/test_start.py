"""A new run that begins with the parameters of another."""

import gc
import json
import shutil

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.sharding.checkpoint import stored
from paraxis.train import cli
from paraxis.train import program
from paraxis.train import start
from paraxis.train import state as state_lib
from paraxis.train.run import origin as origin_lib

QUICK = {'train.steps': 1, 'train.eval_batches': 0}
STILL = QUICK | {'optimizer.learning_rate': 1e-30, 'optimizer.weight_decay': 0}
MESH = 'data=2,fsdp=2,tensor=2'


@pytest.fixture(scope='module')
def first(tiny, tmp_path_factory):
  """A run of 4 steps."""
  path = tmp_path_factory.mktemp('first') / 'run'
  tiny.run(path, {'train.steps': 4, 'train.eval_batches': 0})
  return path


def _leaves(path, step):
  """({path: array}, meta) of a checkpoint."""
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  with store_lib.Store(path / 'checkpoints', read_only=True) as store:
    like = {
      p: jax.ShapeDtypeStruct(tuple(x['shape']), x['dtype'], sharding=here)
      for p, x in store.read_manifest(step)['leaves'].items()
    }
    tree, meta = store.restore(step, like)
  return {p: np.asarray(x) for p, x in tree.items()}, meta


def _opened(first, text='', **options):
  said = []
  found = origin_lib.open_(f'{first}{text}', say=said.append, **options)
  return found, said


def _parameters(tree):
  return {p: x for p, x in tree.items() if p.startswith('params/')}


@pytest.mark.parametrize(
  'mesh, changes',
  [
    (MESH, {}),
    # Another layout, and stages that hold layers in another order.
    ('data=2,stage=2,tensor=2', {'train.microbatches': 2}),
  ],
)
def test_every_parameter_of_a_step(tiny, first, tmp_path, mesh, changes):
  source, _ = _opened(first, '/2')
  tiny.run(tmp_path, STILL | changes, mesh, source=source)
  found, meta = _leaves(tmp_path, 1)
  wanted, _ = _leaves(first, 2)
  later, _ = _leaves(first, 4)
  for path, x in _parameters(wanted).items():
    np.testing.assert_allclose(found[path], x, rtol=0, atol=1e-12)
  assert any(  # of another step they are others
    np.abs(found[p] - x).max() > 1e-4 for p, x in _parameters(later).items()
  )
  assert meta['origin']['source'] == str(first) and meta['origin']['step'] == 2
  assert meta['cursor']['step'] == 1


def test_the_newest_step_and_folders_within(first):
  for text in ('', '/4', '/checkpoints', '/checkpoints/4'):
    assert _opened(first, text)[0].about['step'] == 4


def test_optimizer_afresh_unless_asked(tiny, first):
  """Moments of the first state; a run's own step begins at 0."""
  job = tiny.job(QUICK, MESH)
  wanted, _ = _leaves(first, 4)
  for asked in (False, True):
    source, _ = _opened(first, optimizer=asked)
    like = state_lib.in_order(state_lib.flatten(job.state), job.leaves)
    made = start.begin(job, source, like, lambda line: None)
    flat = {p: np.asarray(x) for p, x in state_lib.flatten(made).items()}
    moments = [
      p for p, x in wanted.items()
      if p.startswith('optimizer/') and x.ndim > 1 and np.any(x)
    ]  # fmt: skip
    assert moments
    for path in moments:
      same = np.array_equal(flat[path], wanted[path])
      assert same == asked and (asked or not np.any(flat[path]))


@pytest.mark.parametrize('name, rate', [('prodigy', 1.0), ('ademamix', 1e-3)])
def test_a_rule_with_a_schedule_in_its_state_begins_anew(
  tiny, tmp_path, name, rate
):
  rule = QUICK | {'optimizer.name': name, 'optimizer.learning_rate': rate}
  tiny.run(tmp_path, rule)
  source, _ = _opened(tmp_path, optimizer=True)
  job = tiny.job(rule)
  like = state_lib.in_order(state_lib.flatten(job.state), job.leaves)
  with support.refused('--init_optimizer', name, 'schedule'):
    start.begin(job, source, like, lambda line: None)


@pytest.mark.parametrize('name', ('schedule_free', 'prodigy'))
def test_points_of_update_rules_begin_as_the_parameters(tiny, first, name):
  """Whatever of a rule's state is a copy of fresh parameters is one of those
  that were read: else the first update would bring the fresh ones back."""
  rule = {'optimizer.name': name, 'optimizer.schedule': 'constant'}
  job = tiny.job(QUICK | rule, MESH)
  fresh = state_lib.flatten(job.initial_state())
  same = {
    (path, of)
    for path, x in fresh.items()
    for of in _parameters(fresh)
    if path.startswith('optimizer/')
    and path.endswith(f'/{of.removeprefix("params/")}')
    and np.any(np.asarray(x)) and np.array_equal(x, fresh[of])
  }  # fmt: skip
  assert len({path.split('/layers/')[0] for path, _ in same}) > 1
  source, _ = _opened(first)
  like = state_lib.in_order(state_lib.flatten(job.state), job.leaves)
  made = state_lib.flatten(start.begin(job, source, like, lambda line: None))
  wanted, _ = _leaves(first, 4)
  for path, of in same:
    np.testing.assert_array_equal(made[path], wanted[of])


def test_no_leaf_is_made_and_read(tiny, first, monkeypatch):
  """What is read is there once: nothing else at that time, no copy later."""
  job = tiny.job(QUICK, MESH)

  def live():
    gc.collect()  # what tests before this one left in cycles is not of it
    return sum(x.nbytes for x in jax.live_arrays())

  source, _ = _opened(first)
  before, read, seen, made = live(), source.read, [], []
  leaves = program.Program.initial_leaves

  def reading(*arguments):
    seen.append(live() - before)
    return read(*arguments)

  def making(self, paths):
    made.extend(paths)
    return leaves(self, paths)

  monkeypatch.setattr(source, 'read', reading)
  monkeypatch.setattr(program.Program, 'initial_leaves', making)
  like = state_lib.in_order(state_lib.flatten(job.state), job.leaves)
  state = start.begin(job, source, like, lambda line: None)
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  assert seen == [0] and live() - before == size
  assert made and not any(path.startswith('params/') for path in made)
  monkeypatch.undo()
  wanted = state_lib.flatten(job.initial_state())
  for path, x in job.initial_leaves(['params/embedding', *made]).items():
    assert (
      np.array_equal(x, wanted[path]) and x.sharding == wanted[path].sharding
    )
  del wanted
  held = job.initial_state()  # as it would be if all of it was made first
  monkeypatch.setattr(source, 'read', reading)
  start.begin(job, source, like, lambda line: None)
  assert seen[1] >= 2 * size - 64
  del held


def test_a_store_is_as_the_fields_say():
  given = dict(
    keep=5, asynchronous=False, failures=2, verify_every=7, host_bytes=2**30,
    chunk_bytes=2**13,
  )  # fmt: skip
  options = start.kept(schema.view(dict(checkpoint=given)))
  assert {name: getattr(options, name) for name in given} == given
  assert set(given) == {*options._fields} - {'committed'}


def test_resumed_runs_keep_their_origin(tiny, first, tmp_path):
  source, _ = _opened(first)
  changes = QUICK | {'train.steps': 3, 'checkpoint.every': 1}
  with pytest.raises(support.KilledError):
    crash = support.crash_at(2)
    tiny.run(tmp_path, changes, MESH, source=source, callbacks=[crash])
  result, said = tiny.run(tmp_path, changes, MESH)  # without the flag
  assert result['step'] == 3 and 'resumed from step 1' in '\n'.join(said)
  assert _leaves(tmp_path, 3)[1]['origin']['source'] == str(first)
  again, _ = _opened(first)
  tiny.run(tmp_path, changes, MESH, source=again)  # with it: the same run
  other, _ = _opened(tmp_path)
  with support.refused('began with', str(first), '--workdir'):
    tiny.run(tmp_path, changes, MESH, source=other)
  assert other.about['began'] == str(first)


def test_a_run_without_origin_is_not_overwritten(tiny, first, tmp_path):
  tiny.run(tmp_path, QUICK, MESH)
  source, _ = _opened(first)
  with support.refused('new parameters', '--workdir'):
    tiny.run(tmp_path, QUICK, MESH, source=source)


def test_more_tokens(tiny, first, tmp_path):
  """Old rows stay, the new are initialised, which is said."""
  source, _ = _opened(first)
  changes = STILL | {'model.vocab_size': 272}
  _, said = tiny.run(tmp_path, changes, MESH, source=source)
  text = '\n'.join(said)
  assert '264 rows there, 272 here: the last 8 are initialised' in text
  found, wanted = _leaves(tmp_path, 1)[0], _leaves(first, 4)[0]
  rows = found['params/embedding']
  np.testing.assert_allclose(
    rows[:264], wanted['params/embedding'], rtol=0, atol=1e-12
  )
  assert rows.shape[0] == 272 and np.all(rows[264:].std(1) > 1e-3)


def test_more_tokens_of_a_head_with_a_bias(tiny, tmp_path):
  biased = STILL | {'model.head_bias': True, 'model.tied_embedding': False}
  tiny.run(tmp_path / 'a', biased, MESH)
  source, _ = _opened(tmp_path / 'a')
  more = biased | {'model.vocab_size': 272}
  _, said = tiny.run(tmp_path / 'b', more, MESH, source=source)
  assert 'params/head_bias has 264 rows there, 272 here' in '\n'.join(said)
  assert _leaves(tmp_path / 'b', 1)[0]['params/head_bias'].shape == (272,)


def test_what_differs_is_printed_or_refused(tiny, first, tmp_path):
  source, said = _opened(first)
  longer = {
    'data.sequence_length': 128, 'model.rope_scaling': 'linear',
    'model.rope_factor': 2.0, 'optimizer.learning_rate': 1e-4,
  }  # fmt: skip
  result, lines = tiny.run(tmp_path / 'a', QUICK | longer, MESH, source=source)
  assert result['step'] == 1
  text = '\n'.join([*said, *lines])
  assert "model.rope_scaling was 'none', is 'linear'" in text
  deeper, _ = _opened(first)
  more = QUICK | {'model.num_layers': 3}
  leaf = r'layers/mlp/up: saved .*\(2, 32, 64\), wanted .*\(3, 32, 64\)'
  advice = r'num_layers is 3: give --config.model.num_layers=2, or begin'
  with pytest.raises(errors.UserError, match=f'(?s){advice}.*{leaf}'):
    tiny.run(tmp_path / 'b', more, MESH, source=deeper)
  assert not list((tmp_path / 'b').glob('checkpoints/*/state'))


def test_a_dry_run_says_what_fits(tiny, first, capsys):
  """New rows, and other leaves, as the run that it stands for would."""
  argv = ['train', f'--config={tiny.file}', f'--init_from={first}', '--dry_run']
  assert cli.main([*argv, '--config.model.vocab_size=272']) == 0
  shown = capsys.readouterr().out
  assert '264 rows there, 272 here: the last 8 are initialised' in shown
  assert cli.main([*argv, '--config.model.num_layers=3']) == 2
  assert 'give --config.model.num_layers=2, or' in capsys.readouterr().err


@pytest.mark.parametrize('change', ['train.seed', 'train.batch_size'])
def test_a_changed_run_is_told_the_way(tiny, first, change):
  with support.refused('--init_from=', change.split('.')[1]):
    value = {'train.seed': 3, 'train.batch_size': 16}[change]
    tiny.run(first, {'train.steps': 4, change: value})


@pytest.mark.parametrize(
  'text, options, words',
  [
    ('/3', {}, ['step 3', '2, 4']),
    ('x', {}, ['no folder', 'Hugging Face']),
    ('smollm2', dict(optimizer=True), ['--init_optimizer', 'only a run']),
    ('', dict(optimizer=True), ['--init_from=RUN']),
    (
      '',
      dict(layers='0:1', ema=True),
      ['--init_layers, --init_ema', 'of which'],
    ),
    ('smollm2', dict(ema=True), ['--init_ema', 'only a run']),
    ('/4', dict(layers='0:3'), ['--init_layers=0:3', 'has 2 layers, 0:2']),
    ('/4', dict(layers='1'), ["--init_layers='1'", 'FIRST:END']),
    ('/4', dict(layers='1:1'), ["--init_layers='1:1'", 'FIRST:END']),
    ('/4', dict(layers='0:1', optimizer=True), ['leave out --init_optimizer']),
    ('/4', dict(ema=True), ['--init_ema', 'holds no average', 'ema_decay']),
  ],
)
def test_no_such_origin(first, text, options, words):
  if text.startswith('/'):
    text = f'{first}{text}'
  with support.refused(*words):
    origin_lib.open_(text, **options)


@pytest.fixture
def resumed(tiny, first, tmp_path):
  """resumed(**meta): (step, said) of a run whose newest manifest has this.

  Fields that are None are not there.
  """
  job = tiny.job({'train.steps': 6, 'train.eval_batches': 0})
  run = tmp_path / 'run'
  shutil.copytree(first, run)
  file = run / 'checkpoints' / '4' / 'manifest' / 'metadata'
  held = json.loads(file.read_text())

  def resume(**meta):
    body, said = json.loads(json.dumps(held)), []
    body['meta'] |= meta
    for name in [name for name, value in meta.items() if value is None]:
      del body['meta'][name]
    body['sha256'] = manifest_lib._sha256(body)
    file.write_text(json.dumps(body))
    with job.context():
      with store_lib.Store(run / 'checkpoints', say=said.append) as store:
        _, step, _ = start.state(job, store, None, said.append)
    assert step == 4 and said[-1] == 'resumed from step 4, every leaf verified'
    return said[:-1]

  resume.folder, resume.meta = run / 'checkpoints' / '4', held['meta']
  return resume


@pytest.mark.fault(41)
def test_other_versions_are_said_in_one_line(resumed):
  now = resumed.meta['versions']
  packages = {'jax', 'flax', 'optax', 'orbax', 'numpy', 'grain', 'tokenizers'}
  assert resumed() == [] and set(now) == packages
  (line,) = resumed(versions=now | dict(jax='0.4.1'))
  assert line == (
    f'versions: the checkpoint was written with jax 0.4.1, here {now["jax"]}: '
    'the steps from here on may differ in their last bits'
  )
  (line,) = resumed(versions=dict(flax=now['flax'], jax=3))
  assert 'optax of no known version' in line and 'jax 3, here' in line
  assert 'flax' not in line
  (line,) = resumed(versions=None)
  assert line.count(', here') == 7


def test_other_versions_of_what_makes_batches_are_said(resumed):
  """Runs that kept none of them resume, too."""
  now = resumed.meta['versions']
  for name in ('numpy', 'grain', 'tokenizers'):
    (line,) = resumed(versions=now | {name: '0.1'})
    assert line == (
      f'versions: the checkpoint was written with {name} 0.1, here {now[name]}:'
      ' the steps from here on may differ in their batches'
    )
  older = {name: now[name] for name in ('jax', 'flax', 'optax', 'orbax')}
  (line,) = resumed(versions=older)
  assert line.count('of no known version') == 3 and 'jax' not in line


# What a meta may hold -> words of the message.
DAMAGED = [
  (dict(cursor=dict(step=2, seed=0)), 'its cursor has step 2, not 4'),
  (dict(cursor=dict(step=4, seed=9)), 'its cursor has seed 9, not 0'),
  (dict(cursor=dict(step=[4] * 99)), 'its cursor has step [4, 4, 4'),
  (dict(cursor=None), 'its cursor has step None, not 4'),
  (dict(cursor=[4]), 'its cursor is no object'),
  (dict(config=None), 'its config is no configuration'),
  (dict(config=3), 'its config is no configuration'),
  (dict(config='null'), 'its config is no configuration: it is NoneType'),
  (dict(config='[]'), 'its config is no configuration: it is list'),
  (dict(config='{"train": 3}'), 'its config is no configuration'),
  (dict(config='[' * 10**5), 'its config is no configuration'),
  (dict(config='{"trian": {}}'), "unknown config section 'trian'"),
  (dict(versions=[]), 'its versions is no object'),
  (dict(origin='x'), 'its origin is no object'),
  (dict(own_mixers=[1]), 'its own_mixers is no object'),
]


def test_damaged_meta_is_damage(resumed):
  """Sealed anew, so that nothing but `start` sees it: one line, code 14."""
  for meta, words in DAMAGED:
    with pytest.raises(errors.IntegrityError) as caught:
      resumed(**meta)
    text = str(caught.value)
    assert text.startswith(f'checkpoint {resumed.folder} is damaged: '), text
    assert words in text and '\n' not in text and len(text) < 500, text
    assert text.endswith('Move it away to resume from an older one.')
  for meta in (dict(corpus=None), dict(tokenizer=3)):
    with pytest.raises(errors.IntegrityError, match='changed since the check'):
      resumed(**meta)
  assert resumed() == []


def test_a_damaged_meta_ends_a_command(tiny, resumed, capsys, settings_stay):
  """And the way that its message names is open."""
  run = resumed.folder.parents[1]
  with pytest.raises(errors.IntegrityError):
    resumed(cursor=dict(step=2, seed=0))
  argv = ['train', f'--config={tiny.file}', f'--workdir={run}']
  argv += ['--config.train.steps=4', '--config.train.eval_batches=0']
  assert cli.main(argv) == 14
  assert 'its cursor has step 2, not 4' in capsys.readouterr().err
  resumed.folder.rename(run / 'away')
  assert cli.main(argv) == 0
  assert 'resumed from step 2' in capsys.readouterr().out
  shutil.rmtree(resumed.folder)
  (run / 'away').rename(resumed.folder)
  other = ['decode', f'--checkpoint={resumed.folder}', '--prompt=sea']
  for config, code in ((None, 2), (3, 2), ('[]', 14), ('[' * 10**5, 14)):
    with pytest.raises(errors.IntegrityError):
      resumed(config=config)
    assert cli.main(other) == code
    line = capsys.readouterr().err
    assert line.count('\n') == 1 and 'no configuration' in line


def _largest_chunk(path, step):
  """Bytes of the largest chunk of a checkpoint's files."""
  found = stored.Step(path / 'checkpoints' / str(step))
  return max(
    np.dtype(leaf['dtype']).itemsize * np.prod(found._open(p)[1], dtype=int)
    for p, leaf in found.leaves.items()
  )


def test_a_resumed_run_may_choose_other_chunks(tiny, first, tmp_path):
  """And computes the same; both layouts read them."""
  shutil.copytree(first, tmp_path / 'run')
  shutil.rmtree(tmp_path / 'run/checkpoints/4')
  changes = {
    'train.steps': 4, 'train.eval_batches': 0, 'checkpoint.chunk_bytes': 4096
  }  # fmt: skip
  _, said = tiny.run(tmp_path / 'run', changes)
  assert 'config: checkpoint.chunk_bytes was 0, is now 4096' in said
  wanted = support.fingerprints(first, 4)
  assert support.fingerprints(tmp_path / 'run', 4) == wanted
  assert _largest_chunk(first, 4) > 4096 == _largest_chunk(tmp_path / 'run', 4)
  shutil.rmtree(tmp_path / 'run/checkpoints/2')
  _, said = tiny.run(tmp_path / 'run', changes | {'train.steps': 5}, MESH)
  assert any('resumed from step 4' in line for line in said)
