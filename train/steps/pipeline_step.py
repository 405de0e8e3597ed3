"""The gradient of a step on pipeline stages: a model as a pipeline's calls.

    chunk of layers, gathered over fsdp              Calls.forward, backward
    embedding, over the vocabulary of all stages     Calls.embed
    last norm, head and loss, likewise               Calls.loss

Parameters that fsdp (or ZeRO stage 3) shards are gathered once for a phase,
outside of what is differentiated, so that no whole parameter is kept, and in
the dtype of their products (sharding/tensor/narrow.py); their gradients are
scattered again in the same phase, in their own. Activations are recomputed from
the input of a chunk, or stored from F to B (pipeline.activations), but for what
follows from the parameters alone (sharding/pipeline/residuals.py). With the
weight gradients split off (zero_bubble, v_half), B takes the gradient with
respect to activations and keeps both factors of every product, W multiplies
them (sharding/tensor/tape.py): W sends nothing but what fsdp scatters.
Norms, biases and experts have their gradients in B.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.models import aux as aux_lib
from paraxis.models import wiring
from paraxis.sharding import annotate
from paraxis.sharding.pipeline import executor as pipeline
from paraxis.sharding.pipeline import residuals
from paraxis.sharding.pipeline import schedules
from paraxis.sharding.tensor import narrow
from paraxis.sharding.tensor import tape
from paraxis.train import expert_counts
from paraxis.train import loss as loss_lib

# Parameters are sharded over these beyond what the model computes on.
GATHERED = ('embed', 'expert_embed')


def whole_rules(rules):
  """Rules under which a phase sees parameters: nothing is left to gather."""
  table = {n: axes for n, axes in rules.table.items() if n not in GATHERED}
  return dataclasses.replace(rules, table=table)


def _sinks(values):
  return {p: narrow.sink(v) for p, v in values.items()}


def _with_sinks(values, sinks):
  return {p: narrow.replace(values[p], s) for p, s in sinks.items()}


def evaluation(schedule):
  """The schedule of one microbatch that visits every stage, layers as here."""
  if schedule.name == 'skip':
    return schedules.make('one_f_one_b', schedule.stages, 1)
  first = lambda table: np.where(table[..., :1] == 0, table, -1)
  return dataclasses.replace(
    schedule,
    microbatches=1,
    forward=first(schedule.forward),
    backward=first(schedule.backward),
    weight=None,
    paths=schedule.paths[:1],
  )


def schedule_of(built, batch):
  """The schedule of a batch (A, B, T), or (B, T), of any number A.

  A step may have fewer microbatches than the configuration says: while its
  batch grows (train/data/batch_ramp.py).
  """
  microbatches = batch.tokens.shape[0] if batch.tokens.ndim == 3 else 1
  return schedules.of_size(built.schedule, microbatches)


def _found(aux):
  return pipeline.Found((aux.terms, aux.tallies), aux.counts)


def aux_of(found):
  """aux.Aux of this shard from what the executor added up."""
  terms, tallies = found.totals
  return aux_lib.Aux(terms, tallies, found.rows)


def ends_and_layers(params):
  """({path: parameter} of the ends, of the layers)."""
  layers = {p: x for p, x in params.items() if p.startswith('layers/')}
  return {p: x for p, x in params.items() if p not in layers}, layers


def rows_with_layers(built):
  """(stages, chunks, layers) bool: the rows that hold a layer; None: all."""
  depth = built.model.depth
  return None if depth.even else depth.rows >= 0


class Pipeline:
  """A built model and a batch as pipeline.Calls, in a manual region."""

  def __init__(self, built, batch, scatter=None, cotangent=1.0):
    """batch: (A, B, T), or (B, T), one microbatch. scatter(path, gradient):
    from the layout of `gather` to the one in which sums are kept. cotangent: ()
    of the loss."""
    if batch.tokens.ndim == 2:
      batch = jax.tree.map(lambda x: x[None] if x.ndim else x, batch)
    self.built, self.model, self.batch = built, built.model, batch
    self.rules = whole_rules(built.rules)
    self._axes = self.model.axes
    self._scatter: Any = scatter
    self._cotangent = cotangent
    self._stored = built.pipeline.activations == 'store'
    self._splits_weight_gradients = built.schedule.weight is not None

  def microbatch(self, i):
    """models.batch.Batch (B, T) of microbatch i."""
    pick = lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    whole = self.batch.whole
    rows = jax.tree.map(pick, self.batch._replace(**dict.fromkeys(whole)))
    return rows._replace(**whole)

  def gather(self, tree):
    """Parameters whole over what `GATHERED` is sharded by; narrow, if they may.

    Returns:
      {path: array, or narrow.Narrow where products are in a narrower dtype}.
    """
    out = {}
    for path, x in tree.items():
      axes = self._axes[path]
      whole = tuple(n if n not in GATHERED else None for n in axes)
      with annotate.use(self.built.rules):
        dtype = self._gathered_dtype(path, x.dtype)
        value = annotate.move(x.astype(dtype), axes, whole)
      out[path] = narrow.make(value, x.dtype)
    return out

  def _gathered_dtype(self, path, own):
    """That of products, if it is narrower and they alone read the parameter.

    In a layer project and expert read all that these axes shard, and cast it.
    Hot experts are read before they are multiplied.
    """
    sharded = {n for n in GATHERED if annotate.carriers(n)}
    found = sharded.intersection(self._axes[path])
    hot = self.model.config.experts.hot and 'expert_embed' in found
    if not found or hot or not path.startswith('layers/'):
      return own
    return min(
      own, jnp.dtype(self.model.config.dtype), key=lambda d: d.itemsize
    )

  def embed(self, fixed, ends, i):
    """pipeline.Calls.embed; fixed: the ends that are not learned."""
    x = self.model.embed(fixed | ends, self.microbatch(i))
    return wiring.begin(self.model.config, x)

  def loss(self, fixed, ends, y, i):
    """pipeline.Calls.loss; fixed: as for `embed`."""
    batch, ends = self.microbatch(i), fixed | ends
    y = jax.lax.psum(
      wiring.finish(y), pipeline.AXIS
    )  # of all stages but one it is zero
    found = loss_lib.of_layers(self.model, ends, y, batch) / batch.denominator
    if pipeline.AXIS in annotate.carriers('vocab'):
      return found
    # Every stage has the whole loss, and their gradients are added up.
    part = found / jax.lax.axis_size(pipeline.AXIS)
    return part + jax.lax.stop_gradient(found - part)

  def context_of(self, i):
    """pipeline.Calls.context_of: attention.Visibility."""
    return self.model.visibility(self.microbatch(i))

  def _layers(self, context, mask, values, x, taped=None):
    """A chunk of layers -> ((y, () the sum of its terms), aux.Aux, ...)."""
    kinds = self.model.depth.kinds
    y, aux, *arrays = self.model.run(kinds, values, x, context, mask, taped)
    wide = jnp.promote_types(wiring.read(y).dtype, jnp.float32)
    return (y, aux_lib.total(aux, wide)), aux, *arrays

  def forward(self, rows, x, context, mask):
    """pipeline.Calls.forward; keeps what backward reads, or nothing."""
    values = self.gather(rows)
    if not self._stored:
      (y, _), aux = self._layers(context, mask, values, x)
      return y, _found(aux), ()

    def run(*args):
      y, aux, *read = self._vjp(*args)
      return (y, aux), read

    (y, aux), kept = residuals.keep(run, values, x, context, mask)
    return y, _found(aux), kept

  def _vjp(self, values, x, context, mask):
    """-> (y, aux.Aux, function of cotangents, tape.Tapes without any, or None).

    The function takes the cotangents of y and of the sum of the terms. It gives
    gradients of parameters, that of x, and, if those of products are left to W,
    the cotangents of products.
    """
    learned = expert_counts.without(self.model, values)
    if self._splits_weight_gradients:
      return self._vjp_without_weights(values, learned, x, context, mask)

    def run(sinks, x):
      return self._layers(context, mask, values | _with_sinks(values, sinks), x)

    (y, _), back, aux = jax.vjp(run, _sinks(learned), x, has_aux=True)
    return y, aux, back, None

  def _vjp_without_weights(self, values, learned, x, context, mask):
    """`_vjp` without the gradients of products."""
    frozen = self.model.frozen
    first = tape.Taped(frozen=frozen)
    arrays = lambda: self._layers(context, mask, values, x, first)[2]
    shapes = jax.eval_shape(arrays)
    parts = range(len(shapes))
    records = tuple(tuple(first.static.get(part, ())) for part in parts)
    zeros = {
      part: [
        jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)
        for _, like in found or ()
      ]
      for part, found in enumerate(shapes)
    }
    owners = {owner for part in records for r in part for owner in r.owners}
    owned = {owner[0] for owner in owners if owner}
    rest = {p: v for p, v in learned.items() if p not in owned}

    def run(sinks, x, zeros):
      own = values | _with_sinks(rest, sinks)
      taped = tape.Taped(zeros, self._stored, frozen)
      out, *found = self._layers(context, mask, own, x, taped)
      return out, found

    (y, _), back, (aux, xs) = jax.vjp(run, _sinks(rest), x, zeros, has_aux=True)
    return y, aux, back, tape.Tapes(xs, (), records)

  def backward(self, rows, x, kept, g, context, mask):
    """pipeline.Calls.backward: the chunk again, or what F kept of it."""
    values = self.gather(rows)
    if self._stored:
      back, tapes = kept.again(values)
    else:
      _, _, back, tapes = self._vjp(values, x, context, mask)
    wide = jnp.promote_types(wiring.read(g).dtype, jnp.float32)
    gradients, gx, *gs = back((g, jnp.asarray(self._cotangent, wide)))
    if tapes is None:
      return gx, self.scatter(gradients), ()
    tapes = tapes.gathered() if self._stored else tapes
    tapes = dataclasses.replace(tapes, gs=gs[0])
    return gx, self.scatter(gradients), tapes

  def weights(self, tapes):
    """pipeline.Calls.weights: products of what B kept."""
    return self.scatter(tapes.weight_gradients())

  def scatter(self, gradients):
    """Gradients of what `gather` gives, in the layout of the parameters."""
    return {p: self._scatter(p, g) for p, g in gradients.items()}

  @contextlib.contextmanager
  def context(self):
    """In force while the pipeline is traced, backward passes included.

    Phases see whole parameters. What the ends leave partial over stages, the
    transposed psum of `loss`, and that of `embed`, add up.
    """
    with annotate.use(self.rules), annotate.defer((pipeline.AXIS,)):
      yield

  def calls(self, fixed=()):
    """pipeline.Calls of ends that lack the `fixed` ones, {path: parameter}."""
    embed, loss = (
      functools.partial(call, dict(fixed)) for call in (self.embed, self.loss)
    )
    return pipeline.Calls(
      embed, loss, self.context_of, self.forward, self.backward, self.weights,
      self._cotangent,
    )  # fmt: skip
