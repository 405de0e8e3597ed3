"""The roll call: who is missing, there twice or other is named, in all."""

import concurrent.futures
import contextlib
import json
import socket

import pytest
import support

from paraxis.configs.base import errors
from paraxis.train.run import roll_call

FIELDS = {'optimizer.clip_norm': '1.0', '--workdir': 'runs/a'}


@pytest.fixture
def address():
  """Of a port that is free."""
  return support.address()


def _call(address, *others, processes=None, patience=10.0, seconds=1.0):
  """What each process of a roll call ends with: '' or its error's text.

  others: arguments of `ask` after the address, one process each. seconds: how
  long something listens after the roll call, as jax does.
  """

  def first():
    count = processes or len(others) + 1
    roll_call.answer(address, count, FIELDS, patience)
    with socket.create_server(roll_call.split(address)) as jax:
      jax.settimeout(seconds)
      with contextlib.suppress(TimeoutError):
        while True:
          jax.accept()[0].close()

  with concurrent.futures.ThreadPoolExecutor() as pool:
    found = [pool.submit(roll_call.ask, address, *o, patience) for o in others]
    found.insert(0, pool.submit(first))
  caught = [f.exception() for f in found]
  assert all(e is None or isinstance(e, errors.UserError) for e in caught)
  return [str(e or '') for e in caught]


def test_all_are_there_and_the_port_is_free_again(address):
  for _ in range(2):  # connections of the first do not hold it
    assert _call(address, (3, 1, FIELDS), (3, 2, FIELDS)) == ['', '', '']


@pytest.mark.fault(11)
def test_what_differs_is_named_by_value_in_all(address):
  other = FIELDS | {'optimizer.clip_norm': '0.5', 'new': '1'}
  said = _call(address, (3, 1, FIELDS), (3, 2, other))
  assert said == 3 * [
    'the processes are of different runs: process 2 has '
    'optimizer.clip_norm=0.5, process 0 has 1.0; process 2 has new=1, '
    'process 0 has nothing.'
  ]


def test_many_differences_are_counted():
  many = {f'f{i}': '2' for i in range(9)}
  text = roll_call.refusal([dict.fromkeys(many, '1'), *[many] * 6])
  assert text.count('process 1 has') == 4 and 'process 5 has' not in text
  assert 'and 5 more fields differ' in text
  assert 'and 2 more processes differ' in text
  assert roll_call.refusal([many, dict(many)]) == ''


@pytest.mark.fault(9)
def test_who_is_missing_is_named_in_all(address):
  said = _call(address, (4, 2, FIELDS), processes=4, patience=0.6)
  assert said[0] == said[1] and '\n' not in said[0]
  assert f'processes 1, 3 of 4 did not come to {address} within 0.6' in said[0]


@pytest.mark.parametrize('host', ['localhost', '127.0.0.1'])
def test_a_name_that_is_loopback_here_is_said(address, host):
  """As a machine's own name in its /etc/hosts; the others know it by DNS."""
  address = f'{host}:{roll_call.split(address)[1]}'
  with pytest.raises(errors.UserError) as caught:
    roll_call.answer(address, 2, FIELDS, 0.3)
  said = str(caught.value)
  assert f'process 1 of 2 did not come to {address} within' in said
  words = ' On this machine localhost is 127.0.0.1, which no other machine reac'
  assert (words in said) == (host == 'localhost') and '\n' not in said


def test_two_with_one_number(address):
  said = _call(address, (3, 1, FIELDS), (3, 1, FIELDS))
  assert len(set(said)) == 1
  assert said[0].startswith('two processes have --process_id=1: pid ')
  assert said[0].count(roll_call.here()) == 2


def test_another_number_of_processes(address):
  said = _call(address, (3, 1, FIELDS), processes=2)
  assert said[0] == said[1]
  assert 'has --num_processes=3, process 0 has 2' in said[0]


def _send(address, text, hold=True):
  """A connection that sent something; hold: it stays open."""
  connection = roll_call._reach(address, roll_call.time.monotonic() + 10, 10)
  connection.sendall(text)
  if not hold:
    connection.close()
  return connection


def test_strangers_and_who_comes_again(address):
  """None of them is taken for a process, or keeps the others out."""
  again = dict(process=1, processes=3, where='once', fields={'other': 1})
  lines = [
    b'GET / HTTP/1.1\r\n\r\n', b'[' * 2**16 + b'\n', b'{}\n', b'half a line',
    json.dumps(again | {'process': 7}).encode() + b'\n',
    json.dumps(again | {'fields': 3}).encode() + b'\n',
    b'x' * (roll_call.MOST_BYTES + 9),
  ]  # fmt: skip

  with concurrent.futures.ThreadPoolExecutor() as pool:
    answered = pool.submit(_call, address, processes=3)
    held = [_send(address, line) for line in lines]
    # Process 2 asks after this one has ended: all are there at no time before.
    _send(address, json.dumps(again).encode() + b'\n', hold=False)
    asked = [
      pool.submit(roll_call.ask, address, 3, p, FIELDS, 10.0) for p in (1, 2)
    ]
    assert answered.result() == ['']
    assert [a.result() for a in asked] == [None, None]
    for connection in held:
      connection.close()


def test_a_taken_port(address, monkeypatch):
  monkeypatch.setattr(roll_call, '_PORT_SECONDS', 0.3)
  with socket.create_server(roll_call.split(address)):
    with support.refused(f'cannot listen at {address}', 'has the port'):
      roll_call.answer(address, 2, FIELDS, 1)


@pytest.mark.parametrize('host', ['192.0.2.1', 'no-such-host.invalid'])
def test_an_address_of_another_machine(host):
  with support.refused(f'cannot listen at {host}:9', 'of its own machine'):
    roll_call.answer(f'{host}:9', 2, FIELDS, 1)


@pytest.mark.parametrize(
  'reply, words', [(b'', 'closed the connection'), (b'hello\n', 'none of')]
)
def test_something_else_listens(address, reply, words):
  def other():
    with socket.create_server(roll_call.split(address)) as listener:
      connection, _ = listener.accept()
      with connection:
        connection.recv(1 << 16)
        connection.sendall(reply)

  with concurrent.futures.ThreadPoolExecutor() as pool:
    pool.submit(other)
    with support.refused('process 0 did not answer', words):
      roll_call.ask(address, 2, 1, FIELDS, 5.0)


def test_addresses():
  assert roll_call.split('a.b:1') == ('a.b', 1)
  assert roll_call.split('[::1]:80') == ('::1', 80)
