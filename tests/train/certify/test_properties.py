"""Every property of `paraxis verify` can fail: each mechanism, broken once.

That they hold is tests/train/certify/test_verify.py and
tests/train/certify/test_invariance.py.
"""

import dataclasses
import inspect

import jax

from paraxis.configs import schema
from paraxis.configs.base import model as model_schema
from paraxis.pallas_kernels.attention import op as attention
from paraxis.sharding import annotate
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.checkpoint import store
from paraxis.sharding.experts import dispatch
from paraxis.train import loss
from paraxis.train.certify import certification
from paraxis.train.certify import properties
from paraxis.train.certify import trial
from paraxis.train.data import batches as data
from paraxis.train.steps import gradients
from paraxis.train.updates import optimizers

CONFIG = schema.Config(
  mesh=schema.Mesh(data=2),
  model=schema.Model(
    vocab_size=64, d_model=32, num_layers=1, num_heads=4, d_ff=32,
    attention_block=16, dtype='float64', param_dtype='float64',
  ),
  data=schema.Data(sequence_length=32),
  train=schema.Train(batch_size=8),
)  # fmt: skip


def certify(*names, zero=0, model=(), mesh=(), **train):
  """Verdicts on CONFIG with other fields, on two devices."""
  config = dataclasses.replace(
    CONFIG,
    mesh=dataclasses.replace(CONFIG.mesh, zero=zero, **dict(mesh)),
    model=dataclasses.replace(CONFIG.model, **dict(model)),
    train=dataclasses.replace(CONFIG.train, **train),
  )
  with jax.enable_x64(True):
    runner = trial.Runner(config, jax.devices()[:2])
    run = certification.Certification(runner, True)
    return [row for n in names for row in properties.PROPERTIES[n](run)]


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
    def accumulate(one, batch, zeros):
      nats, aux, grads = right(one, batch, zeros)
      return nats, aux, grads | {'norm/scale': grads['norm/scale'] * 0.5}

    return accumulate

  wrapped(monkeypatch, gradients, '_sum_of_microbatches', change)
  rows = certify('gradients', 'accumulation')
  assert [row.passed for row in rows] == [True, False], rows
  assert rows[1].worst == 'norm/scale'


def test_remat_that_forgets(monkeypatch):
  """A policy under which a layer's parameters get no gradient."""

  def change(right):
    def checkpoint(layer, policy=None, **options):
      run = right(layer, policy=policy, **options)
      forgets = lambda x, see, values: run(
        x, see, jax.lax.stop_gradient(values)
      )
      # An mlp's own, of its products, keeps what it has.
      return lambda *given: (forgets if len(given) == 3 else run)(*given)

    return checkpoint

  wrapped(monkeypatch, jax, 'checkpoint', change)
  monkeypatch.setattr(properties, 'MEMORY', (('none', ''), ('full', '')))
  rows = certify('gradients', 'remat')
  assert [row.passed for row in rows] == [True, False], rows


def test_documents_that_see_each_other(monkeypatch):
  def change(right):
    def blind(q, k, v, mask, segments, *more, **options):
      segments = [jax.numpy.ones_like(s) for s in segments]
      return right(q, k, v, mask, segments, *more, **options)

    return blind

  wrapped(monkeypatch, attention, 'attention', change)
  (row,) = certify('packing')
  assert not row.passed and row.bound == 0


def test_a_change_that_nothing_shows_proves_nothing(monkeypatch):
  monkeypatch.setattr(
    trial, 'change_one_document', lambda batch, _: (batch,) * 3
  )
  (row,) = certify('packing')
  assert not row.passed and 'nor did' in row.worst


def test_evaluation_of_other_text(monkeypatch):
  """Counted in rows of a microbatch, as it was, it is less text."""
  how = dict(microbatches=2, eval_batches=1)
  rows = certify('evaluate', **how)
  assert [row.passed for row in rows] == [True, True], rows

  def change(right):
    def make(self, corpus, domain, config):
      right(self, corpus, domain, config)
      self._rows = self._rows[:: config.microbatches]

    return make

  wrapped(monkeypatch, data.HeldOut, '__init__', change)
  rows = certify('evaluate', **how)
  assert [row.passed for row in rows] == [False, False], rows
  assert rows[0].measured >= 4


def test_nats_of_another_denominator(monkeypatch):
  def change(right):
    return lambda *args: right(*args) * (1 + 1e-8 * bool(annotate.sizes()))

  wrapped(monkeypatch, loss, 'total', change)
  rows = certify('loss', 'evaluate')
  assert [row.passed for row in rows] == [True, True, False], rows


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


def test_a_resumed_run_on_another_mesh(monkeypatch):
  def change(right):
    def evaluate(self, *args):
      return right(self, *args) * (1 + 1e-8)

    return evaluate

  wrapped(monkeypatch, trial.Runner, 'evaluate', change)
  rows = certify('resume')
  assert [row.passed for row in rows] == [True, False], rows


def test_a_resumed_run_of_experts_whose_balance_counts():
  experts = model_schema.Experts(count=4, d_ff=8, balance=0.1)
  rows = certify('resume', model=dict(experts=experts))
  assert [row.passed for row in rows] == [True, True], rows


def test_hot_experts_that_are_served_twice(monkeypatch):
  """By the device of a token, and by their owners: one device has none."""
  experts = model_schema.Experts(count=4, d_ff=8, hot=2, region='data')
  own = dict(model=dict(experts=experts))
  text = inspect.getsource(dispatch.dispatch)
  assert text.count('keep_NK & ~stays') == 1
  space = dict(vars(dispatch))
  exec(text.replace('keep_NK & ~stays', 'keep_NK'), space)  # noqa: S102
  monkeypatch.setattr(dispatch, 'dispatch', space['dispatch'])
  (row,) = certify('gradients', **own)
  assert not row.passed and row.measured > 1e-3, row


def test_kv_heads_that_every_device_holds(monkeypatch):
  """Right numbers by a rule of our own that is wrong: two shards of two."""
  own = dict(
    mesh=dict(data=1, tensor=2), model=dict(num_heads=4, num_kv_heads=2)
  )

  def change(right):
    def of(*args):
      rules = right(*args)
      return dataclasses.replace(rules, table=rules.table | {'kv_heads': ()})

    return of

  wrapped(monkeypatch, rules_lib, 'of', change)
  rows = certify('gradients', 'layout', **own)
  assert [row.passed for row in rows] == [True, False], rows
  assert 'attention/key' in rows[1].worst


def test_a_layout_that_is_not_the_declared_one(monkeypatch):
  """Replicated gradients are right numbers in the wrong place."""
  (row,) = certify('layout', zero=2)
  assert row.passed, row
  wrapped(monkeypatch, annotate, 'stored', lambda right: lambda x, *_: x)
  rows = certify('gradients', 'layout', zero=2)
  assert [row.passed for row in rows] == [True, False], rows
