"""A run's folder: who may write, what a resumed run may change."""

import contextlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import model as model_schema
from paraxis.models import decoder
from paraxis.sharding.checkpoint import store
from paraxis.train.claims import experiment
from paraxis.train.run import remains
from paraxis.train.run import workdir


def test_prepare_makes_the_folder_and_leaves_nothing_in_it(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  path = workdir.prepare('a/b')
  assert path == tmp_path / 'a' / 'b' and not list(path.iterdir())
  assert workdir.prepare(path) == path


@pytest.mark.fault(43)
def test_a_second_holder_is_refused(tmp_path):
  lock = workdir.Lock(tmp_path)
  with pytest.raises(errors.UserError, match=f'process {os.getpid()} on '):
    workdir.Lock(tmp_path)
  lock.close()
  workdir.Lock(tmp_path).close()


def test_the_lock_goes_with_its_process(tmp_path):
  code = (
    'import os, pathlib, sys\n'
    'from paraxis.train.run import workdir\n'
    'lock = workdir.Lock(pathlib.Path(sys.argv[1]))\n'
    'print("held", flush=True)\n'
    'sys.stdin.read()\n'
  )
  process = subprocess.Popen(
    [sys.executable, '-c', code, str(tmp_path)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  with process:
    assert process.stdout.readline() == 'held\n'
    with pytest.raises(errors.UserError, match=f'process {process.pid} on '):
      workdir.Lock(tmp_path)
    process.kill()
    process.wait()
  workdir.Lock(tmp_path).close()


FREE = {
  'mesh.data': 4,
  'mesh.rules': 'data',
  'checkpoint.every': 7,
  'checkpoint.chunk_bytes': 4096,
  'decode.top_k': 3,
  'train.steps': 9,
  'train.eval_every': 3,
  'train.remat': 'full',
  'train.memory': 'gate=recompute',
  'train.microbatches': 2,
  'model.loss': 'chunked',
  'model.attention_block': 64,
  'model.unroll': 2,
  'model.attention': 'xla',
  'data.prefetch': 0,
  'data.cache_dir': 'elsewhere',
  'pipeline.schedule': 'gpipe',
}
HARD = {
  'model.attention_softcap': 30.0,
  'model.attention_bias': True,
  'model.d_model': 320,
  'model.dtype': 'bfloat16',
  'data.path': 'other',
  'data.packing': 'first_fit',
  'data.sequence_length': 128,
  'optimizer.learning_rate': 0.1,
  'train.seed': 1,
  'train.batch_size': 16,
  'pipeline.skip_fraction': 0.5,
}


@pytest.mark.parametrize('name', FREE)
def test_free_fields_are_said(tmp_path, name):
  workdir.write_config(tmp_path, schema.Config())
  said = []
  changed = experiment.fields(schema.Config(), {name: FREE[name]})
  workdir.check_config(tmp_path, changed, said.append)
  assert len(said) == 1
  assert said[0].startswith(f'config: {name} was ')
  assert f', is now {FREE[name]!r}' in said[0]


@pytest.mark.parametrize(
  'name, schedule, stretched',
  [
    ('adamw', 'cosine', True),
    ('muon', 'wsd', True),
    ('adamw', 'constant', False),
    ('ademamix', 'constant', True),
  ],
)
def test_a_schedule_is_stretched_where_rates_follow_it(
  tmp_path, name, schedule, stretched
):
  own = {'optimizer.name': name, 'optimizer.schedule': schedule}
  old = experiment.fields(schema.Config(), own | {'train.steps': 8})
  workdir.write_config(tmp_path, old)
  longer, said = experiment.fields(old, {'train.steps': 9}), []
  workdir.check_config(tmp_path, longer, said.append)
  tail = '; the schedule is stretched' * stretched
  assert said == [f'config: train.steps was 8, is now 9{tail}']


@pytest.mark.parametrize('name', HARD)
@pytest.mark.invariant(11)
def test_hard_fields_are_refused(tmp_path, name):
  workdir.write_config(tmp_path, schema.Config())
  changes = {name: HARD[name], 'train.eval_every': 3}
  changed = experiment.fields(schema.Config(), changes)
  with pytest.raises(errors.UserError) as caught:
    workdir.check_config(tmp_path, changed, lambda line: None)
  text, was = str(caught.value), schema.value(schema.Config(), name)
  assert f'{name} was {was!r}, is now {HARD[name]!r}' in text
  assert 'eval_every' not in text and str(tmp_path) in text


@pytest.mark.parametrize('name', workdir.PATHS)
@pytest.mark.invariant(11)
def test_fields_that_draw_the_paths_of_a_run_that_skips(tmp_path, name):
  plain = experiment.fields(
    schema.Config(), {'mesh.stage': 4, 'pipeline.microbatches': 8}
  )
  skips = {'pipeline.schedule': 'skip', 'pipeline.skip_fraction': 0.5}
  old = experiment.fields(plain, skips)
  workdir.write_config(tmp_path, old)
  other = experiment.fields(old, {name: 2})
  with support.refused(f'{name} was ', 'is now 2', 'another --workdir'):
    workdir.claim(tmp_path, other, False, lambda line: None)
  # Only a run that is laid out knows its mesh: --mesh= is not in `other`.
  workdir.check(tmp_path, other)
  for free in (plain, experiment.fields(old, {'pipeline.skip_fraction': 0.0})):
    said = []
    workdir.compare(
      'RUN', free, experiment.fields(free, {name: 2}), said.append
    )
    assert len(said) == 1


@pytest.mark.parametrize(
  'name, was, now, free',
  [
    ('data.tokenizer', 'gone/tokenizer.json', 'b/tokenizer.json', True),
    ('data.tokenizer', 'run/tokenizer.json', 'b/tokenizer.json', True),
    ('data.tokenizer', 'a/tokenizer.json', 'b/tokenizer.json', False),
    ('data.tokenizer', 'gone/tokenizer.json', '', False),
    ('data.path', 'gone/text', 'b/text', True),
    ('data.path', 'gone/*.txt', 'b/*.txt', True),
    ('data.path', 'a/*.json', 'b/*.txt', False),
    ('data.path', 'run/tokenizer.json', 'b/text', False),
    ('data.path', '', 'b/text', False),
    ('data.chat_template', 'gone/own.jinja', 'b/own.jinja', True),
    ('data.sources', 'gone/text', 'b/text', False),
  ],
)  # fmt: skip
@pytest.mark.invariant(11)
def test_files_that_are_elsewhere(tmp_path, name, was, now, free):
  """A field may name another place where the old one is gone, or a run's own
  folder; '' stands for the default, which is no place."""
  (tmp_path / 'run' / workdir.CHECKPOINTS).mkdir(parents=True)
  (tmp_path / 'a').mkdir()
  for folder in ('run', 'a'):
    (tmp_path / folder / 'tokenizer.json').touch()
  places = [{name: str(tmp_path / x)} if x else {} for x in (was, now)]
  old, new = (experiment.fields(schema.Config(), x) for x in places)
  said = []
  with contextlib.nullcontext() if free else support.refused(f'{name} was '):
    workdir.compare('RUN', old, new, said.append)
  assert len(said) == free


# Values of KEEP_SHAPES that differ from the default.
OTHERS = {
  'rope_scaling': 'linear',
  'dtype': 'bfloat16',
  'loss': 'chunked',
  'scan': 'xla',
  'rope_truncate': False,
  'rope_fraction': 0.5,
  'experts.normalise': False,
  'experts.groups': 2,
  'experts.capacity_factor': 1.25,
}


def _shapes(model):
  made = decoder.Decoder(model).init
  found = jax.eval_shape(lambda: made(jax.random.key(0)))
  return {path: (x.shape, x.dtype) for path, x in found.items()}


def test_fields_that_keep_shapes_do():
  """Of a model that reads them all; what is not in the table may not."""
  base = schema.Model(
    d_model=16, num_heads=2, d_ff=16, num_layers=2, vocab_size=8, pattern='WG',
    window=4, experts=model_schema.Experts(count=4),
  )  # fmt: skip
  wanted = _shapes(base)
  for name in workdir.KEEP_SHAPES:
    was = schema.value(base, name)
    now = OTHERS[name] if name in OTHERS else 2 * was + 1
    changed = schema.with_values(base, {name: now})
    assert now != was, name
    assert _shapes(changed) == wanted, name
  changed = schema.with_values(base, {'d_model': 32})
  assert _shapes(changed) != wanted


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'model.d_model': 320}, ['new ones: model.d_model sets the shapes']),
    ({'model.vocab_size': 2000, 'model.d_ff': 8, 'train.seed': 2},
     ['model.vocab_size, model.d_ff set the shapes', 'train.seed was']),
    ({'train.seed': 2}, ['with these weights: --init_from=RUN.']),
    ({'model.rope_theta': 5e5}, ['with these weights: --init_from=RUN.']),
    ({'model.vocab_size': 4096}, ['with these weights: --init_from=RUN.']),
  ],
)  # fmt: skip
def test_the_way_that_is_named_is_open(changes, words):
  """--init_from only where parameters keep their shapes."""
  old = schema.Config()
  new = experiment.fields(old, changes)
  with support.refused(*words):
    workdir.compare('RUN', old, new)
  assert workdir.keeps_shapes('extra.decay', 0.5, 1)


# What a run of before wrote, of the fields that matter here.
OLD = '{{"model": {{"experts": {{"count": {}, "balance_scope": "{}"}}}}}}'


@pytest.mark.parametrize(
  'count, was, asked, kept, lines',
  [
    (8, 'microbatch', 'step', 'microbatch', 1),
    (0, 'microbatch', 'step', 'microbatch', 0),  # it has no experts
    (8, 'microbatch', 'sequence', 'sequence', 0),  # not a default
    (8, 'running', 'step', 'step', 0),
    (8, 'step', 'step', 'step', 0),
  ],
)
def test_an_old_run_keeps_its_former_default(
  tmp_path, count, was, asked, kept, lines
):
  name, said = 'model.experts.balance_scope', []
  (tmp_path / workdir.CONFIG).write_text(OLD.format(count, was))
  config = experiment.fields(
    schema.Config(), {name: asked, 'model.experts.count': count}
  )
  found = workdir.resumed(tmp_path, config, said.append)
  assert schema.value(found, name) == kept and len(said) == lines
  assert workdir.differences(found, config) == (
    [] if kept == asked else [(name, kept, asked)]
  )
  if was == kept:
    workdir.check_config(tmp_path, found, pytest.fail)
  else:
    with pytest.raises(errors.UserError, match=f"{name} was '{was}'"):
      workdir.check_config(tmp_path, found, pytest.fail)


def test_a_new_run_takes_the_default(tmp_path):
  config = schema.Config()
  assert workdir.resumed(tmp_path, config, pytest.fail) is config
  assert set(workdir.FORMER) <= {name for name, _ in schema.fields()}


def test_every_free_name_is_a_field():
  names = {name for name, _ in schema.fields()}
  sections = {f'{section}.' for section in schema.SECTIONS}
  assert set(workdir.FREE) <= names | sections


def test_the_config_survives(tmp_path):
  changes = {'train.steps': 9, 'data.path': 'sea'}
  config = experiment.fields(schema.Config(), changes)
  workdir.write_config(tmp_path, config)
  assert workdir.read_config(tmp_path) == config
  assert [p.name for p in tmp_path.iterdir()] == [workdir.CONFIG]
  workdir.check_config(tmp_path, config, pytest.fail)


# What config.json may hold after damage -> words of the message.
DAMAGED = {
  b'{"train": ': 'Expecting value',
  b'\xff\xfe{}': "can't decode byte 0xff",
  b'null': 'it is NoneType, not an object',
  b'[1, 2]': 'it is list, not an object',
  b'"text"': 'it is str, not an object',
  b'7': 'it is int, not an object',
  b'': 'Expecting value',
  b'{"train": null}': 'no configuration',
  b'{"model": {"experts": []}}': '',
  b'{"train": {"steps": []}}': 'train.steps',
  b'{"train": {"stepz": 3}}': 'unknown config key train.stepz',
  b'{"extra": 3}': '',
  b'[' * 10**5: 'no configuration',
  b'{"train":' * 10**5: 'no configuration',
}


def test_no_config(tmp_path):
  workdir.check_config(tmp_path, schema.Config(), pytest.fail)
  with pytest.raises(errors.UserError, match='not a workdir'):
    workdir.read_config(tmp_path)


@pytest.mark.parametrize('content', DAMAGED, ids=lambda c: repr(c[:24]))
def test_a_damaged_config(tmp_path, content):
  """One line; whoever wrote a checkpoint has a copy, which is offered."""
  file = tmp_path / workdir.CONFIG
  file.write_bytes(content)
  if content == b'{"model": {"experts": []}}':  # a section without fields
    assert workdir.read_config(tmp_path) == schema.Config()
    return
  start = f'{file} is damaged: '
  with pytest.raises(errors.IntegrityError) as caught:
    workdir.check(tmp_path, schema.Config())
  first = str(caught.value)
  assert first.startswith(start) and DAMAGED[content] in first
  assert '\n' not in first and 'copy' not in first
  config = schema.to_json(schema.Config())
  options = store.Options(asynchronous=False)
  with store.Store(tmp_path / 'checkpoints', options) as s:
    s.save(3, {'w': jnp.ones(8)}, {'w': ('embed',)}, {'config': config})
    s.save(4, {'w': jnp.ones(8)}, {'w': ('embed',)}, {'config': None})
  with pytest.raises(errors.IntegrityError) as caught:
    workdir.check(tmp_path, schema.Config())
  assert str(caught.value) == (
    f'{first} The manifest of {tmp_path}/checkpoints/3 has a copy: move '
    'config.json away, and the same command resumes from there.'
  )


@pytest.mark.fault(17)
@pytest.mark.parametrize(
  'name', [workdir.CONFIG, workdir.LOCK, *remains.RECORDS]
)
@pytest.mark.parametrize('kind', ['pipe', 'folder'])
def test_no_file_in_place_of_one(tmp_path, name, kind):
  """Whatever is read at the start; a named pipe is not waited for."""
  path = tmp_path / name
  os.mkfifo(path) if kind == 'pipe' else path.mkdir()
  for act in (
    lambda: workdir.check(tmp_path, schema.Config()),
    lambda: workdir.claim(tmp_path, schema.Config(), False, pytest.fail),
  ):
    with (
      support.within(20),
      pytest.raises((errors.UserError, errors.IntegrityError)) as caught,
    ):
      act()
    text = str(caught.value)
    assert f'{path}' in text and '\n' not in text
    assert f'it is a {"named " if kind == "pipe" else ""}{kind}, not a' in text


def test_links_lead_nowhere(tmp_path):
  """Neither the lock nor the config is written outside of the folder."""
  run, outside = tmp_path / 'run', tmp_path / 'outside'
  run.mkdir()
  outside.write_text('of another')
  (run / workdir.LOCK).symlink_to(outside)
  with support.refused(str(run / workdir.LOCK), 'symbolic link', 'remove it'):
    workdir.Lock(run)
  with support.refused('symbolic link'):
    workdir.check(run, schema.Config())
  (run / workdir.LOCK).unlink()
  (run / workdir.LOCK).symlink_to(tmp_path / 'made')
  with support.refused('symbolic link'):
    workdir.Lock(run)
  for name in (workdir.CONFIG, f'{workdir.CONFIG}.tmp'):
    (run / name).symlink_to(outside)
  workdir.write_config(run, schema.Config())
  assert workdir.read_config(run) == schema.Config()
  assert not (run / workdir.CONFIG).is_symlink()
  assert outside.read_text() == 'of another'
  assert sorted(p.name for p in tmp_path.iterdir()) == ['outside', 'run']
