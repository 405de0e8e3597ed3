"""Families on small pictures: what is learned, and what a claim says of it."""

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


def test_a_picture_is_one_digit():
  task = on_frames.Digits(least=1, most=1)
  frames, ids, count = on_frames.draw(task, 64, [1, 2])
  assert frames.shape == (64, 8, 7) and ids.shape == (64, 1)
  digits = np.unique(ids) - on_frames.FIRST
  np.testing.assert_array_equal(digits, np.arange(10))
  assert (count == 1).all()
