"""Checks of sharded latents hold, and fail where what they check is broken."""

import dataclasses

import jax
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models import decoder
from paraxis.models.mixers import latent as latent_attention
from paraxis.models.mixers import latent_rotation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims.attention import latent as claims_latent


@pytest.fixture
def run(tmp_path):
  return claims.Run(schema.Config(), tmp_path)


def exact(run, **case):
  return claims_latent.decoding_is_exact(
    run, cases=[case], length=9, within=1e-11
  )


def test_rotated_and_sharded_is_exact_until_a_matrix_is_not(run, monkeypatch):
  assert exact(run, rotation='hadamard', groups=2).passed
  wrong = lambda rank: np.eye(rank) + 1e-3
  monkeypatch.setattr(latent_rotation, 'hadamard', wrong)
  assert not exact(run, rotation='hadamard', groups=2).passed


def test_numbers_of_a_cache_are_counted(run, monkeypatch):
  model = dict(
    d_model=16, num_heads=4, num_layers=1,
    latent=dict(rank=16, rope_dim=4, nope_dim=4, value_dim=4),
  )  # fmt: skip
  check = lambda numbers: claims_latent.cache_bytes(
    run, model=model, parts=[1, 4], numbers=numbers
  )
  found = check([20, 8])
  assert found.passed and '20 numbers' in found.caveat
  assert not check([20, 9]).passed
  whole = lambda self: ('batch', None, None, None)
  monkeypatch.setattr(latent_attention.LatentAttention, '_parts', whole)
  assert check([20, 8]).measured == '20 32'  # 4 keys, on every device


class Trained:
  """In the place of a training: a model of random weights."""

  def __init__(self, config):
    model = schema.Model(
      vocab_size=264, d_model=16, num_layers=1, num_heads=2, d_ff=16,
      pattern='A', init_std=0.3,
      latent=mixer_schema.Latent(rank=8, nope_dim=4, rope_dim=4, value_dim=4),
    )  # fmt: skip
    data = dataclasses.replace(config.data, sequence_length=16)
    self.config = dataclasses.replace(
      config, model=model, data=data, mesh=schema.Mesh()
    )
    self.model = decoder.Decoder(model)

  def __call__(self, run, name, config):
    return 8.0, self, self.model.init(jax.random.key(0))


def test_bits_of_parts_are_reported(run, tiny, monkeypatch):
  trained = Trained(tiny.config())
  monkeypatch.setattr(experiment, 'train', trained)
  run.config = trained.config
  check = lambda order: claims_latent.parts_of_their_own(
    run, rows=2, prompt=8, order=order, at_most=1,
    variants={'pca': dict(rotation='pca', groups=2, measured=True)},
  )  # fmt: skip
  found = check(['exact', 'pca'])
  bits = list(map(float, found.measured.split()))
  assert 4 < min(bits) and max(bits) < 12 and bits[0] != bits[1]
  turned = check(['pca', 'exact'])
  assert found.passed != turned.passed and 'After an exact' in found.caveat
