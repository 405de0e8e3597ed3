"""One layer of a decoder, and its two ends, as Flax modules.

A layer is named by its kind: a letter for its attention (F full, W sliding
window, N full without rotary positions), and one for what follows it (none: an
mlp, E experts, P twice as many).
"""

import functools
import math

from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from paraxis.models import attention
from paraxis.models import mlp
from paraxis.models import moe
from paraxis.models import norm
from paraxis.models import parameter

KINDS = 'FWN'
EXPERTS = 'EPD'


def kinds_of(config):
  """(kinds of a unit, kinds of every layer): 'F', 'FE': attention, experts."""
  unit = list(config.pattern)
  if config.experts.count:
    every = config.experts.pattern
    length = math.lcm(len(unit), len(every))
    unit = [
      unit[i % len(unit)] + every[i % len(every)].replace('D', '')
      for i in range(length)
    ]
  repeats = -(-config.num_layers // len(unit))
  return tuple(unit), tuple((unit * repeats)[: config.num_layers])


class Layer(nnx.Module):
  """x + attention(norm x), then x + mlp(norm x), norms placed by config.

  kind: of `kinds_of`. With E or P experts take the mlp's place.
  """

  def __init__(self, config, rngs, kind, layout):
    self.config, self.kind = config, kind
    self.attention = attention.Attention(config, rngs, kind[0], layout)
    # Under names of their own: stacks hold layers of one shape.
    if kind[1:] == 'P':
      self.wide_moe = moe.Moe(config, rngs, layout, wide=True)
    elif kind[1:] == 'E':
      self.moe = moe.Moe(config, rngs, layout)
    else:
      self.mlp = mlp.Mlp(config, rngs, layout)
    if config.norm_placement != 'post':
      self.attention_norm = norm.Norm(config)
      self.mlp_norm = norm.Norm(config)
    if config.norm_placement != 'pre':
      self.attention_post_norm = norm.Norm(config)
      self.mlp_post_norm = norm.Norm(config)

  def _around(self, name, x, sublayer):
    placement = self.config.norm_placement
    y = x if placement == 'post' else getattr(self, f'{name}_norm')(x)
    y, state = sublayer(y)
    if placement != 'pre':
      y = getattr(self, f'{name}_post_norm')(y)
    return x + y, state

  def __call__(self, x_BTD, see, state=None):
    x_BTD = checkpoint_name(x_BTD, 'residual')
    attend = functools.partial(self.attention, see=see, state=state)
    x, state = self._around('attention', x_BTD, attend)
    x, _ = self._around('mlp', x, lambda y: (self._transform(y, see), None))
    return x, state

  def _transform(self, x, see):
    experts = {'E': 'moe', 'P': 'wide_moe'}.get(self.kind[1:])
    return getattr(self, experts)(x, see) if experts else self.mlp(x)


class Ends(nnx.Module):
  """Embedding, final norm and head: what is not stacked."""

  def __init__(self, config, rngs):
    shape, std = (config.vocab_size, config.d_model), config.embedding_init_std
    self.embedding = parameter.embedding(rngs, shape, ('vocab', 'embed'), std)
    if config.position == 'learned':
      self.positions = parameter.embedding(
        rngs,
        (config.max_positions, config.d_model),
        ('positions', 'embed'),
        std,
      )
    self.norm = norm.Norm(config)
    if not config.tied_embedding:
      self.head = parameter.embedding(rngs, shape, ('vocab', 'embed'), std)
