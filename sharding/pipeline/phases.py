"""Phases of a tick, each traced once: F, B, W, and both ends of the model.

A phase is needed three times: for the shapes of the buffers, for the zeros of a
tick that leaves it out, and where it runs. Tracing a layer takes as long as
compiling it does; a traced phase is repeated as it stands instead.
"""

import functools

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from paraxis.sharding.pipeline import uniform

INDEX = jax.ShapeDtypeStruct((), np.int32)  # of a microbatch, or a chunk


class Phase:
  """A function of arrays, traced here.

  Attributes:
    jaxpr: ClosedJaxpr. shapes: of its results.
  """

  def __init__(self, function, *args):
    """args: arrays or their shapes; the function may close over others."""
    self.jaxpr, self.shapes = jax.make_jaxpr(function, return_shape=True)(*args)

  def __call__(self, *args):
    leaves = core.jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(self.shapes), leaves)

  def zeros(self):
    """Zeros like its results."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.shapes)


class Phases:
  """Phases of a model on the parameters of this device, traced on first use.

  A phase that reads the results of another is traced with their shapes.

  Attributes:
    embed(i) -> x. forward(chunk, x, layer_context) -> (y, found, kept).
    loss(y, i) -> (loss, gradients of the ends, cotangent of y).
    only_loss(y, i) -> loss.
    backward(chunk, x, kept, g, layer_context) -> (gx, gradients, tapes).
    weights(tapes) -> gradients.
    embed_back(g, i) -> gradients of the ends.
  """

  def __init__(self, calls, ends, rows):
    """calls: executor.Calls. ends: as for executor.gradients.

    rows(chunk) -> (its rows of the parameters, layer_mask), as Calls takes it.
    """
    self._calls, self._ends, self._rows = calls, ends, rows

  @functools.cached_property
  def embed(self):
    return Phase(lambda i: self._calls.embed(self._ends, i), INDEX)

  @functools.cached_property
  def _context(self):
    return jax.eval_shape(self._calls.context_of, INDEX)

  @functools.cached_property
  def forward(self):
    def run(chunk, x, context):
      rows, mask = self._rows(chunk)
      return self._calls.forward(rows, x, context, mask)

    phase = Phase(run, INDEX, self.embed.shapes, self._context)
    uniform.check(phase.jaxpr, what='a layer in a pipeline stage')
    return phase

  @functools.cached_property
  def loss(self):
    def run(y, i):
      of = lambda ends, y: self._calls.loss(ends, y, i)
      loss, back = jax.vjp(of, self._ends, y)
      return loss, *back(jnp.asarray(self._calls.cotangent, loss.dtype))

    return Phase(run, self.embed.shapes, INDEX)

  @functools.cached_property
  def only_loss(self):
    run = lambda y, i: self._calls.loss(self._ends, y, i)
    return Phase(run, self.embed.shapes, INDEX)

  @functools.cached_property
  def backward(self):
    def run(chunk, x, kept, g, context):
      rows, mask = self._rows(chunk)
      return self._calls.backward(rows, x, kept, g, context, mask)

    x, _, kept = self.forward.shapes
    return Phase(run, INDEX, x, kept, x, self._context)

  @functools.cached_property
  def weights(self):
    return Phase(self._calls.weights, self.backward.shapes[2])

  @functools.cached_property
  def embed_back(self):
    def run(g, i):
      of = lambda ends: self._calls.embed(ends, i)
      return jax.vjp(of, self._ends)[1](g)[0]

    return Phase(run, self.embed.shapes, INDEX)
