"""Cross-entropy of a linear layer without its logits.

    z_v = softcap(x.w_v)      lse = log sum_v e^z_v      nll = lse - z_target

The vocabulary is walked in chunks: a chunk's logits are made, folded into a
running maximum and sum, and dropped; the backward pass makes them again from
the lse (online softmax: Milakov and Gimelshein, arXiv:1805.02867; for the loss:
Cut Cross-Entropy, arXiv:2411.09009, section 4). With cotangents g of lse and h
of z_target:

    dz_v = (g e^(z_v - lse) + h [v = target]) softcap'
    dx = dz w,  dw = dz^T x

More than `BLOCK` tokens are walked in blocks too, each through the whole
vocabulary: a chunk reads and writes what it multiplies, so chunks that became
ever narrower with T would move T^2 V D numbers.

Cost: 2 T V D flops, backward 6 T V D (plainly 4: the logits are made twice).
Memory: B C logits, B C <= `LOGITS`, and T D + V D gradients, where plain
autodiff holds T V logits and their gradient. Moved, of 2-byte x and w: by each
of the V / C chunks 14 T D bytes, of features and sums of their gradient, and by
each of the T / B blocks 14 V D bytes, of w and sums of its gradient; C is at
least `LOGITS` / `BLOCK` = 1,024. Any device; nothing is sharded here:
sharding/tensor/vocabulary.py joins the parts of a sharded vocabulary.

Legend: T tokens (of a block, in functions of one), B tokens of a block, D
model, V vocabulary (rows of w), C rows of a chunk.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying

OP = 'cross_entropy'
LOGITS = 2**24  # B C that is held at once, unless C is given
BLOCK = 2**14  # most tokens that walk the vocabulary at once
LANES = 128


class LossOptions(NamedTuple):
  """How the logits are made; fields as in `linear_cross_entropy`."""

  softcap: float = 0.0
  chunk: int = 0


def linear_cross_entropy(
  x: jax.Array,
  w_VD: jax.Array,
  targets: jax.Array,
  *,
  softcap: float = 0.0,
  chunk: int = 0,
  impl: str = 'auto',
) -> tuple[jax.Array, jax.Array]:
  """Nats of each target under softcap(x w^T) -> (nll, lse).

  Args:
    x: (..., D) float, features of tokens.
    w_VD: one row a word, x's dtype or another float.
    targets: (...) int, rows of w. The host must have checked them: an id
      outside finds no logit and gives nll = lse.
    softcap: z -> softcap tanh(z / softcap); 0 = off.
    chunk: rows of w at a time; 0: as many as keep the logits of a block of
      tokens at 2**24 or below, in whole lanes of 128.
    impl: 'auto' or the name of a registered implementation.

  Returns:
    nll and lse, both (...) in promote_types(dtype, float32) and differentiable
    in x and w.

  Raises:
    errors.UserError: shapes or options that do not fit.
  """
  _check(x, w_VD, targets, softcap, chunk)
  rows = x.reshape(-1, x.shape[-1])
  options = LossOptions(softcap, chunk)
  chosen = registry.resolve(OP, impl)
  arrays = rows, w_VD, targets.reshape(-1)
  parts: Any = _parts(chosen, options, *varying.same(arrays))
  lse, picked = parts
  nll, lse = (a.reshape(targets.shape) for a in (lse - picked, lse))
  return nll, lse


def _check(x, w_VD, targets, softcap, chunk):
  if x.shape[-1] != w_VD.shape[1] or targets.shape != x.shape[:-1]:
    raise errors.UserError(
      f'{OP}: x {x.shape}, w {w_VD.shape}, targets {targets.shape} do not fit '
      '(..., D), (V, D), (...)'
    )
  if softcap < 0 or chunk < 0:
    raise errors.UserError(
      f'{OP}: softcap is {softcap} and chunk {chunk}; both must be >= 0 '
      '(0: off, and chosen by the number of tokens)'
    )


def block_of(tokens):
  """Tokens at a time: all, or whole lanes, in the fewest blocks <= `BLOCK`."""
  if tokens <= BLOCK:
    return tokens
  blocks = -(-tokens // BLOCK)
  return -(-tokens // (blocks * LANES)) * LANES


def chunk_of(tokens, vocab):
  """Rows of w at a time: whole lanes, with a block's logits <= `LOGITS`.

  At least 128, whatever `LOGITS`; a block of `BLOCK` tokens gets 1,024.
  """
  most = max(1, LOGITS // max(1, block_of(tokens)) // LANES) * LANES
  return min(vocab, most)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _parts(chosen, options, x_TD, w_VD, targets_T):
  return chosen.forward(x_TD, w_VD, targets_T, options)


def _forward(chosen, options, x_TD, w_VD, targets_T):
  lse, picked = chosen.forward(x_TD, w_VD, targets_T, options)
  return (lse, picked), (x_TD, w_VD, targets_T, lse)


def _backward(chosen, options, kept, cotangents):
  dx, dw = chosen.backward(*kept, *cotangents, options)
  return dx, dw.astype(kept[1].dtype), None


_parts.defvjp(_forward, _backward)


def _walk(rows, chunk, work, carry):
  """Folds work(first row, rows, carry) over parts; the last may be shorter."""
  whole = rows // chunk
  if whole:
    step = lambda i, carry: work(i * chunk, chunk, carry)
    carry = jax.lax.fori_loop(0, whole, step, carry)
  if rest := rows % chunk:
    carry = work(whole * chunk, rest, carry)
  return carry


def _logits(x_TD, w_CD, softcap):
  """(z_TC, softcap')."""
  z = varying.dot('td,cd->tc', x_TD, w_CD)
  if not softcap:
    return z, 1.0
  tanh = jnp.tanh(z / softcap)
  return softcap * tanh, 1 - tanh * tanh


def _hit(targets_T, at, count):
  return targets_T[:, None] == at + jnp.arange(count)


def _cut(arrays, at, count):
  """Rows at .. at + count - 1 of each."""
  return [jax.lax.dynamic_slice_in_dim(x, at, count) for x in arrays]


def _put(whole, rows, at):
  return jax.lax.dynamic_update_slice_in_dim(whole, rows, at, 0)


def forward(x_TD, w_VD, targets_T, options):
  """-> (lse_T, z of the target_T); a target outside of w has logit 0.

  A pure function without autodiff, for parts of a vocabulary: see `backward`.
  """
  tokens = len(x_TD)
  if tokens <= BLOCK:
    return _forward_block(x_TD, w_VD, targets_T, options)

  def work(at, count, carry):
    x, targets = _cut((x_TD, targets_T), at, count)
    found = _forward_block(x, w_VD, targets, options)
    return tuple(
      _put(a, rows, at) for a, rows in zip(carry, found, strict=True)
    )

  wide = jnp.result_type(x_TD, w_VD, jnp.float32)
  carry = jnp.zeros(tokens, wide), jnp.zeros(tokens, wide)
  carry = varying.same((x_TD, *carry))[1:]
  return _walk(tokens, block_of(tokens), work, carry)


def _forward_block(x_TD, w_VD, targets_T, options):
  """`forward` of one block."""
  chunk = options.chunk or chunk_of(len(x_TD), len(w_VD))
  wide = jnp.result_type(x_TD, w_VD, jnp.float32)

  def work(at, count, carry):
    m, total, picked = carry
    w = jax.lax.dynamic_slice_in_dim(w_VD, at, count)
    z, _ = _logits(x_TD, w, options.softcap)
    new = jnp.maximum(m, z.max(1))
    e = jnp.exp(z - jnp.maximum(new, varying.FLOOR)[:, None])
    total = total * jnp.exp(m - new) + e.sum(1)
    picked += jnp.where(_hit(targets_T, at, count), z, 0).sum(1)
    return new, total, picked

  fill = lambda x: jnp.full(x_TD.shape[:1], x, wide)
  carry = fill(varying.NEG), fill(0), fill(0)
  carry = varying.same((x_TD, *carry))[1:]
  m, total, picked = _walk(len(w_VD), chunk, work, carry)
  return m + jnp.log(total), picked


def backward(x_TD, w_VD, targets_T, lse_T, dlse_T, dpicked_T, options):
  """-> (dx_TD in x's dtype, dw_VD in promote_types(dtype, float32)).

  For cotangents of lse and of the target's logit.

  With the lse of a whole vocabulary, w may be a part of it (and targets_T
  counted from its first row): the dx of the parts add up, dw is that of w.
  """
  tokens = len(x_TD)
  wide = jnp.result_type(x_TD, w_VD, jnp.float32)
  of_tokens = x_TD, targets_T, lse_T, dlse_T, dpicked_T
  if tokens <= BLOCK:
    return _backward_block(of_tokens, w_VD, options)

  def work(at, count, carry):
    dx, dw = carry
    part = _cut(of_tokens, at, count)
    rows, dw = _backward_block(part, w_VD, options, dw)
    return _put(dx, rows, at), dw

  carry = jnp.zeros_like(x_TD), jnp.zeros(w_VD.shape, wide)
  carry = varying.same((x_TD, *carry))[1:]
  return _walk(tokens, block_of(tokens), work, carry)


def _backward_block(of_tokens, w_VD, options, dw_VD=None):
  """`backward` of one block.

  Args:
    of_tokens: x_TD, targets_T, lse_T, dlse_T, dpicked_T.
    dw_VD: what the dw of the block is added to; None: nothing.
  """
  x_TD, targets_T, lse_T, dlse_T, dpicked_T = of_tokens
  chunk = options.chunk or chunk_of(len(x_TD), len(w_VD))
  wide = jnp.result_type(x_TD, w_VD, jnp.float32)

  def work(at, count, carry):
    dx, dw = carry
    w = jax.lax.dynamic_slice_in_dim(w_VD, at, count)
    z, slope = _logits(x_TD, w, options.softcap)
    p = jnp.exp(z - lse_T[:, None])
    dz = dlse_T[:, None] * p
    dz += jnp.where(_hit(targets_T, at, count), dpicked_T[:, None], 0)
    dz = (dz * slope).astype(x_TD.dtype)
    dx += varying.dot('tc,cd->td', dz, w)
    rows = varying.dot('tc,td->cd', dz, x_TD)
    if dw_VD is not None:
      rows += jax.lax.dynamic_slice_in_dim(dw, at, count)
    return dx, _put(dw, rows, at)

  dx = jnp.zeros(x_TD.shape, wide)
  dw = jnp.zeros(w_VD.shape, wide) if dw_VD is None else dw_VD
  carry = varying.same((x_TD, dx, dw))[1:]
  dx, dw = _walk(len(w_VD), chunk, work, carry)
  return dx.astype(x_TD.dtype), dw


registry.register(
  OP,
  registry.Implementation('xla', forward, backward),
)
