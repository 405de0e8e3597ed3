"""Gated linear attention (arXiv:2312.06635): a matrix state, forgotten by row.

    S_t = diag(a_t) S_(t-1) + k_t v_t^T       a_t = sigmoid(W2 W1 x + b)^(1/c)
    o_t = S_t^T q_t / sqrt(K)                 y = (rms(o) * silu(W_r x)) W_o

per head, with keys of width K and values of width V (section 4; c =
gate_normaliser). Training runs in chunks (pallas_kernels/scans/gated.py);
decoding keeps S alone: K V numbers a head at any length. Cost: 4 T K V flops a
head beyond the projections, and as much within chunks. With conv_width q, k and
v pass a short causal convolution (not in the paper).

Legend: B rows, T tokens, D model, N heads, H head width (K of q and k, V of v),
R rank of the decays, W taps.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import aux as aux_lib
from paraxis.models import norm
from paraxis.models import parameter
from paraxis.models.mixers import protocol as mixer
from paraxis.models.mixers import recurrence

INPUTS = ('query', 'key', 'value')


def sizes(config):
  """(heads, key width, value width) of a head, of a schema.Model."""
  own = config.gated_linear
  heads = own.heads or config.num_heads
  wide = lambda expand: round(config.d_model * expand) // heads
  return heads, wide(own.key_expand), wide(own.value_expand)


class GatedLinear(mixer.Mixer):
  """x_BTD -> y_BTD; state: S_BNKV and the tails of the convolutions."""

  name = 'gated_linear'
  capabilities = mixer.RECURRENT

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    super().__init__(config, rngs, kind, layout)
    own, d, heads = config.gated_linear, config.d_model, mixer.HEADS[2:]
    n, k, v = sizes(config)
    make = functools.partial(parameter.matrix, rngs, std=config.init_std)
    self.query = make((d, n, k), ('embed', *heads))
    self.key = make((d, n, k), ('embed', *heads))
    self.value = make((d, n, v), ('embed', *heads))
    self.output_gate = make((d, n, v), ('embed', *heads))
    r = own.gate_rank
    self.decay_down = make((d, r), ('embed', None))
    self.decay_up = make((r, n, k), (None, *heads))
    self.decay_bias = parameter.vector((n, k), heads)
    self.output_norm = parameter.vector((v,), ('norm',), 1.0)
    gain = (2 * config.num_layers) ** -0.5
    self.output = make((n, v, d), (*heads, 'embed'), inputs=2, gain=gain)
    if own.conv_width:
      for name, wide in (('query', k), ('key', k), ('value', v)):
        taps = parameter.taps(rngs, own.conv_width, (n, wide), heads)
        setattr(self, f'{name}_conv', taps)

  def __call__(self, x_BTD, see, state=None):
    outs = self._project(
      x_BTD, mixer.RESIDUAL, 'BTD,DNH->BTNH', (*INPUTS, 'output_gate'),
      mixer.HEADS, 'qkv',
    )  # fmt: skip
    *inputs, r = map(checkpoint_name, outs, (*INPUTS, 'gate'))
    decay = self._log_decay(x_BTD)
    memory, tails = state or (None, (None,) * 3)
    if self.config.gated_linear.conv_width:
      inputs, tails = recurrence.silu_convs(self, INPUTS, inputs, see, tails)
    q, k, v = inputs
    q = parameter.scaled(q, q.shape[-1] ** -0.5)
    o, memory = recurrence.gated_scan(
      q, k, v, decay, see, self.layout, memory, self.config.scan
    )
    o = checkpoint_name(o, 'scan')
    o = norm.rms(o, self.output_norm[...], self.config.norm_epsilon)
    y = self._output(o * jax.nn.silu(r), mixer.HEADS, 'BTNP,NPD->BTD')
    state = None if state is None else (memory, tuple(tails))
    return y, state, aux_lib.NOTHING

  def _log_decay(self, x):
    """log a_BTNK <= 0, in at least float32: small decays must not round."""
    (low,) = self._project(
      x, mixer.RESIDUAL, 'BTD,DR->BTR', ['decay_down'], mixer.LOW
    )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    (z,) = self._project(
      low, mixer.LOW, 'BTR,RNH->BTNH', ['decay_up'], mixer.HEADS, dtype=wide
    )
    bias = self.decay_bias[...].astype(wide)
    return (
      jax.nn.log_sigmoid(z + bias) / self.config.gated_linear.gate_normaliser
    )

  def init_state(self, batch, slots, dtype):
    """(S_BNKV in at least float32, last inputs of the convolutions)."""
    del slots
    n, k, v = sizes(self.config)
    wide = jnp.promote_types(dtype, jnp.float32)
    memory = mixer.state(mixer.STATE, batch, n, k, v, dtype=wide)
    keep = self.config.gated_linear.conv_width - 1
    tails = (None,) * 3
    if keep >= 0:
      tails = tuple(
        mixer.state(mixer.TAIL, batch, keep, n, width, dtype=dtype)
        for width in (k, k, v)
      )
    return memory, tails

  @staticmethod
  def check(config):
    """UserError if heads do not divide the widths of keys or values."""
    own = config.gated_linear
    heads = own.heads or config.num_heads
    for field in ('key_expand', 'value_expand'):
      width = round(config.d_model * getattr(own, field))
      if width < heads or width % heads:
        raise errors.UserError(
          f'model.gated_linear.{field}={getattr(own, field)} of model.d_model='
          f'{config.d_model} is a width of {width}, which {heads} heads '
          '(model.gated_linear.heads) do not divide.'
        )

  @staticmethod
  def mixing_flops(config, kind, length):
    """The state, written and read once a token; without work within chunks."""
    n, k, v = sizes(config)
    return 4 * length * n * k * v
