"""Layout-free fingerprints of arrays, computed where the arrays live.

Every element is hashed with its global index and the hashes are summed modulo
2**32. With u the element's bits, f a fixed bijection of 32-bit words and s(i),
t(i) two hashes of the global index i:

  word1 = sum_i f(u_i ^ s(i))        word2 = sum_i f(u_i ^ s(i)) * (t(i) | 1)

Integer sums are exact in any order, so the result is the same on every mesh,
sharding and process count. f is a bijection: a change of one element (any bit
flip) always changes both words. Other damage, such as elements that change
places, goes unseen with probability 2**-64. This finds accidents; it is no
defence against somebody who builds a collision. The second half of this
file is the manifest, the JSON that identifies a saved state: format, step, and
path, shape, type, logical axes and fingerprint of every leaf.

Source: the 32-bit finaliser of MurmurHash3 (public domain). A plain weighted
sum of bits, the usual choice, cannot see x and -x change places: that is why f
is not linear. Cost: one pass over memory, about 20 integer operations per 32
bits (5 GB per CPU-second); three words per leaf leave the device.
"""

import functools
import hashlib
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import errors

FORMAT = 'paraxis-checkpoint'
VERSION = 1
_MAX_MANIFEST = 64 * 2**20  # bytes read before anything is parsed
_MAX_LISTED = 40  # differing leaves in one message
_PART = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_-]*')
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def damaged(folder, why):
  """The error to raise for one step that cannot be used."""
  return errors.IntegrityError(f'checkpoint {folder} is damaged: {why}.')


def _mix(x):
  """A bijection of uint32 in which every input bit reaches every output bit."""
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def _bits(x):
  """Raw bits as uint32, same shape; 8-byte types get a last axis of 2."""
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
  return bits.astype(jnp.uint32)


def _leaf(x):
  """Array -> uint32 (word1, word2, 1 if any element is not finite)."""
  if x.size == 0:
    return (np.uint32(0),) * 3
  u = _bits(x)
  s, t = np.uint32(0x9E3779B9), np.uint32(0x7F4A7C15)
  for axis, size in enumerate(u.shape):
    # Hash the index of one axis at a time: vectors, and no overflow of a flat
    # index in arrays of more than 2**32 elements.
    index = jnp.arange(size, dtype=jnp.uint32) + np.uint32(axis * 0x27D4EB2F)
    other = (1,) * axis + (size,) + (1,) * (u.ndim - axis - 1)
    s = s + _mix(index).reshape(other)
    t = t + _mix(~index).reshape(other)
  h = _mix(u ^ s)
  bad = h & np.uint32(0)
  if jnp.issubdtype(x.dtype, jnp.inexact):
    found = (~jnp.isfinite(x)).astype(jnp.uint32)
    bad = bad | (found if x.ndim == h.ndim else found[..., None])
  # One reduction of three words: one pass over memory, three times as fast as
  # three sums, and sharded dimensions exchange their partial words only.
  return jax.lax.reduce(
    (h, h * (t | np.uint32(1)), bad),
    (np.uint32(0),) * 3,
    lambda a, b: (a[0] + b[0], a[1] + b[1], a[2] | b[2]),
    tuple(range(h.ndim)),
  )


@functools.lru_cache(maxsize=8)
def _compiled(out):
  """One jit per output sharding, kept: a new one would compile every time."""

  def measure(tree):
    return jnp.stack([jnp.stack(_leaf(x)) for x in tree.values()])

  return jax.jit(measure, out_shardings=out)


def _supported(name, x):
  kind = getattr(x, 'dtype', None)
  if kind is None or not isinstance(x, (jax.Array, np.ndarray)):
    raise errors.UserError(
      f'{name} is {type(x).__name__}, not an array; store it as jnp.asarray.'
    )
  if jnp.issubdtype(kind, jax.dtypes.prng_key):
    raise errors.UserError(
      f'{name} is a typed random key; store jax.random.key_data of it.'
    )
  four_bit = kind.name in ('int2', 'uint2', 'int4', 'uint4', 'float4_e2m1fn')
  if kind.itemsize not in _UNSIGNED or kind.kind == 'c' or four_bit:
    raise errors.UserError(f'{name} is {kind}: no fingerprint of that type.')


def measure(tree):
  """Fingerprints and the names of leaves that hold NaN or infinity.

  One compiled pass over all leaves. Every process must call it.

  Args:
    tree: {name: array}, any shapes and shardings over the same devices; 1, 2, 4
      or 8 byte real types. Empty leaves and scalars are fine.

  Returns:
    ({name: 16 hex digits}, [names of non-finite leaves]).

  Raises:
    UserError: a leaf is no array or of an unsupported type.
  """
  if not tree:
    return {}, []
  for name, x in tree.items():
    _supported(name, x)
  shardings = [getattr(x, 'sharding', None) for x in tree.values()]
  named = [s for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
  out = None
  if named:
    out = jax.sharding.NamedSharding(
      named[0].mesh, jax.sharding.PartitionSpec()
    )
  ordered = {name: tree[name] for name in sorted(tree)}
  words = np.asarray(_compiled(out)(ordered))
  prints = {
    n: f'{a:08x}{b:08x}' for n, (a, b, _) in zip(ordered, words, strict=True)
  }
  bad = [n for n, row in zip(ordered, words, strict=True) if row[2]]
  return prints, bad


def fingerprint(tree):
  """{name: array} -> {name: 16 hex digits}; equal bits, equal digits.

  See `measure` for what a leaf may be. The type and the shape are not part of
  the digits: compare those too.
  """
  return measure(tree)[0]


def nbytes(tree):
  """Bytes of all leaves of {name: array or ShapeDtypeStruct}, unsharded."""
  return sum(
    math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in tree.values()
  )


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
  """{'a/b': x} -> {'a': {'b': x}}; empty leaves, which Orbax refuses, go."""
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
  """Undoes nest: an array for every path of `like`, empty ones made anew."""
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


def compare(saved, like, where, under=''):
  """UserError listing every leaf in which `saved` and `like` differ.

  Nothing is ever cast, filled in or dropped.

  Args:
    saved: what `describe` returned.
    like: {path: anything with shape and dtype}.
    where: what the message calls the checkpoint.
    under: saved leaves whose path does not start with this do not count.
  """
  saved = {path: x for path, x in saved.items() if path.startswith(under)}
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
    f'{len(set(saved) | set(like))} leaves differ. Use the config it was '
    'trained with (in its manifest) or another directory.\n' + '\n'.join(listed)
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
    manifest['meta']
  except (KeyError, TypeError, AttributeError) as e:
    raise ValueError(f'{type(e).__name__} {e}') from None


def read_manifest(folder):
  """The checked manifest of one step folder, else IntegrityError."""
  path = folder / 'manifest' / 'metadata'
  try:
    if folder.is_symlink() or any(p.is_symlink() for p in folder.rglob('*')):
      raise damaged(folder, 'it is or contains a symbolic link')
    if not (folder / 'state' / '_METADATA').is_file():
      raise damaged(folder, 'it has no state')
    if (size := path.stat().st_size) > _MAX_MANIFEST:
      raise damaged(
        folder, f'its manifest has {size} bytes, over {_MAX_MANIFEST}'
      )
    manifest = json.loads(path.read_text('utf-8'))
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
  if str(manifest['step']) != folder.name:
    raise damaged(folder, f'its manifest is of step {manifest["step"]}')
  return manifest
