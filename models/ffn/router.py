"""The router of experts: its choice for each token, loss terms and counts.

    s = softmax(x W) or sigmoid(x W)       ids = top_k(s + bias) of top groups
    mix = scale s[ids] / sum s[ids]

The bias moves a choice and not its weight (balancing without a loss:
arXiv:2408.15664). Groups: a token first chooses the groups whose two best
experts have the highest sum of s + bias (DeepSeek-V3, arXiv:2412.19437, section
2.1.2; DeepSeek-V2, arXiv:2405.04434, took the best one: group_best=1).

    balance   E sum_i f_i P_i,  f_i the share of assignments that expert i gets,
              P_i the mean over tokens of the probability p_i
    z         sum over tokens of (logsumexp of the logits)^2 (arXiv:2202.08906)

f has no gradient, so it may be counted over more tokens than P (balance_scope;
arXiv:2501.11873: over the whole batch, so that experts may specialise). Both
terms are divided by the tokens of the whole step, with loss or without, so sums
over shards and microbatches are the terms of the whole step (models/aux.py).

Legend: B rows, T tokens, E experts, K choices.
"""

import jax
import jax.numpy as jnp

# After the counts of the experts, in `load`.
EXTRA = 2  # assignments dropped; entropy of the router, summed over tokens


def scores(logits_BTE, kind):
  """s_BTE: 'softmax' over all experts, or 'sigmoid' of each."""
  if kind == 'sigmoid':
    return jax.nn.sigmoid(logits_BTE)
  return jax.nn.softmax(logits_BTE, -1)


def choose(s_BTE, config, bias_E=None):
  """(ids_BTK int32, best first; mix_BTK) under schema.Experts `config`."""
  choice = jax.lax.stop_gradient(s_BTE)
  if bias_E is not None:
    choice = choice + jax.lax.stop_gradient(bias_E).astype(choice.dtype)
  if config.groups > 1:
    choice = _in_groups(choice, config)
  _, ids = jax.lax.top_k(choice, config.top_k)
  mix = jnp.take_along_axis(s_BTE, ids, -1)
  if config.normalise:
    mix = _quotient(mix, mix.sum(-1, keepdims=True) + config.sum_epsilon)
  return ids, mix * config.scale


def _in_groups(choice_BTE, config):
  """-inf outside of each token's groups."""
  split = choice_BTE.reshape(*choice_BTE.shape[:-1], config.groups, -1)
  best, _ = jax.lax.top_k(split, min(config.group_best, split.shape[-1]))
  _, chosen = jax.lax.top_k(best.sum(-1), config.top_groups)
  open_ = (chosen[..., None] == jnp.arange(config.groups)).any(-2)
  return jnp.where(open_[..., None], split, -jnp.inf).reshape(choice_BTE.shape)


def probabilities(s_BTE, kind):
  """s_BTE as a distribution over experts."""
  if kind == 'softmax':
    return s_BTE
  return _quotient(s_BTE, s_BTE.sum(-1, keepdims=True))


def _quotient(s, total):
  """s / total; 0 where all sigmoids of a token are 0 in float32.

  Where they are tiny, a derivative would have the square of their sum, which is
  0: both are then larger by a power of two, which changes no bit of the result.
  """
  scale = jnp.where(total < 1e-15, 2.0**100, 1.0).astype(total.dtype)
  return s * scale / jnp.where(total == 0, 1, total * scale)


def counts(ids_BTK, valid_BT, experts):
  """Assignments of valid tokens to each expert in each row: int32 (B, E)."""
  rows = jnp.arange(len(ids_BTK))[:, None, None]
  weight = jnp.broadcast_to(valid_BT[..., None], ids_BTK.shape)
  zeros = jnp.zeros((len(ids_BTK), experts), jnp.int32)
  return zeros.at[rows, ids_BTK].add(weight.astype(jnp.int32))


def shares(count_BE, scope, axes, load_E: jax.Array | None = None):
  """f_BE (or f_1E), the share of each expert, without a gradient.

  Args:
    count_BE: assignments of this device.
    scope: schema.Experts.balance_scope.
    axes: mesh axes that (a row, the tokens) are sharded over.
    load_E: counts of the step ('step', 'running'); where they are 0, or
      negative, which is of another step, the microbatch's own are used.
  """
  of_row, of_tokens = axes
  total = lambda count, over: jax.lax.psum(count, over) if over else count
  if scope == 'sequence':
    return _normalised(total(count_BE, of_row))
  count = count_BE.sum(0, keepdims=True)
  if scope == 'device':
    return _normalised(count)
  now = _normalised(total(count, of_tokens))
  if scope == 'microbatch':
    return now
  if load_E is None:
    raise ValueError(f'balance_scope={scope!r} needs the counts of the step.')
  load_E = jax.lax.stop_gradient(load_E)
  return jnp.where(load_E.sum() > 0, _normalised(load_E), now)


def _normalised(count):
  total = count.sum(-1, keepdims=True)
  return count / jnp.where(total == 0, 1, total)


def balance(p_BTE, f_BE, valid_BT):
  """E sum_i f_i sum over tokens of p_i: this device's part, not yet a mean."""
  mass_BE = jnp.where(valid_BT[..., None], p_BTE, 0).sum(1)
  return p_BTE.shape[-1] * (f_BE.astype(p_BTE.dtype) * mass_BE).sum()


def z(logits_BTE, valid_BT):
  """Sum over tokens of (logsumexp of the logits)^2: this device's part."""
  return jnp.where(valid_BT, jax.nn.logsumexp(logits_BTE, -1) ** 2, 0).sum()


def entropy(p_BTE, valid_BT):
  """Sum over tokens of the entropy of p, in nats, without a gradient."""
  p = jax.lax.stop_gradient(p_BTE)
  per_token = -jax.scipy.special.xlogy(p, p).sum(-1)
  return jnp.where(valid_BT, per_token, 0).sum()
