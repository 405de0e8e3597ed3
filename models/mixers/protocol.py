"""Token mixers: one protocol for attention and recurrences.

A mixer is a subclass of `Mixer`, a row of configs/base/mixers.py and a line of
models/layer.py.

x is a packed row: `see.segments` (0: padding) is the document of each token,
`see.positions` its position there. A recurrence forgets its state where a
document begins (`resets`), and a padding token is the identity map on the
state, so neither slots nor short rows have to be cleared. With a state, a row
has its tokens first and its padding behind. Before single-token decoding
`shift_slots` moves that padding to the front of the cache, because such a token
sees the slots right before its own.

The length may be sharded over the mesh axis `context`: attention then crosses
shards in sharding/sequence/attention.py, a recurrence in
models/mixers/recurrence.py and sharding/sequence/scan.py.

Legend: B rows, T tokens, D model, N heads, K key width, V value width.
"""

from typing import Any, ClassVar, NamedTuple

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.models import parameter
from paraxis.sharding import annotate

ROWS = ('batch', 'length')
RESIDUAL = ('batch', 'residual_length', 'hidden')
LOW = ('batch', 'residual_length', None)  # narrow, cheaper to gather than x
HEADS = ('batch', 'length', 'heads', 'head_dim')
WIDE = ('batch', 'length', 'mlp')
STATE = ('batch', 'heads', None, None)
SLOT_AXIS = 2  # of a state that grows: (B, heads, S, ...)
# Last inputs of a convolution, by heads.
TAIL = ('batch', None, 'heads', 'head_dim')


class Capabilities(NamedTuple):
  """What decoding may ask of the state of a mixer.

  slots: the state grows with the tokens (else it has one size). exact: prefill
  and single-token steps equal one pass over the whole sequence. recurs: beside
  slots it has a state of one size, too.
  """

  slots: bool
  exact: bool = True
  recurs: bool = False


SLOTS = Capabilities(slots=True)
RECURRENT = Capabilities(slots=False)


class Mixer(nnx.Module):
  """x_BTD -> y_BTD; the defaults here suit a state of one size.

  name: under which a layer holds its parameters.
  capabilities: what decoding may ask of its state.
  norms: it is given x as it stands, and as its fourth argument the norm.
  """

  name: ClassVar[str]
  capabilities: Capabilities
  norms: ClassVar[bool] = False

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    """config: schema.Model. kind: its letter. Subclasses add parameters."""
    del rngs
    self.config, self.kind, self.layout = config, kind, layout

  def __call__(self, x_BTD, see, state=None) -> tuple[jax.Array, Any, Any]:
    """(y_BTD, state, aux.Aux); see: attention.Visibility.

    Without a state the second is None.
    """
    raise NotImplementedError

  def init_state(self, batch: int, slots: int, dtype) -> Any:
    """The empty state of `batch` rows of at most `slots` tokens."""
    raise NotImplementedError

  def grow(self, state, slots: int) -> Any:
    """`state` with room for `slots` tokens; one of one size stays as it is."""
    if not self.capabilities.slots:
      return state
    return tuple(more_slots(x, slots, SLOT_AXIS) for x in state)

  @classmethod
  def shift(cls, state, by_B):
    """`state`, the slots of row b rotated by_B to the right (`shift_slots`)."""
    if not cls.capabilities.slots:
      return state
    return tuple(shift_slots(x, by_B, SLOT_AXIS) for x in state)

  @staticmethod
  def check(config) -> None:
    """UserError if the fields of a schema.Model contradict each other."""

  @staticmethod
  def check_context(config, length: int) -> None:
    """UserError if a row cannot be sharded into runs of `length` tokens."""

  @staticmethod
  def mixing_flops(config, kind: str, length: int) -> int:
    """Of a forward pass over a row of `length`, projections left out."""
    raise NotImplementedError

  def _project(self, x, x_names, equation, names, out, ring='', **options):
    """[product of x with each parameter named, by one einsum equation].

    out: logical names of each product. The rest: as of parameter.multiply.
    """
    products = [(name, equation, out) for name in names]
    return parameter.multiply(self, x, x_names, products, ring, **options)

  def _output(self, x, x_names, equation):
    """The product with the parameter `output`, for the residual stream."""
    (y,) = self._project(x, x_names, equation, ['output'], RESIDUAL, 'output')
    return checkpoint_name(y, 'output')


def valid(see):
  """(B, T) bool: a token, no padding."""
  return see.segments > 0


def resets(see):
  """(B, T) bool: the first token of a document."""
  return (see.positions == 0) & valid(see)


def state(names, *shape, dtype):
  """Zeros, laid out by logical names."""
  return annotate.put(jnp.zeros(shape, dtype), names)


def more_slots(x, slots, axis):
  """x with zeros behind its slots, which are along `axis`, up to `slots`."""
  more = [(0, 0)] * x.ndim
  more[axis] = (0, slots - x.shape[axis])
  return jnp.pad(x, more)


def shift_slots(x, by_B, axis):
  """x (B, ...) with row b rotated by_B slots, along `axis`, to the right."""
  roll = jax.vmap(lambda row, by: jnp.roll(row, by, axis - 1))
  if annotate.mode() != 'explicit' or not annotate.sizes():
    return roll(x, by_B)
  laid = lambda y: jax.typeof(y).sharding.spec  # a region: rows are local
  return jax.shard_map(
    roll, in_specs=(laid(x), laid(by_B)), out_specs=laid(x), check_vma=False
  )(x, by_B)


def repeat_heads(x, heads, names=HEADS):
  """x with G heads -> with the heads of this shard, each G repeated in order.

  heads: of the whole model, or of the least number of copies that shards
    divide; a multiple of G. names: logical names of the result, one is `heads`.
  """
  axis = names.index('heads')
  outer, (g, *inner) = x.shape[:axis], x.shape[axis:]
  shape = *outer, g, heads // g, *inner
  x = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape)
  return annotate.take(x.reshape(*outer, heads, *inner), names, axis)
