"""Where the anchor of replicas lies, and what a model reads of it.

With outer.exchange=mean, anchor, momentum and what is under way are sharded
over all devices of a replica that hold the same numbers: it is ZeRO
(arXiv:1910.02054) for the state of an outer loop. A device cuts its part from
the replica's parameters, moves its part of the anchor, and gathers the new one.
So what crosses replicas, on the slower network, is sent once by a replica and
not by each of its devices.

Where a sum lands when it is sent (neither delay nor codec) they are sharded
over replicas too: a device receives a shard of the mean (reduce-scatter), and
gathers over replicas first. (XLA for TPUs makes all-reduces of small
reduce-scatters: compiled for v5e, v5p and v6e 0 to 6% more bytes of 230 MB to
1 GB of parameters a device, 40% of 3 to 70 MB.) With a delay or codes each
replica holds all of them, so that landing sends nothing over replicas. An axis
that divides no dimension is left out; that of replicas, all of them.

What is evaluated and decoded is the whole anchor, gathered for that time.
Checkpoints are of its shards, and read onto any number of replicas.
"""

import math

import jax
import jax.numpy as jnp

from paraxis.sharding import annotate
from paraxis.train.steps import gradients as gradients_lib
from paraxis.train.steps import replicas


def sharded(x, first=0, over=True):
  """An array of one replica, which all have, laid out as an anchor.

  Each mesh axis that it is not on is put on the first dimension that it
  divides; if that of replicas divides none, the array stays as it is.

  first: the dimension to begin with. over: over replicas too.
  """
  sizes = annotate.sizes()
  if replicas.AXIS not in sizes:
    return x
  held = gradients_lib.axes_of(jax.typeof(x).sharding.spec)
  taken = {a for axes in held for a in axes} | {replicas.AXIS}
  axes = [a for a in sizes if a not in taken]
  for axis in axes + [replicas.AXIS] * over:
    parts = [sizes[axis] * math.prod(sizes.get(a, 1) for a in h) for h in held]
    fits = [i for i in range(first, x.ndim) if x.shape[i] % parts[i] == 0]
    if fits:
      held[fits[0]] = (*held[fits[0]], axis)
    elif axis == replicas.AXIS:
      return x
  return jax.reshard(x, jax.P(*(axes or None for axes in held)))


def cuts(state):
  """{path: ((mesh axis, dimension), ...)}: how each anchor is cut beside a
  replica's parameter, replicas last; (): it is whole in each replica."""
  out, one = {}, of_one(state.outer.params)
  for path, spec in specs(state.params).items():
    pairs = zip(*map(gradients_lib.axes_of, (one[path], spec)), strict=True)
    more = [(a, i) for i, (x, y) in enumerate(pairs) for a in y[len(x) :]]
    out[path] = tuple(sorted(more, key=lambda cut: cut[0] == replicas.AXIS))
  return out


def own(x, cut):
  """This device's part of what a replica has, in a region."""
  for axis, i in cut:
    x = x if axis == replicas.AXIS else annotate.own(x, (axis,), i)
  return x


def mean_shard(x, cut):
  """This device's shard of an array's mean over replicas, in a region.

  In float32 at least: what is subtracted from the anchor after it is summed,
  and not before, would lose the digits of a small gap.
  """
  axis, last = cut[-1]
  x = own(x, cut).astype(jnp.promote_types(x.dtype, jnp.float32))
  x = jax.lax.psum_scatter(x, axis, scatter_dimension=last, tiled=True)
  return x / jax.lax.axis_size(axis)


def whole(x, cut):
  """All that a replica has of an anchor, of its parts, in a region."""
  for axis, i in reversed(cut):
    x = jax.lax.all_gather(x, axis, axis=i, tiled=True)
  return x


def specs(tree):
  """PartitionSpecs of a tree of arrays."""
  return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


def of_one(params):
  """{path: PartitionSpec} of a replica's, of {path: (R, ...)}."""
  return {p: jax.P(*s[1:]) for p, s in specs(params).items()}


def _mean(params):
  """{path: (R, ...)} -> their mean."""
  body = lambda tree: jax.lax.pmean(replicas.one(tree), replicas.AXIS)
  return replicas.region(body, (specs(params),), of_one(params))(params)


def settled(state):
  """State whose params are the mean of the anchors, where each replica has its
  own: what is saved and evaluated. Else the state itself."""
  if not state.replicas or not state.outer.each:
    return state
  found = jax.jit(_mean)(state.outer.each['anchor'])
  return state._replace(params=state.params | found)


def variables(state):
  """{path: array}, of a `settled` State: all that a model reads, laid out as
  one replica's."""
  if not state.replicas:
    return state.variables
  out = of_one(state.outer.params)
  # Not under a jit of its own, which each evaluation would compile anew.
  put = lambda p, x: annotate.alone(jax.reshard(x, out[p]))
  gathered = {p: put(p, x) for p, x in state.params.items()}
  return gathered | state.counts


def with_mean(found, state, evaluator):
  """An evaluate.Evaluation of the anchor, with that of the replicas' mean;
  None: that one was cut off.

  Args:
    found: the Evaluation. state: State. evaluator: evaluate.Evaluator.
  """
  params = state.outer.params
  spread = float(jax.jit(_spread)(params))
  mean = evaluator(jax.jit(_mean)(params))
  return mean and found._replace(mean=mean, spread=spread)


def _spread(params):
  """() root of the mean square distance of replicas from their mean, over its
  length."""
  one = of_one(params)

  def body(params):
    own = replicas.one(params)
    middle = jax.lax.pmean(own, replicas.AXIS)
    squares = lambda tree: replicas.squares(one, tree).sum()
    away = squares(jax.tree.map(jnp.subtract, own, middle))
    away = jax.lax.pmean(away, replicas.AXIS)
    return jnp.sqrt(away / squares(middle))

  return replicas.region(body, (specs(params),), jax.P())(params)
