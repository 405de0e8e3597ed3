"""AdamW, or Muon on the matrices with AdamW on the rest; schedule; clipping.

    direction d_t from optax, with decoupled decay:  p <- p - lr(t) (d_t + wd p)

AdamW: arXiv:1711.05101. Muon (optax.contrib): the momentum of a matrix is
orthogonalised by Newton-Schulz steps and scaled by sqrt(max(1, out / in)); a
stack of layers is a batch of matrices, and (embed, heads, head_dim) is one
matrix whose columns are heads x head_dim. The learning rate is applied here
and not inside optax: it depends on the step of the run alone, and the state
holds no second counter for it.

With ema_decay d the state has an average of what is learned, in which the start
has no weight (arXiv:1412.6980, section 3); no step reads it. After update t:

    e_t = sum_i d^(t-i) p_i / sum_i d^(t-i),  i = 1..t;  e_0 = p_0
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from paraxis.models import trained
from paraxis.sharding import annotate
from paraxis.sharding import rules as rules_lib
from paraxis.train import expert_counts


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
  else:  # wsd: warm-up, stable, linear decay (arXiv:2404.06395)
    start = max(steps - config.decay_steps, warmup)
    fall = optax.linear_schedule(1.0, end, max(steps - start, 1))
  return lambda step: jnp.where(
    step + 1 <= start, rise(step + 1), fall(step + 1 - start)
  )


class Optimizer:
  """Update rules for the parameters of one model.

  Attributes:
    groups: 'adamw' and 'muon' -> the paths that each updates.
    axes: {canonical path: logical axes} of the leaves of its state that are not
      laid out as a parameter (train/state.py).
  """

  def __init__(self, config, steps, model):
    """config: schema.Optimizer; steps: of the run; model: models.Decoder."""
    self.config, self.model = config, model
    self._share = schedule(config, steps)
    rest = expert_counts.without(model, model.kinds)
    muon = [
      p
      for p, kind in rest.items()
      if kind == 'matrix' and config.name == 'muon'
    ]
    self.groups = {
      'adamw': [p for p in rest if p not in muon],
      'muon': muon,
    }
    self.axes = {'optimizer/muon/ns_coeffs': (None,)} if muon else {}

  def _dimensions(self, path):
    axes = self.model.axes[path]
    # Layers, and the experts of one, are a batch of matrices.
    first = sum(name in ('layers', 'experts') for name in axes[:2])
    middle = first + self.model.inputs[path]
    return contrib.MuonDimensionNumbers(
      tuple(range(first, middle)), tuple(range(middle, len(axes)))
    )

  def _rule(self, group):
    c = self.config
    paths = self.groups[group]
    decayed = {p: self.model.kinds[p] != 'vector' for p in paths}
    decay = optax.add_decayed_weights(c.weight_decay, decayed)
    if group == 'adamw':
      return optax.chain(optax.scale_by_adam(c.b1, c.b2, c.epsilon), decay)
    dims = {p: self._dimensions(p) for p in paths}

    def scaled(updates: Any, _):
      return {p: u * _aspect(u.shape, dims[p]) for p, u in updates.items()}

    return optax.chain(
      contrib.scale_by_muon(
        beta=c.muon_momentum, weight_dimension_numbers=dims
      ),
      optax.stateless(scaled),
      decay,
    )

  def _stored(self, tree):
    """{path: array} laid out as the optimizer state is (ZeRO stage 1)."""
    axes, stage = self.model.axes, rules_lib.OPTIMIZER
    return {p: annotate.stored(x, axes[p], stage) for p, x in tree.items()}

  def init(self, params):
    """Optimizer state: {group: optax state}, with trained.EMA if asked."""
    params = self._stored(expert_counts.without(self.model, params))
    state = {
      g: self._rule(g).init({p: params[p] for p in paths})
      for g, paths in self.groups.items()
      if paths
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
    """{group: learning rate} at a step counted from 0."""
    share = self._share(step)
    peaks = dict(
      adamw=self.config.learning_rate, muon=self.config.muon_learning_rate
    )
    return {g: share * peaks[g] for g, paths in self.groups.items() if paths}

  def update(self, grads, state, params, step, skipped=0):
    """-> (params, state) after one step with (clipped) gradients.

    step: counted from 0. skipped: how many before it changed nothing.
    Parameters without a gradient stay as they are.
    Each shard updates what it holds state for; new parameters are gathered.
    """
    new_params, new_state = {}, {}
    own, params = params, self._stored({p: params[p] for p in grads})
    grads = self._stored(grads)
    for group, rate in self.rates(step).items():
      paths = self.groups[group]
      pick = lambda tree, paths=paths: {p: tree[p] for p in paths}
      rule: Any = self._rule(group).update
      if group == 'muon':
        rule = _auto_island(rule)
      with jax.named_scope(group):
        direction, new_state[group] = rule(
          pick(grads), state[group], pick(params)
        )
      for p, d in direction.items():
        new_params[p] = params[p] - rate.astype(d.dtype) * d
    if averages := state.get(trained.EMA):
      count = step - skipped + 1
      with jax.named_scope('ema'):
        new_state[trained.EMA] = self._averaged(averages, new_params, count)
    axes = self.model.axes
    put = lambda p: annotate.put(new_params[p], axes[p])
    return own | {p: put(p) for p in new_params}, new_state


def _aspect(shape, dims):
  """sqrt(max(1, out / in)): the update's size is then free of the width."""
  fan_in = math.prod(shape[i] for i in dims.reduction_axis)
  fan_out = math.prod(shape[i] for i in dims.output_axis)
  return max(1.0, fan_out / fan_in) ** 0.5


def _auto_island(update):
  """optax.contrib.muon's reshapes and matmuls, where Explicit rejects them.

  Inside, XLA chooses layouts; the results come back as the inputs were.
  """

  def run(grads, state, params):
    if annotate.mode() != 'explicit' or not annotate.sizes():
      return update(grads, state, params)
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (grads, state))
    island: Any = jax.sharding.auto_axes(update, out_sharding=specs)
    return island(grads, state, params)

  return run
