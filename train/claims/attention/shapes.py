"""Claims about steps whose rows are cut: what they compute, cost and teach.

    operations of a training = sum over shapes (T / k) of tokens read in it
                               times those of a token in rows of T / k

counted from the program (loop.cost): of attention they fall with the row, all
others stay. Rows of every shape are of the same text, in the same order.
"""

import collections

import jax
import numpy as np

from paraxis.sharding.meter import compiling
from paraxis.train import loop
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.bench import measure as bench_measure
from paraxis.train.certify import trial
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import families as families_lib
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.data import shape_cycle

SHARED = 'shapes'  # folder of trainings


def strided():
  """Knock-out: the tokens of a piece are not neighbours, but every k-th."""

  def fold(batch, pieces):
    of = lambda x: x.reshape(len(x), -1, pieces).swapaxes(1, 2)
    cut = lambda x: of(x).reshape(-1, x.shape[1] // pieces)
    return type(batch)(*(cut(x) if np.ndim(x) else x for x in batch))

  return knockouts.patched(shape_cycle, 'fold', fold)


def other_targets():
  """Knock-out: what is to follow the tokens of a cut row is another's text."""
  right = shape_cycle.fold

  def fold(batch, pieces):
    made = right(batch, pieces)
    if pieces == 1:
      return made
    return made._replace(targets=np.roll(made.targets, 1, 0))

  return knockouts.patched(shape_cycle, 'fold', fold)


def _apart(batch, pieces):
  """The same rows, every piece of a document a document of its own."""
  made = np.zeros((2, *batch.tokens.shape), np.int32)
  size = batch.tokens.shape[1] // pieces
  for row, names in enumerate(batch.segments):
    number, before = 0, None
    for slot, name in enumerate(names):
      if not name:
        continue
      here = slot // size, name
      if here != before:
        number, first, before = number + 1, slot, here
      made[:, row, slot] = number, slot - first
  return batch._replace(segments=made[0], positions=made[1])


def equals(run, *, mesh, pieces, within):
  """EQ: loss and every gradient of cut rows on a mesh are those of whole rows
  whose documents end where rows are cut, on one device.

  Sizes are shrunk, rows packed, arithmetic is float64.
  """
  with jax.enable_x64(True):
    rows = {'train.batch_size': 8}  # for any of the axes
    config, devices = experiment.shrunk(run.config, mesh, rows)
    one = trial.reference(config, True, devices[0])
    plain = trial.Runner(trial.plain(config), devices[:1])
    side = trial.Runner(config, devices)
    batch = one.batches[0]
    at = lambda runner, rows: runner.gradients(runner.start(one.params), rows)
    wanted, gradients, _ = at(plain, _apart(batch, pieces))
    loss, found, _ = at(side, shape_cycle.fold(batch, pieces))
    found = side.job.in_order(found)
    gaps = {
      'the loss': experiment.gap([loss], [wanted]),
      'gradients': trial.worst(found, jax.device_get(gradients))[0],
    }
  return experiment.equal(
    gaps, within, f'{mesh}, rows of {batch.tokens.shape[1]} tokens in {pieces} '
    f'pieces; {experiment.listed(gaps)}',
  )  # fmt: skip


def _work(config) -> float:
  """Operations of a training."""
  return loop.cost(config).flops * families_lib.tokens(config)


def cheaper(run, *, families, fields, seeds, better, at_most):
  """LEARN: rows that are cut teach as much for fewer operations.

  Args:
    families: {name: {field: value}}. fields: likewise, of all.
    seeds: of the trainings.
    better: list of [name, name, by]: the first has fewer bits per byte by more
      than so many, of whole held-out rows.
    at_most: {name: [name, share]}: the first takes at most so large a share of
      the operations of the other.
  """
  configs = {
    n: experiment.fields(run.config, fields, f) for n, f in families.items()
  }
  work = {n: _work(c) for n, c in configs.items()}
  shares = {n: work[n] / work[other] for n, (other, _) in at_most.items()}
  run.results.mkdir(parents=True, exist_ok=True)
  folder = run.results
  # With other code than the claim's a knock-out has trainings of its own.
  home = run if run.replaced else run.shared(SHARED)
  found, seconds = families_lib.train(home, configs, seeds, folder=folder)
  outcome = ablation.outcome(
    run, found,
    [ablation.less(found, a, b, by, seconds) for a, b, by in better],
    'bits per byte',
    'operations ' + ', '.join(f'{n} {x:.3g}' for n, x in work.items()),
    seconds,
  )  # fmt: skip
  fits = all(shares[n] <= most for n, (_, most) in at_most.items())
  if fits:
    return outcome
  return outcome._replace(
    passed=False, verdict=claims.VERDICTS[2],
    caveat=f'NOT fewer operations: {experiment.numbers(shares.values(), ".2f")}'
    f'; {outcome.caveat}',
  )  # fmt: skip


def _timed(config, steps):
  """() -> None: so many gradients of random text, of each shape in the
  proportion in which the steps of a run have it."""
  devices = experiment.devices_of(config)
  job = job_lib.of_shapes(config, '', devices)
  grads = step_lib.make(job.built, job.optimizer, 0.0).grads
  cycle, text = shape_cycle.of(config), trial.batches(config, False)[0]
  programs = {}
  counts = collections.Counter(map(cycle.pieces, range(config.train.steps)))
  with job.context():
    variables = job.initial_state().inner
    for pieces in counts:
      rows = shape_cycle.fold(text, pieces)
      batch = job.put(rows, rows=len(rows.tokens))
      program = compiling.compile_step('gradient', grads, variables, batch)
      programs[pieces] = program, batch

  def run():
    with job.context():
      for pieces, times in counts.items():
        program, batch = programs[pieces]
        for _ in range(times * steps // config.train.steps):
          jax.block_until_ready(program(variables, batch))

  return run


def seconds(run, *, families, steps, rounds, at_most):
  """CPU: CPU-seconds of gradients of a cycle over those of whole rows.

  Args:
    families: {name: {field: value}}, whole rows last. steps: that are timed.
    at_most: the median ratio.
  """
  ways, work = {}, []
  for name, family in families.items():
    config = experiment.fields(run.config, family)
    ways[name] = _timed(config, steps)
    work.append(_work(config))
  times = bench_measure.interleave(ways, rounds, bench_measure.settled)
  first, last = families
  found = bench_measure.spread(bench_measure.ratios(times[first], times[last]))
  return experiment.at_most(
    found.median, at_most,
    f'gradients, {rounds} rounds in turn; least, median, most: '
    f'{experiment.numbers(found, ".2f")}; operations {work[0] / work[1]:.2f}',
  )  # fmt: skip
