"""The gradient of a step, in each of the worlds that a layout can ask for.

    annotated    arrays are global, the compiler places collectives
    in_region    one manual region: every shard differentiates the loss of its
                 own tokens (and layers), and sums are ours
    on_stages    the same by the schedule of a pipeline

The gradient is the same for any number of microbatches, because the loss of
each is divided by the denominator of the whole step.
"""

import functools

import jax
import jax.numpy as jnp

from paraxis.models import aux as aux_lib
from paraxis.pallas_kernels import varying
from paraxis.sharding import annotate
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.pipeline import executor as pipeline
from paraxis.train import expert_counts
from paraxis.train import loss as loss_lib
from paraxis.train.steps import pipeline_step

WHOLE = ('replica', 'data', 'context')  # shards of rows, parameters whole


class Annotated:
  """Layouts of gradients where the compiler places the collectives."""

  def __init__(self, model):
    self._axes = model.axes

  def sums(self, path, gradient):
    """Of a microbatch -> as sums over microbatches are kept."""
    return annotate.stored(gradient, self._axes[path], rules_lib.SUMS)

  def counts(self, path, count):
    """What experts of all shards counted."""
    return annotate.put(count, self._axes[path])

  def whole(self, nats, aux):
    """(nats, aux.Aux) of all tokens."""
    return nats, aux

  def final(self, path, total):
    """A sum over microbatches -> the gradient of the step."""
    return annotate.stored(total, self._axes[path], rules_lib.GRADIENTS)


class PerShard:
  """The same in a manual region, where every shard has terms of its own.

  A parameter's gradient is summed once, over the mesh axes absent from its
  layout: scattered where the gradient is sharded (ZeRO, over data), else
  all-reduced. ZeRO stage 2 scatters that of every microbatch, so that sums of
  them are never whole.

  Attributes:
    own, kept, of_step: {path: PartitionSpec} of parameters, of sums over
      microbatches, of gradients.
  """

  def __init__(self, built, params):
    axes, sizes = built.model.axes, annotate.sizes()
    stored = lambda p, x, stage: rules_lib.stored(
      axes[p], x.shape, built.rules, sizes, stage, p
    )
    items = params.items()
    self.own = {p: annotate.spec(axes[p], x.shape, p) for p, x in items}
    self.kept = {p: stored(p, x, rules_lib.SUMS) for p, x in items}
    self.of_step = {p: stored(p, x, rules_lib.GRADIENTS) for p, x in items}

  def sums(self, path, gradient):
    """Terms of a microbatch -> summed over axes that ZeRO shards it over."""
    return _scatter(gradient, self.own[path], self.kept[path])

  def counts(self, path, count):
    """What experts of this shard counted -> what all did."""
    return _all_reduce(count, self.own[path])

  def whole(self, nats, aux):
    """(nats, aux.Aux) of this shard's tokens (and layers) -> of all shards.

    Nats are summed over the axes of tokens, the others over all: layers may
    shard the length further (mesh.sequence).
    """
    total = lambda x: _all_reduce(x, jax.P())
    terms, tallies = jax.tree.map(total, (aux.terms, aux.tallies))
    counts = {p: self.counts(p, n) for p, n in aux.counts.items()}
    return over_tokens(nats), aux_lib.Aux(terms, tallies, counts)

  def final(self, path, total):
    """A sum of this shard over microbatches -> the gradient of the step."""
    after = self.of_step[path]
    return _all_reduce(_scatter(total, self.kept[path], after), after)


def of_batch(built, layouts, params, batch, cotangent=1.0):
  """Step.grads of a batch (B, T) or (A, B, T).

  In a manual region every shard differentiates the loss of its own tokens.

  Args:
    built: models.build.Built.
    layouts: `Annotated` or `PerShard`.
    params, batch, cotangent: as of Step.grads.
  """
  model = built.model
  count = functools.partial(_count, model, params, batch)
  params = _with_loads(model, layouts, params, batch, count)
  learned = expert_counts.without(model, params)
  of = lambda share: functools.partial(
    loss_lib.objective, model, batch=share, others=params
  )
  pull = functools.partial(_pulled, layouts, cotangent)
  if batch.tokens.ndim == 2:
    nats, aux, grads = pull(*jax.vjp(of(batch), learned, has_aux=True))
  else:
    one = lambda share: pull(*jax.vjp(of(share), learned, has_aux=True))
    zeros = {p: _zero(layouts, p, x) for p, x in learned.items()}
    nats, aux, grads = _sum_of_microbatches(one, batch, zeros)
  return _of_step(layouts, nats, aux, grads)


def value(built, layouts, params, batch):
  """(loss, aux.Aux) as of `of_batch`, without a gradient."""
  model = built.model
  count = functools.partial(_count, model, params, batch)
  params = _with_loads(model, layouts, params, batch, count)
  one = lambda share: (*loss_lib.objective(model, params, share)[1], {})
  whole = batch.tokens.ndim == 2
  found = one(batch) if whole else _sum_of_microbatches(one, batch, {})
  return _of_step(layouts, *found)[::2]


def _of_step(layouts, nats, aux, grads):
  """What Step.grads returns, from the sums of a shard over microbatches."""
  with jax.named_scope('gradients'):
    nats, aux = layouts.whole(nats, aux)
    loss = nats + aux_lib.total(aux, nats.dtype)
    grads = {p: layouts.final(p, g) for p, g in grads.items()}
  return loss, grads, aux._replace(terms={'nats': nats} | aux.terms)


def _pulled(layouts, cotangent, loss, back, found):
  """(nats, aux.Aux, gradients as sums are kept) from what jax.vjp gives."""
  (grads,) = back(jnp.asarray(cotangent, loss.dtype))
  with jax.named_scope('gradients'):
    return *found, {p: layouts.sums(p, g) for p, g in grads.items()}


def _zero(layouts, path, x):
  """The sum of no gradients of a parameter."""
  like = varying.like(x, 0, jnp.promote_types(x.dtype, jnp.float32))
  if annotate.mode() != 'manual':
    return layouts.sums(path, like)
  kept = jax.eval_shape(functools.partial(layouts.sums, path), like)
  return jnp.zeros(kept.shape, kept.dtype)  # no message for zeros


def _sum_of_microbatches(one, batch, zeros):
  """Sums of one(batch (B, T)) -> (nats, aux, gradients) over (A, B, T).

  In a manual region: of this shard's tokens alone. zeros: of the gradients.
  """

  def add(total, rows):
    *found, grads = one(rows._replace(**batch.whole))
    return jax.tree.map(jnp.add, total, grads), found

  # Scalars and counts are stacked and added after: no shapes are needed first.
  rows = batch._replace(**dict.fromkeys(batch.whole))
  grads, found = jax.lax.scan(add, zeros, rows)
  return *jax.tree.map(lambda x: x.sum(0), found), grads


def _count(model, params, batch):
  """{path: counts} of a batch (A, B, T), of this shard in a manual region."""

  def one(batch):
    return (), model.features(params, batch)[1].counts, ()

  return _sum_of_microbatches(one, batch, ())[1]


def _with_loads(model, layouts, params, batch, count):
  """Parameters in which experts find the loads of this whole step, if asked.

  model.experts.balance_scope='step' (arXiv:2501.11873, section 3): the share of
  each expert is counted over all microbatches, in a forward pass of its own,
  before gradients are taken. Of one microbatch they count themselves; loads of
  the previous step, which say what experts are hot, are then negative.

  count() -> {path: what this shard, or, annotated, every shard counted}.
  """
  paths = expert_counts.whole_step(model)
  if not paths:
    return params
  if batch.tokens.ndim == 2:
    return params | {p: -params[p] for p in paths}
  found = {p: layouts.counts(p, n) for p, n in count().items()}
  return params | {p: n.astype(params[p].dtype) for p, n in found.items()}


def in_region(
  built, of_shard, params, batch, cotangent=1.0, layouts=PerShard, more=()
):
  """Step.grads with collectives of our own, in one manual region.

  Every shard differentiates the loss of its own tokens (and layers).

  Args:
    built: models.build.Built.
    of_shard: (built, layouts, params, batch, cotangent) -> as Step.grads;
      `of_batch` or `on_stages`.
    params, batch, cotangent: as of Step.grads.
    layouts: class. more: arrays that of_shard takes whole, after the others.
  """
  layouts, model = layouts(built, params), built.model
  loads = expert_counts.paths(model, (expert_counts.LOAD,))
  counts = {p: layouts.own[p] for p in loads}
  return jax.shard_map(
    functools.partial(of_shard, built, layouts),
    in_specs=(layouts.own, batch_specs(batch), *[jax.P()] * (1 + len(more))),
    out_specs=(
      jax.P(),
      expert_counts.without(model, layouts.of_step),
      aux_lib.Aux(jax.P(), jax.P(), counts),
    ),
    check_vma=False,
  )(params, batch, jnp.asarray(cotangent), *more)


def over_tokens(x):
  """The sum over all shards of tokens."""
  axes = annotate.carriers('batch') + annotate.carriers('length')
  return jax.lax.psum(x, axes) if axes else x


def batch_specs(batch):
  """PartitionSpecs of the arrays of a batch, (B, T) or (A, B, T)."""
  each = [None if n is None else annotate.spec(n) for n in batch.axes]
  return type(batch)(*each)


def on_stages(built, layouts, params, batch, cotangent):
  """As `of_batch`, of this shard's tokens and stage, by the schedule."""
  model = built.model
  with annotate.use(pipeline_step.whole_rules(built.rules)):
    whole = {p: annotate.spec(model.axes[p]) for p in params}
  scatter = lambda p, g: _scatter(g, whole[p], layouts.kept[p])
  run = pipeline_step.Pipeline(built, batch, scatter, cotangent)
  schedule = pipeline_step.schedule_of(built, batch)
  on = pipeline_step.rows_with_layers(built)

  def count():
    ends, stack = pipeline_step.ends_and_layers(params)
    with run.context():
      return pipeline.forward(
        schedule, run.calls(), run.gather(ends), stack, on
      )[1].rows

  params = _with_loads(model, layouts, params, batch, count)
  ends, stack = pipeline_step.ends_and_layers(params)
  with run.context():
    ends = run.gather(ends)
    learned = expert_counts.without(model, ends)
    fixed = {p: x for p, x in ends.items() if p not in learned}
    nats, found, of_ends, of_stack = pipeline.gradients(
      schedule, run.calls(fixed), learned, stack, on
    )
  grads = run.scatter(of_ends) | of_stack
  return _of_step(layouts, nats, pipeline_step.aux_of(found), grads)


def total_on_stages(built, params, batch):
  """Sum of nats over the weighted targets of a batch (B, T) on stages."""
  schedule = pipeline_step.evaluation(built.schedule)
  on = pipeline_step.rows_with_layers(built)

  def body(params, batch):
    ends, stack = pipeline_step.ends_and_layers(params)
    run = pipeline_step.Pipeline(built, batch)
    with run.context():
      total, _ = pipeline.forward(
        schedule, run.calls(), run.gather(ends), stack, on
      )
    return over_tokens(total)

  total = jax.shard_map(
    body,
    in_specs=(PerShard(built, params).own, batch_specs(batch)),
    out_specs=jax.P(),
    check_vma=False,
  )(params, batch)
  return total * batch.denominator


def axes_of(spec):
  """PartitionSpec -> a tuple of mesh axes for each dimension."""
  return [a if isinstance(a, tuple) else (a,) if a else () for a in spec]


def _scatter(gradient, before, after):
  """Summed over the axes that `after` has beyond `before`, and laid out so."""
  pairs = zip(axes_of(before), axes_of(after), strict=True)
  for i, (old, new) in enumerate(pairs):
    extra = tuple(a for a in new if a not in old)
    if extra:
      gradient = jax.lax.psum_scatter(
        gradient, extra, scatter_dimension=i, tiled=True
      )
  return gradient


def _all_reduce(gradient, spec):
  """Summed over the mesh axes absent from its layout."""
  held = {a for dim in axes_of(spec) for a in dim}
  left = tuple(a for a in annotate.sizes() if a not in held)
  return jax.lax.psum(gradient, left) if left else gradient


def say_repeated_sums(config, sizes, say):
  """Says so where gradients are summed over shards in every microbatch.

  Annotated products sum where they are made, so within both loops; ZeRO 2
  scatters in every microbatch by choice.

  Args:
    config: schema.Config. sizes: mesh axis -> size. say: prints one line.
  """
  count, mesh = config.train.microbatches, config.mesh
  over = [f'{a}={sizes[a]}' for a in WHOLE if sizes[a] > 1]
  annotated = mesh.collectives == 'annotated' and sizes['stage'] == 1
  once = config.outer.active or config.train.estimator != 'backprop'
  if count == 1 or not over or not annotated or once or mesh.zero >= 2:
    return
  say(
    f'gradients are summed over {", ".join(over)} in each of {count} '
    'microbatches; --config.mesh.collectives=explicit sums them once a step.'
  )
