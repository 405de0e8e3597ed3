"""Nonlinear recurrent cells, trained on all tokens at once (arXiv:2510.21450).

ParaGRU (kind R), one number h a channel:
    z = sigmoid(a_z h + u_z)    r = sigmoid(a_r h + u_r)
    c = tanh(a_c h r + u_c)     h' = (1 - z) h + z c
ParaLSTM (kind L), two numbers (c, h) a channel:
    f = sigmoid(a_f h + p_f c + u_f)     c' = f c + (1 - f) tanh(a_c h + u_c)
    o = sigmoid(a_o h + p_o c' + u_o)    h' = o tanh(c')
with diagonal recurrent weights a, p and u = B x + b, B block-diagonal over
heads. So the channels of a cell are independent, and Newton's method solves a
whole sequence with scans (pallas_kernels/scans/newton.py). Around the cell, as
in Mamba:

    y = (rms(h silu(g)) W_o),   x -> (W_x x, W_g x), W_x x through a short
                                causal convolution and silu

The solver's iterations, residual and fallbacks leave a layer beside y
(models/aux.py) and become the metrics newton/*.

Legend: B rows, T tokens, D model, N heads, H head width, M numbers a channel,
W taps.
"""

from collections.abc import Callable
from typing import ClassVar

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

HEADS = ('embed', 'heads', 'head_dim')


def gru(params, h_MD, u_3D):
  """ParaGRU; params: a_3D."""
  a, h = params, h_MD[..., 0, :]
  z = jax.nn.sigmoid(a[0] * h + u_3D[..., 0, :])
  r = jax.nn.sigmoid(a[1] * h + u_3D[..., 1, :])
  c = jnp.tanh(a[2] * h * r + u_3D[..., 2, :])
  return ((1 - z) * h + z * c)[..., None, :]


def lstm(params, h_MD, u_3D):
  """ParaLSTM; params: (a_f, a_c, a_o, p_f, p_o) as a_5D; M is (c, h)."""
  a, c, h = params, h_MD[..., 0, :], h_MD[..., 1, :]
  f = jax.nn.sigmoid(a[0] * h + a[3] * c + u_3D[..., 0, :])
  c = f * c + (1 - f) * jnp.tanh(a[1] * h + u_3D[..., 1, :])
  o = jax.nn.sigmoid(a[2] * h + a[4] * c + u_3D[..., 2, :])
  return jnp.stack([c, o * jnp.tanh(c)], -2)


class Recurrent(mixer.Mixer):
  """x_BTD -> y_BTD; state: (h_BMNH, last inputs of the convolution).

  A new cell is a subclass with `cell`, of any M, `numbers` M and `gates` (rows
  of recurrent weights). `cell` works channel by channel on any leading
  dimensions; its Jacobian is taken by M directional derivatives.
  """

  name = 'recurrent'
  capabilities = mixer.RECURRENT
  cell: ClassVar[Callable]
  numbers = 1
  gates = 3

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    super().__init__(config, rngs, kind, layout)
    own, d, std = config.recurrent, config.d_model, config.init_std
    n = own.heads
    h = d // n
    self.input = parameter.matrix(rngs, (d, n, h), HEADS, std=std)
    self.output_gate = parameter.matrix(rngs, (d, n, h), HEADS, std=std)
    self.taps = parameter.taps(rngs, own.conv_width, (n, h), HEADS[1:])
    for i in range(3):  # no matrix: blocks of heads
      block = parameter.embedding(
        rngs, (n, h, h), ('heads', None, 'head_dim'), h**-0.5
      )
      setattr(self, f'block_{i}', block)
    # The first gate starts closed by degrees: channels forget at many speeds.
    first = -jnp.linspace(0, 1, d).reshape(1, n, h)
    bias = jnp.concatenate([first, jnp.zeros((2, n, h))])
    axes = (None, *HEADS[1:])
    self.bias = nnx.Param(bias, axes=axes, kind='vector', inputs=0)
    self.recurrent = parameter.diagonal(
      rngs, (self.gates, n, h), axes, own.init_std or 2 * (5 * d) ** -0.5
    )
    self.norm = parameter.vector((n, h), HEADS[1:], 1.0)
    self.output = parameter.matrix(
      rngs, (n, h, d), (*HEADS[1:], 'embed'), inputs=2, std=std,
      gain=(2 * config.num_layers) ** -0.5,
    )  # fmt: skip

  def __call__(self, x_BTD, see, state=None):
    outs = self._project(
      x_BTD, mixer.RESIDUAL, 'BTD,DNH->BTNH', ('input', 'output_gate'),
      mixer.HEADS, 'qkv',
    )  # fmt: skip
    x, gate = map(checkpoint_name, outs, ('query', 'gate'))
    memory, tail = state or (None, None)
    x, tail = recurrence.conv(
      x, self.taps[...], mixer.HEADS, see, self.layout, tail
    )
    x = jax.nn.silu(x)
    h, memory, took = recurrence.newton_scan(
      type(self).cell,
      self.recurrent,
      self._inputs(x),
      see,
      self,
      memory,
    )
    h = checkpoint_name(h.astype(x.dtype), 'scan')
    h = norm.rms(
      h * jax.nn.silu(gate), self.norm[...], self.config.norm_epsilon,
      axis=(-2, -1), name='heads',
    )  # fmt: skip
    y = self._output(h, mixer.HEADS, 'BTNP,NPD->BTD')
    aux = aux_lib.NOTHING._replace(tallies={'newton': took})
    return y, None if state is None else (memory, tail), aux

  def _inputs(self, x):
    """[u_BTNH of each of three gates], in at least float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    blocks = [f'block_{i}' for i in range(3)]
    outs = self._project(
      x, mixer.HEADS, 'BTNH,NHP->BTNP', blocks, mixer.HEADS, dtype=wide
    )
    bias = self.bias[...].astype(wide)
    return [u + bias[i] for i, u in enumerate(outs)]

  def init_state(self, batch, slots, dtype):
    """(h_BMNH in at least float32, tail_BWNH), zeros."""
    del slots
    own, d = self.config.recurrent, self.config.d_model
    n, h = own.heads, d // own.heads
    wide = jnp.promote_types(dtype, jnp.float32)
    memory = mixer.state(mixer.TAIL, batch, self.numbers, n, h, dtype=wide)
    tail = mixer.state(mixer.TAIL, batch, own.conv_width - 1, n, h, dtype=dtype)
    return memory, tail

  @staticmethod
  def check(config):
    """UserError if the blocks do not divide the width."""
    heads = config.recurrent.heads
    if config.d_model % heads:
      raise errors.UserError(
        f'model.d_model={config.d_model} is not divisible by '
        f'model.recurrent.heads={heads}.'
      )

  @staticmethod
  def check_context(config, length):
    """UserError if the solver cannot cross shards of the length."""
    if config.recurrent.solver == 'sequential':
      raise errors.UserError(
        "model.recurrent.solver='sequential' solves token by token, and "
        "mesh.context shards the length: take 'newton'."
      )

  @staticmethod
  def mixing_flops(config, kind, length):
    """Products of its blocks; the cell itself is element-wise."""
    d = config.d_model
    return 6 * length * d * d // config.recurrent.heads


class ParaGRU(Recurrent):
  """One number a channel."""

  name = 'gru'
  cell = staticmethod(gru)


class ParaLSTM(Recurrent):
  """Two numbers a channel."""

  name = 'lstm'
  cell = staticmethod(lstm)
  numbers = 2
  gates = 5
