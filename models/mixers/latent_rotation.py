"""A change of basis of latent attention's latents that keeps the model.

    n = (x W_dkv) / rms(x W_dkv),  c = gamma n         (models/mixers/latent.py)
    W_dkv' = W_dkv U,  W_uk' = U^T diag(gamma) W_uk,  W_uv' alike,  gamma' = 1

for any orthogonal U: x W_dkv U and x W_dkv have the same mean square. The basis
matters once decoding shards the latent and each shard has its own softmax
(model.latent.scores=own; TPLA, arXiv:2508.15881, section 3):

    hadamard   H / sqrt(R) with random signs: shards of equal square
    pca        eigenvectors of the latents' covariance on some text, the largest
               first: one shard has nearly all of the variance

`own` normalises a latent shard c_i by alpha_i |c_i|^2 / R instead of |c|^2 / R,
so alpha_i = 1 / f_i, where f_i is the shard's share of the mean square: 1 / G,
or as measured. (The paper prints alpha both as f and as 1 / f; only the second
fits its condition.) Cost: once, on the host, in float64.

Legend: D model, R width of the latent, N heads, H head width, G latent shards,
B rows, S slots.
"""

import jax
import numpy as np

from paraxis.configs.base import errors

PARAMETERS = ('down', 'latent_norm', 'key', 'value')


def hadamard(rank: int, seed=0) -> np.ndarray:
  """(R, R) orthogonal: Sylvester's matrix, its rows with random signs.

  UserError if R is no power of two.
  """
  if rank & (rank - 1):
    raise errors.UserError(
      f'a Hadamard matrix needs a power of two, and model.latent.rank={rank}.'
    )
  h = np.ones((1, 1))
  while len(h) < rank:
    h = np.block([[h, h], [h, -h]])
  signs = np.random.default_rng(seed).choice([-1.0, 1.0], rank)
  return signs[:, None] * h / rank**0.5


def principal(covariance_RR) -> np.ndarray:
  """(R, R): eigenvectors of a covariance in columns, the largest first."""
  _, vectors = np.linalg.eigh(covariance_RR)
  return vectors[:, ::-1]


def shares(covariance_RR, u_RR, groups):
  """(G,): share of each latent shard in the mean square of latents n U."""
  square = np.einsum('rs,rt,ts->s', u_RR, covariance_RR, u_RR)
  return square.reshape(groups, -1).sum(1) / square.sum()


def rotate(values, u_RR):
  """The four PARAMETERS of one layer for latents n U.

  Args:
    values: {name: array}: down (D, R), latent_norm (R,), key (R, N, H), value
      (R, N, V).
    u_RR: orthogonal.

  Returns:
    {name: float64 NumPy array}.
  """
  down, scale, key, value = (
    np.asarray(values[name], np.float64) for name in PARAMETERS
  )
  rotated = lambda w: np.einsum('rs,r,rnh->snh', u_RR, scale, w)
  return dict(
    down=down @ u_RR, latent_norm=np.ones_like(scale), key=rotated(key),
    value=rotated(value),
  )  # fmt: skip


def covariance(slots_BGSE, length_B, scale_R):
  """(R, R): covariance of the latents n of all tokens in a cache.

  Args:
    slots_BGSE: a layer's state, written with model.latent.scores=summed.
    length_B: filled slots of each row.
    scale_R: the layer's latent_norm; n is taken as 0 where it is 0.
  """
  scale = np.asarray(scale_R, np.float64)
  slots_BSGE = np.asarray(slots_BGSE, np.float64).swapaxes(1, 2)
  filled = np.arange(slots_BSGE.shape[1]) < np.asarray(length_B)[:, None]
  slots = slots_BSGE[filled]
  each = len(scale) // slots.shape[1]
  c = slots[:, :, :each].reshape(len(slots), -1)
  n = np.divide(c, scale, out=np.zeros_like(c), where=scale != 0)
  return n.T @ n / len(n)


def rotated(params, config, cache=None):
  """Parameters for decoding with model.latent.rotation and groups.

  Args:
    params: {path: array} as decoder.Decoder.unstack gives them, of a model with
      groups=1 or more.
    config: schema.Model to decode with.
    cache: packed.Cache after a prefill of some text (scores=summed or
      groups=1) with `params`, from which latents are measured; pca needs it.

  Returns:
    {path: array} of the same model, with the same shardings; with scores=own
    also its `shares`.

  Raises:
    UserError: pca without a cache, or with fewer tokens than the width of the
      latent; hadamard with a width that is no power of two.
  """
  own, out = config.latent, dict(params)
  if own.rotation == 'pca' or cache is not None:
    _check_calibration(cache, own.rank)
  suffix = '/latent_attention/down'
  for path in [p for p in params if p.endswith(suffix)]:
    prefix = path.removesuffix('down')
    values = {name: params[prefix + name] for name in PARAMETERS}
    found = None
    if cache is not None:
      slots = cache.states[int(prefix.split('/')[1])][0]
      found = covariance(slots, cache.length, values['latent_norm'])
    u = np.eye(own.rank)
    if own.rotation != 'none':
      pca = own.rotation == 'pca'
      u = principal(found) if pca else hadamard(own.rank)
      for name, value in rotate(values, u).items():
        out[prefix + name] = _like(params[prefix + name], value)
    if own.groups > 1 and own.scores == 'own':
      share = np.full(own.groups, 1 / own.groups)
      if found is not None:
        share = shares(found, u, own.groups)
      out[prefix + 'shares'] = _like(values['latent_norm'], share)
  return out


def _like(old, value):
  """value in the dtype of `old`, and in its sharding if it is a jax.Array."""
  value = np.asarray(value, old.dtype)
  if not isinstance(old, jax.Array):
    return value
  return jax.device_put(value, old.sharding)


def _check_calibration(cache, rank):
  tokens = 0 if cache is None else int(np.asarray(cache.length).sum())
  if tokens < rank:
    raise errors.UserError(
      f'model.latent.rotation measures a covariance of {rank} numbers '
      f'(model.latent.rank) on {tokens} tokens; prefill at least {rank}.'
    )
