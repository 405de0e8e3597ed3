"""A change of basis of the latents: the same model, and better shards.

Legend: B rows, T tokens, D model, R width of the latent, G latent shards.
"""

import functools

import module_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models import decoder
from paraxis.models.mixers import latent_rotation

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, R, V = 4, 24, 16, 16, 32


def model_of(**own):
  own = dict(rank=R, nope_dim=6, rope_dim=4, value_dim=6) | own
  return decoder.Decoder(schema.Model(
    vocab_size=V, d_model=D, num_heads=4, d_ff=16, num_layers=2, pattern='A',
    mlp='none', dtype='float64', param_dtype='float64', attention_block=8,
    latent=mixer_schema.Latent(**own),
  ))  # fmt: skip


@functools.cache
def params():
  """Latents of a few directions in any basis; gamma is not 1."""
  model, rng = model_of(), np.random.default_rng(0)
  out = module_cases.parameters(model, 0.4)
  basis, _ = np.linalg.qr(rng.normal(size=(2, R, R)))
  out['layers/latent_attention/down'] = (
    rng.normal(size=(2, D, R)) * 0.6 ** np.arange(R) @ basis
  )
  out['layers/latent_attention/latent_norm'] = 1 + rng.uniform(
    -0.3, 0.3, (2, R)
  )
  return model.unstack(out)


def tokens(seed=1):
  return np.random.default_rng(seed).integers(0, V, (B, T)).astype(np.int32)


def prefill(model, values, ids):
  """(logits of the last token, the cache)."""
  (z,), cache = module_cases.decoded(model, values, ids, [T] * B, 0)
  return z[:, -1], cache


def last(model, values):
  """Logits of the last token, decoded after all others."""
  return module_cases.decoded(model, values, tokens(), [T - 1] * B, 1)[0][1]


@functools.cache
def exact():
  return prefill(model_of(), params(), tokens())[0]


@functools.cache
def calibration():
  return prefill(model_of(), params(), tokens(2))[1]


def distance(a, b):
  return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize('rotation, groups', [('hadamard', 2), ('pca', 1)])
def test_a_rotation_changes_no_number(rotation, groups):
  model = model_of(rotation=rotation, groups=groups)
  new = latent_rotation.rotated(params(), model.config, calibration())
  assert distance(last(model, new), exact()) < 1e-12
  changed = {p for p in new if not np.array_equal(new[p], params()[p])}
  names = latent_rotation.PARAMETERS
  assert changed == {
    f'layers/{i}/latent_attention/{name}' for i in range(2) for name in names
  }
  wrong = dict(new)
  wrong['layers/0/latent_attention/key'] = params()[
    'layers/0/latent_attention/key'
  ]
  assert distance(last(model, wrong), exact()) > 1e-3


def test_principal_shards_err_least():
  """Each latent shard has its own softmax: TPLA's comparison."""
  error = {}
  for rotation in ('none', 'hadamard', 'pca'):
    model = model_of(rotation=rotation, groups=2, scores='own')
    new = latent_rotation.rotated(params(), model.config, calibration())
    error[rotation] = distance(last(model, new), exact())
  assert 1e-6 < error['pca'] < 0.5 * min(error['none'], error['hadamard'])


def test_shares_undo_the_norm_of_each_shard():
  """Without them the smaller shard is as large as the other one."""
  model = model_of(rotation='pca', groups=2, scores='own')
  new = latent_rotation.rotated(params(), model.config, calibration())
  names = [f'layers/{i}/latent_attention/shares' for i in range(2)]
  for name in names:
    np.testing.assert_allclose(new[name].sum(), 1)
    assert new[name][0] > 4 * new[name][1]
  alike = new | {name: np.array([0.5, 0.5]) for name in names}
  assert distance(last(model, alike), exact()) > 1.5 * distance(
    last(model, new), exact()
  )
  # Prefill does not read them.
  assert distance(prefill(model, alike, tokens())[0], exact()) < 1e-12


def test_the_covariance_is_that_of_latents():
  value = lambda name: params()[f'layers/0/latent_attention/{name}']
  x = params()['embedding'][tokens(2)]
  epsilon = model_of().config.norm_epsilon
  rms = lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
  x = rms(x) * params()['layers/0/latent_attention_norm/scale']
  n = rms(x @ value('down')).reshape(-1, R)
  for groups in (1, 4):
    _, cache = prefill(model_of(groups=groups), params(), tokens(2))
    found = latent_rotation.covariance(
      cache.states[0][0], cache.length, value('latent_norm')
    )
    np.testing.assert_allclose(found, n.T @ n / len(n), atol=1e-12)


def test_orthogonal_matrices():
  for u in (
    latent_rotation.hadamard(16, 3),
    latent_rotation.principal(np.diag([1.0, 3, 2, 0])),
  ):
    np.testing.assert_allclose(u.T @ u, np.eye(len(u)), atol=1e-15)
  covariance = np.diag([1.0, 3, 2, 0])
  u = latent_rotation.principal(covariance)
  np.testing.assert_allclose(
    latent_rotation.shares(covariance, u, 2), [5 / 6, 1 / 6]
  )
  np.testing.assert_allclose(abs(latent_rotation.hadamard(16)), 0.25)


def test_what_cannot_be_rotated():
  with pytest.raises(errors.UserError, match='model.latent.rank=12'):
    latent_rotation.hadamard(12)
  model = model_of(rotation='pca')
  with pytest.raises(errors.UserError, match='of 16 numbers .* on 0 tokens'):
    latent_rotation.rotated(params(), model.config)
  assert latent_rotation.rotated(params(), model_of().config) == params()
