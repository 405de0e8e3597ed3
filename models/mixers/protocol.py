"""Token mixers: one protocol for attention and recurrences.

A mixer is a subclass of `Mixer`, a row of configs/base/mixers.py and a line of
models/layer.py.

x is a packed row: `see.segments` (0: padding) is the document of each token,
`see.positions` its position there. A recurrence forgets its state where a
document begins (`resets`), and a padding token is the identity map on the
state, so neither slots nor short rows have to be cleared. With a state, a row
has its tokens first and its padding behind.

Decoding calls `decode`, which reads the state of cache rows and writes nothing,
and `commit`, which keeps some of the tokens in flight (packed.py). A mixer with
a state of one size needs no more than `__call__`; one with slots defines both.
What the former reads of its parameters, it reads once a step; in lanes of
drafts, whose states after every token are asked for, once a token (`lanes`).

The length may be sharded over the mesh axis `context`: attention then crosses
shards in sharding/sequence/attention.py, a recurrence in
models/mixers/recurrence.py and sharding/sequence/scan.py.

Legend: B rows, T tokens, D model, N heads, K key width, V value width; R rows
of a cache, n lanes, C tokens of a lane.
"""

from typing import Any, ClassVar, NamedTuple

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.models import aux as aux_lib
from paraxis.models import parameter
from paraxis.models.mixers import packed
from paraxis.sharding import annotate

ROWS = ('batch', 'length')
RESIDUAL = ('batch', 'residual_length', 'hidden')
LOW = ('batch', 'residual_length', None)  # narrow, cheaper to gather than x
HEADS = ('batch', 'length', 'heads', 'head_dim')
WIDE = ('batch', 'length', 'mlp')
STATE = ('batch', 'heads', None, None)
# Last inputs of a convolution, by heads.
TAIL = ('batch', None, 'heads', 'head_dim')
# Queries as they read slots, whose mesh axes heads may be sharded over, too.
READERS = ('batch', 'length', 'slot_heads', 'head_dim')


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
    """The empty state of `batch` rows of at most `slots` tokens; () if what
    tokens give depends on no other token."""
    raise NotImplementedError

  def decode(self, x, see, state, *more) -> tuple[jax.Array, Any, Any]:
    """(y, what `commit` takes, aux.Aux) of tokens in flight.

    Args:
      x: laid out as packed.Packed, (.., D). see: with its plan. state: of all
        rows. more: as of `__call__`.
    """
    return lanes(self.__call__, x, see, state, *more)

  def commit(self, state, flight, plan, keep) -> Any:
    """`state` with the tokens that are kept.

    Args:
      flight: of `decode`. plan: its packed.Plan.
      keep: bool, laid out as packed.Packed. In a state of one size the kept
        tokens of a lane are its first ones; without packed.Group.each all of
        its valid ones, or none.
    """
    return commit_states(state, flight, plan, keep)

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


def lanes(call, x, see, state, *more):
  """`Mixer.decode` of a state of one size: `call` on every group of lanes.

  With packed.Group.each it is called on one token after the other: its
  parameters are read, and its products compiled, C times.

  Returns:
    (y, [states of each group: (n, ...), or (C, n, ...) with packed.Group.each],
    no aux).
  """
  (form, ids), see = see.plan, see._replace(plan=None)
  outs, flight = [], []
  for group, x_g, seen, ids_g in packed.lanes(form, x, see, ids):
    old = _of_lanes(group, state, ids_g)
    y, new = (_each if group.each else _last)(call, x_g, seen, old, *more)
    outs.append(y)
    flight.append(new)
  return packed.join(form, outs), flight, aux_lib.NOTHING


def _last(call, x, see, state, *more):
  return call(x, see, state, *more)[:2]


def _each(call, x, see, state, *more):
  """Token by token, C calls: (y, states after each, (C, n, ...))."""
  ys, states = [], []
  for t in range(x.shape[1]):
    now = jax.tree.map(lambda z, t=t: z[:, t : t + 1], (x, see))
    y, state, _ = call(*now, state, *more)
    ys.append(y)
    states.append(state)
  stack = lambda *leaves: jnp.stack(leaves)
  return jnp.concatenate(ys, 1), jax.tree.map(stack, *states)


def _of_lanes(group, state, ids):
  """States of the lanes' rows."""
  if group.own:
    return state
  return jax.tree.map(lambda z: z[ids.row[:, 0]], state)


def commit_states(state, flight, plan, keep):
  """`Mixer.commit` of a state of one size, or () of a mixer without one."""
  if not jax.tree.leaves(state):
    return state
  rows = jax.tree.leaves(state)[0].shape[0]
  parts = packed.lanes(plan.form, keep & plan.ids.valid, plan.ids)
  for (group, kept, ids), new in zip(parts, flight, strict=True):
    picked, count = _of_lanes(group, state, ids), kept.sum(1)
    after = [new]
    if group.each:
      after = [
        jax.tree.map(lambda z, t=t: z[t], new) for t in range(group.width)
      ]
    for t, one in enumerate(after):
      picked = jax.tree.map(
        lambda z, old, t=t, count=count: rows_where(count > t, z, old),
        one, picked,
      )  # fmt: skip
    if group.own:
      state = picked
      continue
    to = jnp.where(count > 0, ids.row[:, 0], rows)
    state = jax.tree.map(
      lambda z, x, to=to: z.at[to].set(x, mode='drop'), state, picked
    )
  return state


def rows_where(ok_B, a, b):
  """Rows of a where ok, else those of b, which is laid out as a.

  a, b: of as many rows, or of several for each one (models/streams.py).
  """

  def pick(ok, a, b):
    if len(a) > len(ok):
      ok = jnp.repeat(ok, len(a) // len(ok))
    return jnp.where(ok.reshape(-1, *[1] * (a.ndim - 1)), a.astype(b.dtype), b)

  if annotate.mode() != 'explicit' or not annotate.sizes():
    return pick(ok_B, a, b)
  laid = lambda y: jax.typeof(y).sharding.spec  # a region: rows are local
  return jax.shard_map(
    pick, in_specs=(laid(ok_B), laid(b), laid(b)), out_specs=laid(b),
    check_vma=False,
  )(ok_B, a, b)  # fmt: skip


def repeat_heads(x, heads, names=HEADS):
  """x with G heads -> with the heads of this shard, each G repeated in order.

  heads: of the whole model, or of the least number of copies that shards
    divide; a multiple of G. names: logical names of the result, one is `heads`
    or `slot_heads`.
  """
  axis = names.index('heads' if 'heads' in names else 'slot_heads')
  outer, (g, *inner) = x.shape[:axis], x.shape[axis:]
  shape = *outer, g, heads // g, *inner
  x = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape)
  return annotate.take(x.reshape(*outer, heads, *inner), names, axis)
