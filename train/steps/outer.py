"""Replicas exchange: what travels, when, and what it does to the anchor.

    gap_i = anchor - theta_i                    of replica i, by parameter
    D = mean_i(gap_i)                           the one sum over replicas
    m <- momentum m + D;  u = momentum m + D (nesterov), or m
    anchor <- anchor - rate u
    theta_i <- (1 - mixing) anchor + mixing theta_i

DiLoCo (arXiv:2311.08105, algorithm 1): rate .7, Nesterov momentum .9. Local SGD
(arXiv:1805.09767): rate 1, momentum 0, so that the anchor is the mean of the
replicas. Streaming DiLoCo (arXiv:2501.18512, sections 2.1 and 2.2): fragments
travel at steps of their own, and what is sent at step t lands at t + delay
while replicas step; its gap is that of step t. What is due depends on the step
alone: a resumed run exchanges as the uninterrupted one.

With outer.codec a replica sends codes of its gap, an array a device at a time
(train/steps/codec.py); sums are in float32, after all have arrived.

A mean weighs replicas alike, whatever number of targets they read. Anchor and
momentum are whole in every replica. What a run does not learn is not sent, but
held twice, with the anchor and with the replica's parameters.

Cost: a fragment of N numbers on a device is one all-reduce of them, of which a
device sends 2 (R - 1) / R N; trees of N are read three times and written three
times. Between exchanges a step sends nothing (train/steps/replicas.py); several
processes still meet in the loop, for a flag and the numbers of each step.

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
from paraxis.train.steps import codec
from paraxis.train.steps import replicas


def check(config, built):
  """UserError if the replicas of a schema.Config cannot step alone.

  built: models.build.Built.
  """
  replicas.check(config, built)
  parts, axes = config.outer.fragments, built.model.axes
  for path, leaf in sorted(built.params.items()):
    if axes[path][:1] == ('layers',) and leaf.shape[0] < parts:
      raise errors.UserError(
        f'outer.fragments={parts}: {path} has {leaf.shape[0]} layers, so some '
        'fragments would have none of it. Give at most as many.'
      )


class Outer(NamedTuple):
  """What a State keeps of R replicas.

  params: {path: (R, ...)}, those that each replica steps from. momentum: {path:
  array} of the anchor. flight: {path: array}, sums that are under way; {}
  without outer.delay.
  """

  params: Any
  momentum: Any
  flight: Any


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is in each fragment of the parameters.

  Attributes:
    outer: schema.Outer. paths: of what is learned. stacked: those of them whose
      first dimension is the depth.
  """

  outer: schema.Outer
  paths: tuple[str, ...]
  stacked: frozenset[str]

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


def plan_of(outer, model):
  """`Plan` of a schema.Outer and a models.decoder.Decoder."""
  paths = tuple(sorted(expert_counts.without(model, model.axes)))
  stacked = (p for p in paths if model.axes[p][:1] == ('layers',))
  return Plan(outer, paths, frozenset(stacked))


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
  paths = plan_of(outer, model).paths
  zeros = lambda: {p: jnp.zeros_like(state.params[p]) for p in paths}
  copies = lambda tree: jax.tree.map(lambda x: replicas.copied(x, n), tree)
  kept = copies(state.params), zeros(), zeros() if outer.delay else {}
  return state._replace(
    optimizer=copies(state.optimizer),
    skipped=copies(state.skipped),
    skipped_in_a_row=copies(state.skipped_in_a_row),
    outer=Outer(*kept),
  )


def _gap(plan, p, params, anchor):
  """The mean over replicas of anchor - params: the sum that is sent."""
  own, anchor = plan.of(params, p), plan.of(anchor, p)
  gap = jax.tree.map(jnp.subtract, anchor, own)
  if plan.outer.codec:
    return jax.tree.map(_mean_of_codes, gap)
  return jax.lax.pmean(gap, replicas.AXIS)


def _mean_of_codes(x):
  """The mean over replicas of what x is in four bits, of this shard."""
  scales, packed = jax.lax.all_gather(codec.encode(x), replicas.AXIS)
  pairs = zip(scales, packed, strict=True)
  each = [codec.decode(scale, codes, x.shape) for scale, codes in pairs]
  return (functools.reduce(jnp.add, each) / len(each)).astype(x.dtype)


def _moved(plan, p, gap, params, anchor, momentum):
  """(params of a replica, anchor, momentum) after a fragment's mean gap."""
  outer, old = plan.outer, plan.of(momentum, p)
  speed = jax.tree.map(lambda m, d: outer.momentum * m + d, old, gap)
  ahead = lambda m, d: outer.momentum * m + d if outer.nesterov else m
  move = jax.tree.map(ahead, speed, gap)
  step = lambda a, u: a - outer.rate * u
  new = jax.tree.map(step, plan.of(anchor, p), move)
  keep = outer.mixing
  mixed = lambda a, t: (1 - keep) * a + keep * t if keep else a
  own = jax.tree.map(mixed, new, plan.of(params, p))
  return (
    plan.into(params, own, p),
    plan.into(anchor, new, p),
    plan.into(momentum, speed, p),
  )


def _run(body, args, results):
  """body(*args) in a region. results: arrays laid out as what it returns."""
  specs = lambda tree: jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
  return replicas.region(body, specs(args), specs(results))(*args)


def send(plan, p, state):
  """State with the sum of fragment p under way: the only message."""
  args = state.outer.params, state.params, state.outer.flight

  def body(params, anchor, flight):
    gap = _gap(plan, p, replicas.one(params), anchor)
    return plan.into(flight, gap, p)

  flight = _run(body, args, args[-1])
  return state._replace(outer=state.outer._replace(flight=flight))


def land(plan, p, state):
  """State after the sum of fragment p that is under way; sends nothing."""
  return _landed(plan, p, state, state.outer.flight)


def exchange(plan, p, state):
  """State after `send` and `land` in one: outer.delay=0."""
  return _landed(plan, p, state, None)


def _landed(plan, p, state, flight):
  """flight: sums under way; None: the one of this fragment is made here."""
  own = state.outer.params, state.params, state.outer.momentum

  def body(own, flight):
    params, anchor, momentum = own
    params = replicas.one(params)
    if flight is None:
      gap = _gap(plan, p, params, anchor)
    else:
      gap = plan.of(flight, p)
    params, *rest = _moved(plan, p, gap, params, anchor, momentum)
    return replicas.many(params), *rest

  params, anchor, momentum = _run(body, (own, flight), own)
  kept = state.outer._replace(params=params, momentum=momentum)
  return state._replace(params=anchor, outer=kept)


def mean(state):
  """{path: array}: the mean of the replicas' parameters, laid out as one's."""
  return jax.jit(_mean)(state.outer.params, state.params)


def _mean(params, like):
  body = lambda params: jax.lax.pmean(replicas.one(params), replicas.AXIS)
  return _run(body, (params,), like)


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
    outer, job = self._job.config.outer, self._job
    if not outer.active:
      return
    plan = plan_of(outer, job.model)
    for function in (send, land) if outer.delay else (exchange,):
      for p in range(outer.fragments):
        name = f'{function.__name__} of fragment {p}'
        run = functools.partial(function, plan, p)
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
    lands, sends = outer.due(done)
    first = 'send' if outer.delay else 'exchange'
    for kind, fragments in (('land', lands), (first, sends)):
      for p in fragments:
        state = self.programs[f'{kind} of fragment {p}'](state)
    several = jax.process_count() > 1
    return state, self._whole(numbers) if several else numbers
