"""The processes of a run find each other, and compare what they are to run.

Before the distributed runtime starts, which aborts a process in its own words
when a peer is missing or other, every process connects to process 0's address
and sends one line of JSON: its number, how many processes it knows of, and
{name: value} of what must be equal. When all are there, or patience is over,
process 0 answers each with one line: nothing, or the reason why nobody starts,
the same for all. Then it closes the port, which jax's coordinator takes.

Neither side is authenticated, as jax's own protocol is not. A stranger's line
is dropped; nothing of it is executed, and no more than MOST_BYTES are read.
Standard library only.
"""

import contextlib
import errno
import ipaddress
import json
import os
import selectors
import socket
import time

from paraxis.configs.base import errors

MOST_BYTES = 1 << 20
SHOWN = 4  # differences that a message lists
_PORT_SECONDS = 10  # in which a port that a former run held becomes free
_EMPTY = 'nothing'


def split(address: str) -> tuple[str, int]:
  """'host:1' -> ('host', 1), '[::1]:1' -> ('::1', 1)."""
  host, _, port = address.rpartition(':')
  return host.strip('[]'), int(port)


def differences(fields: dict, first: dict, process: int) -> str:
  """Which values of a process differ from those of process 0; '': none."""
  names = [n for n in {**first, **fields} if fields.get(n) != first.get(n)]
  shown = [
    f'process {process} has {n}={fields.get(n, _EMPTY)}, process 0 has '
    f'{first.get(n, _EMPTY)}'
    for n in names[:SHOWN]
  ]
  if len(names) > SHOWN:
    shown.append(f'and {len(names) - SHOWN} more fields differ')
  return '; '.join(shown)


def refusal(all_fields: list[dict]) -> str:
  """Why processes with these fields cannot be of one run; '': they can."""
  first = all_fields[0]
  other = [p for p, fields in enumerate(all_fields) if fields != first]
  found = [differences(all_fields[p], first, p) for p in other[:SHOWN]]
  if len(other) > SHOWN:
    found.append(f'and {len(other) - SHOWN} more processes differ')
  if not found:
    return ''
  return f'the processes are of different runs: {"; ".join(found)}.'


def answer(address, processes, mine: dict, patience: float) -> None:
  """Process 0: waits for the others, compares, and tells them.

  Raises:
    UserError: the address cannot be listened at, a process is missing, is
      there twice, counts other processes, or has other fields.
  """
  with contextlib.ExitStack() as stack:
    with _listener(address) as listener:
      call = _Call(processes, mine, stack)
      call.collect(listener, time.monotonic() + patience)
    # Nobody connects from here on, until jax listens.
    why = call.why(address, patience)
    line = json.dumps({'refused': why}).encode() + b'\n'
    for connection in call.connections:
      with contextlib.suppress(OSError):
        connection.settimeout(5)
        connection.sendall(line)
        connection.recv(1)  # the other side closes first and keeps the port
  if why:
    raise errors.UserError(why)


class _Call:
  """What process 0 knows of the others.

  Attributes:
    connections: sockets of those that said who they are.
  """

  def __init__(self, processes, mine, stack):
    self._processes, self._stack = processes, stack
    self._there = {0: (here(), mine, None)}  # where it is, its fields, a socket
    self._text = {}  # socket -> what it sent so far
    self.connections, self._wrong = [], []

  def collect(self, listener, until):
    """Until all are there, one cannot be of this run, or it is too late."""
    with selectors.DefaultSelector() as ready:
      ready.register(listener, selectors.EVENT_READ)
      while not (self._wrong or self._complete()):
        left = until - time.monotonic()
        if left <= 0:
          return
        for key, _ in ready.select(left):
          if key.fileobj is listener:
            self._accept(listener, ready)
          elif not self._read(key.fileobj):
            ready.unregister(key.fileobj)

  def _complete(self):
    """Whether all are there, and none has ended since it came."""
    if len(self._there) == self._processes:
      self._there = {p: r for p, r in self._there.items() if _lives(r[2])}
    return len(self._there) == self._processes

  def _accept(self, listener, ready):
    with contextlib.suppress(OSError):
      connection, _ = listener.accept()
      self._stack.enter_context(connection)
      connection.setblocking(False)
      self._text[connection] = b''
      ready.register(connection, selectors.EVENT_READ)

  def _read(self, connection):
    """Whether more may come of a connection."""
    try:
      part = connection.recv(1 << 16)
    except BlockingIOError:
      return True
    except OSError:
      part = b''
    self._text[connection] += part
    if not part:  # it has ended: the same process may come again
      self._there = {
        p: row for p, row in self._there.items() if row[2] is not connection
      }
    elif b'\n' in part:
      self._take(connection)
    return bool(part) and len(self._text[connection]) < MOST_BYTES

  def _take(self, connection):
    """Notes who a connection is, if it is one of ours."""
    try:
      said = json.loads(self._text[connection])
      process, count = int(said['process']), int(said['processes'])
      fields, where = dict(said['fields']), str(said['where'])
    except (ValueError, TypeError, LookupError, RecursionError):
      return
    if not 0 <= process < max(count, self._processes):
      return
    self.connections.append(connection)
    before = self._there.get(process)
    if count != self._processes:
      self._wrong.append(
        f'process {process} ({where}) has --num_processes={count}, process 0 '
        f'has {self._processes}'
      )
    elif before and _lives(before[2]):
      self._wrong.append(
        f'two processes have --process_id={process}: {before[0]}, and {where}'
      )
    else:
      self._there[process] = where, fields, connection

  def why(self, address, patience):
    """Why the run cannot begin; '': it can."""
    if self._wrong:
      return f'{"; ".join(self._wrong)}.'
    missing = [p for p in range(self._processes) if p not in self._there]
    if missing:
      return (
        f'process{"es" if len(missing) > 1 else ""} '
        f'{", ".join(map(str, missing))} of {self._processes} did not come to '
        f'{address} within {patience:g} s: start all, or see what ended them.'
        + _unreachable(address)
      )
    return refusal([self._there[p][1] for p in range(self._processes)])


def _unreachable(address):
  """What keeps other machines from an address of this one; '': nothing known.

  Installers of Linux give a machine's own name 127.0.1.1 in its /etc/hosts.
  """
  host, port = split(address)
  found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
  if found == host or not ipaddress.ip_address(found).is_loopback:
    return ''
  return (
    f' On this machine {host} is {found}, which no other machine reaches: '
    'where there are several, name the address that they know (--hosts of '
    'paraxis launch).'
  )


def _lives(connection):
  """Whether the other side is still there; None is this process."""
  try:
    return not connection or bool(connection.recv(1, socket.MSG_PEEK))
  except BlockingIOError:
    return True
  except OSError:
    return False


def _listener(address):
  """A listening socket; UserError: the address is not to be had."""
  host, port = split(address)
  until = time.monotonic() + _PORT_SECONDS
  while True:
    try:
      family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
      # It has SO_REUSEADDR: connections of a former run do not hold the port.
      listener = socket.create_server((host, port), family=family, backlog=1024)
      listener.setblocking(False)
      return listener
    except OSError as e:
      if e.errno == errno.EADDRINUSE and time.monotonic() < until:
        time.sleep(0.2)
        continue
      why = f'process 0 cannot listen at {address} ({e.strerror or e})'
      remedy = 'give an address of its own machine'
      if e.errno == errno.EADDRINUSE:
        remedy = 'another program has the port; take another one'
      raise errors.UserError(f'{why}: {remedy}.') from e


def ask(address, processes, process, fields: dict, patience: float) -> None:
  """Another process: finds process 0, tells it its fields, and hears it.

  Raises:
    UserError: process 0 is not to be reached, or says why nobody can start.
  """
  until = time.monotonic() + patience
  message = dict(
    process=process, processes=processes, where=here(), fields=fields
  )
  with _reach(address, until, patience) as connection:
    connection.sendall(json.dumps(message).encode() + b'\n')
    # Process 0 began to wait later than this one, perhaps by its patience.
    connection.settimeout(2 * patience + 10)
    heard = b''
    while b'\n' not in heard and len(heard) < MOST_BYTES:
      try:
        part = connection.recv(1 << 16)
      except OSError as e:
        raise _gone(address, e) from e
      if not part:
        raise _gone(address, 'it closed the connection')
      heard += part
  try:
    why = json.loads(heard)['refused']
  except (ValueError, TypeError, LookupError):
    raise _gone(address, 'its answer is none of paraxis') from None
  if why:
    raise errors.UserError(str(why))
  _reach(address, time.monotonic() + patience, patience).close()  # jax's now


def _gone(address, why):
  return errors.UserError(
    f'--coordinator_address={address}: process 0 did not answer ({why}): see '
    'what ended it, or what else listens there.'
  )


def _reach(address, until, patience):
  """A connection to what listens at an address, as soon as something does."""
  while True:
    try:
      return socket.create_connection(split(address), 5)
    except OSError as e:
      if time.monotonic() > until:
        raise errors.UserError(
          f'--coordinator_address={address}: process 0 was not to be reached '
          f'for {patience:g} s ({e}); start it, or correct the address.'
        ) from e
    time.sleep(0.1)


def here() -> str:
  """This process, in words."""
  return f'pid {os.getpid()} on {socket.gethostname()}'
