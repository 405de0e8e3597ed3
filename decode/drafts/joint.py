"""Medusa-2: the heads of a draft and the model learn together.

    loss = cross entropy of the text + share x that of the heads (losses.py)

(Medusa, Cai et al., arXiv:2401.10774, section 2.2.2). The heads are warm: they
were trained behind the frozen model (distill.py). The model learns slower than
they do, so that it keeps what it knows. They learn what the model finds most
likely at that step, which has no gradient; its features have one, and so does
the head that both share (the paper gives each of them a copy).

Legend: N, B rows, T tokens, K heads, D model width.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paraxis.decode.drafts import losses as losses_lib
from paraxis.models import batch as batch_lib


class Together(NamedTuple):
  """steps, rows: of training, rows of a step. rate: of the heads. slower: the
  model's rate over it. share: of the heads' loss. coupled: whether that loss
  reaches the model; without, it learns the text alone."""

  steps: int
  rows: int
  rate: float
  slower: float
  share: float
  coupled: bool = True


def text_loss(model, params, tokens_BT):
  """(cross entropy of the next tokens, features, logits) of whole rows.

  Args:
    model: decoder.Decoder. params: {path: array} as its `init` gives them.
  """
  ones = jnp.ones_like(tokens_BT)
  places = jnp.cumsum(ones, 1) - 1
  x_BTD, _ = model.features(
    params, batch_lib.Batch(tokens_BT, None, ones, places, None, None)
  )
  z = model.logits(params, x_BTD)
  z = z.astype(jnp.promote_types(z.dtype, jnp.float32))
  nll = optax.softmax_cross_entropy_with_integer_labels(
    z[:, :-1], tokens_BT[:, 1:]
  )
  return nll.mean(), x_BTD, z


def loss(model, together, both, tokens_BT):
  """Of (heads, parameters of the model) and rows of text."""
  own, params = both
  text, x_BTD, z = text_loss(model, params, tokens_BT)
  if not together.coupled:
    params, x_BTD = jax.lax.stop_gradient((params, x_BTD))
  count = own['bias'].shape[0]
  length = z.shape[1] - count
  choice = jax.lax.stop_gradient(z.argmax(-1))
  # The model itself draws the token after the last: head k says the next.
  y = jnp.stack([choice[:, 1 + k :][:, :length] for k in range(count)], -1)
  x = x_BTD[:, :length].reshape(-1, x_BTD.shape[-1])
  heads: Any = losses_lib.of(model, 'medusa', None)
  return text + together.share * heads(own, params, x, y.reshape(-1, count))


def fit(model, params, own, rows_NT, together, seed, say=print):
  """(heads, parameters of the model) after `together.steps` steps.

  Args:
    model, params: as for `text_loss`. own: {name: array} of a medusa draft.
    rows_NT: int32 text. together: Together. seed: of the order of rows.
    say: prints one line.
  """
  decay = functools.partial(
    optax.cosine_decay_schedule, decay_steps=together.steps
  )
  clipped = lambda rate: optax.chain(
    optax.clip_by_global_norm(1.0), optax.adam(decay(rate))
  )
  rates = dict(heads=together.rate, model=together.rate * together.slower)
  tx = optax.multi_transform(
    {name: clipped(rate) for name, rate in rates.items()}, ('heads', 'model')
  )

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def update(both, state, tokens):
    part = lambda both: loss(model, together, both, tokens)
    value, grads = jax.value_and_grad(part)(both)
    change, state = tx.update(grads, state)
    return optax.apply_updates(both, change), state, value

  copies = lambda tree: jax.tree.map(jnp.array, dict(tree))  # they are donated
  both = copies(own), copies(params)
  state, found = tx.init(both), []
  order = np.random.default_rng(seed).permutation(len(rows_NT))
  for i in range(together.steps):
    at = np.take(
      order, range(i * together.rows, (i + 1) * together.rows), mode='wrap'
    )
    both, state, value = update(both, state, jnp.asarray(rows_NT[at]))
    found.append(float(value))
  say(
    f'heads and model: {together.steps} steps of {together.rows} rows, loss '
    f'{found[0]:.3f} -> {found[-1]:.3f}'
  )
  return jax.tree.map(np.asarray, both[0]), both[1]
