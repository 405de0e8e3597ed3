"""The manifest: JSON that describes a saved state.

It holds format and step of the checkpoint, and canonical path, shape, type,
logical axes and fingerprint of every leaf, sealed by a sha256. It is read as
data, capped in size, and not trusted before the seal is checked.

Format 1, for other programs. `manifest/metadata` is one JSON object: format
(FORMAT), version, step, meta (of the caller), sha256, and leaves, {path:
{shape, dtype (NumPy's name, or bfloat16 ...), axes (a name or null for each
dimension), fingerprint (fingerprint.py)}}. sha256 is that of the object without
it, written with sorted keys, no spaces and only ASCII, as Python's json.dumps
does. `state` is an OCDBT database; leaf 'a/b' is the zarr (2) array 'a.b' in
it, in row-major order; arrays with a dimension of 0 are not stored.

What training writes in meta (train/start.py): config (of the run, by section),
cursor, corpus and tokenizer (hashes of what was read), versions {package:
version}, origin (of the first parameters) and suspect (true: saved within
skipped steps or a loss spike). The cursor has step and seed; skips [[step,
batches left out], ..] if a run went back, spike {losses, row} if it looks for
spikes (train/run/spikes.py).
"""

import functools
import hashlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.configs.base import plain_files
from paraxis.sharding.checkpoint import folders

FORMAT = 'paraxis-checkpoint'
VERSION = 1
_MAX_MANIFEST = 64 * 2**20  # bytes read before anything is parsed
_MAX_LISTED = 40  # differing leaves in one message
# Leaves of earlier states that held numbers of a step: counts of solvers.
GONE = ('solver',)
_PART = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_-]*')


def damaged(folder, why):
  """The error to raise for one step that cannot be used."""
  return errors.IntegrityError(f'checkpoint {folder} is damaged: {why}.')


def check_paths(paths):
  """UserError unless every path is a safe name and none is below another."""
  paths = set(paths)
  for path in sorted(paths):
    parts = path.split('/') if isinstance(path, str) else ['']
    if not all(_PART.fullmatch(p) for p in parts) or len(path) > 1024:
      raise errors.UserError(
        f'leaf path {path!r} is not names of letters, digits, _ and - joined '
        "by '/'."
      )
    for i in range(1, len(parts)):
      if '/'.join(parts[:i]) in paths:
        raise errors.UserError(
          f'leaf path {path!r} is below the leaf {"/".join(parts[:i])!r}.'
        )


def nest(tree):
  """{'a/b': x} -> {'a': {'b': x}} without empty leaves, which Orbax refuses."""
  out = {}
  for path, x in tree.items():
    if 0 not in x.shape:
      *parents, name = path.split('/')
      node = out
      for p in parents:
        node = node.setdefault(p, {})
      node[name] = x
  return out


def flatten(nested, like):
  """Inverse of nest: an array for every path of `like`, empty ones created."""
  tree = {}
  for path, x in like.items():
    if 0 in x.shape:
      tree[path] = jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
    else:
      tree[path] = functools.reduce(lambda n, k: n[k], path.split('/'), nested)
  return tree


def describe(tree, axes, prints):
  """{path: {shape, dtype, axes, fingerprint}} for JSON; UserError if wrong."""
  if odd := sorted(set(tree) ^ set(axes)):
    raise errors.UserError(f'axes and tree differ in {", ".join(odd)}.')
  leaves = {}
  for path, x in sorted(tree.items()):
    names = list(axes[path])
    if len(names) != x.ndim:
      raise errors.UserError(
        f'{path} has {x.ndim} dimensions {tuple(x.shape)} but {len(names)} '
        f'logical axes {tuple(names)}.'
      )
    leaves[path] = dict(
      shape=list(x.shape),
      dtype=jnp.dtype(x.dtype).name,
      axes=names,
      fingerprint=prints[path],
    )
  return leaves


_ADVICE = (
  'Use the config it was trained with (in its manifest) or another directory.'
)


def compare(
  saved, like, where, under: str | tuple[str, ...] = '', advice=_ADVICE
):
  """UserError listing every leaf in which `saved` and `like` differ.

  Nothing is ever cast, filled in or dropped, but leaves named in `GONE`.

  Args:
    saved: what `describe` returned.
    like: {path: anything with shape and dtype}.
    where: what the message calls the checkpoint.
    under: saved leaves whose path does not start with this (one of it) do not
      count; (): those of `like` alone do.
    advice: what the message says to do.
  """
  gone = lambda path: path not in like and path.split('/')[-1] in GONE
  saved = {
    path: x
    for path, x in saved.items()
    if (path.startswith(under) or path in like) and not gone(path)
  }
  lines = []
  for path in sorted(set(saved) | set(like)):
    have = want = 'missing'
    if path in saved:
      entry = saved[path]
      have = f'{entry["dtype"]}{tuple(entry["shape"])}'
    if path in like:
      x = like[path]
      want = f'{jnp.dtype(x.dtype).name}{tuple(x.shape)}'
    if have != want:
      lines.append(f'  {path}: saved {have}, wanted {want}')
  if not lines:
    return
  more = len(lines) - _MAX_LISTED
  listed = lines[:_MAX_LISTED]
  if more > 0:
    listed.append(f'  ... and {more} more')
  raise errors.UserError(
    f'{where} is a checkpoint of another architecture: {len(lines)} of '
    f'{len(set(saved) | set(like))} leaves differ. {advice}\n'
    + '\n'.join(listed)
  )


def _sha256(manifest):
  body = {k: v for k, v in manifest.items() if k != 'sha256'}
  text = json.dumps(body, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()


def seal(step, leaves, meta):
  """The manifest as JSON will return it, with its hash; UserError if it can't.

  `leaves` is what `describe` returned, `meta` a dict of the caller.
  """
  manifest = dict(format=FORMAT, version=VERSION, step=step)
  manifest.update(leaves=leaves, meta=meta)
  try:
    manifest = json.loads(json.dumps(manifest, allow_nan=False))
  except (TypeError, ValueError) as e:
    raise errors.UserError(f'the manifest is not JSON: {e}.') from None
  return dict(manifest, sha256=_sha256(manifest))


def _check_seal(manifest):
  if not isinstance(manifest, dict) or manifest.get('format') != FORMAT:
    raise ValueError(f'it is no {FORMAT} manifest')
  if manifest.get('sha256') != _sha256(manifest):
    raise ValueError('it does not fit its hash')
  try:
    for leaf in manifest['leaves'].values():
      if not all(type(n) is int and n >= 0 for n in leaf['shape']):
        raise ValueError(f'shape {leaf["shape"]}')
      if not isinstance(leaf['dtype'] + leaf['fingerprint'], str):
        raise ValueError('a type or fingerprint is no text')
    if not type(manifest['version']) is type(manifest['step']) is int:
      raise ValueError('version or step is no integer')
    check_paths(manifest['leaves'])
    if not isinstance(manifest['meta'], dict):
      raise ValueError('its meta is no object')
  except (KeyError, TypeError, AttributeError) as e:
    raise ValueError(f'{type(e).__name__} {e}') from None


def _check_files(folder):
  """IntegrityError: something in a step is neither a file nor a folder.

  A link may lead anywhere, and whoever opens a named pipe may wait for ever.
  """
  for path in (folder, *folder.rglob('*')):
    if path.is_symlink():
      raise damaged(folder, 'it is or contains a symbolic link')
    if path.is_dir():
      continue
    try:
      plain_files.check(path)
    except OSError as e:
      name = path.relative_to(folder)
      raise damaged(folder, f'{name}: {e.strerror}') from None


def read_manifest(folder):
  """The checked manifest of one step folder, else IntegrityError."""
  path = folder / 'manifest' / 'metadata'
  try:
    _check_files(folder)
    if not (folder / 'state' / '_METADATA').is_file():
      raise damaged(folder, 'it has no state')
    if (size := path.stat().st_size) > _MAX_MANIFEST:
      raise damaged(
        folder, f'its manifest has {size} bytes, over {_MAX_MANIFEST}'
      )
    manifest = json.loads(plain_files.read_text(path))
    _check_seal(manifest)
  except (OSError, ValueError, RecursionError) as e:
    raise damaged(
      folder, f'its manifest does not read: {str(e)[:200]}'
    ) from None
  if manifest['version'] > VERSION:
    raise errors.UserError(
      f'{folder} has checkpoint format {manifest["version"]}, this program '
      f'reads up to {VERSION}: upgrade it.'
    )
  if manifest['version'] < 1:
    raise damaged(
      folder, f'its format is {manifest["version"]}, the first one is 1'
    )
  if str(manifest['step']) != folder.name:
    raise damaged(folder, f'its manifest is of step {manifest["step"]}')
  return manifest


def committed(directory) -> dict[int, dict]:
  """{step: manifest} of the steps in a directory whose manifests read."""
  good = {}
  for step in folders.steps(directory):
    try:
      good[step] = read_manifest(directory / str(step))
    except errors.IntegrityError:
      continue
  return good
