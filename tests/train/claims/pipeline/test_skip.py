"""Claims about skipped stages hold, fail when broken, and train models."""

import contextlib
import dataclasses
import types

import claim_cases
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.train.claims import ablation
from paraxis.train.claims.pipeline import skip as claims_skip

TRAINING = dict(
  stages=2, seeds=[0, 1], fractions=[0, 0.5], removed=[0, 0.5], paths=2
)


def run(folder='nowhere', **fields):
  """claims.Run of the config, shrunk."""
  own = {f'model.{name}': value for name, value in fields.items()}
  sizes = {'model.num_layers': 4, 'pipeline.microbatches': 4}
  return claim_cases.run_of('skippipe', sizes | own, folder)


def test_layers_of_paths():
  rows = claims_skip.layers_of([(0, 2), (0, 1)], 3, 6)
  assert rows.tolist() == [[0, 1, 4, 5], [0, 1, 2, 3]]
  with pytest.raises(errors.UserError, match='=8 is not a multiple of 3'):
    claims_skip.layers_of([(0,)], 3, 8)


def test_a_pipeline_equals_layers_on_paths(monkeypatch):
  check = lambda fractions: claims_skip.equals_pipeline(
    run(), mesh='stage=4', fractions=fractions, within=1e-9
  )
  right = check([0, 0.5])
  assert right.passed and 'left out equal to 1F1B bit for bit' in right.caveat
  assert 0 < float(right.measured) < 1e-12
  drawn = claims_skip.training_paths
  turned = lambda config, stages: drawn(config, stages)[::-1]
  monkeypatch.setattr(claims_skip, 'training_paths', turned)
  wrong = check([0.5])  # the right paths, of the wrong microbatches
  assert not wrong.passed and float(wrong.measured) > 1e-3


def test_paths_are_balanced(monkeypatch):
  check = lambda: claims_skip.balanced(
    run(), stages=8, microbatches=8, fractions=[0.25, 0.5]
  )
  assert check().passed and '50% 8 ' in check().caveat
  make = claims_skip.schedules.make
  late = lambda *args, **options: dataclasses.replace(
    make(*args, **options), paths=((0, 1, 2, 3, 4, 5),) * 8
  )
  monkeypatch.setattr(claims_skip.schedules, 'make', late)
  assert not check().passed


def test_ratios(monkeypatch):
  found = {
    0: {0: [80.0] * 3, 0.5: [160.0, 150.0, 170.0]},
    0.5: {0: [100.0] * 3, 0.5: [110.0, 109.0, 111.0]},
  }
  monkeypatch.setattr(claims_skip, '_perplexities', lambda *a, **k: (found, 9))
  ask = dict(training=TRAINING, share=0.5)
  robust = lambda trained, at_most: claims_skip.robust(
    run(), trained=trained, at_most=at_most, **ask
  )
  right, far = robust(0.5, 1.4), robust(0.5, 1.2)
  assert right.verdict == 'reproduced' and right.seeds == 3
  assert '1.375 1.363 1.387' in right.caveat  # over 80, not over its own 100
  assert far.passed and far.verdict == 'direction only'
  plain = robust(0, 9.9)
  assert not plain.passed
  assert 'trained with 0% left out, without 50% 160.0' in plain.caveat
  full = lambda: claims_skip.against_full(run(), trained=0.5, **ask)
  assert full().verdict == 'reproduced'  # 0.689 +-0.021
  found[0.5][0.5] = [150.0, 150.0, 168.0]  # 0.975 +-0.019
  assert full().verdict == 'not reproduced'
  found[0.5][0.5] = [190.0, 180.0, 200.0]
  assert full().verdict == 'opposite'


def test_models_are_evaluated_without_stages_and_drawn(tmp_path, monkeypatch):
  """Two models, each with all stages and with half of them."""
  names = {f'skip_{share}-{seed}': 2.0 for share in (0, 50) for seed in (0, 1)}
  seen = claim_cases.trains_to(monkeypatch, names)
  monkeypatch.setattr(ablation.Training, 'opened', property(lambda t: (0, t)))
  skipped = lambda t: 10 * t.config.pipeline.skip_fraction
  left = lambda job, t, layers: 100 + skipped(t) + layers.size
  monkeypatch.setattr(claims_skip, 'perplexity', left)
  asked = run(tmp_path)
  found = claims_skip.robust(
    asked, training=TRAINING, trained=0.5, share=0.5, at_most=1.1
  )
  # 109 of two paths of two layers over 104; the plain one has 104 without.
  assert not found.passed
  assert (
    'ratios 1.048 1.048' in found.caveat and 'without 0% 109' in found.caveat
  )
  assert {(c.pipeline.skip_fraction, c.train.seed) for c in seen} == {
    (0.0, 0), (0.0, 1), (0.5, 0), (0.5, 1)
  }  # fmt: skip
  assert all(c.mesh.stage == 1 for c in seen)
  assert (tmp_path / claims_skip.PICTURE).exists()


def test_perplexity_is_a_mean_over_paths_and_text(monkeypatch):
  class Held(list):
    n_pairs = 4
    batch_at = list.__getitem__

  job = types.SimpleNamespace(
    model=None, held_out=[Held([1.0, 2.0]), Held([3.0])],
    put=jnp.float32, context=contextlib.nullcontext,
  )  # fmt: skip
  nats = lambda model, params, batch, row: params * batch * row.sum()
  monkeypatch.setattr(claims_skip, 'nats', nats)
  found = claims_skip.perplexity(job, 0.5, [[0, 1], [1, 2]])  # mean of 1 and 3
  assert found == pytest.approx(np.exp(0.5 * 2 * (1 + 2 + 3) / 8))
