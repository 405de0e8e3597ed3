"""Devices by the load of tasks, so that the slowest task is the fastest.

Used by claims only, as a count: no training places tasks so. A task with
several devices does load / devices of work, and a step of all tasks takes

    max_i load_i / d_i,   sum_i d_i = n,  d_i >= 1

(SE-MoE, arXiv:2205.10034, gives a task devices by its load). The next device
always goes to the task that is slowest: whatever division is better gives that
task more than it has. Cost: n times the number of tasks.
"""

from collections.abc import Sequence


def share(loads: Sequence[float], devices: int) -> list[int]:
  """Devices of each task, one at least, such that max load / devices is least.

  Args:
    loads: work of each task, >= 0, in any unit.
    devices: of all tasks together.

  Raises:
    ValueError: there are fewer devices than tasks.
  """
  if devices < len(loads):
    raise ValueError(f'{devices} devices for {len(loads)} tasks')
  out = [1] * len(loads)
  for _ in range(devices - len(loads)):
    last = max(range(len(loads)), key=lambda i: loads[i] / out[i])
    out[last] += 1
  return out
