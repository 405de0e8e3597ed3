"""Cross-entropy of a linear layer without its logits.

    z_v = softcap(x.w_v)      lse = log sum_v e^z_v      nll = lse - z_target

The vocabulary is walked in chunks: a chunk's logits are made, folded into a
running maximum and sum, and dropped; the backward pass makes them again from
the lse (online softmax: Milakov and Gimelshein, arXiv:1805.02867; for the loss:
Cut Cross-Entropy, arXiv:2411.09009, section 4). With cotangents g of lse and h
of z_target:

    dz_v = (g e^(z_v - lse) + h [v = target]) softcap'
    dx = dz w,  dw = dz^T x

Cost: 2 T V D flops, backward 6 T V D (plainly 4: the logits are made twice);
memory T chunk logits and T D + V D gradients, where plain autodiff holds T V
logits and their gradient. Any device; nothing is sharded here:
sharding/tensor/vocabulary.py joins the parts of a sharded vocabulary.

Legend: T tokens, D model, V vocabulary (rows of w), C rows of a chunk.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying

OP = 'cross_entropy'
LOGITS = 2**24  # T C that is held at once, unless C is given
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
    chunk: rows of w at a time, 0: as many as keep T C at 2**24 or below.
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


def chunk_of(tokens, vocab):
  """Rows of w at a time: whole lanes, T C <= `LOGITS` where they allow it."""
  most = max(1, LOGITS // max(1, tokens) // LANES) * LANES
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
  """Folds work(first row, rows, carry) over chunks; the last may be shorter."""
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


def forward(x_TD, w_VD, targets_T, options):
  """-> (lse_T, z of the target_T); a target outside of w has logit 0.

  A pure function without autodiff, for parts of a vocabulary: see `backward`.
  """
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
    return dx, jax.lax.dynamic_update_slice_in_dim(dw, rows, at, 0)

  carry = jnp.zeros(x_TD.shape, wide), jnp.zeros(w_VD.shape, wide)
  carry = varying.same((x_TD, *carry))[1:]
  dx, dw = _walk(len(w_VD), chunk, work, carry)
  return dx.astype(x_TD.dtype), dw


registry.register(
  OP,
  registry.Implementation('xla', forward, backward),
)
