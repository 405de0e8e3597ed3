"""A decoder described by data: schema.Model -> parameters, features, logits.

Flax modules describe one layer and the two ends; `Decoder` holds their graphs
and works on a flat {path: array} of parameters. Every leaf of a layer is
stacked over the depth under one path ('layers/attention/query', axis 0 is
'layers'), for all layers that have it, in order: the tree on disk is the tree
in memory, and scanned and unrolled runs read the same one. A pattern string
such as 'WF' is a unit repeated over the depth: the scan runs over units, what
is left over runs after it.

Legend: B rows, T tokens, D model, V vocabulary, L layers, S cache slots.
"""

import functools
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from paraxis.models import depth
from paraxis.models import layer as layer_lib
from paraxis.models import parameter
from paraxis.models.mixers import attention
from paraxis.models.mixers import protocol as mixer
from paraxis.sharding import annotate
from paraxis.sharding.tensor import lookup
from paraxis.sharding.tensor import project
from paraxis.sharding.tensor import vocabulary

RESIDUAL = ('batch', 'residual_length', 'hidden')
LOGITS = ('batch', 'length', 'vocab')
ROWS = ('batch', 'length')


class Cache(NamedTuple):
  """What decoding remembers; slot, position and segment are separate.

  states: one entry per layer, as its mixer keeps it. segments, positions:
  (B, S) int32, segment 0 is an empty slot. length: () int32, slots written so
  far (the next free one).
  """

  states: Any
  segments: Any
  positions: Any
  length: Any


def _flat(module):
  state = nnx.to_flat_state(nnx.state(module, nnx.Param))
  return {'/'.join(map(str, path)): v for path, v in state}


class Decoder:
  """Stateless: parameters go in as a flat dict, features come out.

  Attributes:
    axes: path -> logical axes.
    kinds: path -> 'matrix', 'embedding' or 'vector'.
    inputs: path -> contracted dimensions of a matrix, without 'layers'.
    pattern: kind of every layer, length num_layers.
    depth: depth.Depth, which layer each row of a stack holds.
  """

  def __init__(self, config, policy=None, layout=parameter.PLAIN):
    """config: schema.Model. policy: for jax.checkpoint (models/memory.py)."""
    self.config, self.policy, self.layout = config, policy, layout
    self.unit, self.pattern = layer_lib.kinds_of(config)
    self.depth = depth.whole(self.pattern)
    if layout.placement is not None:
      self.depth = depth.share_out(
        self.pattern, layout.placement, len(self.unit)
      )
    self._graphs, self.axes, self.kinds, self.inputs = {}, {}, {}, {}
    self._owners = {}  # path in a layer -> indices of the layers that have it
    self._describe('ends', lambda r: layer_lib.Ends(config, r))
    for kind in sorted(set(self.pattern)):
      self._describe(
        kind, lambda r, kind=kind: layer_lib.Layer(config, r, kind, layout)
      )
    for i, kind in enumerate(self.pattern):
      for path in self._graphs[kind][2]:
        self._owners.setdefault(path, []).append(i)
    self.rows = {
      f'layers/{p}': depth.stack_rows(self.depth, owners)
      for p, owners in self._owners.items()
    }

  def _describe(self, part, make):
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, state = nnx.split(module)
    flat = {'/'.join(map(str, p)): (p, v) for p, v in nnx.to_flat_state(state)}
    params = {p: pv for p, pv in flat.items() if isinstance(pv[1], nnx.Param)}
    self._graphs[part] = (make, graph, params)
    for path, (_, variable) in params.items():
      axes, kind, inputs = parameter.metadata(variable)
      if part != 'ends':
        path, axes = f'layers/{path}', ('layers', *axes)
      self.axes[path], self.kinds[path] = axes, kind
      self.inputs[path] = inputs

  def _module(self, part, values, owners=None):
    _, graph, params = self._graphs[part]
    of = lambda path: dict(owner=owners[path]) if owners else {}
    state = [
      (p, v.replace(values[path], **of(path)))
      for path, (p, v) in params.items()
    ]
    return nnx.merge(graph, nnx.from_flat_state(state))

  def init(self, key):
    """Parameters as {path: array}, laid out by the rules in force."""
    config = self.config
    wide = jnp.dtype(config.param_dtype)

    def make(part, key):
      values = _flat(self._graphs[part][0](nnx.Rngs(key)))
      return {p: v[...].astype(wide) for p, v in values.items()}

    ends_key, layers_key = jax.random.split(key)
    out = make('ends', ends_key)
    keys = jax.random.split(layers_key, config.num_layers)
    stacks = {}  # path -> list of (layer indices, stacked values)
    for kind in sorted(set(self.pattern)):
      of_kind = jnp.array([i for i, k in enumerate(self.pattern) if k == kind])
      values = jax.vmap(functools.partial(make, kind))(keys[of_kind])
      for path, value in values.items():
        stacks.setdefault(path, []).append((of_kind, value))
    for path, parts in stacks.items():
      order = jnp.argsort(jnp.concatenate([i for i, _ in parts]))
      value = jnp.concatenate([v for _, v in parts])
      value = value if len(parts) == 1 else value[order]
      path = f'layers/{path}'
      out[path] = depth.from_order(value, self.rows[path])
    return {p: annotate.put(v, self.axes[p]) for p, v in out.items()}

  def sizes(self, params):
    """{path: numbers in it}; rows of a stack that hold no layer do not count.

    params: {path: array, or jax.ShapeDtypeStruct}.
    """
    rows = lambda p: self.rows.get(p)
    full = lambda p: 1 if rows(p) is None else (rows(p) >= 0).mean()
    return {p: round(math.prod(x.shape) * full(p)) for p, x in params.items()}

  def unstack(self, params):
    """The same parameters with one array per layer: 'layers/3/mlp/up'.

    Decoding reads every weight once per token; a slice of a stack would be
    copied each time.
    """
    out = {p: v for p, v in params.items() if not p.startswith('layers/')}
    for path, owners in self._owners.items():
      for slot, i in enumerate(owners):
        out[f'layers/{i}/{path}'] = params[f'layers/{path}'][slot]
    return out

  def _layer(self, kind, x, see, values, state=None):
    return self._module(kind, values)(x, see, state)

  def _run_unit(self, kinds, x, see, values, on=None):
    """Runs consecutive layers; values: path -> (layers of `kinds`, ...).

    on: (layers of `kinds`,) bool: which are there; those that are not hold
    nothing and change nothing.
    """
    seen = {}
    for i, kind in enumerate(kinds):
      slots = {p: seen.get(p, 0) for p in self._graphs[kind][2]}
      seen |= {p: slot + 1 for p, slot in slots.items()}
      layer = functools.partial(self._layer_of_unit, kind, slots)
      # What a tape records may not stay in what is computed again.
      if self.policy is not None and project.tape() is None:
        layer = jax.checkpoint(layer, policy=self.policy)
      mine = {p: values[p] for p in slots}
      if on is None:
        x = layer(x, see, mine)
        continue
      # What is not there has no tokens, so that its experts count none.
      valid = see.valid & on[i]
      x = jnp.where(on[i], layer(x, see._replace(valid=valid), mine), x)
    return x

  def _layer_of_unit(self, kind, slots, x, see, values):
    # Picked in here: what the backward pass keeps is the unit, not a copy.
    mine = {p: values[p][slot] for p, slot in slots.items()}
    owners = {p: (f'layers/{p}', slot) for p, slot in slots.items()}
    return self._module(kind, mine, owners)(x, see)[0]

  def run(self, kinds, stacks, x, see, on=None, taped=None):
    """Consecutive layers: scanned over whole units, or unrolled.

    Unrolled (model.unroll covers the depth), the stacks are split once, so that
    their gradient is one concatenation: a third less to compile than slices.

    Args:
      kinds: of the layers; they begin a unit. on: see `_run_unit`.
      stacks: 'layers/...' -> (those of the layers that have it, ...), arrays or
        narrow.Narrow.
      x, see: features, and attention.Visibility.
      taped: tape.Taped, to record the products of the layers.

    Returns:
      x; with `taped` (x, arrays of the tape of what is scanned, of the rest).
    """
    unit, unroll = self.unit, self.config.unroll
    stacks = {p: stacks[f'layers/{p}'] for p in self._owners}
    repeats = len(kinds) // len(unit)
    arrays = [None, None]
    scanned = repeats if unroll < repeats else 0
    in_unit = {
      p: sum(i < len(unit) for i in owners)
      for p, owners in self._owners.items()
    }
    if scanned:
      whole = {
        p: jax.tree.map(lambda v, each=n: _units(v, repeats, each), stacks[p])
        for p, n in in_unit.items()
        if n
      }
      some = None
      if on is not None:
        some = on[: repeats * len(unit)].reshape(repeats, len(unit))
      call = lambda x, values, on: self._run_unit(unit, x, see, values, on)
      body = lambda x, row: _taped(taped, 0, call, x, *row)
      zeros = taped and taped.zeros.get(0)
      x, arrays[0] = jax.lax.scan(body, x, (whole, some, zeros), unroll=unroll)
    rest = {}
    for p, v in stacks.items():
      rest[p] = jax.tree.map(_layers, v[in_unit[p] * scanned :])
    done = scanned * len(unit)
    last = None if on is None else on[done:]
    call = lambda x: self._run_unit(kinds[done:], x, see, rest, last)
    x, arrays[1] = _taped(taped, 1, call, x, taped and taped.zeros.get(1))
    return x if taped is None else (x, tuple(arrays))

  def __call__(self, params, batch, cache=None):
    """Features of every token.

    Args:
      params: {path: array} as `init` (or `unstack`, with a cache) gives them.
      batch: models.batch.Batch (only tokens, segments and positions are read).
      cache: `Cache` with room for T more slots, or None.

    Returns:
      (x_BTD in config.dtype, after the final norm; the cache after the step).
    """
    x, see = self.embed(params, batch), self.visibility(batch)
    if cache is None:
      x = self.run(self.pattern, params, x, see)
    else:
      x, cache = self._step(params, x, batch, cache, see)
    return self.normalise(params, x), cache

  def embed(self, params, batch):
    """x_BTD before the first layer."""
    config, ends = self.config, self._ends(params)
    dtype = jnp.dtype(config.dtype)
    x = self._lookup(ends.embedding, batch.tokens, dtype)
    if config.embedding_scale != 1.0:
      x = x * jnp.asarray(config.embedding_scale, dtype)
    if config.position == 'learned':
      x = x + self._lookup(ends.positions, batch.positions, dtype)
    return x

  def visibility(self, batch):
    """attention.Visibility of a batch, without a cache."""
    config = self.config
    valid = batch.segments > 0
    if config.experts.count:
      valid = annotate.part(valid, ROWS, RESIDUAL[:2])
    return attention.Visibility(
      batch.segments,
      batch.positions,
      rotations=attention.rotations(
        config, self.pattern, batch.positions, jnp.dtype(config.dtype)
      ),
      valid=valid,
      denominator=batch.denominator,
    )

  def normalise(self, params, x_BTD):
    """The norm after the last layer."""
    return self._ends(params).norm(x_BTD)

  def _lookup(self, table, ids, dtype):
    names = table.get_metadata('axes')
    return lookup.lookup(table[...], names, ids, RESIDUAL, dtype)

  def _step(self, params, x, batch, cache, see):
    """One pass that writes its tokens into the cache, layer by layer."""
    write = jax.lax.dynamic_update_slice_in_dim
    segments = write(cache.segments, batch.segments, cache.length, 1)
    positions = write(cache.positions, batch.positions, cache.length, 1)
    see = see._replace(
      slot=cache.length, slot_segments=segments, slot_positions=positions
    )
    states = []
    for i, kind in enumerate(self.pattern):
      prefix = f'layers/{i}/'
      mine = {p: params[prefix + p] for p in self._graphs[kind][2]}
      x, state = self._layer(kind, x, see, mine, cache.states[i])
      states.append(state)
    length = cache.length + batch.tokens.shape[1]
    return x, Cache(tuple(states), segments, positions, length)

  def _ends(self, params):
    return self._module('ends', {p: params[p] for p in self._graphs['ends'][2]})

  def _head(self, params):
    """(rows, their logical names)."""
    ends = self._ends(params)
    head = ends.embedding if self.config.tied_embedding else ends.head
    return head[...], head.get_metadata('axes')

  def logits(self, params, x_BTD):
    """x_BTD -> z_BTV in at least float32, vocabulary sharded by the rules."""
    head, names = self._head(params)
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    z = project.einsum(
      'BTD,VD->BTV', x_BTD, RESIDUAL, head, names, LOGITS, dtype=wide
    )
    cap = self.config.logit_softcap
    return cap * jnp.tanh(z / cap) if cap else z

  def nll(self, params, x_BTD, targets_BT):
    """Nats (B, T) of targets under `logits`, which are never whole."""
    head, names = self._head(params)
    return vocabulary.linear_nll(
      x_BTD, RESIDUAL, head, names, targets_BT, self.config.logit_softcap
    )

  def init_cache(self, batch, slots, dtype=None):
    """An empty `Cache` for `batch` rows and `slots` tokens a row."""
    dtype = jnp.dtype(dtype or self.config.dtype)
    states = tuple(
      self._mixer(kind).init_state(batch, slots, dtype) for kind in self.pattern
    )
    ids = [
      annotate.put(jnp.zeros((batch, slots), jnp.int32), ('batch', None))
      for _ in range(2)
    ]
    return Cache(states, *ids, jnp.int32(0))

  def grow_cache(self, cache, slots):
    """`cache` with room for `slots` tokens a row."""
    states = tuple(
      self._mixer(kind).grow(state, slots)
      for kind, state in zip(self.pattern, cache.states, strict=True)
    )
    return cache._replace(
      states=states,
      segments=mixer.more_slots(cache.segments, slots),
      positions=mixer.more_slots(cache.positions, slots),
    )

  def _mixer(self, kind):
    """The mixer of a kind of layer, without values."""
    return nnx.eval_shape(lambda: self._graphs[kind][0](nnx.Rngs(0))).mixer


def _taped(taped, part, call, x, *rest):
  """(call(x, ...), arrays of its tape); the last of `rest` are its zeros."""
  *values, zeros = rest
  run = lambda x: call(x, *values)
  return (run(x), None) if taped is None else taped.run(part, run, x, zeros)


def _layers(stack):
  """[arrays of one layer]."""
  parts = jax.lax.split(stack, [1] * len(stack)) if len(stack) else []
  return [part[0] for part in parts]


def _units(stack, repeats, each):
  """What a scan over `repeats` units reads, `each` layers of the stack a time.

  One layer a unit is read from the stack itself: an index in the loop would
  make a copy of every parameter for the backward pass.
  """
  used = stack if len(stack) == each * repeats else stack[: each * repeats]
  if each == 1:
    return [used]
  return used.reshape(repeats, each, *stack.shape[1:])
