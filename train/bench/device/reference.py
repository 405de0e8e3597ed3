"""The ops as plain loops in float64 NumPy, with their gradients written out.

`paraxis bench device` compares what a device computes with these. They share no
code with any implementation, and no autodiff: the adjoint of every recurrence
is a loop that runs backwards. Each function takes the op's float arguments, as
float64, and gives (outputs, back): a tuple of arrays, and a function of their
cotangents that gives one gradient for each float argument.

Legend: B rows, T tokens, S slots, N query heads, K kv heads, H head size; of
scans H heads, G groups, K key and V value size, D or F channels, M coupled
numbers of a channel, U 2.
"""

import numpy as np

NEG = -1e30  # lse of a row that sees nothing


def _visible(mask, t, s, segments, order):
  q, k = order or (np.arange(t)[None], np.arange(s)[None])
  far = q[:, :, None] - k[:, None]
  ok = np.ones((1, t, s), bool)
  if mask.causal:
    ok = ok & (far >= 0)
  if mask.window:
    ok = ok & (far < mask.window)
  if segments is not None:
    q, k = (np.asarray(x) for x in segments)
    ok = ok & (q[:, :, None] == k[:, None]) & (q[:, :, None] > 0)
  return ok[:, None]


def attention(mask, segments, order, q, k, v, sinks=None):
  """(o_BTNH, lse_BTN), dense; sinks_N: None, or one more logit a head."""
  b, t, n, h = q.shape
  s, kv = k.shape[1:3]
  wide = lambda x: np.repeat(x.transpose(0, 2, 1, 3), n // kv, 1)
  q_, k_, v_ = q.transpose(0, 2, 1, 3), wide(k), wide(v)
  z, slope = mask.scale * (q_ @ k_.transpose(0, 1, 3, 2)), 1.0
  if mask.softcap:
    tanh = np.tanh(z / mask.softcap)
    z, slope = mask.softcap * tanh, 1 - tanh**2
  z = np.where(_visible(mask, t, s, segments, order), z, -np.inf)
  sink = np.full(n, -np.inf) if sinks is None else sinks
  sink = np.broadcast_to(sink[:, None], (b, n, t))
  top = np.maximum(z.max(-1), sink)
  some = np.isfinite(top)
  top = np.where(some, top, 0)
  total = np.exp(z - top[..., None]).sum(-1) + np.exp(sink - top)
  total = np.where(some, total, 1)
  p = np.exp(z - top[..., None]) / total[..., None]
  o = p @ v_
  lse = np.where(some, top + np.log(total), NEG)

  def back(do, dlse):
    do, dlse = do.transpose(0, 2, 1, 3), dlse.transpose(0, 2, 1)
    delta = (o * do).sum(-1) - dlse
    dz = p * (do @ v_.transpose(0, 1, 3, 2) - delta[..., None])
    dz = dz * slope * mask.scale
    joined = lambda x: x.reshape(b, kv, -1, s, x.shape[-1]).sum(2)
    grads = (
      dz @ k_,
      joined(dz.swapaxes(2, 3) @ q_),
      joined(p.swapaxes(2, 3) @ do),
    )
    grads = tuple(x.transpose(0, 2, 1, 3) for x in grads)
    if sinks is None:
      return grads
    return *grads, -(np.exp(sink - top) / total * delta).sum((0, 2))

  return (o.transpose(0, 2, 1, 3), lse.transpose(0, 2, 1)), back


SEEN = True, True, False, True  # queries that see themselves


def ragged(scale, lengths, q, k, v, *own):
  """(o_B1NH, lse_B1N) of one query a row over its first slots, row by row.

  own: () or k and v, (B, 1, K, H), of the query itself: if it is SEEN, as one
  slot more.
  """
  b, n, kv = len(q), q.shape[2], k.shape[1]
  ranges = np.stack([np.zeros(b, int), lengths], 1)
  if own:
    more = zip(own, (k, v), strict=True)
    k, v = (np.concatenate([x.swapaxes(1, 2), y], 2) for x, y in more)
    ranges += np.stack([1 - np.array(SEEN), np.ones(b, int)], 1)
  o, lse = np.zeros((b, 1, n, v.shape[3])), np.full((b, 1, n), NEG)
  for row, (begin, end) in enumerate(ranges):
    for head in range(n if end > begin else 0):
      own = row, head // (n // kv), slice(begin, end)
      z = scale * (k[own] @ q[row, 0, head])
      lse[row, 0, head] = top = z.max() + np.log(np.exp(z - z.max()).sum())
      o[row, 0, head] = np.exp(z - top) @ v[own]
  return (o, lse), None


def shared_prefix(scale, lengths, q, k, v, own_k, own_v):
  """`ragged` of rows that all begin with the slots of k_SKH and v_SKH."""
  first = lambda x, rows: np.broadcast_to(
    x.swapaxes(0, 1), (rows, x.shape[1], len(x), x.shape[2])
  )
  join = lambda x, own: np.concatenate([first(x, len(own)), own], 2)
  whole = np.asarray(lengths) + len(k)
  return ragged(scale, whole, q, join(k, own_k), join(v, own_v))


def gated_scan(reset, q, k, v, g, state):
  """(o_BTHV, state_BHKV): S = e^g S + k v', o = S' q; heads share q and k."""
  heads, groups = v.shape[2], q.shape[2]
  group = np.arange(heads) // (heads // groups)
  decay = np.exp(g if g.ndim == 4 else g[..., None])
  decay = np.where(reset[:, :, None, None], 0, decay)
  S, before, o = state, [], np.zeros_like(v)
  for t in range(q.shape[1]):
    before.append(S)
    S = decay[:, t, ..., None] * S + k[:, t, group, :, None] * v[:, t, :, None]
    o[:, t] = np.einsum('bhkv,bhk->bhv', S, q[:, t, group])

  def back(do, dS):
    dq, dk, dv, dg = map(np.zeros_like, (q, k, v, g))
    for t in reversed(range(q.shape[1])):
      qt, kt, decayed = q[:, t, group], k[:, t, group], decay[:, t, ..., None]
      after = decayed * before[t] + kt[..., None] * v[:, t, :, None]
      dS = dS + qt[..., None] * do[:, t, :, None]
      for h in range(heads):
        dq[:, t, group[h]] += np.einsum('bkv,bv->bk', after[:, h], do[:, t, h])
        dk[:, t, group[h]] += np.einsum('bkv,bv->bk', dS[:, h], v[:, t, h])
      dv[:, t] = np.einsum('bhkv,bhk->bhv', dS, kt)
      kept = (dS * decayed * before[t]).sum(-1)
      dg[:, t] = kept if g.ndim == 4 else kept.sum(-1)
      dS = decayed * dS
    return dq, dk, dv, dg, dS

  return (o, S), back


def delta_scan(reset, q, k, v, g, beta, state):
  """(o_BTHV, state_BHKV): M = e^g S, S = M + k b (v - M' k)', o = S' q."""
  heads, groups = v.shape[2], q.shape[2]
  group = np.arange(heads) // (heads // groups)
  decay = np.where(reset[:, :, None], 0, np.exp(g))[..., None, None]
  S, kept, o = state, [], np.zeros_like(v)
  for t in range(q.shape[1]):
    M, kt = decay[:, t] * S, k[:, t, group]
    wrong = v[:, t] - np.einsum('bhkv,bhk->bhv', M, kt)
    S = M + kt[..., None] * (beta[:, t, :, None] * wrong)[:, :, None]
    kept.append((M, wrong, S))
    o[:, t] = np.einsum('bhkv,bhk->bhv', S, q[:, t, group])

  def back(do, dS):
    dq, dk, dv, dg, db = map(np.zeros_like, (q, k, v, g, beta))
    for t in reversed(range(q.shape[1])):
      (M, wrong, S), bt = kept[t], beta[:, t, :, None]
      qt, kt = q[:, t, group], k[:, t, group]
      dS = dS + qt[..., None] * do[:, t, :, None]
      du = np.einsum('bhkv,bhk->bhv', dS, kt)
      db[:, t] = (du * wrong).sum(-1)
      dv[:, t] = bt * du
      dM = dS - kt[..., None] * (bt * du)[:, :, None]
      d_kt = np.einsum('bhkv,bhv->bhk', dS, bt * wrong)
      d_kt -= np.einsum('bhkv,bhv->bhk', M, bt * du)
      d_qt = np.einsum('bhkv,bhv->bhk', S, do[:, t])
      for h in range(heads):
        dq[:, t, group[h]] += d_qt[:, h]
        dk[:, t, group[h]] += d_kt[:, h]
      dg[:, t] = (dM * M).sum((-1, -2))
      dS = decay[:, t] * dM
    return dq, dk, dv, dg, db, dS

  return (o, S), back


def linear_scan(reset, a, b, state):
  """(h_BTD, state_BD): h = a h + b."""
  a = np.where(reset[..., None], 0, a)
  h, before, out = state, [], np.zeros_like(b)
  for t in range(b.shape[1]):
    before.append(h)
    h = out[:, t] = a[:, t] * h + b[:, t]

  def back(d_out, dh):
    da, db = np.zeros_like(a), np.zeros_like(b)
    for t in reversed(range(b.shape[1])):
      dh = db[:, t] = dh + d_out[:, t]
      da[:, t] = np.where(reset[:, t, None], 0, dh * before[t])
      dh = a[:, t] * dh
    return da, db, dh

  return (out, h), back


def affine_scan(j, b, state):
  """(h_BTMD,): h = J h + b, J an M x M block of each channel."""
  h, before, out = state, [], np.zeros_like(b)
  for t in range(b.shape[1]):
    before.append(h)
    h = out[:, t] = np.einsum('bmnd,bnd->bmd', j[:, t], h) + b[:, t]

  def back(d_out):
    dj, db, dh = np.zeros_like(j), np.zeros_like(b), np.zeros_like(state)
    for t in reversed(range(b.shape[1])):
      dh = db[:, t] = dh + d_out[:, t]
      dj[:, t] = np.einsum('bmd,bnd->bmnd', dh, before[t])
      dh = np.einsum('bmnd,bmd->bnd', j[:, t], dh)
    return dj, db, dh

  return (out,), back


def selective_scan(reset, x, dt, shared, rate, state):
  """(y_BTF, state_BFS): h = e^(dt A) h + dt x B, y = h C."""
  h, before, y = state, [], np.zeros_like(x)
  keep = np.where(reset, 0.0, 1.0)[..., None, None]
  decay = lambda t: keep[:, t] * np.exp(dt[:, t, :, None] * rate)
  into = lambda t: (dt[:, t] * x[:, t])[..., None]
  for t in range(x.shape[1]):
    before.append(h)
    h = decay(t) * h + into(t) * shared[:, t, 0, None]
    y[:, t] = np.einsum('bfs,bs->bf', h, shared[:, t, 1])

  def back(dy, dh):
    dx, d_dt, d_shared = map(np.zeros_like, (x, dt, shared))
    d_rate = np.zeros_like(rate)
    for t in reversed(range(x.shape[1])):
      b, c = shared[:, t, 0, None], shared[:, t, 1, None]
      after = decay(t) * before[t] + into(t) * b
      dh = dh + dy[:, t, :, None] * c
      d_shared[:, t, 1] = (dy[:, t, :, None] * after).sum(1)
      d_shared[:, t, 0] = (dh * into(t)).sum(1)
      written, kept = (dh * b).sum(-1), dh * decay(t) * before[t]
      dx[:, t] = dt[:, t] * written
      d_dt[:, t] = x[:, t] * written + (kept * rate).sum(-1)
      d_rate += (kept * dt[:, t, :, None]).sum(0)
      dh = decay(t) * dh
    return dx, d_dt, d_shared, d_rate, dh

  return (y, h), back


def tanh_cell(w, x, state):
  """(h_BTMD,): h = tanh(w h + x), which Newton's method solves."""
  h, before, out = state, [], np.zeros_like(x)
  for t in range(x.shape[1]):
    before.append(h)
    h = out[:, t] = np.tanh(w * h + x[:, t])

  def back(d_out):
    dw, dx, dh = np.zeros_like(w), np.zeros_like(x), np.zeros_like(state)
    for t in reversed(range(x.shape[1])):
      dz = dx[:, t] = (dh + d_out[:, t]) * (1 - out[:, t] ** 2)
      dw += (dz * before[t]).sum(0)
      dh = w * dz
    return dw, dx, dh

  return (out,), back


def cross_entropy(targets, x, w):
  """(nll_T, lse_T) of logits x w'."""
  z, rows = x @ w.T, np.arange(len(x))
  top = z.max(-1)
  lse = top + np.log(np.exp(z - top[:, None]).sum(-1))

  def back(d_nll, d_lse):
    dz = np.exp(z - lse[:, None]) * (d_nll + d_lse)[:, None]
    dz[rows, targets] -= d_nll
    return dz @ w, dz.T @ x

  return (lse - z[rows, targets], lse), back


def int4_product(q, x, scale):
  """(y_TF,): integers q_DF, one scale for 128 rows of a column."""
  return (x @ (np.asarray(q, np.float64) * np.repeat(scale, 128, 0)),), None


def grouped_product(sizes, x, w):
  """(y_SF, dw_EDF for the cotangent y): runs of rows, each with a matrix."""
  y, dw, at = np.zeros((len(x), w.shape[2])), np.zeros_like(w), 0
  for e, size in enumerate(sizes):
    own = slice(at, at + size)
    y[own] = x[own] @ w[e]
    dw[e] = x[own].T @ y[own]
    at += size
  return (y, dw), None


def error(found, wanted) -> float:
  """Of a result against float64 (correct.py); inf: it is not finite."""
  found, wanted = np.asarray(found, np.float64), np.asarray(wanted)
  nothing = wanted <= NEG / 2  # lse of rows that see nothing
  if (nothing != (found <= NEG / 2)).any():
    return float('inf')
  found, wanted = np.where(nothing, 0, found), np.where(nothing, 0, wanted)
  if not np.isfinite(found).all():
    return float('inf')
  width = wanted.shape[-1] if wanted.ndim else 1
  norm = lambda x: np.linalg.norm(x.reshape(-1, width), axis=1)
  floor = 0.1 * np.sqrt((norm(wanted) ** 2).mean()) + 1e-12
  return float((norm(found - wanted) / (norm(wanted) + floor)).max())
