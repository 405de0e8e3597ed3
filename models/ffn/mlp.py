"""The mlp of a layer: SwiGLU, GeGLU (arXiv:2002.05202) or GELU.

gated: y = (act(x Wg) * (x Wu)) Wd          plain: y = gelu(x Wu) Wd
"""

import functools

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name

from paraxis.models import parameter
from paraxis.sharding.tensor import project

RESIDUAL = ('batch', 'residual_length', 'hidden')
WIDE = ('batch', 'length', 'mlp')
_GELU = functools.partial(jax.nn.gelu, approximate=True)


class Mlp(nnx.Module):
  """x_BTD -> y_BTD; the hidden width is the logical axis 'mlp'."""

  def __init__(self, config, rngs, layout=parameter.PLAIN):
    self.config, self.layout = config, layout
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

  def _project(self, x, names, x_axes, out, ring):
    letters = 'BTD,DF->BTF' if out == WIDE else 'BTF,FD->BTD'
    weights = [getattr(self, name) for name in names]
    outs = project.project(
      x,
      x_axes,
      [(letters, *parameter.operand(w), out) for w in weights],
      ring=ring in self.layout.rings,
    )
    if self.config.mlp_bias:
      outs = [
        (y + getattr(self, f'{name}_bias')[...]).astype(x.dtype)
        for name, y in zip(names, outs, strict=True)
      ]
    return outs

  def __call__(self, x_BTD):
    plain = self.config.mlp == 'gelu'
    names = ('up',) if plain else ('up', 'gate')
    up, *gate = self._project(x_BTD, names, RESIDUAL, WIDE, 'gate_up')
    up = checkpoint_name(up, 'up')
    if plain:
      hidden = _GELU(up)
    else:
      act = jax.nn.silu if self.config.mlp == 'swiglu' else _GELU
      hidden = act(checkpoint_name(gate[0], 'gate')) * up
    y = self._project(hidden, ('down',), WIDE, RESIDUAL, 'down')[0]
    return checkpoint_name(y, 'down')
