"""One training step in two compiled halves: gradients, then update.

Outer algorithms, snapshots and offloading sit between the halves. The gradient
of a step is the same for any number of microbatches, because the loss of each
is divided by the denominator of the whole step. A loss or gradient that is not
finite leaves the state as it was; the step is counted and the tensors named.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.sharding import annotate
from paraxis.train import loss as loss_lib
from paraxis.train import state as state_lib


class Step(NamedTuple):
  """Functions of a step, to be jitted by the loop; papers replace them.

  grads(params, batch) -> (loss, {path: gradient}).
  update(state, loss, grads) -> (state, metrics): loss, grad_norm, squares (sum
    of squares of each gradient, sorted by path), skipped, skipped_in_a_row,
    learning_rate_<group>.
  evaluate(params, batch) -> () sum of nats over the weighted targets.
  """

  grads: Any
  update: Any
  evaluate: Any


def make(model, optimizer, clip_norm):
  """The plain step: one loss, its gradient, one optimizer.

  Args:
    model: models.decoder.Decoder.
    optimizer: train.optimizers.Optimizer.
    clip_norm: global gradient norm above which gradients are scaled; 0: never.
  """

  def one(params, batch):
    objective = lambda p: loss_lib.next_token(model, p, batch)
    return jax.value_and_grad(objective)(params)

  def grads(params, batch):
    if batch.tokens.ndim == 2:
      return one(params, batch)
    wide = lambda p: jnp.promote_types(p.dtype, jnp.float32)
    zeros = jax.tree.map(lambda p: annotate.like(p, 0, wide(p)), params)
    share = lambda batch, arrays: batch._replace(
      **dict(zip(batch._fields[:-1], arrays, strict=True))
    )

    def add(total, arrays):
      return jax.tree.map(jnp.add, total, one(params, share(batch, arrays))), ()

    kind = jnp.promote_types(model.config.dtype, jnp.float32)
    scalar = jnp.zeros((), kind)
    return jax.lax.scan(add, (scalar, zeros), tuple(batch[:-1]))[0]

  def update(state, loss, grads):
    squares = jnp.stack([jnp.sum(jnp.square(grads[p])) for p in sorted(grads)])
    norm = jnp.sqrt(squares.sum())
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    clip = jnp.minimum(1.0, clip_norm / norm) if clip_norm else 1.0

    def move(params, inner):
      clipped = {p: g * clip for p, g in grads.items()}
      return optimizer.update(clipped, inner, params, state.step)

    # A branch, not a select: selecting reads everything twice, and the update
    # of 17M parameters then takes 3 times as long on CPU.
    params, inner = jax.lax.cond(
      finite, move, lambda *old: old, state.params, state.optimizer
    )
    skip = 1 - finite.astype(jnp.int32)
    new = state_lib.State(
      params,
      inner,
      state.step + 1,
      state.skipped + skip,
      (state.skipped_in_a_row + 1) * skip,
    )
    metrics = dict(
      loss=loss,
      grad_norm=norm,
      squares=squares,
      skipped=new.skipped,
      skipped_in_a_row=new.skipped_in_a_row,
      **{
        f'learning_rate_{g}': r for g, r in optimizer.rates(state.step).items()
      },
    )
    return new, metrics

  evaluate = lambda params, batch: loss_lib.total(model, params, batch)
  return Step(grads, update, evaluate)
