"""Checkpoints in a folder of NFS: open files stay, other hosts see it late."""

import pathlib
import shutil

import jax.numpy as jnp

from paraxis.sharding import meeting
from paraxis.sharding.checkpoint import store

AXES = {'w': ('embed',)}


def state():
  return {'w': jnp.arange(8.0)}


def test_a_step_that_cannot_be_deleted_fails_no_save(tmp_path, monkeypatch):
  """Of a folder that was deleted a file stays, as NFS has it; the step comes
  again after a rollback, and goes. Then one that cannot be renamed stays."""
  rename, said = pathlib.Path.rename, []

  def refused(path, to):
    if path.name == '2':
      raise OSError(f'{path} is busy')
    return rename(path, to)

  options = store.Options(keep=1, asynchronous=False)
  with store.Store(tmp_path, options, say=said.append) as s:
    with monkeypatch.context() as patch:
      patch.setattr(shutil, 'rmtree', lambda path, ignore_errors: None)
      for step in (1, 2, 3):
        s.save(step, state(), AXES, {})
      s.drop(0)
    for step in (1, 2):
      s.save(step, state(), AXES, {})
    assert s.steps() == [2] and not said
    monkeypatch.setattr(pathlib.Path, 'rename', refused)
    for step in (3, 4):
      s.save(step, state(), AXES, {})
    assert s.steps() == [2, 4]
  assert [line.count('/2 is not deleted: ') for line in said] == [1, 1]


def test_a_host_that_sees_a_step_late_commits_it(tmp_path, monkeypatch):
  """Only process 0, which has renamed its folder, looks for it."""
  is_dir, late = pathlib.Path.is_dir, tmp_path / '2'
  with store.Store(tmp_path, store.Options(failures=9)) as s:
    s.save(1, state(), AXES, {})
    s.wait()
    monkeypatch.setattr(s._writer, '_first', False)
    with monkeypatch.context() as patch:
      patch.setattr(pathlib.Path, 'is_dir', lambda p: p != late and is_dir(p))
      s.save(2, state(), AXES, {})
      s.wait()
    assert s.steps() == [1, 2]


def test_steps_to_go_back_to_are_those_of_process_0(tmp_path, monkeypatch):
  def gather(name, text, seconds=0):
    return ['[1, 2]', text] if name == 'older steps seen' else [text]

  with store.Store(tmp_path) as s:
    s.save(1, state(), AXES, {})
    assert s.before(3) == [1]
    monkeypatch.setattr(meeting, 'gather', gather)
    monkeypatch.setattr(s, '_first', False)
    assert s.before(3) == [1, 2]


def test_all_processes_resume_from_one_step(tmp_path, monkeypatch):
  """Of the steps that process 0 sees, the newest that reads in each."""
  others = {'steps seen': '[3, 2, 1]'}
  refused = []

  def gather(name, text, seconds=0):
    if name in refused:
      refused.remove(name)
      return ['0', text]
    return [others.get(name, text), text]

  with store.Store(tmp_path) as s:
    for step in (1, 2, 3):
      s.save(step, state(), AXES, {})
    s.wait()
    listed = lambda: s.restore_latest_good(lambda step: state())[0]
    monkeypatch.setattr(meeting, 'gather', gather)
    monkeypatch.setattr(store.folders, 'steps', lambda directory: [1])
    assert listed() == 3
    for name in ('manifest read', 'leaves', 'checkpoint read'):
      refused.append(name)
      assert listed() == 2 and not refused


def test_what_another_process_sees_is_set_aside_together(tmp_path, monkeypatch):
  """A process that does not see a damaged step yet meets those that do."""
  met = []

  def gather(name, text, seconds=0):
    met.append(name)
    return ['0' if name == 'a checkpoint begun' else text, text]

  with store.Store(tmp_path, store.Options(asynchronous=False)) as s:
    monkeypatch.setattr(meeting, 'gather', gather)
    monkeypatch.setattr(s, '_first', False)
    s.save(1, state(), AXES, {})
  begun = met.index('a checkpoint begun')
  assert met[begun + 1 : begun + 3] == [
    'a damaged checkpoint seen', 'a damaged checkpoint set aside',
  ]  # fmt: skip
