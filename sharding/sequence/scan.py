"""Recurrences and causal convolutions over a sequence sharded on one mesh axis.

A shard of tokens is an affine map of the state that enters it,

    h_out = P h_in + S          P: what its decays leave, S: its state from 0

and maps compose: (P2, S2) after (P1, S1) = (P2 P1, P2 S1 + S2). (P is diagonal;
of the delta rule it is a matrix for each head.) So a shard computes (P, S)
alone, the n shards exchange maps to find the state that enters each, and the
shard adds that state's contribution. A message is as large as a state and does
not grow with the length. There are two forms. Of n ranks each receives these
bytes of P and S (forward; the backward pass sends as much):

    gather    everybody gets all maps        (n - 1) (P + S)
    permute   prefix by doubling distances   L S + (L - 1) P, L = ceil(log2 n),
              and one hop of S to the next rank

`gather` waits once, `permute` L + 1 times, for 3/7 (P as large as S) to 4/7 of
the bytes at n = 8. The state after the row, where it is used, costs `permute`
an all-reduce of S. Sums travel in promote_types(dtype, float32).

Tokens must be in contiguous order: rank r holds tokens r T .. (r + 1) T - 1.
The other orders of order.py balance attention and allow no recurrence; a model
that mixes both uses mesh.context_order=contiguous.

The start of a document sets P to 0 (and its positions mask a convolution's
taps), so packed rows need nothing more. A Newton scan exchanges the maps of
every iteration, and the last state of every shard, and all ranks of the region
agree when to stop. Gradients are plain differentiation around the local ops; in
a manual region those of the parameters and of the initial state are partial
sums over the axis, as everywhere.

Source: prefix sums over processors, Blelloch 1990; for scans, LASP-2
(arXiv:2502.07563, gather) and the code of RecurrentGemma (arXiv:2404.07839).

Legend: B batch, T local length, H heads, K key, V value, D or F channels, S or
M numbers of a channel, U 2: B and C of Mamba, W taps, R inputs that a
convolution reads before its token.
"""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.scans import affine as affine_scan
from paraxis.pallas_kernels.scans import causal_conv as conv_op
from paraxis.pallas_kernels.scans import delta as delta_scan
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import linear as linear_scan
from paraxis.pallas_kernels.scans import newton as newton_scan
from paraxis.pallas_kernels.scans import selective as linear_scan_selective
from paraxis.sharding import annotate

FORMS = ('gather', 'permute')


@dataclasses.dataclass(frozen=True)
class ScanPlan:
  """The static options of one call.

  form: of FORMS. axis: the mesh axis that carries the length. sync: mesh axes
  whose ranks stop a Newton scan together; None: all of the region, which its
  collectives need.
  """

  form: str
  axis: str
  sync: tuple[str, ...] | None = None

  def __post_init__(self):
    if self.form not in FORMS:
      raise errors.UserError(
        f'mesh.context_scan={self.form} is not one of {", ".join(FORMS)}.'
      )


def received(form: str, n: int, decay: int, state: int) -> int:
  """Bytes that a rank receives to learn the state that enters it.

  Args:
    form: of FORMS. n: ranks. decay, state: bytes of P and of S of one rank.
  """
  if form == 'gather':
    return (n - 1) * (decay + state)
  rounds = (n - 1).bit_length()
  return rounds * state + max(rounds - 1, 0) * decay + (n > 1) * state


def _send(x, axis, by):
  """x of the rank `by` before this one; zeros if there is no such rank."""
  n = lax.axis_size(axis)
  if by >= n:
    return jax.tree.map(jnp.zeros_like, x)
  return lax.ppermute(x, axis, [(i, i + by) for i in range(n - by)])


def _from_last(x, axis):
  """x of the last rank, on all ranks; XLA drops the sum if it is unused."""
  last = lax.axis_index(axis) == lax.axis_size(axis) - 1
  return lax.psum(jnp.where(last, x, jnp.zeros_like(x)), axis)


def _enter(maps, state, plan, after):
  """(state that enters this shard, state after the last shard).

  Args:
    maps: (P, S) of this shard. state: before the first token of the row; that
      of rank 0 counts. after: (first, second) -> their composition.
  """
  maps, state = varying.same((maps, state))
  axis, first = plan.axis, lax.axis_index(plan.axis) == 0
  run = lambda m, h: after((m[0], h), m)[1]
  # From here on the map of rank 0 is constant: the state after it.
  maps = maps[0], jnp.where(first, run(maps, state), maps[1])
  form = _gathered if plan.form == 'gather' else _permuted
  before, last = form(maps, axis, after, run)
  return jnp.where(first, state, before), last


def _gathered(maps, axis, after, run):
  del after
  everybody = lax.all_gather(maps, axis)
  step = lambda h, m: (run(m, h), h)
  last, before = lax.scan(step, jnp.zeros_like(maps[1]), everybody)
  return before[lax.axis_index(axis)], last


def _permuted(maps, axis, after, run):
  del run
  by, me = 1, lax.axis_index(axis)
  while by < lax.axis_size(axis):
    joined = after(_send(maps, axis, by), maps)
    pick = functools.partial(jnp.where, me >= by)
    maps = jax.tree.map(pick, joined, maps)
    by *= 2
  return _send(maps[1], axis, 1), _from_last(maps[1], axis)


def _through(
  op, left, own, state, reset_BT, plan, after=linear_scan.after
):  # fmt: skip
  """`_enter` of a linear recurrence's state, 0 where a document starts.

  Args:
    op: name of the op, for the error. left, own: P and S of this shard.
    state: before the first token of the row, or None. after: of `_enter`.
  """
  if state is None:
    state = jnp.zeros_like(own)
  if state.shape != own.shape:
    raise errors.UserError(
      f'{op}: the state is {state.shape}, these inputs need {own.shape}; it '
      f'belongs to another model or batch'
    )
  state = state.astype(own.dtype)
  if reset_BT is not None:
    first = reset_BT[:, 0].reshape(-1, *[1] * (state.ndim - 1))
    state = jnp.where(first, 0, state)
  return _enter((left, own), state, plan, after)


def gated(
  q_BTGK, k_BTGK, v_BTHV, log_decay, reset_BT, state_BHKV, plan, **options
):
  """gated_scan (scans/gated.py) of a sharded row -> (o_BTHV, state_BHKV).

  Args:
    q_BTGK .. reset_BT: this shard's tokens, as in gated_scan.
    state_BHKV: before the first token of the row (rank 0's counts), or None.
    plan: ScanPlan, or None: the row is not sharded.
    **options: chunk and impl of gated_scan.

  Returns:
    o of this shard, and the state after the last token of the row, on all
    ranks. Raises errors.UserError as gated_scan.
  """
  op = functools.partial(gated_scan.gated_scan, **options)
  if plan is None:
    return op(q_BTGK, k_BTGK, v_BTHV, log_decay, reset_BT, state_BHKV)
  o, own = op(q_BTGK, k_BTGK, v_BTHV, log_decay, reset_BT)
  left = gated_scan.decay(log_decay, reset_BT)[..., None].astype(own.dtype)
  state, last = _through('gated_scan', left, own, state_BHKV, reset_BT, plan)
  more = gated_scan.correction(q_BTGK, log_decay, reset_BT, state)
  return (o + more).astype(o.dtype), last


def delta(tokens, reset_BT, state_BHKV, plan, **options):
  """delta_scan (scans/delta.py) of a sharded row -> (o_BTHV, state_BHKV).

  What passes through a shard is a matrix P_BHKK, which K more columns of values
  find: V + K in the place of V, in the op's products.

  Args:
    tokens: (q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, beta_BTH) of this shard. The
      rest, and results, as in delta_scan and `gated`.
  """
  op = functools.partial(delta_scan.delta_scan, **options)
  if plan is None:
    return op(*tokens, reset_BT, state_BHKV)
  q, k, v, *rates = tokens
  wide = jnp.promote_types(q.dtype, jnp.float32)
  values, first = delta_scan.extended(v, k.shape[3], wide)
  o, maps = op(q, k, values, *rates, reset_BT, first)
  (o, reach), (own, left) = (jnp.split(x, [v.shape[3]], -1) for x in (o, maps))
  state, last = _through(
    'delta_scan', left, own, state_BHKV, reset_BT, plan, delta_scan.after
  )
  return (o + delta_scan.correction(reach, state)).astype(v.dtype), last


def linear(log_a_BTD, b_BTD, reset_BT, state_BD, plan, *, impl='auto'):
  """linear_scan (scans/linear.py) of a sharded row -> (h_BTD, state_BD).

  Args:
    log_a_BTD: logarithms of the factors, <= 0; 0 and b = 0: the token changes
      no state. The rest, and results, as in linear_scan and `gated`.
  """
  op = functools.partial(linear_scan.linear_scan, impl=impl)
  if plan is None:
    return op(jnp.exp(log_a_BTD), b_BTD, reset_BT, state_BD)
  h, own = op(jnp.exp(log_a_BTD), b_BTD, reset_BT)
  reach = linear_scan.reach(log_a_BTD, reset_BT)
  left = reach[:, -1].astype(own.dtype)
  state, last = _through('linear_scan', left, own, state_BD, reset_BT, plan)
  return (h + reach * state[:, None]).astype(h.dtype), last


def selective(
  x_BTF, dt_BTF, shared_BTUS, rate_FS, reset_BT, state_BFS, plan, *, impl='auto'
):
  """selective_scan (scans/selective.py) of a sharded row -> (y_BTF, state_BFS).

  Arguments and results as in selective_scan and `gated`; reset_BT is not None.
  """
  op = functools.partial(linear_scan_selective.selective_scan, impl=impl)
  if plan is None:
    return op(x_BTF, dt_BTF, shared_BTUS, rate_FS, reset_BT, state_BFS)
  y, own = op(x_BTF, dt_BTF, shared_BTUS, rate_FS, reset_BT)
  dt, shared, rate = (z.astype(y.dtype) for z in (dt_BTF, shared_BTUS, rate_FS))
  left = linear_scan_selective.decay(dt, rate, reset_BT)
  state, last = _through('selective_scan', left, own, state_BFS, reset_BT, plan)
  more = linear_scan_selective.correction(
    dt, shared[:, :, 1], rate, reset_BT, state
  )
  return y + more, last


@dataclasses.dataclass(frozen=True)
class _Split:
  """newton.Whole of a sharded row; see there."""

  plan: ScanPlan
  rounds: int

  def before(self, last_BMD, state_BMD):
    first = lax.axis_index(self.plan.axis) == 0
    return jnp.where(first, state_BMD, _send(last_BMD, self.plan.axis, 1))

  def enter(self, j_BTMMD, b_BTMD):
    zero = jnp.zeros_like(b_BTMD[:, 0])
    maps = affine_scan.total(j_BTMMD, b_BTMD)
    return _enter(maps, zero, self.plan, affine_scan.after)[0]

  def largest(self, x):
    sync = self.plan.sync
    axes = tuple(annotate.sizes()) if sync is None else sync
    return lax.pmax(x, axes) if axes else x


def newton(cell, params, x, reset_BT, state_BMD, valid_BT, plan, **options):
  """newton_scan (scans/newton.py), sharded row -> (h_BTMD, state_BMD, Info).

  Arguments as in newton_scan and `gated`; Info is the same on all ranks of
  plan.sync. The fallback, token by token, takes n rounds of T steps on n ranks.
  """
  if plan is None:
    h, info = newton_scan.newton_scan(
      cell, params, x, reset_BT, state_BMD, valid_BT, **options
    )
    return h, h[:, -1], info
  link = _Split(plan, lax.axis_size(plan.axis))
  h, info = newton_scan.newton_scan(
    cell, params, x, reset_BT, state_BMD, valid_BT, link=link, **options
  )
  return h, _from_last(h[:, -1], plan.axis), info


def causal_conv(
  x_BTD, w_WD, positions_BT, tail_BRD, valid_BT, plan, *, dilation=1
):
  """causal_conv (scans/causal_conv.py) of a sharded row -> (y_BTD, tail_BRD).

  A rank receives R inputs, from as many ranks before it as hold them. Arguments
  and results as in causal_conv and `gated`; the tail after the row, which costs
  n R inputs, is sent only if it is used.
  """
  if plan is None:
    return conv_op.causal_conv(
      x_BTD, w_WD, positions_BT, tail_BRD, valid_BT=valid_BT, dilation=dilation
    )
  conv_op.check(x_BTD, w_WD, tail_BRD, dilation)
  r = conv_op.reach(w_WD, dilation)
  if tail_BRD is None:
    tail_BRD = jnp.zeros((len(x_BTD), r, x_BTD.shape[2]), x_BTD.dtype)
  tail = tail_BRD.astype(x_BTD.dtype)
  x_BTD, tail = varying.same((x_BTD, tail))
  halo = _halo(x_BTD, tail, plan.axis)
  y, _ = conv_op.causal_conv(x_BTD, w_WD, positions_BT, halo, dilation=dilation)
  return y, _last_tail(x_BTD, tail, valid_BT, plan.axis)


def _halo(x_BTD, tail_BRD, axis):
  """The R inputs before this shard; from the tail those that no rank holds."""
  (_, t, _), r = x_BTD.shape, tail_BRD.shape[1]
  parts = []
  for by in reversed(range(1, -(-r // t) + 1)):
    size = min(t, r - (by - 1) * t)
    parts.append(_send(x_BTD[:, t - size :], axis, by))
  longer = jnp.concatenate([tail_BRD, jnp.zeros_like(tail_BRD)], 1)
  at = jnp.minimum(lax.axis_index(axis) * t, r)
  own = lax.dynamic_slice_in_dim(longer, at, r, 1)
  return jnp.concatenate([own[:, :0], *parts], 1) + own


def _last_tail(x_BTD, tail_BRD, valid_BT, axis):
  """The last R valid inputs of the row, on all ranks."""
  r = tail_BRD.shape[1]
  if valid_BT is None:
    valid_BT = jnp.ones(x_BTD.shape[:2], bool)
  padded = jnp.concatenate([jnp.zeros_like(tail_BRD), x_BTD], 1)
  own = conv_op.last(padded, r, valid_BT)
  count = jnp.minimum(valid_BT.sum(1), r)[:, None]

  def step(tail, shard):
    own, count = shard
    at = jnp.arange(r) + count
    at = jnp.where(at < r, at, jnp.arange(r) + r)
    both = jnp.concatenate([tail, own], 1)
    return jnp.take_along_axis(both, at[..., None], 1), None

  return lax.scan(step, tail_BRD, lax.all_gather((own, count), axis))[0]
