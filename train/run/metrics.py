"""Logging of a run: metrics.jsonl always, the terminal, other loggers.

A line of metrics.jsonl is {"step": n, "train/loss": x, ...}. A resumed run
appends; where a step occurs twice, the last value counts. One that goes back
says so, {"step": n, "run/back": n}: rows of later steps that stand before it
are of a path that it left (`read` does both).
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import math
import os
import pathlib
import resource
import subprocess
import sys
from typing import Any
import uuid

import jax

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import plain_files

FILE = 'metrics.jsonl'
BACK = 'run/back'  # the run went back to this step, whose row it is
WANDB_ID = 'wandb_id'
FLUSH_SECONDS = 10  # after which a row of TensorBoard is on the disk
CURVES = 'train/', 'eval/', 'perf/'  # of which every value is one number


def read(workdir, say=None):
  """{step: {name: value}} of a workdir, the last value of a step counting,
  without steps that the run left behind.

  A damaged line is left out: one that a kill cut short, whose step runs again,
  or what a power cut left of a file. say: is called with how many, if any.
  """
  out, damaged = {}, 0
  path = pathlib.Path(workdir) / FILE
  try:
    content = plain_files.read_bytes(path)
  except FileNotFoundError:
    raise
  except OSError as e:
    raise errors.IntegrityError(f'{path} cannot be read: {e.strerror}.') from e
  for line in content.splitlines():
    try:
      row = json.loads(line)
      step = row.pop('step')
      known = isinstance(step, int)
      known &= all(_plain(x, n.startswith(CURVES)) for n, x in row.items())
    except (ValueError, TypeError, AttributeError, KeyError):
      known = False
    if known and BACK in row:
      out = {at: values for at, values in out.items() if at <= step}
    elif known:
      out.setdefault(step, {}).update(row)
    elif line.strip():
      damaged += 1
  if damaged and say:
    say(f'{path}: {damaged} damaged lines are left out')
  return dict(sorted(out.items()))


def _plain(value, number=False):
  """Whether it is what `Writers` writes: a number, null, or a list of them.

  number: a list is none.
  """
  if isinstance(value, list):
    return not number and all(map(_plain, value))
  return value is None or isinstance(value, int | float)


def check_loggers(train):
  """UserError if a logger that the configuration asks for is not installed."""
  for field, module in (('tensorboard', 'tensorboardX'), ('wandb', 'wandb')):
    if getattr(train, field) and not importlib.util.find_spec(module):
      raise errors.UserError(
        f'train.{field}={getattr(train, field)!r} needs the package {module}, '
        f'which is not installed: install paraxis[{field}].'
      )


def memory_bytes():
  """Peak bytes on one accelerator, else peak resident bytes of the process."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if 'peak_bytes_in_use' in stats:
    return stats['peak_bytes_in_use']
  return peak_resident_bytes()


def peak_resident_bytes():
  """Most bytes that this process has had in memory."""
  unit = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Writers(contextlib.AbstractContextManager):
  """Writes rows of numbers to every logger that the configuration asks for.

  Lists go to the file alone. Rows that do not fit on a full disk are written
  when there is room again; those of TensorBoard are lost.
  """

  def __init__(self, workdir, train, config, about='', say=print):
    """Process 0 writes.

    Args:
      train: schema.Train. config: schema.Config.
      about: the screen that the run began with. say: prints one line.
    """
    self._workdir, self._board, self._wandb = workdir, None, None
    self._file: Any = None  # descriptor
    self._unwritten, self._full, self._say = b'', False, say
    if jax.process_index():
      return
    path = os.path.join(workdir, FILE)
    append = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    self._file = plain_files.open_descriptor(path, append)
    if os.path.getsize(path) and not _ends_with_newline(path):
      self._unwritten = b'\n'  # a kill cut the last line short
    if train.tensorboard:
      board = importlib.import_module('tensorboardX')
      self._board = board.SummaryWriter(workdir, flush_secs=FLUSH_SECONDS)
      _guard(self._board, say)
      self._board.add_text('run', f'<pre>{about}</pre>')
      self._board.add_text('config', f'<pre>{schema.to_json(config)}</pre>')
      self._board.add_text('source', f'<pre>{json.dumps(source())}</pre>')
    if train.wandb:
      own = dict(about=about, source=source())
      self._wandb = importlib.import_module('wandb').init(
        project=train.wandb,
        dir=workdir,
        config=schema.to_dict(config) | own,
        id=_wandb_id(workdir),
        resume='allow',
      )

  def write(self, step, values):
    """One row; numbers that are not finite become null in the file."""
    if self._file is None:
      return
    row: dict[str, Any] = {}
    for name, v in values.items():
      plain = isinstance(v, int | list) or math.isfinite(v)
      row[name] = v if plain else None
    values = {n: v for n, v in values.items() if not isinstance(v, list)}
    self._append(step, row)
    if self._board:
      for name, v in values.items():
        self._board.add_scalar(name, v, step)
    if self._wandb:
      self._wandb.log(values, step=step)

  def back(self, step):
    """The run continues after `step`: rows of later ones no longer count.

    Nothing is written into the file where there are none; TensorBoard may have
    rows of a start that was killed, which the file lacks or not.
    """
    if self._file is None:
      return
    if self._board:
      _purge(self._board, step + 1)
    later = any(at > step for at in read(self._workdir))
    if later or self._unwritten.strip():
      self._append(step, {BACK: int(step)})

  def sync(self):
    """Forces rows to the disk before a checkpoint, after which they never come
    again; on a full one they wait."""
    if self._file is not None:
      with contextlib.suppress(OSError):
        os.fsync(self._file)

  def _append(self, step, row):
    self._unwritten += json.dumps({'step': int(step)} | row).encode() + b'\n'
    self._write()

  def _write(self):
    """Appends what is not yet in the file; reports a disk that is full."""
    try:
      while self._unwritten:
        self._unwritten = self._unwritten[
          os.write(self._file, self._unwritten) :
        ]
      self._full = False
    except OSError as e:
      if not self._full:
        self._say(f'{FILE} is not written ({e.strerror}): its rows wait')
      self._full = True

  def __exit__(self, *error):
    """Flushes and closes every logger."""
    if self._file is not None:
      self._write()
      if self._unwritten:
        rows = self._unwritten.count(b'\n')
        self._say(f'{FILE} lacks its last {rows} rows')
      os.close(self._file)
    if self._board:
      self._board.close()
    if self._wandb:
      self._wandb.finish()


def _guard(board, say):
  """The first error of a tensorboardX.SummaryWriter's disk ends its rows, and
  nothing else: it is said.

  Without it the thread that writes dies, and `add_scalar` waits for ever once
  the queue is full. Nothing follows a record that was cut short: it could not
  be read.
  """
  events, ended = board.file_writer.event_writer._ev_writer, []

  def guarded(call, always=False):
    def run(*given):
      try:
        if always or not ended:
          call(*given)
      except OSError as e:
        if not ended:
          say(f'TensorBoard gets no more rows ({e.strerror}): {FILE} has all')
        ended.append(e)

    return run

  events.write_event = guarded(events.write_event)
  events.flush = guarded(events.flush)
  events.close = guarded(events.close, always=True)


def _purge(board, step):
  """What TensorBoard has of a step and later ones no longer counts."""
  pb = importlib.import_module('tensorboardX.proto.event_pb2')
  log = pb.SessionLog(status=pb.SessionLog.START)
  board.file_writer.add_event(pb.Event(step=step, session_log=log))


def source():
  """{'commit', 'changed files'} of the checkout that runs; {}: it is none."""
  root = pathlib.Path(__file__).resolve().parents[2]
  git = functools.partial(
    subprocess.run, cwd=root, capture_output=True, text=True, check=True
  )
  try:
    commit = git(['git', 'rev-parse', 'HEAD']).stdout.strip()
    changed = git(['git', 'status', '--porcelain']).stdout.splitlines()
  except (OSError, subprocess.CalledProcessError):
    return {}
  return {'commit': commit, 'changed files': len(changed)}


@functools.cache
def digest():
  """Of the files that benches run: figures of two are never joined."""
  root, whole = pathlib.Path(__file__).resolve().parents[2], hashlib.sha256()
  rooms = 'configs/base', 'decode', 'models', 'pallas_kernels', 'sharding'
  for room in (*rooms, 'train'):
    for path in sorted((root / room).rglob('*.py')):
      whole.update(f'{path.relative_to(root)}\n'.encode() + path.read_bytes())
  return whole.hexdigest()[:12]


def _wandb_id(workdir):
  """The same for every start of a run, so that W&B continues it."""
  path = pathlib.Path(workdir) / WANDB_ID
  known = path.read_text(encoding='utf-8').strip() if path.exists() else ''
  if not known:  # a full disk left it empty
    known, part = uuid.uuid4().hex[:12], path.with_suffix('.tmp')
    part.write_text(known, encoding='utf-8')
    os.replace(part, path)
  return known


def _clock(seconds):
  """3725.4 -> '1:02:05'."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{seconds:02}'


def _ends_with_newline(path):
  with open(path, 'rb') as f:
    f.seek(-1, os.SEEK_END)
    return f.read(1) == b'\n'


class Progress(contextlib.AbstractContextManager):
  """One live line on a terminal, plain lines elsewhere."""

  def __init__(self, steps, print_every, say=print):
    self._steps, self._every, self._say = steps, print_every, say
    self._live = None
    if say is print and sys.stdout.isatty() and jax.process_index() == 0:
      import rich.live

      self._live = rich.live.Live(refresh_per_second=4, transient=True)
      self._live.start()

  def text(self, step, values):
    """One line: step, loss, speed, memory, what took time apart, time left."""
    parts = [
      f'step {step}/{self._steps}',
      f'loss {values["train/loss"]:.4f}',
      f'grad {values["train/grad_norm"]:.2f}',
      f'lr {values["train/learning_rate"]:.2e}',
      f'{1e3 * values["perf/step_seconds"]:,.0f} ms/step',
      f'{values["perf/tokens_per_second"]:,.0f} tokens/s',
      f'{values["perf/memory_bytes"] / 2**30:.2f} GiB',
    ]
    if 'perf/mfu' in values:
      parts.insert(6, f'MFU {values["perf/mfu"]:.1%}')
    for what in ('checkpoint', 'evaluation'):  # since the last line
      if (seconds := values.get(f'perf/{what}_seconds')) is not None:
        parts.append(f'{what} {seconds:.1f} s')
    if step < self._steps:
      parts.append(f'{_clock(values["perf/eta_seconds"])} left')
    return '  '.join(parts)

  def step(self, step, values):
    """Shows a finished step -> whether by a line that stays."""
    text, stays = self.text(step, values), step % self._every == 0
    stays |= step == self._steps
    if self._live:
      self._live.update(text)
    if stays:
      self.say(text)
    return stays

  def say(self, text):
    """A line that stays."""
    if self._live:
      self._live.console.print(text, highlight=False, markup=False)
    elif jax.process_index() == 0:
      self._say(text)

  def __exit__(self, *error):
    """Ends the live line."""
    if self._live:
      self._live.stop()
