"""Barriers with a name and a time-out, of two real processes."""

import subprocess
import sys
import textwrap

import pytest
import support

from paraxis.sharding import meeting

CODE = """
  import os, sys, time
  from paraxis.configs.base import command_line
  command_line.prepare_devices(1)
  import jax
  from paraxis.sharding import meeting
  me, scene = int(sys.argv[2]), sys.argv[3]
  jax.distributed.initialize(sys.argv[1], 2, me)
  client = meeting.distributed.global_state.client

  def late():
    meeting.meet('both are here', 60)
    if me:
      time.sleep(3)
    try:
      meeting.meet('before the save', 1)
    except meeting.LateError as e:
      print(e)

  def gather():
    print([meeting.gather('who', f'{me}{turn}') for turn in range(3)])
    # Two names of which one begins the other, and one that is used again.
    meeting.meet('who is it')
    meeting.meet('who')
    keys = dict(client.key_value_dir_get('paraxis/'))
    meeting.meet('last')
    print(sorted(key for key in keys if key.endswith(f'/{me}')))

  def leave():
    meeting.meet('both are here')
    if me:
      time.sleep(2)
    print('my last words', flush=True)
    meeting.leave()
    os._exit(0)

  dict(late=late, gather=gather, leave=leave)[scene]()
  sys.stdout.flush()
  sys.stdin.read()  # process 0 serves what process 1 asks, so it ends last
  os._exit(0)
"""


@pytest.fixture
def two():
  """two(scene) -> what each of two processes printed, by lines."""
  address = support.address()

  def run(scene):
    command = [sys.executable, '-c', textwrap.dedent(CODE), address]
    both = [
      subprocess.Popen(
        [*command, str(me), scene],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
      )
      for me in range(2)
    ]
    said = support.ended(both[::-1], seconds=100)[::-1]
    return [text.splitlines() for text in said]

  return run


def test_texts_of_all_by_number_and_no_key_is_left(two):
  all_ = [['00', '10'], ['01', '11'], ['02', '12']]
  for me, (texts, keys) in enumerate(two('gather')):
    assert texts == str(all_)
    # A process keeps one key a name: that of the last time.
    assert keys == str([f'paraxis/who is it/1/{me}', f'paraxis/who/4/{me}'])


@pytest.mark.fault(10)
def test_who_is_late_is_named_and_so_is_the_barrier(two):
  first, second = two('late')
  assert first == [
    'the barrier "before the save" was not passed: process 1 of 2 did not come '
    'within 1 s, the others wait in it.'
  ]
  assert second == [
    'the barrier "before the save" was not passed: process 1 came more than '
    '1 s too late.'
  ]


@pytest.mark.fault(11)
def test_process_0_ends_after_the_last_words_of_the_others(two):
  assert two('leave') == [['my last words']] * 2


def test_one_process_waits_for_nobody():
  meeting.leave()
  meeting.meet('alone', 0)
  assert meeting.gather('alone', 'text') == ['text']
