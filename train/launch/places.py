"""Which machine of a run this is, and where process 0 is, as the environment
of a scheduler says.

Nothing is asked over the network. Variables: Slurm's manual of srun (OUTPUT
ENVIRONMENT VARIABLES); kubernetes.io, Indexed Jobs and the host names of their
pods; cloud.google.com, TPUs in GKE, single and multiple slices.
"""

import re
import socket
from typing import NamedTuple

from paraxis.configs.base import errors

PORT = 8476  # of process 0, where a scheduler has no number of its own
LOOPBACK = '127.0.0.1'
_BRACKET = re.compile(r'\[([^\]]*)\]')
_SLURM_PORTS = 61440, 4096  # the first and how many: a job has one by its id


class Place(NamedTuple):
  """A machine among those of a run: a host, a pod, a task of Slurm.

  Attributes:
    count, number: of machines, and of this one, from 0.
    host, port: of process 0; port 0: any that is free.
    named: by what it was found.
  """

  count: int
  number: int
  host: str
  port: int
  named: str


def nodes(text: str) -> list[str]:
  """'node[01-03,7],a' -> ['node01', 'node02', 'node03', 'node7', 'a']."""
  out = []
  for part in re.findall(r'(?:[^,\[]|\[[^\]]*\])+', text):
    out += _expand(part)
  return out


def _expand(part):
  found = _BRACKET.search(part)
  if not found:
    return [part]
  rest = _expand(part[found.end() :])
  out = []
  for piece in found[1].split(','):
    low, _, high = piece.partition('-')
    for i in range(int(low), int(high or low) + 1):
      out += [f'{part[: found.start()]}{i:0{len(low)}}{r}' for r in rest]
  return out


def find(hosts, number, count, environ) -> Place:
  """The place of this machine.

  Args:
    hosts: names of all machines that a user gave; []: none.
    number: of this machine, as a user gave it; -1: to be found.
    count: of machines, as a user gave it; 0: to be found.
    environ: of this process.

  Raises:
    UserError: what is given, or what the environment says, is not enough.
  """
  if hosts:
    return _given(hosts, number, count)
  if number >= 0:
    raise errors.UserError(
      f'--host={number} is one of --hosts: name the machines, '
      '--hosts=HOST,HOST.'
    )
  try:
    found = _slurm(environ, count) or _tpu(environ)
    found = found or _kubernetes(environ, count)
  except errors.UserError:  # a ValueError, too, which says what to do
    raise
  except ValueError as e:
    raise errors.UserError(
      f'what the scheduler says of its machines is not understood ({e}): give '
      '--hosts=HOST,HOST and --host=NUMBER.'
    ) from e
  if not found and count > 1:
    raise errors.UserError(
      f'--num_hosts={count}: no Slurm step, TPU slice or Indexed Job is found '
      'here; name the machines: --hosts=HOST,HOST.'
    )
  found = found or Place(1, 0, LOOPBACK, 0, 'one machine')
  if not 0 <= found.number < found.count:
    raise errors.UserError(
      f'{found.named}: this is machine {found.number} of {found.count}.'
    )
  return found


def _given(hosts, number, count):
  given = f'--hosts={",".join(hosts)}'
  if not all(hosts):
    raise errors.UserError(f'{given}: one of the names is empty.')
  if count not in (0, len(hosts)):
    raise errors.UserError(
      f'--num_hosts={count}, but {given} names {len(hosts)}: leave it out.'
    )
  if number < 0:
    own = [i for i, host in enumerate(hosts) if len(hosts) == 1 or _own(host)]
    if len(own) != 1:
      raise errors.UserError(
        f'{len(own)} of {given} are addresses of this machine: give its '
        f'number, --host=0 to --host={len(hosts) - 1}.'
      )
    number = own[0]
  if number >= len(hosts):
    raise errors.UserError(
      f'--host={number} is not in 0 .. {len(hosts) - 1}, of --hosts.'
    )
  return Place(len(hosts), number, hosts[0], PORT, '--hosts')


def _own(host):
  """Whether a name is an address of this machine."""
  try:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    socket.create_server((host, 0), family=family).close()
    return True
  except (OSError, UnicodeError):  # as of a name with an empty part
    return False


def _slurm(environ, asked):
  """A task of `srun paraxis launch`, which starts its processes.

  asked: how many machines a user gave; with 1 the others of a job stay idle.
  """
  inside = 'SLURM_PROCID' in environ  # not in the shell that salloc starts
  count = int(environ.get('SLURM_NTASKS', 1)) if inside else 1
  machines = int(environ.get('SLURM_JOB_NUM_NODES', 1))
  sizes = dict(SLURM_NTASKS=count, SLURM_JOB_NUM_NODES=machines)
  several = [f'{name}={size}' for name, size in sizes.items() if size > 1]
  step = environ.get('SLURM_STEP_NODELIST')
  if several and not step and asked != 1:
    raise errors.UserError(
      f'{", ".join(several)}, but this is no job step: start it as `srun '
      'paraxis launch ...`, or with --hosts=localhost on this machine alone.'
    )
  if not inside:
    return None
  if count == 1 or not step:
    return Place(1, 0, LOOPBACK, 0, 'Slurm')
  first = nodes(step)[0]
  low, many = _SLURM_PORTS
  port = low + int(environ.get('SLURM_JOB_ID', 0)) % many
  return Place(count, int(environ['SLURM_PROCID']), first, port, 'Slurm')


def _tpu(environ):
  """A host of a TPU slice, or of several slices."""
  workers = environ.get('TPU_PROCESS_ADDRESSES')
  workers = workers or environ.get('TPU_WORKER_HOSTNAMES', '')
  names = [name for name in workers.split(',') if name]
  slices = int(environ.get('MEGASCALE_NUM_SLICES') or 1)
  if not names or len(names) * slices == 1:
    return None
  first = names[0]
  if slices > 1:
    first = environ.get('MEGASCALE_COORDINATOR_ADDRESS', '')
    if not first:
      raise errors.UserError(
        f'MEGASCALE_NUM_SLICES={slices}, but MEGASCALE_COORDINATOR_ADDRESS is '
        'not set: it is the first host of slice 0.'
      )
  number = int(environ.get('MEGASCALE_SLICE_ID') or 0) * len(names)
  number += int(environ.get('TPU_WORKER_ID') or 0)
  host = first.partition(':')[0]
  return Place(len(names) * slices, number, host, PORT, 'the TPU slice')


def _kubernetes(environ, count):
  """A pod of an Indexed Job: NAME-INDEX.SERVICE, in a JobSet its only job."""
  if 'JOB_COMPLETION_INDEX' not in environ:
    return None
  number = int(environ['JOB_COMPLETION_INDEX'])
  if not count:
    raise errors.UserError(
      f'JOB_COMPLETION_INDEX={number} does not say how many pods there are: '
      'give --num_hosts=N, the parallelism of the Job.'
    )
  name, _, domain = _full_name(environ).partition('.')
  job, _, index = name.rpartition('-')
  if count == 1:
    return Place(1, 0, LOOPBACK, 0, 'the Indexed Job')
  if index != str(number) or not domain:
    raise errors.UserError(
      f'this pod is {name}{"." if domain else ""}{domain}, not '
      f'JOB-{number}.SERVICE: give the Job a headless Service as subdomain.'
    )
  return Place(count, number, f'{job}-0.{domain}', PORT, 'the Indexed Job')


def _full_name(environ):
  """Host name and domain of this pod. A JobSet's Service has its name."""
  name = environ.get('HOSTNAME') or socket.gethostname()
  if '.' in name:
    return name
  if service := environ.get('JOBSET_NAME'):
    return f'{name}.{service}'
  full = socket.getfqdn(name)
  return full if full.startswith(f'{name}.') else name
