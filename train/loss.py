"""Next-token cross-entropy over a vocabulary that may be sharded.

    nll = logsumexp(z) - z[target],   nats = sum(nll * weight) / denominator
    loss = nats + terms of layers (models/aux.py)

The target's logit is picked by comparison, not by a gather, so that logits stay
sharded over the vocabulary (Megatron-LM, arXiv:1909.08053, section 3). The
denominator comes with the batch: it counts the whole step, so that any number
of shards, processes and microbatches gives the same loss and gradient.

Two forms with the same result (model.loss). All logits at once: 6 T V D flops
with the backward pass, and T V numbers, twice. Chunked: 8 T V D flops, never
more than `cross_entropy.LOGITS` logits (Cut Cross-Entropy, arXiv:2411.09009),
but sums of the gradient of features, which every chunk of V reads and writes; a
chunk has 1,024 words or more however large T is (cross_entropy.py, blocks). So
chunks save memory where T V is more than one of them and V is a few times D.

Legend: B rows, T tokens, D model, V vocabulary.
"""

import math

import jax
import jax.numpy as jnp

from paraxis.models import aux as aux_lib
from paraxis.pallas_kernels.matmul import cross_entropy
from paraxis.sharding import annotate
from paraxis.sharding.tensor import vocabulary

# V / D from which on chunks are taken: Llama 2 7B on TPU v5p needs 0.75 GB more
# with them at 2 (tensor=4).
WORDS = 4


def form(config, shape):
  """('logits' or 'chunked', why): what `total` makes of targets of a shape.

  Args:
    config: schema.Model.
    shape: (B, T) of a microbatch, under the rules and the mesh in force.
  """
  tokens = math.prod(shape)
  if annotate.mode() != 'manual':
    tokens //= annotate.shards('batch') * annotate.shards('length')
  words = config.vocab_size // annotate.shards('vocab')
  many = tokens * words > cross_entropy.LOGITS
  narrow = words >= WORDS * config.d_model
  why = (
    f'{tokens:,} tokens x {words:,} words on a device are '
    f'{"more" if many else "no more"} than 2**24 logits; words are '
    f'{"at least" if narrow else "less than"} {WORDS} x '
    f'model.d_model={config.d_model:,}'
  )
  if config.head_bias:
    return 'logits', 'model.head_bias is added to logits'
  if config.loss != 'auto':
    return config.loss, f'model.loss={config.loss}; {why}'
  return ('chunked' if many and narrow else 'logits'), why


def negative_log_likelihood(z_BTV, targets_BT):
  """Nats of each target: (B, T) in z's dtype."""
  axes = annotate.carriers('vocab')
  if axes and annotate.mode() == 'manual':
    return vocabulary.nll(z_BTV, targets_BT, axes)
  hit = jnp.arange(z_BTV.shape[-1]) == targets_BT[..., None]
  picked = jnp.where(hit, z_BTV, 0).sum(-1)
  return jax.nn.logsumexp(z_BTV, -1) - picked


def total(model, params, batch):
  """Sum of nats over the weighted targets of a batch: scalar."""
  return _of_features(model, params, model.features(params, batch)[0], batch)


def _of_features(model, params, x_BTD, batch):
  with jax.named_scope('loss'):
    if form(model.config, batch.targets.shape)[0] == 'chunked':
      nll = model.nll(params, x_BTD, batch.targets)
    else:
      nll = negative_log_likelihood(model.logits(params, x_BTD), batch.targets)
    return (nll * batch.weights).sum()


def of_layers(model, params, x_BTD, batch):
  """`total` of what the last layer gives, before the norm."""
  x_BTD = model.normalise(params, model.own_rows(x_BTD, batch))
  return _of_features(model, params, x_BTD, batch)


def objective(model, params, batch, others=None):
  """The loss, as it is minimised: (its value, (nats, aux.Aux)).

  Nats per target of the whole step (this batch's share of them), and terms of
  layers: scalars. In a manual region: of this shard's tokens.

  Args:
    params: {path: array}. others: those that `params` lacks, or None.
  """
  params = params if others is None else others | params
  x_BTD, aux = model.features(params, batch)
  nats = _of_features(model, params, x_BTD, batch) / batch.denominator
  return nats + aux_lib.total(aux, nats.dtype), (nats, aux)


def next_token(model, params, batch):
  """The loss of a batch (B, T), terms of layers included: scalar."""
  return objective(model, params, batch)[0]
