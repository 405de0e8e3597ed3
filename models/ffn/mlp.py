"""The mlp of a layer: GELU, ReLU; SwiGLU, GeGLU (arXiv:2002.05202), clamped.

gated: y = (act(x Wg) * (x Wu)) Wd          plain: y = gelu(x Wu) Wd
clamped (gpt-oss, arXiv:2508.10925): g = min(x Wg, 7), u = x Wu within 7,
y = (g sigmoid(1.702 g) * (u + 1)) Wd
"""

import functools

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.models import parameter

RESIDUAL = ('batch', 'residual_length', 'hidden')
WIDE = ('batch', 'length', 'mlp')
PLAIN = ('gelu', 'gelu_exact', 'relu', 'relu2')  # forms without a gate
_GELU = functools.partial(jax.nn.gelu, approximate=True)
LIMIT, SLOPE = 7.0, 1.702  # of clamped SwiGLU


_EXACT = functools.partial(jax.nn.gelu, approximate=False)
_GATES = dict(swiglu=jax.nn.silu, geglu=_GELU, geglu_exact=_EXACT)
_PLAIN = dict(
  gelu=_GELU,
  gelu_exact=_EXACT,
  relu=jax.nn.relu,
  relu2=lambda x: jax.nn.relu(x) ** 2,
)


def activate(form, up, gate=None) -> jax.Array:
  """The hidden layer of schema.Model.mlp `form`, from its products."""
  if gate is None:
    return _PLAIN[form](up)
  if form == 'clamped':
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)
  return _GATES[form](gate) * up


class Mlp(nnx.Module):
  """x_BTD -> y_BTD; the hidden width is the logical axis 'mlp'."""

  def __init__(self, config, rngs, layout=parameter.PLAIN):
    self.config, self.layout = config, layout
    d, f, std = config.d_model, config.d_ff, config.init_std
    if config.mlp not in PLAIN:
      self.gate = parameter.matrix(rngs, (d, f), ('embed', 'mlp'), std=std)
    self.up = parameter.matrix(rngs, (d, f), ('embed', 'mlp'), std=std)
    # The residual stream adds 2 * num_layers outputs (GPT-2, section 2.3).
    gain = (2 * config.num_layers) ** -0.5
    self.down = parameter.matrix(
      rngs, (f, d), ('mlp', 'embed'), std=std, gain=gain
    )
    if config.mlp_bias:
      if config.mlp not in PLAIN:
        self.gate_bias = parameter.vector((f,), ('mlp',))
      self.up_bias = parameter.vector((f,), ('mlp',))
      self.down_bias = parameter.vector((d,), ('norm',))

  def _project(self, x, names, x_names, out, ring):
    equation = 'BTD,DF->BTF' if out == WIDE else 'BTF,FD->BTD'
    products = [(name, equation, out) for name in names]
    return parameter.multiply(self, x, x_names, products, ring, biased=True)

  def __call__(self, x_BTD):
    form = self.config.mlp
    names = ('up',) if form in PLAIN else ('up', 'gate')
    outs = self._project(x_BTD, names, RESIDUAL, WIDE, 'gate_up')
    hidden = activate(form, *map(checkpoint_name, outs, names))
    y = self._project(hidden, ('down',), WIDE, RESIDUAL, 'down')[0]
    return checkpoint_name(y, 'down')
