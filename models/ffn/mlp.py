"""The mlp of a layer: plain, or gated by its input (arXiv:2002.05202).

gated: y = (act(x Wg) * (x Wu)) Wd          plain: y = gelu(x Wu) Wd
clamped (gpt-oss, arXiv:2508.10925): g = min(x Wg, L), u = x Wu within L,
y = (g sigmoid(a g) * (u + 1)) Wd, L = mlp_limit, a = mlp_slope
xielu (arXiv:2411.13010): a x^2 + x/2 above 0, else b (e^x - 1 - x) + x/2, with
learned a = softplus(s_0), b = 1/2 + softplus(s_1)
"""

import functools
import math

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.models import parameter

RESIDUAL = ('batch', 'residual_length', 'hidden')
WIDE = ('batch', 'length', 'mlp')
# Forms without a gate.
PLAIN = ('gelu', 'gelu_exact', 'relu', 'relu2', 'xielu')
_BEND, _NEAR_0 = 0.5, -1e-6  # of xielu: its slope at 0; what it takes for 0
_GELU = functools.partial(jax.nn.gelu, approximate=True)
_EXACT = functools.partial(jax.nn.gelu, approximate=False)
_GATES = dict(swiglu=jax.nn.silu, geglu=_GELU, geglu_exact=_EXACT)
_PLAIN = dict(
  gelu=_GELU,
  gelu_exact=_EXACT,
  relu=jax.nn.relu,
  relu2=lambda x: jax.nn.relu(x) ** 2,
)


def activate(config, up, gate=None) -> jax.Array:
  """The hidden layer of a schema.Model, from its products.

  For its gradient the products are kept and nothing that lies between: a
  swiglu would keep three arrays more, of the same size.
  """
  return jax.checkpoint(
    functools.partial(_activate, config), prevent_cse=False
  )(up, gate)


def _activate(config, up, gate):
  if gate is None:
    return _PLAIN[config.mlp](up)
  if config.mlp == 'clamped':
    most = jnp.asarray(config.mlp_limit, up.dtype)
    gate, up = jnp.minimum(gate, most), jnp.clip(up, -most, most)
    bent = jax.nn.sigmoid(parameter.scaled(gate, config.mlp_slope))
    return gate * bent * (up + 1)
  # XLA on CPU takes seven times as long for e^x in bfloat16.
  wide = jnp.promote_types(up.dtype, jnp.float32)
  hidden = _GATES[config.mlp](gate.astype(wide)) * up.astype(wide)
  return hidden.astype(up.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False)
def xielu(x, slopes) -> jax.Array:
  """xIELU with raw slopes (2,), in at least float32.

  So the gradient of the slopes, a sum over all tokens, is summed, too. For it x
  is kept and nothing that lies between, as by `activate`.
  """
  wide = jnp.promote_types(x.dtype, jnp.float32)
  (up, down), y = jax.nn.softplus(slopes.astype(wide)), x.astype(wide)
  bent = jnp.expm1(jnp.minimum(y, _NEAR_0)) - y
  y = _BEND * y + jnp.where(y > 0, up * y * y, (_BEND + down) * bent)
  return y.astype(x.dtype)


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
    if config.mlp == 'xielu':  # both slopes begin with 0.8
      first = [math.log(math.expm1(x)) for x in (0.8, 0.8 - _BEND)]
      self.slopes = nnx.Param(
        jnp.array(first), axes=(None,), kind='vector', inputs=0
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
    outs = list(map(checkpoint_name, outs, names))
    if form == 'xielu':
      hidden = xielu(outs[0], self.slopes[...])
    else:
      hidden = activate(self.config, *outs)
    y = self._project(hidden, ('down',), WIDE, RESIDUAL, 'down')[0]
    return checkpoint_name(y, 'down')
