"""The state of a run, and its canonical tree on disk.

Canonical paths are ours, not optax's or Flax's: 'params/layers/mlp/up',
'optimizer/adamw/mu/embedding', 'step'. A leaf that mirrors a parameter carries
its logical axes, so that a checkpoint can be read onto any mesh. On disk counts
stand among the parameters, 'params/layers/moe/load': a model reads both.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.models import depth
from paraxis.sharding import annotate
from paraxis.train import expert_counts


class State(NamedTuple):
  """params: {path: array}, what is learned, or frozen (train.freeze).

  counts: {path: array}, what layers read and count for themselves, without
  gradients (train/expert_counts.py). optimizer: {group: optax state}.
  step: () int32, batches consumed, skipped ones included.
  skipped, skipped_in_a_row: () int32, updates left out for non-finite numbers.
  """

  params: Any
  counts: Any
  optimizer: Any
  step: Any
  skipped: Any
  skipped_in_a_row: Any

  @property
  def variables(self):
    """{path: array}, all that the model reads."""
    return self.params | self.counts


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


def _path(keys):
  """Key path of a leaf -> canonical path: names only, no tuple positions."""
  names = []
  for k in keys:
    name = getattr(k, 'name', getattr(k, 'key', None))
    if name is not None:
      names.append(str(name))
  if names[:1] == ['counts']:
    names[0] = 'params'
  return '/'.join(names)


def flatten(state):
  """State -> {canonical path: leaf}."""
  out = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
    path = _path(keys)
    if path in out:
      raise ValueError(f'two leaves of the state are both named {path!r}')
    out[path] = leaf
  return out


def unflatten(like, flat):
  """{canonical path: leaf} -> State with the structure of `like`."""
  return jax.tree_util.tree_map_with_path(
    lambda keys, _: flat[_path(keys)], like
  )


def _owner(path, leaf, model):
  """The parameter that a leaf mirrors, or None."""
  # The longest: 'norm/scale' also ends 'layers/norm/scale'.
  owners = (p for p in model.axes if path.endswith('/' + p))
  owner = max(owners, key=len, default=None)
  mirrors = owner is not None and len(model.axes[owner]) == len(leaf.shape)
  return owner if mirrors else None


def axes(state, model):
  """{canonical path: logical axes} of every leaf."""
  out = {}
  for path, leaf in flatten(state).items():
    owner = _owner(path, leaf, model)
    out[path] = model.axes[owner] if owner else (None,) * len(leaf.shape)
  return out


def _staged(flat, model):
  """Yields (path, leaf, axes, depth.Held) of leaves held out of order."""
  for path, leaf in flat.items():
    owner = _owner(path, leaf, model)
    held = model.held.get(owner, depth.IN_ORDER)
    if held != depth.IN_ORDER:
      yield path, leaf, model.axes[owner], held


def in_order(flat, model):
  """A flat tree as a checkpoint holds it: layers and experts in order.

  Args:
    flat: {canonical path: array, or jax.ShapeDtypeStruct with its sharding}.
    model: models.decoder.Decoder, its rules and mesh in force.

  One leaf at a time passes through memory with its layers on every stage, and
  with all experts on every device if they have an order of their own.
  """
  out = dict(flat)
  for path, leaf, names, held in _staged(flat, model):
    layers = leaf.shape[0] if held.rows is None else max(held.rows) + 1
    moved = 0, held.experts and held.experts[0]
    whole = [None if d in moved else name for d, name in enumerate(names)]
    mesh = leaf.sharding.mesh
    if isinstance(leaf, jax.ShapeDtypeStruct):
      shape = layers, *leaf.shape[1:]
      layout = jax.NamedSharding(mesh, annotate.spec(whole))
      out[path] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=layout)
      continue
    found = _ordered(leaf, held, annotate.spec(whole))
    # Many programs with collectives at once can starve each other on CPU.
    out[path] = jax.block_until_ready(found)
  return out


@functools.partial(jax.jit, static_argnames=('held', 'spec'))
def _ordered(x, held, spec):
  # One function for all leaves: those that are alike compile once in a run.
  return depth.to_order(jax.reshard(x, spec), *held)


@functools.partial(jax.jit, static_argnames=('held', 'sharding'))
def _staged_again(x, held, sharding):
  return jax.reshard(depth.from_order(x, *held), sharding)


def on_stages(flat, like, model):
  """The inverse of `in_order`; like: flat tree of the layouts wanted."""
  out = dict(flat)
  for path, leaf, _, held in _staged(like, model):
    found = _staged_again(flat[path], held, leaf.sharding)
    out[path] = jax.block_until_ready(found)
  return out
