"""Barriers of several processes: each has a name, a time-out, and says who is
late.

The coordination service of jax.distributed counts processes, so nothing here
runs on a device and a process that waits holds no collective open. Before it
waits, a process writes that it is there; one that gives up reads who is not.
All processes make the same calls in the same order, each name being counted, so
that a second barrier of the same name is another one. Cost: a round trip to
process 0, a fraction of a millisecond.
"""

import collections
import contextlib
import time

import jax
from jax._src import distributed  # the client of the service is not public

from paraxis.configs.base import errors

SECONDS = 300.0  # what a barrier of a run waits where nobody asks otherwise
_LEAVE_SECONDS = 5.0  # process 0 waits for the last words of the others
_LAST_SECONDS = 0.2  # from a process's last call until it has ended

_count = collections.Counter()
_last = {}  # key of this process at the former meeting of a name


class LateError(errors.CrashError):
  """A barrier was not passed; its name and who was late are in the text."""


def meet(name: str, seconds: float = SECONDS) -> None:
  """Returns when every process is here; see `gather`."""
  gather(name, '', seconds)


def agree(name: str, ok: bool, seconds: float = SECONDS) -> bool:
  """Whether `ok` is true in every process; see `gather`."""
  return all(text == '1' for text in gather(name, str(int(ok)), seconds))


def gather(name: str, text: str, seconds: float = SECONDS) -> list[str]:
  """The texts of all processes, by their number.

  Args:
    name: of the barrier, for its error. text: of this process, at most 1 MB.
    seconds: how long to wait for the others.

  Raises:
    LateError: some did not come in time, or one has ended.
  """
  if jax.process_count() == 1:
    return [text]
  client, me = distributed.global_state.client, jax.process_index()
  assert client is not None  # several processes have joined
  _count[name] += 1
  # No name is the beginning of another one: a folder of the service ends here.
  folder = f'paraxis/{name}/{_count[name]}/'
  try:
    client.key_value_set(f'{folder}{me}', text)
    client.wait_at_barrier(folder, int(seconds * 1000))
    found = _there(client, folder)
  except jax.errors.JaxRuntimeError as e:
    raise LateError(_why(client, name, folder, seconds, e)) from e
  # All have passed this one, so nobody reads the former one any more.
  if name in _last:
    client.key_value_delete(_last[name])
  _last[name] = f'{folder}{me}'
  return [found[i] for i in range(jax.process_count())]


def leave() -> None:
  """Before a process ends for a reason that all have: process 0 ends last.

  The service ends with process 0, and a process that outlives the service is
  aborted by its runtime, whatever it was saying.
  """
  state, folder = distributed.global_state, 'paraxis/leaving/'
  if state.client is None:
    return
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    if state.process_id:
      state.client.key_value_set(f'{folder}{state.process_id}', '')
      return
    until = time.monotonic() + _LEAVE_SECONDS
    while len(_there(state.client, folder)) < state.num_processes - 1:
      if time.monotonic() > until:
        return
      time.sleep(0.02)
    time.sleep(_LAST_SECONDS)


def _there(client, folder):
  """{process: its text} of those that came."""
  pairs = client.key_value_dir_get(folder)
  return {int(key.rsplit('/', 1)[1]): text for key, text in pairs}


def _why(client, name, folder, seconds, error):
  """The text of a `LateError`."""
  text = f'the barrier "{name}" was not passed: '
  try:
    there = _there(client, folder)
  except jax.errors.JaxRuntimeError:  # process 0 has ended, and the service
    return f'{text}process 0 is not to be reached.'
  late = [i for i in range(jax.process_count()) if i not in there]
  if not late and 'DEADLINE' in str(error):
    me = jax.process_index()
    return f'{text}process {me} came more than {seconds:g} s too late.'
  if not late:
    return text + str(error).partition('\n')[0]
  several = len(late) > 1
  return (
    f'{text}{"processes" if several else "process"} '
    f'{", ".join(map(str, late))} of {jax.process_count()} did not come '
    f'within {seconds:g} s, the others wait in it.'
  )
