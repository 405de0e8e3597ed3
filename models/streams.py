"""Parallel streams: P copies of a row, told apart by prefix keys of each layer.

    o_p = attention over [prefix_p; the row]         models/mixers/prefix.py
    w   = softmax(V silu(U [h_1 .. h_P]))            h_p = norm(x_p) of a token
    h   = sum_p ((1 - FLOOR) w_p + FLOOR / P) h_p

(ParScale, arXiv:2505.10475, section 3: P streams share all else.) Copies are
rows: row b has rows b P .. b P + P - 1, on the device that has b, so that no
stream sends anything to another until they are mixed there. In decoding so do
requests: a cache has slots of P rows for each of them. One stream is the
standard row, without prefixes.

Cost: P times the work and the activations of the layers, and P times the cache;
P n keys and values a layer, and P D^2 numbers to mix.

Legend: B rows, P streams, T tokens, D model.
"""

import functools

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import parameter
from paraxis.models.mixers import packed as packed_lib
from paraxis.models.mixers import protocol
from paraxis.sharding import annotate
from paraxis.sharding.tensor import project

FLOOR = 0.01  # what streams share evenly, of a weight of 1
ROWS, RESIDUAL, LOW = protocol.ROWS, protocol.RESIDUAL, protocol.LOW


def of(batch, streams):
  """models.batch.Batch of P B rows; targets and weights stay those of B."""
  ids = batch.tokens, batch.segments, batch.positions
  tokens, segments, positions = _repeated(ids, streams)
  return batch._replace(tokens=tokens, segments=segments, positions=positions)


def _repeated(arrays, streams):
  """Arrays (B, ..) -> (P B, ..)."""
  copy = functools.partial(jnp.repeat, repeats=streams, axis=0)
  names = [(*ROWS, None)[: x.ndim] for x in arrays]
  run = annotate.region(lambda *xs: tuple(map(copy, xs)), names, names)
  return run(*arrays)


def lanes(form, streams):
  """packed.Form of P lanes for each one."""
  return tuple(g._replace(count=g.count * streams) for g in form)


def packed(form, given, streams):
  """packed.Packed of `lanes`: request r has rows r P .. r P + P - 1."""
  arrays = {k: x for k, x in given._asdict().items() if x is not None}
  if given.hole is not None:
    arrays |= dict(zip(('begin', 'end'), arrays.pop('hole'), strict=True))
  arrays['request'] = arrays['request'] * streams
  out = laid_out(form, arrays, streams)
  own = jnp.arange(len(out['request'])) % streams
  if len(form) > 1:  # lanes of several groups, one after the other
    own = packed_lib.join(
      lanes(form, streams), [_numbers(g, streams) for g in form]
    )[:, 0]
  out['request'] = out['request'] + annotate.put(own, ('batch',))[:, None]
  if given.hole is not None:
    out['hole'] = out.pop('begin'), out.pop('end')
  return given._replace(**out)


def _numbers(group, streams):
  """(P n, C) int32: the stream of every token of a group."""
  count = group.count * streams
  own = jnp.arange(count, dtype=jnp.int32) % streams
  return jnp.broadcast_to(own[:, None], (count, group.width))


def laid_out(form, arrays, streams):
  """{name: array}, laid out as packed.Packed of a form, of its `lanes`."""
  parts = [
    dict(zip(each, _repeated(list(each.values()), streams), strict=True))
    for _, each in packed_lib.lanes(form, arrays)
  ]
  many = lanes(form, streams)
  return {
    name: packed_lib.join(many, [p[name] for p in parts]) for name in parts[0]
  }


def cache(given, streams):
  """(P R,) length of a packed.Cache of R requests.

  Raises:
    UserError: requests read rows of others.
  """
  if given.reads is not None:
    raise errors.UserError(
      f'model.streams={streams}: a request has as many rows of the cache, and '
      'what reads those of others (shared prompts, forks, merged contexts) '
      'knows of one each: decode without sharing.'
    )
  return _repeated([given.length], streams)[0]


def parameters(module, config, rngs):
  """Gives Ends what `mixed` reads."""
  p, d = config.streams, config.d_model
  module.mix_in = parameter.matrix(rngs, (p * d, d), ('embed', None))
  module.mix_out = parameter.matrix(rngs, (d, p), ('embed', None))


def mixed(ends, x_BTD, form=None):
  """Features of P B rows, after the final norm -> of B.

  Args:
    ends: layer.Ends. form: of packed.Packed whose `lanes` x is laid out by;
      None: rows.
  """
  streams = ends.config.streams
  form = form or (packed_lib.Group(len(x_BTD) // streams, x_BTD.shape[1]),)
  run = annotate.region(
    functools.partial(_beside, streams), (RESIDUAL,), (RESIDUAL,), single=True
  )
  parts = packed_lib.lanes(lanes(form, streams), x_BTD)
  x = packed_lib.join(form, [run(part) for _, part in parts])
  with jax.named_scope('mix'):
    h = jax.nn.silu(_product(ends.mix_in, x, RESIDUAL, RESIDUAL))
    z = _product(ends.mix_out, h, RESIDUAL, LOW)
    w = jax.nn.softmax(z.astype(jnp.promote_types(z.dtype, jnp.float32)))
    w = (1 - FLOOR) * w + FLOOR / streams
    return parameter.weighed(
      jnp.split(w, streams, -1), jnp.split(x, streams, -1)
    )


def _beside(streams, x_BTD):
  """(P B, T, D) -> (B, T, P D)."""
  rows, length, width = x_BTD.shape
  x = x_BTD.reshape(rows // streams, streams, length, width).swapaxes(1, 2)
  return x.reshape(rows // streams, length, streams * width)


def _product(variable, x_BTD, x_names, out):
  w, names = parameter.operand(variable)
  return project.einsum('BTD,DE->BTE', x_BTD, x_names, w, names, out)
