"""Learned keys and values before a row, other ones for each of its copies.

    o, lse of [prefix; row] = merge((o, lse) of the prefix, (o, lse) of the row)

(Prefix tuning, arXiv:2101.00190; one prefix a stream: ParScale,
arXiv:2505.10475, section 3.) Every token sees all of the prefix, whatever its
window; its keys have no position. Cost: n more keys a token.

Legend: B rows, P streams, T tokens, N heads, K kv heads, H head width, n keys
of a prefix.
"""

import functools

import jax
import jax.numpy as jnp

from paraxis.models import parameter
from paraxis.models.mixers import protocol as mixer
from paraxis.pallas_kernels.decode_attention import schedule
from paraxis.sharding import annotate

PREFIX = (None, None, 'kv_heads', 'head_dim')  # (P, n, K, H)
STD = 0.02


def parameters(config, rngs, kv_heads):
  """Prefix keys and values of a mixer, laid out by PREFIX."""
  shape = config.streams, config.stream_prefix, kv_heads, config.head_width
  make = lambda: parameter.embedding(rngs, shape, PREFIX, STD)
  return make(), make()


def merged(found, prefix, mask):
  """(o, lse) of queries over a prefix, too.

  Args:
    found: (q_BTNH, o_BTNH, lse_BTN) of P B rows, row b P + p of stream p.
    prefix: keys and values, (P, n, N', H) each, laid out as the heads of
      queries are. mask: op.Mask, its scale and cap.
  """
  heads = (None, None, 'heads', 'head_dim')
  names = mixer.HEADS, mixer.HEADS, mixer.HEADS[:3], heads, heads
  run = functools.partial(_merged, mask)
  run = annotate.region(run, names, (mixer.HEADS, mixer.HEADS[:3]))
  return run(*found, *prefix)


def _merged(mask, q, o, lse, key, value):
  """`merged`, of local arrays."""
  streams, _, kv_heads, width = key.shape
  rows, length, heads, _ = q.shape
  wide = jnp.promote_types(q.dtype, jnp.float32)
  shape = rows // streams, streams, length, kv_heads, heads // kv_heads, width
  key, value = key.astype(q.dtype), value.astype(q.dtype)
  s = jnp.einsum(
    'bptkgh,pnkh->bptkgn', q.reshape(shape), key, preferred_element_type=wide
  )
  s = s * mask.scale
  if mask.softcap:
    s = mask.softcap * jnp.tanh(s / mask.softcap)
  total = jax.nn.logsumexp(s, -1)
  weight = jnp.exp(s - total[..., None]).astype(q.dtype)
  own = jnp.einsum(
    'bptkgn,pnkh->bptkgh', weight, value, preferred_element_type=wide
  )
  own = own.reshape(o.shape), total.reshape(lse.shape)
  found, lse = schedule.merge(own, (o.astype(wide), lse.astype(wide)))
  return found.astype(o.dtype), lse
