"""Synthetic batches, comparison of trees, and references that are shared.

Legend: B rows, T tokens.
"""

import dataclasses
import math

import jax
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.train.certify import trial
from paraxis.train.run import workdir

CONFIG = schema.Config(
  model=schema.Model(
    vocab_size=16, d_model=8, num_layers=1, num_heads=2, d_ff=8,
    attention_block=8,
  ),
  data=schema.Data(sequence_length=16),
  train=schema.Train(batch_size=8),
)  # fmt: skip


def documents(batch, row):
  """[(first slot, tokens)] of a row, read off its segments slot by slot."""
  found = []
  for t, segment in enumerate(batch.segments[row]):
    if segment and (not t or segment != batch.segments[row][t - 1]):
      found.append([t, 0])
    if segment:
      found[-1][1] += 1
  return found


def test_packed_batches():
  made = trial.batches(CONFIG, packed=True)
  assert len(made) == trial.STEPS
  assert not np.array_equal(made[0].tokens, made[1].tokens)
  for batch in made:
    for row in range(6):
      parts = documents(batch, row)
      # The first crosses every border of shards.
      assert parts == [[0, 16]] if row == 0 else 2 <= len(parts) <= 3
      for n, (start, length) in enumerate(parts, 1):
        cut = slice(start, start + length)
        assert (batch.segments[row, cut] == n).all()
        assert list(batch.positions[row, cut]) == list(range(length))
        wanted = batch.tokens[row, start + 1 : start + length]
        assert np.array_equal(batch.targets[row, cut][:-1], wanted)
    assert documents(batch, 6) == [[0, 5]] and not documents(batch, 7)
    assert (batch.segments == 0).sum() > 16 + 11  # not only in the last two
    assert np.array_equal(batch.weights, batch.segments > 0)
    assert batch.denominator == batch.weights.sum()
    assert batch.tokens.min() >= 0 and batch.targets.max() < 16
    assert batch.tokens.dtype == batch.targets.dtype == np.int32
  again = trial.batches(CONFIG, packed=True)
  assert all(map(np.array_equal, made[1], again[1]))


def test_batches_that_are_not_packed():
  batch = trial.batches(CONFIG, packed=False)[0]
  assert (batch.segments == 1).all() and batch.denominator == 8 * 16
  assert (batch.positions == np.arange(16)).all()


def test_one_document_is_changed():
  batch = trial.batches(CONFIG, packed=True)[0]
  before, after, seen = trial.change_one_document(batch, 16)
  for row in range(8):
    for n, (start, length) in enumerate(documents(batch, row), 1):
      changed = after.tokens[row] != before.tokens[row]
      chosen = n == 1 + row % 2
      assert list(np.flatnonzero(changed[start : start + length])) == (
        [0] if chosen else []
      )
      assert after.weights[row, start : start + length].any() != chosen
    padding = batch.segments[row] == 0
    assert (after.tokens[row] != before.tokens[row])[padding].all()
  assert np.array_equal(before.tokens, batch.tokens)
  assert np.array_equal(after.weights, before.weights)
  assert np.array_equal(seen.weights, batch.weights)
  assert np.array_equal(seen.tokens, after.tokens)
  assert after.tokens.max() < 16 and after.denominator == batch.denominator


def test_the_one_device_side_takes_no_shortcut():
  """Whatever the layout or a shortcut decides, it has the plain value."""
  hot = dataclasses.replace(
    CONFIG.model.experts, count=4, hot=2, region='data', hierarchical=True
  )
  solver = dataclasses.replace(CONFIG.model.recurrent, solver='newton')
  model = dataclasses.replace(
    CONFIG.model, experts=hot, recurrent=solver, unroll=2, loss='chunked'
  )
  train = dataclasses.replace(
    CONFIG.train, microbatches=2, remat='full', memory='gate=save',
    batch_ramp='4:4:1', shape_cycle='2:1,1:1',
  )  # fmt: skip
  config = dataclasses.replace(
    CONFIG,
    model=model,
    train=train,
    mesh=schema.Mesh(stage=2, tensor=2, rules='tensor'),
    pipeline=schema.Pipeline('gpipe', 1, 4),
  )
  plain = trial.plain(config)
  changed = {name for name, *_ in workdir.differences(config, plain)}
  assert changed == {
    'mesh.stage', 'mesh.tensor', 'mesh.rules', 'pipeline.schedule',
    'pipeline.microbatches', 'train.microbatches', 'train.remat',
    'train.memory', 'train.batch_ramp', 'train.shape_cycle', 'model.unroll',
    'model.loss',
    'model.experts.hot', 'model.experts.region', 'model.experts.hierarchical',
    'model.recurrent.solver',
  }  # fmt: skip
  assert plain.microbatches == 1 and not plain.model.experts.hot
  assert plain.model.recurrent.solver == 'sequential'


def test_the_worst_leaf():
  wanted = dict(a=np.array([1.0, -4.0]), b=np.array([0.5, 0.25]))
  assert trial.worst(wanted, wanted)[0] == 0
  found = dict(a=np.array([1.0, -4.4]), b=np.array([0.6, 0.25]))
  assert trial.worst(found, wanted) == (pytest.approx(0.2), 'b')
  # b counts as large as half of a: 0.1 / 2.
  assert trial.worst(found, wanted, 0.5) == (pytest.approx(0.1), 'a')


@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_what_is_not_finite_differs(bad):
  wanted = dict(a=np.array([1.0, 2.0]), b=np.array([1.0]))
  found = dict(a=np.array([1.0, bad]), b=np.array([1.0]))
  assert trial.worst(found, wanted) == (math.inf, 'a')
  assert trial.worst(wanted, found)[0] == math.inf


def test_zero_leaves_and_missing_ones():
  zero, wanted = np.zeros(2), dict(a=np.zeros(2))
  assert trial.worst(dict(a=zero), wanted)[0] == 0
  assert trial.worst(dict(a=zero + 1e-30), wanted) == (math.inf, 'a')
  assert trial.worst(dict(a=zero, b=zero), wanted) == (math.inf, 'b')


def test_layouts_share_a_reference():
  device = jax.devices()[0]
  layout = schema.Mesh(data=2, zero=2, collectives='explicit')
  train = dataclasses.replace(
    CONFIG.train, remat='full', memory='residual=offload', microbatches=2
  )
  other = dataclasses.replace(CONFIG, mesh=layout, train=train)
  one = trial.reference(CONFIG, True, device)
  assert trial.reference(other, True, device) is one
  assert trial.reference(CONFIG, False, device) is not one
  muon = dataclasses.replace(CONFIG, optimizer=schema.Optimizer(name='muon'))
  second = trial.reference(muon, True, device)
  assert second.gradients is one.gradients and second is not one
  assert set(one.gradients) == set(one.params)
  for path, gradient in one.gradients.items():
    assert np.abs(gradient).max() > 0, path
    assert np.std(one.params[path]) > 0, path  # ones and zeros hide mistakes
