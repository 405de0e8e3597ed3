"""What a run left: lost checkpoints are seen, and nothing is deleted."""

import json
import os
import shutil

import jax.numpy as jnp
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import store
from paraxis.train.run import metrics
from paraxis.train.run import remains
from paraxis.train.run import workdir


def _commit(step, **more):
  return json.dumps(dict(time=1.0, event='commit', step=step) | more) + '\n'


def _save(folder, step=4):
  config = schema.to_json(schema.Config())
  with store.Store(folder, store.Options(asynchronous=False)) as s:
    s.save(step, {'w': jnp.ones(8)}, {'w': ('embed',)}, {'config': config})


@pytest.fixture
def left(tmp_path):
  """A workdir with one checkpoint, of step 4, and its records."""
  workdir.write_config(tmp_path, schema.Config())
  (tmp_path / metrics.FILE).write_text('{"step": 4}\n')
  (tmp_path / remains.EVENTS).write_text(_commit(2) + _commit(4))
  (tmp_path / 'wandb_id').write_text('abc')
  _save(tmp_path / 'checkpoints')
  return tmp_path


def _lost(path, *words):
  """Asserts that both ways to a folder say that its checkpoints are lost."""
  config, silent = schema.Config(), lambda line: None
  for act in (
    lambda: workdir.check(path, config),
    lambda: workdir.claim(path, config, False, silent),
  ):
    with pytest.raises(errors.IntegrityError) as caught:
      act()
    text = str(caught.value)
    assert 'has lost its checkpoints' in text and '--from_scratch' in text
    assert '\n' not in text and all(word in text for word in words), text


def _claimed(path, from_scratch=False):
  """What is said when a run claims the folder."""
  said = []
  workdir.check(path, schema.Config(), from_scratch)
  workdir.claim(path, schema.Config(), from_scratch, said.append).close()
  return said


def test_names_are_those_of_the_metrics():
  assert {metrics.FILE, metrics.WANDB_ID, remains.EVENTS} == set(
    remains.RECORDS
  )


def test_a_whole_run_and_a_new_one_are_claimed(left, tmp_path_factory):
  assert _claimed(left) == []
  new = tmp_path_factory.mktemp('new')
  assert _claimed(new) == [] and _claimed(new, from_scratch=True) == []


@pytest.mark.parametrize('kind', ['missing', 'dangling', 'file', 'empty'])
@pytest.mark.parametrize('events', [True, False])
@pytest.mark.invariant(7)
def test_lost_checkpoints(left, kind, events):
  folder = left / 'checkpoints'
  shutil.rmtree(folder)
  if not events:
    (left / remains.EVENTS).unlink()
  if kind == 'dangling':
    folder.symlink_to('/mnt/away/run')
  elif kind == 'file':
    folder.write_text('')
  elif kind == 'empty':
    folder.mkdir()
  why = {
    'missing': f'{folder} cannot be read (No such file or directory)',
    'dangling': f'{folder} leads to /mnt/away/run, which cannot be read',
    'file': f'{folder} cannot be read (Not a directory)',
    'empty': f'{folder} holds no step',
  }[kind]
  if kind == 'empty' and not events:
    assert _claimed(left) == []  # killed before its first checkpoint
    return
  known = f'events.jsonl says that step {4} was committed'
  _lost(left, why, known if events else 'config.json and metrics.jsonl')
  assert (left / metrics.FILE).exists() and (left / 'config.json').exists()


@pytest.mark.parametrize(
  'events',
  ['', '\n', '{"event": "start", "step": 3}\n', '{"event": "commit"',
   '[' * 10**5, '{"event": "commit", "step": null}\n', 'commit\n\0\0'],
)  # fmt: skip
def test_events_without_a_commit(left, events):
  """A torn or damaged line is none; one after it counts."""
  file = left / remains.EVENTS
  file.write_text(events)
  shutil.rmtree(left / 'checkpoints')
  (left / 'checkpoints').mkdir()
  assert _claimed(left) == []
  file.write_text(f'{events}\n{_commit(2)}')
  _lost(left, 'step 2 was committed')


def test_a_linked_disk_is_used(left, tmp_path_factory):
  disk = tmp_path_factory.mktemp('disk')
  shutil.move(left / 'checkpoints', disk / 'of_run')
  (left / 'checkpoints').symlink_to(disk / 'of_run')
  assert _claimed(left) == []
  shutil.move(disk / 'of_run', disk / 'away')
  _lost(left, f'leads to {disk / "of_run"}')


def test_from_scratch_sets_all_aside(left):
  """The new run may have another configuration."""
  shutil.rmtree(left / 'checkpoints')
  (left / 'checkpoints').symlink_to('/mnt/away/run')
  (left / 'events.out.tfevents.1').write_text('curve')
  (line,) = _claimed(left, from_scratch=True)
  (aside,) = left.glob('before-*')
  assert str(aside) in line and 'metrics.jsonl' in line
  names = {*remains.RECORDS, 'config.json', 'events.out.tfevents.1'}
  assert {p.name for p in aside.iterdir()} == names | {'checkpoints'}
  assert (aside / metrics.FILE).read_text() == '{"step": 4}\n'
  assert os.readlink(aside / 'checkpoints') == '/mnt/away/run'
  assert {p.name for p in left.iterdir()} == {workdir.LOCK, aside.name}
  (left / metrics.FILE).write_text('more\n')
  _claimed(left, from_scratch=True)
  assert len(list(left.glob('before-*'))) == 2  # never over the first


def test_from_scratch_passes_over_no_checkpoint(left):
  before = sorted(left.rglob('*'))
  for act in (
    lambda: workdir.check(left, schema.Config(), True),
    lambda: workdir.claim(left, schema.Config(), True, pytest.fail),
  ):
    with support.refused('1 readable checkpoints (steps 4)', 'to resume'):
      act()
  assert sorted(left.rglob('*')) == before


def test_from_scratch_sets_damaged_checkpoints_aside(left):
  file = left / 'checkpoints' / '4' / 'manifest' / 'metadata'
  file.write_text('{')
  said = _claimed(left, from_scratch=True)
  (aside,) = (left / 'checkpoints').iterdir()
  assert said[0] == f'1 damaged checkpoints are now in {aside}'
  assert (aside / '4' / 'manifest' / 'metadata').read_text() == '{'
