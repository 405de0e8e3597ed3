"""Weight gradients apart from the backward pass: both factors on a tape.

    B:  dx, and (x, g) of every product y = x w       W:  dw = x^T g

Two functions of one derivative, so that a pipeline may run W later (zero
bubble, arXiv:2401.10241, section 2). Two calls of jax.vjp would repeat the
backward chain in W; here B stops at the products (sharding/tensor/project.py),
which keep x and hand out g as the cotangent of an argument that they otherwise
ignore. Both are kept gathered: W multiplies, and sends nothing. B and W
together take the operations of the joint backward pass.

    taped = Taped()             traced once, for the shapes of x and g
    taped = Taped(zeros)        differentiated with respect to those zeros
    taped = Taped(zeros, True)  x kept sharded until B gathers it: `whole`

Works inside a scan: a Taped function returns its records as values. `Tapes` is
what one phase hands to the other, a pytree.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.sharding.tensor import narrow
from paraxis.sharding.tensor import project

SCANNED = 0  # the part whose arrays have one more axis: units of a scan


class Record(NamedTuple):
  """What is static of one group of products.

  owners: (path, row of it in a unit) of each weight (project.Owned); None of
    one that is not learned.
  """

  group: project.Group
  owners: tuple


class Tape:
  """Records the products of one trace.

  Attributes:
    static: Records. arrays: [(x whole, zeros like each g)], or, with zeros
      given, [x whole], or [x] if it is kept as it came.
  """

  def __init__(self, zeros, as_it_came=False, frozen=frozenset()):
    self._zeros = None if zeros is None else iter(zeros)
    self._as_it_came, self._frozen = as_it_came, frozen
    self.static, self.arrays = [], []

  def records(self, owners):
    """A weight of these owners has a gradient."""
    return any(owner is None or self._learns(owner) for owner in owners)

  def _learns(self, owner):
    return owner[0] not in self._frozen

  def product(self, group, x, weights, owners):
    """The outputs of project.project, recorded; never as a ring."""
    if None in owners:
      raise ValueError(
        f'products {group.equations}: a weight names no owner, so that its '
        'gradient cannot be taken apart from the backward pass; hand it to '
        'project as models/parameter.py: operand gives it.'
      )
    weights = tuple(map(narrow.read, weights))
    owners = tuple(owner if self._learns(owner) else None for owner in owners)
    self.static.append(Record(group, owners))
    if self._zeros is None:
      shapes = jax.eval_shape(functools.partial(_shapes, group), x, weights)
      zeros = tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)
      outs, whole = _product(group, x.dtype, x, zeros, *weights)
      self.arrays.append((whole, zeros))
    else:
      outs, whole = _product(group, x.dtype, x, next(self._zeros), *weights)
      self.arrays.append(x if self._as_it_came else whole)
    return outs


class Taped:
  """Traces of the parts of a function; a part may be the body of a scan.

  Attributes:
    zeros: {part: zeros}, or None on the first trace.
    static: {part: [Record]} once traced.
  """

  def __init__(self, zeros=None, as_it_came=False, frozen=frozenset()):
    """frozen: paths of weights without a gradient."""
    self.zeros, self.static = zeros or {}, {}
    self._options = as_it_came, frozen

  def run(self, part, call, x, zeros):
    """call(x) -> (its result, arrays of its tape)."""
    tape = Tape(zeros, *self._options)
    with project.taped(tape):
      y = call(x)
    self.static[part] = tape.static
    return y, tape.arrays


def _shapes(group, x, weights):
  """g of each product, gathered as the product of its weight needs it."""
  whole = project.gathered_input(group, x)
  weights = project.gathered_weights(group, weights, x.dtype)
  return [
    jnp.einsum(e, whole, w)
    for e, w in zip(group.equations, weights, strict=True)
  ]


def _primal(group, dtype, x, zeros, *weights):
  """dtype: of x, and so of dx and of both factors on the tape."""
  return _product_forward(group, dtype, x, zeros, *weights)[0]


def _product_forward(group, dtype, x, zeros, *weights):
  del dtype, zeros
  outs, _ = project.forward(group, x, *weights)
  return (outs, project.gathered_input(group, x)), weights


def _product_backward(group, dtype, weights, cotangents):
  gs, _ = cotangents
  dx, gathered = project.input_gradient(group, dtype, weights, gs)
  return dx, tuple(gathered), *[None] * len(weights)


_product: Any = jax.custom_vjp(_primal, nondiff_argnums=(0, 1))
_product.defvjp(_product_forward, _product_backward)


def whole(record, x):
  """x of one Record, kept as it came, as `weight_gradients` needs it."""
  return project.gathered_input(record.group, x)


def weight_gradients(record, x, gs):
  """[dw] of one Record from the arrays of its tape, in the dtypes of w."""
  return project.weight_gradients(record.group, x, gs)


def _each(function, record, part):
  """function(record, ...) over the units of what is scanned."""
  run = functools.partial(function, record)
  return jax.vmap(run) if part == SCANNED else run


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tapes:
  """Both factors of every product of a function whose parts are `Taped`.

  xs, gs: for each part a list, an entry for each Record; None: no such part.
  records: for each part a tuple of them, static.
  """

  xs: Any
  gs: Any
  records: tuple = dataclasses.field(metadata=dict(static=True))

  def gathered(self):
    """The same; xs, kept as they came, gathered as the products need them."""
    xs = tuple(
      [
        _each(whole, record, part)(x)
        for record, x in zip(records, self.xs[part] or (), strict=True)
      ]
      for part, records in enumerate(self.records)
    )
    return dataclasses.replace(self, xs=xs)

  def weight_gradients(self):
    """{path: (layers, ...)} of every weight, rows in order."""
    rows = {}  # path -> arrays (layers, ...), in order
    for part, records in enumerate(self.records):
      slots = {}
      factors = self.xs[part] or (), self.gs[part] or ()
      for record, x, g in zip(records, *factors, strict=True):
        made = _each(weight_gradients, record, part)(x, g)
        for owner, dw in zip(record.owners, made, strict=True):
          if owner is not None:
            path, slot = owner
            dw = dw if part == SCANNED else dw[None]
            slots.setdefault(path, {})[slot] = dw
      for path, found in slots.items():
        stacked = jnp.stack([found[s] for s in sorted(found)], 1)
        flat = stacked.reshape(-1, *stacked.shape[2:])
        rows.setdefault(path, []).append(flat)
    return {path: jnp.concatenate(found) for path, found in rows.items()}
