"""A side network: learned beside frozen layers, whose states it reads.

    T_l = norm_l(W_l h_l)                    l = 0 .. L; h_0: the embeddings
    A   = T_L                                what the others are read by
    C_l = normalised relu(A T_l^T) + I       rows add up to 1, before I
    g   = softmax_l(v . (mean A * mean T_l)) over l < L
    y   = x + U relu(A + norm(P sum_l g_l C_l T_l))

(UniPT, arXiv:2308.14316, section 3; the code's order of norms.) x are the
features of the frozen decoder, h_l its states behind layer l. A token reads
those that it sees in attention, itself included, and so do both means: of a
document's last token they are the paper's. U begins at 0: then the model is the
frozen one. W_l, norm_l, P, v and U are learned, (L + 1) D R + R^2 + R D numbers
and vectors, and what train.learn names behind the layers.

No gradient enters a layer. What the backward pass keeps of layer l is T_l, R
numbers a token, and h_l, D of them, from which W_l has its gradient; with
recomputation (train.remat) h_l is made again, by a second forward pass, and
used up layer by layer (`Side.lows`). Cost: L + 1 products of B T D R, 6 B T^2 R
operations a layer, B T^2 numbers; keys are gathered over the shards of a row.

Legend: B rows, T tokens, S tokens of the whole row, L layers, D model, R width.
"""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp

from paraxis.models import checks
from paraxis.models import norm
from paraxis.models import parameter
from paraxis.models import skeleton
from paraxis.models import trained
from paraxis.models.mixers import protocol
from paraxis.sharding import annotate
from paraxis.sharding.tensor import project

FOLDER = trained.SIDE
LEVELS = f'{FOLDER}levels/'
ROWS, RESIDUAL, LOW = protocol.ROWS, protocol.RESIDUAL, protocol.LOW
WHOLE = ('batch', None, None)
EPSILON = 1e-8  # of a row of C


def check(config, stages):
  """UserError if a schema.Config cannot train a side network.

  stages: of the mesh.
  """
  own, model = config.train, config.model
  says = f'train.side={own.side}'
  if not own.side:
    return
  checks.need(
    own.estimator == 'backprop',
    f'{says} spares a backward pass through the layers, and train.estimator='
    f"{own.estimator} has none: take 'backprop', or train.freeze in its place.",
  )
  checks.need(
    not own.lora.rank,
    f'{says} reads states from which no gradient returns, so that adapters in '
    f'layers (train.lora.rank={own.lora.rank}) would learn nothing: take one.',
  )
  checks.need(
    stages == 1,
    f'{says} reads the states of all layers in one place, and '
    f'mesh.stage={stages} has them on its stages: take stage=1.',
  )
  checks.need(
    model.wiring in ('standard', 'parallel') and not model.recurrence.core,
    f'{says} reads one state behind each layer, which model.wiring='
    f'{model.wiring!r} with model.recurrence.core={model.recurrence.core} does '
    "not have: take 'standard' and 0.",
  )
  checks.need(
    own.objective != 'block' and model.visibility in ('causal', 'full'),
    f'{says} reads what a token sees in its row, and rows of train.objective='
    f'{own.objective!r}, model.visibility={model.visibility!r} are in blocks: '
    "take 'next_token' or 'masked', and 'causal' or 'full'.",
  )


def check_decoding(model):
  """UserError if a decoder.Decoder has a side network: it has no cache."""
  checks.need(
    model.side is None,
    f'train.side={model.trained.side}: a side network reads whole rows and has '
    'no cache of their states, so it cannot continue a text token by token; '
    '`paraxis evaluate` scores texts with it.',
  )


def _norm(config, width):
  """LayerNorm of R numbers, whatever the norm of the layers."""
  own = dict(norm='layernorm', norm_zero_centered=False)
  return norm.Norm(dataclasses.replace(config, **own), width)


class Level(nnx.Module):
  """What reads one state: T_l."""

  def __init__(self, config, width, rngs):
    shape, names = (config.d_model, width), ('embed', None)
    self.down = parameter.matrix(rngs, shape, names)
    self.norm = _norm(config, width)

  def __call__(self, x_BTD):
    return self.norm(_product(self.down, x_BTD, RESIDUAL, LOW))


class Join(nnx.Module):
  """What makes one output of all levels."""

  def __init__(self, config, width, rngs):
    self.gate = parameter.diagonal(rngs, (width,), ('norm',), width**-0.5)
    self.mix = parameter.matrix(rngs, (width, width), (None, None))
    self.norm = _norm(config, width)
    shape, names = (width, config.d_model), (None, 'embed')
    self.up = parameter.matrix(rngs, shape, names, gain=0.0)


def _product(variable, x, names, out):
  w, axes = parameter.operand(variable)
  return project.einsum('BTD,DE->BTE', x, names, w, axes, out)


class Side:
  """Stateless, as decoder.Decoder.

  Attributes:
    leaves: path -> skeleton.Leaf, without the axis of levels.
    stacked: paths that have one, first: 'layers', of L + 1.
  """

  def __init__(self, config, width, recompute):
    """config: schema.Model. recompute: states, in the backward pass."""
    self.config, self._recompute = config, recompute
    make = lambda kind: skeleton.Skeleton(
      lambda rngs: kind(config, width, rngs)
    )
    self._level, self._join = make(Level), make(Join)
    of_levels = {LEVELS + p: x for p, x in self._level.leaves.items()}
    of_join = {FOLDER + p: x for p, x in self._join.leaves.items()}
    self.leaves, self.stacked = of_levels | of_join, frozenset(of_levels)

  def init(self, key):
    """{path: array} of new parameters."""
    dtype = jnp.dtype(self.config.param_dtype)
    first, *keys = jax.random.split(key, self.config.num_layers + 2)
    one = functools.partial(self._level.init, dtype=dtype)
    levels, join = jax.vmap(one)(jnp.stack(keys)), self._join.init(first, dtype)
    of = lambda folder, tree: {folder + p: x for p, x in tree.items()}
    return of(LEVELS, levels) | of(FOLDER, join)

  def _low(self, weights, x_BTD):
    """T_l of a frozen state, by the parameters of a level."""
    with jax.named_scope('side'):
      return self._level.module(weights)(jax.lax.stop_gradient(x_BTD))

  def lows(self, stack, params, x_BTD, see):
    """(x_BTD behind the last layer, aux.Aux, T (L + 1, B, T, R)).

    Args:
      stack: stack.Stack. params: {path: array}, all. x_BTD: before the first
        layer. see: attention.Visibility.
    """
    weights = {p: params[LEVELS + p] for p in self._level.leaves}
    given = _frozen(params), x_BTD, see

    def run(weights, given):
      others, x, see = given
      first, rest = _first(weights)
      low = self._low(first, x)
      watch = lambda x, row: self._low(row, x)
      x, aux, lows = stack.run_watched(others, x, see, watch, rest)
      return x, aux, jnp.concatenate([low[None], lows])

    def again(kept, cotangents):
      """Of T alone: the states are frozen."""
      weights, (others, x, see) = kept
      (first, rest), (d, more) = _first(weights), _first(cotangents[2])

      def watch(x, row):
        weights, d = row
        return jax.vjp(lambda w: self._low(w, x), weights)[1](d)[0]

      of_first = watch(x, (first, d))
      *_, found = stack.run_watched(others, x, see, watch, (rest, more))
      whole = lambda a, b: jnp.concatenate([a[None], b])
      return jax.tree.map(whole, of_first, found), None

    if not self._recompute:
      return run(weights, given)
    made = jax.custom_vjp(run)
    made.defvjp(lambda *args: (run(*args), args), again)
    return made(weights, given)

  def read(self, params, lows, batch):
    """What is added to the features: y - x, (B, T, D).

    Args:
      lows: of `lows`, laid out as LOW. batch: models.batch.Batch; segments and
        positions are read.
    """
    join = self._join.module({p: params[FOLDER + p] for p in self._join.leaves})
    with jax.named_scope('side'):
      keys = annotate.move(lows, (None, *LOW), (None, *WHOLE))
      seen_BTS = self._seen(batch)
      wide = jnp.promote_types(lows.dtype, jnp.float32)
      counts = jnp.maximum(seen_BTS.sum(-1, dtype=wide), 1)
      means = jnp.einsum('bts,lbsr->lbtr', seen_BTS.astype(wide), keys)
      means = means / counts[..., None]
      gate = join.gate[...].astype(wide)
      z = jnp.einsum('btr,lbtr,r->lbt', means[-1], means[:-1], gate)
      shares = jax.nn.softmax(z, 0)
      anchor = lows[-1]

      @jax.checkpoint
      def add(total, level):
        low, key, share = level
        c = jax.nn.relu(jnp.einsum('btr,bsr->bts', anchor, key).astype(wide))
        c = jnp.where(seen_BTS, c, 0)
        c = c / (c.sum(-1, keepdims=True) + EPSILON)
        merged = jnp.einsum('bts,bsr->btr', c, key) + low
        return total + share[..., None] * merged, None

      zero = jnp.zeros_like(anchor, wide)
      total, _ = jax.lax.scan(add, zero, (lows[:-1], keys[:-1], shares))
      mixed = _product(join.mix, total.astype(lows.dtype), LOW, LOW)
      h = jax.nn.relu(anchor + join.norm(mixed))
      return _product(join.up, h, LOW, RESIDUAL)

  def _seen(self, batch):
    """(B, T, S) bool: the tokens that each of this shard sees."""
    own = [annotate.part(x, ROWS, LOW[:2]) for x in batch[2:4]]
    every = [annotate.move(x, ROWS, WHOLE[:2]) for x in batch[2:4]]
    of_T, at_T = (x[:, :, None] for x in own)
    of_S, at_S = (x[:, None, :] for x in every)
    seen = (of_T == of_S) & (of_S > 0)
    return seen if self.config.visibility == 'full' else seen & (at_S <= at_T)


def _first(tree):
  """(first rows, the others) of a tree."""
  return jax.tree.map(lambda x: x[0], tree), jax.tree.map(lambda x: x[1:], tree)


def _frozen(params):
  return {p: x for p, x in params.items() if not p.startswith(FOLDER)}
