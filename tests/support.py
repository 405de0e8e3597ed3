"""What test files share: `import support`.

Configurations, comparisons, what a run left.
"""

import contextlib
import dataclasses
import json
import math
import signal
import socket
import struct
import time

import chex
import jax
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import build
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.meter import aot
from paraxis.train.run import metrics


def needs(platform):
  """Mark of a test that is skipped where 'tpu' or 'cuda' has no compiler."""
  missing = aot.missing(platform)
  return pytest.mark.skipif(missing is not None, reason=f'{missing}')


def compiles(platform):
  """Decorator of a test that compiles ahead of time for `needs(platform)`."""
  return lambda test: pytest.mark.aot(needs(platform)(aot.uncached()(test)))


def piped(mesh=(), pipeline=(), layers=4, **train):
  """schema.Config in float64 of a small model; by default on one device."""
  return schema.Config(
    mesh=schema.Mesh(**dict(mesh)),
    pipeline=schema.Pipeline(**dict(pipeline)),
    model=schema.Model(
      vocab_size=32, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24,
      attention_block=8, dtype='float64', param_dtype='float64',
      num_layers=layers,
    ),
    data=schema.Data(sequence_length=16),
    train=schema.Train(**dict(batch_size=8) | train),
  )  # fmt: skip


def certify(config, packed=True, properties=('loss', 'gradients', 'update')):
  """certification.Verdicts on a config on all devices against one."""
  from paraxis.train.certify import verify  # starts slowly

  subject = verify.Case(config, jax.devices(), packed, ())
  return verify.certify(subject, properties)


@contextlib.contextmanager
def laid_out(sizes, kv_heads=1, **fields):
  """The mesh 'data=2,tensor=2' on the first devices, in force with the rules of
  schema.Mesh(**fields) for a model with these kv heads."""
  count = math.prod(mesh_lib.parse(sizes).values())
  mesh = mesh_lib.make(sizes, jax.devices()[:count])
  rules = rules_lib.of(schema.Mesh(**fields), dict(mesh.shape), kv_heads)
  with annotate.use(rules), jax.set_mesh(mesh):
    yield mesh


def close(found, wanted, tolerance=1e-12):
  """Asserts that trees are alike and differ, leaf by leaf, by no more than
  tolerance * max |wanted|."""
  chex.assert_trees_all_equal_structs(found, wanted)
  chex.assert_trees_all_equal_shapes(found, wanted)
  for (path, b), a in zip(
    jax.tree.leaves_with_path(wanted), jax.tree.leaves(found), strict=True
  ):
    a, b = np.asarray(a, 'f8'), np.asarray(b, 'f8')
    np.testing.assert_allclose(
      a, b, rtol=0, atol=tolerance * np.abs(b).max(), err_msg=str(path)
    )


@contextlib.contextmanager
def refused(*words):
  """Asserts that its block raises a UserError of one line with these words."""
  with pytest.raises(errors.UserError) as caught:
    yield
  text = str(caught.value)
  assert '\n' not in text and all(word in text for word in words), text


def untrained(config, seed=0):
  """(build.Built, parameters) of a config on one device, without its mesh."""
  plain = dataclasses.replace(config, mesh=schema.Mesh())
  built = build.build(plain, 'data=1', devices=jax.devices()[:1])
  with build.use(built):
    return built, jax.jit(lambda: built.model.init(jax.random.key(seed)))()


def save_run(path, config, built, params, steps=(1,)):
  """Checkpoints in a workdir, as a run of the config leaves them; its path."""
  from paraxis.models.text import tokenizer
  from paraxis.sharding.checkpoint import store as store_lib

  tree = {f'params/{p}': v for p, v in params.items()}
  axes = {f'params/{p}': built.model.axes[p] for p in params}
  # A checkpoint of training holds more, which decoding must not need.
  tree['optimizer/mu'], axes['optimizer/mu'] = params['norm/scale'], ('norm',)
  fingerprint = tokenizer.load(config.data.tokenizer).fingerprint
  meta = dict(config=schema.to_json(config), tokenizer=fingerprint)
  with store_lib.Store(
    path / 'checkpoints', store_lib.Options(asynchronous=False)
  ) as store:
    for step in steps:
      store.save(step, tree, axes, meta)
  return path


class KilledError(Exception):
  """Of `crash_at`."""


def crash_at(last):
  """A callback of loop.run that raises KilledError after step `last`."""

  def callback(step, values, job):
    if step == last:
      raise KilledError

  return callback


def until(holds, what='it does not happen', seconds=20):
  """Waits for what another thread does."""
  end = time.monotonic() + seconds
  while not holds():
    assert time.monotonic() < end, what
    time.sleep(0.01)


def address():
  """Of a port that is free."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    return f'127.0.0.1:{free.getsockname()[1]}'


def ended(processes, seconds):
  """[stdout] of processes, all of which must end with 0, each in time."""
  try:
    said = [process.communicate(timeout=seconds)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert not any(process.returncode for process in processes), said
  return said


@contextlib.contextmanager
def within(seconds):
  """TimeoutError in its block if that waits for ever, for a pipe as it may."""

  def late(number, frame):
    raise TimeoutError(f'not done in {seconds} s')

  before = signal.signal(signal.SIGALRM, late)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def losses(workdir):
  """{step: loss} of a run; the last one of a step that ran twice."""
  rows = metrics.read(workdir)
  return {s: r['train/loss'] for s, r in rows.items() if 'train/loss' in r}


def all_losses(workdir):
  """{step: list of its losses as hex, replayed ones too} of a run."""
  out = {}
  for line in (workdir / metrics.FILE).read_text().splitlines():
    row = json.loads(line)
    if 'train/loss' in row:
      out.setdefault(row['step'], []).append(row['train/loss'].hex())
  return out


def fingerprints(workdir, step):
  """{path: fingerprint} in the manifest of a run's checkpoint."""
  from paraxis.sharding.checkpoint import store as store_lib  # so does Orbax

  with store_lib.Store(workdir / 'checkpoints', read_only=True) as store:
    leaves = store.read_manifest(step)['leaves']
  return {path: leaf['fingerprint'] for path, leaf in leaves.items()}


def png_size(path):
  """(width, height) of a picture."""
  head = path.read_bytes()[:24]
  assert head[:8] == b'\x89PNG\r\n\x1a\n'
  return struct.unpack('>II', head[16:])


# A task of lm-eval over a local .jsonl.
LM_EVAL_TASK = """\
task: paraxis_{name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
num_fewshot: 0
{more}"""
