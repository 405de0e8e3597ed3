"""Whoever reads the output of a training may go away; the run stays."""

import contextlib
import os
import subprocess
import sys
import textwrap
import types

import pytest
import support

from paraxis.configs.base import errors
from paraxis.train.run import lossy
from paraxis.train.run import metrics

LINE = (
  'paraxis: nobody reads the output any more; the run continues, metrics.jsonl '
  'has its numbers\n'
)


def test_a_run_outlives_the_reader_of_its_output(tiny, tmp_path):
  """`paraxis train 2>&1 | head`: saved, evaluated, exit code 0."""
  workdir = tmp_path / 'run'
  with tiny.start(workdir, '--config.train.steps=12') as process:
    for line in process.stdout:
      if line.startswith('step 1/12'):
        break
    process.stdout.close()
    assert process.wait(300) == errors.EXIT_OK
  rows = metrics.read(workdir)
  assert list(rows) == list(range(1, 13)) and rows[12]['eval/bits_per_byte']
  assert support.fingerprints(workdir, 12)


# Prints until it is told by a file that its reader is gone, and then ends.
PROGRAM = """
  import os, sys, time
  from paraxis.configs.base import command_line, errors
  from paraxis.train.run import lossy

  def command(argv):
    print('first', flush=True)
    while not os.path.exists(sys.argv[1]):
      time.sleep(0.01)
    for stream in (sys.stdout, sys.stderr):
      for i in range(2000):
        print(i, 'x' * 80, file=stream)
    with open(sys.argv[1], 'w') as file:
      file.write('done')
    raise errors.IntegrityError('something is damaged')

  sys.exit(command_line.run({}, []))
"""


def _start(tmp_path, command, **streams):
  text = textwrap.dedent(PROGRAM).format(command)
  gone = tmp_path / 'gone'
  process = subprocess.Popen([sys.executable, '-c', text, gone], **streams)
  return process, gone


def test_the_exit_code_survives_both_streams(tmp_path):
  process, gone = _start(
    tmp_path, 'lossy.output(command)', stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
  )  # fmt: skip
  assert process.stdout.readline() == b'first\n'
  process.stdout.close()
  gone.write_text('')
  assert process.wait(60) == errors.EXIT_INTEGRITY
  assert gone.read_text() == 'done'


@pytest.mark.parametrize('kind', ['pipe', 'terminal'])
def test_one_line_says_so(tmp_path, kind):
  read, write = os.pipe() if kind == 'pipe' else os.openpty()
  process, gone = _start(
    tmp_path, 'lossy.output(command)', stdout=write, stderr=subprocess.PIPE
  )
  os.close(write)
  assert os.read(read, 5) == b'first'
  os.close(read)
  gone.write_text('')
  with process:
    said = process.stderr.read().decode()
  assert process.wait(60) == errors.EXIT_INTEGRITY
  assert said.startswith(LINE) and said.count('paraxis: ') == 2
  assert said.endswith('paraxis: something is damaged\n')


def test_other_commands_end_with_their_reader(tmp_path):
  """So the tests above can fail."""
  process, gone = _start(
    tmp_path, 'command', stdout=subprocess.PIPE, stderr=subprocess.PIPE
  )
  with process:
    assert process.stdout.readline() == b'first\n'
    process.stdout.close()
    gone.write_text('')
    assert process.stderr.read() == b''
  assert process.returncode == errors.EXIT_PIPE and gone.read_text() == ''


def test_a_full_disk_is_no_reader_that_went_away():
  """Printing to it stays an error, as of any command."""
  with open('/dev/full', 'wb', buffering=0) as full:
    write = lambda text: full.write(text.encode())
    with contextlib.redirect_stdout(types.SimpleNamespace(write=write)):
      with pytest.raises(OSError, match='No space left'):
        lossy.output(lambda: print('x'))()
