"""From logits to the next token: greedy, or drawn after up to three filters.

    p = softmax(z / temperature), then in this order, on the tokens left:
    top-k   the k most likely tokens             (Fan et al., arXiv:1805.04833)
    top-p   the fewest most likely tokens whose probability is at least p
            (nucleus; Holtzman et al., arXiv:1904.09751)
    min-p   tokens at least min_p times as likely as the best (arXiv:2407.01082)

Tokens that tie with the last one kept are kept too, so a filter never depends
on the order of the vocabulary. Temperature 0 is greedy; ties go to the lowest
id. Request r draws its i-th new token with the key fold_in(fold_in(key(seed),
r), i): neither its row, nor other requests, nor the mesh change what it draws.
Other draws at that place have a third number folded in, their purpose.

Cost: top-k and top-p find their threshold by bisection over the bits of the
logits: 32 sums over the vocabulary, exact, no sort. Drawing is one Gumbel
maximum. Legend: B rows, V vocabulary.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.sharding import annotate

ROWS = ('batch', None)
COLDEST = 1e-4  # logits divided by less could overflow float32


class SamplingForm(NamedTuple):
  """What is compiled in; the values stay arguments (`SamplingValues`)."""

  greedy: bool
  top_k: bool
  top_p: bool
  min_p: bool


class SamplingValues(NamedTuple):
  """Scalars: temperature, top_p, min_p float32; top_k int32; seed uint32."""

  temperature: Any
  top_k: Any
  top_p: Any
  min_p: Any
  seed: Any


def check(config, vocab_size):
  """(SamplingForm, SamplingValues); UserError for a value out of range.

  Args:
    config: configs.schema.Decode; temperature 0 or >= COLDEST, 0 <= top_k <=
      vocab_size (0: all), 0 < top_p <= 1, 0 <= min_p <= 1, 0 <= seed < 2**32.
    vocab_size: V.
  """
  t, k, p, m = config.temperature, config.top_k, config.top_p, config.min_p
  for name, value, ok, valid in (
    (
      'temperature',
      t,
      t == 0 or COLDEST <= t < math.inf,
      f'0 (greedy) or at least {COLDEST}',
    ),
    (
      'top_k',
      k,
      0 <= k <= vocab_size,
      f'between 0 (all) and the {vocab_size} tokens of the vocabulary',
    ),
    ('top_p', p, 0 < p <= 1, 'above 0 and at most 1 (all)'),
    ('min_p', m, 0 <= m <= 1, 'between 0 (all) and 1'),
    ('seed', config.seed, 0 <= config.seed < 2**32, 'in [0, 2**32)'),
  ):
    if not ok:
      raise errors.UserError(f'{name}={value} is out of range: {valid}.')
  if t == 0 and config.judge == 'typical':
    raise errors.UserError(
      'decode.judge=typical keeps what is likely to be drawn, and with '
      'temperature=0 nothing is: take judge=replay, or a temperature above 0.'
    )
  form = SamplingForm(t == 0, 0 < k < vocab_size, p < 1, m > 0)
  if form.greedy:
    form = SamplingForm(True, False, False, False)
  return form, SamplingValues(
    jnp.float32(t),
    jnp.int32(k),
    jnp.float32(p),
    jnp.float32(m),
    jnp.uint32(config.seed),
  )


def _ordered(z):
  """float32 -> uint32 that sorts the same way."""
  bits = jax.lax.bitcast_convert_type(z, jnp.uint32)
  return bits ^ jnp.where(bits >> 31 == 1, ~jnp.uint32(0), jnp.uint32(2**31))


def _keep(z_BV, weight_BV, need):
  """True on {z >= t} for the largest t at which sum of weights >= need."""
  key = _ordered(z_BV)

  def bit(i, t):
    higher = t | (jnp.uint32(2**31) >> i.astype(jnp.uint32))
    got = jnp.sum(jnp.where(key >= higher, weight_BV, 0), -1, keepdims=True)
    return jnp.where(got >= need, higher, t)

  t = jax.lax.fori_loop(0, 32, bit, jnp.zeros_like(key[:, :1]))
  return key >= t


def top_k(z_BV, k):
  """-inf on tokens less likely than the k-th most likely one."""
  ones = jnp.ones_like(z_BV, jnp.int32)
  return jnp.where(_keep(z_BV, ones, k), z_BV, -jnp.inf)


def top_p(z_BV, p):
  """-inf outside the nucleus: the fewest likely tokens with probability p."""
  p = jnp.maximum(p, jnp.finfo(jnp.float32).tiny)  # less is flushed to 0: none
  return jnp.where(_keep(z_BV, jax.nn.softmax(z_BV), p), z_BV, -jnp.inf)


def min_p(z_BV, p):
  """-inf on tokens less than p times as likely as the most likely one."""
  best = jnp.max(z_BV, -1, keepdims=True)
  return jnp.where(z_BV >= best + jnp.log(p), z_BV, -jnp.inf)


def filtered(logits_BV, form, values):
  """Logits (B, V) float32 of the distribution that is drawn from."""
  z = logits_BV.astype(jnp.float32) / values.temperature
  z = z - jnp.max(z, -1, keepdims=True)
  if form.top_k:
    z = top_k(z, values.top_k)
  if form.top_p:
    z = top_p(z, values.top_p)
  if form.min_p:
    z = min_p(z, values.min_p)
  return z


def keys(seed, request_B, index_B, purpose=0):
  """Keys (B,) of new token number index_b of request request_b, both uint32.

  purpose: 0: of the token itself; else of another draw at its place.
  """
  fold = jax.random.fold_in
  one = jax.vmap(fold, (None, 0))(jax.random.key(seed), request_B)
  one = jax.vmap(fold)(one, index_B)
  return jax.vmap(fold, (0, None))(one, purpose) if purpose else one


def gumbel(shape_BV, values, request_B, index_B, purpose=0):
  """Noise (B, V) float32 whose maximum beside log probabilities is a draw."""
  noise = jax.vmap(lambda k: jax.random.gumbel(k, shape_BV[1:], jnp.float32))
  g = noise(keys(values.seed, request_B, index_B, purpose))
  return annotate.put(g, ROWS)


def sample(logits_BV, form, values, request_B, index_B, purpose=0):
  """The next token of every row, and how likely the model finds it.

  Args:
    logits_BV: at least float32, laid out in any way.
    form, values: as `check` returns them.
    request_B: uint32, numbers of the requests.
    index_B: uint32, of the new token, from 0. purpose: as of `keys`.

  Returns:
    (token_B int32, logprob_B float32: log softmax(logits) of it, before
    temperature and filters), rows sharded as 'batch'.
  """
  z = annotate.put(logits_BV, ROWS)
  if form.greedy:
    token = jnp.argmax(z, -1).astype(jnp.int32)
  else:
    g = gumbel(z.shape, values, request_B, index_B, purpose)
    token = jnp.argmax(filtered(z, form, values) + g, -1).astype(jnp.int32)
  return token, logprob(z, token)


def logprob(z_BV, token_B):
  """log softmax(z) of a token, float32; (B, C) of (B, C, V), too."""
  here = jnp.arange(z_BV.shape[-1], dtype=jnp.int32) == token_B[..., None]
  chosen = jnp.sum(jnp.where(here, z_BV, 0), -1)
  return (chosen - jax.nn.logsumexp(z_BV, -1)).astype(jnp.float32)
