"""What a run left in its folder: its checkpoints, or only the traces of them.

config.json and metrics.jsonl without checkpoints/, or events.jsonl with the
commit of a step in a folder that holds none, are no new run: the disk of the
checkpoints may not be mounted, and a start at step 0 would soon write over what
is not seen. Imports nothing heavy.
"""

import contextlib
import json
import os
import re
import tempfile

from paraxis.configs.base import errors
from paraxis.configs.base import plain_files

CONFIG = 'config.json'
CHECKPOINTS = 'checkpoints'
METRICS = 'metrics.jsonl'
EVENTS = 'events.jsonl'
# What a run appends to; `set_aside` knows the files of its loggers, too.
RECORDS = (METRICS, EVENTS, 'wandb_id')
_STEP = re.compile(r'0|[1-9][0-9]*')  # folder of a step


def _steps(path):
  """[folders of steps, newest first] of a run, readable or not.

  OSError: there is no such folder, or it cannot be read.
  """
  folder = path / CHECKPOINTS
  names = [name for name in os.listdir(folder) if _STEP.fullmatch(name)]
  folders = [folder / name for name in sorted(names, key=int, reverse=True)]
  return [step for step in folders if step.is_dir()]


def readable(path):
  """[(folder, meta)] of steps whose manifests read, newest first."""
  from paraxis.sharding.checkpoint import manifest  # imports jax

  found = []
  with contextlib.suppress(OSError):
    for step in _steps(path):
      with contextlib.suppress(errors.IntegrityError):
        found.append((step, manifest.read_manifest(step)['meta']))
  return found


def refuse_readable(path):
  """UserError if there is a checkpoint that --from_scratch would pass over."""
  if steps := [step.name for step, _ in readable(path)]:
    raise errors.UserError(
      f'--from_scratch: {path / CHECKPOINTS} has {len(steps)} readable '
      f'checkpoints (steps {", ".join(steps[:10])}): leave the flag out to '
      'resume, or take another --workdir.'
    )


def refuse_steps(path, flag):
  """UserError if there are checkpoints, readable or not; flag: names path."""
  with contextlib.suppress(OSError):  # no such folder
    if _steps(path):
      raise errors.UserError(f'{path} has checkpoints: name another {flag}.')


def set_aside(path, say):
  """Moves what a run left, all but readable checkpoints, into a new folder.

  Nothing is deleted. say: prints one line.
  """
  folder, names = path / CHECKPOINTS, [CONFIG, *RECORDS]
  names += [p.name for p in path.glob('events.out.tfevents.*')]
  names = [name for name in names if os.path.lexists(path / name)]
  if folder.is_symlink() and not folder.exists():
    names.append(CHECKPOINTS)  # where it leads to is not there
  damaged = []
  with contextlib.suppress(OSError):  # no such folder
    damaged = _steps(path)
  if damaged:
    aside = tempfile.mkdtemp(prefix='before-', dir=folder)
    for step in damaged:
      step.rename(os.path.join(aside, step.name))
    say(f'{len(damaged)} damaged checkpoints are now in {aside}')
  if names:
    aside = tempfile.mkdtemp(prefix='before-', dir=path)
    for name in names:
      os.rename(path / name, os.path.join(aside, name))
    say(f'from scratch: {", ".join(names)} of before are now in {aside}')


def _last_commit(path):
  """The last step that EVENTS says was committed; None: it says of none."""
  last = None
  try:
    content = plain_files.read_bytes(path / EVENTS)
  except FileNotFoundError:
    return None
  for line in content.splitlines():
    if b'commit' in line:
      try:
        row = json.loads(line)
        last = int(row['step']) if row['event'] == 'commit' else last
      except (ValueError, TypeError, LookupError, RecursionError):
        continue  # a kill cut it short, or a disk damaged it
  return last


def check(path):
  """IntegrityError: a run was here, and its checkpoints are gone."""
  began = (path / CONFIG).exists() and (path / METRICS).exists()
  commit, folder = _last_commit(path), path / CHECKPOINTS
  try:
    if _steps(path) or commit is None:
      return
    what = 'holds no step'
  except OSError as e:
    if not began and commit is None:
      return
    what = f'cannot be read ({e.strerror})'
    if folder.is_symlink():
      what = f'leads to {os.readlink(folder)}, which {what}'
  known = f'{CONFIG} and {METRICS} are here'
  if commit is not None:
    known = f'{EVENTS} says that step {commit} was committed'
  raise errors.IntegrityError(
    f'{path} has lost its checkpoints: {known}, but {folder} {what}. Mount or '
    'bring back what held them; --from_scratch begins at step 0 again and sets '
    'aside what is left.'
  )
