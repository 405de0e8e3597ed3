"""Paths that leave stages out (SkipPipe), and ticks for any paths.

A path is the ordered tuple of virtual stages that one microbatch visits.
`skip_paths` draws them; `place` gives every visit a tick:

    for each tick:  F of the oldest microbatch that is ready at each device,
                    then B likewise

which is list scheduling by age. It never lets two microbatches meet on a device
in one phase of a tick, nor two of them start, end or come back to their start
in one tick, because those phases run on all devices together. For full paths it
gives 1F1B tick for tick.

Source: SkipPipe, arXiv:2502.19913, section 4: the first stage is never left
out, and every stage serves a balanced number of microbatches. The paper also
exchanges neighbouring stages, and searches its paths by conflict (one agent for
each microbatch), because its nodes and links differ in speed; stages here are
equal, and a list is enough. Cost: O(ticks x microbatches) on the host.
"""

import numpy as np

from paraxis.configs.base import errors


def skip_paths(stages, microbatches, fraction, seed=0):
  """Draws a path for each microbatch; the same for the same arguments.

  Args:
    fraction: share of the stages that each microbatch leaves out, a whole
      number of them (to a twentieth: 0.33 of 3 is one).
    seed: of the choice.

  Returns:
    Tuple of paths, each in the order of the stages. Stage 0 is in all of them;
    the others differ by at most one in the number of microbatches that visit
    them.

  Raises:
    UserError: the fraction is no number of stages, or too many of them.
  """
  optional = np.arange(1, stages)
  left_out = round(fraction * stages)
  whole = abs(fraction * stages - left_out) <= 0.05
  if not whole or not 0 <= left_out <= len(optional):
    valid = np.arange(len(optional) + 1) / stages
    nearest = sorted(valid, key=lambda f: abs(f - fraction))[:2]
    raise errors.UserError(
      f'a skip fraction of {fraction:g} leaves out {fraction * stages:.3g} of '
      f'{stages} stages; it must be a whole number, at most {len(optional)}. '
      f'The nearest that are: {", ".join(f"{f:.3g}" for f in sorted(nearest))}.'
    )
  random = np.random.default_rng(seed)
  skipped = np.zeros(stages, int)
  paths = []
  for _ in range(microbatches):
    order = random.permutation(optional)
    order = order[np.argsort(skipped[order], kind='stable')][:left_out]
    skipped[order] += 1
    paths.append(tuple(s for s in range(stages) if s not in order))
  return tuple(paths)


def place(paths):
  """Ticks of every visit, by age.

  Args:
    paths: tuple of paths, none empty; every stage has a device of its own.

  Returns:
    Two dicts {(microbatch, virtual stage): tick}, forward and backward.
  """
  forward, backward = {}, {}
  ahead = [list(path) for path in paths]  # visits to come
  back = [list(path) for path in paths]  # visits to come back from
  ready_f: list[int | None] = [0] * len(paths)
  ready_b: list[int | None] = [None] * len(paths)
  tick = 0
  while any(back):
    for i in _chosen(ahead, ready_f, tick, paths, forwards=True):
      forward[i, ahead[i].pop(0)] = tick
      ready_f[i] = tick + 1
      if not ahead[i]:
        ready_b[i] = tick  # the loss runs between F and B of one tick
    for i in _chosen(back, ready_b, tick, paths, forwards=False):
      backward[i, back[i].pop()] = tick
      ready_b[i] = tick + 1
    tick += 1
  return forward, backward


def _chosen(todo, ready, tick, paths, forwards):
  """Microbatches that move in a phase of a tick, the oldest first."""
  stages, ends, out = set(), set(), []
  for i, visits in enumerate(todo):
    if not visits or ready[i] is None or ready[i] > tick:
      continue
    stage = visits[0] if forwards else visits[-1]
    first, last = stage == paths[i][0], stage == paths[i][-1]
    # What all devices do together happens once in a tick.
    shared = {('first', first)} if first else set()
    shared |= {('last', last)} if last and forwards else set()
    if stage in stages or shared & ends:
      continue
    stages.add(stage)
    ends |= shared
    out.append(i)
  return out
