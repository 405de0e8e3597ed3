"""Steps without a gradient: two losses along a random direction, and its seed.

    z     normal, one for every learned number, from (seed, batch, leaf, layer)
    slope = (L(p + e z) - L(p - e z)) / 2e
    p <- p - rate (slope z + decay p)    slope clipped; e: train.perturbation

MeZO (arXiv:2305.17333, algorithm 1). No array as large as the parameters is
kept beside them: z is drawn again wherever it is needed, a layer at a time in
the two forward passes (`Moved`), in place in the update. All that a step adds
to a run are two numbers, `slope` and `draw`, which metrics.jsonl has of every
step (train.log_every=1): from the first parameters and that log the update
makes every later state again, bitwise, but counts of experts, which it lacks.

The mesh axis `replica` is the pair of DistZO2 (arXiv:2507.03211): with
replica=2 the first half of the devices computes L(p + e z) while the second
computes L(p - e z), on the same rows, which only data and fsdp share out. It is
the outermost axis, so that all of a forward pass stays within a half. What
crosses it is one number, and one crosses the axes of tokens. Evaluation has no
two sides: both halves compute it. With replica=1 the sides take turns.

The slope's mean square is the squared norm of the gradient, so that clip_norm
bounds it as it does a gradient. A number of z costs a block of Threefry
(Salmon et al., SC 2011: 20 rounds of 5 operations): a step is two forward
passes and three draws, one of them in the update.
"""

import copy
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import aux as aux_lib
from paraxis.sharding import annotate
from paraxis.train import expert_counts
from paraxis.train.steps import gradients as gradients_lib
from paraxis.train.steps import replicas

NAME = 'zeroth_order'  # of train.estimator
TWINS = 'twins'  # logical axis of the two sides
SIGNS = (1.0, -1.0)
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def layout(config, sizes):
  """What build.build changes of the rules for a schema.Config, or None.

  sizes: mesh axis -> size.
  """
  if config.train.estimator != NAME or sizes.get(replicas.AXIS, 1) == 1:
    return None

  def change(rules):
    rows = tuple(a for a in rules.axes('batch') if a != replicas.AXIS)
    table = rules.table | {'batch': rows, TWINS: (replicas.AXIS,)}
    return dataclasses.replace(rules, table=table)

  return change


def check(config, built):
  """UserError if a schema.Config cannot be trained so."""
  if config.train.estimator != NAME:
    return
  n, what = built.mesh.shape[replicas.AXIS], f'train.estimator={NAME}'
  for wrong, text in (
    (
      n > 2,
      f'mesh.replica={n}: a direction has two sides, one for each half of the '
      'devices; take replica=1 or 2, and data for more rows',
    ),
    (
      config.outer.active,
      f'outer.exchange={config.outer.exchange}: replicas that step alone would '
      'each need both sides; take exchange=none',
    ),
    (
      built.schedule is not None,
      f'mesh.stage={built.mesh.shape["stage"]}: a pipeline holds its layers in '
      'an order of its own, and directions are drawn in theirs; take stage=1',
    ),
    (
      config.optimizer.name != 'adamw',
      f'optimizer.name={config.optimizer.name}: there is no gradient for it to '
      'act on, a step goes along its direction; leave the name out',
    ),
    (
      config.optimizer.ema_decay > 0,
      f'optimizer.ema_decay={config.optimizer.ema_decay}: nothing as large as '
      'the parameters is kept beside them; take 0',
    ),
  ):
    if wrong:
      raise errors.UserError(f'{what} and {text}.')


def bits(keys, index):
  """uint32 of Threefry-2x32 with keys (..., 2) at counters (0, index).

  keys[..., 0] broadcasts against `index`. As jax.random.bits gives it, of a key
  and its flat index, but on any slice of the whole.
  """
  a, b = keys[..., 0], keys[..., 1]
  schedule = a, b, a ^ b ^ jnp.uint32(0x1BD11BDA)
  x, y = schedule[0], index + schedule[1]
  for turn in range(5):
    for r in _ROTATIONS[turn % 2]:
      x = x + y
      y = ((y << r) | (y >> (32 - r))) ^ x
    x = x + schedule[(turn + 1) % 3]
    y = y + schedule[(turn + 2) % 3] + jnp.uint32(turn + 1)
  return x ^ y


def _counters(shape, names, order):
  """uint32 of `shape`: flat index in the whole array of what is held of it.

  names: logical axes. order: (dimension, expert of each of its slots), or None.
  """
  manual = annotate.mode() == 'manual'
  index = jnp.zeros(shape, jnp.uint32)
  for d, (n, name) in enumerate(zip(shape, names, strict=True)):
    along, parts = jnp.arange(n, dtype=jnp.uint32), 1
    if manual and (axes := annotate.carriers(name)):
      parts = math.prod(map(jax.lax.axis_size, axes))
      along = along + jnp.uint32(jax.lax.axis_index(axes) * n)
    if order and order[0] == d:  # the rest of the dimension is in order
      rest = range(len(order[1]), n * parts)
      along = jnp.array([*order[1], *rest], jnp.uint32)[along]
    along = jax.lax.broadcast_in_dim(along, shape, (d,))
    index = index * jnp.uint32(n * parts) + along
  return annotate.put(index, names)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=('value', 'keys', 'length'),
  meta_fields=('names', 'order'),
)
@dataclasses.dataclass(frozen=True)
class Moved:
  """value + length z, drawn when it is read; layers are read one by one.

  value, keys, length: (L, ...), (L, 2), (L,) of a stack, whose index is that of
  a layer; of others (...), (2,), (). Or lists of them, for each layer.
  names, order: as for `_counters`, of one layer.
  """

  value: Any
  keys: Any
  length: Any
  names: tuple
  order: tuple | None = None

  def __getitem__(self, index):
    if index is not Ellipsis:
      value, keys, length = (
        x[index] for x in (self.value, self.keys, self.length)
      )
      found = Moved(value, keys, length, self.names, self.order)
      return found if isinstance(index, slice) else found[...]
    wide = jnp.promote_types(self.value.dtype, jnp.float32)
    shape, stacked = self.value.shape, self.length.ndim
    index = _counters(shape[stacked:], self.names, self.order)  # of a layer
    one = (1,) * (len(shape) - stacked)
    keys = self.keys.reshape(*shape[:stacked], *one, 2)
    # 23 bits in (-1, 1), never at its ends.
    half = (bits(keys, index) >> 9).astype(wide) + 0.5
    z = 2**0.5 * jax.lax.erf_inv(half * 2.0**-22 - 1)
    length = self.length.reshape(*shape[:stacked], *one).astype(wide)
    return self.value + (length * z).astype(self.value.dtype)

  def __len__(self):
    return len(self.value)


def moved(model, params, draw, length):
  """{path: `Moved`}: learned parameters, by `length` times their direction.

  Args:
    model: models.decoder.Decoder. params: {path: array}; what is not learned
      is left as it is. draw: () int32, the key of the step.
  """
  key = jax.random.key(draw, impl='threefry2x32')
  learned, out = expert_counts.without(model, params), dict(params)
  for leaf, path in enumerate(sorted(learned)):
    x, names = params[path], model.axes[path]
    keys, far = jax.random.fold_in(key, leaf), jnp.asarray(length)
    order = model.held[path].experts if path in model.held else None
    if path in model.held:  # a stack
      fold = jax.vmap(jax.random.fold_in, (None, 0))
      keys = fold(keys, jnp.arange(len(x)))
      far = jnp.broadcast_to(far, (len(x),))
      order = order and (order[0] - 1, tuple(order[1]))
      names = names[1:]
    out[path] = Moved(x, jax.random.key_data(keys), far, names, order)
  return out


def gradients(built, epsilon, params, batch, cotangent=1.0):
  """Step.grads: (loss, {'slope': ()}, aux.Aux with the tally 'draw').

  The loss, and what layers report of it, is the mean of both sides.

  Args:
    built: models.build.Built. epsilon: distance of a side, in directions.
    params, batch, cotangent: as of Step.grads.
  """
  losses, aux = _sides(built, epsilon, params, batch)
  slope = cotangent * (losses[0] - losses[1]) / (2 * epsilon)
  loss, mean = losses.mean(), jax.tree.map(lambda x: x.mean(0), aux)
  if len(aux.terms) == 1:  # nats alone: no second message says them
    mean = mean._replace(terms={'nats': loss})
  mean = mean._replace(tallies=mean.tallies | dict(draw=batch.draw))
  return loss, dict(slope=slope), mean


def _sides(built, epsilon, params, batch):
  """(losses (2,), aux.Aux of (2, ...)) of both sides."""

  def side(layouts, sign, params, batch):
    there = moved(built.model, params, batch.draw, sign * epsilon)
    return gradients_lib.value(built, layouts, there, batch)

  def turns(layouts, params, batch):
    one = lambda sign: side(layouts, sign, params, batch)
    return jax.lax.map(one, jnp.array(SIGNS))

  explicit = built.choices.collectives == 'explicit'
  twins = built.mesh.shape[replicas.AXIS] > 1
  if built.mesh.size == 1 or not (explicit or twins):
    return turns(gradients_lib.Annotated(built.model), params, batch)
  with annotate.hide(replicas.AXIS):
    layouts = gradients_lib.PerShard(built, params)
    rows = gradients_lib.batch_specs(batch)

  def body(params, batch):
    if not twins:
      return turns(layouts, params, batch)
    sign = 1.0 - 2.0 * jax.lax.axis_index(replicas.AXIS)
    return replicas.many(side(layouts, sign, params, batch))

  lead = replicas.lead if twins else lambda spec: jax.P(None, *spec)
  loads = expert_counts.paths(built.model, (expert_counts.LOAD,))
  counts = {p: lead(layouts.own[p]) for p in loads}
  aux = aux_lib.Aux(lead(()), lead(()), counts)
  run = replicas.region(body, (layouts.own, rows), (lead(()), aux))
  losses, aux = run(params, batch)
  return jax.reshard(losses, jax.P()), aux


class Descent:
  """Goes along directions; as optimizers.Optimizer, without a state.

  Attributes:
    epsilon: train.perturbation.
  """

  def __init__(self, config, share, model):
    """config: schema.Config; share: of the peak rate, by step
    (optimizers.schedule); model: models.Decoder."""
    self.model, self.epsilon = model, config.train.perturbation
    self._config = config.optimizer
    self._share = share
    self._draw: Any = None

  def axes(self, params):
    """Of no leaf."""
    del params
    return {}

  def init(self, params):
    """Nothing."""
    del params
    return {}

  def rates(self, step):
    """{'descent': learning rate} at a step counted from 0."""
    return {'descent': self._share(step) * self._config.learning_rate}

  def squares(self, params, grads):
    """(n,) of each leaf its share of slope^2, by path: that of its size."""
    sizes = self.model.sizes(expert_counts.without(self.model, params))
    total = sum(sizes.values())
    shares = jnp.array([sizes[p] / total for p in sorted(sizes)])
    return jnp.square(grads['slope']) * shares

  def along(self, draw):
    """The same, of the direction whose key is () int32 `draw`."""
    found = copy.copy(self)
    found._draw = draw
    return found

  def update(self, grads, state, params, step, skipped=0):
    """-> (params, state) after a step; grads: as of `gradients`, clipped."""
    del skipped
    rate, kinds = self.rates(step)['descent'], self.model.kinds
    far = -rate * grads['slope']
    there = moved(self.model, params, self._draw, far)
    for path in expert_counts.without(self.model, params):
      x = there[path][...]
      if self._config.weight_decay and kinds[path] != 'vector':
        shrunk = rate * self._config.weight_decay
        x = x - (shrunk * params[path]).astype(x.dtype)
      there[path] = annotate.put(x, self.model.axes[path])
    return there, state


def logged(slope, draw, loss):
  """(loss, gradient, aux.Aux) of a step, from its row of metrics.jsonl."""
  loss, slope = jnp.asarray(loss), jnp.asarray(slope)
  aux = aux_lib.of_loss(loss)._replace(tallies=dict(draw=jnp.int32(draw)))
  return loss, dict(slope=slope), aux


def replayed(update, state, log):
  """The State after some steps, made again from what was logged of them.

  Args:
    update: Step.update. state: before the first of them.
    log: (slope, draw, loss) of each step, none left out; of one that was
      skipped NaN or None.
  """
  run = jax.jit(update, donate_argnums=0)
  number = lambda x: math.nan if x is None else x
  for slope, draw, loss in log:
    state, _ = run(state, *logged(number(slope), draw, number(loss)))
  return state
