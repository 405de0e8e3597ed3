"""How a module declares and multiplies a parameter: value, logical axes, kind.

A parameter names logical axes only; sharding/rules.py alone knows the mesh. The
metadata travels with the Flax variable: `axes` (one name per dimension), `kind`
('matrix', 'embedding' or 'vector', which optimizers and weight decay go by) and
`inputs` (how many leading dimensions a matrix contracts with its input).
"""

import functools
import math
from typing import Any, NamedTuple
import weakref

from flax import nnx
import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.sharding import annotate
from paraxis.sharding.tensor import project


class Layout(NamedTuple):
  """The choices of a layout that modules read; never mesh axes.

  rings: products that run as collective matmuls: 'qkv', 'output', 'gate_up',
  'down'. context: sharding.sequence.attention.ContextPlan, or None. placement:
  virtual stage of every chunk of every pipeline stage (stages, chunks), or
  None: one stage. scan: sharding.sequence.scan.ScanPlan, how states of
  recurrences cross shards of the length, or None. experts: expert of every slot
  of their stacks, (): in order.
  """

  rings: tuple = ()
  context: Any = None
  placement: Any = None
  scan: Any = None
  experts: tuple = ()


PLAIN = Layout()
ADAPTERS = '_lora_a', '_lora_b'  # behind the name of their parameter
OWN_ADAPTERS = '_adapter_a', '_adapter_b'  # that are part of the model
# Module -> the names of its A that `multiply` met.
_met: weakref.WeakKeyDictionary[Any, set] = weakref.WeakKeyDictionary()


def matrix(rngs, shape, axes, inputs=1, std=0.0, gain=1.0):
  """A matrix, normal with standard deviation gain * (std or fan_in ** -0.5).

  It is read by `multiply`, which is where adapters act; what is read otherwise
  is an `embedding`, or `diagonal`.
  """
  std = std or math.prod(shape[:inputs]) ** -0.5
  value = jax.random.normal(rngs.params(), shape) * (std * gain)
  return nnx.Param(value, axes=axes, kind='matrix', inputs=inputs)


def adapters(rngs, variable, rank, scale, **more):
  """(A (inputs, rank), normal; B (rank, outputs), 0) of a `matrix`.

  scale: of their product, which `multiply` adds. more: metadata of both.
  """
  axes, _, inputs = metadata(variable)
  shape = variable[...].shape
  a = matrix(rngs, (*shape[:inputs], rank), (*axes[:inputs], None), inputs)
  b = nnx.Param(
    jnp.zeros((rank, *shape[inputs:])),
    axes=(None, *axes[inputs:]),
    kind='matrix',
    inputs=1,
    scale=scale,
  )
  for x in (a, b):
    x.set_metadata(**more)
  return a, b


def own_adapters(rngs, module, names, rank):
  """Gives matrices of a module adapters that are part of the model.

  names: of matrices that have one A together, and a B each.
  """
  first = '_'.join(names) + OWN_ADAPTERS[0]
  for name in names:
    a, b = adapters(rngs, getattr(module, name), rank, 1.0, behind=first)
    setattr(module, first, a)
    setattr(module, name + OWN_ADAPTERS[1], b)


def share(module, blocks):
  """Makes layers share the parameters that a module has by now.

  blocks: that there are: of the layers with such a module the i-th reads block
    i % blocks (models/stack.py).
  """
  for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
    variable.set_metadata(shared=blocks)


def shared(variable) -> int:
  """Blocks of a parameter that layers `share`; 0: each layer has its own."""
  return variable.get_metadata('shared', 0)


def beside(name):
  """Names of both adapters of a parameter in its module."""
  return tuple(f'{name}{end}' for end in ADAPTERS)


def embedding(rngs, shape, axes, std):
  """A table of rows, normal with standard deviation `std`."""
  value = jax.random.normal(rngs.params(), shape) * std
  return nnx.Param(value, axes=axes, kind='embedding', inputs=1)


def taps(rngs, width, shape, axes):
  """Taps of a causal convolution, each a row: no matrix, for its weights are
  those of separate channels. Updated by Adam, with weight decay."""
  out = embedding(rngs, (width, *shape), (None, *axes), width**-0.5)
  out.set_metadata(taps=True)
  return out


def vector(shape, axes, fill=0.0):
  """A scale or a bias, constant at the start and without weight decay."""
  return nnx.Param(jnp.full(shape, fill), axes=axes, kind='vector', inputs=0)


def diagonal(rngs, shape, axes, std):
  """Weights of element-wise products: normal, without weight decay."""
  value = jax.random.normal(rngs.params(), shape) * std
  return nnx.Param(value, axes=axes, kind='vector', inputs=0)


def operand(variable):
  """(w, axes) of a matrix, as sharding/tensor/project.py multiplies it.

  w names its owner if the variable does (models/stack.py: `_run_layer`).
  """
  value, owner = variable[...], variable.get_metadata('owner', None)
  w = value if owner is None else project.Owned(value, owner)
  return w, variable.get_metadata('axes')


def scaled(x, factor):
  """x times a number, multiplied in at least float32 and rounded once.

  In bfloat16 the number itself would be rounded, alike for every token.
  """
  wide = jnp.promote_types(x.dtype, jnp.float32)
  return (x.astype(wide) * factor).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False)
def weighed(weights, arrays):
  """sum_i w_i x_i in at least float32, rounded once to the dtype of x_0.

  The gradient of a weight is summed as widely, over what it is broadcast to.
  For it the arrays are kept as they are given, and nothing wider.
  """
  dtype = arrays[0].dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  pairs = zip(weights, arrays, strict=True)
  parts = [w.astype(wide) * x.astype(wide) for w, x in pairs]
  return functools.reduce(jnp.add, parts).astype(dtype)


def metadata(variable):
  """(axes, kind, inputs) of a parameter."""
  get = variable.get_metadata
  return get('axes'), get('kind'), get('inputs')


def multiply(module, x, x_names, products, ring='', dtype=None, biased=False):
  """Products of one activation with parameters of a module.

  Args:
    module: has a `layout` and the parameters.
    x: activation, laid out by the logical names `x_names`; gathered once.
    products: (name of a parameter, einsum equation, names of the output).
    ring: which of Layout.rings these products are; '': none.
    dtype: of accumulation and outputs; default that of x.
    biased: add the parameter `NAME_bias` wherever the module has one.

  A parameter with adapters (models/trained.py; `own_adapters`) has their
  product added.

  Returns:
    A list of outputs, as of project.project.
  """
  weights = [(eq, getattr(module, name), out) for name, eq, out in products]
  outs = project.project(
    x,
    x_names,
    [(eq, *operand(w), out) for eq, w, out in weights],
    dtype,
    ring in module.layout.rings,
  )
  for i, more in _low_rank(module, x, x_names, products, dtype):
    outs[i] = outs[i] + more
  for i, (name, *_) in enumerate(products):
    bias = getattr(module, f'{name}_bias', None)
    if biased and bias is not None:
      outs[i] = (outs[i] + bias[...]).astype(outs[i].dtype)
  return outs


def _low_rank(module, x, x_names, products, dtype):
  """[(index, scale (x A) B)] of those products whose parameter has adapters."""
  mine = [
    (i, a, getattr(module, b), _apart(equation, x_names, out), out)
    for i, (name, equation, out) in enumerate(products)
    for a, b in _adapters_of(module, name)
  ]
  if not mine:
    return []
  _met.setdefault(module, set()).update(a for _, a, *_ in mine)
  # One A may be of several products: x is multiplied by it once.
  firsts = {a: (first, names) for _, a, _, (first, _, names), _ in mine}
  lows = project.project(
    x,
    x_names,
    [
      (first, *operand(getattr(module, a)), names)
      for a, (first, names) in firsts.items()
    ],
  )
  low_of, found = dict(zip(firsts, lows, strict=True)), []
  for i, a, b, (_, second, names), out in mine:
    low = scaled(low_of[a], b.get_metadata('scale'))
    (y,) = project.project(low, names, [(second, *operand(b), out)], dtype)
    found.append((i, y))
  return found


def check_met(mixer):
  """UserError if a module that ran has adapters that `multiply` never met."""
  for path, _ in nnx.to_flat_state(nnx.state(mixer, nnx.Param)):
    *inside, name = map(str, path)
    owner = functools.reduce(getattr, inside, mixer)
    if name.endswith(ADAPTERS[0]) and name not in _met.get(owner, ()):
      matrix = '/'.join([*inside, name.removesuffix(ADAPTERS[0])])
      raise errors.UserError(
        f'train.lora: matrix {matrix} of {type(mixer).__name__} is not read '
        'by parameter.multiply, so its adapters would learn nothing: read it '
        'so, make it with parameter.embedding, or name others in '
        'train.lora.targets.'
      )


def _adapters_of(module, name):
  """Yields (name of A, name of B) of those of a parameter."""
  a, b = beside(name)
  if hasattr(module, a):
    yield a, b
  own = name + OWN_ADAPTERS[1]
  if hasattr(module, own):
    yield getattr(module, own).get_metadata('behind'), own


def _apart(equation, x_names, out):
  """'BTD,DNH->BTNH' -> ('BTD,Dr->BTr', 'BTr,rNH->BTNH', names of BTr).

  Tokens of what is between lie as finely as in x or in the result: it is never
  gathered, and what devices have a share of is scattered.
  """
  ins, result = equation.split('->')
  x, w = ins.split(',')
  inputs = ''.join(a for a in w if a in x)
  kept = ''.join(a for a in x if a not in w)
  if not result.startswith(kept) or set(inputs) & set(result):
    raise ValueError(f'einsum {equation}: no product with a matrix.')
  of_x, of_out = (
    dict(zip(x, x_names, strict=True)),
    dict(zip(result, out, strict=True)),
  )
  count = lambda name: len(annotate.carriers(name))
  names = [max(of_x[a], of_out[a], key=count) for a in kept]
  return (
    f'{x},{inputs}r->{kept}r',
    f'{kept}r,r{result[len(kept) :]}->{result}',
    (*names, None),
  )
