"""Agreement of the processes of a run without a program on their devices.

Threads that write checkpoints call it while the main thread trains: they may
not run jax programs, whose collectives would be in another order in another
process. It goes through the coordination service that jax.distributed starts.
"""

import itertools
from typing import Any

import jax
from jax._src import distributed  # no public name for the running service

from paraxis.configs.base import errors

SECONDS = 600  # until a process that does not come is an error

_counts: dict[str, itertools.count] = {}


def agree(what: str, ok: bool = True, seconds: float = SECONDS) -> bool:
  """Waits for all processes -> True if `ok` is true in every one.

  Every process makes the same calls of one name in the same order.

  Args:
    what: name of the meeting, for messages. ok: of this process.
    seconds: after which the absent are named.

  Raises:
    CrashError: a process did not come in time.
  """
  if jax.process_count() == 1:
    return ok
  client: Any = distributed.global_state.client
  number = next(_counts.setdefault(what, itertools.count()))
  key = f'paraxis/{what}/{number}'
  client.key_value_set(f'{key}/{jax.process_index()}', str(int(ok)))
  try:
    client.wait_at_barrier(key, int(1000 * seconds))
  except Exception as e:  # jax raises its own kind, without a public name
    came = {int(k.rsplit('/', 1)[1]) for k, _ in client.key_value_dir_get(key)}
    absent = sorted(set(range(jax.process_count())) - came)
    raise errors.CrashError(
      f'{what}: processes {", ".join(map(str, absent)) or "?"} did not come '
      f'within {seconds:g} s.'
    ) from e
  found = [value for _, value in client.key_value_dir_get(key)]
  return all(value == '1' for value in found)
