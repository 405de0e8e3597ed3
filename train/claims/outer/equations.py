"""Claims about exchanges of replicas: what they compute, by the equations.

The reference is NumPy, of whole arrays on no mesh, with a schedule of its own:

    fragment p is sent at steps t with t = p period // fragments (mod period)
    g = mean over replicas of anchor - theta, of step t, lands at t + delay
    g <- g / (1 + rate |m| / |g|)                                   (penalty)
    m <- clip(momentum m + g)
    anchor <- anchor - rate (momentum m + g  (nesterov), or m)
    theta <- (1 - mixing) anchor + mixing theta

Inner steps are those of the program (steps.py claims what they compute).
"""

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.train.certify import inputs
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import knockouts
from paraxis.train.steps import outer
from paraxis.train.steps import pairs

PERIODS = 3


def uphill():
  """Knock-out: the anchor moves away from the replicas."""
  right = outer._gap
  turned = lambda *given: jax.tree.map(jnp.negative, right(*given))
  return knockouts.patched(outer, '_gap', turned)


def idle():
  """Knock-out: an exchange gives back what it was given."""
  same = lambda plan, p, gap, own, specs=None, cuts=None: own
  return knockouts.patched(outer, '_moved', same)


def without_momentum():
  """Knock-out: what the anchor's momentum was is dropped."""
  right = outer._moved

  def moved(plan, p, gap, own, *where):
    *rest, momentum = own
    still = jax.tree.map(jnp.zeros_like, momentum)
    return right(plan, p, gap, (*rest, still), *where)

  return knockouts.patched(outer, '_moved', moved)


def without_ends():
  """Knock-out: layers alone are exchanged, not the embedding."""
  right = outer.Plan.of
  layers = lambda plan, tree, p: {
    path: x for path, x in right(plan, tree, p).items() if path in plan.stacked
  }
  return knockouts.patched(outer.Plan, 'of', layers)


def unpaired():
  """Knock-out: every replica meets itself."""
  itself = lambda n: np.arange(n)[None]
  return knockouts.patched(pairs, 'matchings', itself)


class _Anchor:
  """Anchor and momentum {path: array}, in NumPy: see the top."""

  def __init__(self, loop, params):
    """loop: schema.Outer."""
    self._loop, self._flight = loop, {}
    self.anchor = {path: np.array(x) for path, x in params.items()}
    self.momentum = {path: 0 * x for path, x in self.anchor.items()}

  def _part(self, tree, p, lead=()):
    """{path: view of what is in fragment p}: every fragments-th layer, what is
    no layer in the last."""
    n = self._loop.fragments
    return {
      path: x[(*lead, slice(p, None, n))] if path.startswith('layers/') else x
      for path, x in tree.items()
      if path.startswith('layers/') or p == n - 1
    }

  def after(self, step, replicas):
    """Exchanges what is due, in place; replicas: {path: (R, ..)}."""
    loop = self._loop
    every = range(loop.fragments)
    first = [p * loop.period // loop.fragments for p in every]
    sent = lambda t, p: t > 0 and (t - first[p]) % loop.period == 0
    gaps = {p: self._gap(replicas, p) for p in every if sent(step, p)}
    for p in every:
      if loop.delay and sent(step - loop.delay, p):
        self._land(self._flight.pop(p), replicas, p)
      elif loop.delay == loop.period and p in gaps:
        self._begin(replicas, p)  # at the end of the first nothing arrives
    for p, gap in gaps.items():
      if loop.delay:
        self._flight[p] = gap
      else:
        self._land(gap, replicas, p)

  def _gap(self, replicas, p):
    own = self._part(replicas, p, (slice(None),))
    part = self._part(self.anchor, p)
    return {path: (x - own[path]).mean(0) for path, x in part.items()}

  def _land(self, gap, replicas, p):
    loop, anchor = self._loop, self._part(self.anchor, p)
    momentum = self._part(self.momentum, p)
    most, by = loop.clip or np.inf, 1.0
    if loop.penalty:
      by += loop.rate * _length(momentum) / _length(gap)
    for path, m in momentum.items():
      g = gap[path] / by
      m[...] = np.clip(loop.momentum * m + g, -most, most)
      move = loop.momentum * m + g if loop.nesterov else m
      anchor[path][...] -= loop.rate * move
    self._begin(replicas, p)

  def _begin(self, replicas, p):
    keep, own = self._loop.mixing, self._part(replicas, p, (slice(None),))
    for path, x in self._part(self.anchor, p).items():
      own[path][...] = (1 - keep) * x + keep * own[path]


def _length(tree):
  return np.sqrt(sum((x**2).sum() for x in tree.values()))


def _off(config, devices):
  """(largest difference, whether all of the anchor has moved)."""
  runner = trial.Runner(config, devices)
  exchange, loop = outer.Exchange(runner.job), config.outer
  with runner.job.context():
    exchange.compile()
  params = inputs.parameters(runner)
  state, wanted = runner.start(params), _Anchor(loop, params)
  batches, gaps = trial.batches(config, packed=True), []
  for step in range(1, PERIODS * loop.period + loop.delay + 1):
    batch = batches[step % len(batches)]
    state = runner.update(state, *runner.gradients(state, batch))
    own = jax.tree.map(np.array, jax.device_get(state.outer.params))
    wanted.after(step, own)
    with runner.job.context():
      state, _ = exchange(step, state, None)
    found = jax.device_get(state)
    for path, x in params.items():
      gaps += [  # of the moves, which are small beside what moves
        _gap(found.params[path] - x, wanted.anchor[path] - x),
        _gap(found.outer.params[path] - x, own[path] - x),
        _gap(found.outer.momentum[path], wanted.momentum[path]),
      ]
  moved = all((wanted.anchor[path] != x).any() for path, x in params.items())
  return float(np.max(gaps)), moved  # a NaN is the largest


def _gap(found, wanted):
  return experiment.gap(found, wanted) if wanted.any() else np.abs(found).max()


def by_numpy(run, *, cases, within):
  """EQ: anchor, momentum and replicas are as by the equations in NumPy, after
  every step of three periods.

  In float64, sizes shrunk as by `paraxis verify`, rows packed.

  Args:
    cases: list of {'mesh': text, 'section.field': value, ...}.
  """
  found, moved = {}, True
  for case in cases:
    config, devices = experiment.on_case(run.config, case, experiment.shrunk)
    with jax.enable_x64(True):
      found[experiment.case_text(case)], all_moved = _off(config, devices)
    moved &= all_moved
  return experiment.equal(
    found,
    within,
    f'{PERIODS} periods, anchor, momentum and replicas after every step; '
    f'{experiment.listed(found)}',
    moved,
  )
