"""`paraxis bench device`: everything worth knowing of an accelerator, at once.

    paraxis bench device --out=DIR --minutes=9 [--quick] [--resume]

The parts (parts.py) run one after the other, the most valuable first,
each in a process of its own, for jax gives a device to one process. --minutes
is the whole budget. A part gets what it may take at most, less what the parts
after it need at least; one that no longer fits is left out, and the table says
so. A case that ends its process, or takes too long, is a row that says so: the
process is started again for the rest. DIR has the documents after every case
(report.py), so that nothing measured is lost by a cut; --resume runs the cases
that are missing or failed, and refuses DIR if device, versions, source or
options are others than those of its results. This process never starts jax.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

from paraxis.configs.base import errors
from paraxis.train.bench.device import parts as device_parts
from paraxis.train.bench.device import report as device_report

FLAGS = (
  (float, 'minutes=M', None, 'device: the whole budget, wall time; --out=DIR'),
)
PROBE = 10.0  # seconds until a device has said its name
PATIENCE = 120.0  # seconds after which it will not
CLOSING = 2.0  # seconds kept for the documents
MEMORY = '0.92'  # share of a GPU's memory that a part may take
LOOK = 0.1  # seconds between two looks at a process
OVER = 'over'  # why a process was ended: the part's time, not the case's
# Of --quick on a CPU, where no figure counts: half the time to compile.
HASTY = '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes'
_PROBE = """
import json, jax
d = jax.devices()
print(json.dumps(dict(platform=d[0].platform, device=d[0].device_kind,
  devices=len(d))))
"""


class Plan(NamedTuple):
  """What was asked for. seconds: the budget, from `began` on."""

  folder: pathlib.Path
  seconds: float
  quick: bool
  rounds: int
  began: float

  @property
  def left(self):
    """Seconds until the documents must be written."""
    return self.began + self.seconds - CLOSING - time.monotonic()


def least(part, quick):
  """Seconds without which a part is not begun."""
  return part.least[0 if quick else 1]


def check_budget(minutes, quick):
  """Seconds of a budget.

  Raises:
    UserError: not even the smallest part fits; the line says what would.
  """
  overhead = PROBE + CLOSING
  parts = sorted(device_parts.PARTS, key=lambda p: least(p, quick))
  fewest = overhead + least(parts[0], quick)
  if minutes * 60 >= fewest:
    return minutes * 60
  whole = overhead + sum(least(p, quick) for p in parts)
  raise errors.UserError(
    f'bench device --minutes={minutes:g}: {minutes * 60:.3g} seconds, and the '
    f'smallest part, {parts[0].name}, needs {fewest:.0f} with the start of the '
    f'device; --minutes={fewest / 60:.2f} would fit it, {whole / 60:.1f} a '
    'little of every part'
  )


def _end(process):
  """Ends a process and all that it started."""
  try:
    os.killpg(process.pid, signal.SIGKILL)
  except ProcessLookupError:
    pass
  process.wait()


def probe(seconds=PATIENCE) -> dict[str, Any]:
  """{'platform', 'device', 'devices'} of this machine, asked in a process.

  Raises:
    UserError: it does not answer, or jax finds no device.
  """
  command, pipe = [sys.executable, '-c', _PROBE], subprocess.PIPE
  with subprocess.Popen(
    command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
  ) as process:
    try:
      out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
      raise errors.UserError(
        f'bench device: jax did not name its devices in {seconds:.0f} seconds'
      ) from None
    finally:
      _end(process)
  if process.returncode:
    last = (err.strip().splitlines() or ['it printed nothing'])[-1]
    raise errors.UserError(f'bench device: jax finds no device: {last}')
  return json.loads(out.splitlines()[-1])


def identity(found, plan):
  """What two results must share to stand in one table: {what: text}."""
  from importlib import metadata

  from paraxis.train.run import metrics  # imports jax; `train` has not yet

  names = ('jax', 'jaxlib', 'libtpu', 'tokamax')
  have = {}
  for name in names:
    try:
      have[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      have[name] = 'not installed'
  source = metrics.source()
  commit = source.get('commit', 'no checkout')
  changed = source.get('changed files')
  return {
    'device': f'{found["devices"]} x {found["device"]} ({found["platform"]})',
    'python': '.'.join(map(str, sys.version_info[:3])),
    **have,
    'commit': f'{commit}, {changed} changed files' if changed else commit,
    'source': metrics.digest(),
    'rounds': str(plan.rounds),
    'flags': os.environ.get('XLA_FLAGS', ''),
    'blocks': os.environ.get('PARAXIS_BLOCKS', ''),
    'sizes': '--quick: tiny, no figure counts' if plan.quick else 'full',
  }


def _differs(kept, about):
  """What two identities differ in, but for the commit: `source` says enough."""
  names = [n for n in about if n != 'commit']
  return next((n for n in names if kept.get(n) != about[n]), None)


def command_of(part, plan, about):
  """The command of a part's process."""
  return [
    sys.executable, '-m', 'paraxis.train.bench.device.parts', part.name,
    str(plan.folder), json.dumps(about), str(plan.rounds),
    *['--quick'] * plan.quick,
  ]  # fmt: skip


def _environment(plan, about):
  """The variables of a part's process."""
  # A GPU's: jax takes three quarters of its memory unless it is told.
  variables = dict(XLA_PYTHON_CLIENT_MEM_FRACTION=MEMORY) | os.environ
  if plan.quick and about['device'].endswith('(cpu)'):
    variables['XLA_FLAGS'] = f'{variables.get("XLA_FLAGS", "")} {HASTY}'.strip()
  return variables


def _last_line(path, code):
  """The last line of a log that says something, and how the process ended."""
  lines = path.read_text(encoding='utf-8', errors='replace').splitlines()
  said = [line.strip() for line in lines if line.strip()]
  how = f'signal {-code}' if code < 0 else f'exit code {code}'
  return f'{how}: {said[-1][:300]}' if said else f'{how}, it printed nothing'


def _attempt(part, plan, about, deadline, show):
  """One process of a part -> (exit code, '' or why it was ended).

  show: is given the record whenever another case runs.
  """
  log = plan.folder / f'{part.name}.log'
  with log.open('a', encoding='utf-8') as out:
    process = subprocess.Popen(
      command_of(part, plan, about), stdout=out, stderr=subprocess.STDOUT,
      stdin=subprocess.DEVNULL, start_new_session=True,
      env=_environment(plan, about),
    )  # fmt: skip
    case, since = None, time.monotonic()
    try:
      while process.poll() is None:
        time.sleep(LOOK)
        record = device_report.read(plan.folder, part.name)
        running, now = (record or {}).get('running'), time.monotonic()
        if running != case:
          case, since = running, now
          show(record)
        if now > deadline:
          return -signal.SIGKILL, OVER
        if now - since > part.longest:
          return -signal.SIGKILL, f'over its limit of {part.longest} seconds'
      return process.returncode, ''
    finally:
      _end(process)


def run_part(part, plan, about, limit, show):
  """Runs a part for at most `limit` seconds -> its record, which is written.

  It goes on with the cases that ended well. show: is given what it has so far.
  """
  began = time.monotonic()
  record = device_report.read(plan.folder, part.name)
  record = record or device_report.begin(part.name, about, part.about)
  record = device_report.resumed(record)
  device_report.write(plan.folder, record)
  spent = record['seconds']
  while record['state'] == device_report.RUNNING:
    done = len(record['cases'])
    code, ended = _attempt(part, plan, about, began + limit, show)
    record = device_report.read(plan.folder, part.name) or record
    case, record['running'] = record['running'], None
    if ended == OVER:
      record['error'] = f'its {limit:.0f} seconds were over'
    elif code and (case or code != device_parts.AGAIN):
      fault = ended or _last_line(plan.folder / f'{part.name}.log', code)
      if case:
        record['cases'][case] = (device_report.FAILED, fault)
      else:
        record['error'] = fault
    elif len(record['cases']) == done and record['state'] != device_report.OK:
      record['error'] = record['error'] or 'its process did nothing'
    _close(record)
    record['seconds'] = spent + time.monotonic() - began
    device_report.write(plan.folder, record)
  return record


def _close(record):
  """Ends a record that has an error, or has no case left."""
  if record['error']:
    record['state'] = device_report.FAILED
  elif record['names'] is not None and {*record['names']} <= {*record['cases']}:
    bad = device_report.missed(record)
    record['state'] = device_report.FAILED if bad else device_report.OK


def _kept(plan, about, resume):
  """{part: record} of what --resume goes on with; without it, none is kept.

  Raises:
    UserError: results of another device, source, version or option are there.
  """
  kept = {}
  for part in device_parts.PARTS:
    if not resume:
      for kind in ('json', 'log'):
        (plan.folder / f'{part.name}.{kind}').unlink(missing_ok=True)
    record = device_report.read(plan.folder, part.name)
    if record is None:
      continue
    known = record['identity']
    if name := _differs(known, about):
      raise errors.UserError(
        f'--out={plan.folder}: {part.name} was measured with {name} '
        f'{known.get(name, "unknown")!r}, this is {about[name]!r}: one table '
        'cannot hold both; name another folder'
      )
    kept[part.name] = record
  return kept


def _left_out(part, plan, record):
  """A record with why the part was not begun; what it has, stays."""
  needs, left = least(part, plan.quick), max(0, plan.left)
  bad = device_report.missed(record)
  return record | dict(
    state=device_report.FAILED if bad else device_report.LEFT_OUT,
    error=f'it needs {needs} seconds at least, {left:.0f} were left',
  )


def _limit(part, later, plan):
  """Seconds for a part: the most, less what the parts after it need."""
  need, kept = least(part, plan.quick), 0
  for other in later:  # those that would still fit after it
    more = kept + least(other, plan.quick)
    kept = more if need + more <= plan.left else kept
  return max(need, min(part.most, plan.left - kept))


def run_all(plan, about, resume, say):
  """Runs every part that fits -> (all records, the Markdown document)."""
  records = _kept(plan, about, resume)
  whole = [n for n, r in records.items() if r['state'] == device_report.OK]
  parts = [p for p in device_parts.PARTS if p.name not in whole]
  for name in whole:
    say(f'{name}: kept')

  def publish(*new):
    records.update({record['part']: record for record in new if record})
    known = [records[p.name] for p in device_parts.PARTS if p.name in records]
    return known, device_report.publish(plan.folder, about, known)

  publish()
  for i, part in enumerate(parts):
    if plan.left < least(part, plan.quick):
      none = device_report.begin(part.name, about, part.about)
      record = _left_out(part, plan, records.get(part.name, none))
    else:
      limit = _limit(part, parts[i + 1 :], plan)
      say(f'{part.name}: {part.about}; at most {limit:.0f} seconds')
      try:
        record = run_part(part, plan, about, limit, publish)
      except BaseException:  # Ctrl-C: the table has what was measured so far
        publish(device_report.read(plan.folder, part.name))
        raise
    publish(record)
    line = device_report.why(record)
    say(f'{part.name}: {record["state"]}{": " if line else ""}{line[:200]}')
  return publish()


def _interrupt(number, frame):
  del number, frame
  raise KeyboardInterrupt  # as Ctrl-C: no process of a part stays behind


def run(values, say):
  """`paraxis bench device` -> exit code; values: its flags.

  Raises:
    UserError: --out or --minutes is missing, too small a budget, a folder that
      has results and no --resume, a CPU without --quick.
  """
  began = time.monotonic()
  for name, example in (('out', 'DIR'), ('minutes', '9')):
    if getattr(values, name) in (None, ''):
      raise errors.UserError(
        f'bench device: --{name} is missing; give --{name}={example}'
      )
  seconds, folder = check_budget(values.minutes, values.quick), values.out
  rounds = 1 if values.quick else values.rounds
  plan = Plan(pathlib.Path(folder), seconds, values.quick, rounds, began)
  if (plan.folder / 'device.json').exists() and not values.resume:
    raise errors.UserError(
      f'--out={folder} has results already; --resume keeps them and runs the '
      'rest, or name another folder'
    )
  found = probe(min(PATIENCE, seconds))
  if found['platform'] == 'cpu' and not values.quick:
    raise errors.UserError(
      'bench device: jax finds a CPU and no accelerator; --quick runs every '
      "part on it, in tiny sizes, XLA's forms standing in for kernels"
    )
  try:
    plan.folder.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise errors.UserError(f'--out={folder}: {e.strerror}') from e
  about = identity(found, plan)
  say(f'{about["device"]}, {seconds / 60:.1f} minutes, results in {folder}')
  before = signal.signal(signal.SIGTERM, _interrupt)
  try:
    records, text = run_all(plan, about, values.resume, say)
  finally:
    signal.signal(signal.SIGTERM, before)
  print(json.dumps(records, indent=1) if values.json else text)
  bad = any(r['state'] == device_report.FAILED for r in records)
  return errors.EXIT_DIFFERENT if bad else errors.EXIT_OK
