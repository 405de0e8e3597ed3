"""The mlp of a layer: SwiGLU, GeGLU (arXiv:2002.05202) or GELU.

gated: y = (act(x Wg) * (x Wu)) Wd          plain: y = gelu(x Wu) Wd
"""

import functools

from flax import nnx
import jax

from paraxis.models import parameter
from paraxis.sharding import annotate

HIDDEN = ('batch', 'length', 'hidden')
WIDE = ('batch', 'length', 'mlp')
_GELU = functools.partial(jax.nn.gelu, approximate=True)


class Mlp(nnx.Module):
  """x_BTD -> y_BTD; the hidden width is the logical axis 'mlp'."""

  def __init__(self, config, rngs):
    self.config = config
    d, f, std = config.d_model, config.d_ff, config.init_std
    if config.mlp != 'gelu':
      self.gate = parameter.matrix(rngs, (d, f), ('embed', 'mlp'), std=std)
    self.up = parameter.matrix(rngs, (d, f), ('embed', 'mlp'), std=std)
    # The residual stream adds 2 * num_layers outputs (GPT-2, section 2.3).
    gain = (2 * config.num_layers) ** -0.5
    self.down = parameter.matrix(
      rngs, (f, d), ('mlp', 'embed'), std=std, gain=gain
    )
    if config.mlp_bias:
      if config.mlp != 'gelu':
        self.gate_bias = parameter.vector((f,), ('mlp',))
      self.up_bias = parameter.vector((f,), ('mlp',))
      self.down_bias = parameter.vector((d,), ('norm',))

  def _project(self, x, name, x_axes, out):
    w = getattr(self, name)
    letters = 'BTD,DF->BTF' if out == WIDE else 'BTF,FD->BTD'
    y = annotate.einsum(letters, x, x_axes, w[...], w.get_metadata('axes'), out)
    if self.config.mlp_bias:
      y = y + getattr(self, f'{name}_bias')[...].astype(x.dtype)
    return y

  def __call__(self, x_BTD):
    up = self._project(x_BTD, 'up', HIDDEN, WIDE)
    if self.config.mlp == 'gelu':
      hidden = _GELU(up)
    else:
      act = jax.nn.silu if self.config.mlp == 'swiglu' else _GELU
      hidden = act(self._project(x_BTD, 'gate', HIDDEN, WIDE)) * up
    return self._project(hidden, 'down', WIDE, HIDDEN)
