"""Claims about what replicas exchange: when a sum is read, its bytes, its wait.

Bytes are those of the compiled programs of a step and of an exchange; the
schedule is that of a run (schema.Outer.due).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.sharding.meter import hlo
from paraxis.train import program as job_lib
from paraxis.train.certify import inputs
from paraxis.train.certify import target_compile
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.run import memory
from paraxis.train.steps import outer
from paraxis.train.steps import replicas


def without_clip():
  """Knock-out: a momentum of any size, as if the clipped one were dropped."""
  return knockouts.patched(outer, 'clipped', lambda momentum, most: momentum)


def found(config, devices):
  """{program of what is due in a period: [hlo.Collective]} of a config."""
  job = job_lib.of_shapes(config, '', devices)
  run = outer.Exchange(job)
  with job.context():
    run.compile()
  texts = {name: p.as_text() or '' for name, p in run.programs.items()}
  return {name: hlo.collectives(text, job.mesh) for name, text in texts.items()}


def received(config, devices):
  """{program: bytes that a device receives over `replica`}."""
  return {
    name: sum(c.total for c in each if replicas.AXIS in c.axes)
    for name, each in found(config, devices).items()
  }


def least(config, devices):
  """Bytes that a device has to receive over `replica` in a period, at least: of
  a mean, 2 (R - 1) / R of its share of a replica's parameters; of pairs, that
  share; in four bits, those of the R - 1 others. It shares with all devices of
  its replica: what several of them hold need not arrive at each."""
  params = job_lib.of_shapes(config, '', devices).built.params.values()
  n, loop = config.mesh.replica, config.outer
  whole = sum(x.size * x.dtype.itemsize for x in params)
  if loop.exchange == 'pairs':
    sent = whole
  elif loop.codec:
    sent = (n - 1) * sum(x.size for x in params) / 2
  else:
    sent = 2 * (n - 1) / n * whole
  return sent * n / len(devices)


def without_penalty():
  """Knock-out: what is late counts as much as what is not."""
  same = lambda plan, gap, momentum, specs: gap
  return knockouts.patched(outer, 'penalized', same)


def messages(run, *, meshes, fewer):
  """HLO: no byte of a step crosses replicas, and an exchange every period sends
  so many times fewer than data parallel does in as many steps, and not fewer
  than it has to (`least`).

  Bytes are those that a device receives over `replica`: of data parallel every
  step, of ours in the gradient, the update and the exchanges of a period.

  Args:
    meshes: texts as for --mesh, with replica. fewer: at least so many times.
  """
  ratios, shares, inner = {}, [], 0
  for mesh in meshes:
    config, devices = experiment.on(run.config, mesh)
    of = functools.partial(
      _received, devices=devices, names=target_compile.PROGRAMS
    )
    mine = of(config)
    inner += mine
    averaged = schema.with_value(config, 'outer', schema.Outer())
    plain = of(experiment.fields(averaged, {'mesh.collectives': 'explicit'}))
    sent = sum(received(config, devices).values())
    period = mine * config.outer.period + sent
    ratios[mesh] = plain * config.outer.period / max(period, 1)
    shares.append(sent / least(config, devices))
  return claims.Outcome(
    f'0 in a step, >= {fewer:g} times fewer, >= 1 x what has to be sent',
    f'{inner} in a step, {experiment.numbers(ratios.values(), ".1f")} times, '
    f'{experiment.numbers(shares, ".3f")} x',
    f'{"; ".join(meshes)}: bytes received over replica in outer.period='
    f'{run.config.outer.period} steps, beside gradients averaged in each',
    not inner and min(ratios.values()) >= fewer and _whole(shares),
  )


def _whole(shares):
  """Whether no share is below 1, but for rounding."""
  return min(shares) >= 1 - 1e-9


def _received(config, devices, names):
  """Bytes over `replica` of programs of a step."""
  return sum(
    c.total
    for name in names
    for c in experiment.step_collectives(config, devices, name)
    if replicas.AXIS in c.axes
  )


class _Run:
  """A shrunk config's steps and exchanges, from random parameters on."""

  def __init__(self, config, mesh):
    self.config, devices = experiment.shrunk(config, mesh)
    self._runner = runner = trial.Runner(self.config, devices)
    self._exchange = outer.Exchange(runner.job)
    with runner.job.context():
      self._exchange.compile()
    self.state = runner.start(inputs.parameters(runner))
    self._batches = trial.batches(self.config, packed=True)
    self.done = 0

  def step(self, *states):
    """States after a step on the next batch and what is then due."""
    batch = self._batches[self.done % len(self._batches)]
    self.done += 1
    out = []
    for state in states:
      loss, gradients, aux = self._runner.gradients(state, batch)
      state = self._runner.update(state, loss, gradients, aux)
      with self._runner.job.context():
        state, _ = self._exchange(self.done, state, None)
      out.append(state)
    return out

  def due(self):
    """What was due after the last step."""
    return self.config.outer.due(self.done)


def _unread(run):
  """Steps from the first sum that is sent to the first state it changes.

  The sum is replaced by NaN while it is under way.
  """
  (state,) = run.step(run.state)
  while not run.due():
    (state,) = run.step(state)
  if not state.outer.flight:
    return 0  # it has landed
  sent = run.done
  nan = jax.tree.map(lambda x: x * jnp.nan, state.outer.flight)
  other = jax.tree.map(jnp.copy, state)  # either's are donated
  other = other._replace(outer=other.outer._replace(flight=nan))
  read = False
  while not read and run.done < sent + 2 * run.config.outer.period:
    state, other = run.step(state, other)
    seen = (jax.device_get(_without_flight(s)) for s in (state, other))
    pairs = zip(*map(jax.tree.leaves, seen), strict=True)
    read = not all(np.array_equal(a, b) for a, b in pairs)
  return run.done - sent


def _without_flight(state):
  return state._replace(outer=state.outer._replace(flight={}))


def unread(run, *, meshes, steps):
  """HLO: nothing reads a sum before so many steps have passed since it was
  sent: a NaN in its place changes no bit of the rest until then, and then does.

  Args:
    meshes: texts as for --mesh, with replica.
  """
  with jax.enable_x64(True):
    after = {mesh: _unread(_Run(run.config, mesh)) for mesh in meshes}
  return claims.Outcome(
    f'first read after {steps}',
    f'after {experiment.numbers(after.values())}',
    f'{"; ".join(meshes)}: steps from sending a sum to the first state that it '
    'changes; compiled programs on CPU, which wait for it: that it may travel '
    'meanwhile, not that it does',
    set(after.values()) == {steps},
  )


def clips(run, *, mesh, most):
  """EQ: no number of the momentum is larger than outer.clip, some is as large.

  Args:
    mesh: text as for --mesh. most: outer.clip of this claim, small enough.
  """
  config = experiment.fields(run.config, {'outer.clip': most})
  with jax.enable_x64(True):
    run = _Run(config, mesh)
    (state,) = run.step(run.state)
    while run.done < 3 * config.outer.period:
      (state,) = run.step(state)
    numbers = jax.tree.leaves(jax.device_get(state.outer.momentum))
  numbers = np.abs(np.concatenate([x.ravel() for x in numbers]))
  clipped = int((numbers == most).sum())
  return claims.Outcome(
    f'at most {most:g}, and some clipped',
    f'{numbers.max():g}, {clipped:,} of {numbers.size:,} clipped',
    f'{mesh}: the momentum after {run.done} steps',
    bool(numbers.max() <= most) and clipped > 0,
  )


def peak(run, *, mesh, changes, within):
  """HLO: most bytes that are sent in one step, as a share of what replicas
  would send at once, without fragments; all fragments are sent (`least`).

  Args:
    mesh: text as for --mesh. changes: {'section.field': value} of the model.
    within: the share; 1 / outer.fragments, and the two ends of a model, which
      are in the last.
  """
  config, devices = experiment.on(run.config, mesh, changes)
  whole = experiment.fields(config, {'outer.fragments': 1})
  parts = list(received(config, devices).values())
  total = sum(received(whole, devices).values())
  share, sent = max(parts) / total, sum(parts) / least(config, devices)
  return claims.Outcome(
    f'<= {within:g}, of >= 1 x what has to be sent',
    f'{share:.3f}, {sent:.3f} x',
    f'{mesh}, {changes}: {config.outer.fragments} fragments, together '
    f'{sum(parts) / total:.3f} of the bytes of one',
    share <= within and _whole([sent]),
  )


def by_twos(run, *, mesh):
  """HLO: replicas that exchange by pairs send to one other alone, as many bytes
  as a replica has parameters.

  mesh: text as for --mesh.
  """
  config, devices = experiment.on(run.config, mesh)
  job = job_lib.of_shapes(config, '', devices)
  held = memory.device_bytes(job.built.params)
  each = [c for row in found(config, devices).values() for c in row]
  sent = sum(c.total for c in each) / held
  kinds = sorted({c.kind for c in each})
  return claims.Outcome(
    'collective-permute, 1 x parameters',
    f'{", ".join(kinds)}, {sent:.3f} x',
    f'{mesh}: of one of the matchings; which, is drawn at the step',
    kinds == ['collective-permute'] and sent == 1,
  )


def waits(loop, times, message):
  """Seconds that replicas wait for messages, and what all messages take.

  One message travels at a time.

  Args:
    loop: schema.Outer. times: seconds of each step. message: seconds of one.
  """
  now = free = waited = sent = 0.0
  arrives = {}
  for t, seconds in enumerate(times, 1):
    now += seconds
    for kind, p in loop.due(t):
      late = arrives.get(p, 0.0) if kind in ('land', 'turn') else 0.0
      if kind != 'land':
        free, sent = max(now, free) + message, sent + message
        arrives[p] = free
      if kind in ('exchange', 'pair'):
        late = free
      waited += max(late - now, 0.0)
      now = max(now, late)
  return waited, sent


def hidden(run, *, times, steps, seed):
  """SIM: messages of up to outer.delay steps are hidden behind them, all of it;
  of twice that, half.

  The schedule is the run's; times are drawn.

  Args:
    times: list of [seconds of a message as a share of outer.delay steps, least
      share hidden, most]. steps: simulated. seed: of the times.
  """
  loop = run.config.outer
  shares, rng = [], np.random.default_rng(seed)
  slowest = rng.lognormal(0.0, 0.1, (steps, 4)).max(1)
  for share, *_ in times:
    message = share * max(loop.delay, 1) * slowest.mean()
    waited, sent = waits(loop, slowest, message)
    shares.append(1 - waited / sent)
  fits = [
    low <= x <= high for x, (_, low, high) in zip(shares, times, strict=True)
  ]
  return claims.Outcome(
    ', '.join(f'{low:g} to {high:g}' for _, low, high in times),
    experiment.numbers(shares, '.3f'),
    f'hidden share of messages of {", ".join(f"{s:g}" for s, *_ in times)} x '
    f'outer.delay={loop.delay} steps; one message at a time, steps log-normal '
    '(0.1), the slowest of 4 replicas decides',
    all(fits),
  )
