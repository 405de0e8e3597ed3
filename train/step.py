"""One training step in two compiled halves: gradients, then update.

Outer algorithms, snapshots and offloading sit between the halves. The gradient
of a step is the same for any number of microbatches, because the loss of each
is divided by the denominator of the whole step. A loss or gradient that is not
finite leaves the state as it was; the step is counted and the tensors named.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.sharding import annotate
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.pipeline import executor as pipeline
from paraxis.train import expert_counts
from paraxis.train import loss as loss_lib
from paraxis.train import pipeline_step
from paraxis.train import state as state_lib


class Step(NamedTuple):
  """Functions of a step, to be jitted by the loop; papers replace them.

  grads(params, batch) -> (loss, {path: gradient}).
  update(state, loss, grads) -> (state, metrics): loss, grad_norm, squares (sum
    of squares of each learned gradient, sorted by path), skipped,
    skipped_in_a_row, learning_rate_<group>, experts/<what experts count>.
  evaluate(params, batch) -> () sum of nats over the weighted targets.
  """

  grads: Any
  update: Any
  evaluate: Any


def make(built, optimizer, clip_norm):
  """The plain step: one loss, its gradient, one optimizer.

  Args:
    built: models.build.Built.
    optimizer: train.optimizers.Optimizer.
    clip_norm: global gradient norm above which gradients are scaled; 0: never.
  """
  model = built.model
  grads = functools.partial(_gradients, model)
  evaluate = lambda params, batch: loss_lib.total(model, params, batch)
  if built.schedule is not None:
    grads = functools.partial(_manual_gradients, built, _of_stages)
    evaluate = functools.partial(_total_of_stages, built)
  elif built.choices.collectives == 'explicit' and built.mesh.size > 1:
    grads = functools.partial(_manual_gradients, built, _of_shards)

  def update(state, loss, grads):
    learned = expert_counts.without(model, grads)
    squares = jnp.stack(
      [jnp.sum(jnp.square(grads[p])) for p in sorted(learned)]
    )
    norm = jnp.sqrt(squares.sum())
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    clip = jnp.minimum(1.0, clip_norm / norm) if clip_norm else 1.0

    def move(params, inner):
      clipped = grads | {p: g * clip for p, g in learned.items()}
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
      **expert_counts.metrics(model, grads),
    )
    return new, metrics

  return Step(grads, update, evaluate)


def _accumulate(model, params, batch, each, of=None):
  """(loss, gradients) of a batch, or the sums over its microbatches.

  In a manual region: of this shard's tokens alone.

  Args:
    each: (path, gradient): the layout in which sums of a microbatch are kept.
    of: paths to differentiate with respect to; default all.
  """
  wanted = params if of is None else {p: params[p] for p in of}

  def one(wanted, batch):
    objective = lambda w: loss_lib.next_token(model, params | w, batch)
    loss, grads = jax.value_and_grad(objective)(wanted)
    return loss, {p: each(p, g) for p, g in grads.items()}

  if batch.tokens.ndim == 2:
    return one(wanted, batch)
  share = lambda arrays: batch._replace(
    **dict(zip(batch._fields[:-1], arrays, strict=True))
  )

  def zero(p):
    x = wanted[p]
    like = annotate.like(x, 0, jnp.promote_types(x.dtype, jnp.float32))
    if annotate.mode() != 'manual':
      return each(p, like)
    kept = jax.eval_shape(functools.partial(each, p), like)
    return jnp.zeros(kept.shape, kept.dtype)  # no message for zeros

  def add(total, arrays):
    return jax.tree.map(jnp.add, total, one(wanted, share(arrays))), ()

  scalar = jnp.zeros((), jnp.promote_types(model.config.dtype, jnp.float32))
  start = scalar, {p: zero(p) for p in wanted}
  return jax.lax.scan(add, start, tuple(batch[:-1]))[0]


def _with_loads(model, params, batch, count):
  """Parameters in which experts find the loads of this whole step, if asked.

  model.experts.balance_scope='step' (arXiv:2501.11873, section 3): the share of
  each expert is counted over all microbatches, in a forward pass of its own,
  before gradients are taken. Of one microbatch they count themselves.

  count(paths) -> {path: counts}, summed over all devices.
  """
  paths = expert_counts.whole_step(model)
  if not paths:
    return params
  if batch.tokens.ndim == 2:
    return params | {p: jnp.zeros_like(params[p]) for p in paths}
  found = count(paths)
  return params | {p: found[p].astype(params[p].dtype) for p in paths}


def _gradients(model, params, batch):
  """(loss, gradients); the compiler places the collectives."""
  store = lambda stage: lambda p, g: annotate.stored(g, model.axes[p], stage)
  sums = store(rules_lib.SUMS)
  count = lambda of: _accumulate(model, params, batch, sums, of)[1]
  params = _with_loads(model, params, batch, count)
  loss, grads = _accumulate(model, params, batch, sums)
  last = store(rules_lib.GRADIENTS)
  return loss, {p: last(p, g) for p, g in grads.items()}


class _Layouts:
  """PartitionSpecs of parameters and gradients in a manual region.

  own: parameters. kept: sums over microbatches. final: gradients. Each is
  {path: spec}.
  """

  def __init__(self, built, params):
    axes, sizes = built.model.axes, annotate.sizes()
    stored = lambda p, x, stage: rules_lib.stored(
      axes[p], x.shape, built.rules, sizes, stage, p
    )
    items = params.items()
    self.own = {p: annotate.spec(axes[p], x.shape, p) for p, x in items}
    self.kept = {p: stored(p, x, rules_lib.SUMS) for p, x in items}
    self.final = {p: stored(p, x, rules_lib.GRADIENTS) for p, x in items}


def _manual_gradients(built, accumulate, params, batch):
  """(loss, gradients) with collectives of our own, in one manual region.

  Every shard differentiates the loss of its own tokens (and layers). A
  parameter's gradient is then summed once, over the mesh axes absent from its
  layout: scattered where the gradient is sharded (ZeRO, over data), else
  all-reduced. ZeRO stage 2 scatters that of every microbatch, so that sums of
  them are never whole.

  Args:
    built: models.build.Built.
    accumulate: (built, layouts, params, batch) -> (loss, gradients) of this
      shard, laid out as layouts.kept; `_of_shards` or `_of_stages`.
    params, batch: of the step.
  """
  layouts = _Layouts(built, params)

  def body(params, batch):
    loss, grads = accumulate(built, layouts, params, batch)
    tokens = annotate.carriers('batch') + annotate.carriers('length')
    loss = jax.lax.psum(loss, tokens) if tokens else loss
    kept, final = layouts.kept, layouts.final
    grads = {p: _scatter(g, kept[p], final[p]) for p, g in grads.items()}
    return loss, {p: _all_reduce(g, final[p]) for p, g in grads.items()}

  return jax.shard_map(
    body,
    in_specs=(layouts.own, _batch_specs(batch)),
    out_specs=(jax.P(), layouts.final),
    check_vma=False,
  )(params, batch)


def _batch_specs(batch):
  """PartitionSpecs of the arrays of a batch, (B, T) or (A, B, T)."""
  rows = {
    n: annotate.spec((None,) * (n - 2) + ('batch', 'length')) for n in (2, 3)
  }
  return jax.tree.map(lambda x: rows.get(x.ndim, jax.P()), batch)


def _of_shards(built, layouts, params, batch):
  """(loss, gradients) of this shard's tokens."""
  model = built.model
  each = lambda p, g: _scatter(g, layouts.own[p], layouts.kept[p])

  def count(of):
    own = _accumulate(model, params, batch, lambda p, g: g, of)[1]
    return {p: _all_reduce(g, layouts.own[p]) for p, g in own.items()}

  params = _with_loads(model, params, batch, count)
  return _accumulate(model, params, batch, each)


def _split(params):
  """({path: parameter} of the ends, of the layers)."""
  layers = {p: x for p, x in params.items() if p.startswith('layers/')}
  return {p: x for p, x in params.items() if p not in layers}, layers


def _on(built):
  """Which rows of the chunks hold a layer; None: all."""
  depth = built.model.depth
  return None if depth.even else depth.rows >= 0


def _of_stages(built, layouts, params, batch):
  """(loss, gradients) of this shard's tokens and stage, by the schedule."""
  with annotate.use(pipeline_step.whole_rules(built.rules)):
    whole = {p: annotate.spec(built.model.axes[p]) for p in params}
  scatter = lambda p, g: _scatter(g, whole[p], layouts.kept[p])
  run = pipeline_step.Pipeline(built, batch, scatter)
  schedule = pipeline_step.schedule_of(built, batch)

  def count(of):
    del of
    calls = run.calls()._replace(forward=run.count)
    ends, stack = _split(params)
    with run.context():
      own = pipeline.counts(
        schedule, calls, run.gather(ends), stack, _on(built)
      )
    return {p: _all_reduce(g, layouts.own[p]) for p, g in own.items()}

  ends, stack = _split(_with_loads(built.model, params, batch, count))
  with run.context():
    loss, of_ends, of_stack = pipeline.gradients(
      schedule, run.calls(), run.gather(ends), stack, _on(built)
    )
  return loss, run.scatter(of_ends) | of_stack


def _total_of_stages(built, params, batch):
  """Sum of nats over the weighted targets of a batch (B, T) on stages."""
  schedule = pipeline_step.evaluation(built.schedule)

  def body(params, batch):
    ends, stack = _split(params)
    run = pipeline_step.Pipeline(built, batch, None)
    with run.context():
      total = pipeline.total(
        schedule, run.calls(), run.gather(ends), stack, _on(built)
      )
    tokens = annotate.carriers('batch') + annotate.carriers('length')
    return jax.lax.psum(total, tokens) if tokens else total

  own = _Layouts(built, params).own
  total = jax.shard_map(
    body,
    in_specs=(own, _batch_specs(batch)),
    out_specs=jax.P(),
    check_vma=False,
  )(params, batch)
  return total * batch.denominator


def _axes(spec):
  """PartitionSpec -> a tuple of mesh axes for each dimension."""
  return [a if isinstance(a, tuple) else (a,) if a else () for a in spec]


def _scatter(gradient, before, after):
  """Summed over the axes that `after` has beyond `before`, and laid out so."""
  pairs = zip(_axes(before), _axes(after), strict=True)
  for i, (old, new) in enumerate(pairs):
    extra = tuple(a for a in new if a not in old)
    if extra:
      gradient = jax.lax.psum_scatter(
        gradient, extra, scatter_dimension=i, tiled=True
      )
  return gradient


def _all_reduce(gradient, spec):
  """Summed over the mesh axes absent from its layout."""
  held = {a for dim in _axes(spec) for a in dim}
  left = tuple(a for a in annotate.sizes() if a not in held)
  return jax.lax.psum(gradient, left) if left else gradient
