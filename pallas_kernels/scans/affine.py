"""Recurrences h_t = J_t h_{t-1} + b_t whose J couples M numbers of a channel.

  J_BTMMD: an M x M block per channel (M = 1: diagonal, linear.py).
  (J2, b2) after (J1, b1) = (J2 J1, J2 b1 + b2)

The backward pass is the transposed scan in reverse order (arXiv:2510.21450):

  l_t = g_t + J_{t+1}^T l_{t+1}
  db = l,  dJ_t = l_t h_{t-1}^T,  dh_0 = J_1^T l_1

Blocks are multiplied by sums of products, not as matrices: M is 2 or 3, and a
matrix unit would round float32 to bfloat16. Cost: M^3 + M^2 multiplications per
channel and map of the associative scan, M^2 per token of the loop.

Legend: B batch, T length, M numbers of a channel, D channels.
"""

import jax
from jax import lax
import jax.numpy as jnp

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.scans import linear as linear_scan

OP = 'affine_scan'


def apply(j_MMD, h_MD):
  """J h, with any leading dimensions."""
  return (j_MMD * h_MD[..., None, :, :]).sum(-2)


def after(first, second):
  """The affine map `second` after `first`; a map is (J_MMD, b_MD)."""
  (j1, b1), (j2, b2) = first, second
  product = (j2[..., :, :, None, :] * j1[..., None, :, :, :]).sum(-3)
  return product, apply(j2, b1) + b2


def total(j_BTMMD, b_BTMD):
  """The map of a whole row, (J_BMMD, b_BMD), by log2 T halvings."""
  maps = j_BTMMD, b_BTMD
  while (t := maps[0].shape[1]) > 1:
    pair = lambda i, maps=maps, t=t: [x[:, i : t // 2 * 2 : 2] for x in maps]
    joined = after(pair(0), pair(1))
    if t % 2:
      joined = [
        jnp.concatenate([x, y[:, -1:]], 1)
        for x, y in zip(joined, maps, strict=True)
      ]
    maps = joined
  return maps[0][:, 0], maps[1][:, 0]


def affine_scan(
  j_BTMMD: jax.Array,
  b_BTMD: jax.Array,
  state_BMD: jax.Array,
  *,
  impl: str = 'auto',
) -> jax.Array:
  """h_BTMD; arguments have one float dtype, state is before the first token.

  impl: 'auto' or the name of an implementation of 'linear_scan' (M = 1) or
  'affine_scan'. Raises errors.UserError if it cannot run here.
  """
  if b_BTMD.shape[2] == 1:
    a, b, state = j_BTMMD[:, :, 0, 0], b_BTMD[:, :, 0], state_BMD[:, 0]
    return linear_scan.linear_scan(a, b, None, state, impl=impl)[0][:, :, None]
  arrays = tuple(map(jnp.asarray, (j_BTMMD, b_BTMD, state_BMD)))
  chosen = registry.resolve(OP, impl, linear_scan.spec_of(*arrays[:2]))
  return _scan(chosen, *varying.same(arrays))


def _scan_forward(chosen, j, b, state):
  h = chosen.forward(j, b, state)
  return h, (j, h, state)


def _scan_backward(chosen, residuals, g):
  j, h, state = residuals
  l = chosen.backward(j, g)
  before = jnp.concatenate([state[:, None], h[:, :-1]], 1)
  dj = l[..., :, None, :] * before[..., None, :, :]
  return dj, l, apply(_transposed(j[:, 0]), l[:, 0])


_scan = jax.custom_vjp(
  lambda chosen, j, b, state: chosen.forward(j, b, state), nondiff_argnums=(0,)
)
_scan.defvjp(_scan_forward, _scan_backward)


def _transposed(j_MMD):
  return jnp.swapaxes(j_MMD, -3, -2)


def _time(x):
  return jnp.swapaxes(x, 0, 1)


def _loop_forward(j_BTMMD, b_BTMD, state_BMD):
  def step(h, jb):
    h = apply(jb[0], h) + jb[1]
    return h, h

  return _time(lax.scan(step, state_BMD, (_time(j_BTMMD), _time(b_BTMD)))[1])


def _loop_backward(j_BTMMD, g_BTMD):
  def step(c, jg):
    l = jg[1] + c
    return apply(_transposed(jg[0]), l), l

  rows = _time(j_BTMMD), _time(g_BTMD)
  return _time(
    lax.scan(step, jnp.zeros_like(g_BTMD[:, 0]), rows, reverse=True)[1]
  )


def _xla_forward(j_BTMMD, b_BTMD, state_BMD):
  b = b_BTMD.at[:, 0].add(apply(j_BTMMD[:, 0], state_BMD))
  return lax.associative_scan(after, (j_BTMMD, b), axis=1)[1]


def _xla_backward(j_BTMMD, g_BTMD):
  j = jnp.concatenate([j_BTMMD[:, 1:], jnp.zeros_like(j_BTMMD[:, :1])], 1)
  maps = _transposed(j), g_BTMD
  return lax.associative_scan(after, maps, axis=1, reverse=True)[1]


registry.register(
  OP,
  registry.Implementation(
    'loop', _loop_forward, _loop_backward, linear_scan.loop_supports
  ),
  registry.Implementation('xla', _xla_forward, _xla_backward),
)
