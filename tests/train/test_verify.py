"""`paraxis verify`: what it certifies, that each property can fail, its errors.

That all layouts hold is tests/train/test_invariance.py.
"""

import dataclasses
import json

import jax
import pytest

from paraxis.configs import errors
from paraxis.configs import schema
from paraxis.models import build
from paraxis.pallas_kernels import attention
from paraxis.sharding import annotate
from paraxis.sharding import store
from paraxis.train import optimizers
from paraxis.train import properties
from paraxis.train import step
from paraxis.train import verify

FULL = schema.Config(
  model=schema.Model(
    vocab_size=1024, d_model=128, num_layers=6, num_heads=4, d_ff=256
  )
)


def certify(*names, mesh='data=2', dtype='float64', **train):
  config = dataclasses.replace(FULL, train=schema.Train(**train))
  return verify.certify(verify.prepare(config, mesh, dtype), names)


def test_everything_is_certified():
  lines = []
  config = dataclasses.replace(
    FULL,
    mesh=schema.Mesh(zero=2),
    optimizer=schema.Optimizer(name='muon'),
    train=schema.Train(microbatches=2, remat='full'),
  )
  code = verify.run(config, 'data=2,context=2,tensor=2', say=lines.append)
  assert code == errors.EXIT_OK, lines
  text = '\n'.join(lines)
  assert lines[0].startswith('data=2,context=2,tensor=2 zero=2: 8 cpu devices')
  assert 'model.d_model 128 -> 32' in text and 'all 13 properties hold' in text
  rows = [line.split() for line in lines if line.startswith('PASS')]
  assert len(rows) == 13
  for words in (
    'loss', 'gradients, every one of', 'one update', 'layout', '0.05 lr',
    'accumulation: 1 microbatches instead of 2', 'remat none', 'remat dots',
    'remat attention', 'remat full with offload', 'packing', 'bitwise',
    'next loss on data=2,fsdp=2,tensor=2',
  ):  # fmt: skip
    assert words in text, words
  assert 'remat full ' not in text.replace('remat full with', '')


def test_json_and_exit_codes(monkeypatch):
  row = properties.Row('loss', 1e-9, 2e-16, True, '')
  lost = properties.Row('gradients', 1e-9, float('inf'), False, 'embedding')
  for rows, code in (([row], 0), ([row, lost], errors.EXIT_DIFFERENT)):

    def certified(subject, report=None, rows=rows):
      del subject
      list(map(report, rows))
      return rows

    monkeypatch.setattr(verify, 'certify', certified)
    lines = []
    assert verify.run(FULL, 'data=64', True, say=lines.append) == code
    (text,) = lines
    found = json.loads(text, parse_constant=pytest.fail)
    assert found['passed'] == (not code) and len(found['rows']) == len(rows)
    assert found['layout'] == 'data=8' and found['devices'] == 8
    assert found['notes'][0].startswith('mesh data=64 -> data=8')
    assert found['config']['model']['d_model'] == 32
    lines.clear()
    assert verify.run(FULL, 'data=8', say=lines.append) == code
  assert found['rows'][1]['measured'] is None
  assert lines[-2].startswith('FAIL  gradients') and 'embedding' in lines[-2]
  assert lines[-1] == '1 of 2 properties DIFFER'


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_narrow_types_have_their_own_bounds(dtype):
  names = ('loss', 'gradients', 'update', 'steps')
  rows = certify(*names, mesh='fsdp=2,tensor=2', dtype=dtype)
  assert len(rows) == (4 if dtype == 'float32' else 3)
  assert all(row.passed for row in rows), rows
  assert rows[1].measured > 1e-9  # it is not float64 by another name
  wide = properties.BOUNDS['float64'][1]
  assert wide < rows[1].bound == properties.BOUNDS[dtype][1] <= 0.1


# ------------------------------------------------ every property can fail


def wrapped(monkeypatch, owner, name, change):
  """owner.name becomes change(owner.name)."""
  monkeypatch.setattr(owner, name, change(getattr(owner, name)))


def test_an_update_that_knows_the_mesh(monkeypatch):
  """1e-7 off: seen from identical gradients, within what own steps may be."""

  def change(right):
    def update(self, *args):
      params, state = right(self, *args)
      off = 1 + 1e-7 * bool(annotate.sizes())
      return {p: x * off for p, x in params.items()}, state

    return update

  wrapped(monkeypatch, optimizers.Optimizer, 'update', change)
  rows = certify('gradients', 'update', 'steps')
  assert [row.passed for row in rows] == [True, False, True], rows


def test_steps_that_go_elsewhere(monkeypatch):
  def change(right):
    def update(self, grads, *args):
      turn = -1 if annotate.sizes() else 1
      return right(self, {p: g * turn for p, g in grads.items()}, *args)

    return update

  wrapped(monkeypatch, optimizers.Optimizer, 'update', change)
  (row,) = certify('steps')
  assert not row.passed


def test_accumulation_that_averages_twice(monkeypatch):
  def change(right):
    def accumulate(model, params, batch, *args):
      loss, grads = right(model, params, batch, *args)
      share = 0.5 if batch.tokens.ndim == 3 else 1.0
      return loss, grads | {'norm/scale': grads['norm/scale'] * share}

    return accumulate

  wrapped(monkeypatch, step, '_accumulate', change)
  rows = certify('gradients', 'accumulation')
  assert [row.passed for row in rows] == [True, False], rows
  assert rows[1].worst == 'norm/scale'


def test_remat_that_forgets(monkeypatch):
  """A policy under which a layer's parameters get no gradient."""

  def change(right):
    def checkpoint(layer, policy=None, **options):
      run = right(layer, policy=policy, **options)
      return lambda x, see, values: run(x, see, jax.lax.stop_gradient(values))

    return checkpoint

  wrapped(monkeypatch, jax, 'checkpoint', change)
  monkeypatch.setattr(properties, 'MEMORY', (('none', ''), ('full', '')))
  rows = certify('gradients', 'remat')
  assert [row.passed for row in rows] == [True, False], rows


def test_documents_that_see_each_other(monkeypatch):
  def change(right):
    def blind(q, k, v, mask, segments, **options):
      segments = [jax.numpy.ones_like(s) for s in segments]
      return right(q, k, v, mask, segments, **options)

    return blind

  wrapped(monkeypatch, attention, 'attention', change)
  (row,) = certify('packing')
  assert not row.passed and row.bound == 0


def test_a_change_that_nothing_shows_proves_nothing(monkeypatch):
  monkeypatch.setattr(
    properties.trial, 'change_one_document', lambda batch, _: (batch,) * 3
  )
  (row,) = certify('packing')
  assert not row.passed and 'nor did' in row.worst


def test_a_restored_bit(monkeypatch):
  def change(right):
    def restore(self, step, like, under=''):
      tree, meta = right(self, step, like, under)
      path = 'params/embedding'
      x = jax.device_get(tree[path]).copy()
      x[0, 0] = jax.numpy.nextafter(x[0, 0], 9.0)
      tree[path] = jax.device_put(x, tree[path].sharding)
      return tree, meta

    return restore

  wrapped(monkeypatch, store.Store, 'restore', change)
  rows = certify('resume')
  assert [row.passed for row in rows] == [False, True], rows
  assert rows[0].worst == 'params/embedding' and rows[0].measured == 1


def test_going_on_elsewhere(monkeypatch):
  def change(right):
    def evaluate(self, *args):
      return right(self, *args) * (1 + 1e-8)

    return evaluate

  wrapped(monkeypatch, properties.trial.Side, 'evaluate', change)
  rows = certify('resume')
  assert [row.passed for row in rows] == [True, False], rows


# ------------------------------------------------------------- bad input


@pytest.mark.parametrize(
  'mesh, dtype, text',
  [
    ('tensor=8', 'float64', 'num_heads=4 .*--config.model.num_heads=8'),
    ('data=64,tensor=3', 'float64', 'num_heads=4 .*num_heads=6'),
    ('data=2,fsdp=2,context=2,tensor=2', 'float64', '16 devices, there are 8'),
    ('data=8', 'float16', "--dtype=float16 .* Did you mean 'bfloat16'"),
    ('date=8', 'float64', "Did you mean 'data'"),
    ('data=0', 'float64', 'must be positive'),
    ('data=3,tensor=-1', 'float64', '3 places for 8 devices'),
    ('stage=2,data=4', 'float64', 'stage=2: the rules'),
  ],
)
def test_what_cannot_be_certified(mesh, dtype, text):
  with pytest.raises(errors.UserError, match=text):
    verify.prepare(FULL, mesh, dtype)


def test_the_rest_of_the_devices():
  subject = verify.prepare(FULL, 'data=2,tensor=-1')
  assert subject.config.mesh.tensor == 4 and len(subject.devices) == 8
  assert len(verify.prepare(FULL, 'data=2').devices) == 2
  built = build.build(FULL, 'data=2', 'none', subject.devices[:2])
  assert built.mesh.size == 2
