"""The scan of Mamba: S states a channel, read out at once and not stored.

    h_tfs = e^(dt_tf A_fs) h_(t-1)fs + dt_tf x_tf B_ts
    y_tf = sum_s C_ts h_tfs

(arXiv:2312.00752, section 3.2), h_(t-1) := 0 where a document starts. Decays,
inputs and states are S times as large as x and y, so they exist for one chunk
of tokens at a time: a loop over chunks of C carries the state, forward keeps
the states between chunks, and backward recomputes a chunk from its first state
(section 3.3, there by token in the kernel). Memory, in numbers:

    O(T F) + (T / C) F S + O(C F S)          C about sqrt(T): the least

and one more forward pass of work in the backward pass. On a CPU tokens are
taken one by one, row by row: decay, input and state of a token stay in
registers, and only the backward pass has the last term (F 256, S 16, T 4096,
float32: 0.08 CPU-s with gradients, 0.7 by chunks). The kernels (selective_tpu,
selective_gpu) do so too, without that term. Where neither runs (`xla`: a step
of a loop is a launch) a chunk is the linear scan (linear.py) of S F channels.

An implementation is two pure functions, without autodiff:
  forward(tokens, rate_SF, state_BSF) -> (y_BTF, last state, states in between)
  backward(tokens, rate, states in between, dy, d of the last state) -> the
    gradients of x, dt, shared, rate and the first state

`decay` and `correction` are for a length that is split over devices: gated.py.

Legend: B rows, T tokens, F channels, S numbers of the state, C tokens of a
chunk, N = T / C, U 2: B and C.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.scans import linear as linear_scan
from paraxis.pallas_kernels.scans import selective_gpu as selective_scan_gpu
from paraxis.pallas_kernels.scans import selective_tpu as selective_scan_tpu

OP = 'selective_scan'
MIN_CHUNK = 16


@dataclasses.dataclass(frozen=True)
class SelectiveScanSpec:
  """Properties of a call that decide whether an implementation can run."""

  shape: tuple[int, ...]  # B, T, F, S
  dtype: str  # of all together
  sharded: bool = False  # as in attention/op.py


class SelectiveTokens(NamedTuple):
  """Of a whole scan, (B, T, ..), or of its chunks, (N, B, C, ..).

  x, dt: (.., F). shared: (.., U, S), B before C. reset: (..) bool. Of a row
  alone without the B.
  """

  x: Any
  dt: Any
  shared: Any
  reset: Any


def selective_scan(
  x_BTF: jax.Array,
  dt_BTF: jax.Array,
  shared_BTUS: jax.Array,
  rate_FS: jax.Array,
  reset_BT: jax.Array | None = None,
  state_BFS: jax.Array | None = None,
  *,
  impl: str = 'auto',
) -> tuple[jax.Array, jax.Array]:
  """The scan of Mamba -> (y_BTF, state_BFS after the last token).

  Args:
    x_BTF: inputs. dt_BTF: steps, >= 0; 0: the token changes no state.
    shared_BTUS: B, which writes, and C, which reads. rate_FS: A <= 0.
    reset_BT: None or bool; where True the state before the token is forgotten.
    state_BFS: before the first token. None: zeros.
    impl: 'auto' or the name of a registered implementation.

  Returns:
    y and the state in the dtype of all arguments together and at least float32,
    in which all sums are made. All float arguments have gradients.

  Raises:
    errors.UserError: shapes that do not fit, or an implementation that cannot
      run here.
  """
  B, T, F = x_BTF.shape
  S = shared_BTUS.shape[-1]
  shapes = dt_BTF.shape, shared_BTUS.shape, rate_FS.shape
  if shapes != ((B, T, F), (B, T, 2, S), (F, S)):
    raise errors.UserError(
      f'{OP}: x {x_BTF.shape}, dt {dt_BTF.shape}, shared {shared_BTUS.shape}, '
      f'rate {rate_FS.shape} do not fit (B, T, F) twice, (B, T, 2, S), (F, S)'
    )
  row = jax.ShapeDtypeStruct((B, T, F, S), x_BTF.dtype)
  linear_scan.check(OP, row, reset_BT, state_BFS)
  floats = x_BTF, dt_BTF, shared_BTUS, rate_FS
  wide = jnp.result_type(*floats, jnp.float32)
  x, dt, shared, rate = (y.astype(wide) for y in floats)
  if state_BFS is None:
    state_BFS = jnp.zeros((B, F, S), wide)
  if reset_BT is None:
    reset_BT = jnp.zeros((B, T), bool)
  tokens = SelectiveTokens(x, dt, shared, reset_BT)
  arrays = tokens, _turn(rate), _turn(state_BFS).astype(wide)
  tokens, rate, state = varying.same(arrays)
  spec = SelectiveScanSpec((B, T, F, S), str(wide), registry.spread(x))
  y, state = _scan(registry.resolve(OP, impl, spec), tokens, rate, state)
  return y, _turn(state)


def _scan_forward(chosen, tokens, rate, state):
  # Named here, where they are residuals: a policy that keeps them never runs
  # the forward pass again.
  y, last, starts = (
    checkpoint_name(x, 'scan') for x in chosen.forward(tokens, rate, state)
  )
  return (y, last), (tokens, rate, starts)


def _scan_backward(chosen, residuals, cotangents):
  *gradients, d_rate, d_state = chosen.backward(*residuals, *cotangents)
  return SelectiveTokens(*gradients, reset=None), d_rate, d_state


_scan = jax.custom_vjp(
  lambda chosen, *args: chosen.forward(*args)[:2], nondiff_argnums=(0,)
)
_scan.defvjp(_scan_forward, _scan_backward)


# -------------------------------------------------------------------- chunks --


def chunk_of(length):
  """The power of two from the root of the length on, at least MIN_CHUNK."""
  return max(MIN_CHUNK, 1 << math.isqrt(length - 1).bit_length())


def _turn(x_FS):
  """(.., F, S) <-> (.., S, F): channels, of which there are many, last."""
  return jnp.swapaxes(x_FS, -1, -2)


def _split(tree):
  """(B, T, ..) -> (N, B, C, ..)."""
  return jax.tree.map(lambda x: jnp.moveaxis(jax.vmap(_cut)(x), 1, 0), tree)


def _cut(x):
  """(T, ..) -> (N, C, ..); what is added at the end changes nothing."""
  chunk = min(chunk_of(len(x)), len(x))
  x = varying.pad(x, -(-len(x) // chunk) * chunk, axis=0)
  return x.reshape(-1, chunk, *x.shape[1:])


def _join(x_NBCF, length):
  """Inverse of _split: (B, T, F)."""
  x = jnp.moveaxis(x_NBCF, 0, 1)
  return x.reshape(len(x), -1, *x.shape[3:])[:, :length]


def _chunk(impl, reset_BC, x_BCF, dt_BCF, shared_BCUS, rate_SF, state_BSF):
  """(y_BCF, state_BSF at the end) of one chunk; 'loop': of a row, without B."""
  if impl == 'loop':
    arrays = reset_BC, x_BCF, dt_BCF, shared_BCUS
    last, y = lax.scan(functools.partial(_token, rate_SF), state_BSF, arrays)
    return y, last
  b, c = (shared_BCUS[:, :, i, :, None] for i in range(2))
  decay = jnp.exp(dt_BCF[:, :, None] * rate_SF)
  inputs = (dt_BCF * x_BCF)[:, :, None] * b
  flat = lambda x, keep: x.reshape(*x.shape[:keep], -1)
  h, last = linear_scan.linear_scan(
    flat(decay, 2), flat(inputs, 2), reset_BC, flat(state_BSF, 1), impl=impl
  )
  y = (h.reshape(inputs.shape) * c).sum(2)
  return y, last.reshape(state_BSF.shape)


def _token(rate_SF, h_SF, token):
  """(h after the token, y_F)."""
  reset, x_F, dt_F, shared_US = token
  b, c = shared_US[..., None]
  h = jnp.where(reset, 0, h_SF)
  h = jnp.exp(dt_F * rate_SF) * h + dt_F * x_F * b
  return h, (h * c).sum(0)


def _run(impl, tokens, rate, state):
  """(y_NBCF, last state, states at the starts of chunks) of chunks."""

  def step(state, x):
    y, after = _chunk(impl, x.reset, x.x, x.dt, x.shared, rate, state)
    return after, (y, state)

  last, (y, starts) = lax.scan(step, state, tokens)
  return y, last, starts


def _back(impl, tokens, rate, starts, dy, d_last):
  """(dx, ddt, dshared, drate, d of the first state) of chunks."""

  def step(carry, args):
    (d_state, d_rate), (x, start, dy) = carry, args
    run = functools.partial(_chunk, impl, x.reset)
    back = jax.vjp(run, *x[:3], rate, start)[1]
    *gradients, more, d_state = back((dy, d_state))
    return (d_state, d_rate + more), gradients

  first = d_last, jnp.zeros_like(rate)
  first, gradients = lax.scan(step, first, (tokens, starts, dy), reverse=True)
  return *gradients, first[1], first[0]


def xla_forward(tokens, rate, state):
  """All rows, chunk by chunk."""
  y, last, starts = _run('xla', _split(tokens), rate, state)
  return _join(y, tokens.x.shape[1]), last, starts


def xla_backward(tokens, rate, starts, dy, d_last):
  """As xla_forward."""
  chunks, dy = _split((tokens, dy))
  *gradients, d_rate, d_first = _back('xla', chunks, rate, starts, dy, d_last)
  gradients = [_join(x, tokens.x.shape[1]) for x in gradients]
  return *gradients, d_rate, d_first


def _each(run, rows, rate):
  """run(a row, rate) of all rows (B, ..)."""
  if len(jax.tree.leaves(rows)[0]) > 1:
    return jax.vmap(run, (0, None))(rows, rate)
  # With an axis of 1, XLA for CPU copies what it reads, and is 4 times slower.
  one = run(jax.tree.map(lambda x: x[0], rows), rate)
  return jax.tree.map(lambda x: x[None], one)


def loop_forward(tokens, rate, state):
  """Row by row, token by token."""
  length = tokens.x.shape[1]

  def run(row, rate):
    tokens, state = row
    y, last, starts = _run('loop', jax.tree.map(_cut, tokens), rate, state)
    return y.reshape(-1, y.shape[-1])[:length], last, starts

  return _each(run, (tokens, state), rate)


def loop_backward(tokens, rate, starts, dy, d_last):
  """As loop_forward."""
  length = tokens.x.shape[1]

  def run(row, rate):
    tokens, starts, dy, d_last = row
    chunks, dy = jax.tree.map(_cut, (tokens, dy))
    *gradients, d_rate, d_first = _back(
      'loop', chunks, rate, starts, dy, d_last
    )
    gradients = [x.reshape(-1, *x.shape[2:])[:length] for x in gradients]
    return *gradients, d_rate, d_first

  *gradients, d_rate, d_first = _each(run, (tokens, starts, dy, d_last), rate)
  return *gradients, d_rate.sum(0), d_first


registry.register(
  OP,
  registry.kernel('tpu', selective_scan_tpu),
  registry.kernel('gpu', selective_scan_gpu),
  registry.Implementation(
    'loop', loop_forward, loop_backward, linear_scan.loop_supports
  ),
  registry.Implementation('xla', xla_forward, xla_backward),
)


# ------------------------------------------------------- length over devices --


def decay(dt_BTF, rate_FS, reset_BT=None):
  """What is left of a state that enters a piece: (B, F, S), 0 after a reset."""
  left = jnp.exp(dt_BTF.sum(1)[..., None] * rate_FS)
  if reset_BT is None:
    return left
  return jnp.where(reset_BT.any(1)[:, None, None], 0, left)


def correction(dt_BTF, c_BTS, rate_FS, reset_BT, state_BFS):
  """What an initial state adds to the outputs of a scan from a zero state.

      dy_tf = sum_s C_ts e^(A_fs (dt_1 + .. + dt_t)f) h_fs

  before the first reset, 0 from it on; in chunks too, and each once more in the
  backward pass. Returns dy_BTF.
  """
  rate, state = _turn(rate_FS), _turn(state_BFS)
  if reset_BT is not None:
    seen = jnp.cumsum(reset_BT.astype(jnp.int32), 1) > 0
    c_BTS = jnp.where(seen[..., None], 0, c_BTS)

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def one(row):
    total, c = row
    reach = jnp.exp(total[:, :, None] * rate) * state[:, None]
    return (reach * c[..., None]).sum(2)

  rows = _split((jnp.cumsum(dt_BTF, 1), c_BTS))
  return _join(lax.map(one, rows), dt_BTF.shape[1])
