"""Where a machine stands in a run, from the environment of its scheduler."""

import pytest
import support

from paraxis.configs.base import errors
from paraxis.train.launch import places

SLURM = dict(
  SLURM_PROCID='3', SLURM_NTASKS='4', SLURM_JOB_ID='4097',
  SLURM_STEP_NODELIST='node[02-04,11]', SLURM_JOB_NODELIST='a,b',
)  # fmt: skip
# -N2: beside what srun sets later, in a script and in a shell.
SALLOC = dict(
  SLURM_JOB_ID='4097', SLURM_JOB_NUM_NODES='2', SLURM_JOB_NODELIST='a,b'
)  # fmt: skip
SBATCH = SALLOC | dict(SLURM_PROCID='0')
POD = dict(JOB_COMPLETION_INDEX='2', HOSTNAME='song-2.song.voices.svc')
TPU = dict(TPU_WORKER_ID='1', TPU_WORKER_HOSTNAMES='t-0.s,t-1.s')
SLICES = TPU | dict(
  MEGASCALE_NUM_SLICES='3', MEGASCALE_SLICE_ID='2',
  MEGASCALE_COORDINATOR_ADDRESS='t-0-0.s:8080',
)  # fmt: skip


def _find(environ, hosts=(), number=-1, count=0):
  return places.find(list(hosts), number, count, environ)


@pytest.mark.parametrize(
  'text, names',
  [
    ('node', ['node']),
    ('a,b', ['a', 'b']),
    ('node[01-03,7]', ['node01', 'node02', 'node03', 'node7']),
    ('n[099-101],login', ['n099', 'n100', 'n101', 'login']),
    ('r[1-2]n[08-9]-ib', ['r1n08-ib', 'r1n09-ib', 'r2n08-ib', 'r2n09-ib']),
  ],
)  # fmt: skip
def test_node_lists_of_slurm(text, names):
  assert places.nodes(text) == names


@pytest.mark.parametrize(
  'environ, count, place',
  [
    ({}, 0, (1, 0, '127.0.0.1', 0)),
    (SLURM, 0, (4, 3, 'node02', 61441)),
    (SLURM | {'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'}, 0,
     (1, 0, '127.0.0.1', 0)),
    # A step on one node of a job of two.
    (SLURM | {'SLURM_NTASKS': '1', 'SLURM_JOB_NUM_NODES': '2'}, 0,
     (1, 0, '127.0.0.1', 0)),
    (SALLOC | {'SLURM_JOB_NUM_NODES': '1'}, 0, (1, 0, '127.0.0.1', 0)),
    (SALLOC, 1, (1, 0, '127.0.0.1', 0)),
    (SBATCH | {'SLURM_NTASKS': '2'}, 1, (1, 0, '127.0.0.1', 0)),
    (POD, 4, (4, 2, 'song-0.song.voices.svc', places.PORT)),
    (POD | {'HOSTNAME': 'set-workers-0-2', 'JOBSET_NAME': 'set'}, 4,
     (4, 2, 'set-workers-0-0.set', places.PORT)),
    (TPU, 0, (2, 1, 't-0.s', places.PORT)),
    # A pod of a TPU slice is one of an Indexed Job too.
    (SLICES | POD, 0, (6, 5, 't-0-0.s', places.PORT)),
    ({'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'}, 0,
     (1, 0, '127.0.0.1', 0)),
  ],
)  # fmt: skip
def test_schedulers(environ, count, place):
  assert _find(environ, count=count)[:4] == place


@pytest.mark.parametrize(
  'environ, words',
  [
    ({'SLURM_PROCID': '0', 'SLURM_NTASKS': '4'}, ['no job step', 'srun']),
    (SBATCH, ['SLURM_JOB_NUM_NODES=2', 'no job step', 'srun']),
    (SALLOC, ['SLURM_JOB_NUM_NODES=2', '--hosts=localhost']),
    (SLURM | {'SLURM_PROCID': '4'}, ['this is machine 4 of 4']),
    (SLURM | {'SLURM_NTASKS': 'many'}, ["'many'", '--hosts=HOST,HOST']),
    (SLURM | {'SLURM_STEP_NODELIST': 'n[a-b]'}, ["'a'", '--hosts=HOST,HOST']),
    (POD, ['--num_hosts=N']),
    (SLICES | {'MEGASCALE_COORDINATOR_ADDRESS': ''}, ['_NUM_SLICES=3']),
    (TPU | {'TPU_WORKER_ID': '2'}, ['this is machine 2 of 2']),
  ],
)  # fmt: skip
def test_what_a_scheduler_does_not_say(environ, words):
  with support.refused(*words):
    _find(environ)


@pytest.mark.parametrize('environ', [SBATCH, POD])
def test_one_advice_is_given(environ):
  with pytest.raises(errors.UserError) as caught:
    _find(environ)
  assert 'not understood' not in str(caught.value)


def test_a_pod_without_a_service():
  for name in ('song-2', 'other.song'):
    with support.refused('not JOB-2.SERVICE', 'headless Service'):
      _find(POD | {'HOSTNAME': name}, count=4)


def test_plain_hosts_find_themselves():
  """192.0.2.0/24 is nobody's."""
  there = 'localhost', '192.0.2.7'
  assert _find({}, there)[:4] == (2, 0, 'localhost', places.PORT)
  assert _find({}, there[::-1])[:4] == (2, 1, '192.0.2.7', places.PORT)
  assert _find(SLURM, there, 1)[:4] == (2, 1, 'localhost', places.PORT)
  assert _find(SBATCH, ['localhost'])[:3] == (1, 0, 'localhost')
  with support.refused('0 of --hosts=192.0.2.7,192.0.2.8', '--host=1'):
    _find({}, ['192.0.2.7', '192.0.2.8'])
  with support.refused('--host=2 is not in 0 .. 1'):
    _find({}, there, 2)
  for environ in ({}, SLURM):
    with support.refused('--host=1', 'name the machines'):
      _find(environ, number=1)
  with support.refused('--num_hosts=4', 'names 2'):
    _find({}, there, count=4)
