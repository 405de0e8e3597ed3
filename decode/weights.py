"""Parameters as decoding reads them: one array a layer, cast, or in 4 bits.

decode.weights=int4 keeps the matrices of layers in 4 bits
(sharding/tensor/int4.py), rounded to nearest from what was loaded; embeddings,
the head, norms, biases, experts and what no group divides stay as they are.
"""

import functools
import math

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import depth
from paraxis.pallas_kernels.matmul import quantized
from paraxis.sharding import annotate
from paraxis.sharding.tensor import int4


def prepare(model, params, config):
  """{path: array, or int4.Int4}, as `Decoder.unstack` names them.

  Args:
    model: models.decoder.Decoder. params: as its `init` gives them.
    config: schema.Decode.

  Raises:
    UserError: groups that a matrix or a shard of it has no whole number of; no
      matrix that is kept in 4 bits.
  """
  dtype = jnp.dtype(model.config.dtype)
  out = {}
  for p, (v, make) in _storage(model, params, config).items():
    if make is not None:  # what was loaded: a cast before it would round twice
      out[p] = jax.vmap(make)(v)  # of a layer
    else:
      # Routers, their biases and counts: rounded they would choose others.
      # Taps: convolutions multiply by them in at least float32.
      kept = model.kinds[p] == 'vector' or 'choices' in model.axes[p]
      kept |= p in model.taps
      out[p] = v if kept else v.astype(dtype)
  return model.unstack(out)


def rounded(model, params, config):
  """{path: array} of the same shapes and dtypes, with what `prepare` rounds.

  For programs that read parameters as training does: scores of whole rows.

  Args and errors: as for `prepare`.
  """
  out = dict(params)
  for p, (v, make) in _storage(model, params, config).items():
    if make is not None:
      out[p] = jax.vmap(lambda w, make=make: int4.floats(make(w), w))(v)
  return out


def _storage(model, params, config):
  """{path: (parameter, matrix of a layer -> Int4, or None: it stays)}."""
  groups = {}
  if config.weights == 'int4':
    groups = _groups(model, params, config.weight_group)
  out = {}
  for p, v in params.items():
    make = None
    if p in groups:
      own = dict(axes=model.axes[p][1:], inputs=model.inputs[p], name=p)
      make = functools.partial(int4.make, group=groups[p], **own)
    out[p] = v, make
  return out


def stays(model, params, config):
  """One line on the matrices that int4 leaves as they were loaded.

  Args:
    model, config: as for `prepare`. params: {path: array, or its shape}.

  Returns:
    '' if there are none, and where `prepare` refuses because all would stay.
  """
  if config.weights != 'int4':
    return ''
  least, inputs = quantized.GROUPS[0], dict(_matrices(model, params))
  left = {p: f'{n} inputs' for p, n in inputs.items() if n % least}
  if len(left) == len(inputs):
    return ''
  kinds = model.kinds.items()
  every = [p for p, k in kinds if p.startswith('layers/') and k == 'matrix']
  left |= {p: 'of experts' for p in every if p not in inputs}
  if not left:
    return ''
  return (
    f'decode.weights=int4: {len(left)} of {len(every)} matrices of layers stay '
    f'as loaded, of experts or with inputs that {least} does not divide: '
    + ', '.join(f'{p} ({why})' for p, why in sorted(left.items()))
  )


def check_kept(config, asked):
  """UserError if a call asks for other weights than were laid out.

  config, asked: schema.Decode of a Generator, and of the call.
  """
  for name in ('weights', 'weight_group'):
    now, other = getattr(config, name), getattr(asked, name)
    if now != other:
      raise errors.UserError(
        f'decode.{name} is {now!r} since the weights were laid out; {other!r} '
        'needs another Generator.'
      )


def _groups(model, params, asked):
  """{path of a stack: inputs that share a scale}."""
  if asked and asked not in quantized.GROUPS:
    raise errors.UserError(
      f'decode.weight_group={asked} is none of '
      f'{", ".join(map(str, quantized.GROUPS))}, or 0.'
    )
  out, least = {}, quantized.GROUPS[0]
  for path, rows in _matrices(model, params):
    if rows % least:
      continue
    # Of the matrix alone: numbers do not depend on the mesh.
    group = asked or max(g for g in quantized.GROUPS if rows % g == 0)
    shards = annotate.shards(model.axes[path][1])
    if rows % (group * shards):
      fits = [g for g in quantized.GROUPS if rows % (g * shards) == 0]
      each = f', {rows // shards} on each of {shards} shards' * (shards > 1)
      raise errors.UserError(
        f'decode.weights=int4: {path} has {rows} inputs{each}, no multiple of '
        f'{group}, which share a scale: take '
        + (f'decode.weight_group={fits[-1]}.' if fits else 'another mesh.')
      )
    out[path] = group
  if not out:
    raise errors.UserError(
      'decode.weights=int4: no matrix of a layer has inputs that are a '
      f'multiple of {least}; leave it at loaded.'
    )
  return out


def _matrices(model, params):
  """Yields (path of a stack, inputs) of what may be kept in 4 bits."""
  for path, axes in model.axes.items():
    of_experts = set(axes) & set(depth.BY_EXPERT)
    if path.startswith('layers/') and not of_experts:
      if model.kinds[path] == 'matrix':
        inputs = params[path].shape[1 : 1 + model.inputs[path]]
        yield path, math.prod(inputs)
