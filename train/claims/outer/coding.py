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


def all_read():
  """Knock-out: what is decoded reads late workers too."""
  return knockouts.patched(
    coded,
    'decoding',
    lambda code, arrived: np.linalg.lstsq(code.T, np.ones(len(code)))[0],
  )


def survivors(n, tolerates):
  """(n,) bool of who delivers: all sets that a code should decode."""
  for missing in range(tolerates + 1):
    for who in itertools.combinations(range(n), missing):
      yield ~np.isin(np.arange(n), who)


def _bears(code, tolerates, shares, ok):
  """Whether no late worker is read, and each reads tolerates + 1 chunks."""
  return not shares[~ok].any() and (code != 0).sum(1).max() == tolerates + 1


def decodes(run, *, codes, within):
  """EQ: every set of survivors gives the sum of all chunks, of which a worker
  reads one more than there are stragglers, and none who is late is read.

  Args:
    codes: list of [workers, stragglers tolerated].
  """
  found, sets, bears = {}, 0, True
  for n, s in codes:
    code, gaps = coded.cyclic(n, s), []
    for ok in survivors(n, s):
      shares = coded.decoding(code, ok)
      gaps.append(np.abs(shares @ code - 1).max())
      bears &= _bears(code, s, shares, ok)
    found[f'{n}, {s}'] = max(gaps)
    sets += len(gaps)
  return experiment.equal(
    found,
    within,
    f'{sets:,} sets of survivors of workers and stragglers '
    f'{experiment.listed(found)}',
    bears,
  )


def gradients(run, *, meshes, tolerates, within):
  """EQ: loss and every gradient, whoever delivers, are those of one device;
  chunks and who is read as in `decodes`.

  Args:
    meshes: list of {'mesh': text with data, 'section.field': value}.
  """
  found, bears = {}, True
  with jax.enable_x64(True):
    for case in meshes:
      config, devices = experiment.on_case(run.config, case, experiment.shrunk)
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
          shares = coded.decoding(code, ok)
          bears &= _bears(code, tolerates, shares, ok)
          loss, grads, _ = step(shares, state.inner, batch)
          off = trial.worst(runner.job.in_order(grads), reference.gradients)
          gaps += [abs(float(loss) / reference.loss - 1), off[0]]
      found[experiment.case_text(case)] = max(gaps)
  return experiment.equal(
    found,
    within,
    f'float64, shrunk, packed rows, every set of survivors; '
    f'{experiment.listed(found)}',
    bears,
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


def _multiplexed(ok, n, bursts):
  """Of M-SGC: (load, (P,) bool, whether all jobs are whole when they are due).

  A worker delivers a part of a job a round: of the first window - 1 each is one
  of its own, of later ones a coded one, of burst, each n - most workers' worth.

  ok: (P, rounds, n) bool, patterns of who is not late.
  """
  burst, window, most = bursts
  own, slots = window - 1, window - 1 + burst
  whole = np.ones(len(ok), bool)
  for job in range(ok.shape[1] - slots + 1):
    some = ok[:, job : job + slots]
    before = some.cumsum(1) - some  # parts that a worker has delivered so far
    coded_ones = (some & (before >= own))[:, own:].sum(2)
    whole &= (some.sum(1) >= own).all(1) & (coded_ones >= n - most).all(1)
  # Of a coded part a worker reads most + 1 times what it adds to the job.
  part = 1 / (n * (own + burst / (most + 1)))
  return slots * part, whole


def _repeated(ok, n, bursts):
  """Of SR-SGC, as `_multiplexed`: in a round a worker has a part of the job of
  this round, or of that of a burst ago, if that is not enough yet."""
  burst, window, most = bursts
  tolerates = -(-burst * most // (window - 1 + burst))
  whole, jobs = np.ones(len(ok), bool), []
  for t in range(ok.shape[1]):
    again = np.zeros_like(ok[:, t])
    if t >= burst:
      old = jobs[t - burst]
      missing = n - tolerates - old.sum(1, keepdims=True)
      again = ~old & ((~old).cumsum(1) <= missing)
      whole &= (old | (ok[:, t] & again)).sum(1) >= n - tolerates
    jobs.append(ok[:, t] & ~again)
  return (tolerates + 1) / n, whole


IN_TIME = {'M-SGC': _multiplexed, 'SR-SGC': _repeated}


def in_time(run, *, n, bursts, rounds, beyond):
  """SIM: every job is whole when it is due, whatever conforming pattern of
  stragglers there is; all of them are tried. A scheme says so, and so does
  what has arrived, where workers read no more than the scheme's load.

  Args:
    n: workers. bursts: list of [burst, window, most]. rounds: simulated.
    beyond: so many more are late than the scheme is made for.
  """
  lost, tried, more = 0, 0, 0.0
  for burst, window, most in bursts:
    worse = lib.Bursts(burst, window, most + beyond)
    patterns = ~np.stack(_patterns(n, worse, rounds))
    for name, arrived in IN_TIME.items():
      load, whole = arrived(patterns, n, (burst, window, most))
      for ok, holds in zip(patterns, whole, strict=True):
        scheme = KINDS[name](n, burst, window, most)
        lost += not (all([scheme.round(row) for row in ok]) and holds)
      tried += len(patterns)
      more = max(more, load / KINDS[name](n, burst, window, most).load - 1)
  return claims.Outcome(
    '0 late, at the load',
    f'{lost:,} late, {max(more, 0):.0%} above it',
    f'of {tried:,} runs of {rounds} rounds, {n} workers, burst, window, most '
    f'{"; ".join(map(str, bursts))}; M-SGC and SR-SGC',
    lost == 0 and more <= 1e-12,
  )


def _spans(n, rounds, seeds, fixed, patience, grids):
  """({name of KINDS: seconds of each seed}, {name: the best of its grid});
  arguments as of `makespan`, fixed: one number."""
  best, found = {}, {}
  make = lambda name, row: KINDS[name](n, *row)
  late = max(make(k, row).delay for k, rows in grids.items() for row in rows)
  traces = {
    seed: lib.delays(np.random.default_rng(seed), rounds + late, n)
    for seed in (seeds[0] - 1, *seeds)
  }

  def seconds(name, row, seed):
    scheme = make(name, row)
    times = traces[seed][: rounds + scheme.delay]
    return lib.makespan(scheme, times, fixed, patience)

  for name, rows in grids.items():
    cost = lambda row, name=name: seconds(name, row, seeds[0] - 1)
    best[name] = min(rows, key=cost)
    found[name] = np.array([seconds(name, best[name], s) for s in seeds])
  return found, best


def makespan(run, *, n, rounds, seeds, fixed, patience, grids, at_most):
  """SIM: time of M-SGC over that of the gradient code, until as many jobs are
  whole; both the best of a grid on a trace of their own.

  Args:
    n: workers. rounds: jobs; of a scheme that ends one some rounds late so many
      rounds more. seeds: of the traces. fixed: {'claimed', 'told': lists of
      seconds of a round beside the work, which is 1 second at a load of 1 / n};
      what is told is not judged. patience: as of
      `sequential_coding.makespan`. grids: {name of KINDS: parameters}.
  """
  ratios, rows = {}, []
  for beside in sorted({*fixed['claimed'], *fixed['told']}):
    found, best = _spans(n, rounds, seeds, beside, patience, grids)
    ratios[beside] = found['M-SGC'] / found['GC']
    each = (f'{k} {best[k]} {found[k].mean() / rounds:.2f} s' for k in found)
    rows.append(
      f'{beside:g}: {ratios[beside].mean():.3f} '
      f'({experiment.numbers(ratios[beside], ".2f")}), {", ".join(each)}'
    )
  means = [float(ratios[beside].mean()) for beside in fixed['claimed']]
  return claims.Outcome(
    f'<= {at_most:g} at {experiment.numbers(fixed["claimed"])}',
    experiment.numbers(means, '.3f'),
    f'{n} workers, {rounds} jobs, {len(seeds)} traces with bursts; by seconds '
    f'of a round beside the work, and seconds a job: {"; ".join(rows)}',
    max(means) <= at_most,
  )
