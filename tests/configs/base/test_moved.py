"""Old names of modules still import, and warn; new ones do not."""

import importlib
import subprocess
import sys

import pytest

from paraxis.configs.base import moved


def test_every_old_name_leads_to_a_module(tree):
  table = moved.table()
  assert len(table) > 150
  for old, new in table.items():
    assert f'{new.replace(".", "/")}.py' in tree.files, new
    assert f'{old.replace(".", "/")}.py' not in tree.files, old


def test_an_old_name_imports_and_warns():
  new = importlib.import_module('paraxis.sharding.sequence.attention')
  with pytest.warns(DeprecationWarning, match='is now paraxis.sharding.seq'):
    from paraxis.sharding import context
  assert context is new


def test_a_module_that_left_its_folder():
  new = importlib.import_module('paraxis.sharding.meter.compiling')
  with pytest.warns(DeprecationWarning, match='now paraxis.sharding.meter.co'):
    from paraxis.train import compiling
  assert compiling is new


def test_what_a_room_was_before():
  from paraxis.train import plot  # a room now, a module before

  with pytest.warns(DeprecationWarning, match=r'now paraxis.train.plot.losses'):
    draw = plot.draw
  assert draw.__module__ == 'paraxis.train.plot.losses'
  with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
    plot.nothing  # noqa: B018


def test_a_new_name_is_silent():
  code = (
    'from paraxis.configs import schema, quickstart\n'
    'from paraxis.sharding.pipeline import ticks, executor\n'
    'from paraxis.pallas_kernels.attention import tpu, op\n'
    'assert ticks.__name__.endswith("pipeline.ticks")\n'
  )
  subprocess.run([sys.executable, '-W', 'error', '-c', code], check=True)
