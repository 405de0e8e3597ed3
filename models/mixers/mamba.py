"""Mamba-2 and Mamba: state space layers whose decay every token chooses.

Mamba-2 (arXiv:2405.21060, section 7), per head of P channels, S numbers each:

    S_t = e^(dt_t A) S_(t-1) + B_t (dt_t x_t)^T     o_t = S_t^T C_t + D x_t
    y = rms(o * silu(z)) W_o         dt = softplus(x W_dt + b)    A = -e^(A_log)

(dt not below mamba.step_floor).

x, B and C pass a short causal convolution and SiLU; heads of a group share B
and C, and the mean of the norm (of all heads where there is one group). That is
a gated scan with one decay a head: q = C, k = B, v = dt x. Cost as there
(pallas_kernels/scans/gated.py), with one B and C for the heads of a group.

Mamba (arXiv:2312.00752, section 3) gives every channel f its own decays:

    h_tfs = e^(dt_tf A_fs) h_(t-1)fs + dt_tf x_tf B_ts
    y = ((sum_s C_ts h_tfs + D_f x_tf) * silu(z_f)) W_o

with dt through a map of low rank. h is read in chunks of tokens as it passes
(pallas_kernels/scans/selective.py): memory is O(T F + sqrt(T) F S), in
float32, gradients with it.

Decoding keeps the state and the last inputs of the convolutions, at any length.
A group of Mamba-2 may have heads on several tensor shards; B, C and the squares
of the norm are small and are gathered.

Legend: B rows, T tokens, D model, N heads, P head width, G groups, S numbers of
the state, F inner width, R rank of the steps, W taps, C 2: B and C.
"""

import functools
import math

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import aux as aux_lib
from paraxis.models import norm
from paraxis.models import parameter
from paraxis.models.mixers import protocol as mixer
from paraxis.models.mixers import recurrence
from paraxis.sharding import annotate

PER_HEAD = mixer.HEADS[:3]
# B and C: as they are projected, and as the heads of a shard read them.
SHARED = ('batch', 'residual_length', None, None, None)
SHARED_ROWS = ('batch', 'length', None, None, None)
WIDE = mixer.WIDE


def inner(config):
  """Inner width F of a schema.Model (of kind M, unless it counts heads)."""
  return config.mamba.expand * config.d_model


def num_heads(config):
  """N, of the whole model: a manual region sees fewer (kind M)."""
  return config.mamba.heads or inner(config) // config.mamba.head_dim


def step_rank(config):
  """R: rank of the map to step sizes (kind S)."""
  return config.mamba.dt_rank or -(-config.d_model // 16)


def _drawn(value, axes):
  """A parameter with random values and no weight decay: kind 'vector'."""
  return nnx.Param(value, axes=axes, kind='vector', inputs=0)


def _step_bias(rngs, config, shape, axes):
  """b with softplus(b) log-uniform between dt_min and dt_max."""
  low, high = (math.log(x) for x in (config.mamba.dt_min, config.mamba.dt_max))
  dt = jnp.exp(jax.random.uniform(rngs.params(), shape) * (high - low) + low)
  return _drawn(dt + jnp.log(-jnp.expm1(-dt)), axes)


def _taps(rngs, config, shape, axes):
  return parameter.taps(rngs, config.mamba.conv_width, shape, axes)


class _Mamba(mixer.Mixer):
  """The convolutions, step sizes and rates of both."""

  capabilities = mixer.RECURRENT
  step_bias: nnx.Param
  a_log: nnx.Param

  def _conv(self, name, x, names, see, tail):
    """silu(convolution + bias) -> (x, tail)."""
    taps, bias = (getattr(self, f'{name}_{n}')[...] for n in ('conv', 'bias'))
    y, tail = recurrence.conv(x, taps, names, see, self.layout, tail)
    return jax.nn.silu((y + bias).astype(x.dtype)), tail

  def _steps(self, dt):
    """softplus, in at least float32: small steps must not round."""
    wide = jnp.promote_types(dt.dtype, jnp.float32)
    return jax.nn.softplus(dt.astype(wide) + self.step_bias[...].astype(wide))

  def _rate(self, dtype):
    """A < 0."""
    return -jnp.exp(self.a_log[...].astype(dtype))


class Mamba2(_Mamba):
  """x_BTD -> y_BTD; state: S_BNSP and the tails of x and of (B, C)."""

  name = 'mamba2'

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    super().__init__(config, rngs, kind, layout)
    own, d, heads = config.mamba, config.d_model, mixer.HEADS[2:]
    p, g, s = own.head_dim, own.groups, own.state
    n = num_heads(config)
    make = functools.partial(parameter.matrix, rngs, std=config.init_std)
    self.gate = make((d, n, p), ('embed', *heads))
    self.value = make((d, n, p), ('embed', *heads))
    self.step = make((d, n), ('embed', 'heads'))
    shared = (None, None, None)
    self.shared = make((d, 2, g, s), ('embed', *shared))
    self.value_conv = _taps(rngs, config, (n, p), heads)
    self.shared_conv = _taps(rngs, config, (2, g, s), shared)
    self.value_bias = parameter.vector((n, p), heads)
    self.shared_bias = parameter.vector((2, g, s), shared)
    self.step_bias = _step_bias(rngs, config, (n,), ('heads',))
    rates = jax.random.uniform(rngs.params(), (n,), minval=1.0, maxval=16.0)
    self.a_log = _drawn(jnp.log(rates), ('heads',))
    self.skip = parameter.vector((n,), ('heads',), 1.0)
    self.norm = parameter.vector((n, p), heads, 1.0)
    gain = (2 * config.num_layers) ** -0.5
    self.output = make((n, p, d), (*heads, 'embed'), inputs=2, gain=gain)

  def __call__(self, x_BTD, see, state=None):
    x, z, dt = parameter.multiply(
      self,
      x_BTD,
      mixer.RESIDUAL,
      [
        ('value', 'BTD,DNP->BTNP', mixer.HEADS),
        ('gate', 'BTD,DNP->BTNP', mixer.HEADS),
        ('step', 'BTD,DN->BTN', PER_HEAD),
      ],
      'qkv',
    )
    (shared,) = self._project(
      x_BTD, mixer.RESIDUAL, 'BTD,DCGS->BTCGS', ['shared'], SHARED
    )
    shared = annotate.move(shared, SHARED, SHARED_ROWS)
    x, z = checkpoint_name(x, 'value'), checkpoint_name(z, 'gate')
    shared, dt = checkpoint_name(shared, 'key'), checkpoint_name(dt, 'key')
    memory, tails = state or (None, (None, None))
    x, tail = self._conv('value', x, mixer.HEADS, see, tails[0])
    shared, other = self._conv('shared', shared, SHARED_ROWS, see, tails[1])
    k, q = (self._on_heads(shared[:, :, i]) for i in range(2))
    dt = self._steps(dt)
    if least := self.config.mamba.step_floor:
      dt = jnp.maximum(dt, least)
    o, memory = recurrence.gated_scan(
      q, k, (dt[..., None] * x).astype(x.dtype), dt * self._rate(dt.dtype),
      see, self.layout, memory, self.config.scan,
    )  # fmt: skip
    o = checkpoint_name(o, 'scan')
    o = o + (self.skip[...][:, None] * x).astype(o.dtype)
    o = self._normalise(o * jax.nn.silu(z))
    y = self._output(o, mixer.HEADS, 'BTNP,NPD->BTD')
    state = None if state is None else (memory, (tail, other))
    return y, state, aux_lib.NOTHING

  def _on_heads(self, x_BTGS):
    """B or C of the groups, repeated so that shards of heads divide them."""
    heads, groups = num_heads(self.config), self.config.mamba.groups
    shared = math.gcd(heads // annotate.shards('heads'), heads // groups)
    run = functools.partial(mixer.repeat_heads, heads=heads // shared)
    return annotate.region(
      run, (SHARED_ROWS[:4],), (mixer.HEADS,), single=True
    )(x_BTGS)

  def _normalise(self, x_BTNP):
    """RMSNorm over the heads of a group, times a scale."""
    y = x_BTNP.astype(jnp.promote_types(x_BTNP.dtype, jnp.float32))
    heads, groups = num_heads(self.config), self.config.mamba.groups

    def of_groups(square_BTN):
      x = annotate.move(square_BTN, PER_HEAD, (*mixer.ROWS, None))
      x = x.reshape(*x.shape[:2], groups, -1).mean(-1)
      return mixer.repeat_heads(x[..., None], heads)

    square = annotate.region(of_groups, (PER_HEAD,), (mixer.HEADS,), True)(
      jnp.mean(y * y, -1)
    )
    epsilon = self.config.mamba.norm_epsilon or self.config.norm_epsilon
    y = y * jax.lax.rsqrt(square + epsilon)
    return (y * self.norm[...]).astype(x_BTNP.dtype)

  def init_state(self, batch, slots, dtype):
    """(S_BNSP in at least float32, last inputs of the convolutions)."""
    del slots
    own, keep = self.config.mamba, self.config.mamba.conv_width - 1
    n, p = num_heads(self.config), own.head_dim
    wide = jnp.promote_types(dtype, jnp.float32)
    memory = mixer.state(mixer.STATE, batch, n, own.state, p, dtype=wide)
    tail = mixer.state(mixer.TAIL, batch, keep, n, p, dtype=dtype)
    names = ('batch', *[None] * 4)
    shape = (batch, keep, 2, own.groups, own.state)
    return memory, (tail, mixer.state(names, *shape, dtype=dtype))

  @staticmethod
  def check(config):
    """UserError if heads do not divide the inner width, or groups the heads."""
    own, width = config.mamba, inner(config)
    if not own.heads and width % own.head_dim:
      raise errors.UserError(
        f'model.mamba.expand={own.expand} times model.d_model='
        f'{config.d_model} is an inner width of {width}, which '
        f'model.mamba.head_dim={own.head_dim} does not divide.'
      )
    if num_heads(config) % own.groups:
      raise errors.UserError(
        f'model.mamba.groups={own.groups} does not divide the '
        f'{num_heads(config)} heads of kind M, each of model.mamba.head_dim='
        f'{own.head_dim}.'
      )
    _check_steps(own)

  @staticmethod
  def mixing_flops(config, kind, length):
    """The state, written and read once a token; without work within chunks."""
    own = config.mamba
    return 4 * length * num_heads(config) * own.head_dim * own.state


def _check_steps(own):
  if own.dt_min > own.dt_max:
    raise errors.UserError(
      f'model.mamba.dt_min={own.dt_min} is above model.mamba.dt_max='
      f'{own.dt_max}.'
    )


class Mamba(_Mamba):
  """x_BTD -> y_BTD; state: h_BFS and the tail of the convolution."""

  name = 'mamba'

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    super().__init__(config, rngs, kind, layout)
    own, d = config.mamba, config.d_model
    f, r, s = inner(config), step_rank(config), own.state
    make = functools.partial(parameter.matrix, rngs, std=config.init_std)
    self.gate = make((d, f), ('embed', 'mlp'))
    self.value = make((d, f), ('embed', 'mlp'))
    self.value_conv = _taps(rngs, config, (f,), ('mlp',))
    self.value_bias = parameter.vector((f,), ('mlp',))
    self.step_down = make((f, r), ('mlp', None))
    self.step_up = parameter.matrix(rngs, (r, f), (None, 'mlp'))
    self.step_bias = _step_bias(rngs, config, (f,), ('mlp',))
    self.shared = make((f, 2, s), ('mlp', None, None))
    rates = jnp.broadcast_to(jnp.arange(1.0, s + 1), (f, s))
    self.a_log = _drawn(jnp.log(rates), ('mlp', None))
    self.skip = parameter.vector((f,), ('mlp',), 1.0)
    if own.inner_norm and own.inner_norm_scale:
      self.step_norm = parameter.vector((r,), ('norm',), 1.0)
      self.shared_norm = parameter.vector((2, s), (None, 'norm'), 1.0)
    gain = (2 * config.num_layers) ** -0.5
    self.output = make((f, d), ('mlp', 'embed'), gain=gain)

  def __call__(self, x_BTD, see, state=None):
    x, z = self._project(
      x_BTD, mixer.RESIDUAL, 'BTD,DF->BTF', ('value', 'gate'), WIDE, 'qkv'
    )
    x, z = checkpoint_name(x, 'value'), checkpoint_name(z, 'gate')
    memory, tail = state or (None, None)
    x, tail = self._conv('value', x, WIDE, see, tail)
    dt, shared = self._steps_and_shared(x)
    o, memory = self._scan(x, dt, shared, see, memory)
    o = checkpoint_name(o, 'scan') * jax.nn.silu(z)
    y = self._output(o, WIDE, 'BTF,FD->BTD')
    state = None if state is None else (memory, tail)
    return y, state, aux_lib.NOTHING

  def _steps_and_shared(self, x_BTF):
    """(dt_BTF in at least float32, B and C of every token: BTCS)."""
    low, shared = parameter.multiply(
      self,
      x_BTF,
      WIDE,
      [
        ('step_down', 'BTF,FR->BTR', mixer.LOW),
        ('shared', 'BTF,FCS->BTCS', SHARED[:4]),
      ],
    )
    if self.config.mamba.inner_norm:
      low = self._inner_norm(low, 'step_norm')
      shared = self._inner_norm(shared, 'shared_norm')
    (dt,) = self._project(low, mixer.LOW, 'BTR,RF->BTF', ['step_up'], WIDE)
    dt = self._steps(checkpoint_name(dt, 'key'))
    return dt, annotate.move(shared, SHARED[:4], SHARED_ROWS[:4])

  def _inner_norm(self, x, name):
    own = self.config.mamba
    scale = getattr(self, name)[...] if own.inner_norm_scale else 1.0
    return norm.rms(x, scale, own.norm_epsilon or self.config.norm_epsilon)

  def _scan(self, x_BTF, dt_BTF, shared_BTCS, see, memory):
    """(o_BTF, h_BFS)."""
    shared = checkpoint_name(shared_BTCS, 'key').astype(dt_BTF.dtype)
    y, memory = recurrence.selective_scan(
      x_BTF.astype(dt_BTF.dtype), dt_BTF, shared, self._rate(dt_BTF.dtype),
      see, self.layout, memory,
    )  # fmt: skip
    o = y + self.skip[...] * x_BTF
    return o.astype(x_BTF.dtype), memory

  def init_state(self, batch, slots, dtype):
    """(h_BFS in at least float32, last inputs of the convolution)."""
    del slots
    own, f = self.config.mamba, inner(self.config)
    wide = jnp.promote_types(dtype, jnp.float32)
    memory = mixer.state(recurrence.CHANNELS, batch, f, own.state, dtype=wide)
    names = ('batch', None, 'mlp')
    shape = (batch, own.conv_width - 1, f)
    return memory, mixer.state(names, *shape, dtype=dtype)

  @staticmethod
  def check(config):
    """UserError if step sizes have no range."""
    _check_steps(config.mamba)

  @staticmethod
  def mixing_flops(config, kind, length):
    """The state decayed, written and read once a token."""
    return 6 * length * inner(config) * config.mamba.state
