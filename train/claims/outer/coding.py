"""Claims about gradients from workers of which some are late.

Who is late is simulated; what is decoded is computed.
"""

import functools
import itertools

import jax
import numpy as np

from paraxis.sharding.planner import sequential_coding as lib
from paraxis.train.certify import inputs
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.steps import coded

KINDS = {
  'GC': lambda n, s: lib.Coded(n, s),
  'SR-SGC': lambda n, *bursts: lib.Repeated(n, lib.Bursts(*bursts)),
  'M-SGC': lambda n, *bursts: lib.Multiplexed(n, lib.Bursts(*bursts)),
}


def repeated_chunks():
  """Knock-out: each worker sums its chunks, as if any n - s had all of them."""

  def plain(n, tolerates, seed=0):
    del seed
    near = (np.arange(n) - np.arange(n)[:, None]) % n <= tolerates
    return near / (tolerates + 1)

  return knockouts.patched(coded, 'cyclic', plain)


def survivors(n, tolerates):
  """(n,) bool of who delivers: all sets that a code should decode."""
  for missing in range(tolerates + 1):
    for who in itertools.combinations(range(n), missing):
      yield ~np.isin(np.arange(n), who)


def decodes(run, *, codes, within):
  """EQ: every set of survivors gives the sum of all chunks.

  Args:
    codes: list of [workers, stragglers tolerated].
  """
  found, sets = {}, 0
  for n, s in codes:
    code = coded.cyclic(n, s)
    gaps = [
      np.abs(coded.decoding(code, ok) @ code - 1).max()
      for ok in survivors(n, s)
    ]
    found[f'{n}, {s}'] = max(gaps)
    sets += len(gaps)
  return experiment.equal(
    found,
    within,
    f'{sets:,} sets of survivors of workers and stragglers '
    f'{experiment.listed(found)}',
  )


def gradients(run, *, meshes, tolerates, within):
  """EQ: loss and every gradient, whoever delivers, are those of one device.

  Args:
    meshes: list of {'mesh': text with data, 'section.field': value}.
  """
  found = {}
  with jax.enable_x64(True):
    for case in meshes:
      changes = {k: x for k, x in case.items() if k != 'mesh'}
      config, devices = experiment.shrunk(run.config, case['mesh'], changes)
      runner = trial.Runner(config, devices)
      reference = trial.reference(config, True, devices[0])
      n = config.mesh.data
      code = coded.cyclic(n, tolerates)
      of = functools.partial(coded.gradients, runner.job.built, code)
      with runner.job.context():
        step = jax.jit(of, compiler_options=trial.quick_options())
        state = runner.start(inputs.parameters(runner))
        batch = runner.put(reference.batches[0])
        gaps = []
        for ok in survivors(n, tolerates):
          loss, grads, _ = step(coded.decoding(code, ok), state.inner, batch)
          off = trial.worst(runner.job.in_order(grads), reference.gradients)
          gaps += [abs(float(loss) / reference.loss - 1), off[0]]
      found[experiment.case_text(case)] = max(gaps)
  return experiment.equal(
    found,
    within,
    f'float64, shrunk, packed rows, every set of survivors; '
    f'{experiment.listed(found)}',
  )


def _patterns(n, bursts, rounds):
  """(rounds, n) bool of who is late: every one that fits the bursts."""
  who = range(n)
  sets = [
    np.isin(who, c)
    for k in range(bursts.most + 1)
    for c in itertools.combinations(who, k)
  ]
  grown = [np.zeros((0, n), bool)]
  for _ in range(rounds):
    longer = (np.vstack([late, s]) for late in grown for s in sets)
    grown = [late for late in longer if bursts.holds(late)]
  return grown


def in_time(run, *, n, bursts, rounds, beyond):
  """SIM: every job is whole when it is due, whatever conforming pattern of
  stragglers there is; all of them are tried.

  Args:
    n: workers. bursts: list of [burst, window, most]. rounds: simulated.
    beyond: so many more are late than the scheme is made for.
  """
  lost, tried = 0, 0
  for burst, window, most in bursts:
    worse = lib.Bursts(burst, window, most + beyond)
    for late in _patterns(n, worse, rounds):
      for name in ('M-SGC', 'SR-SGC'):
        scheme = KINDS[name](n, burst, window, most)
        lost += not all([scheme.round(~row) for row in late])
        tried += 1
  return claims.Outcome(
    '0 late',
    f'{lost:,} late',
    f'of {tried:,} runs of {rounds} rounds, {n} workers, burst, window, most '
    f'{"; ".join(map(str, bursts))}; M-SGC and SR-SGC',
    lost == 0,
  )


def makespan(run, *, n, rounds, seeds, fixed, patience, grids, at_most):
  """SIM: time of M-SGC over that of the gradient code, both the best of a grid
  on a trace of their own.

  Args:
    n: workers. rounds, seeds: of the traces. fixed: seconds of a round beside
      the work, which is 1 second at a load of 1 / n. patience: as of
      `sequential_coding.makespan`. grids: {name of KINDS: parameters}.
  """
  trace = lambda seed: lib.delays(np.random.default_rng(seed), rounds, n)
  run_of = lambda name, row, times: lib.makespan(
    KINDS[name](n, *row), times, fixed, patience
  )
  tuning, best, found = trace(seeds[0] - 1), {}, {}
  for name, rows in grids.items():
    best[name] = min(rows, key=lambda row: run_of(name, row, tuning))
    times = [run_of(name, best[name], trace(seed)) for seed in seeds]
    found[name] = np.array(times) / rounds
  ratios = found['M-SGC'] / found['GC']
  rows = (f'{k} {best[k]} {found[k].mean():.2f} s' for k in found)
  return claims.Outcome(
    f'<= {at_most:g}',
    f'{ratios.mean():.3f}',
    f'{n} workers, {rounds} jobs, {len(seeds)} traces with bursts, '
    f'{experiment.numbers(ratios, ".2f")}; a round: {"; ".join(rows)}',
    bool(ratios.mean() <= at_most),
  )
