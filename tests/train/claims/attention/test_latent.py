"""Checks of sharded latents hold, and fail where what they check is broken."""

import types

import claim_cases
import numpy as np

from paraxis.models.mixers import latent_rotation
from paraxis.train.claims import ablation
from paraxis.train.claims.attention import latent as claims_latent


def test_rotated_and_sharded_is_exact_until_a_matrix_is_not():
  wrong = lambda rank: np.eye(rank) + 1e-3
  claim_cases.holds_until(
    latent_rotation, 'hadamard', wrong, claims_latent.decoding_is_exact,
    cases=[dict(rotation='hadamard', groups=2)], length=9, within=1e-11,
  )  # fmt: skip


def test_numbers_of_a_cache_are_counted():
  model = dict(
    d_model=16, num_heads=4, num_layers=1,
    latent=dict(rank=16, rope_dim=4, nope_dim=4, value_dim=4),
  )  # fmt: skip
  check = lambda numbers: claims_latent.cache_bytes(
    None, model=model, parts=[1, 4], numbers=numbers
  )
  found = check([20, 8])
  assert found.passed and '20 numbers' in found.caveat
  assert not check([20, 9]).passed
  with claims_latent.whole_latents():
    assert check([20, 8]).measured == '20 32'  # 4 keys, on every device


def test_bits_of_parts_are_reported(monkeypatch):
  bits = {'exact': [2.0, 2.1], 'pca': [2.05, 2.15], 'identity': [2.3, 2.2]}
  monkeypatch.setattr(claims_latent, '_bits_of_variants', lambda *_: (bits, 6))
  training = types.SimpleNamespace(record=dict(cpu_seconds=1))
  monkeypatch.setattr(
    ablation, 'trained', lambda *given: {'whole': [training] * 3}
  )
  run, ask = claim_cases.run_of(), claims_latent.parts_of_their_own
  check = lambda at_most=0.1, order=('exact', 'pca', 'identity'): ask(
    run, seeds=[0] * 3, rows=2, prompt=8, order=order, at_most=at_most,
    variants={},
  )  # fmt: skip
  found = check()
  assert found.passed and found.verdict == 'reproduced'
  assert 'exact 2.0000 (2.0000 to 2.0000); pca 2.0500' in found.caveat
  assert 'After an exact prefill of 8, the rest: exact 2.1000' in found.caveat
  assert not check(at_most=0.04).passed
  assert not check(order=('exact', 'identity', 'pca')).passed
  bits['pca'] = bits['identity']  # as if there were no rotation
  assert not check(at_most=1).passed


def test_a_softmax_each_is_not_exact():
  ask = lambda **own: claims_latent.decoding_is_exact(
    None, cases=[dict(groups=2, **own)], length=9, within=1e-11
  )
  assert ask().passed and not ask(scores='own').passed
