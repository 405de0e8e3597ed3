"""Real-gated linear recurrent units (Griffin, arXiv:2402.19427, section 2.4).

    r_t = sigmoid(W_r x_t + b_r)        i_t = sigmoid(W_i x_t + b_i)
    log a_t = -8 softplus(L) r_t
    h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (i_t x_t)

channel by channel, W_r and W_i block-diagonal over heads. At the first token of
a document h_t = i_t x_t. The layer around it (section 2.3) is

    y = (gelu(u W_y + b_y) * h) W_o + b_o,    x = conv(u W_x + b_x) + b_c

with a short causal convolution. That is a linear scan
(pallas_kernels/scans/linear.py) of two products a token and channel; decoding
keeps h and the last inputs of the convolution, at any length.

The derivative of the square root is at most 1000, as in the authors' code
(arXiv:2404.07839): where a^2 is within 2.5e-7 of 1, gradients are smaller than
the derivative, and elsewhere they are it.

Legend: B rows, T tokens, D model, N heads, H and P head width, W taps.
"""

import functools

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import aux as aux_lib
from paraxis.models import parameter
from paraxis.models.mixers import protocol as mixer
from paraxis.models.mixers import recurrence

HEADS = ('embed', 'heads', 'head_dim')
GATES = ('input_gate', 'recurrent_gate')
SHARPNESS = 8.0  # c of the paper
STEEPEST = 1000.0  # derivative of the square root
# a of a channel at the start, its gate open: uniform between these.
SLOWEST, FASTEST = 0.999, 0.9


def sizes(config):
  """(heads, width of a head) of a schema.Model."""
  own = config.rg_lru
  heads = own.heads or config.num_heads
  return heads, (own.width or config.d_model) // heads


@jax.custom_jvp
def root(x: jax.Array) -> jax.Array:
  """sqrt(x), whose derivative is at most STEEPEST."""
  return jnp.sqrt(x)


@root.defjvp
def _root_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  return root(x), dx / jnp.sqrt(jnp.maximum(4 * x, STEEPEST**-2))


def _rates(rngs, shape):
  """L with e^(-8 softplus(L)) uniform from FASTEST to SLOWEST."""
  a = jax.random.uniform(rngs.params(), shape, minval=FASTEST, maxval=SLOWEST)
  return jnp.log(jnp.expm1(-jnp.log(a) / SHARPNESS))


class RgLru(mixer.Mixer):
  """x_BTD -> y_BTD; state: (h_BNH, last inputs of the convolution)."""

  name = 'rg_lru'
  capabilities = mixer.RECURRENT

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    super().__init__(config, rngs, kind, layout)
    d, width, axes = config.d_model, config.rg_lru.conv_width, HEADS[1:]
    n, h = sizes(config)
    make = functools.partial(parameter.matrix, rngs, std=config.init_std)
    self.value = make((d, n, h), HEADS)
    self.output_gate = make((d, n, h), HEADS)
    self.taps = parameter.taps(rngs, width, (n, h), axes)
    for name in GATES:  # no matrix: blocks of heads
      block = parameter.embedding(
        rngs, (n, h, h), ('heads', None, 'head_dim'), h**-0.5
      )
      setattr(self, name, block)
    self.taps_bias = parameter.vector((n, h), axes)
    for name in ('value', 'output_gate', *GATES):
      setattr(self, f'{name}_bias', parameter.vector((n, h), axes))
    self.rate = nnx.Param(
      _rates(rngs, (n, h)), axes=axes, kind='vector', inputs=0
    )
    gain = (2 * config.num_layers) ** -0.5
    self.output = make((n, h, d), (*axes, 'embed'), inputs=2, gain=gain)
    self.output_bias = parameter.vector((d,), ('norm',))

  def __call__(self, x_BTD, see, state=None):
    outs = self._project(
      x_BTD, mixer.RESIDUAL, 'BTD,DNH->BTNH', ('value', 'output_gate'),
      mixer.HEADS, 'qkv', biased=True,
    )  # fmt: skip
    x, gate = map(checkpoint_name, outs, ('value', 'gate'))
    memory, tail = state or (None, None)
    x, tail = recurrence.conv(
      x, self.taps[...], mixer.HEADS, see, self.layout, tail
    )
    x = (x + self.taps_bias[...]).astype(x.dtype)
    log_a, b = self._recurrence(x, mixer.resets(see))
    h, memory = recurrence.linear_scan(log_a, b, see, self.layout, memory)
    h = h.astype(x.dtype) * jax.nn.gelu(gate, approximate=True)
    y = self._output(h, mixer.HEADS, 'BTNP,NPD->BTD')
    y = (y + self.output_bias[...]).astype(y.dtype)
    return y, None if state is None else (memory, tail), aux_lib.NOTHING

  def _recurrence(self, x, first):
    """(log a_BTNH, inputs of the scan), in at least float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    outs = self._project(
      x, mixer.HEADS, 'BTNH,NHP->BTNP', GATES, mixer.HEADS, dtype=wide,
      biased=True,
    )  # fmt: skip
    i, r = (jax.nn.sigmoid(checkpoint_name(z, 'key')) for z in outs)
    log_a = -SHARPNESS * r * jax.nn.softplus(self.rate[...].astype(wide))
    left = root(-jnp.expm1(2 * log_a))
    left = jnp.where(first[..., None, None], 1, left)
    return log_a, left * i * x.astype(wide)

  def init_state(self, batch, slots, dtype):
    """(h_BNH in at least float32, tail_BWNH), zeros."""
    del slots
    n, h = sizes(self.config)
    wide = jnp.promote_types(dtype, jnp.float32)
    memory = mixer.state(recurrence.HIDDEN, batch, n, h, dtype=wide)
    keep = self.config.rg_lru.conv_width - 1
    return memory, mixer.state(mixer.TAIL, batch, keep, n, h, dtype=dtype)

  @staticmethod
  def check(config):
    """UserError if the blocks do not divide the width."""
    own = config.rg_lru
    heads, width = own.heads or config.num_heads, own.width or config.d_model
    if width % heads:
      raise errors.UserError(
        f'model.rg_lru.width={width} is not divisible by model.rg_lru.heads='
        f'{heads} (0: model.d_model, model.num_heads).'
      )

  @staticmethod
  def mixing_flops(config, kind, length):
    """Taps of every channel, the blocks of both gates, and the scan."""
    n, h = sizes(config)
    return 2 * length * n * h * (config.rg_lru.conv_width + 2 * h + 1)
