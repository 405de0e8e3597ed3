"""Claims about pipeline schedules, all simulated (SIM): exact, without a clock.

Time over ideal time, less one, is the bubble; on p stages of v chunks with m
microbatches it is

    (p - 1) / (v m)              GPipe (1811.06965), 1F1B and interleaved 1F1B
                                 (2104.04473, section 2.2)
    (p - 1) (F + B - W) / (3 m)  ZB-H1 (2401.10241), F = B = W = 1

The head costs 2 h V operations a token and a layer 24 h^2 + 4 s h, forward, and
twice that backward (2104.04473, appendix): a large vocabulary V on the last
stage makes all others wait (2411.05288). With l layers on each stage and a head
that costs x of them, the head on all stages is as many times as fast:

    (l (m + p - 1) + x m) / (l (m + p - 1) + x m / p)
"""

import itertools

from paraxis.configs.base import errors
from paraxis.sharding.pipeline import schedules
from paraxis.sharding.planner import simulate
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts

LOCK_STEP, ASYNCHRONOUS = simulate.MODELS
PHASED = (
  'simulated with F, B and W of equal cost and messages that cost nothing; '
)


def one_microbatch():
  """Knock-out: a batch is not split, whatever number is asked for."""
  make = schedules.make
  whole = lambda name, p, m, *rest, **how: make(name, p, 1, *rest, **how)
  return knockouts.patched(schedules, 'make', whole)


def plain_1f1b():
  """Knock-out: 1F1B of whole stages, whatever is asked for: chunks are not
  interleaved, GPipe does not run all forwards first."""
  make = schedules.make
  plain = lambda name, p, m, *rest, **how: make('one_f_one_b', p, m)
  return knockouts.patched(schedules, 'make', plain)


def one_stage():
  """Knock-out: no pipeline, one stage has all the layers."""
  make = schedules.make
  whole = lambda name, p, m, *rest, **how: make(name, 1, m)
  return knockouts.patched(schedules, 'make', whole)


def head_last():
  """Knock-out: the head stands on the last stage."""
  run = simulate.run
  last = lambda *given, **costs: run(*given, **costs | {'vocabulary': 'last'})
  return knockouts.patched(simulate, 'run', last)


def bubbles(run, *, schedule, cases, share, model):
  """SIM: the bubble is share (p - 1) / (v m), exactly.

  Args:
    schedule: of schedules.NAMES. cases: [[p, m, v], ...].
    share: of the bubble of 1F1B. model: of simulate.MODELS.
  """
  rows, worst = [], 0.0
  for p, m, v in cases:
    result = simulate.run(schedules.make(schedule, p, m, v), model)
    expected = share * (p - 1) / (v * m)
    worst = max(worst, abs(result.bubble - expected))
    rows.append(f'({p}, {m}, {v}): {result.bubble:.4f}')
  how = (
    'every tick waits for its slowest device, as our executor does'
    if model == LOCK_STEP
    else 'devices run on their own, as papers count'
  )
  return claims.Outcome(
    f'{share:.3g} (p-1)/(vm)',
    f'{worst:.0e} off at most',
    f'{PHASED}{how}; (p, m, v): bubble: {", ".join(rows)}',
    worst < 1e-9,
  )


def bubble_share(run, *, schedule, per_stage, stages, at_most):
  """SIM: share of the time that devices wait, m = per_stage p microbatches."""
  shares = {}
  for p in stages:
    result = simulate.run(schedules.make(schedule, p, per_stage * p))
    shares[p] = result.bubble / (1 + result.bubble)
  return claims.Outcome(
    f'<= {at_most:.0%}',
    f'{max(shares.values()):.1%}',
    f'{PHASED}m = {per_stage} p; by stages: '
    + ', '.join(f'{p}: {x:.1%}' for p, x in shares.items()),
    max(shares.values()) <= at_most,
  )


def trend(run, *, schedule, cases, expected, within):
  """SIM: time over ideal time, as stages and microbatches change.

  Args:
    cases: [[p, m], ...] in order. expected: 'rises'; 'constant', the largest
      at most `within` above the smallest; or 'falls', and in the end no case
      gains `within` over the one before.
  """
  found = [
    1 + simulate.run(schedules.make(schedule, p, m)).bubble for p, m in cases
  ]
  pairs = list(itertools.pairwise(found))
  right = {
    'rises': all(a < b for a, b in pairs),
    'constant': max(found) <= (1 + within) * min(found),
    'falls': all(a > b for a, b in pairs)
    and pairs[-1][0] <= (1 + within) * pairs[-1][1],
  }
  if expected not in right:
    raise errors.UserError(
      f'expected={expected!r} is not one of {", ".join(right)}.'
    )
  return claims.Outcome(
    expected,
    experiment.numbers(found, '.3f'),
    f'{PHASED}{schedule}, time over ideal time; (p, m): '
    f'{", ".join(f"({p}, {m})" for p, m in cases)}; no throughput is claimed',
    right[expected],
  )


def inputs_held(run, *, schedule, cases, balanced):
  """SIM: most inputs of chunks that a device holds at once.

  Args:
    cases: [[p, m, v, inputs], ...]. balanced: all devices hold as many.
  """
  found, right, even = [], True, True
  for p, m, v, inputs in cases:
    held = schedules.make(schedule, p, m, v).in_flight()
    right &= max(held) == inputs
    even &= len(set(held)) == 1
    found.append(max(held))
  shape = ', '.join(f'({p}, {m}, {v})' for p, m, v, _ in cases)
  return claims.Outcome(
    experiment.numbers(inputs for *_, inputs in cases),
    experiment.numbers(found),
    f'(p, m, v) = {shape}; an input of a chunk is 1 / v of a stage; '
    + ('all devices hold as many' if even else 'later devices hold fewer')
    + '; phased 1F1B holds 2 p - 1 where classic 1F1B holds p',
    right and even == balanced,
  )


def _redistributed(layers, stages, head):
  """Layers of each stage, head on the last, such that the dearest is least."""

  def split(last):
    first, more = divmod(layers - last, stages - 1)
    return [first + (s < more) for s in range(stages - 1)] + [last]

  dearest = lambda counts: max(*counts[:-1], counts[-1] + head)
  return min(map(split, range(layers + 1)), key=dearest)


def vocabulary_speedup(
  run, *, shape, stages, microbatches, vocabularies, against, between
):
  """SIM: the head on all stages against the head on the last one.

  Against even layers it is faster by the formula above, and by less against
  layers that are moved.

  Args:
    shape: {'layers', 'hidden', 'sequence'}. vocabularies: [V, ...], rising.
    against: 'even', as many layers on each stage, or 'redistributed', layers
      moved away from the last stage as whole ones allow.
    between: [low, high], with neither: how many times as fast.
  """
  if against not in ('even', 'redistributed'):
    raise errors.UserError(f'against={against!r}: even or redistributed.')
  layers, h, s = (shape[k] for k in ('layers', 'hidden', 'sequence'))
  schedule = schedules.make('one_f_one_b', stages, microbatches)
  found, formula = [], []
  for vocabulary in vocabularies:
    head = 2 * h * vocabulary / (24 * h**2 + 4 * s * h)  # in layers
    even = layers / stages
    counts = [even] * stages
    work, ends = even * (microbatches + stages - 1), head * microbatches
    formula.append((work + ends) / (work + ends / stages))
    if against == 'redistributed':
      counts = _redistributed(layers, stages, head)
    time = lambda counts, where, head=head: (
      simulate.run(
        schedule,
        ASYNCHRONOUS,
        forward=counts,
        backward=counts,
        weight=counts,
        head=head,
        vocabulary=where,
      ).time
    )
    found.append(time(counts, 'last') / time([even] * stages, 'spread'))
  right = experiment.close(found, formula, 1e-9)
  if against == 'redistributed':
    right = all(a < b + 1e-9 for a, b in zip(found, formula, strict=True))
  (low, high), most = between, '<= ' * (against == 'redistributed')
  return claims.Outcome(
    f'{most}{experiment.numbers(formula, ".2f")}, {low:g} to {high:g}',
    experiment.numbers(found, '.2f'),
    f'V = {", ".join(f"{v // 1024}k" for v in vocabularies)}, {stages} stages, '
    f'{microbatches} microbatches, {layers} layers of {h}, {s} tokens; against '
    f'{against} layers; operations alone, so all-reduces are free and small '
    'matrices are as fast as large ones',
    right and all(low < x < high for x in found),
  )


def _balanced(schedule):
  """Costs of stages in inverse proportion to how often they are visited."""
  p = schedule.stages
  visits = [sum(s in path for path in schedule.paths) for s in range(p)]
  total = sum(1 / n for n in visits)
  return [p / n / total for n in visits]


def skip_makespan(run, *, stages, microbatches, fraction, send, below):
  """SIM: time of a step in which microbatches skip stages, / of all stages.

  Args:
    fraction: share of stages left out. send: time of a message; F, B and W of
      a stage take 1 each. below: of devices on their own.
  """
  full = schedules.make('one_f_one_b', stages, microbatches)
  skip = schedules.make('skip', stages, microbatches, fraction=fraction)
  ratio = {}
  for model in simulate.MODELS:
    base = simulate.run(full, model, send=send).time
    even = simulate.run(skip, model, send=send).time
    parts = dict.fromkeys(('forward', 'backward', 'weight'), _balanced(skip))
    fair = simulate.run(skip, model, send=send, **parts).time
    ratio[model] = even / base, fair / base
  even, fair = ratio[ASYNCHRONOUS]
  locked = min(ratio[LOCK_STEP])
  return claims.Outcome(
    f'< {below:g}',
    f'{fair:.3f}',
    f'{stages} stages, {microbatches} microbatches, {fraction:.0%} left out, '
    f'messages {send:g}; the first stage, which is never left out, given the '
    f'smaller share of the layers, else {even:.3f}; paths are drawn, not '
    'searched, on equal devices and links. In lock step, as our executor runs, '
    f'a tick costs as much however few devices work: {locked:.3f} at best',
    fair < below,
  )
