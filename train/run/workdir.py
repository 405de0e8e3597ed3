"""A run directory: config.json, metrics.jsonl, checkpoints/, and one writer.

The operating system holds the lock and releases it when the process ends. A
folder whose checkpoints are gone, as with a disk that is not mounted, is not a
new run: it is refused, unless `--from_scratch` says so.
"""

import contextlib
import glob
import json
import os
import pathlib
import socket
import tempfile

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import extra
from paraxis.configs.base import plain_files
from paraxis.train.run import remains

try:
  import fcntl
except ImportError:  # not a POSIX system: no lock
  fcntl = None

CONFIG = remains.CONFIG
CHECKPOINTS = remains.CHECKPOINTS
LOCK = '.lock'
IMPORTED = 'imported'  # in a checkpoint's meta: parameters of another program
# Defaults of once. A run that began with one keeps it, because config.json
# holds every field, also those that nobody set.
FORMER = {'model.experts.balance_scope': 'microbatch'}
# Fields that a resumed run may change: none changes the trajectory, except that
# train.steps may stretch the schedule, that replicas that step alone begin with
# the mean of as many as there were, and what experts with a capacity drop; all
# are reported. PATHS draw stages to leave out (sharding/pipeline/paths.py).
FREE = (
  'mesh.', 'checkpoint.', 'decode.',  # whole sections
  'train.steps', 'train.eval_every', 'train.eval_batches', 'train.print_every',
  'train.log_every', 'train.max_nonfinite_steps', 'train.drift_every',
  'train.stall_seconds', 'train.tensorboard', 'train.wandb', 'train.remat',
  'train.memory', 'train.microbatches', 'pipeline.schedule', 'pipeline.chunks',
  'pipeline.microbatches', 'pipeline.activations', 'model.experts.region',
  'model.experts.hierarchical', 'model.experts.hot', 'model.experts.drop_limit',
  'model.unroll', 'model.attention', 'model.attention_block', 'model.loss',
  'data.prefetch', 'data.cache_dir', 'data.workers',
)  # fmt: skip
PATHS = 'mesh.stage', 'pipeline.microbatches', 'train.microbatches'
# Files whose content a checkpoint's fingerprints compare (train/start.py).
PLACES = 'data.path', 'data.tokenizer', 'data.chat_template'
# Model fields that leave the shapes of parameters: a new run with another
# value may begin with the weights of the old one. Those of `extra` are unknown.
KEEP_SHAPES = (
  'window', 'residual_scale', 'norm_epsilon', 'rope_theta', 'rope_fraction',
  'rope_local_theta', 'rope_scaling', 'rope_factor', 'rope_low_frequency',
  'rope_high_frequency', 'rope_original_length', 'rope_mscale',
  'rope_truncate', 'logit_scale', 'embedding_scale', 'attention_scale',
  'attention_softcap', 'logit_softcap', 'init_std', 'embedding_init_std',
  'dtype', 'loss', 'attention_block', 'scan', 'experts.top_k',
  'experts.normalise', 'experts.sum_epsilon', 'experts.scale',
  'experts.groups', 'experts.top_groups', 'experts.group_best',
  'experts.capacity_factor', 'experts.balance', 'experts.router_z',
)  # fmt: skip


def resolve(workdir):
  """The folder's absolute path; UserError: it is the root of a file system."""
  path = pathlib.Path(workdir).expanduser().resolve()
  if path == path.parent:
    raise errors.UserError(
      f'--workdir={workdir} is {path}, the root of the file system: name a '
      f'folder of the run, such as {path}runs/first.'
    )
  return path


def prepare(workdir):
  """Creates the folder -> absolute path.

  Raises:
    UserError: it cannot be written, or has a model, which a run would replace.
  """
  path = resolve(workdir)
  if _is_model(path / CONFIG):
    raise errors.UserError(
      f'--workdir={workdir}: {path} has a model of Hugging Face, whose files a '
      'run would replace: take another one.'
    )
  try:
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
      pass
  except OSError as e:
    raise _unwritable(workdir, path, e) from e
  return path


def _is_model(path):
  """Whether a file is a config.json of Hugging Face."""
  try:
    return 'model_type' in json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError, TypeError):
    return False


def _unwritable(workdir, path, error):
  return errors.UserError(
    f'--workdir={workdir}: cannot write to {path} ({error.strerror}).'
  )


def check(workdir, config, from_scratch=False):
  """Whether a run of a schema.Config, its places absolute, may use the folder.

  Leaves everything as it is: what does not exist is not made.

  Raises:
    UserError: it cannot be written, another run holds it, or the run in it has
      another configuration, or from_scratch and checkpoints that read.
    IntegrityError: its config.json is damaged, its checkpoints are missing.
  """
  path = resolve(workdir)
  try:
    there = next(p for p in (path, *path.parents) if os.path.lexists(p))
    with tempfile.TemporaryFile(dir=there):
      pass
  except OSError as e:
    raise _unwritable(workdir, path, e) from e
  check_folder(path, from_scratch)
  silent = lambda line: None
  if not from_scratch:
    config = resumed(workdir, config, silent)
    check_config(path, config, silent, laid_out=False)


def check_folder(path, from_scratch=False):
  """As `check`, of a run whose configuration is not known yet."""
  if os.path.lexists(path / LOCK):
    Lock(path).close()
  if _holds_imported(path):
    raise imported(path)
  if from_scratch:
    remains.refuse_readable(path)
  else:
    _check_records(path)


def claim(workdir, config, from_scratch, say):
  """Prepares the folder for a run and locks it -> Lock. Raises as `check`.

  from_scratch: what is left of another run is set aside. say: prints one line.
  """
  path = prepare(workdir)
  if from_scratch:
    remains.refuse_readable(path)
  else:
    check_config(path, config, say)
  lock = Lock(path)
  if from_scratch:
    remains.set_aside(path, say)
  return lock


@contextlib.contextmanager
def without_run(workdir, flag):
  """Prepares a folder without checkpoints -> its path, locked for a block."""
  path = prepare(workdir)
  _check_records(path)
  with contextlib.closing(Lock(path)):
    remains.refuse_steps(path, flag)
    yield path


def imported(path):
  """The error to raise for a folder that `paraxis checkpoint import` wrote."""
  return errors.UserError(
    f'{path} holds imported weights, which no step was taken from: train with '
    f'--init_from={path} and another --workdir.'
  )


def _holds_imported(path):
  """Whether its manifest says so, unchecked: what opens the store checks it."""
  file = path / CHECKPOINTS / '0' / 'manifest' / 'metadata'
  try:
    meta = json.loads(plain_files.read_text(file))['meta']
    return bool(meta.get(IMPORTED))
  except (
    OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError
  ):  # fmt: skip
    return False


class Lock:
  """Locks the folder for one run; UserError if another run holds it."""

  def __init__(self, path):
    try:
      opened = plain_files.open_descriptor(
        path / LOCK, os.O_RDWR | os.O_CREAT, follow=False
      )
    except OSError as e:
      raise errors.UserError(
        f'{path / LOCK} cannot be opened ({e.strerror}); remove it.'
      ) from None
    self._file = open(opened, 'r+', encoding='utf-8')  # noqa: SIM115
    if fcntl is None:
      return
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self._file.seek(0)
      holder = self._file.read().strip() or 'unknown'
      self._file.close()
      raise errors.UserError(
        f'{path} is in use by another run (process {holder}); wait for it, '
        'stop it, or take another --workdir.'
      ) from None
    except OSError as e:
      self._file.close()
      raise errors.UserError(
        f'{path} cannot be locked ({e.strerror}): its file system has no '
        'locks; take a --workdir on another one.'
      ) from None
    self._file.truncate(0)
    self._file.write(f'{os.getpid()} on {socket.gethostname()}')
    self._file.flush()

  def close(self):
    """Releases the folder."""
    self._file.close()


def is_free(name):
  """Whether a resumed run may change the field 'section.name'."""
  return name in FREE or f'{name.split(".")[0]}.' in FREE


def differences(old, new):
  """[(dotted field, old value, new value)] of two schema.Config.

  None: one of them has no such field in its `extra`."""
  pairs = [
    (name, schema.value(old, name), schema.value(new, name))
    for name, _ in schema.fields()
    if not name.startswith(f'{extra.NAME}.')
  ]
  was, now = extra.flat(old.extra), extra.flat(new.extra)
  pairs += [(n, was.get(n), now.get(n)) for n in dict.fromkeys([*was, *now])]
  return [(name, a, b) for name, a, b in pairs if a != b]


def read_config(path):
  """schema.Config of a workdir; UserError if there is none.

  IntegrityError: it is damaged; says where a copy is.
  """
  path = pathlib.Path(path)
  file = path / CONFIG
  try:
    return schema.from_json(plain_files.read_text(file))
  except FileNotFoundError:
    raise errors.UserError(f'{file} does not exist: not a workdir.') from None
  except OSError as e:
    why = e.strerror
  except (ValueError, errors.IntegrityError) as e:  # ValueError: UserError, too
    why = str(e).rstrip('.')
  raise errors.IntegrityError(f'{file} is damaged: {why}.{_copy(path)}')


def _copy(path):
  """Where a copy of config.json is, as the end of a message."""
  for step, meta in remains.readable(path):
    with contextlib.suppress(errors.IntegrityError, errors.UserError):
      schema.from_json(meta.get('config'))
      return (
        f' The manifest of {step} has a copy: move {CONFIG} away, and the same '
        'command resumes from there.'
      )
  return ''


def check_config(path, config, say, laid_out=True):
  """Compares with the config that the folder's run began with.

  Arguments as of `compare`.

  Raises:
    UserError: a field differs that would change the run's trajectory.
    IntegrityError: config.json is damaged, the checkpoints are missing.
  """
  _check_records(path)
  if os.path.lexists(path / CONFIG):
    compare(path, read_config(path), config, say, laid_out)


def _check_records(path):
  """IntegrityError: a record is no file, or the checkpoints are missing."""
  for name in remains.RECORDS:
    try:
      plain_files.check(path / name)
    except OSError as e:
      raise errors.IntegrityError(
        f'{path / name} cannot be read: {e.strerror}.'
      ) from None
  remains.check(path)


def resumed(workdir, config, say, from_scratch=False):
  """The config with which a folder's run resumes: its former defaults stay.

  Args:
    workdir: folder, of a run or not. config: schema.Config as asked for.
    say: prints one line. from_scratch: the folder's run does not resume.
  """
  path = resolve(workdir)
  if from_scratch or not os.path.lexists(path / CONFIG):
    return config
  old = read_config(path)
  for name, former in FORMER.items():
    default = schema.value(schema.Config(), name)
    if schema.value(old, name) != former:
      continue
    if schema.value(config, name) == default:
      config = schema.with_value(config, name, former)
      if config.model.experts.count:
        say(
          f'config: {name} stays {former!r}, as this run began; the default is '
          f'now {default!r}'
        )
  return config


def keeps_shapes(name, was, now) -> bool:
  """Whether parameters of before fit a model whose field 'section.name' went
  from `was` to `now`; the vocabulary may grow."""
  section, _, field = name.partition('.')
  grown = field == 'vocab_size' and was < now
  kept = section != 'model' or field in KEEP_SHAPES or grown
  return kept and name != 'train.side'


def _draws(config):
  """Whether microbatches leave stages out."""
  pipeline = config.pipeline
  return pipeline.schedule == 'skip' and pipeline.skip_fraction > 0


def _moved(name, was, now):
  """Whether files that a field names may be the same ones elsewhere: the old
  place is gone, or is the tokenizer of a run whose folder was copied."""
  if name not in PLACES or not (os.path.isabs(was) and os.path.isabs(now)):
    return False
  of_run = pathlib.Path(was).with_name(CHECKPOINTS).is_dir()
  there = os.path.exists(was) or any(glob.iglob(was, recursive=True))
  return not there or (name == 'data.tokenizer' and of_run)


def compare(where, old, new, say=lambda line: None, laid_out=True):
  """UserError if a run of `old` cannot resume as `new`; reports the rest.

  laid_out: whether the mesh of `new` is the one in use, --mesh= included.
  """
  hard, shaped = [], []
  drawn = PATHS if laid_out and (_draws(old) or _draws(new)) else ()
  for name, was, now in differences(old, new):
    text = f'{name} was {was!r}, is now {now!r}'
    free = is_free(name) or _moved(name, was, now)
    if not free or name in drawn:
      hard.append(text)
      shaped += [] if keeps_shapes(name, was, now) else [name]
    elif name == 'train.steps' and new.optimizer.follows_steps:
      say(f'config: {text}; the schedule is stretched')
    else:
      say(f'config: {text}')
  if hard:
    other = f'with these weights: --init_from={where}'
    if shaped:
      other = (
        f'with new ones: {", ".join(shaped)} '
        f'{"sets" if len(shaped) == 1 else "set"} the shapes of parameters'
      )
    raise errors.UserError(
      f'{where} holds a run with another configuration: {"; ".join(hard)}. '
      f'Give the old values, or begin a new run in another --workdir {other}.'
    )


def write_config(path, config):
  """Saves the resolved configuration; nothing later executes Python for it."""
  temporary = path / f'{CONFIG}.tmp'
  temporary.unlink(missing_ok=True)  # a link, not what it leads to
  new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
  opened = plain_files.open_descriptor(temporary, new, follow=False)
  with open(opened, 'w', encoding='utf-8') as file:
    file.write(schema.to_json(config))
    file.flush()
    os.fsync(file.fileno())  # a loss of power leaves the old one or the new one
  os.replace(temporary, path / CONFIG)
