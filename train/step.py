"""One training step in two compiled halves: gradients, then update.

Snapshots and offloading sit between the halves; train/steps/gradients.py has
the first. An outer loop (train/steps/outer.py) acts after them. It is the
gradient of the loss that is returned, terms of layers included (models/aux.py),
for any cotangent. A loss or gradient that is not finite leaves the state as it
was; the step is counted and the tensors named.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.train import expert_counts
from paraxis.train import loss as loss_lib
from paraxis.train import state as state_lib
from paraxis.train.steps import gradients as gradients_lib
from paraxis.train.steps import replicas
from paraxis.train.steps import zeroth_order


class Step(NamedTuple):
  """Functions of a step, to be jitted by the loop; papers replace them.

  grads(variables, batch, cotangent=1.0) -> (loss, {path: gradient}, aux.Aux):
    of State.inner. The loss is the sum of aux.terms, 'nats' among them; the
    gradient is that of cotangent x loss, of what is learned.
  update(state, loss, grads, aux) -> (state, metrics): loss (nats alone),
    grad_norm, squares (sum of squares of each gradient, sorted by path),
    skipped, skipped_in_a_row, learning_rate_<group>, expert_counts.metrics.
  evaluate(variables, batch) -> () sum of nats over the weighted targets.

  With replicas that step alone (schema.Outer) variables, gradients and numbers
  of a step lead with R, a value of each; `evaluate` takes those of no replica.
  """

  grads: Any
  update: Any
  evaluate: Any


def make(built, optimizer, clip_norm):
  """The step: one loss, its gradient, one optimizer; or so for every replica.

  Args:
    built: models.build.Built.
    optimizer: train.updates.optimizers.Optimizer, or zeroth_order.Descent:
      which estimates, of a gradient, the slope along one direction.
    clip_norm: global gradient norm above which gradients are scaled; 0: never.
  """
  model = built.model
  evaluate = functools.partial(loss_lib.total, model)
  if built.schedule is not None:
    of = functools.partial(gradients_lib.in_region, built)
    grads = functools.partial(of, gradients_lib.on_stages)
    evaluate = functools.partial(gradients_lib.total_on_stages, built)
  elif built.outer.active:
    grads = functools.partial(replicas.gradients, built)
  elif built.choices.collectives == 'explicit' and built.mesh.size > 1:
    of = functools.partial(gradients_lib.in_region, built)
    grads = functools.partial(of, gradients_lib.of_batch)
  else:
    layouts = gradients_lib.Annotated(model)
    grads = functools.partial(gradients_lib.of_batch, built, layouts)
  if isinstance(optimizer, zeroth_order.Descent):
    of = functools.partial(zeroth_order.gradients, built)
    grads = functools.partial(of, optimizer.epsilon)
    return Step(grads, functools.partial(_along, built, optimizer, clip_norm),
                evaluate)  # fmt: skip
  one = functools.partial(_updated, model, optimizer, clip_norm)

  def update(state, loss, grads, aux):
    if built.outer.active:
      return replicas.update(built, one, state, loss, grads, aux)
    return one(_squares, state, loss, grads, aux)

  return Step(grads, update, evaluate)


def _along(built, descent, clip_norm, state, loss, grads, aux):
  """Step.update along the direction that a gradient says the key of."""
  draw = aux.tallies['draw']
  squares = functools.partial(descent.squares, state.params)
  state, numbers = _updated(
    built.model, descent.along(draw), clip_norm, squares, state, loss, grads,
    aux,
  )  # fmt: skip
  return state, numbers | grads | dict(draw=draw)


def _squares(grads):
  """(n,) sums of squares of gradients, sorted by path."""
  return jnp.stack([jnp.sum(jnp.square(grads[p])) for p in sorted(grads)])


def _updated(model, optimizer, clip_norm, squares_of, state, loss, grads, aux):
  """Step.update. squares_of: as `_squares`."""
  with jax.named_scope('gradient_norm'):
    squares = squares_of(grads)
    norm = jnp.sqrt(squares.sum())
  finite = jnp.isfinite(loss) & jnp.isfinite(norm)
  clip = jnp.minimum(1.0, clip_norm / norm) if clip_norm else 1.0

  def move(params, counts, inner):
    with jax.named_scope('update'):
      clipped = {p: g * clip for p, g in grads.items()}
      at = state.step, state.skipped
      moved, inner = optimizer.update(clipped, inner, params, *at)
      return moved, counts | expert_counts.update(model, aux, counts), inner

  # A branch, not a select: selecting reads everything twice, and the update
  # of 17M parameters then takes 3 times as long on CPU.
  kept = state.params, state.counts, state.optimizer
  moved = jax.lax.cond(finite, move, lambda *old: old, *kept)
  skip = 1 - finite.astype(jnp.int32)
  params, counts, inner = moved
  new = state_lib.State(
    params,
    counts,
    inner,
    state.step + 1,
    state.skipped + skip,
    (state.skipped_in_a_row + 1) * skip,
  )
  metrics = dict(
    loss=aux.terms['nats'],
    grad_norm=norm,
    squares=squares,
    skipped=new.skipped,
    skipped_in_a_row=new.skipped_in_a_row,
    **{f'learning_rate_{g}': r for g, r in optimizer.rates(state.step).items()},
    **expert_counts.metrics(model, aux),
  )
  return new, metrics
