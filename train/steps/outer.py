"""Replicas exchange: what travels, when, and what it does to the anchor.

    gap_i = anchor - theta_i                    of replica i, by parameter
    D = mean_i(gap_i) / penalty                 the one sum over replicas
    m <- clip(momentum m + D);  u = momentum m + D (nesterov), or m
    anchor <- anchor - rate u
    theta_i <- (1 - mixing) anchor + mixing theta_i

DiLoCo (arXiv:2311.08105, algorithm 1): rate .7, Nesterov momentum .9. Local SGD
(arXiv:1805.09767): rate 1, momentum 0, so that the anchor is the mean of the
replicas. Streaming DiLoCo (arXiv:2501.18512, sections 2.1 and 2.2): fragments
travel at steps of their own, and what is sent at step t lands at t + delay
while replicas step; its gap is that of step t. CO2 (arXiv:2401.16265): the
delay is the period, so that a sum has a whole one to arrive; it is sent before
the one of a period ago lands, replicas begin each period at the anchor, and the
first one's sum is of nothing. |m| is at most clip, and the penalty is

    1 + rate |m| / |mean_i(gap_i)|              of all that is sent together

the distance that the anchor moved since what arrives was sent, in lengths of
that. With exchange=pairs (NoLoCo) see pairs.py. What is due depends on the step
alone: a resumed run exchanges as the uninterrupted one.

With outer.codec a replica sends codes of its gap, an array a device at a time
(train/steps/codec.py); sums are in float32, after all have arrived. Every
replica gathers those of all others: (R - 1) N / 2 bytes. A sum of float32 has
8 (R - 1) / R N, so that codes are fewer bytes below 16 replicas.

A mean weighs replicas alike, whatever number of targets they read. What a run
does not learn is not sent, but held twice, with the anchor and with the
replica's parameters.

Two of the family are not here, for nothing of theirs is due at a step that all
replicas count. DADAO (arXiv:2208.00779) exchanges along edges of a graph at
random times, simulated in one process (train/steps/events.py). The experts of
Branch-Train-Merge (arXiv:2208.03306), each of a domain, never exchange: they
are runs of their own (train/run/merge.py, decode/evaluate/ensemble.py).

Cost: of a fragment of N numbers a replica sends 2 (R - 1) / R N, each device of
those that hold them its part (anchor.py). Where the sum lands at once these are
a reduce-scatter and an all-gather, and anchor and momentum are sharded over
replicas: two trees of N / R. Else they are an all-reduce or codes, and both
trees are N in every replica, with a third of what is under way; at landing the
devices of a replica gather what it begins with. Between exchanges a step sends
nothing (train/steps/replicas.py); several processes still meet in the loop, for
a flag and the numbers of each step.

Legend: R replicas.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.sharding.meter import compiling
from paraxis.train import expert_counts
from paraxis.train.steps import anchor as anchor_lib
from paraxis.train.steps import codec
from paraxis.train.steps import pairs
from paraxis.train.steps import replicas


def check(config, built):
  """UserError if the replicas of a schema.Config cannot step alone.

  built: models.build.Built.
  """
  replicas.check(config, built)
  n = built.mesh.shape[replicas.AXIS]
  if config.outer.exchange == 'pairs' and n < 2:
    raise errors.UserError(
      f'outer.exchange=pairs and mesh.replica={n}: a pair is of two. Give at '
      'least 2 replicas, or exchange=mean.'
    )
  parts, axes = config.outer.fragments, built.model.axes
  if parts > 1 and not plan_of(config, built.model).stacked:
    raise errors.UserError(
      f'outer.fragments={parts}: no layer is learned (train.freeze), so that '
      'all but the last fragment would be empty. Give 1.'
    )
  for path, leaf in sorted(built.params.items()):
    if axes[path][:1] == ('layers',) and leaf.shape[0] < parts:
      raise errors.UserError(
        f'outer.fragments={parts}: {path} has {leaf.shape[0]} layers, so some '
        'fragments would have none of it. Give at most as many.'
      )


class Outer(NamedTuple):
  """What a State keeps of R replicas.

  params: {path: (R, ...)}, those that each replica steps from. momentum: {path:
  array} of the anchor; {} if each replica has its own. flight: {path: array},
  sums that are under way; {} without outer.delay. each: () or, of exchange=
  pairs, {'anchor', 'momentum': {path: (R, ...)}}; State.params are then of
  anchor.settled alone.
  """

  params: Any
  momentum: Any
  flight: Any
  each: Any = ()


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is in each fragment of the parameters.

  Attributes:
    outer: schema.Outer. paths: of what is learned. stacked: those of them whose
      first dimension is the depth. seed: of what is drawn. replicas: R.
  """

  outer: schema.Outer
  paths: tuple[str, ...]
  stacked: frozenset[str]
  seed: int
  replicas: int

  def of(self, tree, p):
    """{path: array} of fragment p: every fragments-th layer, else the whole.

    What is no layer, the two ends, is in the last.
    """
    n = self.outer.fragments
    pick = lambda q: tree[q][p::n] if q in self.stacked else tree[q]
    return {q: pick(q) for q in self.paths if p == n - 1 or q in self.stacked}

  def into(self, tree, part, p):
    """The inverse of `of`: a tree with the fragment in its place."""
    n = self.outer.fragments
    whole = lambda q: n == 1 or q not in self.stacked
    put = lambda q, x: x if whole(q) else tree[q].at[p::n].set(x)
    return tree | {q: put(q, x) for q, x in part.items()}

  def sharded(self, tree):
    """{path: array} of anchors, over replicas where a sum lands at once."""
    over = not (self.outer.delay or self.outer.codec)
    layered = self.stacked if self.outer.fragments > 1 else ()  # `of` cuts it
    lay = lambda q, x: anchor_lib.sharded(x, int(q in layered), over)
    return {q: lay(q, x) for q, x in tree.items()}


def plan_of(config, model):
  """`Plan` of a schema.Config and a models.decoder.Decoder."""
  paths = tuple(sorted(expert_counts.without(model, model.axes)))
  stacked = (p for p in paths if model.axes[p][:1] == ('layers',))
  seed, n = config.train.seed, config.mesh.replica
  return Plan(config.outer, paths, frozenset(stacked), seed, n)


def begun(state, config, model):
  """A plain State -> that of equal replicas which step alone.

  Without replicas that do, the state itself. In the mesh and rules in force;
  sends nothing.

  Args:
    config: schema.Config, its mesh the one in force.
    model: models.decoder.Decoder.
  """
  outer, n = config.outer, config.mesh.replica
  if not outer.active:
    return state
  plan = plan_of(config, model)
  learned = {p: state.params[p] for p in plan.paths}
  zeros = lambda: jax.tree.map(jnp.zeros_like, learned)
  copies = lambda tree: jax.tree.map(lambda x: replicas.copied(x, n), tree)
  every = copies(state.params)
  if outer.exchange == 'pairs':
    each = dict(anchor=copies(learned), momentum=copies(zeros()))
    kept = every, {}, {}, each
  else:
    learned = plan.sharded(learned)
    kept = every, zeros(), zeros() if outer.delay else {}
  return state._replace(
    params=state.params | learned,
    optimizer=copies(state.optimizer),
    skipped=copies(state.skipped),
    skipped_in_a_row=copies(state.skipped_in_a_row),
    outer=Outer(*kept),
  )


def _gap(plan, p, params, anchor, cuts):
  """The mean over replicas of anchor - params: the sum that is sent.

  cuts: of anchor.cuts.
  """
  own, anchor = plan.of(params, p), plan.of(anchor, p)
  mean = lambda x: jax.lax.pmean(x, replicas.AXIS)
  summed, gaps = _mean_of_codes if plan.outer.codec else mean, {}
  for q, x in own.items():
    if replicas.AXIS in dict(cuts[q]):
      gap = anchor[q] - anchor_lib.mean_shard(x, cuts[q])
      gaps[q] = gap.astype(x.dtype)
    else:
      gaps[q] = summed(anchor[q] - anchor_lib.own(x, cuts[q]))
  return gaps


def _mean_of_codes(x):
  """The mean over replicas of what x is in four bits, of this shard."""
  scales, packed = jax.lax.all_gather(codec.encode(x), replicas.AXIS)
  sent = zip(scales, packed, strict=True)
  each = [codec.decode(scale, codes, x.shape) for scale, codes in sent]
  return (functools.reduce(jnp.add, each) / len(each)).astype(x.dtype)


def penalized(plan, gap, momentum, specs):
  """A fragment's mean gap, divided by how far the anchor has moved since."""
  squares = lambda tree: replicas.squares(specs, tree).sum()
  moved, own = plan.outer.rate**2 * squares(momentum), squares(gap)
  penalty = 1 + jnp.sqrt(jnp.where(own > 0, moved / own, 0))
  return jax.tree.map(lambda d: d / penalty, gap)


def clipped(momentum, most):
  """An array, its numbers at most so large."""
  return jnp.clip(momentum, -most, most)


def _moved(plan, p, gap, own, specs=None, cuts=None):
  """(params of a replica, anchor, momentum) after a fragment's mean gap.

  Args:
    own: these three before it. specs: {path: PartitionSpec} of the anchor.
    cuts: of anchor.cuts; None: a replica has all of its own anchor.
  """
  params, anchor, momentum = own
  cuts = cuts or dict.fromkeys(plan.paths, ())
  outer, old = plan.outer, plan.of(momentum, p)
  if outer.penalty:
    gap = penalized(plan, gap, old, specs)
  speed = jax.tree.map(lambda m, d: outer.momentum * m + d, old, gap)
  if outer.clip:
    speed = jax.tree.map(lambda m: clipped(m, outer.clip), speed)
  ahead = lambda m, d: outer.momentum * m + d if outer.nesterov else m
  move = jax.tree.map(ahead, speed, gap)
  step = lambda a, u: a - outer.rate * u
  new = jax.tree.map(step, plan.of(anchor, p), move)
  keep = outer.mixing
  mixed = lambda a, t: (1 - keep) * a + keep * t if keep else a
  every = {q: anchor_lib.whole(x, cuts[q]) for q, x in new.items()}
  own = jax.tree.map(mixed, every, plan.of(params, p))
  return (
    plan.into(params, own, p),
    plan.into(anchor, new, p),
    plan.into(momentum, speed, p),
  )


def _run(body, args, results):
  """body(*args) in a region. results: arrays laid out as what it returns."""
  given, out = anchor_lib.specs(args), anchor_lib.specs(results)
  return replicas.region(body, given, out)(*args)


def send(plan, p, state):
  """State with the sum of fragment p under way: the only message."""
  args = state.outer.params, state.params, state.outer.flight
  cuts = anchor_lib.cuts(state)

  def body(params, anchor, flight):
    gap = _gap(plan, p, replicas.one(params), anchor, cuts)
    return plan.into(flight, gap, p)

  flight = _run(body, args, args[-1])
  return state._replace(outer=state.outer._replace(flight=flight))


def _landed(plan, p, state, sends, late):
  """State after fragment p has landed.

  sends: a sum is made here. late: what lands is the one that is under way, and
  the new one, if any, takes its place.
  """
  specs, cuts = anchor_lib.specs(state.params), anchor_lib.cuts(state)
  own = state.outer.params, state.params, state.outer.momentum

  def body(own, flight):
    params, anchor, momentum = own
    params = replicas.one(params)
    gap = _gap(plan, p, params, anchor, cuts) if sends else None
    lands = plan.of(flight, p) if late else gap
    if sends and late:
      flight = plan.into(flight, gap, p)
    own = params, anchor, momentum
    params, *rest = _moved(plan, p, lands, own, specs, cuts)
    return (replicas.many(params), *rest), flight

  args = own, state.outer.flight
  (params, anchor, momentum), flight = _run(body, args, args)
  kept = state.outer._replace(params=params, momentum=momentum, flight=flight)
  return state._replace(params=anchor, outer=kept)


# What is under way lands, and nothing is sent; what is sent lands at once:
# outer.delay=0; what lands was sent a period ago: outer.delay is the period.
land = functools.partial(_landed, sends=False, late=True)
exchange = functools.partial(_landed, sends=True, late=False)
turn = functools.partial(_landed, sends=True, late=True)


def pair(plan, p, state):
  """State after each replica has met another of its own fragment p."""
  own = state.outer.params, state.outer.each

  def body(own, step):
    params, each = replicas.one(own)
    anchor, momentum = each['anchor'], each['momentum']
    gap = pairs.gap(plan, plan.of(params, p), plan.of(anchor, p), step)
    own = params, anchor, momentum
    params, anchor, momentum = _moved(plan, p, gap, own)
    return replicas.many((params, dict(anchor=anchor, momentum=momentum)))

  params, each = _run(body, (own, state.step), own)
  return state._replace(outer=state.outer._replace(params=params, each=each))


KINDS = dict(send=send, land=land, exchange=exchange, turn=turn, pair=pair)


def functions(config, model):
  """{'exchange of fragment 0': function of a State}, each due once a period."""
  outer, plan = config.outer, plan_of(config, model)
  parts = range(outer.fragments) if outer.active else ()
  return {
    f'{kind} of fragment {p}': functools.partial(KINDS[kind], plan, p)
    for kind in outer.kinds
    for p in parts
  }


class Exchange:
  """The exchanges of a run; nothing, if no replicas step alone.

  Attributes:
    programs: {'exchange of fragment 0': compiled}; each donates the state.
  """

  def __init__(self, job):
    """job: program.Program."""
    self._job, self.programs = job, {}
    self._whole = jax.jit(lambda tree: tree, out_shardings=jax.P())

  def compile(self, say=None):
    """Compiles what any step may need. say: prints one line."""
    job = self._job
    for name, run in functions(job.config, job.model).items():
      self.programs[name] = compiling.compile_step(
        name, run, job.state, donate=(0,), say=say
      )

  def __call__(self, done, state, numbers):
    """-> (State after what is due after `done` steps, numbers).

    numbers: of Step.update, (R, ...); every process can read what comes back.
    """
    outer = self._job.config.outer
    if not outer.active:
      return state, numbers
    for kind, p in outer.due(done):
      state = self.programs[f'{kind} of fragment {p}'](state)
    several = jax.process_count() > 1
    return state, self._whole(numbers) if several else numbers
