"""Mamba's scan on TPU: channels in lanes, states in sublanes, on the chip.

  h_t = e^(dt_t A) h_{t-1} + dt_t x_t B_t          y_t = sum_s C_ts h_ts

The grid walks (row of the batch, channels, blocks of 128 tokens), the last in
order, reversed in the backward pass. The state of some channels, (S, lanes), is
carried in registers from token to token; no other state leaves the chip but one
for each block, from which the backward pass computes the block's states again
(arXiv:2312.00752, section 3.3). Tokens of B, C and resets are lanes of a block,
of which one is taken by a mask and a sum, so that it lies along sublanes.

float32. Cost: x, dt (and dy) read once, y (or dx, ddt) written once; T / 128
states of S numbers a channel; gradients of B and C are written for every block
of channels, to be added. Tokens are padded by dt = 0, channels to 128, states
to 8.

Legend: B rows, T tokens, F channels, S numbers of the state, N = T / 128, P
rows of `columns`: B, C and one of resets.
"""

import functools

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying

ROWS, LANES, MOST_LANES, SUBLANES = 128, 128, 512, 8
STATES = 2**20  # numbers of the states of a block: 4 MiB
DTYPES = ('float32',)


def limits(spec, target):
  """None, or what else the kernel cannot take (registry.kernel)."""
  del target
  state = spec.shape[3]
  if ROWS * LANES * state > STATES:
    most = STATES // (ROWS * LANES)
    return f'a state of {state} numbers, at most {most} fit'
  return None


def _column(columns, j, states):
  """(b_S1, c_S1, keep_11) of token j of a block."""
  lane = lax.broadcasted_iota(jnp.int32, columns.shape, 1)
  one = jnp.where(lane == j, columns, 0.0).sum(1, keepdims=True)
  return one[:states], one[states : 2 * states], one[2 * states :][:1] > 0


def _forward(x_ref, dt_ref, columns_ref, rate_ref, first_ref, *refs):
  y_ref, last_ref, starts_ref, carry = refs
  columns, rate = columns_ref[...], rate_ref[...]

  @pl.when(pl.program_id(2) == 0)
  def _():
    carry[...] = first_ref[...]

  starts_ref[...] = carry[...]

  def one(j, h):
    b, c, keep = _column(columns, j, len(rate))
    x, dt = x_ref[pl.ds(j, 1), :], dt_ref[pl.ds(j, 1), :]
    h = jnp.exp(dt * rate) * jnp.where(keep, h, 0.0) + dt * x * b
    y_ref[pl.ds(j, 1), :] = (h * c).sum(0, keepdims=True)
    return h

  carry[...] = lax.fori_loop(0, ROWS, one, carry[...])

  @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
  def _():
    last_ref[...] = carry[...]


def _backward(*refs):
  x_ref, dt_ref, dy_ref, columns_ref, rate_ref, starts_ref, last_ref = refs[:7]
  dx_ref, ddt_ref, dcolumns_ref, drate_ref, dfirst_ref = refs[7:12]
  kept, carry, drate = refs[12:]
  columns, rate = columns_ref[...], rate_ref[...]
  states = len(rate)
  lane = lax.broadcasted_iota(jnp.int32, dcolumns_ref.shape, 1)

  @pl.when(pl.program_id(2) == 0)
  def _():
    carry[...], drate[...] = last_ref[...], jnp.zeros_like(drate)

  def token(j):
    row, at = pl.ds(j, 1), pl.ds(pl.multiple_of(j * states, SUBLANES), states)
    return x_ref[row, :], dt_ref[row, :], row, at

  def again(j, h):
    b, _, keep = _column(columns, j, states)
    x, dt, _, at = token(j)
    before = kept[at, :] = jnp.where(keep, h, 0.0)
    return jnp.exp(dt * rate) * before + dt * x * b

  lax.fori_loop(0, ROWS, again, starts_ref[...])

  def back(i, g):
    j = ROWS - 1 - i
    b, c, keep = _column(columns, j, states)
    x, dt, row, at = token(j)
    dy, before, decay = dy_ref[row, :], kept[at, :], jnp.exp(dt * rate)
    g += c * dy
    h = decay * before + dt * x * b
    d_input = (g * b).sum(0, keepdims=True)
    d_exponent = g * decay * before
    dx_ref[row, :] = dt * d_input
    ddt_ref[row, :] = x * d_input + (d_exponent * rate).sum(0, keepdims=True)
    drate[...] += d_exponent * dt
    sums = (x * y for x, y in ((g, dt * x), (dy, h)))
    new = jnp.concatenate([z.sum(1, keepdims=True) for z in sums])
    dcolumns_ref[...] = jnp.where(lane == j, new, dcolumns_ref[...])
    return jnp.where(keep, g * decay, 0.0)

  dcolumns_ref[...] = jnp.zeros_like(dcolumns_ref)
  carry[...] = lax.fori_loop(0, ROWS, back, carry[...])

  @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
  def _():
    drate_ref[...], dfirst_ref[...] = drate[...], carry[...]


def _padded(x, sizes):
  """x with zeros behind its last axes up to multiples of `sizes`."""
  more = [(0, 0)] * (x.ndim - len(sizes))
  at = x.shape[x.ndim - len(sizes) :]
  more += [(0, -n % size) for n, size in zip(at, sizes, strict=True)]
  return jnp.pad(x, more) if any(map(sum, more)) else x


def _columns(shared_BTUS, keep_BT):
  """(B, P, T)."""
  b, c = (_padded(shared_BTUS[:, :, i], (SUBLANES,)) for i in range(2))
  keep = jnp.broadcast_to(keep_BT[..., None], (*keep_BT.shape, SUBLANES))
  columns = jnp.concatenate([b, c, keep], -1).swapaxes(1, 2)
  return _padded(columns, (ROWS,))


def _call(kernel, arrays, outs, scratch, lanes, reverse, interpret):
  """kernel of blocks; arrays and outs by what their axes are."""
  x = arrays[0][1]
  n, t, f = x.shape
  states = next(a.shape[-2] for what, a in arrays if what == 'state')
  last = t // ROWS - 1
  at = (lambda i: last - i) if reverse else (lambda i: i)
  specs = dict(
    tokens=pl.BlockSpec((None, ROWS, lanes), lambda n, d, i: (n, at(i), d)),
    rate=pl.BlockSpec((states, lanes), lambda n, d, i: (0, d)),
    state=pl.BlockSpec((None, states, lanes), lambda n, d, i: (n, 0, d)),
    starts=pl.BlockSpec(
      (None, None, states, lanes), lambda n, d, i: (n, at(i), 0, d)
    ),
    columns=pl.BlockSpec(
      (None, 2 * states + SUBLANES, ROWS), lambda n, d, i: (n, 0, at(i))
    ),
    partial=pl.BlockSpec(
      (None, None, 2 * states, ROWS), lambda n, d, i: (n, d, 0, at(i))
    ),
  )
  shapes = dict(
    tokens=x.shape, state=(n, states, f), starts=(n, t // ROWS, states, f),
    partial=(n, f // lanes, 2 * states, t),
  )  # fmt: skip
  moved = sum(a.nbytes for _, a in arrays)
  moved += sum(4 * functools.reduce(int.__mul__, shapes[o]) for o in outs)
  return pl.pallas_call(
    kernel,
    name=f'selective_scan_tpu{kernel.__name__}',
    grid=(n, f // lanes, t // ROWS),
    in_specs=[specs[what] for what, _ in arrays],
    out_specs=[specs[what] for what in outs],
    out_shape=[varying.result(x, shapes[o], jnp.float32) for o in outs],
    scratch_shapes=[
      pltpu.VMEM((size * states, lanes), jnp.float32) for size in scratch
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary')
    ),
    cost_estimate=pl.CostEstimate(
      flops=(24 if reverse else 6) * x.size * states,
      bytes_accessed=moved,
      transcendentals=(2 if reverse else 1) * x.size * states,
    ),
    interpret=interpret,
  )(*(a for _, a in arrays))


def _blocks(tokens, rate_SF):
  """([(what, array)] of x, dt, columns, rate; lanes of a block)."""
  states = -(-len(rate_SF) // SUBLANES) * SUBLANES
  f = -(-rate_SF.shape[1] // LANES) * LANES
  lanes = LANES
  while (
    2 * lanes <= MOST_LANES
    and f % (2 * lanes) == 0
    and 2 * lanes * ROWS * states <= STATES
  ):
    lanes *= 2
  x, dt = (_padded(y, (ROWS, LANES)) for y in (tokens.x, tokens.dt))
  keep = (~tokens.reset).astype(jnp.float32)
  # Of tokens that fill up: dt = 0 writes nothing, and they keep the state.
  t = x.shape[1] - keep.shape[1]
  keep = jnp.pad(keep, [(0, 0), (0, t)], constant_values=1.0)
  shared = jnp.pad(tokens.shared, [(0, 0), (0, t), (0, 0), (0, 0)])
  rate = _padded(rate_SF, (SUBLANES, LANES))
  both = ('tokens', x), ('tokens', dt)
  return both, ('columns', _columns(shared, keep)), ('rate', rate), lanes


def forward(tokens, rate_SF, state_BSF, interpret=False):
  """-> (y_BTF, state_BSF after, states at the starts of blocks)."""
  both, columns, rate, lanes = _blocks(tokens, rate_SF)
  state = 'state', _padded(state_BSF, (SUBLANES, LANES))
  arrays, outs = [*both, columns, rate, state], ('tokens', 'state', 'starts')
  y, last, starts = _call(_forward, arrays, outs, (1,), lanes, False, interpret)
  (t, f), s = tokens.x.shape[1:], len(rate_SF)
  return y[:, :t, :f], last[:, :s, :f], starts


def backward(tokens, rate_SF, starts, dy_BTF, dstate_BSF, interpret=False):
  """-> (dx, ddt, dshared_BTUS, drate_SF, d of the first state_BSF)."""
  both, columns, rate, lanes = _blocks(tokens, rate_SF)
  dy = 'tokens', _padded(dy_BTF, (ROWS, LANES))
  last = 'state', _padded(dstate_BSF, (SUBLANES, LANES))
  arrays = [*both, dy, columns, rate, ('starts', starts), last]
  outs = 'tokens', 'tokens', 'partial', 'state', 'state'
  dx, ddt, partial, drate, dfirst = _call(
    _backward, arrays, outs, (ROWS, 1, 1), lanes, True, interpret
  )
  (t, f), s = tokens.x.shape[1:], len(rate_SF)
  b, c = jnp.split(partial.sum(1)[..., :t].swapaxes(1, 2), 2, -1)
  shared = jnp.stack([b[..., :s], c[..., :s]], 2)
  cut = lambda x: x[:, :s, :f]
  dx, ddt = (x[:, :t, :f] for x in (dx, ddt))
  return dx, ddt, shared, cut(drate).sum(0), cut(dfirst)
