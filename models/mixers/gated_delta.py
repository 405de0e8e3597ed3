"""Gated DeltaNet (arXiv:2412.06464): a matrix state, corrected where it reads.

    S_t = a_t S_(t-1) + k_t (b_t (v_t - a_t S_(t-1)^T k_t))^T    o_t = S_t^T q_t
    y = (rms(o) * silu(u W_z)) W_o

per head, with a_t = e^(-e^L softplus(u W_a + c)) and b_t = sigmoid(u W_b)
(section 3; `reflect`: twice that). q, k and v pass a short causal convolution
and SiLU, q and k are then of length 1, and q is divided by sqrt(K). Heads of
values follow one another by those of q and k that they share, as in Qwen3-Next.
Training runs in chunks (pallas_kernels/scans/delta.py); decoding keeps S and
the last inputs of the convolutions, at any length.

Legend: B rows, T tokens, D model, N heads of values, G heads of q and k, H head
width (K of q and k, V of v), W taps.
"""

import functools

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
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.scans import delta

INPUTS = ('query', 'key', 'value')
PER_HEAD = mixer.HEADS[:3]
EPSILON = 1e-6  # added to the square of a length
MOST = 16.0  # of rates e^L at the start, uniform from 0 on


def sizes(config):
  """(G, N, K, V) of a schema.Model."""
  own = config.gated_delta
  heads, keys = own.heads or config.num_heads, own.key_dim or config.head_width
  return heads, own.value_heads or heads, keys, own.value_dim or keys


def unit(x: jax.Array) -> jax.Array:
  """x / |x| along the last axis, in at least float32."""
  y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  return y * jax.lax.rsqrt((y * y).sum(-1, keepdims=True) + EPSILON)


class GatedDelta(mixer.Mixer):
  """x_BTD -> y_BTD; state: S_BNKV and the tails of the convolutions."""

  name = 'gated_delta'
  capabilities = mixer.RECURRENT

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    super().__init__(config, rngs, kind, layout)
    d, heads = config.d_model, mixer.HEADS[2:]
    g, n, k, v = sizes(config)
    width = config.gated_delta.conv_width
    make = functools.partial(parameter.matrix, rngs, std=config.init_std)
    for name, shape in zip(INPUTS, ((g, k), (g, k), (n, v)), strict=True):
      setattr(self, name, make((d, *shape), ('embed', *heads)))
      taps = parameter.taps(rngs, width, shape, heads)
      setattr(self, f'{name}_conv', taps)
    self.output_gate = make((d, n, v), ('embed', *heads))
    self.step = make((d, n), ('embed', 'heads'))
    self.share = make((d, n), ('embed', 'heads'))
    self.step_bias = parameter.vector((n,), ('heads',), 1.0)
    rates = jax.random.uniform(rngs.params(), (n,), minval=0.01, maxval=MOST)
    self.a_log = nnx.Param(
      jnp.log(rates), axes=('heads',), kind='vector', inputs=0
    )
    self.output_norm = parameter.vector((v,), ('norm',), 1.0)
    gain = (2 * config.num_layers) ** -0.5
    self.output = make((n, v, d), (*heads, 'embed'), inputs=2, gain=gain)

  def __call__(self, x_BTD, see, state=None):
    wide_ones = (*INPUTS, 'output_gate')
    outs = parameter.multiply(
      self,
      x_BTD,
      mixer.RESIDUAL,
      [(name, 'BTD,DNH->BTNH', mixer.HEADS) for name in wide_ones]
      + [(name, 'BTD,DN->BTN', PER_HEAD) for name in ('step', 'share')],
      'qkv',
    )
    names = (*INPUTS, 'gate', 'key', 'key')
    *inputs, gate, step, share = map(checkpoint_name, outs, names)
    memory, tails = state or (None, (None,) * 3)
    inputs, tails = recurrence.silu_convs(self, INPUTS, inputs, see, tails)
    o, memory = recurrence.delta_scan(
      self._tokens(inputs, step, share), see, self.layout, memory,
      self.config.scan,
    )  # fmt: skip
    o = checkpoint_name(o, 'scan')
    o = norm.rms(o, self.output_norm[...], self.config.norm_epsilon)
    y = self._output(o * jax.nn.silu(gate), mixer.HEADS, 'BTNP,NPD->BTD')
    state = None if state is None else (memory, tuple(tails))
    return y, state, aux_lib.NOTHING

  def _tokens(self, inputs, step_BTN, share_BTN):
    """(q, k, v, log decay, share) as the scan takes them.

    The last two in at least float32: small decays must not round.
    """
    q, k, v = inputs
    q, k = (unit(x) for x in (q, k))
    wide = q.dtype
    dt = jax.nn.softplus(step_BTN.astype(wide) + self.step_bias[...])
    decay = -jnp.exp(self.a_log[...].astype(wide)) * dt
    share = jax.nn.sigmoid(share_BTN.astype(wide))
    if self.config.gated_delta.reflect:
      share = 2 * share
    q = q * q.shape[-1] ** -0.5
    return q.astype(v.dtype), k.astype(v.dtype), v, decay, share

  def init_state(self, batch, slots, dtype):
    """(S_BNKV in at least float32, last inputs of the convolutions)."""
    del slots
    g, n, k, v = sizes(self.config)
    wide = jnp.promote_types(dtype, jnp.float32)
    memory = mixer.state(mixer.STATE, batch, n, k, v, dtype=wide)
    keep = self.config.gated_delta.conv_width - 1
    return memory, tuple(
      mixer.state(mixer.TAIL, batch, keep, *shape, dtype=dtype)
      for shape in ((g, k), (g, k), (n, v))
    )

  @staticmethod
  def check(config):
    """UserError: heads that do not divide, or a kernel that is not there."""
    g, n, *_ = sizes(config)
    if n % g:
      raise errors.UserError(
        f'model.gated_delta.value_heads={n} is not divisible by '
        f'model.gated_delta.heads={g}.'
      )
    registry.resolve(delta.OP, config.scan)

  @staticmethod
  def mixing_flops(config, kind, length):
    """The state, read, written and read again; without work within chunks."""
    _, n, k, v = sizes(config)
    return 6 * length * n * k * v
