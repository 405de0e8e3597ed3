"""`paraxis launch`: the processes of a run, on this machine or on several."""

import glob
import math
import os
import random
import re
import socket
import sys

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train.launch import places
from paraxis.train.launch import supervisor

COMMANDS = ('train',)  # of paraxis that run in several processes
OWN = {
  'coordinator_address': '--hosts and --port',
  'num_processes': '--processes',
  'process_id': '--host',
  'devices': '--devices_per_process',
}


def _check(command):
  """UserError unless what follows -- is a command that can be launched."""
  if not command:
    raise errors.UserError(
      'launch what? The command follows `--`: paraxis launch --processes=2 -- '
      'train --config=... --workdir=...'
    )
  if command[0] not in COMMANDS:
    raise errors.UserError(
      f'-- {command[0]}: paraxis launch starts {", ".join(COMMANDS)}.'
      + schema.suggest(command[0], COMMANDS)
    )
  for word in command[1:]:
    name = word.lstrip('-').partition('=')[0]
    if word.startswith('-') and name in OWN:
      raise errors.UserError(
        f'--{name} is set by paraxis launch: leave it out, see {OWN[name]}.'
      )


def _workdir(command):
  """The last --workdir= of a command; '': none."""
  found = ''
  for word, after in zip(command, [*command[1:], ''], strict=True):
    if word in ('--workdir', '-workdir'):
      found = after
    elif re.match('--?workdir=', word):
      found = word.partition('=')[2]
  return os.path.expanduser(found)


def _resuming(command):
  """A command without --from_scratch, which says how a run begins."""
  flag = re.compile('--?from_scratch(=.*)?')
  return [word for word in command if not flag.fullmatch(word)]


def _shares(processes, environ):
  """What of its environment each process of a machine has alone.

  GPUs are dealt out in equal parts.

  Raises:
    UserError: there are fewer, or they do not divide; or a TPU, which one
      process alone can open.
  """
  if processes == 1 or environ.get('JAX_PLATFORMS') == 'cpu':
    return [{}] * processes
  if glob.glob('/dev/accel[0-9]*') or glob.glob('/dev/vfio/[0-9]*'):
    raise errors.UserError(
      f'--processes={processes}: one process opens all TPU chips of a machine; '
      'leave it out, or ask for CPU devices: --devices_per_process=N.'
    )
  cards = [str(i) for i in range(len(glob.glob('/dev/nvidia[0-9]*')))]
  if (visible := environ.get('CUDA_VISIBLE_DEVICES')) is not None:
    cards = [card for card in visible.split(',') if card]  # '': none
  if not cards:
    return [{}] * processes
  each, left = divmod(len(cards), processes)
  if not each or left:
    raise errors.UserError(
      f'--processes={processes} of this machine cannot share its {len(cards)} '
      'GPUs: take a number that divides them, or --devices_per_process=N '
      'virtual CPU devices.'
    )
  return [
    {'CUDA_VISIBLE_DEVICES': ','.join(cards[i * each : (i + 1) * each])}
    for i in range(processes)
  ]


def _bound(host, port):
  """A port of this machine that is free; UserError: the one asked for is not.

  With port 0 it is below those that a system gives to outgoing connections:
  process 0 listens at it seconds later.
  """
  ports = [port] if port else random.sample(range(20_000, 32_000), 100)
  why = None
  for port in ports:
    try:
      family = socket.getaddrinfo(host, port)[0][0]
      # With SO_REUSEADDR, as in the roll call.
      socket.create_server((host, port), family=family).close()
      return port
    except (OSError, UnicodeError) as e:  # as of a name with an empty part
      why = getattr(e, 'strerror', None) or e
  raise errors.UserError(
    f'{host}:{ports[0]} is not to be had for process 0 ({why}): give another '
    '--port, or an address of this machine.'
  )


def _ranks(place, processes, devices, command, shares):
  """[supervisor.Rank] of this machine."""
  port = place.port if place.number else _bound(place.host, place.port)
  all_ = place.count * processes
  address = place.host if ':' not in place.host else f'[{place.host}]'
  joins = [f'--coordinator_address={address}:{port}']
  joins += [f'--num_processes={all_}']
  argv = [sys.executable, '-m', 'paraxis.train.cli', *command]
  argv += [f'--devices={devices}'] if devices else []
  out = []
  for i, own in enumerate(shares):
    number = place.number * processes + i
    mine = [*joins, f'--process_id={number}'] if all_ > 1 else []
    out.append(supervisor.Rank(number, argv + mine, dict(os.environ) | own))
  return out


def _launch(values, _, command):
  _check(command)
  if not 0 <= values.backoff < math.inf:
    raise errors.UserError(
      f'--backoff={values.backoff}: give seconds, at least 0.'
    )
  if values.port > 65535:
    raise errors.UserError(
      f'--port={values.port} is above 65535, the highest port.'
    )
  environ = os.environ
  place = places.find(values.hosts, values.host, values.num_hosts, environ)
  place = place._replace(port=values.port or place.port)
  environ = {'JAX_PLATFORMS': 'cpu'} if values.devices_per_process else environ
  shares = _shares(values.processes, environ)
  workdir = _workdir(command)
  budget = supervisor.Budget(values.restarts, values.backoff)
  before = supervisor.commits(workdir)  # --from_scratch is said of these

  def ranks():
    again = budget.used and supervisor.commits(workdir) - before
    words = _resuming(command) if again else command
    given = values.processes, values.devices_per_process, words, shares
    return _ranks(place, *given)

  ranks()  # a taken port is refused before anything starts
  first = place.number == 0
  return supervisor.Supervisor(ranks, workdir, budget, first).run()


class Launch(command_line.Command):
  """A command whose arguments after `--` are another command."""

  def __call__(self, argv):
    """Parses what stands before `--` alone -> exit code."""
    if '--' not in argv:
      _check([])
    at = argv.index('--')
    run = lambda values, config, _: self.run(values, config, argv[at + 1 :])
    return command_line.Command(*self._replace(run=run))(argv[:at])


NOTES = (
  """
A process that crashes (exit code 13, or a signal) ends the others, and all
start again from the last checkpoint: after 2, 4, 8 ... up to 60 s, at most
--restarts times without a newly committed step. Bad input (2), damage (14) and
everything else end the run. SIGTERM, SIGHUP and Ctrl-C are passed on: all save
and stop, exit code 75; a second signal stops them at once. Lines of process 0
are printed as they are, those of others after [number]. RUN/events.jsonl gets a
line for each start, end and restart.

PARAXIS_JOIN_SECONDS (120): how long processes wait for each other at the start.
PARAXIS_HEARTBEAT_SECONDS (30): without a sign of life a process counts as dead.
PARAXIS_CACHE: one folder that all machines see, or every start compiles anew.

The same command on every machine, with a workdir that all of them see. One
launcher runs on each, and starts --processes of them:

One machine
  paraxis launch --processes=2 --devices_per_process=4 -- train ...
  On GPUs leave out --devices_per_process: each process gets an equal share.

Plain hosts
  paraxis launch --hosts=10.0.0.1,10.0.0.2 --port=1234 -- train ...
  on each. The first host runs process 0. A host finds its index in the list by
  its address; --host=1 sets it.

Slurm
  srun --ntasks-per-node=1 paraxis launch -- train ...
  A task is a machine: SLURM_PROCID of SLURM_NTASKS, process 0 on the first of
  SLURM_STEP_NODELIST, its port from SLURM_JOB_ID. --signal=TERM@120 in sbatch
  leaves two minutes to save; requeue on exit code 75.

Kubernetes, GKE
  paraxis launch --num_hosts=4 -- train ...
  in the pods of an Indexed Job with parallelism 4 and a headless Service as
  its subdomain, or of a JobSet with one job: JOB_COMPLETION_INDEX, process 0 in
  the pod whose name ends in -0. A JobSet needs JOBSET_NAME from the annotation
  jobset.sigs.k8s.io/jobset-name where the pod does not know its full name.

TPU pods
  paraxis launch -- train ...
  on each worker: TPU_WORKER_ID of TPU_WORKER_HOSTNAMES; several slices:
  MEGASCALE_SLICE_ID of MEGASCALE_NUM_SLICES, process 0 at the host of
  MEGASCALE_COORDINATOR_ADDRESS. One process a machine. A TPU VM without these
  variables: --hosts, as plain hosts.
""".rstrip(),
)

COMMAND = Launch(
  _launch,
  'launch',
  '--processes=2 --devices_per_process=4 -- train ...',
  'start the processes of a run, and again after a crash',
  (
    ('positive', 'processes=N', 1, 'processes on this machine'),
    (
      'count',
      'devices_per_process=N',
      0,
      'virtual CPU devices of each; 0: the accelerators present',
    ),
    ('count', 'restarts=N', 5, 'restarts without a newly committed step'),
    (float, 'backoff=S', 2.0, 'seconds before the first restart; then doubled'),
    (list, 'hosts=HOST,...', [], 'all machines, that of process 0 first'),
    (int, 'host=K', -1, 'which of --hosts this is, from 0; -1: found'),
    ('count', 'num_hosts=N', 0, 'Kubernetes: how many pods'),
    (
      'count',
      'port=N',
      0,
      f'of process 0; 0: a free one, on several machines {places.PORT}',
    ),
  ),
  notes=NOTES,
)
