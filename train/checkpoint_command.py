"""`paraxis checkpoint inspect | verify | diff | reshard`: flags and tables.

None executes code of a checkpoint, or needs the mesh of its run. Nothing here
imports jax before the arguments are read.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Any

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import folders
from paraxis.train.run import workdir as workdir_lib

_NAMES = 'name RUN, RUN/STEP or RUN/checkpoints/STEP'


def _listed(directory):
  """Numbers of all folders that look like a step, newest last."""
  return folders.steps(directory)[::-1]


def _locate(text, name='--checkpoint='):
  """(folder of steps, number or None) of RUN, RUN/STEP, RUN/checkpoints/STEP.

  UserError, `name` before the text: there is no such run or step.
  """
  if not text:
    raise errors.UserError(f'{name} is missing: {_NAMES}.')
  path, number = pathlib.Path(os.path.abspath(os.path.expanduser(text))), None
  if (
    folders.STEP.fullmatch(path.name)
    and not (path / workdir_lib.CHECKPOINTS).is_dir()
  ):
    path, number = path.parent, int(path.name)
  if (path / workdir_lib.CHECKPOINTS).is_dir():
    path /= workdir_lib.CHECKPOINTS
  if not path.is_dir():
    raise errors.UserError(
      f'{name}{text}: there is no folder {path}; {_NAMES}.'
    )
  there = _listed(path)
  if not there and path.name != workdir_lib.CHECKPOINTS:
    raise errors.UserError(
      f'{name}{text}: {path} is no run, it has no folder '
      f'{workdir_lib.CHECKPOINTS}; {_NAMES}.'
    )
  if number is not None and number not in there:
    listed = ', '.join(map(str, there)) or 'none'
    raise errors.UserError(
      f'{name}{text}: no checkpoint of step {number} in {path}; there are '
      f'{listed}.'
    )
  if not there:
    raise errors.UserError(f'{name}{text}: no checkpoint in {path}.')
  return path, number


def _open(text, name='--checkpoint=', number=None):
  """stored.Step that a text names, else of `number`, else the newest good."""
  directory, named = _locate(text, name)
  if named is None and number is not None:
    directory, named = _locate(f'{text}/{number}', name)
  from paraxis.sharding.checkpoint import stored

  if named is not None:
    return stored.Step(directory / str(named))
  steps = _listed(directory)
  for number in reversed(steps):
    try:
      return stored.Step(directory / str(number))
    except errors.IntegrityError as e:
      print(f'{e} Looking at an older one.', file=sys.stderr)
  raise errors.IntegrityError(
    f'all {len(steps)} checkpoints in {directory} are damaged.'
  )


def _print_table(rows):
  """Rows of texts, the first a heading, in columns."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  for row in rows:
    cells = (f'{x:{w}}' for x, w in zip(row, widths, strict=True))
    print('  '.join(cells).rstrip())


def _fields(config, prefix=''):
  """{'section.field': value} of a nested dictionary."""
  out = {}
  for key, value in config.items():
    inner = isinstance(value, dict)
    out |= _fields(value, f'{prefix}{key}.') if inner else {prefix + key: value}
  return out


def _config(meta):
  """The config in a manifest as a dictionary; {}: it has none that reads."""
  try:
    found = json.loads(meta['config'])
  except (KeyError, TypeError, ValueError, RecursionError):
    return {}
  return found if isinstance(found, dict) else {}


def _described(step):
  """What `inspect` shows, as JSON carries it."""
  import jax.numpy as jnp
  import numpy as np

  leaves = {}
  for path, leaf in step.leaves.items():
    size = int(np.prod(leaf['shape'], dtype=object))
    size *= jnp.dtype(leaf['dtype']).itemsize
    leaves[path] = leaf | dict(bytes=size)
  meta = (
    step.manifest['meta'] if isinstance(step.manifest['meta'], dict) else {}
  )
  return dict(
    folder=str(step.folder),
    step=step.number,
    format=step.manifest['version'],
    sha256=step.manifest['sha256'],
    **{key: meta.get(key) for key in ('versions', 'origin', 'cursor')},
    config=_config(meta),
    bytes=sum(leaf['bytes'] for leaf in leaves.values()),
    files=len(step.files),
    bytes_on_disk=sum(step.files.values()),
    leaves=leaves,
  )


def _inspect(values, *_):
  command_line.prepare_devices(1)
  found = _described(_open(values.checkpoint))
  if values.json:
    print(json.dumps(found, indent=2))
    return
  print(f'step {found["step"]} of {found["folder"]}')
  print(f'format {found["format"]}, sha256 {found["sha256"][:16]}')
  for key in ('versions', 'cursor', 'origin'):
    if found[key]:
      print(f'{key}: {json.dumps(found[key])}')
  usual = _fields(schema.to_dict(schema.Config()))
  config = _fields(found['config'])
  changed = {n: v for n, v in config.items() if usual.get(n) != v}
  said = ' '.join(f'{n}={json.dumps(v)}' for n, v in changed.items())
  print(f'config, where it is not the default: {said or "nothing"}')
  rows = [('leaf', 'dtype', 'shape', 'axes', 'bytes', 'fingerprint')]
  for path, leaf in found['leaves'].items():
    shape, axes = (json.dumps(leaf.get(key)) for key in ('shape', 'axes'))
    size = f'{leaf["bytes"]:,}'
    rows.append((path, leaf['dtype'], shape, axes, size, leaf['fingerprint']))
  _print_table(rows)
  print(
    f'{len(found["leaves"])} leaves, {found["bytes"]:,} bytes; on disk '
    f'{found["files"]} files, {found["bytes_on_disk"]:,} bytes'
  )


def _verified(folder):
  """{step, leaves, files, bytes, faults} of a folder, of which all is read."""
  from paraxis.sharding.checkpoint import stored

  found: dict[str, Any] = dict(
    step=int(folder.name), leaves=0, files=0, bytes=0
  )
  try:
    step = stored.Step(folder)
  except errors.IntegrityError as e:
    return found | dict(faults=[str(e).partition(' is damaged: ')[2]])
  found.update(leaves=len(step.leaves), files=len(step.files))
  found['bytes'] = sum(step.files.values())
  return found | dict(faults=step.faults())


def _verify(values, *_):
  directory, number = _locate(values.checkpoint)
  command_line.prepare_devices(1)
  steps = _listed(directory) if number is None else [number]
  found = []
  for number in steps:
    one = _verified(directory / str(number))
    if not (directory / str(number)).exists():
      continue  # a running training has deleted it meanwhile
    found.append(one)
    said = (
      'good' if not one['faults'] else 'DAMAGED: ' + '; '.join(one['faults'])
    )
    if not values.json:
      print(
        f'step {number}: {one["leaves"]} leaves, {one["files"]} files, '
        f'{one["bytes"]:,} bytes read: {said}'
      )
  if values.json:
    print(json.dumps(dict(folder=str(directory), steps=found), indent=2))
  if bad := [one for one in found if one['faults']]:
    raise errors.IntegrityError(
      f'{len(bad)} of {len(found)} checkpoints in {directory} are damaged: '
      f'step {bad[0]["step"]}, {bad[0]["faults"][0]}'
    )


def _pair(words) -> tuple[list, dict[str, Any]]:
  """Two stored.Step to compare, and what two runs say before.

  The second is {} for steps, else {'alike': [steps], 'first': step or None}.
  """
  from paraxis.sharding.checkpoint import difference
  from paraxis.sharding.checkpoint import stored

  found = [_locate(text, '') for text in words]
  numbers = [number for _, number in found]
  if numbers != [None, None]:
    given = next(n for n in numbers if n is not None)
    return [_open(text, '', given) for text in words], {}
  runs = [
    {n: stored.Step(folder / str(n)) for n in _listed(folder)}
    for folder, _ in found
  ]
  common = sorted(runs[0].keys() & runs[1].keys())
  if not common:
    raise errors.UserError(
      'the runs have no step in common: {} has {}, {} has {}; name a step of '
      'each.'.format(
        *(
          x
          for text, run in zip(words, runs, strict=True)
          for x in (text, ', '.join(map(str, run)))
        )
      )
    )
  manifests = [{n: step.manifest for n, step in run.items()} for run in runs]
  first = difference.first_step(*manifests)
  at = common[-1] if first is None else first
  alike = [n for n in common if first is None or n < first]
  return [run[at] for run in runs], dict(alike=alike, first=first)


def _diff(values, _, words):
  if len(words) != 2:
    raise errors.UserError('paraxis checkpoint diff A B: name two.')
  command_line.prepare_devices(1)
  (a, b), runs = _pair(words)
  from paraxis.sharding.checkpoint import difference

  found = difference.leaves(a, b)
  if values.json:
    named = dict(a=str(a.folder), b=str(b.folder), **runs)
    rows = [row._asdict() for row in found]
    print(json.dumps(named | dict(differences=rows), indent=2))
    return errors.EXIT_DIFFERENT if found else errors.EXIT_OK
  print(f'A: step {a.number} of {a.folder}\nB: step {b.number} of {b.folder}')
  if runs:
    alike = ', '.join(map(str, runs['alike'])) or 'no step'
    then = '' if runs['first'] is None else f', not from {runs["first"]} on'
    print(f'the runs are alike at {alike}{then}')
  if found:
    table: list[tuple] = [('leaf', 'differ', 'of', 'max |a-b|', 'relative', '')]
    for row in found:
      numbers = ('-',) * 4
      if row.changed is not None:
        numbers = (
          str(row.changed),
          str(row.size),
          *(f'{x:.3g}' for x in (row.largest, row.relative)),
        )
      table.append((row.path, *numbers, row.what))
    _print_table(table)
  print(f'{len(found)} of {len({*a.leaves, *b.leaves})} leaves differ')
  return errors.EXIT_DIFFERENT if found else errors.EXIT_OK


def _beside(out):
  """A new folder beside `out`, which is empty or not there."""
  try:
    if os.path.lexists(out) and (
      out.is_symlink() or not out.is_dir() or any(out.iterdir())
    ):
      raise errors.UserError(f'--out={out} is there, and not empty.')
    out.parent.mkdir(parents=True, exist_ok=True)
    return pathlib.Path(tempfile.mkdtemp(prefix='reshard-', dir=out.parent))
  except OSError as e:
    raise errors.UserError(
      f'--out={out}: cannot write it as a folder ({e.strerror}: {e.filename}): '
      'name another one.'
    ) from e


def _reshard(values, *_):
  if not (values.out and values.chunk_bytes):
    raise errors.UserError(
      'paraxis checkpoint reshard --checkpoint=RUN/STEP --out=RUN2 '
      '--chunk_bytes=N: name all three, N above 0.'
    )
  out = pathlib.Path(os.path.abspath(os.path.expanduser(values.out)))
  command_line.prepare_devices(1)
  step = _open(values.checkpoint)
  from paraxis.sharding.checkpoint import reshard

  made = _beside(out)
  try:
    (made / workdir_lib.CHECKPOINTS).mkdir()
    reshard.write(step, made / workdir_lib.CHECKPOINTS, values.chunk_bytes)
    if _config(step.manifest['meta']):
      text = step.manifest['meta']['config']
      (made / workdir_lib.CONFIG).write_text(text, encoding='utf-8')
    made.chmod(0o755)
    folders.force(made)
    if out.exists():
      out.rmdir()
    made.rename(out)
    folders.force_name(out.parent)
  finally:
    shutil.rmtree(made, ignore_errors=True)
  print(
    f'step {step.number} of {step.folder}, {len(step.leaves)} leaves, is '
    f'written and verified in {out}'
  )


_JSON = (bool, 'json', False, 'print one JSON document instead of the table')
_RUN = 'checkpoint=RUN'
COMMANDS = (
  command_line.Command(
    _inspect,
    'checkpoint inspect',
    '--checkpoint=RUN[/STEP]',
    'list the leaves of a checkpoint, its configuration and origin; no array '
    'is read',
    (('path', _RUN, '', 'a run, its newest step; or RUN/STEP'), _JSON),
  ),
  command_line.Command(
    _verify,
    'checkpoint verify',
    '--checkpoint=RUN[/STEP]',
    'read every byte of a checkpoint, compare all fingerprints',
    (('path', _RUN, '', 'a run, all its steps; or RUN/STEP'), _JSON),
    notes=(
      '',
      'Exit code 14: damage, and which leaf or file. One leaf at a time is in',
      'memory, or 64 MiB of it; one CPU device is enough, and no code is run.',
    ),
  ),
  command_line.Command(
    _diff,
    'checkpoint diff',
    'A B',
    'say which leaves differ, by how much, and runs from which step on',
    (_JSON,),
    words=2,
    notes=(
      '',
      'A, B: RUN or RUN/STEP. Two runs are compared at every step that both',
      'have; a run beside a step, at that step. Exit code 0: alike, 1: not.',
    ),
  ),
  command_line.Command(
    _reshard,
    'checkpoint reshard',
    '--checkpoint=RUN/STEP --out=RUN2 --chunk_bytes=N',
    'rewrite a checkpoint in another chunk size (files depend on no mesh)',
    (
      (
        'path',
        _RUN,
        '',
        'a run, its newest step; or RUN/STEP; it stays as it is',
      ),
      ('path', 'out=RUN2', '', 'folder to write, empty or not there'),
      ('count', 'chunk_bytes=N', 0, 'the most that a chunk of a file holds'),
    ),
  ),
)
