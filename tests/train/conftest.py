"""A run small enough for a test: 40 kB of text, 34 thousand parameters."""

import math
import os
import random
import subprocess
import sys
import textwrap
import time

import jax
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.sharding import mesh as mesh_lib
from paraxis.train.run import metrics

WORDS = 'sea wind rock salt gull and over under storm calm sail north'.split()
CONFIG = """
  from paraxis.configs import schema

  def get_config():
    config = schema.default()
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 2, 2, 2
    config.model.vocab_size = 264
    config.model.d_model, config.model.d_ff = 32, 64
    config.model.num_layers, config.model.num_heads = 2, 4
    config.data.path, config.data.tokenizer = {text!r}, 'bytes'
    config.data.cache_dir = {tokens!r}
    config.data.sequence_length = 64
    config.optimizer.warmup_steps = 2
    config.train.steps = 6
    config.train.eval_batches = 1
    config.train.print_every = 1
    config.checkpoint.every = 2
    return config
"""


class Tiny:
  """Text, a config file and a token cache that all tests share.

  Attributes:
    folder, text, file: pathlib.Path of the folder, its text, its config file.
  """

  def __init__(self, folder):
    self.folder, self.text = folder, folder / 'song.txt'
    rng = random.Random(0)
    lines = (
      ' '.join(rng.choice(WORDS) for _ in range(40)) + '.' for _ in range(200)
    )
    self.text.write_text('\n\n'.join(lines))
    self.file = folder / 'tiny.py'
    text = CONFIG.format(text=str(self.text), tokens=str(folder / 'tokens'))
    self.file.write_text(textwrap.dedent(text))

  def config(self, changes=None):
    """schema.Config, with {'section.field': value} changed."""
    config = command_line.load(str(self.file))
    config.update_from_flattened_dict(changes or {})
    return schema.view(config)

  def job(self, changes=None, mesh='', say=lambda line: None):
    """program.Job of `config(changes)`, on as many devices as `mesh` has."""
    from paraxis.train import program  # starts slowly, as does the loop

    return program.make(self.config(changes), mesh, _devices(mesh), say)

  def run(
    self, workdir, changes=None, mesh='', source=None, profile='', **options
  ):
    """Trains in this process: (what loop.run returns, [lines that it said])."""
    from paraxis.train import loop

    said, config = [], self.config(changes)
    options['options'] = loop.Options(profile, source)
    options = dict(devices=_devices(mesh), say=said.append) | options
    return loop.run(config, workdir, mesh, **options), said

  def start(self, workdir, *flags, **options):
    """`paraxis train` in a process of its own: subprocess.Popen."""
    command = [sys.executable, '-m', 'paraxis.train', f'--config={self.file}']
    return subprocess.Popen(
      [*command, f'--workdir={workdir}', *flags],
      env=dict(os.environ, PARAXIS_CACHE=str(self.folder / 'cache')),
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      **options,
    )

  def wait(self, processes, workdir, step, seconds=300):
    """Until all of the processes have done the step."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
      if any(process.poll() is not None for process in processes):
        break
      file = workdir / metrics.FILE
      if file.exists() and max(metrics.read(workdir), default=0) >= step:
        return
      time.sleep(0.02)
    for process in processes:
      process.kill()
    raise AssertionError([process.communicate()[0] for process in processes])


def _devices(mesh):
  """As many devices as a mesh text has places; None: all."""
  places = math.prod(mesh_lib.parse(mesh).values())
  return jax.devices()[:places] if mesh and places > 0 else None


@pytest.fixture
def settings_stay(tmp_path, monkeypatch):
  """What a command sets in its process is undone; its caches are empty."""
  from paraxis.sharding.meter import compiling

  monkeypatch.setattr(compiling, 'use_cache', lambda: None)
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])
  monkeypatch.setenv('PARAXIS_CACHE', str(tmp_path / 'user_cache'))


@pytest.fixture(scope='session')
def tiny(tmp_path_factory):
  return Tiny(tmp_path_factory.mktemp('tiny'))
