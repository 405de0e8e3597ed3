"""Next-token cross-entropy over a vocabulary that may be sharded.

    nll = logsumexp(z) - z[target],   loss = sum(nll * weight) / denominator

The target's logit is picked by comparison, not by a gather, so that logits stay
sharded over the vocabulary (Megatron-LM, arXiv:1909.08053, section 3). The
denominator comes with the batch: it counts the whole step, so that any number
of shards, processes and microbatches gives the same loss and gradient.
"""

import jax
import jax.numpy as jnp

from paraxis.sharding import annotate
from paraxis.sharding import vocabulary


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
  return _of_features(model, params, model(params, batch)[0], batch)


def _of_features(model, params, x_BTD, batch):
  nll = negative_log_likelihood(model.logits(params, x_BTD), batch.targets)
  return (nll * batch.weights).sum()


def of_layers(model, params, x_BTD, batch):
  """`total` of what the last layer gives, before the norm."""
  return _of_features(model, params, model.normalise(params, x_BTD), batch)


def next_token(model, params, batch):
  """Nats per target of the whole step (this batch's share of it): scalar."""
  return total(model, params, batch) / batch.denominator
