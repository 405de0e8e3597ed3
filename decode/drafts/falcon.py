"""Falcon: a draft layer that makes several features a pass, and sees them all.

    g_t = f_(t-1) + LSTM([embedding of token t; f_(t-1)])
    f'_(t+k-1) = layer(g_t)

A pass over the last k tokens makes the features that draw the next k tokens:
one pass for k drafts, two for 2 k. Within a block of k the layer's attention
sees forward, too (Falcon, arXiv:2412.12639: a relaxed causal mask, two layers
of LSTM, k = 2). As in eagle.py, f are the model's features, its embedding and
head stay as they are, a call first reads the tokens of the call before with the
model's features, and what it kept of its own drafts is forgotten.

The k - 1 tokens before those are read again: what was made of them did not see
the new ones, and a call may have only one. So the first pass of a call reads
k - 1 + n tokens, of which n are new, and the others k.

Ours: f_(t-1) is added to what the LSTM gives. Prompts are read by a causal
mask: what a cache keeps of one layer is the same under any, and nothing is made
of them.

Parameters: 'lstm/0/input' (2 D, 4 D), 'lstm/0/state' (D, 4 D), 'lstm/0/bias',
'lstm/1/..' (D, 4 D), and those of one layer, by the names of layer 0.

Legend: B rows, T tokens, C drafts, k BLOCK, S slots, D model width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.decode import cache as cache_lib
from paraxis.decode import judges
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.decode import trees
from paraxis.decode.drafts import eagle
from paraxis.decode.drafts import heads
from paraxis.models import batch as batch_lib
from paraxis.models.mixers import packed as packed_lib
from paraxis.sharding import annotate

BLOCK = 2  # k
DEEP = 2  # layers of LSTM
WIDE = eagle.WIDE


class Pending(NamedTuple):
  """cache: of the draft layer, all tokens of the text but these. memory: (h, c)
  (B, DEEP, D) of the LSTM, likewise. tokens: (B, C + k) int32, x: (B, C + k, D)
  the features that drew them. n: (B,) int32: k - 1 that are read again, fewer
  if there are no more, and the new ones behind them."""

  cache: Any
  memory: Any
  tokens: Any
  x: Any
  n: Any


def initial(model, params, seed=0):
  """{name: array}: the model's last layer, and an LSTM that does little."""
  own = eagle.initial(model, params)
  del own[eagle.MIX]
  width, rng = model.config.d_model, np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(0, shape[0] ** -0.5, shape)
  for i in range(DEEP):
    inputs = width if i else 2 * width
    own |= {
      f'lstm/{i}/input': normal(inputs, 4 * width),
      f'lstm/{i}/state': normal(width, 4 * width),
      f'lstm/{i}/bias': np.zeros(4 * width),
    }
  return own


def empty(rows, width, dtype):
  """(h, c) of an LSTM that has read nothing."""
  zeros = annotate.put(jnp.zeros((rows, DEEP, width), dtype), WIDE)
  return zeros, zeros


def mixed(own, e_BTD, x_BTD, memory):
  """(g_BTD, memory after each token: (h, c) (T, B, DEEP, D)).

  Args:
    e_BTD: embedded tokens. x_BTD: features that drew them. memory: before.
  """
  dtype = e_BTD.dtype
  both = jnp.concatenate([e_BTD, x_BTD.astype(dtype)], -1)

  def one(memory, u):
    hs, cs = [], []
    for i in range(DEEP):
      w, r, b = (
        own[f'lstm/{i}/{n}'].astype(dtype) for n in ('input', 'state', 'bias')
      )
      h, c = (m[:, i] for m in memory)
      gates = jnp.einsum('bd,de->be', u, w) + jnp.einsum('bd,de->be', h, r) + b
      enter, keep, out, new = jnp.split(gates, 4, -1)
      c = jax.nn.sigmoid(keep + 1) * c + jax.nn.sigmoid(enter) * jnp.tanh(new)
      u = jax.nn.sigmoid(out) * jnp.tanh(c)
      hs.append(u)
      cs.append(c)
    memory = jnp.stack(hs, 1), jnp.stack(cs, 1)
    return memory, (u, memory)

  _, (y, each) = jax.lax.scan(one, memory, jnp.moveaxis(both, 1, 0))
  return x_BTD.astype(dtype) + jnp.moveaxis(y, 0, 1), each


def after(each, memory, n_B):
  """The memory (h, c) after the first n_B tokens, as it was where that is none.

  Args:
    each: of `mixed`, after every token. memory: before all.
  """
  last, some = jnp.maximum(n_B - 1, 0), (n_B > 0)[:, None, None]
  return tuple(
    jnp.where(some, judges.at(jnp.moveaxis(m, 0, 1), last), old)
    for m, old in zip(each, memory, strict=True)
  )


def behind(old_BT, n_B, stay_B, new_BW):
  """(B, W, ..): the last stay_B of the first n_B of old, then those of new."""
  both, width = jnp.concatenate([old_BT, new_BW], 1), old_BT.shape[1]

  def pick(c):
    return judges.at(both, jnp.where(c < stay_B, n_B, width) - stay_B + c)

  return jnp.stack([pick(c) for c in range(new_BW.shape[1])], 1)


def packed_blocks(tokens_BT, lengths_B, first_B):
  """packed.Packed of a lane a row whose last `BLOCK` tokens see each other,
  and those before them by blocks, too, counted from the last."""
  packed = step.rows(tokens_BT, lengths_B, first_B)
  here = packed.request < len(tokens_BT)
  place = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
  left = jnp.maximum(lengths_B[:, None] - 1 - place, 0)
  order = jnp.where(here, packed.position + left % BLOCK, 0)
  zeros = jnp.zeros_like(order)
  return packed._replace(
    order=order, group=zeros, node=zeros,
    ancestors=jnp.ones_like(order, jnp.uint32),
  )  # fmt: skip


def features(layer, params, own, tokens_NT, x_NTD):
  """(N, T, D) of whole rows, in blocks; x: the features before each token."""
  rows, length = tokens_NT.shape
  e = _embedded(layer, params | own, tokens_NT)
  g, _ = mixed(own, e, x_NTD, empty(rows, e.shape[-1], e.dtype))
  whole = jnp.full(rows, length, jnp.int32)
  packed = packed_blocks(tokens_NT, whole, 0)
  form = (packed_lib.Group(rows, length, fresh=True, tree=True),)
  cache = layer.init_cache(rows, length)
  return layer.step(params | own, cache, packed, form, lambda e: g)[0]


def shifted(x_NT, fill=0):
  """x of the token k - 1 places after each; `fill` beyond the row."""
  pad = ((0, 0), (0, BLOCK - 1)) + ((0, 0),) * (x_NT.ndim - 2)
  return jnp.pad(x_NT[:, BLOCK - 1 :], pad, constant_values=fill)


def before(made_NTD):
  """The features before each token, as passes over whole rows made them."""
  made = jnp.pad(made_NTD, ((0, 0), (BLOCK, 0), (0, 0)))
  return made[:, : made_NTD.shape[1]]


def _embedded(layer, params, tokens_BT):
  ones = jnp.ones_like(tokens_BT)
  return layer.embed(
    params, batch_lib.Batch(tokens_BT, None, ones, ones, None, None)
  )


class Falcon(proposal.Method):
  """own: Pending."""

  def __init__(self, model, width, coupled):
    self.tree, self._layer = trees.chain(width), eagle.layer_of(model)
    self.lane = width + BLOCK
    self._purpose = 0 if coupled else judges.DRAFT

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    layer, own = params.model | params.own, params.own
    x = annotate.put(eagle.before(x_BTD), WIDE)
    e = annotate.put(_embedded(self._layer, layer, tokens_BT), WIDE)
    start = empty(len(e), e.shape[-1], e.dtype)
    g, each = mixed(own, e, x, start)
    _, cache = step.prefill(
      self._layer, layer, tokens_BT, lengths_B, slots, lambda e: g
    )
    again = jnp.minimum(lengths_B, BLOCK - 1)
    cache = cache_lib.rollback(self._layer, cache, lengths_B - again)
    memory = after(each, start, lengths_B - again)

    def waits(every):
      none = [jnp.zeros_like(every[:, :1])] * (self.tree.width + BLOCK)
      none = jnp.concatenate(none, 1)
      return behind(every, lengths_B, again, none)

    return Pending(cache, memory, waits(tokens_BT), waits(x), again)

  def first(self, own, seen):
    return self._settled(own, own.cache, own.memory, seen)

  def propose(self, params, own, token_B, live_B, draws):
    del token_B
    n = jnp.where(live_B, own.n, 0)
    cache, each, made = self._pass(
      params, own.cache, own.memory, own.tokens, own.x, n, live_B
    )
    pick = lambda i: judges.at(made, jnp.maximum(n - BLOCK + i, 0))
    outs = jnp.stack([pick(i) for i in range(BLOCK)], 1)
    stays = jnp.maximum(n - (BLOCK - 1), 0)  # the others are read again
    read = after(each, own.memory, stays), own.cache.length + stays
    memory = after(each, own.memory, n)
    tokens, logits = [], []
    while True:
      drawn, z = self._drawn(params, outs, draws, len(tokens))
      tokens += drawn
      logits += z
      if len(tokens) >= self.tree.width:
        break
      block = jnp.full_like(n, BLOCK) * live_B
      cache, each, outs = self._pass(
        params, cache, memory, jnp.stack(drawn, 1), outs, block, live_B
      )
      memory = after(each, memory, block)
    cut = lambda xs: jnp.stack(xs[: self.tree.width], 1)
    tokens = annotate.put(cut(tokens), proposal.ROWS)
    drafts = judges.Drafts(tokens, jnp.ones_like(tokens, bool), cut(logits))
    return drafts, (own, cache, read)

  def _pass(self, params, cache, memory, tokens, x, n, live_B):
    """The layer over tokens and what drew them -> (cache, memory after each,
    outputs)."""
    layer, own = params.model | params.own, params.own
    e = annotate.put(_embedded(self._layer, layer, tokens), WIDE)
    g, each = mixed(own, e, x, memory)
    packed = packed_blocks(tokens, n, cache.length)
    form = (packed_lib.Group(*tokens.shape, tree=True),)
    made, flight = self._layer.step(layer, cache, packed, form, lambda e: g)
    sound = jnp.isfinite(made).all(-1) & (packed.request < len(live_B))
    cache = self._layer.commit(cache, flight, form, sound)
    return cache, each, annotate.put(made, WIDE)

  def _drawn(self, params, outs, draws, first):
    """([tokens (B,)], [logits (B, V)]) of the places from `first` on."""
    z = heads.logits(self._layer, params.model | params.own, params.own, outs)
    z = [annotate.put(z[:, j], sampling.ROWS) for j in range(BLOCK)]
    given = draws.form, draws.values
    tokens = [
      sampling.sample(
        z[j], *given, *draws.at(first + j), purpose=self._purpose
      )[0]
      for j in range(BLOCK)
    ]
    return tokens, z

  def settle(self, held, seen):
    own, cache, (memory, length) = held
    moved = seen.n > 0
    length = jnp.where(moved, length, own.cache.length)
    cache = cache_lib.rollback(self._layer, cache, length)
    some = moved[:, None, None]
    memory = tuple(
      jnp.where(some, a, b) for a, b in zip(memory, own.memory, strict=True)
    )
    return self._settled(own, cache, memory, seen)

  def _settled(self, own, cache, memory, seen):
    """The new tokens wait for the next call, with what drew them, behind the
    last k - 1 of those before."""
    tokens, n = proposal.waiting(own.tokens, own.n, seen)
    x = eagle.waiting(own.x, seen)
    stay = jnp.where(seen.n > 0, jnp.minimum(own.n, BLOCK - 1), 0)
    tokens = annotate.put(
      behind(own.tokens, own.n, stay, tokens), proposal.ROWS
    )
    x = annotate.put(behind(own.x, own.n, stay, x), WIDE)
    return Pending(cache, memory, tokens, x, n + stay)
