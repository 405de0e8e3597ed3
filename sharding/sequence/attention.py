"""Exact attention over a sequence that is sharded on one mesh axis: six forms.

Any partition of the (query shard, key shard) pairs gives the same answer:

    o, m, l       merged over pairs; o / l and lse = m + log l once, at the end
    dq, dk, dv    added over pairs, once the row's final lse and
                  delta = sum(o do) - dlse are known (ds = p (dp - delta))

So a form is only a choreography (forms.py): which side travels and how results
return. One custom_vjp serves all forms.
Residuals are the local q, k, v, o, lse.

n ranks with T = L / n tokens each, N query heads, K kv heads. A rank receives,
in units of T H elements (one head's rows), and in the backward pass on top:

    form        who travels           forward              backward
    all_gather  k, v to everybody     2(n-1) K             4(n-1) K
    ring        k, v, by one          2(n-1) K             2(n-1) K + 2n K
    rsa         k, by one; then v     2(n-1) K             2(n-1) K + 2n K
    token_ring  q, by one; o home     (n-1) (2N + N/H)     (n-1) (3N + 2N/H)
    ulysses     heads for length      (n-1)/n (2N + 2K')   the same
    usp         ulysses in groups of I ranks, then a ring of n / I groups

and two int32 a token beside k, v (or q) that travel. K' = lcm(K, I): kv heads
are repeated until they divide (ulysses: I = n), and gradients of copies added
in promote_types(dtype, float32). Sums (o, dq, dk, dv) that ranks add to travel
in that dtype, the other arrays, and all that is exchanged between heads and
length, in their own; what a kernel makes of a pair has been rounded to that
once. rsa has no kernel: it holds whole rows of scores. Memory is O(L / n),
except that all_gather holds k and v of all ranks, and rsa its scores, T x L. A
window on contiguous shards ends ring, rsa and token_ring after the hops that it
needs.

Sources: ring, arXiv:2310.01889; rsa, Ring Self-Attention, arXiv:2105.13120;
ulysses, arXiv:2309.14509; usp, arXiv:2405.07719; token_ring, arXiv:2412.20501
(written for links between all ranks: a result goes straight home, at another
distance each hop, so the hops are unrolled).

Legend: B batch, T local length, N query heads, K kv heads, H head size.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.pallas_kernels.attention import xla as attention_xla
from paraxis.sharding.sequence import forms as context_forms
from paraxis.sharding.sequence import order as context_order

FORMS = ('all_gather', 'ring', 'ulysses', 'usp', 'token_ring', 'rsa')


@dataclasses.dataclass(frozen=True)
class ContextPlan:
  """The static options of one call.

  form: one of FORMS. axis: the mesh axis that carries the length. n: its size.
  layout: 'zigzag', 'contiguous' or 'striped'. inner: (usp) ranks that exchange
  heads, 0: the most that fit. impl: model.attention, of a pair of shards.
  """

  form: str
  axis: str
  n: int
  layout: str
  inner: int = 0
  impl: str = 'auto'


def resolve_inner(form: str, n: int, heads: int, inner: int = 0) -> int:
  """Ranks that exchange heads; the n ranks are a ring of n / inner such groups.

  usp, inner = 0: the most that divide n and heads and leave a ring, or n if
  only n fits. 1 for the forms that exchange none.
  """
  if form == 'ulysses':
    return n
  if form != 'usp':
    return 1
  fits = _inner_sizes(n, heads)
  return inner or max([i for i in fits if 1 < i < n], default=fits[-1])


def _inner_sizes(n, heads):
  """Common divisors of n and heads, ascending."""
  return [i for i in range(1, n + 1) if n % i == heads % i == 0]


def check(
  form: str,
  n: int,
  heads: int,
  kv_heads: int,
  length: int,
  layout: str,
  inner: int = 0,
  impl: str = 'auto',
) -> None:
  """Raises errors.UserError if this form cannot run on these shapes.

  Args:
    form, layout, inner: as in ContextPlan; layout already resolved.
    n: size of the mesh axis `context`.
    heads, kv_heads: of one tensor shard.
    length: tokens of a whole row.
    impl: model.attention.
  """
  if form not in FORMS:
    raise errors.UserError(
      f'mesh.context_form={form} is not one of {", ".join(FORMS)}.'
    )
  if form == 'rsa' and {*impl.split('/')} - {'auto', 'xla'}:
    raise errors.UserError(
      f'mesh.context_form=rsa holds whole rows of scores, which no kernel '
      f'does: model.attention={impl}; take auto, or another form.'
    )
  if heads % kv_heads:
    raise errors.UserError(
      f'mesh.context_form={form}: {heads} query heads (model.num_heads) are '
      f'not a multiple of {kv_heads} kv heads (model.num_kv_heads).'
    )
  if inner and form != 'usp':
    raise errors.UserError(
      f'mesh.context_inner={inner} is for mesh.context_form=usp, not {form}; '
      f'set it to 0.'
    )
  context_order.order(layout, n, length)
  size, fits = resolve_inner(form, n, heads, inner), _inner_sizes(n, heads)
  if form == 'usp' and n % size:
    raise errors.UserError(
      f'mesh.context_inner={size} does not divide mesh.context={n}; these fit '
      f'{heads} heads: {", ".join(map(str, fits))}.'
    )
  if form == 'usp' and size == 1 < n and not inner:
    raise errors.UserError(
      f'mesh.context_form=usp: {heads} heads of a tensor shard '
      f'(model.num_heads) and mesh.context={n} share no divisor, so no ranks '
      f'can exchange heads; mesh.context_form=ring needs none.'
    )
  if heads % size:
    name = 'mesh.context_inner'
    if form == 'ulysses':
      name, fits = 'mesh.context', _inner_sizes(heads, heads)
    near = sorted({max(1, heads // size) * size, (heads // size + 1) * size})
    raise errors.UserError(
      f'mesh.context_form={form}: {heads} heads of a tensor shard '
      f'(model.num_heads) do not divide over {name}={size}; the nearest heads '
      f'that do: {" and ".join(map(str, near))}; the nearest {name}: '
      f'{max(i for i in fits if i < size)}; or mesh.context_form=ring, which '
      f'divides no heads.'
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(job, q, k, v, infos):
  return _core_forward(job, q, k, v, infos)[0]


def _core_forward(job, q, k, v, infos):
  (o, lse), kept = context_forms.forward(job, (q, infos[0]), (k, v, infos[1]))
  # Named where they are residuals, as in pallas_kernels/attention/op.py.
  o, lse = (checkpoint_name(x, 'attention') for x in (o.astype(v.dtype), lse))
  return (o, lse), (q, k, v, infos, o, lse, kept)


def _core_backward(job, residuals, cotangents):
  (q, k, v, infos, o, lse, kept), (do, dlse) = residuals, cotangents
  wide = lse.dtype
  delta = (o.astype(wide) * do.astype(wide)).sum(-1) - dlse
  rows, columns = (q, infos[0], lse, delta, do), (k, v, infos[1])
  dq, (dk, dv) = context_forms.backward(job, kept, rows, columns)
  return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_core.defvjp(_core_forward, _core_backward)


def _kernels(job, impl, q_BTNH, k_BSKH, v_BSKH):
  """ContextCall.kernels for the pairs of shards of these arrays."""
  if job.form == 'rsa':
    return None, None
  whole = job.n if job.form == 'all_gather' else 1
  k, v = (
    jax.eval_shape(lambda x: jnp.concatenate([x] * whole, 1), x)
    for x in (k_BSKH, v_BSKH)
  )
  both = True, True  # segments, order: kernels get both as data
  spec = attention_op.spec_of(q_BTNH, k, job.mask, *both, v)
  chosen = attention_op.choose(impl, spec)
  return tuple(None if x.name == 'xla' else x for x in chosen)


def _exchange(job, x, split, concat):
  """Heads for length inside each group, or back."""
  return lax.all_to_all(
    x, job.axis, split, concat, tiled=True, axis_index_groups=job.groups
  )


def _repeat(x_BTKH, times):
  """Each head several times; gradients are added in at least float32."""
  if times == 1:
    return x_BTKH
  wide = jnp.promote_types(x_BTKH.dtype, jnp.float32)
  return jnp.repeat(x_BTKH.astype(wide), times, 2).astype(x_BTKH.dtype)


def _pad(x_BT, count, run):
  """Zeros after each of `count` runs, up to `run` tokens."""
  b, t, *rest = x_BT.shape
  x = x_BT.reshape(b, count, t // count, *rest)
  x = jnp.pad(x, [(0, 0), (0, 0), (0, run - t // count)] + [(0, 0)] * len(rest))
  return x.reshape(b, count * run, *rest)


def _unpad(x_BT, count, t):
  b, _, *rest = x_BT.shape
  x = x_BT.reshape(b, count, -1, *rest)[:, :, : t // count]
  return x.reshape(b, t, *rest)


def attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  positions_BT: jax.Array,
  segments_BT: jax.Array,
  mask: attention_op.Mask,
  plan: ContextPlan,
  query_positions_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention of a shard's queries over the keys of all shards.

  Args:
    q_BTNH, k_BTKH, v_BTKH: local, in the order of `order(layout, n, n T)`.
    positions_BT: int; count up by one inside a document, whose tokens are
      neighbours in the global order.
    segments_BT: int; 0 is padding: it sees nothing and nothing sees it.
    mask: pallas_kernels.attention.op.Mask; `block` bounds the blocks of a
      shard.
    plan: ContextPlan.
    query_positions_BT: None: positions_BT; of the queries alone. None of them
      is above its own by more than mask.ahead.

  Returns:
    o_BTNH in v's dtype and lse_BTN in promote_types(dtype, float32), both
    differentiable and equal to attention on one device.

  Raises:
    errors.UserError: as `check`, or an implementation that cannot run.
  """
  (_, t, heads, _), kv = q_BTNH.shape, k_BTKH.shape[2]
  n, layout, length = plan.n, plan.layout, plan.n * t
  check(plan.form, n, heads, kv, length, layout, plan.inner, plan.impl)
  inner = resolve_inner(plan.form, n, heads, plan.inner)
  form = 'ring' if plan.form in ('ulysses', 'usp') else plan.form
  job = context_forms.ContextCall(
    form, plan.axis, n, layout, inner, length, mask
  )
  pad = lambda x: _pad(x, context_order.runs(layout), job.blocks.run)
  q, k, v = pad(q_BTNH), pad(k_BTKH), pad(v_BTKH)
  of_queries = (
    positions_BT if query_positions_BT is None else query_positions_BT
  )
  infos = [
    jnp.stack([pad(x), pad(segments_BT)], 1).astype(jnp.int32)
    for x in (of_queries, positions_BT)
  ]
  if inner > 1:  # linear and cheap: plain differentiation sends gradients back
    k, v = (_repeat(x, math.lcm(kv, inner) // kv) for x in (k, v))
    q, k, v = (_exchange(job, x, 2, 1) for x in (q, k, v))
    infos = [
      lax.all_gather(
        info, job.axis, axis=2, tiled=True, axis_index_groups=job.groups
      )
      for info in infos
    ]
  job = dataclasses.replace(job, kernels=_kernels(job, plan.impl, q, k, v))
  q = attention_xla.to_rows(q, k.shape[2])
  k, v = attention_xla.to_cols(k), attention_xla.to_cols(v)
  parts: Any = _core(job, q, k, v, tuple(infos))
  out = [attention_xla.from_rows(x) for x in parts]
  if inner > 1:
    out = [_exchange(job, x, 1, 2) for x in out]
  return tuple(_unpad(x, context_order.runs(layout), t) for x in out)
