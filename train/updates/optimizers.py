"""Update rules of a run: which moves which parameters; schedule; averages.

    direction d_t of a row of train/updates/update_rules.py, decoupled decay:
    p <- p - lr(t) (d_t + weight_decay p)

A rule of matrices (muon, scion, soap, kron) moves the matrices of layers, the
rule that its row names the rest: a stack of layers, and the experts of one, is
a batch of matrices, and (embed, heads, head_dim) is one matrix whose columns
are heads x head_dim. The learning rate is applied here and not inside optax: it
depends on the step of the run alone, and the state holds no second counter for
it; prodigy and schedule_free alone need theirs within.

With ema_decay d the state has an average of what is learned, in which the start
has no weight (arXiv:1412.6980, section 3); no step reads it. After update t:

    e_t = sum_i d^(t-i) p_i / sum_i d^(t-i),  i = 1..t;  e_0 = p_0
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paraxis.configs.base import errors
from paraxis.models import trained
from paraxis.sharding import annotate
from paraxis.sharding import rules as rules_lib
from paraxis.train import expert_counts
from paraxis.train.updates import matrices
from paraxis.train.updates import update_rules


def schedule(config, steps):
  """-> f(step) in [0, 1], step counted from 0: share of the peak rate."""
  warmup, end = config.warmup_steps, config.final_fraction
  rise = optax.linear_schedule(0.0, 1.0, max(warmup, 1))
  if config.schedule == 'constant':
    return lambda step: rise(step + 1)
  if config.schedule == 'cosine':
    length = max(steps - warmup, 1)
    fall = optax.cosine_decay_schedule(1.0, length, end)
    start = warmup
  else:  # wsd of arXiv:2404.06395: warm-up, stable, decay, here linear
    start = max(steps - config.decay_steps, warmup)
    fall = optax.linear_schedule(1.0, end, max(steps - start, 1))
  return lambda step: jnp.where(
    step + 1 <= start, rise(step + 1), fall(step + 1 - start)
  )


def check(config, sizes):
  """UserError if a layout or a ramp cannot serve a schema.Config's rule.

  sizes: {mesh axis: size}.
  """
  c = config.optimizer
  if config.outer.active and update_rules.RULES[c.name].reads != 'element':
    raise errors.UserError(
      f'outer.exchange={config.outer.exchange} with {sizes["replica"]} '
      f'replicas, and optimizer.name={c.name}: its update reads whole matrices '
      'or all parameters, and in the region of one replica it would be given '
      'shards; take adamw.'
    )
  if c.name == 'sophia' and config.train.batch_ramp:
    raise errors.UserError(
      f'train.batch_ramp={config.train.batch_ramp!r} with optimizer.name='
      'sophia: its Hessian is the squared gradient times the tokens of a step, '
      "which a ramp changes; take train.batch_ramp='' or adamw."
    )
  if c.name == 'schedule_free':
    for wrong, field, value, take in (
      (c.schedule != 'constant', 'schedule', c.schedule, 'constant'),
      (c.b1 == 0, 'b1', c.b1, '0.9'),
    ):
      if wrong:
        raise errors.UserError(
          f'optimizer.{field}={value}: schedule_free averages parameters in '
          f'place of a schedule; take optimizer.{field}={take}.'
        )
    if config.mesh.zero and sizes.get('data', 1) > 1:
      raise errors.UserError(
        f'mesh.zero={config.mesh.zero} with optimizer.name=schedule_free: '
        'gradients are taken at parameters that its state holds, which ZeRO '
        f'would shard over data={sizes["data"]}; take mesh.zero=0.'
      )


class Optimizer:
  """Update rules for the parameters of one model.

  Attributes:
    groups: {rule: the paths that it moves}; a rule of none is left out.
  """

  def __init__(self, config, steps, model, tokens=1):
    """config: schema.Optimizer; steps: of the run; model: models.Decoder;
    tokens: of a step, whose mean a gradient is."""
    self.config, self.model = config, model
    self._steps, self._tokens = steps, tokens
    self._share = schedule(config, steps)
    rule = update_rules.RULES[config.name]
    self.groups: dict[str, list[str]] = {}
    for path, kind in expert_counts.without(model, model.kinds).items():
      name = config.name if kind in rule.kinds else rule.rest
      self.groups.setdefault(name, []).append(path)

  def _dims(self, path):
    axes = self.model.axes[path]
    # Layers, and the experts of one, are a batch of matrices.
    batch = sum(name in ('layers', 'experts') for name in axes[:2])
    return matrices.Dims(batch, self.model.inputs[path])

  def _group(self, name, step):
    """update_rules.Group of a rule's parameters, at a step or before all."""
    paths, kinds, axes = self.groups[name], self.model.kinds, self.model.axes
    dims = {p: self._dims(p) for p in paths}
    decayed = {p: kinds[p] != 'vector' for p in paths}
    # A rule's own count passes over steps that were skipped.
    share = self._share if step is None else lambda _: self._share(step)
    return update_rules.Group(
      self.config,
      share,
      dims,
      axes,
      decayed,
      self._steps,
      self._tokens,
      self.model.held,
    )

  def _rule(self, name, step=None):
    """optax.GradientTransformation of a rule's parameters, decay included."""
    group, rule = self._group(name, step), update_rules.RULES[name]
    if rule.scaled:
      return rule.make(group)
    decay = optax.add_decayed_weights(self.config.weight_decay, group.decayed)
    return optax.chain(rule.make(group), decay)

  def axes(self, params):
    """{canonical path: logical axes} of the leaves of its state that are not
    laid out as a parameter (train/state.py); params: {path: array}."""
    out = {}
    for name, paths in self.groups.items():
      of = update_rules.RULES[name].axes
      found = of(self._group(name, None), {p: params[p] for p in paths})
      out |= {f'optimizer/{name}/{leaf}': axes for leaf, axes in found.items()}
    return out

  def _stored(self, tree):
    """{path: array} laid out as the optimizer state is (ZeRO stage 1)."""
    axes, stage = self.model.axes, rules_lib.OPTIMIZER
    return {p: annotate.stored(x, axes[p], stage) for p, x in tree.items()}

  def init(self, params):
    """Optimizer state: {rule: optax state}, with trained.EMA if asked."""
    params = self._stored(expert_counts.without(self.model, params))
    state = {
      name: self._rule(name).init({p: params[p] for p in paths})
      for name, paths in self.groups.items()
    }
    if self.config.ema_decay:  # copies: an update donates both
      state[trained.EMA] = {p: jnp.copy(x) for p, x in params.items()}
    return state

  def _averaged(self, state, params, count):
    """The averages after update `count`, () int32 >= 1, which gave `params`."""
    d = self.config.ema_decay
    # Of the newest parameters; 1 - d^t would cancel.
    weight = (1 - d) / -jnp.expm1(jnp.asarray(count, float) * math.log(d))
    step = lambda e, p: e + weight.astype(e.dtype) * (p - e)
    return {path: step(e, params[path]) for path, e in state.items()}

  def rates(self, step):
    """{rule: learning rate} at a step counted from 0."""
    c, share, table = self.config, self._share(step), update_rules.RULES
    peak = lambda r: c.matrix_learning_rate if r.matrix else c.learning_rate
    return {name: share * peak(table[name]) for name in self.groups}

  def update(self, grads, state, params, step, skipped=0):
    """-> (params, state) after one step with (clipped) gradients.

    step: counted from 0. skipped: how many before it changed nothing.
    Parameters without a gradient stay as they are.
    Each shard updates what it holds state for; new parameters are gathered.
    """
    new_params, new_state = {}, {}
    own, params = params, self._stored({p: params[p] for p in grads})
    grads = self._stored(grads)
    for name, rate in self.rates(step).items():
      rule, paths = update_rules.RULES[name], self.groups[name]
      pick = lambda tree, paths=paths: {p: tree[p] for p in paths}
      update: Any = lambda step, *given, name=name: self._rule(
        name, step
      ).update(*given)
      if rule.reads != 'element' and not rule.matrix:
        update = _auto_island(update)
      with jax.named_scope(name):
        direction, new_state[name] = update(
          step, pick(grads), state[name], pick(params)
        )
      for p, d in direction.items():
        scale = 1 if rule.scaled else rate.astype(d.dtype)
        new_params[p] = params[p] - scale * d
    if averages := state.get(trained.EMA):
      count = step - skipped + 1
      with jax.named_scope('ema'):
        new_state[trained.EMA] = self._averaged(averages, new_params, count)
    axes = self.model.axes
    put = lambda p: annotate.put(new_params[p], axes[p])
    return own | {p: put(p) for p in new_params}, new_state


def _auto_island(update):
  """An update with reductions over what is sharded, which Explicit rejects.

  Inside, XLA chooses layouts; the results come back as the inputs were.
  """

  def run(step, grads, state, params):
    if annotate.mode() != 'explicit' or not annotate.sizes():
      return update(step, grads, state, params)
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (grads, state))
    island: Any = jax.sharding.auto_axes(update, out_sharding=specs)
    return island(step, grads, state, params)

  return run
