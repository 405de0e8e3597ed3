"""Replicas that step alone: the inner step of an outer loop (outer.py).

Every place along the mesh axis `replica` has parameters and optimizer state of
its own: arrays that lead with R, sharded over that axis. The two halves of a
step are each one manual region over all mesh axes in which `replica` is hidden
(annotate.hide), so that layouts, sums and ZeRO are those of one replica, and no
message crosses replicas. (Under vmap the step gathers over `replica` what a
region inside needs; numbers are equal, only counted bytes show it.)

Rows keep their layout, over (replica, data, fsdp) with replica first: those of
replica r are the r-th part of a microbatch. Its loss is divided by its own
targets, its gradient is clipped by its own norm, and a step that is not finite
is skipped by it alone.

Legend: R replicas.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.models import aux as aux_lib
from paraxis.sharding import annotate
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.tensor import product_layouts
from paraxis.train import expert_counts
from paraxis.train.steps import gradients as gradients_lib

AXIS = 'replica'


def check(config, built):
  """UserError if the replicas of a schema.Config cannot step alone."""
  if not config.outer.active:
    return
  n, what = built.mesh.shape[AXIS], f'outer.exchange={config.outer.exchange}'
  names = {name for axes in built.model.axes.values() for name in axes}
  over = sorted(x for x in names if AXIS in built.rules.axes(x))
  for wrong, text in (
    (
      bool(over),
      f'mesh.rules={config.mesh.rules!r}: {", ".join(over)} of parameters is '
      f'sharded over {AXIS}, where each has its own; leave {AXIS} out of it',
    ),
    (
      built.schedule is not None,
      f'mesh.stage={built.mesh.shape["stage"]}: the schedule of a pipeline '
      'steps all replicas at once; take stage=1',
    ),
    (
      config.optimizer.ema_decay > 0,
      f'optimizer.ema_decay={config.optimizer.ema_decay}: the average would be '
      'of one replica, not of the anchor; take 0',
    ),
    (
      bool(expert_counts.paths(built.model)),
      f'model.experts.count={config.model.experts.count}: experts count the '
      'tokens of all replicas; take a model without experts',
    ),
    (
      config.train.objective != 'next_token',
      f'train.objective={config.train.objective}: the denominator of a replica '
      'is known for next_token alone',
    ),
  ):
    if wrong:
      raise errors.UserError(f'{what} with {n} replicas, and {text}.')


def copied(x, n):
  """x -> (n, ...), laid out over replicas."""
  spec = lead(jax.typeof(x).sharding.spec)
  return jax.reshard(jnp.broadcast_to(x, (n, *x.shape)), spec)


def lead(spec):
  """A PartitionSpec with the axis of replicas in front."""
  there = AXIS in annotate.sizes()
  return jax.P(AXIS if there else None, *spec)


def _leads(specs):
  is_spec = lambda x: isinstance(x, jax.P)
  return jax.tree.map(lead, specs, is_leaf=is_spec)


def one(tree):
  """Of arrays (1, ...), a replica's shards: those of the replica."""
  return jax.tree.map(lambda x: x[0], tree)


def many(tree):
  """The inverse of `one`."""
  return jax.tree.map(lambda x: x[None], tree)


def region(body, in_specs, out_specs):
  """body of the shards of one replica, manual over every mesh axis.

  `replica` is hidden from it: it computes what that replica would alone.
  """

  def run(*args):
    with annotate.hide(AXIS):
      return body(*args)

  return jax.shard_map(
    run, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )


def _layouts(built, params):
  """gradients.PerShard of one replica. params: {path: (R, ...)}."""
  cut = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
  with annotate.hide(AXIS):
    return gradients_lib.PerShard(built, {p: cut(x) for p, x in params.items()})


def gradients(built, params, batch, cotangent=1.0):
  """Step.grads of R replicas, each of its own rows.

  Args:
    built: models.build.Built.
    params: {path: (R, ...)}. batch: a Batch (B, T) or (A, B, T) of all.
    cotangent: as of Step.grads.

  Returns:
    (losses (R,), {path: (R, ...)}, aux.Aux of (R,), whose tally 'targets' is
    what each loss was divided by).
  """
  layouts = _layouts(built, params)

  def body(params, batch, cotangent):
    own = gradients_lib.over_tokens(batch.weights.sum())
    batch = batch._replace(denominator=jnp.maximum(own, 1))
    given = built, layouts, one(params), batch, cotangent
    loss, grads, aux = gradients_lib.of_batch(*given)
    aux = aux._replace(tallies=aux.tallies | dict(targets=batch.denominator))
    return many((loss, grads, aux))

  alone = lead(())
  learned = expert_counts.without(built.model, layouts.of_step)
  found = alone, _leads(learned), aux_lib.Aux(alone, alone, {})
  rows = gradients_lib.batch_specs(batch)
  run = region(body, (_leads(layouts.own), rows, jax.P()), found)
  return run(params, batch, jnp.asarray(cotangent))


def update(built, updated, state, loss, grads, aux):
  """Step.update of R replicas; the anchor stays where it is.

  Args:
    built: models.build.Built.
    updated: (squares of gradients, state, loss, grads, aux) -> (state, numbers)
      of one replica (train/step.py).
    state, loss, grads, aux: as of Step.update, leading with R.
  """
  layouts = _layouts(built, state.outer.params)
  axes, sizes = built.model.axes, dict(built.mesh.shape)
  sizes = {a: n for a, n in sizes.items() if n > 1 and a != AXIS}
  stored = lambda p, x: rules_lib.stored(
    axes[p], x.shape[1:], built.rules, sizes, rules_lib.OPTIMIZER, p
  )
  learned = state.outer.params.keys() & grads.keys()
  held = layouts.own | {p: stored(p, state.outer.params[p]) for p in learned}
  squares_of = functools.partial(squares, layouts.of_step)

  def body(moving, step, loss, grads, aux):
    params, *rest = one(moving)
    own = layouts.own
    cut = {p: _cut(x, own[p], held[p]) for p, x in params.items()}
    inner, skipped, row = rest
    alone = state._replace(
      params=cut, counts={}, optimizer=inner, step=step, skipped=skipped,
      skipped_in_a_row=row, outer=(),
    )  # fmt: skip
    new, numbers = updated(squares_of, alone, *one((loss, grads, aux)))
    params = {p: _gather(x, held[p], own[p]) for p, x in new.params.items()}
    moved = params, new.optimizer, new.skipped, new.skipped_in_a_row
    return many((moved, numbers))

  moving = (
    state.outer.params,
    state.optimizer,
    state.skipped,
    state.skipped_in_a_row,
  )
  specs = lambda tree: jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
  given = moving, state.step, loss, grads, aux
  run = region(body, specs(given), (specs(moving), lead(())))
  (params, inner, skipped, row), numbers = run(*given)
  outer = state.outer._replace(params=params)
  new = state._replace(
    optimizer=inner, step=state.step + 1, skipped=skipped,
    skipped_in_a_row=row, outer=outer,
  )  # fmt: skip
  return new, numbers | dict(targets=aux.tallies['targets'])


def together(numbers) -> dict[str, Any]:
  """Numbers of a step of R replicas, NumPy (R, ...), as one of each.

  The mean over replicas, of the loss over their targets, of loss and norm over
  those that did not skip the step, unless all did; of skipped steps the most;
  of squares the sum, not finite where one is not. 'replicas' lists those that
  skipped it.
  """
  of = dict(skipped=np.max, skipped_in_a_row=np.max, squares=np.sum)
  out = {name: of.get(name, np.mean)(x, 0) for name, x in numbers.items()}
  bad = np.asarray(numbers['skipped_in_a_row']) > 0
  kept = ~bad if bad.any() and not bad.all() else np.ones_like(bad)
  picked = lambda name: np.asarray(numbers[name], np.float64)[kept]
  targets = picked('targets')  # float64: of one replica the loss is its own
  out['loss'] = (picked('loss') * targets).sum() / targets.sum()
  out['grad_norm'] = picked('grad_norm').mean()
  return out | {'replicas': np.flatnonzero(bad).tolist()}


def squares(specs, grads):
  """(n,) sums of squares of a replica's gradients, or the like, by path.

  specs: {path: PartitionSpec}. One sum over each set of mesh axes.
  """
  local, groups = {}, {}
  for p in sorted(grads):
    local[p] = jnp.sum(jnp.square(grads[p]))
    axes = tuple(a for dim in gradients_lib.axes_of(specs[p]) for a in dim)
    groups.setdefault(axes, []).append(p)
  for axes, paths in groups.items():
    if axes:
      total = jax.lax.psum(jnp.stack([local[p] for p in paths]), axes)
      local |= dict(zip(paths, total, strict=True))
  return jnp.stack([local[p] for p in sorted(grads)])


def _extra(before, after):
  """[(dimension, mesh axes)] that a PartitionSpec has beyond another."""
  return product_layouts.extra(*map(gradients_lib.axes_of, (after, before)))


def _cut(x, before, after):
  for i, axes in _extra(before, after):
    x = annotate.own(x, axes, i)
  return x


def _gather(x, before, after):
  for i, axes in _extra(after, before):
    x = jax.lax.all_gather(x, axes, axis=i, tiled=True)
  return x
