"""One layer of a decoder, and its two ends, as Flax modules.

A layer is named by its kind: a letter for its mixer (`MIXERS`), and one for
what follows it (none: an mlp, E experts, P twice as many, . nothing).
"""

import functools
import math

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name

from paraxis.configs.base import errors
from paraxis.configs.base import mixers as own
from paraxis.models import aux as aux_lib
from paraxis.models import norm
from paraxis.models import parameter
from paraxis.models import streams
from paraxis.models import wiring
from paraxis.models.ffn import mlp
from paraxis.models.ffn import moe
from paraxis.models.mixers import attention
from paraxis.models.mixers import gated_delta
from paraxis.models.mixers import gated_linear
from paraxis.models.mixers import hybrid
from paraxis.models.mixers import latent as latent_attention
from paraxis.models.mixers import mamba
from paraxis.models.mixers import recurrent
from paraxis.models.mixers import rg_lru
from paraxis.models.mixers import short_conv
from paraxis.models.mixers import tcn

# Letter of a pattern -> the mixer's class; its other properties are in its row
# of configs/base/mixers.py.
MIXERS = {
  'F': attention.Attention,
  'W': attention.Attention,
  'K': attention.Attention,
  'N': attention.Attention,
  'A': latent_attention.LatentAttention,
  'G': gated_linear.GatedLinear,
  'M': mamba.Mamba2,
  'S': mamba.Mamba,
  'H': hybrid.Hybrid,
  'R': recurrent.ParaGRU,
  'L': recurrent.ParaLSTM,
  'V': short_conv.ShortConv,
  'U': rg_lru.RgLru,
  'D': gated_delta.GatedDelta,
  'C': tcn.ConvolutionAttention,
}


def kinds_of(config):
  """(kinds of a unit, kinds of every layer): 'F', 'FE': attention, experts."""
  letters, follows = own.of_pattern(config.pattern)
  if config.mlp == 'none' and not config.experts.count:
    follows = (False,) * len(letters)
  every = config.experts.pattern if config.experts.count else 'D'
  length = math.lcm(len(letters), len(every))
  unit = []
  for i in range(length):
    behind = every[i % len(every)].replace('D', '')
    behind = behind if follows[i % len(letters)] else '.'
    unit.append(letters[i % len(letters)] + behind)
  # Blocks that layers share take turns: in every unit the same.
  blocks, uses = config.hybrid.blocks, sum(own.TABLE[k[0]].shares for k in unit)
  unit *= blocks // math.gcd(blocks, uses)
  # And so do groups of layers: a unit has whole ones.
  group = config.group_layers
  unit *= group // math.gcd(group, len(unit))
  repeats = -(-config.num_layers // len(unit))
  return tuple(unit), tuple((unit * repeats)[: config.num_layers])


def _check_answer(mixer, x, found):
  """UserError unless a user's mixer answers as protocol.Mixer says."""
  says = f'{type(mixer).__name__}.__call__ (model.pattern: {mixer.kind})'
  if not (isinstance(found, tuple) and len(found) == 3):
    raise errors.UserError(
      f'{says} returns {type(found).__name__}, not (y, state, aux.Aux).'
    )
  y, _, aux = found
  if getattr(y, 'shape', None) != x.shape or y.dtype != x.dtype:
    what = f'{y.dtype}{y.shape}' if hasattr(y, 'shape') else repr(y)
    raise errors.UserError(
      f'{says} returns y {what} for x {x.dtype}{x.shape}: both are to be equal.'
    )
  aux_lib.check(says, aux)


class Layer(nnx.Module):
  """x + mixer(norm x), then x + mlp(norm x), norms placed by config.

  config.residual: or x + mixer(norm x) + mlp(norm' x), both of one x; 'shared'
  has one norm for both (GPT-J; GPT-NeoX, arXiv:2204.06745, section 2.1).
  config.wiring says what each of them reads, and what x is (wiring.py).

  kind: of `kinds_of`. With E or P experts take the mlp's place.
  """

  def __init__(self, config, rngs, kind, layout):
    self.config, self.kind = config, kind
    # Under names of their own: stacks hold layers of one shape.
    mixer = MIXERS[kind[0]]
    setattr(self, mixer.name, mixer(config, rngs, kind[0], layout))
    names = [mixer.name, *(['mlp'] if kind[1:] != '.' else [])]
    if kind[1:] == 'P':
      self.wide_moe = moe.Moe(config, rngs, layout, wide=True)
    elif kind[1:] == 'E':
      self.moe = moe.Moe(config, rngs, layout)
    elif kind[1:] != '.':
      self.mlp = mlp.Mlp(config, rngs, layout)
    for name in names:
      shared = config.residual == 'shared' and name == 'mlp'
      if config.norm_placement != 'post' and not shared:
        setattr(self, f'{name}_norm', norm.Norm(config))
      if config.norm_placement != 'pre':
        setattr(self, f'{name}_post_norm', norm.Norm(config))

  @property
  def mixer(self):
    return getattr(self, MIXERS[self.kind[0]].name)

  def _before(self, name, x):
    """The input of a part: normed, unless norms come after it."""
    if self.config.norm_placement == 'post':
      return x
    with jax.named_scope(f'{name}_norm'):
      return getattr(self, f'{name}_norm')(x)

  def _after(self, name, y):
    """The output of a part as the residual adds it."""
    scale = self.config.residual_scale
    if self.config.norm_placement != 'pre':
      with jax.named_scope(f'{name}_post_norm'):
        y = getattr(self, f'{name}_post_norm')(y)
    return y if scale == 1 else parameter.scaled(y, scale)

  def __call__(self, carry, see, state=None, read=None):
    """-> (carry, the mixer's state, aux.Aux); carry: x_BTD, or as wiring.py has
    it; see: attention.Visibility; read: what the mixer reads in place of what
    the carry says, or None."""
    name = lambda x: checkpoint_name(x, 'residual')
    carry, mix = jax.tree.map(name, carry), self.mixer
    given, before = (
      wiring.read(carry),
      functools.partial(self._before, mix.name),
    )
    more = (before,) if mix.norms else ()
    read = given if read is None else read
    normed = read if mix.norms else before(read)
    with jax.named_scope(mix.name):
      run = mix if see.plan is None else mix.decode
      found = run(normed, see, state, *more)
    if self.kind[0] in own.OWN:
      _check_answer(mix, given, found)
      if see.plan is None:
        parameter.check_met(mix)
    y, state, aux = found
    carry = wiring.add(carry, self._after(mix.name, y))
    if self.kind[1:] != '.':
      how = self.config.residual
      if how != 'shared':
        beside = how == 'parallel' or self.config.wiring == 'parallel'
        normed = self._before('mlp', given if beside else wiring.read(carry))
      y, more = self._transform(normed, see)
      carry = wiring.add(carry, self._after('mlp', y))
      aux = aux_lib.add(aux, more)
    return carry, state, aux

  def _transform(self, x, see):
    name = {'E': 'moe', 'P': 'wide_moe'}.get(self.kind[1:], 'mlp')
    with jax.named_scope(name):
      if name == 'mlp':
        return self.mlp(x), aux_lib.NOTHING
      y, aux = getattr(self, name)(x, see)
    counts = {f'layers/{name}/{path}': n for path, n in aux.counts.items()}
    return y, aux._replace(counts=counts)


class Ends(nnx.Module):
  """Embedding, final norm and head: what is not stacked."""

  def __init__(self, config, rngs):
    self.config = config
    shape, std = (config.vocab_size, config.d_model), config.embedding_init_std
    self.embedding = parameter.embedding(rngs, shape, ('vocab', 'embed'), std)
    if config.position == 'learned':
      rows = config.max_positions, config.d_model
      self.positions = parameter.embedding(
        rngs, rows, ('positions', 'embed'), std
      )
    self.norm = norm.Norm(config)
    if config.embedding_norm:
      self.embedding_norm = norm.Norm(config)
    if not config.tied_embedding:
      self.head = parameter.embedding(rngs, shape, ('vocab', 'embed'), std)
    if config.head_bias:
      self.head_bias = parameter.vector((config.vocab_size,), ('vocab',))
    if config.stream_copies:
      streams.parameters(self, config, rngs)
    if config.features:
      wide = config.features, config.d_model
      self.frames = parameter.matrix(rngs, wide, (None, 'embed'))
