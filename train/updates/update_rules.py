"""Every update rule, as a row of one table.

A rule gives a direction d of some parameters from their gradients, and
optimizers.py applies p <- p - lr(t) (d + weight_decay p). From optax, or ours:

    adamw          arXiv:1711.05101    nadamw      Nesterov's moment (Dozat)
    adafactor      adafactor.py        lion        arXiv:2302.06675
    sophia         arXiv:2305.14342    ademamix    arXiv:2409.03137
    schedule_free  arXiv:2405.15682    prodigy     arXiv:2306.06101
    mars           arXiv:2411.10438: Adam of c = g + gamma b1 / (1 - b1)
                   (g - g_before), each matrix of it at most 1 long
    muon           Newton-Schulz steps on the momentum, sqrt(max(1, N / M))
    scion          arXiv:2502.07529: the same without Nesterov's step, times
                   sqrt(N / M); signs of the average elsewhere. Its constrained
                   form is weight decay: a radius is 1 / weight_decay, of
                   matrices and embeddings (norms and biases do not decay)
    soap           soap.py       kron        kron.py

Two are not the paper's: sophia's diagonal of the Hessian, tokens times the
squared gradient of a step (algorithm 2), is of the true labels, not of labels
that the model draws, and of the clipped gradient; as in optax it is read one
step later (the first step is all signs), and the momentum is corrected for its
start. mars takes the gradient of the last batch, not of this one at the last
parameters (the paper's approximate form). Sophia's tokens are those of whole
rows: where only n of them have loss (data.loss_on, padding), its diagonal is
tokens / n times too large.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from paraxis.sharding import annotate
from paraxis.sharding import rules as rules_lib
from paraxis.train.updates import adafactor
from paraxis.train.updates import kron
from paraxis.train.updates import matrices
from paraxis.train.updates import soap

EVERY = ('matrix', 'embedding', 'vector')


class Group(NamedTuple):
  """Parameters that one rule moves.

  settings: schema.Optimizer. share: f(step) in [0, 1] of the peak rate.
  dims: {path: matrices.Dims}. axes: {path: logical axes}. decayed: {path:
  whether weight decay acts on it}. steps: of the run. tokens: of a step.
  held: {path: depth.Held}, how memory holds stacks.
  """

  settings: Any
  share: Any
  dims: dict
  axes: dict
  decayed: dict
  steps: int
  tokens: int
  held: dict


class Rule(NamedTuple):
  """A row of the table.

  make(group) -> optax.GradientTransformation of {path: array}.
  kinds: of the parameters that it moves; `rest` is the rule of the others.
  matrix: its peak rate is matrix_learning_rate, not learning_rate.
  reads: what of a parameter a number of its update depends on: 'element',
    'matrix', or 'all' the group. What reads more than an element is not for
    replicas that step alone in a region.
  scaled: its direction has the learning rate in it, and weight decay.
  axes(group, params) -> {path within its state: logical axes} of leaves that
    mirror no parameter.
  """

  make: Any
  kinds: tuple = EVERY
  rest: str = 'adamw'
  matrix: bool = False
  reads: str = 'element'
  scaled: bool = False
  axes: Any = lambda group, params: {}


def _adam(group, nesterov=False):
  c = group.settings
  return optax.scale_by_adam(c.b1, c.b2, c.epsilon, nesterov=nesterov)


def _lion(group):
  return optax.scale_by_lion(group.settings.b1, group.settings.b2)


def _signs(group):
  b = group.settings.matrix_momentum
  return optax.scale_by_lion(b, b)


def _ademamix(group):
  """Its slow average and its weight rise over the run (paper, section 3.1)."""
  c = group.settings
  half = lambda b: math.log(0.5) / math.log(b) - 1

  def decay(count):
    done = jnp.minimum(count / group.steps, 1.0)
    first = half(max(c.b1, 1e-8))
    return jnp.exp(
      math.log(0.5) / ((1 - done) * first + done * half(c.slow_decay) + 1)
    )

  weight = lambda count: c.slow_weight * jnp.minimum(count / group.steps, 1.0)
  return contrib.scale_by_ademamix(c.b1, c.b2, decay, weight, c.epsilon)


def _sophia(group):
  c = group.settings
  # Of one token, on average: the gradient is the mean of those of all tokens.
  square = lambda g: group.tokens * jnp.square(g)
  squares = optax.stateless(lambda grads, _: jax.tree.map(square, grads))
  # At rate 1 and without decay its update is minus the direction.
  return _minus(
    contrib.sophia(
      1.0, c.b1, c.b2, c.epsilon, 0.0, gamma=c.curvature,
      update_interval=c.precondition_every, hessian_diagonal_fn=squares,
    )
  )  # fmt: skip


def _minus(rule):
  return optax.chain(rule, optax.scale(-1.0))


def _of_matrices(group, measure):
  """{path: x}, {path: like} -> {path: measure(x, like, axes of a matrix)}."""

  def each(updates, likes):
    axes = {
      p: tuple(range(group.dims[p].batch, x.ndim)) for p, x in updates.items()
    }
    return {p: measure(x, likes[p], axes[p]) for p, x in updates.items()}

  return each


def _rms(x, axes):
  return jnp.sqrt(jnp.mean(jnp.square(x), axes, keepdims=True))


def _adafactor(group):
  """Factored moments; each matrix's update has at most a size of 1, and that
  of its parameters (paper, sections 6 and 8)."""
  sized = lambda x, p, axes: (
    x / jnp.maximum(1, _rms(x, axes)) * jnp.maximum(_rms(p, axes), 1e-3)
  )
  rule = adafactor.scale_by_factored(group.dims)

  def init(params):
    state: Any = rule.init(params)
    axes = _factors(group, params)

    def placed(name):
      each = getattr(state, name).items()
      of = lambda p: axes.get(f'{name}/{p}', group.axes[p])
      put = lambda p, x: annotate.stored(x, of(p), rules_lib.OPTIMIZER)
      return {p: put(p, x) for p, x in each}

    return state._replace(**{n: placed(n) for n in ('v_row', 'v_col', 'v')})

  return optax.chain(
    optax.GradientTransformation(init, rule.update),
    optax.stateless(_of_matrices(group, sized)),
  )


class MarsState(NamedTuple):
  """adam: of the corrected gradients. before: {path: gradient}."""

  adam: Any
  before: Any


def _mars(group):
  c, adam = group.settings, _adam(group)
  weight = c.correction * c.b1 / (1 - c.b1)

  def short(x, _, axes):
    length = jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=True))
    return x / jnp.maximum(1, length)

  def init(params):
    return MarsState(adam.init(params), jax.tree.map(jnp.zeros_like, params))

  def update(updates, state, params=None):
    grads: Any = updates
    begun = state.adam.count > 0  # there is no gradient before the first
    added = lambda g, old: (
      g + jnp.where(begun, weight, 0).astype(g.dtype) * (g - old)
    )
    corrected = jax.tree.map(added, grads, state.before)
    corrected = _of_matrices(group, short)(corrected, corrected)
    d, inner = adam.update(corrected, state.adam, params)
    return d, MarsState(inner, grads)

  return optax.GradientTransformation(init, update)


def _prodigy(group):
  """Its rate is its own estimate, times learning_rate and the schedule."""
  c = group.settings
  rate = lambda count: c.learning_rate * group.share(count)
  rule = contrib.prodigy(rate, (c.b1, c.b2), eps=c.epsilon)

  def update(updates, state, params=None):
    given: Any = params
    found: Any = rule.update(updates, state, params)
    moved, new = found
    # Before the first gradient, and at rate 0, the estimate is 0 / 0: it stays.
    none = ~jnp.isfinite(new.estim_lr) & jnp.isfinite(new.numerator_weighted)
    kept = jnp.where(none, state.estim_lr, new.estim_lr)
    new = new._replace(estim_lr=kept)
    moved = {p: jnp.where(none, 0, u) for p, u in moved.items()}
    t = new.count
    bias = (1 - c.b2**t) ** 0.5 / (1 - c.b1**t)
    step = state.estim_lr * rate(state.count) * bias * c.weight_decay
    decayed = lambda p, u: (
      step.astype(u.dtype) * given[p] * group.decayed[p] - u
    )
    return {p: decayed(p, u) for p, u in moved.items()}, new

  return optax.GradientTransformation(rule.init, update)


class FreeState(NamedTuple):
  """inner: contrib.ScheduleFreeState. point: {path: array}, where gradients are
  taken (train/state.py: State.inner)."""

  inner: Any
  point: Any


def _schedule_free(group):
  """Parameters are the average x; gradients are taken at the point y, a step of
  Adam's away from it (paper, algorithm 1)."""
  c = group.settings
  rate = lambda count: c.learning_rate * group.share(count)
  base = optax.chain(
    optax.scale_by_adam(0.0, c.b2, c.epsilon),
    optax.add_decayed_weights(c.weight_decay, group.decayed),
    optax.scale_by_schedule(lambda count: -rate(count)),
  )
  # It counts steps from 1.
  rule = contrib.schedule_free(base, lambda count: rate(count - 1), c.b1)

  def init(params):
    return FreeState(rule.init(params), jax.tree.map(jnp.copy, params))

  def update(updates, state, params=None):
    moved, inner = rule.update(updates, state.inner, state.point)
    point = optax.apply_updates(state.point, moved)
    mean = contrib.schedule_free_eval_params(inner, point)
    return jax.tree.map(jnp.subtract, params, mean), FreeState(inner, point)

  return optax.GradientTransformation(init, update)


def _orthogonal(group, nesterov, size):
  """Newton-Schulz steps on the momentum of whole matrices, times size(M, N)."""
  beta, dims = group.settings.matrix_momentum, group.dims
  as_rows = contrib.MuonDimensionNumbers((1,), (2,))

  def on(paths):
    return contrib.scale_by_muon(
      beta=beta, nesterov=nesterov,
      weight_dimension_numbers=dict.fromkeys(paths, as_rows),
    )  # fmt: skip

  def rule(stacks, whole):
    grads = stacks['gradient']
    state = whole._replace(mu=stacks['mu'])
    found: Any = on(grads).update(grads, state)
    d, new = found
    d = {group: x * size(*x.shape[1:]) for group, x in d.items()}
    return dict(direction=d, mu=new.mu)

  def update(updates, state, params=None):
    del params
    grads: Any = updates
    arrays = dict(gradient=grads, mu=state.mu)
    like = dict(direction=grads, mu=state.mu)
    found = matrices.run(rule, dims, arrays, like, state._replace(mu=()))
    count = optax.safe_increment(state.count)
    return found['direction'], state._replace(mu=found['mu'], count=count)

  return optax.GradientTransformation(on(()).init, update)


def _muon(group):
  return _orthogonal(group, True, lambda m, n: max(1.0, n / m) ** 0.5)


def _scion(group):
  return _orthogonal(group, False, lambda m, n: (n / m) ** 0.5)


def _place(group, path, side, x):
  """Statistics of a side of a parameter, laid out (matrices.names)."""
  names = matrices.names(group.axes[path], group.dims[path], side)
  return annotate.stored(x, names, rules_lib.OPTIMIZER)


def _soap(group):
  c, place = group.settings, functools.partial(_place, group)
  return soap.scale_by_soap(
    group.dims, place, c.b1, c.b2, c.epsilon, c.precondition_decay,
    c.precondition_every,
  )  # fmt: skip


def _kron(group):
  c, place = group.settings, functools.partial(_place, group)
  return kron.scale_by_kron(
    group.dims, place, c.b1, c.precondition_every, group.held
  )


def _sides(group, of):
  """Axes of {'left', ..: parameters that have such matrices}."""
  return {
    f'{name}/{p}': matrices.names(
      group.axes[p], group.dims[p], name.removesuffix('_basis')
    )
    for name, paths in of.items()
    for p in paths
  }


def _of_soap(group, params):
  of = soap.sides(group.dims, params)
  bases = {f'{side}_basis': paths for side, paths in of.items()}
  return _sides(group, of | bases)


def _of_kron(group, params):
  return _sides(group, dict(left=params, right=params))


def _factors(group, params):
  """Axes of moments; what is not there is one number."""
  out = {}
  for p, x in params.items():
    one = other = (None,)
    if sides := adafactor.kept(group.dims[p], x.shape):
      one, other = (tuple(group.axes[p][d] for d in side) for side in sides)
      out[f'v/{p}'] = (None,)
    out |= {f'v_row/{p}': one, f'v_col/{p}': other}
  return out


def _coefficients(group, params):
  del group, params
  return {'ns_coeffs': (None,)}


_whole = functools.partial(Rule, kinds=('matrix',), matrix=True, reads='matrix')
RULES = {
  'adamw': Rule(_adam),
  'nadamw': Rule(functools.partial(_adam, nesterov=True)),
  'lion': Rule(_lion),
  'ademamix': Rule(_ademamix),
  'sophia': Rule(_sophia),
  'adafactor': Rule(_adafactor, reads='matrix', axes=_factors),
  'mars': Rule(_mars, kinds=('matrix', 'embedding'), reads='matrix'),
  'prodigy': Rule(_prodigy, reads='all', scaled=True),
  'schedule_free': Rule(_schedule_free, reads='all', scaled=True),
  'muon': _whole(_muon, axes=_coefficients),
  'scion': _whole(_scion, rest='signs', axes=_coefficients),
  'soap': _whole(_soap, axes=_of_soap),
  'kron': _whole(_kron, axes=_of_kron),
  'signs': Rule(_signs),
}
