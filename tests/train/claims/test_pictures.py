"""Families on small pictures: what is learned, and what a claim says of it."""

import types

import claim_cases
import numpy as np

from paraxis.train.claims import families
from paraxis.train.claims import on_frames
from paraxis.train.claims import pictures

FAMILIES = {
  'deep': {'model.wiring': 'standard', 'model.groups': 0},
  'shallow': {'model.groups': 1},
}
SHORT = {
  'model.num_layers': 1, 'model.d_model': 16, 'train.steps': 4,
  'train.batch_size': 8, 'optimizer.warmup_steps': 1,
}  # fmt: skip


def test_a_claim_on_pictures_can_fail(tmp_path):
  """One layer is its own group: both learn the same to the bit."""
  run = claim_cases.run_of('shallow', {}, tmp_path)
  given = dict(families=FAMILIES, fields=SHORT, seeds=[0], rows=64)
  found = pictures.learn(run, within=[['shallow', 'deep', 0.01]], **given)
  assert found.passed and found.measured.startswith('0.0100'), found
  wrong = pictures.learn(run, within=[['shallow', 'deep', -0.01]], **given)
  assert not wrong.passed
  # A claim about the same families on text has trainings of the same names.
  text = dict(families=FAMILIES, fields=SHORT, seeds=[0], better=[])
  assert families.learn(run, **text).measured


def test_bits_of_masks_are_named_a_bound(tmp_path, monkeypatch):
  run = claim_cases.run_of('llada', {}, tmp_path)
  left = {
    'model.visibility': 'causal', 'model.mask_id': -1,
    'train.objective': 'next_token',
  }  # fmt: skip
  made = lambda run, configs, seeds: ({'m': [3.0] * 3, 'l': [4.0] * 3}, 1.0)
  monkeypatch.setattr(families, 'train', made)
  given = dict(families={'m': {}, 'l': left}, fields={}, seeds=[0, 1, 2])
  found = families.learn(run, better=[['m', 'l', 0.0]], **given)
  assert 'm (upper bound) below l' in found.expected, found
  assert 'bits per byte: m (upper bound) 3.0000' in found.caveat
  near = families.near(run, within=[['m', 'l', 0.0]], **given)
  assert 'm (upper bound) above l, as a share' in near.expected and near.passed


def test_a_picture_of_masks_names_a_bound(tmp_path, monkeypatch):
  run = claim_cases.run_of('llada', {}, tmp_path)
  one = types.SimpleNamespace(
    config=run.config, folder=tmp_path,
    record=dict(numbers=dict(bits_per_byte=3.0), cpu_seconds=1.0),
  )  # fmt: skip
  monkeypatch.setattr(families.metrics, 'read', lambda folder: {})
  seen = []
  monkeypatch.setattr(families, '_draw', lambda *given: seen.append(given[:2]))
  found, _ = families.drawn(run, {'m': [one]}, tmp_path / 'x.png')
  name = 'm (upper bound)'
  assert found == {'m': [3.0]} and seen == [({name: [3.0]}, {name: {}})]


def test_a_picture_is_one_digit():
  task = on_frames.Digits(least=1, most=1)
  frames, ids, count = on_frames.draw(task, 64, [1, 2])
  assert frames.shape == (64, 8, 7) and ids.shape == (64, 1)
  digits = np.unique(ids) - on_frames.FIRST
  np.testing.assert_array_equal(digits, np.arange(10))
  assert (count == 1).all()
