"""A reader of checkpoints that shares no code with their writer.

Written from the docstrings of sharding/checkpoint/manifest.py and
fingerprint.py, with tensorstore, json, hashlib and NumPy alone.
"""

import hashlib
import json
import pathlib

import numpy as np
import tensorstore as ts

WORD = 2**32


def f(x):
  """The bijection of 32-bit words; x: uint64 below 2**32."""
  x = (x ^ (x >> 16)) * 0x85EBCA6B % WORD
  x = (x ^ (x >> 13)) * 0xC2B2AE35 % WORD
  return x ^ (x >> 16)


def words(x):
  """16 hex digits of an array, element by element of the equation."""
  if x.dtype.itemsize == 8:
    low = x.view('<u8') % WORD
    u = np.stack([low, x.view('<u8') // WORD], axis=-1)
  else:
    u = x.view(f'<u{x.dtype.itemsize}').astype(np.uint64)
  s = np.full(u.shape, 0x9E3779B9, np.uint64)
  t = np.full(u.shape, 0x7F4A7C15, np.uint64)
  for a, i in enumerate(np.indices(u.shape, np.uint64)):
    place = (i + a * 0x27D4EB2F) % WORD
    s, t = s + f(place), t + f(WORD - 1 - place)
  h = f(u ^ s % WORD)
  one = sum(h.ravel().tolist()) % WORD
  two = sum(int(p) * (int(q) | 1) for p, q in zip(h.flat, t.flat, strict=True))
  return f'{one:08x}{two % WORD:08x}'


def read(folder):
  """(manifest, {path: array}) of a step's folder; AssertionError: damaged."""
  folder = pathlib.Path(folder)
  manifest = json.loads((folder / 'manifest/metadata').read_text('utf-8'))
  body = {k: v for k, v in manifest.items() if k != 'sha256'}
  text = json.dumps(body, sort_keys=True, separators=(',', ':'))
  assert manifest['sha256'] == hashlib.sha256(text.encode()).hexdigest()
  assert manifest['format'] == 'paraxis-checkpoint'
  tree = {}
  for path, leaf in manifest['leaves'].items():
    if 0 in leaf['shape']:
      tree[path] = np.zeros(leaf['shape'], leaf['dtype'])
      assert leaf['fingerprint'] == '0' * 16, path
      continue
    files = {'driver': 'file', 'path': f'{folder / "state"}/'}
    name = path.replace('/', '.') + '/'
    base = {'driver': 'ocdbt', 'base': files, 'path': name}
    x = ts.open({'driver': 'zarr', 'kvstore': base}).result().read().result()
    assert list(x.shape) == leaf['shape'] and x.dtype.name == leaf['dtype']
    assert len(leaf['axes']) == x.ndim
    assert words(x) == leaf['fingerprint'], path
    tree[path] = x
  return manifest, tree
