"""Claims about exchanges of replicas: what they compute, by the equations.

The reference is NumPy, of whole arrays on no mesh, with a schedule of its own:

    fragment p is sent at steps t with t = p period // fragments (mod period)
    g = mean over replicas of anchor - theta, of step t, lands at t + delay
    g <- g / (1 + rate |m| / |g|)                                   (penalty)
    m <- clip(momentum m + g)
    anchor <- anchor - rate (momentum m + g  (nesterov), or m)
    theta <- (1 - mixing) anchor + mixing theta

and of exchange=pairs (arXiv:2506.10911), i and j those that meet in step t, who
is what pairs.py draws:

    v_i <- momentum v_i + rate mean(theta - anchor) + pull (mean(anchor) -
           anchor_i)                               means over i and j
    anchor_i <- anchor_i + v_i;  theta_i <- anchor_i

Inner steps are those of the program (steps.py claims what they compute).
"""

import dataclasses

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


def unpulled():
  """Knock-out: two anchors do not approach when they meet."""
  right = pairs.gap

  def gap(plan, *given):
    alone = dataclasses.replace(plan.outer, pull=0.0)
    return right(dataclasses.replace(plan, outer=alone), *given)

  return knockouts.patched(pairs, 'gap', gap)


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

  def _sent(self, step, p):
    period = self._loop.period
    first = p * period // self._loop.fragments
    return step > 0 and (step - first) % period == 0

  def after(self, step, replicas):
    """Exchanges what is due, in place; replicas: {path: (R, ..)}."""
    loop, every = self._loop, range(self._loop.fragments)
    gaps = {p: self._gap(replicas, p) for p in every if self._sent(step, p)}
    for p in every:
      if loop.delay and self._sent(step - loop.delay, p):
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


class _Anchors(_Anchor):
  """Anchors and momenta {path: (R, ..)} of replicas that meet by twos."""

  def __init__(self, config, params, first):
    """config: schema.Config. first: steps that are done before."""
    self._n, self._seed = config.mesh.replica, config.train.seed
    self._first = first
    each = {path: np.stack([x] * self._n) for path, x in params.items()}
    super().__init__(config.outer, each)

  def after(self, step, replicas):
    drawn = pairs.drawn(self._seed, self._first + step, self._n)
    row = pairs.matchings(self._n)[int(drawn)]
    for p in range(self._loop.fragments):
      if self._sent(step, p):
        self._meet(row, replicas, p)

  def _meet(self, row, replicas, p):
    """row[i]: whom replica i meets."""
    loop, over = self._loop, (slice(None),)
    mean = lambda x: (x + x[row]) / 2
    momentum, own = (self._part(x, p, over) for x in (self.momentum, replicas))
    for path, anchor in self._part(self.anchor, p, over).items():
      found = mean(own[path] - anchor)
      moved = loop.rate * (found - loop.momentum * momentum[path])
      moved += loop.pull * (mean(anchor) - anchor)
      momentum[path][...] = -moved / loop.rate  # as ours has it
      anchor += moved
      own[path][...] = anchor


def _length(tree):
  return np.sqrt(sum((x**2).sum() for x in tree.values()))


def _off(config, devices):
  """(largest difference, whether all of the anchor has moved)."""
  runner = trial.Runner(config, devices)
  exchange, loop = outer.Exchange(runner.job), config.outer
  with runner.job.context():
    exchange.compile()
  params = inputs.parameters(runner)
  state, paired = runner.start(params), loop.exchange == 'pairs'
  if paired:
    wanted = _Anchors(config, params, runner.first)
  else:
    wanted = _Anchor(loop, params)
  batches, gaps = trial.batches(config, packed=True), []
  for step in range(1, PERIODS * loop.period + loop.delay + 1):
    batch = batches[step % len(batches)]
    state = runner.update(state, *runner.gradients(state, batch))
    own = jax.tree.map(np.array, jax.device_get(state.outer.params))
    wanted.after(step, own)
    with runner.job.context():
      state, _ = exchange(step, state, None)
    found = jax.device_get(state)
    each = found.outer.each
    anchor = each['anchor'] if paired else found.params
    momentum = each['momentum'] if paired else found.outer.momentum
    for path, x in params.items():
      gaps += [  # of the moves, which are small beside what moves
        _gap(anchor[path] - x, wanted.anchor[path] - x),
        _gap(found.outer.params[path] - x, own[path] - x),
        _gap(momentum[path], wanted.momentum[path]),
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
