"""Which process is slower than the others, from step times of all of them.

A step in which the processes exchange anything takes equally long on all: the
fast ones wait. What tells them apart is a process's own time: a step's without
dispatches and reads, which may wait for devices (run/rates.py). It is that of
reading batches, placing them and recording. That finds a slow host; a slow
device of a healthy host is waited for by its own process too and needs the
times of its transfers.
"""

from collections.abc import Sequence
import statistics

TIMES = 2.0
LEAST = 0.01  # seconds a step; less is noise of the host
FEWEST = 5  # steps of a median


def table(own_PS: Sequence[Sequence[float]], step: int, names=None) -> str:
  """A table of all processes if one is slow, else ''.

  A process is slow if the median of its times is above `TIMES` medians of the
  others, and by more than `LEAST` seconds. Of the others: two processes have
  no median between them that one of them could be twice of.

  Args:
    own_PS: seconds of the last S steps on each of P processes, their own.
    step: the last of these steps.
    names: of the processes, such as their hosts.
  """
  medians = [statistics.median(own) for own in own_PS]
  others = [
    statistics.median(medians[:p] + medians[p + 1 :] or [float('inf')])
    for p in range(len(medians))
  ]
  slow = [
    p
    for p, (own, rest) in enumerate(zip(medians, others, strict=True))
    if own > TIMES * rest and own - rest > LEAST
  ]
  if not slow:
    return ''
  who = ', '.join(map(str, slow))
  lines = [
    f'stragglers at step {step}: process {who} above {TIMES:g} medians of the '
    f'others, over {len(own_PS[0])} steps',
    f'{"process":>7} {"own ms a step":>13} {"slowest":>9} {"/ others":>8}',
  ]
  for p, own in enumerate(own_PS):
    ratio = f'{medians[p] / others[p]:8.2f}' if others[p] else f'{"-":>8}'
    mark = '  slow' if p in slow else ''
    lines.append(
      f'{p:7} {1e3 * medians[p]:13.1f} {1e3 * max(own):9.1f} {ratio}{mark}'
      + (f'  {names[p]}' if names else '')
    )
  return '\n'.join(lines)
