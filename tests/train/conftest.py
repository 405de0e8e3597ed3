"""A run small enough for a test: 40 kB of text, 34 thousand parameters."""

import json
import os
import random
import subprocess
import sys
import textwrap

import jax
from jax.experimental.compilation_cache import compilation_cache
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line

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

  def start(self, workdir, *flags, **options):
    """`paraxis train` in a process of its own: subprocess.Popen."""
    command = [sys.executable, '-m', 'paraxis.train', f'--config={self.file}']
    environment = dict(os.environ, PARAXIS_CACHE=str(self.folder / 'cache'))
    if 'JAX_COMPILATION_CACHE_DIR' not in environment:
      environment['JAX_COMPILATION_CACHE_DIR'] = str(self.folder / 'compiled')
      environment['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
    return subprocess.Popen(
      [*command, f'--workdir={workdir}', *flags],
      env=environment,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      **options,
    )


@pytest.fixture(scope='session')
def _shared(tmp_path_factory):
  return Tiny(tmp_path_factory.mktemp('tiny'))


@pytest.fixture(scope='module')
def tiny(_shared):
  """Tiny; without an outer cache jax keeps in its folder what it compiled."""
  if 'JAX_COMPILATION_CACHE_DIR' in os.environ:
    yield _shared
    return
  new = dict(
    jax_compilation_cache_dir=str(_shared.folder / 'compiled'),
    jax_persistent_cache_min_compile_time_secs=0.2,
  )
  old = {name: getattr(jax.config, name) for name in new}
  compilation_cache.reset_cache()
  for name, value in new.items():
    jax.config.update(name, value)
  yield _shared
  for name, value in old.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.fixture(scope='session')
def losses():
  """losses(workdir): {step: list of its losses as hex, replayed ones too}."""

  def read(workdir):
    out = {}
    for line in (workdir / 'metrics.jsonl').read_text().splitlines():
      row = json.loads(line)
      if 'train/loss' in row:
        out.setdefault(row['step'], []).append(row['train/loss'].hex())
    return out

  return read


@pytest.fixture(scope='module')
def quick_to_compile():
  """Runs of few steps: most of their time is LLVM's."""
  from paraxis.train.certify import trial
  from paraxis.train.run import compiling

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(compiling, 'options', trial.quick_options)
    yield
