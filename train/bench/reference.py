"""The plain-JAX program that the bench compares with: no mesh, no library.

The same decoder arithmetic as the bench's configuration (pre-RMSNorm, rotary
positions, SwiGLU, causal dense softmax attention, untied head), one jit for the
whole AdamW step. `scan` picks between a Python loop over layers and lax.scan.
"""

import functools

import jax
import jax.numpy as jnp
import optax


def init(m, key, scan):
  """Parameters of a schema.Model `m`: nested dicts; layers stacked if scan."""
  square, wide = (m.d_model, m.d_model), (m.d_model, m.d_ff)
  shapes = dict.fromkeys('qkvo', square)
  shapes |= dict(gate=wide, up=wide, down=wide[::-1])

  def layer(key):
    keys = jax.random.split(key, len(shapes))
    out = {
      n: jax.random.normal(k, s) * s[0] ** -0.5
      for k, (n, s) in zip(keys, shapes.items(), strict=True)
    }
    return out | dict(n1=jnp.ones(m.d_model), n2=jnp.ones(m.d_model))

  keys = jax.random.split(key, m.num_layers + 2)
  table = (m.vocab_size, m.d_model)
  stack = jax.vmap(layer)(keys[2:])
  layers = (
    stack
    if scan
    else [jax.tree.map(lambda a, i=i: a[i], stack) for i in range(m.num_layers)]
  )
  return dict(
    embedding=jax.random.normal(keys[0], table) * 0.02,
    head=jax.random.normal(keys[1], table) * 0.02,
    norm=jnp.ones(m.d_model),
    layers=layers,
  )


def rms(x, scale):
  """RMSNorm over the last axis."""
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotate(x, positions):
  """Rotary positions; x (B, T, N, H), positions (T,) or (B, T)."""
  half = x.shape[-1] // 2
  a = positions[..., None] * 1e4 ** (-jnp.arange(half) / half)
  c, s = jnp.cos(a)[..., None, :], jnp.sin(a)[..., None, :]
  x1, x2 = x[..., :half], x[..., half:]
  return jnp.concatenate([x1 * c - x2 * s, x2 * c + x1 * s], -1)


def heads(m, x, p, positions):
  """Rotated queries and keys, and values, (..., T, N, H), of x (..., T, D)."""
  y = rms(x, p['n1'])
  shape = *x.shape[:-1], m.num_heads, m.d_model // m.num_heads
  q, k, v = ((y @ p[n]).reshape(shape) for n in 'qkv')
  return rotate(q, positions), rotate(k, positions), v


def after_attention(x, o, p):
  """A layer's output from its input x and the result o of its attention."""
  x = x + o.reshape(x.shape) @ p['o']
  y = rms(x, p['n2'])
  return x + (jax.nn.silu(y @ p['gate']) * (y @ p['up'])) @ p['down']


def layer(m, x, p):
  """One layer on (B, T, D)."""
  t = x.shape[1]
  q, k, v = heads(m, x, p, jnp.arange(t))
  s = jnp.einsum('btnh,bsnh->bnts', q, k) * q.shape[-1] ** -0.5
  s = jnp.where(jnp.tril(jnp.ones((t, t), bool)), s, -1e30)
  o = jnp.einsum('bnts,bsnh->btnh', jax.nn.softmax(s), v)
  return after_attention(x, o, p)


def loss(m, params, tokens, targets):
  """Mean nats per token."""
  x = params['embedding'][tokens]
  if isinstance(params['layers'], list):
    for p in params['layers']:
      x = layer(m, x, p)
  else:
    x, _ = jax.lax.scan(
      lambda x, p: (layer(m, x, p), None), x, params['layers']
    )
  z = rms(x, params['norm']) @ params['head'].T
  picked = jnp.take_along_axis(z, targets[..., None], -1)[..., 0]
  return (jax.nn.logsumexp(z, -1) - picked).mean()


def make_step(m):
  """-> (optimizer init, jitted (params, state, tokens, targets) step)."""
  rule = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1)
  )

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, tokens, targets):
    value, grads = jax.value_and_grad(functools.partial(loss, m))(
      params, tokens, targets
    )
    updates, state = rule.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  return rule.init, step


def decode_step(m, params, cache, tokens, position):
  """One token a row -> (logits (B, V), cache).

  tokens: (B,). position: (), the same of all rows. cache: of each layer (k, v),
  heads before slots: (B, N, S, H).
  """
  x = params['embedding'][tokens][:, None]
  new = []
  for p, slots in zip(params['layers'], cache, strict=True):
    q, k, v = (y.swapaxes(1, 2) for y in heads(m, x, p, position[None]))
    write = functools.partial(
      jax.lax.dynamic_update_slice_in_dim, start_index=position, axis=2
    )
    keys, values = (write(old, y) for old, y in zip(slots, (k, v), strict=True))
    s = jnp.einsum('bnth,bnsh->bnts', q, keys) * q.shape[-1] ** -0.5
    s = jnp.where(jnp.arange(keys.shape[2]) <= position, s, -1e30)
    o = jnp.einsum('bnts,bnsh->btnh', jax.nn.softmax(s), values)
    x = after_attention(x, o, p)
    new.append((keys, values))
  return rms(x, params['norm'])[:, 0] @ params['head'].T, new


def prefill(m, params, tokens, blocks=16):
  """Rows of tokens (B, T) -> (logits (B, V) of the last, cache).

  The queries of a block see the keys up to its end: half the products of a
  causal mask, and no T x T array. T is a multiple of `blocks`.
  """
  x, cache = params['embedding'][tokens], []
  size = tokens.shape[1] // blocks
  for p in params['layers']:
    q, k, v = (
      y.swapaxes(1, 2) for y in heads(m, x, p, jnp.arange(tokens.shape[1]))
    )
    outs = []
    for end in range(size, tokens.shape[1] + 1, size):
      rows = jnp.arange(end - size, end)[:, None]
      s = jnp.einsum(
        'bnth,bnsh->bnts', q[:, :, end - size : end], k[:, :, :end]
      )
      s = jnp.where(jnp.arange(end) <= rows, s * q.shape[-1] ** -0.5, -1e30)
      outs.append(
        jnp.einsum('bnts,bnsh->btnh', jax.nn.softmax(s), v[:, :, :end])
      )
    x = after_attention(x, jnp.concatenate(outs, 1), p)
    cache.append((k, v))
  return rms(x, params['norm'])[:, -1] @ params['head'].T, cache


def prompted(m, params, tokens, room):
  """Rows of a prompt (B, T) -> (next token_B, cache with `room` for more)."""
  logits, cache = prefill(m, params, tokens, blocks=1)
  room = (0, 0), (0, 0), (0, room), (0, 0)
  token = jnp.argmax(logits, -1).astype(jnp.int32)
  return token, jax.tree.map(lambda x: jnp.pad(x, room), cache)
