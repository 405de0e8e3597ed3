"""The state of a run, and its canonical tree on disk.

Canonical paths are ours, not optax's or Flax's: 'params/layers/mlp/up',
'optimizer/adamw/mu/embedding', 'ema/embedding', 'step'. A leaf that mirrors a
parameter carries its logical axes, so that a checkpoint can be read onto any
mesh; of others the optimizer says them. On disk counts stand among the
parameters, 'params/layers/moe/load': a model reads both.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.models import depth
from paraxis.models import trained
from paraxis.sharding import annotate
from paraxis.sharding import rules as rules_lib
from paraxis.train import expert_counts


class State(NamedTuple):
  """params: {path: array}, what is learned, or frozen (train.freeze).

  counts: {path: array}, what layers read and count for themselves, without
  gradients (train/expert_counts.py). optimizer: {group: optax state}.
  step: () int32, batches consumed, skipped ones included.
  skipped, skipped_in_a_row: () int32, updates left out for non-finite numbers.
  outer: steps.outer.Outer, or () without replicas that step alone. With it
    params are the anchor, and of optimizer, skipped and skipped_in_a_row every
    array leads with R.
  """

  params: Any
  counts: Any
  optimizer: Any
  step: Any
  skipped: Any
  skipped_in_a_row: Any
  outer: Any = ()

  @property
  def variables(self):
    """{path: array}, all that the model reads; with replicas the anchor."""
    return self.params | self.counts

  @property
  def inner(self):
    """{path: array} at which a step takes the gradient: with replicas (R, ...),
    else `variables`, or the point of a rule (updates/update_rules.py)."""
    if self.outer:
      return self.outer.params
    # Schedule-free rules take it at a point of their own.
    points = (getattr(s, 'point', {}) for s in self.optimizer.values())
    return functools.reduce(dict.__or__, points, self.variables)

  @property
  def replicas(self):
    """R, replicas that step alone; 0: none do."""
    return len(self.skipped) if self.outer else 0


def init(model, optimizer, key):
  """The state before the first step, laid out by the rules in force."""
  counters = [jnp.zeros((), jnp.int32) for _ in range(3)]
  return begun(model, optimizer.init, model.init(key), counters)


def begun(model, init_optimizer, variables, counters):
  """The `State` of a model that reads these variables.

  counters: step, skipped and skipped_in_a_row.
  """
  counted = set(expert_counts.paths(model))
  params = {p: x for p, x in variables.items() if p not in counted}
  counts = {p: x for p, x in variables.items() if p in counted}
  return State(params, counts, init_optimizer(params), *counters)


def _paths(tree):
  """Canonical paths of the leaves of a tree, in their order.

  Names only; the position in a tuple is one where several elements of it hold
  leaves, so that those of two elements never meet in one path.
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  filled = {}  # keys of a tuple -> its elements that hold leaves
  for keys, _ in leaves:
    for i, key in enumerate(keys):
      if isinstance(key, jax.tree_util.SequenceKey):
        filled.setdefault(keys[:i], set()).add(key.idx)
  out = []
  for keys, _ in leaves:
    names = []
    for i, key in enumerate(keys):
      if not isinstance(key, jax.tree_util.SequenceKey):
        names.append(str(getattr(key, 'name', getattr(key, 'key', None))))
      elif len(filled[keys[:i]]) > 1:
        names.append(str(key.idx))
    if names[0] == 'counts':
      names[0] = 'params'
    elif names[:2] == ['optimizer', trained.EMA]:
      del names[0]
    out.append('/'.join(names))
  return out


def flatten(state):
  """State -> {canonical path: leaf}.

  Raises:
    ValueError: two leaves have one path.
  """
  out = {}
  for path, leaf in zip(_paths(state), jax.tree.leaves(state), strict=True):
    if path in out:
      raise ValueError(f'two leaves of the state are both named {path!r}')
    out[path] = leaf
  return out


def unflatten(like, flat):
  """{canonical path: leaf} -> State with the structure of `like`."""
  found = [flat[path] for path in _paths(like)]
  return jax.tree.unflatten(jax.tree.structure(like), found)


class Leaf(NamedTuple):
  """axes: logical axes of a leaf. held: how memory holds its layers."""

  axes: tuple
  held: depth.Held = depth.IN_ORDER


def leaves(state, model, own=()):
  """{canonical path: Leaf} of a State, or of its shapes.

  A leaf whose path ends as a parameter's, and whose shape is the same, mirrors
  that parameter. Of any other with a dimension the optimizer says the axes.
  What every replica has one of leads with the logical axis 'replicas'.

  Args:
    own: {canonical path: logical axes}; what it names mirrors nothing. Layers
      and experts are held as those of the parameter that the path names.

  Raises:
    ValueError: the axes of a leaf are not known, or do not fit it.
  """
  flat, own, every = flatten(state), dict(own), {}
  if state.outer:
    every = {p: x for p, x in flat.items() if _of_replicas(p)}
    one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    flat |= {p: one(x) for p, x in every.items()}
  if unknown := sorted(set(own) - set(flat)):
    raise ValueError(f'axes of {unknown}, which are no leaves of the state')
  shapes = {**state.counts, **state.params}
  out = {}
  for path, leaf in flat.items():
    # The longest: 'norm/scale' also ends 'layers/norm/scale'.
    owners = [p for p in model.axes if f'/{p}/' in f'{path}/']
    owner: Any = max(owners, key=len, default=None)
    if path in own:
      out[path] = Leaf(tuple(own[path]), _held(path, own[path], owner, model))
    elif not leaf.shape:
      out[path] = Leaf(())
    elif path.endswith(f'/{owner}') and leaf.shape == shapes[owner].shape:
      held = model.held.get(owner, depth.IN_ORDER)
      out[path] = Leaf(model.axes[owner], held)
    else:
      raise ValueError(
        f'{path} {leaf.shape} mirrors no parameter: Optimizer.axes must say '
        'its logical axes'
      )
    if len(out[path].axes) != len(leaf.shape):
      raise ValueError(f'{path} {leaf.shape}: axes {out[path].axes}')
  return out | {
    p: out[p]._replace(axes=(rules_lib.REPLICAS, *out[p].axes)) for p in every
  }


def _of_replicas(path):
  """Whether every replica has a leaf of its own at a canonical path."""
  first = path.split('/')[0]
  return first in ('optimizer', 'skipped', 'skipped_in_a_row') or (
    path.startswith(('outer/params/', 'outer/each/'))
  )


def _held(path, names, owner, model):
  """depth.Held of a leaf with axes of its own."""
  by_expert = [d for d, name in enumerate(names) if name in depth.BY_EXPERT]
  layered = names[:1] == ('layers',)
  if owner is None and (by_expert or layered):
    raise ValueError(f'{path}: layers or experts of which parameter?')
  rows, experts = model.held.get(owner, depth.IN_ORDER)
  return depth.Held(
    rows if layered else None,
    (by_expert[0], experts[1]) if experts and by_expert else None,
  )


def axes(leaves):
  """{canonical path: logical axes} of {canonical path: Leaf}."""
  return {path: leaf.axes for path, leaf in leaves.items()}


def _staged(flat, leaves):
  """Yields (path, leaf, Leaf) of leaves held out of order."""
  for path, leaf in flat.items():
    if leaves[path].held != depth.IN_ORDER:
      yield path, leaf, leaves[path]


def in_order(flat, leaves):
  """A flat tree as a checkpoint holds it: layers and experts in order.

  Args:
    flat: {canonical path: array, or jax.ShapeDtypeStruct with its sharding}.
    leaves: {canonical path: Leaf}; the mesh in force.

  One leaf at a time passes through memory with its layers on every stage, and
  with all experts on every device if they have an order of their own. The
  result is sharded again, over as many devices if a dimension allows it; if
  none does, it stays whole.
  """
  out = dict(flat)
  for path, leaf, (_, held) in _staged(flat, leaves):
    whole, shape, spec = _layouts(leaf, held)
    if isinstance(leaf, jax.ShapeDtypeStruct):
      layout = jax.NamedSharding(leaf.sharding.mesh, spec)
      out[path] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=layout)
      continue
    out[path] = annotate.alone(_ordered(leaf, held, whole, spec))
  return out


def _layouts(leaf, held):
  """How a leaf is put in order.

  Returns:
    (PartitionSpec of the leaf with layers and experts whole, where memory has
    an order of its own; its shape in order; the PartitionSpec of that). Mesh
    axes of layers that they do not divide, 5 layers of 2 stages, shard the
    first dimension that they do, or none.
  """
  moved = {0} if held.rows is not None else set()
  if held.experts is not None:
    moved.add(held.experts[0])
  own = [a if isinstance(a, tuple) else (a,) for a in leaf.sharding.spec]
  own = [tuple(a for a in axes if a) for axes in own]
  own += [()] * (len(leaf.shape) - len(own))
  whole = [() if d in moved else axes for d, axes in enumerate(own)]
  layers = leaf.shape[0] if held.rows is None else max(held.rows) + 1
  shape, sharded = (layers, *leaf.shape[1:]), list(whole)
  sizes = leaf.sharding.mesh.shape
  for d in sorted(moved):
    for at in sorted(range(len(own)), key=lambda at: (at != d, at)):
      axes = (*sharded[at], *own[d])
      if shape[at] % math.prod(sizes[a] for a in axes) == 0:
        sharded[at] = axes
        break
  written = lambda spec: jax.P(*[axes or None for axes in spec])
  return written(whole), shape, written(sharded)


@functools.partial(jax.jit, static_argnames=('held', 'whole', 'spec'))
def _ordered(x, held, whole, spec):
  # One function for all leaves: those that are alike compile once in a run.
  return jax.reshard(depth.to_order(jax.reshard(x, whole), *held), spec)


@functools.partial(jax.jit, static_argnames=('held', 'whole', 'sharding'))
def _staged_again(x, held, whole, sharding):
  x = depth.from_order(jax.reshard(x, whole), *held)
  return jax.reshard(x, sharding)


def on_stages(flat, like, leaves):
  """The inverse of `in_order`; like: flat tree of the layouts wanted."""
  out = dict(flat)
  for path, leaf, (_, held) in _staged(like, leaves):
    whole, _, _ = _layouts(leaf, held)
    found = _staged_again(flat[path], held, whole, leaf.sharding)
    out[path] = annotate.alone(found)
  return out
