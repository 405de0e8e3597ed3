"""Joining the processes of a run on several hosts, and exiting immediately.

A failing process exits without jax's exit barrier, so that its peers fail
within a second instead of hanging until their heartbeats stop.
"""

import os
import socket
import sys
import threading
import time
import traceback
import zlib

from paraxis.configs.base import errors

# jax's defaults (300, 100 and 300 s) leave peers of a dead host hanging for
# minutes.
JOIN_SECONDS = 120
HEARTBEAT_SECONDS = 30
SILENT_SECONDS = 3  # of waiting, before a process says for whom

_connected = False  # to other processes


def check(address, num_processes, process_id):
  """Whether flags ask for several hosts; UserError if they are inconsistent."""
  if not address and not num_processes and process_id < 0:
    return False
  host, _, port = address.rpartition(':')
  if not (host and port.isdigit() and 0 < int(port) < 65536):
    raise errors.UserError(
      f'--coordinator_address={address}: not HOST:PORT; several hosts need it '
      'together with --num_processes and --process_id.'
    )
  if num_processes < 1 or not 0 <= process_id < num_processes:
    raise errors.UserError(
      f'--process_id={process_id} is not in 0 .. {num_processes - 1}, of '
      f'--num_processes={num_processes}.'
    )
  return True


def connect(address, num_processes, process_id, patience=JOIN_SECONDS):
  """Joins the processes of a run; before anything else starts jax.

  If process 0 does not listen, jax waits for minutes and then aborts, so the
  other processes look for it first. Process 0 listens on the given address
  alone, not on all interfaces.
  """
  global _connected
  hosts = address, num_processes, process_id
  waiting = threading.Timer(SILENT_SECONDS, _say_waiting, hosts)
  waiting.daemon = True
  waiting.start()
  try:
    if process_id:
      _wait_for(address, patience)
    import jax

    sys.excepthook = _fail_at_once
    jax.distributed.initialize(
      *hosts,
      initialization_timeout=patience,
      heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
      shutdown_timeout_seconds=HEARTBEAT_SECONDS,
      coordinator_bind_address=None if process_id else address,
    )
  finally:
    waiting.cancel()
  _connected = True


def _say_waiting(address, num_processes, process_id):
  absent = num_processes - 1
  print(
    f'process {process_id}: waiting for {"up to " if absent > 1 else ""}'
    f'{absent} of {num_processes} processes at {address}',
    file=sys.stderr,
    flush=True,
  )


def _wait_for(address, patience):
  host, _, port = address.rpartition(':')
  until = time.monotonic() + patience
  while True:
    try:
      socket.create_connection((host, int(port)), 5).close()
      return
    except OSError as e:
      if time.monotonic() > until:
        raise errors.UserError(
          f'--coordinator_address={address}: process 0 was not to be reached '
          f'for {patience} s ({e}); start it, or correct the address.'
        ) from e
    time.sleep(0.2)


def _fail_at_once(kind, error, trace):
  traceback.print_exception(kind, error, trace)
  exit_now(errors.EXIT_CRASH)


def disagreement(ready: bool, text: str) -> str:
  """Why the processes cannot begin together, in one line; '': they can.

  Args:
    ready: of process 0, whether it can. text: what must be the same in all.
  """
  from jax.experimental import multihost_utils
  import numpy as np

  mine = np.asarray([ready, zlib.crc32(text.encode())], np.uint32)
  all_ = np.asarray(multihost_utils.process_allgather(mine))
  if not all_[0, 0]:
    return 'process 0 cannot start, and says why.'
  other = np.flatnonzero(all_[:, 1] != all_[0, 1])
  if other.size:
    return (
      f'processes {", ".join(map(str, other))} have another configuration, '
      'text or tokenizer than process 0: start all with the same arguments.'
    )
  return ''


def exit_now(code):
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def connected():
  """Whether this process has joined others."""
  return _connected
