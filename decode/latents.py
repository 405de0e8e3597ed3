"""The latents of a checkpoint, rotated and sharded for decoding.

Models are trained with whole latents. model.latent.groups, scores and rotation
(models/mixers/latent.py), usually overrides of the config of the run, choose
how decoding shards them; this module converts the parameters. Only pca reads
text: one prefill gives the latents of at least as many tokens as a latent is
wide. Without pca the shards are assumed to have equal variance, as hadamard
makes them.
"""

import dataclasses

import jax
import numpy as np

from paraxis.configs.base import errors
from paraxis.decode import step
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models.mixers import latent_rotation

MOST = 2**15  # tokens of text that pca reads
PREFIX = 'layers/latent_attention/'


def change(model):
  """Whether a schema.Model decodes with converted parameters."""
  own = model.latent
  split = own.groups > 1 and own.scores == 'own'
  return 'A' in model.pattern and (split or own.rotation != 'none')


def as_trained(config, run):
  """schema.Config with the latents of the schema.Config of a run."""
  was = run.model.latent
  own = dataclasses.replace(
    config.model.latent, groups=was.groups, scores=was.scores,
    rotation=was.rotation,
  )  # fmt: skip
  model = dataclasses.replace(config.model, latent=own)
  return dataclasses.replace(config, model=model)


def rotated(params, built, ids=(), length=512, say=print):
  """Parameters converted for decoding.

  Args:
    params: {path: array}, stacked, of a run with any groups, on the mesh.
    built: models.build.Built to decode with, on the same mesh.
    ids: lists of token ids, whose latents pca measures.
    length: tokens per row of that text.
    say: prints one line.

  Returns:
    {path: array}, stacked, laid out as built.params.

  Raises:
    UserError: pca of fewer tokens than a latent is wide.
  """
  config, cache = built.model.config, None
  own = dataclasses.replace(config.latent, groups=1)
  whole = decoder.Decoder(
    dataclasses.replace(config, latent=own), layout=built.model.layout
  )
  with build.use(built):
    loose = jax.jit(whole.unstack)(params)
    if config.latent.rotation == 'pca':
      cache = _calibrate(whole, built, loose, _rows(ids, length, own.rank, say))
  found = latent_rotation.rotated(loose, config, cache)
  out = {p: x for p, x in params.items() if p in built.params}
  for path, like in built.params.items():
    if path.startswith(PREFIX):
      names = [f'layers/{i}/{path.removeprefix("layers/")}' for i in _at(whole)]
      value = np.stack([np.asarray(found[name]) for name in names])
      out[path] = jax.device_put(value, like.sharding)
  return out


def _at(model):
  return [i for i, kind in enumerate(model.pattern) if kind[0] == 'A']


def _rows(ids, length, rank, say):
  """Lists of at most `length` ids; UserError if they are too few in all."""
  rows = [
    list(row[first : first + length])
    for row in ids
    for first in range(0, len(row), length)
  ]
  count = sum(map(len, rows))
  if count < rank:
    raise errors.UserError(
      f'model.latent.rotation=pca: {count} tokens of text to find the '
      f'covariance of {rank} numbers (model.latent.rank) by; give at least as '
      'many (--calibration_file=).'
    )
  while sum(map(len, rows[:-1])) >= max(MOST, rank):
    rows.pop()
  used = sum(map(len, rows))
  say(f'latents are measured on {used} tokens of {count} of text')
  return rows


def _calibrate(model, built, params, rows):
  """packed.Cache of the rows."""
  length = max(map(len, rows))
  slots = step.slots(length)
  run = jax.jit(lambda p, t, n: step.prefill(model, p, t, n, slots)[1])
  return run(params, *step.place(rows, length, built.mesh))
