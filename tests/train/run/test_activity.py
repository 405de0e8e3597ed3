"""One call tells both: what a run does, and that it goes on."""

import json
import subprocess
import sys
import textwrap

from paraxis.configs.base import errors
from paraxis.train.run import activity
from paraxis.train.run import goodput
from paraxis.train.run import ledger


def test_both_are_told(tmp_path):
  path = tmp_path / ledger.FILE
  with activity.Activity(path, 1800) as doing:
    with doing.phase('steps', 3):
      doing.step(4)
      assert doing._dog._phase == 'steps' and doing._dog._step == 4
      with doing.phase('save'):
        assert doing._dog._phase == 'save' and doing._dog._thread.is_alive()
        doing.beat()
      doing.commit(4)
    doing.end('stopped')
  assert not doing._dog._thread.is_alive()
  found = [json.loads(line) for line in path.read_text().splitlines()]
  assert [r.get('name', r['event']) for r in found] == [
    'start', 'steps', 'save', 'steps', 'commit', 'other', 'end',
  ]  # fmt: skip


def test_a_run_that_hangs_is_accounted_for_as_a_stall(tmp_path):
  code = """
    import sys, threading
    from paraxis.train.run import activity
    with activity.Activity(sys.argv[1], 1.0) as doing, doing.phase('steps', 0):
      doing.step(1)
      with doing.phase('save'):
        threading.Event().wait()
  """
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code), tmp_path / ledger.FILE],
    capture_output=True, text=True, timeout=100,
  )  # fmt: skip
  assert done.returncode == errors.EXIT_CRASH
  assert 'in phase save, after step 1' in done.stderr
  found = goodput.account(tmp_path)
  assert found['seconds']['stall'] >= 0.99
  assert found['attempts'][0]['ended'] == 'stalled in save'
