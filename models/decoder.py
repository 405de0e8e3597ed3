"""A decoder described by data: schema.Model -> parameters, features, logits.

Flax modules describe one layer and the two ends; `Decoder` works on a flat
{path: array} of parameters. models/stack.py has the layers between the ends.
Scopes ('embed', 'layer_F/attention', 'loss', ...) name what operations are of,
in profiles and compiled text; they change no operation.

Legend: B rows, T tokens, D model, V vocabulary, L layers, S cache slots.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from paraxis.configs.base import mixers as own
from paraxis.models import batch as batch_lib
from paraxis.models import frames
from paraxis.models import parameter
from paraxis.models import recurrent_depth
from paraxis.models import side as side_lib
from paraxis.models import skeleton
from paraxis.models import streams as streams_lib
from paraxis.models import trained as trained_lib
from paraxis.models import wiring
from paraxis.models.mixers import attention
from paraxis.models.mixers import packed as packed_lib
from paraxis.models.mixers import pairs
from paraxis.models.mixers import rope
from paraxis.sharding import annotate
from paraxis.sharding.tensor import lookup
from paraxis.sharding.tensor import project
from paraxis.sharding.tensor import vocabulary

RESIDUAL = ('batch', 'residual_length', 'hidden')
LOGITS = ('batch', 'length', 'vocab')
ROWS = ('batch', 'length')


class Decoder:
  """Stateless: parameters go in as a flat dict, features come out.

  Attributes:
    axes: path -> logical axes.
    kinds: path -> 'matrix', 'embedding', 'vector', or, not learned,
      'statistic', 'balance' (models/ffn/moe.py).
    inputs: path -> contracted dimensions of a matrix, without 'layers'.
    taps: paths of taps of convolutions (parameter.taps).
    trained: models.trained.Trained.
    frozen: paths that a run does not learn (models/trained.py).
    side: models.side.Side beside frozen layers, or None.
    stack: models.stack.Stack, the layers; its pattern, depth, held, sizes and
      unstack (parameters with one array per layer, for decoding).
  """

  def __init__(
    self,
    config,
    policy=None,
    layout=parameter.PLAIN,
    trained=trained_lib.EVERYTHING,
    pairs=False,
  ):
    """config: schema.Model. policy: for jax.checkpoint (models/memory.py).
    pairs: rows are of masks, and read with theirs without (mixers/pairs.py)."""
    self.config, self.layout, self.trained = config, layout, trained
    self.pairs = pairs
    self.stack = recurrent_depth.stack_of(config, policy, layout, trained)
    stack = self.stack
    self.pattern, self.depth, self.held = stack.pattern, stack.depth, stack.held
    self.sizes, self.unstack = stack.sizes, stack.unstack
    self._ends = skeleton.Skeleton(
      functools.partial(recurrent_depth.Ends, config)
    )
    leaves, stacked = self._ends.leaves | stack.leaves, {*stack.leaves}
    self.side = None
    if trained.side:
      self.side = side_lib.Side(config, trained.side, policy is not None)
      leaves, stacked = leaves | self.side.leaves, stacked | self.side.stacked
    self.axes = {
      p: ('layers', *leaf.axes) if p in stacked else leaf.axes
      for p, leaf in leaves.items()
    }
    self.kinds = {p: leaf.kind for p, leaf in leaves.items()}
    self.inputs = {p: leaf.inputs for p, leaf in leaves.items()}
    is_taps = lambda leaf: leaf.variable.get_metadata('taps', False)
    self.taps = frozenset(p for p, leaf in leaves.items() if is_taps(leaf))
    self.frozen = trained_lib.frozen(trained, self.kinds)

  def init(self, key: jax.Array) -> dict[str, jax.Array]:
    """Parameters as {path: array}, laid out by the rules in force."""
    ends_key, layers_key = jax.random.split(key)
    out = self._ends.init(ends_key, jnp.dtype(self.config.param_dtype))
    out |= self.stack.init(layers_key)
    if self.side is not None:
      out |= self.side.init(jax.random.fold_in(key, 1))
    return {p: annotate.put(v, self.axes[p]) for p, v in out.items()}

  def run(self, kinds, stacks, carry, see, on=None, taped=None):
    """Consecutive layers -> (carry, aux.Aux): `Stack.run`.

    With a tape.Taped as `Stack.run_taped`, which returns its arrays, too.
    """
    if taped is not None:
      return self.stack.run_taped(taped, kinds, stacks, carry, see, on)
    return self.stack.run(kinds, stacks, carry, see, on)

  def features(self, params, batch):
    """Of every token, without a cache.

    Args:
      params: {path: array} as `init` gives them.
      batch: models.batch.Batch; its targets and weights are not read.

    Returns:
      (x_BTD in config.dtype, after the final norm; aux.Aux of all layers).
    """
    x, see = self._begun(params, self._rows(batch))
    x = wiring.begin(self.config, x)
    if self.side is not None:
      x, aux, lows = self.side.lows(self.stack, params, x, see)
      x = self.normalise(params, jax.lax.stop_gradient(x))
      return x + self.side.read(params, lows, batch), aux
    carry, aux = self.stack.run(self.pattern, params, x, see)
    x = self.own_rows(wiring.finish(carry), batch)
    return self.normalise(params, x), aux

  def _begun(self, params, batch):
    """(x_BTD before the first layer, attention.Visibility) of `_rows`."""
    x, see = self._embedded(params, batch), self._seen(batch)
    if any(own.TABLE[kind[0]].shares for kind in self.pattern):
      see = see._replace(embedded=x)
    if self.config.recurrence.core:
      start = recurrent_depth.start(self.config, batch, x.dtype)
      see = see._replace(embedded=start)
    return x, see

  def embed(self, params, batch):
    """x_BTD before the first layer."""
    return self._embedded(params, self._rows(batch))

  def _embedded(self, params, batch):
    config, ends = self.config, self._ends.module(params)
    dtype = jnp.dtype(config.dtype)
    with jax.named_scope('embed'):
      x = self._lookup(ends.embedding, batch.tokens, dtype)
      if config.embedding_scale != 1.0:
        x = x * jnp.asarray(config.embedding_scale, dtype)
      x = frames.added(x, RESIDUAL, ends, batch)
      if config.embedding_norm:
        x = ends.embedding_norm(x)
      if config.position == 'learned':
        rows = batch.positions + config.position_offset
        x = x + self._lookup(ends.positions, rows, dtype)
    return x

  def visibility(self, batch):
    """attention.Visibility of a batch."""
    return self._seen(self._rows(batch))

  def _seen(self, batch):
    config = self.config
    valid = batch.segments > 0
    if config.experts.count:
      valid = annotate.part(valid, ROWS, RESIDUAL[:2])
    with jax.named_scope('positions'):
      rotations = rope.rotations(
        config, self.pattern, batch.positions, jnp.dtype(config.dtype)
      )
    tokens = batch.read
    if self.pairs and tokens is not None:
      tokens = 2 * tokens  # of both rows of a pair
    return attention.Visibility(
      batch.segments, batch.positions, rotations=rotations, valid=valid,
      denominator=tokens, pairs=() if self.pairs else None,
    )  # fmt: skip

  def _rows(self, batch):
    """A batch with all rows that are read for its own ones."""
    if self.config.stream_copies:
      return streams_lib.of(batch, self.config.streams)
    return pairs.of(batch, self.config.mask_id) if self.pairs else batch

  def own_rows(self, x_BTD, batch):
    """Features of a batch's rows, which are read in pairs if `pairs`."""
    if not self.pairs:
      return x_BTD
    return pairs.predicting(x_BTD, RESIDUAL, batch.positions, self.config)

  def normalise(self, params, x_BTD, form=None):
    """The norm after the last layer; streams are mixed behind it.

    form: of a step of decoding, as its tokens are packed.
    """
    ends = self._ends.module(params)
    with jax.named_scope('final_norm'):
      x_BTD = ends.norm(x_BTD)
    return (
      streams_lib.mixed(ends, x_BTD, form)
      if self.config.stream_copies
      else x_BTD
    )

  def _lookup(self, table, ids, dtype) -> Any:
    names = table.get_metadata('axes')
    return lookup.lookup(table[...], names, ids, RESIDUAL, dtype)

  def step(self, params, cache, packed, form, begin=None, together=1):
    """Features of tokens in flight; the cache is read, nothing is written.

    Args:
      params: of `unstack`. cache, packed, form: of packed.py; form is static.
      begin: what embedded tokens go through before the first layer, or None.
      together: as for stack.Stack.step.

    Returns:
      (x (.., D), laid out as packed, after the final norm; packed.Flight).
    """
    x, see = self.planned(params, cache, packed, form)
    x = begin(x) if begin else x
    x = wiring.begin(self.config, x)
    carry, layers = self.stack.step(params, x, see, cache.states, together)
    x = self.normalise(params, wiring.finish(carry), form)
    return x, packed_lib.Flight(packed, layers)

  def planned(self, params, cache, packed, form):
    """(x before the first layer, attention.Visibility) of tokens in flight."""
    plan, packed = self._plan(form, packed, cache)
    segments, positions = plan.ids.valid.astype(jnp.int32), plan.ids.position
    batch = batch_lib.Batch(packed.token, None, segments, positions, None, None)
    x, see = self._begun(params, batch)
    return x, see._replace(plan=plan)

  def _plan(self, form, packed, cache):
    """(packed.Plan, packed.Packed) of what layers read of a step."""
    length, many = cache.length, self.config.stream_copies
    if many:
      packed = streams_lib.packed(form, packed, many)
      length = streams_lib.cache(cache, many)
      form = streams_lib.lanes(form, many)
    return packed_lib.plan(form, packed, length, cache.reads), packed

  def commit(self, cache, flight, form, keep):
    """`cache` with those tokens in flight that are kept.

    Args:
      cache: as `step` read it. flight: of that step. form: its form.
      keep: bool, laid out as packed.Packed; padding is never kept. What is kept
        must depend on the step's logits (a judge's choice, or that they are
        finite): else XLA copies the cache, as it may be written before it is
        read.

    Returns:
      packed.Cache. A row ends behind its last kept token, or where it did.
    """
    plan, kept = packed_lib.plan(form, flight.packed, cache.length), keep
    ids, many = plan.ids, self.config.stream_copies
    if many:
      plan, _ = self._plan(form, flight.packed, cache)
      kept = streams_lib.laid_out(form, dict(keep=keep), many)['keep']
    states = tuple(
      self.stack.mixer(kind).commit(state, new, plan, kept)
      for kind, state, new in zip(
        self.stack.cached, cache.states, flight.layers, strict=True
      )
    )
    end = jnp.where(keep & ids.valid, ids.position + 1, 0)
    if len(form) == 1 and form[0].own:
      length = jnp.maximum(cache.length, end.max(1))
    else:
      length = cache.length.at[ids.row].max(end)
    return cache._replace(states=states, length=length)

  def _head(self, params):
    """(rows, their logical names)."""
    ends = self._ends.module(params)
    head = ends.embedding if self.config.tied_embedding else ends.head
    return head[...], head.get_metadata('axes')

  def _scaled(self, x_BTD):
    scale = self.config.logit_scale
    return x_BTD if scale == 1 else parameter.scaled(x_BTD, scale)

  def logits(self, params, x_BTD, words=None):
    """x_BTD -> z_BTV in at least float32, vocabulary sharded by the rules.

    words: (V',) int32, of which ids; not sharded then. None: of all.
    """
    x_BTD, out = self._scaled(x_BTD), LOGITS
    head, names = self._head(params)
    if words is not None:
      whole = (None,) * 3
      head = lookup.lookup(head, names, words[None], whole, head.dtype)[0]
      names, out = whole[:2], (*ROWS, None)
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    with jax.named_scope('head'):
      z = project.einsum(
        'BTD,VD->BTV', x_BTD, RESIDUAL, head, names, out, dtype=wide
      )
    if self.config.head_bias:
      bias = self._ends.module(params).head_bias[...]
      bias = bias if words is None else annotate.put(bias, (None,))[words]
      z = z + bias.astype(wide)
    cap = self.config.logit_softcap
    return cap * jnp.tanh(z / cap) if cap else z

  def nll(self, params, x_BTD, targets_BT):
    """Nats (B, T) of targets under `logits`, which are never whole.

    The head has no bias (checks.py).
    """
    x_BTD = self._scaled(x_BTD)
    head, names = self._head(params)
    with jax.named_scope('head'):
      return vocabulary.linear_nll(
        x_BTD, RESIDUAL, head, names, targets_BT, self.config.logit_softcap
      )

  def init_cache(self, rows, slots, dtype=None):
    """An empty packed.Cache for `rows` requests of at most `slots` tokens."""
    dtype = jnp.dtype(dtype or self.config.dtype)
    copies = rows * max(self.config.stream_copies, 1)
    states = tuple(
      self.stack.mixer(kind).init_state(copies, slots, dtype)
      for kind in self.stack.cached
    )
    length = annotate.put(jnp.zeros(rows, jnp.int32), ('batch',))
    return packed_lib.Cache(states, length)
