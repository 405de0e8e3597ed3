"""RMSNorm and LayerNorm, computed in at least float32.

rms:   y = x / sqrt(mean(x^2) + eps) * scale          (arXiv:1910.07467)
layer: y = (x - mean) / sqrt(var + eps) * scale + bias (arXiv:1607.06450)

unbiased: without bias; bare: without scale and bias (OLMo, arXiv:2402.00838).
rmsnorm_bare: without scale.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from paraxis.models import parameter
from paraxis.sharding import annotate


def rms(
  x, scale, epsilon, zero_centered=False,
  axis: int | tuple[int, ...] = -1, name=None,
):  # fmt: skip
  """RMSNorm over the last axis or axes, times scale (or 1 + scale).

  name: logical axis, of those that are averaged, that shards may split.
  """
  y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  y = y * jax.lax.rsqrt(annotate.mean(y * y, axis, name) + epsilon)
  return (y * (1 + scale if zero_centered else scale)).astype(x.dtype)


class Norm(nnx.Module):
  """The norm of the configuration; width: 0: that of the model."""

  def __init__(self, config, width=0):
    self.config, width = config, width or config.d_model
    self.bare = config.norm in ('layernorm_bare', 'rmsnorm_bare')
    fill = 0.0 if config.norm_zero_centered else 1.0
    if not self.bare:
      self.scale = parameter.vector((width,), ('norm',), fill)
    if config.norm == 'layernorm':
      self.bias = parameter.vector((width,), ('norm',))

  def __call__(self, x):
    config = self.config
    if config.norm == 'rmsnorm_bare':
      return rms(x, 1.0, config.norm_epsilon)
    if config.norm == 'rmsnorm':
      return rms(
        x, self.scale[...], config.norm_epsilon, config.norm_zero_centered
      )
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(
      jnp.mean(y * y, -1, keepdims=True) + config.norm_epsilon
    )
    if not self.bare:
      y = y * (self.scale[...] + (1 if config.norm_zero_centered else 0))
    if config.norm == 'layernorm':
      y = y + self.bias[...]
    return y.astype(x.dtype)
