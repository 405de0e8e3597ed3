"""Frames in front of a decoder, and tokens made of them in one pass.

A frame is a vector of model.features numbers, of a sound or an image, at a
place of a row: its projection is added to the embedding of the token there.

Continuous integrate-and-fire (CIF; arXiv:1905.11235, and Paraformer,
arXiv:2206.08317, section 2.2) makes token embeddings of S encoded frames. Each
frame has a weight alpha in (0, 1); a token is fired whenever they have summed
to 1, and the frame in which that happens is split between two tokens. With
c_t = alpha_1 + .. + alpha_t frame t has, in token n = 0, 1, ..,

    w[t, n] = max(0, min(c_t, n + 1) - max(c_{t-1}, n)),    E = w^T h

One product of S N D in place of a loop over frames; N is static. Rows are
batched; the frames of a row are whole on every device.

Legend: B rows, T places of a row, C numbers of a frame, S frames, N tokens at
most, D model.
"""

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import parameter
from paraxis.sharding import annotate
from paraxis.sharding.tensor import project

FRAMES = ('batch', 'length', None)
TAIL = 0.45  # that a last token may lack, of FunASR's code (tail_threshold)


def added(x_BTD, names, ends, batch):
  """x_BTD and the projection of a batch's frames, laid out by `names`.

  Args:
    x_BTD: embeddings. ends: layer.Ends. batch: models.batch.Batch.

  Raises:
    UserError: the model reads frames and the batch has none, or other ones.
  """
  given, want = batch.features, ends.config.features
  found = 0 if given is None else given.shape[-1]
  if found != want:
    raise errors.UserError(
      f'model.features={want}, and the batch has frames of {found} numbers: '
      'only a model with model.features reads frames, and it reads them always.'
    )
  if given is None:
    return x_BTD
  if given.shape[:-1] != batch.tokens.shape:
    raise errors.UserError(
      f'Batch.features is {given.shape}, and rows are {batch.tokens.shape}: '
      'each place of a row has a frame, of zeros where there is none.'
    )
  fine = (*names[:2], None)
  with jax.named_scope('frames'):
    frames = annotate.part(given.astype(x_BTD.dtype), FRAMES, fine)
    w, w_names = parameter.operand(ends.frames)
    return x_BTD + project.einsum(
      'BTC,CD->BTD', frames, fine, w, w_names, names
    )


def initial(key, width):
  """{name: array} of what `weights` reads, for frames of `width` numbers."""
  one, two = jax.random.split(key)
  return dict(
    taps=jax.random.normal(one, (3, width, width)) * (3 * width) ** -0.5,
    taps_bias=jnp.zeros(width),
    out=jax.random.normal(two, (width,)) * width**-0.5,
    out_bias=jnp.zeros(()),
  )


def weights(own, h_BSD):
  """alpha (B, S) in (0, 1) = sigmoid(w relu(conv(h) + h) + b), three taps.

  Args:
    own: {name: array} as of `initial`. h_BSD: encoded frames.
  """
  length, padded = h_BSD.shape[1], jnp.pad(h_BSD, ((0, 0), (1, 1), (0, 0)))
  taps = [
    jnp.einsum('BSD,DE->BSE', padded[:, i : i + length], own['taps'][i])
    for i in range(3)
  ]
  x = jax.nn.relu(sum(taps) + own['taps_bias'] + h_BSD)
  return jax.nn.sigmoid(x @ own['out'] + own['out_bias'])


def scaled(alpha_BS, count_B):
  """alpha that sums to the known number of tokens of each row (training)."""
  total = alpha_BS.sum(1, keepdims=True)
  return alpha_BS * count_B[:, None].astype(alpha_BS.dtype) / total


def counted(alpha_BS):
  """(B,) int32: tokens that are fired; a last one may lack `TAIL`."""
  return jnp.floor(alpha_BS.sum(1) + TAIL).astype(jnp.int32)


def split(alpha_BS, tokens):
  """w (B, S, N): how much of each frame is each of N=`tokens` tokens."""
  c_BS1 = jnp.cumsum(alpha_BS, 1)[..., None]
  n = jnp.arange(tokens, dtype=alpha_BS.dtype)
  first = jnp.maximum(c_BS1 - alpha_BS[..., None], n)
  return jnp.maximum(jnp.minimum(c_BS1, n + 1) - first, 0)


def fired(h_BSD, alpha_BS, count_B, tokens):
  """E (B, N, D): embeddings of N=`tokens` tokens, 0 from count_B on.

  Args:
    h_BSD: encoded frames. alpha_BS: `scaled` in training, else of `weights`.
    count_B: int32, tokens of each row: known, or `counted`.

  Raises:
    UserError: the frames of a row are on several devices.
  """
  if annotate.sizes() and annotate.shards('length') > 1:
    raise errors.UserError(
      'Integrate-and-fire sums the weights of a whole row, and here its length '
      f'is on {annotate.shards("length")} devices: take mesh.context=1.'
    )
  there = jnp.arange(tokens) < count_B[:, None]
  w_BSN = jnp.where(there[:, None], split(alpha_BS, tokens), 0)
  return jnp.einsum('BSN,BSD->BND', w_BSN, h_BSD)


def quantity(alpha_BS, count_B):
  """() mean |tokens - sum of alpha|, before `scaled`: the quantity loss."""
  return abs(alpha_BS.sum(1) - count_B.astype(alpha_BS.dtype)).mean()


def glanced(E_BND, target_BND, wrong_BN, there_BN, ratio, key):
  """E with embeddings of targets at random places (Paraformer, section 2.3).

  As many as `ratio` of a row's wrong tokens, rounded down, of all its tokens.

  Args:
    wrong_BN, there_BN: bool; a first pass was wrong there; the row's tokens.
  """
  many = jnp.floor(ratio * (wrong_BN & there_BN).sum(1, keepdims=True))
  order = jax.random.uniform(key, there_BN.shape) + jnp.where(there_BN, 0, 2)
  rank = order.argsort(1).argsort(1)
  shown = there_BN & (rank < many)
  return jnp.where(shown[..., None], target_BND, E_BND)
