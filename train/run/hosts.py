"""Joining the processes of a run on several hosts, and exiting immediately.

They call the roll first (roll_call.py): who is missing, or of another run, is
named before the distributed runtime starts. What is known only once the text
is read is compared again in `differing`. A failing process exits without jax's
exit barrier, so that its peers fail within a second instead of hanging until
their heartbeats stop.

PARAXIS_JOIN_SECONDS and PARAXIS_HEARTBEAT_SECONDS replace the two periods here.
"""

import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
import threading
import time
import traceback

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import extra
from paraxis.configs.base import mixers
from paraxis.train.run import roll_call
from paraxis.train.run import stop
from paraxis.train.run import workdir as workdir_lib

# jax's defaults (300, 100 and 300 s) leave peers of a dead host hanging for
# minutes.
JOIN_SECONDS = 120
HEARTBEAT_SECONDS = 30
SILENT_SECONDS = 3  # of waiting, before a process says for whom
START_SECONDS = 3600  # each host may have a long text to read
END_SECONDS = 3600  # process 0 compares with gzip, and a logger uploads
SHARED_SECONDS = 5.0  # in which a network file system shows a new file

FOLDERS = ('configs', 'decode', 'models', 'pallas_kernels', 'sharding', 'train')
PACKAGES = (
  'jax', 'jaxlib', 'numpy', 'flax', 'optax', 'orbax-checkpoint',
  'grain', 'tokenizers',  # the order of rows, and their ids
)  # fmt: skip
LOCAL = ('data.path', 'data.cache_dir')  # a host may keep its text elsewhere

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


def _seconds(name, default):
  """A period, as the environment or this file has it."""
  text = os.environ.get(name, '')
  if text and not (text.isdecimal() and int(text)):
    raise errors.UserError(f'{name}={text} is not a whole number of seconds.')
  return int(text or default)


def connect(address, num_processes, process_id, fields=None, patience=None):
  """Joins the processes of a run; before anything else starts jax.

  Signals are kept from here on, until stop.Stop asks for them. Process 0
  listens on the given address alone, not on all interfaces.

  Args:
    address: 'HOST:PORT' of process 0. num_processes, process_id: int.
    fields: {name: value} that must be the same in all, of `fields_of`.
    patience: seconds to wait for the others.

  Raises:
    UserError: one is missing, or is of another run; all raise it alike.
  """
  global _connected
  hosts = address, num_processes, process_id
  beat = _seconds('PARAXIS_HEARTBEAT_SECONDS', HEARTBEAT_SECONDS)
  if patience is None:
    patience = _seconds('PARAXIS_JOIN_SECONDS', JOIN_SECONDS)
  waiting = threading.Timer(SILENT_SECONDS, _say_waiting, hosts)
  waiting.daemon = True
  waiting.start()
  try:
    with stop.early():
      if process_id:
        roll_call.ask(*hosts, fields or {}, patience)
      else:
        roll_call.answer(address, num_processes, fields or {}, patience)
      import jax

      sys.excepthook = _fail_at_once
      # It takes SIGTERM, and tells nobody but Orbax's manager.
      jax.config.update('jax_enable_preemption_service', False)
      jax.distributed.initialize(
        *hosts,
        cluster_detection_method=_detection(os.environ),
        initialization_timeout=max(patience, 1),
        heartbeat_timeout_seconds=beat,
        shutdown_timeout_seconds=beat,
        coordinator_bind_address=None if process_id else address,
      )
  finally:
    waiting.cancel()
  _connected = True


def _detection(environ):
  """What jax may find by itself: 'deactivate', nothing; None: as it does.

  Within a step of Slurm or Open MPI it leaves a process one GPU, that of the
  task's number on its machine. That is right where a machine has several tasks;
  processes of its only task have all that they see.
  """
  of = lambda name: int(environ.get(name) or 1)
  shared = of('SLURM_NTASKS') > of('SLURM_STEP_NUM_NODES')
  several = shared or of('OMPI_COMM_WORLD_LOCAL_SIZE') > 1
  return None if several else 'deactivate'


def _say_waiting(address, num_processes, process_id):
  absent = num_processes - 1
  print(
    f'process {process_id}: waiting for {"up to " if absent > 1 else ""}'
    f'{absent} of {num_processes} processes at {address}',
    file=sys.stderr,
    flush=True,
  )


def _fail_at_once(kind, error, trace):
  traceback.print_exception(kind, error, trace)
  exit_now(errors.EXIT_CRASH)


def _config(config):
  """{dotted field: its value as text} of what hosts must agree on."""
  names = [n for n, _ in schema.fields() if not n.startswith(f'{extra.NAME}.')]
  values = {n: schema.value(config, n) for n in names if n not in LOCAL}
  return {n: repr(x) for n, x in (values | extra.flat(config.extra)).items()}


def _code():
  """{'sha256(train/step.py)': the first digits of it} of every source file."""
  root = pathlib.Path(schema.__file__).resolve().parents[1]
  files = [p for f in FOLDERS for p in sorted((root / f).rglob('*.py'))]
  return {
    f'sha256({p.relative_to(root).as_posix()})': hashlib.sha256(
      p.read_bytes()
    ).hexdigest()[:12]
    for p in files
  }


def fields_of(config, workdir, mesh='', flags=()) -> dict[str, str]:
  """What the processes of a run compare before they join; starts no jax.

  Args:
    config: schema.Config. workdir, mesh: text of these flags.
    flags: {name: value} of others that say how the run begins.
  """
  versions = {f'{n} version': importlib.metadata.version(n) for n in PACKAGES}
  own = {f'sha256(mixer {n})': o.sha256[:12] for n, o in mixers.OWN.items()}
  return (
    {'--mesh': repr(mesh), '--workdir': str(workdir_lib.resolve(workdir))}
    | {f'--{name}': repr(value) for name, value in dict(flags).items()}
    | _config(config)
    | {'python version': platform.python_version()}
    | versions
    | own
    | _code()
  )


def prepare(workdir, from_scratch=False):
  """Creates the folder of a run, before any process writes into it.

  Raises:
    UserError, IntegrityError: as of workdir.check_folder in process 0; the
      others raise with it.
  """
  import jax

  from paraxis.sharding import meeting

  problem = None
  try:
    path = workdir_lib.prepare(workdir)
    if not jax.process_index():  # two would find each other's lock
      workdir_lib.check_folder(path, from_scratch)
  except (errors.UserError, errors.IntegrityError) as e:
    problem = e
  failed = meeting.gather(
    'folder of the run', str(problem or ''), START_SECONDS
  )
  if not problem and failed[0]:
    problem = errors.UserError(f'process 0 cannot start: {failed[0]}')
  if problem:
    raise problem


def differing(job, path, problem, source=None):
  """A UserError if process 0 failed or the processes are of different runs.

  Args:
    job: program.Job. path: of the workdir, which process 0 has locked.
    problem: the error of process 0; None: it has none.
    source: of the first parameters, what origin.open_ gives; None: new ones.
  """
  from paraxis.sharding import meeting

  fields = _config(job.config) | {
    'workdir': str(path),
    'text': job.corpus.fingerprint[:12],
    'tokenizer': job.tokenizer.fingerprint[:12],
  }
  if source:  # each process reads its own shards from where it has them
    fields['sha256(--init_from)'] = source.about['sha256'][:12]
  mine = json.dumps([str(problem or ''), fields, _lock(path)])
  all_ = meeting.gather('start of the run', mine, START_SECONDS)
  rows = [json.loads(text) for text in all_]
  failed, _, held = rows[0]
  if failed:
    return errors.UserError(f'process 0 cannot start: {failed}')
  why = roll_call.refusal([row[1] for row in rows])
  if not why:
    until = time.monotonic() + SHARED_SECONDS
    while _lock(path) != held and time.monotonic() < until:
      time.sleep(0.1)
    seen = meeting.gather('sight of the folder', _lock(path))
    blind = [str(i) for i, text in enumerate(seen) if text != held]
    why = blind and (
      f'processes {", ".join(blind)} do not see what process 0 wrote into '
      f'{path}: all hosts need one shared folder as --workdir.'
    )
  return errors.UserError(why) if why else None


def _lock(path):
  """Who holds a folder, as its lock says; '': nobody does."""
  try:
    return (path / workdir_lib.LOCK).read_text('utf-8')
  except OSError:
    return ''


def wait_for_the_end():
  """Until every process has done its last work, as process 0 its reports.

  In jax's exit barrier they would wait for it for a heartbeat's time alone, and
  then abort it.
  """
  if _connected:
    from paraxis.sharding import meeting

    meeting.meet('end of the run', END_SECONDS)


def exit_now(code):
  """Ends the process; what all refuse, process 0 refuses last."""
  sys.stdout.flush()
  sys.stderr.flush()
  if _connected and code != errors.EXIT_CRASH:
    from paraxis.sharding import meeting

    meeting.leave()
  os._exit(code)


def connected():
  """Whether this process has joined others."""
  return _connected
