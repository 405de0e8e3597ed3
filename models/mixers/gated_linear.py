"""Gated linear attention (arXiv:2312.06635): a matrix state, forgotten by row.

    S_t = diag(a_t) S_(t-1) + k_t v_t^T       a_t = sigmoid(W2 W1 x + b)^(1/c)
    o_t = S_t^T q_t / sqrt(K)                 y = (rms(o) * silu(W_r x)) W_o

per head, K keys and V values wide (section 4; c = gate_normaliser). Trained in
chunks (pallas_kernels/scans/gated.py), decoded with S alone: K V numbers a
head, whatever the length. Cost: 4 T K V flops a head beyond the projections,
and as much within chunks. With conv_width q, k and v pass a short causal
convolution (not in the paper).

Legend: B rows, T tokens, D model, N heads, H head width (K of q and k, V of v),
R rank of the decays, W taps.
"""

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import norm
from paraxis.models import parameter
from paraxis.models.mixers import protocol as mixer
from paraxis.models.mixers import recurrence
from paraxis.sharding.tensor import project

LOW = ('batch', 'residual_length', None)


def sizes(config):
  """(heads, key width, value width) of a head, of a schema.Model."""
  own = config.gated_linear
  heads = own.heads or config.num_heads
  wide = lambda expand: round(config.d_model * expand) // heads
  return heads, wide(own.key_expand), wide(own.value_expand)


class GatedLinear(nnx.Module):
  """x_BTD -> y_BTD; state: S_BNKV and the tails of the convolutions."""

  name = 'gated_linear'
  capabilities = mixer.RECURRENT

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    del kind
    self.config, self.layout = config, layout
    own, d, std = config.gated_linear, config.d_model, config.init_std
    n, k, v = sizes(config)
    heads = ('embed', 'heads', 'head_dim')
    make = parameter.matrix
    self.query = make(rngs, (d, n, k), heads, std=std)
    self.key = make(rngs, (d, n, k), heads, std=std)
    self.value = make(rngs, (d, n, v), heads, std=std)
    self.output_gate = make(rngs, (d, n, v), heads, std=std)
    r = own.gate_rank
    self.decay_down = make(rngs, (d, r), ('embed', None), std=std)
    self.decay_up = make(rngs, (r, n, k), (None, *heads[1:]), std=std)
    self.decay_bias = parameter.vector((n, k), heads[1:])
    self.output_norm = parameter.vector((v,), ('norm',), 1.0)
    self.output = make(
      rngs, (n, v, d), (*heads[1:], 'embed'), inputs=2, std=std,
      gain=(2 * config.num_layers) ** -0.5,
    )  # fmt: skip
    if own.conv_width:
      for name, wide in (('query', k), ('key', k), ('value', v)):
        # No matrix: its taps are those of separate channels.
        taps = parameter.embedding(
          rngs, (own.conv_width, n, wide), (None, *heads[1:]),
          own.conv_width**-0.5,
        )  # fmt: skip
        setattr(self, f'{name}_conv', taps)

  def __call__(self, x_BTD, see, state=None):
    q, k, v, r = self._project(
      x_BTD, ('query', 'key', 'value', 'output_gate'), 'qkv'
    )
    decay = self._log_decay(x_BTD)
    memory, tails = state or (None, (None,) * 3)
    tails = list(tails)
    if self.config.gated_linear.conv_width:
      for i, name in enumerate(('query', 'key', 'value')):
        y, tails[i] = recurrence.conv(
          (q, k, v)[i], getattr(self, f'{name}_conv')[...], mixer.HEADS, see,
          self.layout, tails[i],
        )  # fmt: skip
        y = jax.nn.silu(y)
        q, k, v = (*(q, k, v)[:i], y, *(q, k, v)[i + 1 :])
    scale = jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    o, memory = recurrence.gated_scan(
      q * scale, k, v, decay, see, self.layout, memory, self.config.scan
    )
    o = checkpoint_name(o, 'scan')
    o = norm.rms(o, self.output_norm[...], self.config.norm_epsilon)
    y = self._output(o * jax.nn.silu(r))
    return y, None if state is None else (memory, tuple(tails))

  def _project(self, x, names, ring):
    weights = [getattr(self, name) for name in names]
    outs = project.project(
      x,
      mixer.RESIDUAL,
      [('BTD,DNH->BTNH', *parameter.operand(w), mixer.HEADS) for w in weights],
      ring=ring in self.layout.rings,
    )
    shown = ('query', 'key', 'value', 'gate')
    return [checkpoint_name(y, n) for y, n in zip(outs, shown, strict=True)]

  def _log_decay(self, x):
    """log a_BTNK <= 0, in at least float32: small decays must not round."""
    down, up = self.decay_down, self.decay_up
    low = project.einsum(
      'BTD,DR->BTR', x, mixer.RESIDUAL, *parameter.operand(down),
      LOW,
    )  # fmt: skip
    wide = jnp.promote_types(x.dtype, jnp.float32)
    z = project.einsum(
      'BTR,RNH->BTNH', low, LOW, *parameter.operand(up),
      mixer.HEADS, dtype=wide,
    )  # fmt: skip
    bias = self.decay_bias[...].astype(wide)
    return (
      jax.nn.log_sigmoid(z + bias) / self.config.gated_linear.gate_normaliser
    )

  def _output(self, o):
    w = self.output
    (y,) = project.project(
      o,
      mixer.HEADS,
      [('BTNP,NPD->BTD', *parameter.operand(w), mixer.RESIDUAL)],
      ring='output' in self.layout.rings,
    )
    return checkpoint_name(y, 'output')

  def init_state(self, batch, slots, dtype):
    """(S_BNKV in at least float32, last inputs of the convolutions)."""
    del slots
    n, k, v = sizes(self.config)
    wide = jnp.promote_types(dtype, jnp.float32)
    memory = mixer.state(mixer.STATE, batch, n, k, v, dtype=wide)
    keep = self.config.gated_linear.conv_width - 1
    tails = (None,) * 3
    if keep >= 0:
      names = ('batch', None, 'heads', 'head_dim')
      tails = tuple(
        mixer.state(names, batch, keep, n, width, dtype=dtype)
        for width in (k, k, v)
      )
    return memory, tails

  def grow(self, state, slots):
    """The state as it is: its size is that of one token."""
    del slots
    return state

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
  def check_context(config, length):
    """Nothing: any share of the length will do."""

  @staticmethod
  def mixing_flops(config, kind, length):
    """The state written and read once a token; work within chunks left out."""
    n, k, v = sizes(config)
    return 4 * length * n * k * v
