"""The choreographies of context parallel attention, written once, run twice.

A form computes and joins all (q shard, k shard) pairs. It takes a pair function
and a join, and depends neither on the pass nor on the content of the two sides:

    rows, columns        pytrees of the q shard and of the k shard
    pair(job, pairs, rows, columns) -> (a part for rows, a part for columns)
    form(job, pair, rows, columns, join) -> (joined parts, summed parts at home)

                pair           rows                           columns
    forward     accumulate     (q, info) -> (o, m, l)         (k, v, info) -> ()
    backward    gradients      (.., lse, delta, do) -> dq     .. -> (dk, dv)

These walk blocks of XLA's, as raw sums. Where the op has a kernel, its passes
take their place: `attend`, whose finished parts (o, lse) are joined by `mix`,
and `differentiate`, given the lse of whole rows.

Ring Self-Attention does not fit: it holds whole rows of scores, so each of its
passes is two turns of the same ring. sharding/sequence/attention.py has the
table of costs and the sources.

Legend: B batch, T query length, S key length, L length of all shards, N query
heads, K kv heads, G = N / K, H head size; q_BKGTH, k_BKSH, v_BKSH, info_B2T
(positions, segments): tokens are on axis 2 of columns.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.pallas_kernels.attention import xla as attention_xla
from paraxis.sharding.sequence import order as context_order


@dataclasses.dataclass(frozen=True)
class ContextCall:
  """A ContextPlan and the static shapes: rank = group * inner + place in it.

  kernels: registry.Implementation of the forward pass, of the backward pass;
  None: the walk of XLA's blocks.
  """

  form: str
  axis: str
  n: int
  layout: str
  inner: int
  length: int
  mask: attention_op.Mask
  kernels: tuple[Any, Any] = (None, None)

  @property
  def ring(self):
    """Groups: the shards that a ring turns over."""
    return self.n // self.inner

  def place(self):
    """This rank's shard."""
    return lax.axis_index(self.axis) // self.inner

  @property
  def groups(self):
    """Ranks that exchange heads, None: all."""
    if self.ring == 1:
      return None
    first = range(0, self.n, self.inner)
    return [list(range(i, i + self.inner)) for i in first]

  @property
  def blocks(self):
    return context_order.blocks(
      self.layout, self.n, self.length, self.mask, self.ring
    )

  def pairs(self, q_shard, k_shard):
    """(P, 2) int32 block pairs of a (traced) pair of shards."""
    which = jnp.asarray(self.blocks.which)[q_shard, k_shard]
    return jnp.asarray(self.blocks.table)[which]

  def shift(self, tree, by=1):
    """Every rank sends its leaves to the rank `by` shards further round."""
    if by % self.ring == 0:
      return tree
    to = lambda rank: (rank + by * self.inner) % self.n
    route = [(rank, to(rank)) for rank in range(self.n)]
    return jax.tree.map(lambda x: lax.ppermute(x, self.axis, route), tree)

  def walk(self, pairs, q_info, k_info):
    """The block pairs of two shards with their documents and positions."""
    block = self.blocks.block
    positions, segments = zip(
      (q_info[:, 0], q_info[:, 1]), (k_info[:, 0], k_info[:, 1]), strict=True
    )
    return attention_xla.Walk(pairs, block, block, segments, positions)


# -------------------------------------------------------------- pair, join --


def accumulate(job, pairs, rows, columns):
  """Forward pair: -> (o, m, l) of the rows, () for the columns."""
  (q, q_info), (k, v, k_info) = rows, columns
  walk = job.walk(pairs, q_info, k_info)
  return attention_xla.accumulate(q, k, v, walk, job.mask), ()


def gradients(job, pairs, rows, columns):
  """Backward pair: -> dq of the rows, (dk, dv) of the columns."""
  (q, q_info, *rest), (k, v, k_info) = rows, columns
  walk = job.walk(pairs, q_info, k_info)
  dq, dk, dv = attention_xla.gradients(q, k, v, rest, walk, job.mask)
  return dq, (dk, dv)


def _given(rows, columns):
  """What an implementation of the op takes: q, k, v, segments, order."""
  (q, q_info, *_), (k, v, k_info) = rows, columns
  arrays = attention_xla.from_rows(q), *map(attention_xla.from_cols, (k, v))
  segments, order = ((q_info[:, i], k_info[:, i]) for i in (1, 0))
  return varying.same((*arrays, segments, order))


def attend(job, pairs, rows, columns):
  """Forward pair of a kernel: -> (o, lse) of the rows, () for the columns."""
  del pairs  # a kernel finds the visible blocks itself
  o, lse = job.kernels[0].forward(*_given(rows, columns), job.mask)
  kv = columns[0].shape[1]
  return tuple(
    attention_xla.to_rows(x.astype(lse.dtype), kv) for x in (o, lse)
  ), ()


def differentiate(job, pairs, rows, columns):
  """Backward pair of a kernel: -> dq of the rows, (dk, dv) of the columns."""
  del pairs
  of_rows = map(attention_xla.from_rows, rows[2:])
  given = varying.same(
    (*_given(rows, columns), attention_blocks.QueryRows(*of_rows))
  )
  grads = job.kernels[1].backward(*given[:-1], job.mask, given[-1])
  dq, dk, dv = (x.astype(rows[2].dtype) for x in grads)
  dq = attention_xla.to_rows(dq, dk.shape[2])
  return dq, (attention_xla.to_cols(dk), attention_xla.to_cols(dv))


def mix(a, b):
  """Joins two finished parts (o / l, lse) of the same rows."""
  lse = jnp.logaddexp(a[1], b[1])
  x, y = (jnp.exp(part[1] - lse)[..., None] for part in (a, b))
  return a[0] * x + b[0] * y, lse


def add(a, b):
  return jax.tree.map(jnp.add, a, b)


def _join(how, total, part):
  return part if total is None else how(total, part)


# ----------------------------------------------------------- choreographies --


def _tour(job, pair, still, moving, join, start=None):
  """`moving` visits all shards; what is computed for it travels with it.

  Args:
    pair: (hop, still, moving) -> (a part for `still`, a part for `moving`).
    still, moving: pytrees; `moving` advances by one shard per hop.
    join: folds the parts for `still`, beginning with `start`.

  Returns:
    (joined parts for `still`, summed parts for `moving`, back at its shard).

  No send waits for the pair that is being computed: `moving` is sent before it,
  together with the sums of the previous pair. The barrier ends those sends
  where the pair ends; without it the TPU scheduler hides them behind the one
  small fusion of the join, with it behind the loop over blocks. (For that, a
  pair must end in its loop: sums leave it raw, scaled and normalised later.)
  """
  hops = job.blocks.hops

  def hop(carry, r, first=False, last=False):
    total, moving, back = carry
    ahead = None if last else job.shift(moving)
    back = None if first else job.shift(back)
    a, b = pair(r, still, moving)
    a, b, ahead, back = lax.optimization_barrier((a, b, ahead, back))
    return _join(join, total, a), ahead, _join(add, back, b)

  carry = hop((start, moving, None), 0, first=True, last=hops == 1)
  if hops > 2:
    body = lambda carry, r: (hop(carry, r), None)
    carry, _ = lax.scan(body, carry, jnp.arange(1, hops - 1))
  if hops > 1:
    carry = hop(carry, hops - 1, last=True)
  return carry[0], job.shift(carry[2], 1 - hops)


def ring(job, pair, rows, columns, join):
  """k, v and their gradients travel round the ring."""
  me, n = job.place(), job.ring

  def hop(r, rows, columns):
    return pair(job, job.pairs(me, (me - r) % n), rows, columns)

  return _tour(job, hop, rows, columns, join)


def token_ring(job, pair, rows, columns, join, pack=None):
  """q travels in the other direction; partial results return directly, a hop
  later.

  pack: turns a part into the arrays that are sent back and joined.
  """
  me, n, hops = job.place(), job.ring, job.blocks.hops
  total = sums = late = None
  for r in range(hops):
    ahead = job.shift(rows, -1) if r < hops - 1 else None
    home = job.shift(late, r - 1)
    a, b = pair(job, job.pairs((me + r) % n, me), rows, columns)
    a, b, ahead, home = lax.optimization_barrier((a, b, ahead, home))
    total = _join(join, total, home) if r else None
    sums, rows, late = _join(add, sums, b), ahead, pack(*a) if pack else a
  return _join(join, total, job.shift(late, hops - 1)), sums


def all_gather(job, pair, rows, columns, join):
  """k, v of all ranks at once; their gradients are summed and scattered."""
  del join  # one part only
  pairs, count = job.pairs(job.place(), slice(None)), job.blocks.count
  # Column blocks of shard i begin at i * count.
  first = np.arange(job.n, dtype=np.int32)[:, None, None] * np.array(
    [0, count], np.int32
  )
  pairs = jnp.where(pairs < 0, -1, pairs + first).reshape(-1, 2)
  whole = jax.tree.map(
    lambda x: lax.all_gather(x, job.axis, axis=2, tiled=True), columns
  )
  a, b = pair(job, pairs, rows, whole)
  scatter = functools.partial(
    lax.psum_scatter, axis_name=job.axis, scatter_dimension=2, tiled=True
  )
  return a, jax.tree.map(scatter, b)


# ------------------------------------------------------ Ring Self-Attention --


def _put(rows_BKGTS, part):
  """The rows with the columns (shard, x_BKGTt) in their place."""
  shard, new = part
  return attention_xla.paste(rows_BKGTS, new, shard, new.shape[4], 4)


def _tile(job, q, k, q_info, k_info):
  """All scores of two shards, and the softcap's slope."""
  both = lambda i: (q_info[:, i], k_info[:, i])
  ok = attention_xla.visible(job.mask, both(1), both(0))
  return attention_xla.scores(q, k, ok, job.mask)


def rsa_forward(job, rows, columns):
  """A ring of k gives whole rows of scores, a ring of v the output.

  -> (o, lse), p_BKGTL.
  """
  (q, q_info), (k, v, k_info) = rows, columns
  me, n, t = job.place(), job.n, k.shape[2]
  wide = jnp.result_type(q, k, v, jnp.float32)

  def score(r, q, moving):
    return ((me - r) % n, _tile(job, q, moving[0], q_info, moving[1])[0]), ()

  def value(r, p, v):
    part = attention_xla.cut(p, (me - r) % n, t, 4)
    return varying.dot('bkgts,bksh->bkgth', part, v), ()

  s = jnp.full((*q.shape[:-1], n * t), varying.NEG, wide)
  s, _ = _tour(job, score, q, (k, k_info), _put, s)
  lse = jax.nn.logsumexp(s, -1)
  p = jnp.exp(s - jnp.maximum(lse, varying.FLOOR)[..., None])
  p = p.astype(v.dtype)
  o, _ = _tour(job, value, p, v, add)
  return (o, lse), p


def rsa_backward(job, p, rows, columns):
  """A ring of v and dv gives dp, a ring of k and dk gives dq."""
  (q, q_info, _, delta, do), (k, v, k_info) = rows, columns
  me, n, t = job.place(), job.n, k.shape[2]
  dot = varying.dot
  # Else XLA for TPU chooses p's layout for one rank's part of it: with few
  # tokens a rank that pads p to 16 times its bytes.
  p = lax.optimization_barrier(p)

  def value(r, p, v):
    shard = (me - r) % n
    dp = dot('bkgth,bksh->bkgts', do, v)
    part = attention_xla.cut(p, shard, t, 4)
    return (shard, dp), dot('bkgts,bkgth->bksh', part, do)

  def key(r, ds, moving):
    k, k_info = moving
    part = attention_xla.cut(ds, (me - r) % n, t, 4)
    if job.mask.softcap:  # its slope is made again, not kept
      slope: Any = _tile(job, q, k, q_info, k_info)[1]
      part = part * slope.astype(part.dtype)
    dk = dot('bkgts,bkgth->bksh', part, q)
    return dot('bkgts,bksh->bkgth', part, k), dk

  dp, dv = _tour(job, value, p, v, _put, jnp.zeros(p.shape, delta.dtype))
  ds = (p * (dp - delta[..., None])).astype(q.dtype)
  dq, dk = _tour(job, key, ds, (k, k_info), add)
  return dq, (dk, dv)


# --------------------------------------------------------------- two passes --

_FORMS = {'ring': ring, 'token_ring': token_ring, 'all_gather': all_gather}


def forward(job, rows, columns):
  """rows (q, info), columns (k, v, info) -> (o, lse), residual of backward."""
  if job.form == 'rsa':
    return rsa_forward(job, rows, columns)
  pair, join, finish = accumulate, attention_xla.merge, attention_xla.finish
  if job.kernels[0]:
    pair, join, finish = attend, mix, lambda *part: part
  if job.form == 'token_ring':  # o / l and lse: fewer bytes to send
    return token_ring(job, pair, rows, columns, mix, finish)[0], None
  parts, _ = _FORMS[job.form](job, pair, rows, columns, join)
  return finish(*parts), None


def backward(job, kept, rows, columns):
  """rows (q, info, lse, delta, do), columns as before -> dq, (dk, dv)."""
  if job.form != 'rsa' and job.kernels[1]:
    return _FORMS[job.form](job, differentiate, rows, columns, add)
  if job.form == 'rsa':
    dq, (dk, dv) = rsa_backward(job, kept, rows, columns)
  else:
    dq, (dk, dv) = _FORMS[job.form](job, gradients, rows, columns, add)
  return dq * job.mask.scale, (dk * job.mask.scale, dv)
