"""The state of a run, and its canonical tree on disk.

Canonical paths are ours, not optax's or Flax's: 'params/layers/mlp/up',
'optimizer/adamw/mu/embedding', 'step'. A leaf that mirrors a parameter carries
its logical axes, so that a checkpoint can be read onto any mesh.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class State(NamedTuple):
  """params: {path: array}. optimizer: {group: optax state}.

  step: () int32, batches consumed, skipped ones included.
  skipped, skipped_in_a_row: () int32, updates left out for non-finite numbers.
  """

  params: Any
  optimizer: Any
  step: Any
  skipped: Any
  skipped_in_a_row: Any


def init(model, optimizer, key):
  """The state before the first step, laid out by the rules in force."""
  params = model.init(key)
  counters = [jnp.zeros((), jnp.int32) for _ in range(3)]
  return State(params, optimizer.init(params), *counters)


def _path(keys):
  """Key path of a leaf -> canonical path: names only, no tuple positions."""
  names = []
  for k in keys:
    name = getattr(k, 'name', getattr(k, 'key', None))
    if name is not None:
      names.append(str(name))
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


def axes(state, model):
  """{canonical path: logical axes} of every leaf."""
  out = {}
  for path, leaf in flatten(state).items():
    # The longest: 'norm/scale' also ends 'layers/norm/scale'.
    owners = (p for p in model.axes if path.endswith('/' + p))
    owner = max(owners, key=len, default=None)
    mirrors = owner is not None and len(model.axes[owner]) == len(leaf.shape)
    out[path] = model.axes[owner] if mirrors else (None,) * len(leaf.shape)
  return out
