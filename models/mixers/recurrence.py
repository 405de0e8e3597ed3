"""The recurrences of mixers on packed rows, in every layout.

Each wraps an op of pallas_kernels/: padding leaves the state unchanged, the
state is reset where a document begins, the op runs in one manual region, and
the state crosses shards of the length (sharding/sequence/scan.py).

Legend: B rows, T tokens, N heads, K key width, V value width, H head width, W
taps, S or M numbers a channel, D or F channels, U inputs of a cell.
"""

import math

import jax
import jax.numpy as jnp

from paraxis.models import aux as aux_lib
from paraxis.models.mixers import protocol as mixer
from paraxis.sharding import annotate
from paraxis.sharding.sequence import scan

WIDE = mixer.WIDE
CHANNELS = ('batch', 'mlp', None)
RATES = ('mlp', None)
HIDDEN = ('batch', 'heads', 'head_dim')
SHARED = ('batch', 'length', None, None)  # read by all channels of a token

FEW = 8  # tokens: fewer are scanned one by one
# Of a solve: 1, iterations, residual, sequential fallbacks.
COUNTS = 4
LARGE = 1e30  # stands for an infinite residual there


def gated_scan(q, k, v, log_decay, see, layout, state=None, impl='auto'):
  """The gated scan of packed rows (pallas_kernels/scans/gated.py).

  Args:
    q, k: (B, T, G, K), G divides N. v: (B, T, N, V). log_decay: (B, T, N, K)
      or (B, T, N). Laid out as HEADS.
    see: attention.Visibility. layout: parameter.Layout.
    state: (B, N, K, V), or None: zeros. impl: schema.Model.scan.

  Returns:
    (o_BTNV, state), laid out as HEADS and STATE.
  """
  ok = mixer.valid(see)
  k, log_decay = _where(ok, k), _where(ok, log_decay)
  # A few tokens cost less one by one.
  impl = 'loop' if q.shape[1] < FEW and impl == 'auto' else impl

  def run(q, k, v, log_decay, reset, first=None):
    return scan.gated(q, k, v, log_decay, reset, first, layout.scan, impl=impl)

  decays = mixer.HEADS[: log_decay.ndim]
  names = [*[mixer.HEADS] * 3, decays, mixer.ROWS]
  arrays = [q, k, v, log_decay, mixer.resets(see)]
  if state is not None:
    names, arrays = [*names, mixer.STATE], [*arrays, state]
  return annotate.region(run, names, (mixer.HEADS, mixer.STATE))(*arrays)


def conv(x, w, names, see, layout, tail=None, dilation=1):
  """Causal convolution of packed rows, channel by channel.

  Args:
    x: (B, T, ...), laid out by `names`. w: (W, ...), its taps.
    tail: (B, (W - 1) dilation, ...) tokens before the row, or None: zeros.

  Returns:
    (y, tail): as x, and the last valid tokens.
  """
  w_names, tail_names = (None, *names[2:]), (names[0], None, *names[2:])
  if tail is None:
    shape = x.shape[0], (w.shape[0] - 1) * dilation, *x.shape[2:]
    tail = mixer.state(tail_names, *shape, dtype=x.dtype)

  def run(x, w, positions, ok, tail):
    y, last = scan.causal_conv(
      _flat(x), _flat(w, 1), positions, _flat(tail), ok, layout.scan,
      dilation=dilation,
    )  # fmt: skip
    return y.reshape(x.shape), last.reshape(tail.shape).astype(tail.dtype)

  rows = (names, w_names, mixer.ROWS, mixer.ROWS, tail_names)
  return annotate.region(run, rows, (names, tail_names))(
    x, w, see.positions, mixer.valid(see), tail
  )


def silu_convs(module, names, inputs, see, tails):
  """silu(convolution) of each input by the taps NAME_conv of a module.

  Args:
    names: of the inputs, which are laid out as HEADS. tails: of each, or None.

  Returns:
    ([those], [tails]).
  """
  pairs = [
    conv(
      x, getattr(module, f'{name}_conv')[...], mixer.HEADS, see, module.layout,
      tail,
    )
    for name, x, tail in zip(names, inputs, tails, strict=True)
  ]  # fmt: skip
  return [jax.nn.silu(y) for y, _ in pairs], [tail for _, tail in pairs]


def delta_scan(tokens, see, layout, state=None, impl='auto'):
  """The gated delta rule on packed rows (pallas_kernels/scans/delta.py).

  Args:
    tokens: q, k (B, T, G, K), G divides N; v (B, T, N, V); log decays and beta
      (B, T, N). Laid out as HEADS.
    see: attention.Visibility. layout: parameter.Layout.
    state: (B, N, K, V), or None: zeros. impl: schema.Model.scan.

  Returns:
    (o_BTNV, state), laid out as HEADS and STATE.
  """
  ok, length = mixer.valid(see), tokens[0].shape[1]
  tokens = [*tokens[:3], *(_where(ok, x) for x in tokens[3:])]
  impl = 'loop' if length < FEW and impl == 'auto' else impl

  def run(*arrays):
    *tokens, reset, first = (*arrays, None)[:7]
    return scan.delta(tokens, reset, first, layout.scan, impl=impl)

  names = [*[mixer.HEADS] * 3, *[mixer.HEADS[:3]] * 2, mixer.ROWS]
  arrays = [*tokens, mixer.resets(see)]
  if state is not None:
    names, arrays = [*names, mixer.STATE], [*arrays, state]
  return annotate.region(run, names, (mixer.HEADS, mixer.STATE))(*arrays)


def selective_scan(x, dt, shared, rate, see, layout, state=None):
  """The scan of Mamba (pallas_kernels/scans/selective.py) of packed rows.

  Args:
    x, dt: (B, T, F), laid out as WIDE. shared: (B, T, 2, S), B and C, laid out
      as SHARED. rate: (F, S), A, laid out as RATES. All in the dtype of the
      sums.
    see: attention.Visibility. layout: parameter.Layout.
    state: (B, F, S), or None: zeros.

  Returns:
    (y_BTF, state), laid out as WIDE and CHANNELS.
  """
  dt = _where(mixer.valid(see), dt)  # a step of 0 changes nothing

  def run(x, dt, shared, rate, reset, first=None):
    return scan.selective(x, dt, shared, rate, reset, first, layout.scan)

  names = [WIDE, WIDE, SHARED, RATES, mixer.ROWS]
  arrays = [x, dt, shared, rate, mixer.resets(see)]
  if state is not None:
    names, arrays = [*names, CHANNELS], [*arrays, state]
  return annotate.region(run, names, (WIDE, CHANNELS))(*arrays)


def linear_scan(log_a, b, see, layout, state=None):
  """The linear scan (pallas_kernels/scans/linear.py) of packed rows.

  Args:
    log_a, b: (B, T, N, H), laid out as HEADS, in the dtype of the sums; the
      factor of the first token of a document is not used.
    see: attention.Visibility. layout: parameter.Layout.
    state: (B, N, H), or None: zeros.

  Returns:
    (h_BTNH, state), laid out as HEADS and HIDDEN.
  """
  ok = mixer.valid(see)
  log_a, b = _where(ok, log_a), _where(ok, b)
  if state is None:
    state = mixer.state(HIDDEN, b.shape[0], *b.shape[2:], dtype=b.dtype)

  def run(log_a, b, reset, first):
    h, last = scan.linear(
      _flat(log_a), _flat(b), reset, _flat(first, 1), layout.scan
    )
    return h.reshape(b.shape), last.reshape(first.shape)

  names = (mixer.HEADS, mixer.HEADS, mixer.ROWS, HIDDEN)
  return annotate.region(run, names, (mixer.HEADS, HIDDEN))(
    log_a, b, mixer.resets(see), state
  )


def newton_scan(cell, weights, inputs, see, module, state=None):
  """A nonlinear recurrence on packed rows (pallas_kernels/scans/newton.py).

  Args:
    cell: (a_GD, h_..MD, u_..UD) -> h_..MD, a function of a module.
    weights: recurrent weights a_GNH, a Flax variable.
    inputs: U arrays (B, T, N, H), laid out as HEADS.
    see: attention.Visibility.
    module: the recurrent.Recurrent; its config, layout and `numbers` M are
      read.
    state: (B, M, N, H) or None: zeros.

  Returns:
    (h_BTNH, the last of the M numbers; state), laid out as HEADS and the
    state; and a part of COUNTS of every device.
  """
  own, layout = module.config.recurrent, module.layout
  names = mixer.TAIL  # of the state, too
  few = inputs[0].shape[1] < FEW and layout.scan is None
  options = dict(
    tol=own.tolerance, cap=own.iterations, bound=own.bound,
    unsolved='error' if own.strict else 'loop',
  )  # fmt: skip
  if state is None:
    shape = inputs[0].shape[0], module.numbers, *inputs[0].shape[2:]
    state = mixer.state(names, *shape, dtype=inputs[0].dtype)

  def run(a, reset, ok, first, *inputs):
    u, wide = jnp.stack([_flat(x) for x in inputs], 2), inputs[0].dtype
    a = _flat(a, 1).astype(wide)
    rows = (a, u, reset, _flat(first).astype(wide), ok)
    if few or own.solver == 'sequential':
      h = _sequential(cell, *rows)
      last, took = h[:, -1], jnp.zeros(COUNTS, wide)
    else:
      h, last, took = scan.newton(cell, *rows, layout.scan, **options)
      worst = jnp.minimum(took.residual, LARGE)  # NaN stays
      took = 1, took.iterations, worst, took.fell_back
      took = jnp.stack([jnp.asarray(x, wide) for x in took])
    h = h[:, :, -1].reshape(inputs[0].shape)
    took = aux_lib.part(jax.lax.stop_gradient(took))
    return h, last.reshape(first.shape), took

  rows = [weights.get_metadata('axes'), mixer.ROWS, mixer.ROWS, names]
  rows += [mixer.HEADS] * len(inputs)
  outs = mixer.HEADS, names, annotate.everywhere()
  return annotate.region(run, rows, outs)(
    weights[...], mixer.resets(see), mixer.valid(see), state, *inputs
  )


def _sequential(cell, a, u_BTUD, reset_BT, first_BMD, valid_BT):
  """h_BTMD, token by token."""

  def one(h, row):
    u, reset, ok = row
    at = lambda mark: mark[:, None, None]
    h = jnp.where(at(ok), cell(a, jnp.where(at(reset), 0, h), u), h)
    return h, h

  time = lambda x: jnp.swapaxes(x, 0, 1)
  rows = tuple(map(time, (u_BTUD, reset_BT, valid_BT)))
  return time(jax.lax.scan(one, first_BMD, rows)[1])


def _where(ok_BT, x):
  """x, 0 at padding."""
  return jnp.where(ok_BT.reshape(*ok_BT.shape, *[1] * (x.ndim - 2)), x, 0)


def _flat(x, keep=2):
  return x.reshape(*x.shape[:keep], math.prod(x.shape[keep:]))
