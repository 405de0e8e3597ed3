"""Layers stacked over the depth: their parameters, and how they are run.

Every leaf of a layer is stacked under one path ('layers/attention/query', axis
0 is 'layers') for all layers that have it, in order: the tree on disk is the
tree in memory, and scanned and unrolled runs read the same one. A pattern
string such as 'WF' is a unit repeated over the depth: the scan runs over units,
the layers that are left over run after it.

Layers may share parameters (parameter.share): a stack has a row for each block,
which layers read in turn. A scan closes over them, and adds their gradients up.

A `Stack` has a skeleton.Skeleton for each kind of layer.

Legend: B rows, T tokens, D model.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from paraxis.models import aux as aux_lib
from paraxis.models import depth
from paraxis.models import layer as layer_lib
from paraxis.models import parameter
from paraxis.models import skeleton as skeleton_lib
from paraxis.models import trained as trained_lib
from paraxis.models import wiring
from paraxis.sharding.tensor import project

SCANNED, REST = range(2)  # parts of a run, as a tape numbers them


def _leaves(kinds):
  """{'layers/...': Leaf} of {kind: Skeleton}."""
  return {
    f'layers/{path}': leaf
    for skeleton in kinds.values()
    for path, leaf in skeleton.leaves.items()
  }


class Stack:
  """The layers of a decoder; stateless, as models.decoder.Decoder.

  Attributes:
    unit, pattern: kinds of the layers of a unit, and of every layer; cached:
      of what a cache has an entry for.
    leaves: 'layers/...' -> `Leaf` of a layer, without the axis 'layers'.
    depth: depth.Depth, which layer each row of a stack holds.
    held: 'layers/...' -> depth.Held, how memory holds the stack.
    owners: path in a layer -> the layers whose rows its stack has, in order.
  """

  def __init__(
    self,
    config,
    policy=None,
    layout=parameter.PLAIN,
    trained=trained_lib.EVERYTHING,
  ):
    """config: schema.Model. policy: for jax.checkpoint (models/memory.py)."""
    self.config, self._policy = config, policy
    self.unit, self.pattern = layer_lib.kinds_of(config)
    self.cached = self.learned = self.pattern
    self.depth = depth.whole(self.pattern)
    if layout.placement is not None:
      self.depth = depth.share_out(
        self.pattern, layout.placement, len(self.unit)
      )
    layer = functools.partial(layer_lib.Layer, config, layout=layout)
    makes = {k: functools.partial(layer, kind=k) for k in set(self.pattern)}
    self._kinds = {k: skeleton_lib.Skeleton(makes[k]) for k in sorted(makes)}
    self.leaves = _leaves(self._kinds)
    chosen = trained_lib.targets(trained, self.leaves)
    if chosen:
      inside = {path.removeprefix('layers/') for path in chosen}
      for kind, make in makes.items():
        make = trained_lib.adapted(make, inside, trained)
        self._kinds[kind] = skeleton_lib.Skeleton(make)
      self.leaves = _leaves(self._kinds)
    self._blocks = {
      path.removeprefix('layers/'): blocks
      for path, leaf in self.leaves.items()
      if (blocks := parameter.shared(leaf.variable))
    }
    # Path in a layer -> layer -> the first that reads its row: itself, mostly.
    self._homes = depth.homes(
      [self._kinds[kind].leaves for kind in self.pattern], self._row
    )
    self.owners = {p: sorted({*of.values()}) for p, of in self._homes.items()}
    self._in_unit = {
      path: sum(i < len(self.unit) for i in owners)
      for path, owners in self.owners.items()
      if path not in self._blocks
    }
    self.held = {
      f'layers/{path}': self._held(path, owners, layout.experts)
      for path, owners in self.owners.items()
    }

  def _row(self, path, use):
    """Row of a parameter that its reader number `use` has: blocks in turn."""
    return use % self._blocks.get(path, use + 1)

  def _held(self, path, owners, order):
    """depth.Held of the stack of a parameter that layers `owners` have."""
    rows = depth.stack_rows(self.depth, owners)
    axes = self.leaves[f'layers/{path}'].axes
    by_expert = [d for d, a in enumerate(axes, 1) if a in depth.BY_EXPERT]
    experts = (by_expert[0], order) if order and by_expert else None
    return depth.Held(None if rows is None else tuple(rows.tolist()), experts)

  def init(self, key: jax.Array) -> dict[str, jax.Array]:
    """{'layers/...': stack of new parameters}, rows as memory holds them."""
    dtype = jnp.dtype(self.config.param_dtype)
    keys = jax.random.split(key, self.config.num_layers)
    stacks = {}  # path -> list of (layer indices, stacked values)
    for kind, skeleton in self._kinds.items():
      init = functools.partial(skeleton.init, dtype=dtype)
      for layers, paths in self._alike(kind):
        made = jax.vmap(init)(keys[layers])
        for path in paths:
          stacks.setdefault(path, []).append((layers, made[path]))
    out = {}
    for path, parts in stacks.items():
      order = jnp.argsort(jnp.concatenate([i for i, _ in parts]))
      value = jnp.concatenate([v for _, v in parts])
      value = value if len(parts) == 1 else value[order]
      path = f'layers/{path}'
      out[path] = depth.from_order(value, *self.held[path])
    return out

  def _alike(self, kind):
    """[(layers of a kind, paths that they own)]."""
    of_kind, out = [i for i, k in enumerate(self.pattern) if k == kind], {}
    for path in self._kinds[kind].leaves:
      layers = tuple(i for i in of_kind if i in self.owners[path])
      out.setdefault(layers, []).append(path)
    return [(jnp.array(i), paths) for i, paths in out.items() if i]

  def sizes(self, params) -> dict[str, int]:
    """{path: numbers in it}; rows of a stack that hold no layer do not count.

    params: {path: array, or jax.ShapeDtypeStruct}.
    """
    out = {path: math.prod(x.shape) for path, x in params.items()}
    for path, (rows, _) in self.held.items():
      if rows is not None and path in out:
        out[path] = round(out[path] * sum(r >= 0 for r in rows) / len(rows))
    return out

  def uses(self, path, learned=False) -> float:
    """Layers that read each row of a parameter: 1 where each has its own.

    learned: of what gradients flow through alone.
    """
    del learned  # all of it
    path = path.removeprefix('layers/')
    if path not in self._blocks:
      return 1
    return len(self._homes[path]) / len(self.owners[path])

  def unstack(self, params):
    """The same parameters with one array per layer: 'layers/3/mlp/up'.

    Decoding reads every weight once per token; a slice of a stack would be
    copied each time.
    """
    out = {p: v for p, v in params.items() if not p.startswith('layers/')}
    for path, owners in self.owners.items():
      for slot, i in enumerate(owners):
        out[f'layers/{i}/{path}'] = params[f'layers/{path}'][slot]
    return out

  def mixer(self, kind) -> Any:
    """The mixer of a kind of layer, without values."""
    return self._kinds[kind].abstract().mixer

  def run(self, kinds, stacks, carry, see, on=None):
    """Consecutive layers: scanned over whole units, or unrolled.

    Unrolled (model.unroll covers the depth), the stacks are split once, so that
    their gradient is one concatenation: a third less to compile than slices.

    Args:
      kinds: of the layers; as many whole units as they begin with are scanned.
      stacks: 'layers/...' -> (those of the layers that have it, ...), arrays or
        narrow.Narrow.
      carry: features x_BTD, or as wiring.py has them.
      see: attention.Visibility.
      on: (layers,) bool: the rows that hold a layer; an empty row changes
        nothing. None: all.

    Returns:
      (carry, aux.Aux of the layers together).
    """
    units, aux = self._units(kinds), aux_lib.NOTHING
    blocks = self._shared(stacks)
    if units:
      body = functools.partial(self._run_unit, self.unit, see, blocks)
      xs = self._scanned(units, stacks, on)
      carry, found = jax.lax.scan(body, carry, xs, unroll=self.config.unroll)
      aux = aux_lib.of_units(found)
    left = kinds[units * len(self.unit) :]
    rest = self._rest(units, stacks, on)
    carry, more = self._run_unit(left, see, blocks, carry, rest)
    return carry, aux_lib.whole(aux_lib.joined(aux, more))

  def run_watched(self, stacks, carry, see, watch, rows):
    """`run` of all layers, and what `watch` makes of the carry behind each.

    Args:
      watch: (carry, its row) -> pytree of arrays.
      rows: pytree of (layers, ...), one for each layer.

    Returns:
      (carry, aux.Aux, pytree of (layers, ...)).
    """
    units, size = self._units(self.pattern), len(self.unit)
    blocks = self._shared(stacks)

    def body(kinds, x, row):
      (*row, own), made = row, []

      def behind(i, x):
        made.append(watch(x, jax.tree.map(lambda rows: rows[i], own)))

      x, aux = self._run_unit(kinds, see, blocks, x, row, behind)
      return x, (aux, jax.tree.map(lambda *each: jnp.stack(each), *made))

    aux, parts = aux_lib.NOTHING, []
    if units:
      fold = lambda x: x[: units * size].reshape(units, size, *x.shape[1:])
      xs = (*self._scanned(units, stacks, None), jax.tree.map(fold, rows))
      run = functools.partial(body, self.unit)
      carry, (found, seen) = jax.lax.scan(
        run, carry, xs, unroll=self.config.unroll
      )
      aux = aux_lib.of_units(found)
      unfold = lambda x: x.reshape(units * size, *x.shape[2:])
      parts.append(jax.tree.map(unfold, seen))
    left = self.pattern[units * size :]
    if left:
      own = jax.tree.map(lambda x: x[units * size :], rows)
      row = (*self._rest(units, stacks, None), own)
      carry, (more, seen) = body(left, carry, row)
      aux = aux_lib.joined(aux, more)
      parts.append(seen)
    whole = jax.tree.map(lambda *each: jnp.concatenate(each), *parts)
    return carry, aux_lib.whole(aux), whole

  def run_taped(self, taped, kinds, stacks, carry, see, on=None):
    """`run`, its products recorded by a tape.Taped.

    Returns:
      (carry, aux.Aux, (arrays of the tape of what is scanned, of the rest)).
    """

    def body(part, kinds, x, row):
      *row, zeros = row
      call = lambda x: self._run_unit(kinds, see, {}, x, row)
      (x, aux), arrays = taped.run(part, call, x, zeros)
      return x, (aux, arrays)

    units, aux, scanned = self._units(kinds), aux_lib.NOTHING, None
    if units:
      xs = (*self._scanned(units, stacks, on), taped.zeros.get(SCANNED))
      run = functools.partial(body, SCANNED, self.unit)
      carry, (found, scanned) = jax.lax.scan(
        run, carry, xs, unroll=self.config.unroll
      )
      aux = aux_lib.of_units(found)
    left = kinds[units * len(self.unit) :]
    row = (*self._rest(units, stacks, on), taped.zeros.get(REST))
    carry, (more, rest) = body(REST, left, carry, row)
    return carry, aux_lib.whole(aux_lib.joined(aux, more)), (scanned, rest)

  def _units(self, kinds):
    """How many units of these layers are scanned; 0: all are unrolled."""
    units, size = 0, len(self.unit)
    while kinds[units * size : (units + 1) * size] == self.unit:
      units += 1
    return units if self.config.unroll < units else 0

  def _shared(self, stacks):
    """{path: [of each block]} of what layers share."""
    stacks = {path: stacks[f'layers/{path}'] for path in self._blocks}
    return {p: jax.tree.map(_layers_of, x) for p, x in stacks.items()}

  def _scanned(self, units, stacks, on):
    """What a scan over units reads: (values, on) with units first."""
    values = {}
    for path, each in self._in_unit.items():
      if each:
        cut = functools.partial(_units_of, units=units, each=each)
        values[path] = jax.tree.map(cut, stacks[f'layers/{path}'])
    if on is not None:
      on = on[: units * len(self.unit)].reshape(units, len(self.unit))
    return values, on

  def _rest(self, units, stacks, on):
    """(values, on) of the layers after the units that are scanned."""
    values = {}
    for path, each in self._in_unit.items():
      left = stacks[f'layers/{path}'][each * units :]
      values[path] = jax.tree.map(_layers_of, left)
    return values, None if on is None else on[units * len(self.unit) :]

  def _run_unit(self, kinds, see, blocks, x, row, behind=None):
    """Consecutive layers, as the body of a scan -> (carry, aux.Aux, in parts).

    blocks: of `_shared`. row: (values, on). values: path -> (layers of `kinds`
    that have it, ...).
    on: (layers of `kinds`,) bool: the rows that hold a layer, or None.
    behind: called with (i, carry) behind each layer, or None.
    """
    values, on = row
    values = values | blocks
    seen, found = {}, []
    for i, kind in enumerate(kinds):
      uses = {p: seen.get(p, 0) for p in self._kinds[kind].leaves}
      seen |= {p: use + 1 for p, use in uses.items()}
      slots = {p: self._row(p, use) for p, use in uses.items()}
      layer = functools.partial(self._run_layer, kind, slots)
      # A tape's records may not be recomputed: they leave the layer as values.
      if self._policy is not None and project.tape() is None:
        layer = jax.checkpoint(layer, policy=self._policy)
      mine = {p: values[p] for p in slots}
      given = x = wiring.enter(self.config, x, i)
      if on is None:
        x, aux = layer(x, see, mine)
      else:
        # An empty row has no valid tokens: none waits for its experts.
        valid = see.valid & on[i]
        y, aux = layer(x, see._replace(valid=valid), mine)
        held = lambda y, x, i=i: jnp.where(on[i], y, x)
        x, aux = jax.tree.map(held, y, x), aux_lib.select(on[i], aux)
      x = wiring.leave(self.config, given, x, i)
      found.append(aux)
      if behind is not None:
        behind(i, x)
    return x, aux_lib.stacked(found)

  def _run_layer(self, kind, slots, x, see, values):
    # Picked in here: what the backward pass keeps is the unit, not a copy.
    mine = {p: values[p][slot] for p, slot in slots.items()}
    owners = {p: (f'layers/{p}', slot) for p, slot in slots.items()}
    with _scope(kind):
      y, _, aux = self._kinds[kind].module(mine, owners)(x, see, None)
    return y, aux

  def step(self, params, carry, see, states, together=1, layers=None):
    """Tokens in flight over a cache -> (carry, what each layer has in flight).

    Args:
      together: mixers of so many layers read the features of the first one.
      layers: which; None: all. params: as `unstack` gives them.
      carry, see: as of `run`, attention.Visibility with its plan.
      states: one entry per layer, as its mixer keeps it.
    """
    new, read = [], None
    layers = range(len(self.pattern)) if layers is None else layers
    for i, before in zip(layers, states, strict=True):
      kind = self.pattern[i]
      skeleton = self._kinds[kind]
      given = carry = wiring.enter(self.config, carry, i)
      read = read if i % together else wiring.read(carry)
      at = {p: f'layers/{self._homes[p][i]}/{p}' for p in skeleton.leaves}
      mine = {p: params[name] for p, name in at.items()}
      with _scope(kind):
        carry, state, _ = skeleton.module(mine)(carry, see, before, read)
      carry = wiring.leave(self.config, given, carry, i)
      new.append(state)
    return carry, tuple(new)


def _scope(kind):
  """'layer_F', 'layer_FE': the name of what a layer of this kind does."""
  return jax.named_scope(f'layer_{kind.removesuffix(".")}')


def _layers_of(stack):
  """[arrays of one layer]."""
  parts = jax.lax.split(stack, [1] * len(stack)) if len(stack) else []
  return [part[0] for part in parts]


def _units_of(stack, units, each):
  """What a scan over `units` reads, `each` layers of the stack a time.

  One layer a unit is read from the stack itself: an index in the loop would
  make a copy of every parameter for the backward pass.
  """
  used = stack if len(stack) == each * units else stack[: each * units]
  if each == 1:
    return [used]
  return used.reshape(units, each, *stack.shape[1:])
