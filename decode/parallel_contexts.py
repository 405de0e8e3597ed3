"""Contexts that are read alone, and by one request all at once (APE).

    a shared prefix, then each context alone at the same positions behind it;
    a query after the longest of them sees the prefix and all contexts

So a context is read once, whatever comes with it and in whatever order, and the
keys of the prefix are stored once (arXiv:2502.05431). Attention to contexts,
which all begin at one position, is flatter than to a text; the query therefore
reads them with a temperature T and a weight S:

    lse_c = log sum over all contexts exp(scale q.k / T)
    o = (e^(S T lse_c) o_c + e^lse o_rest) / (e^(S T lse_c) + e^lse)

With T = S = 1 that is one softmax over all keys, and with one context it is
reading one text. The rest is the prefix, and the query's own tokens.

Only for attention with keys and values of its own: a recurrence has one state,
and latents that are sharded have one softmax.
"""

import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.decode import cache as cache_lib
from paraxis.models import layer
from paraxis.models.mixers import attention
from paraxis.models.mixers import packed as packed_lib


def join(
  model, cache, contexts: list[int], dst: int, temperature=0.9, weight=0.9
):
  """`cache` with a request dst (a free row) that reads all contexts.

  Args:
    model: models.decoder.Decoder. cache: packed.Cache with room for a range of
      each context and one of their prefix (cache.sharing).
    contexts: rows, each a fork of the prefix that has read its context.
    temperature, weight: T and S. Those of the paper; they are of all requests
      of dst's row until it is joined again.

  Raises:
    UserError: a layer that is no attention; T or S is not above 0; as
      cache.merge.
  """
  for i, kind in enumerate(model.pattern):
    if not issubclass(layer.MIXERS[kind[0]], attention.Attention):
      raise errors.UserError(
        f'layer {i} (kind {kind[0]}) is no attention with keys and values of '
        'its own: contexts cannot be read apart from each other.'
      )
  if not (temperature > 0 and weight > 0):
    raise errors.UserError(
      f'parallel contexts: temperature {temperature} and weight {weight} must '
      'be above 0; the paper has 0.9 and 0.9.'
    )
  cache = cache_lib.merge(model, cache, contexts, dst)
  reads = cache.reads
  which = jnp.isin(reads.rows[dst], np.array(contexts))
  ones = jnp.ones(len(cache.length), float)
  old = reads.apart or packed_lib.Apart(
    jnp.zeros_like(reads.rows, bool), ones, ones
  )
  apart = packed_lib.Apart(
    old.which.at[dst].set(which),
    old.temperature.at[dst].set(temperature),
    old.weight.at[dst].set(weight),
  )
  return cache._replace(reads=reads._replace(apart=apart))
