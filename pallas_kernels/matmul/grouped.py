"""Products of rows with the matrix of their group, rows sorted by group.

    y_s = x_s W_e(s)        dW_e = sum over s of e: x_s^T g_s

Groups are runs of rows whose lengths are data (MegaBlocks, arXiv:2211.15841,
section 4). `blocks` takes runs whose lengths are multiples of a block: every
block then has one matrix, and a scan over blocks costs S D F, whatever the
number of groups; a block of zeros costs only the test for zeros. `pallas_gpu`
takes such runs too: a kernel for GPUs (grouped_gpu.py), where a scan is a
launch and a wait for every block (33 of 727 TF/s on H200, measured); it tests
for no zeros, but skips what is behind the last run. `ragged` is
jax.lax.ragged_dot, a kernel on TPU; elsewhere XLA multiplies all rows with all
matrices (on CPU 4 to 11 times the time of `blocks` at E = 8 to 16, measured;
on GPU read from the program compiled for H200). `even` is a batched product of
runs of equal length. Third-party kernels, never chosen by 'auto': `megablox` of
jax, for TPU, and `tokamax` where it is installed (../tokamax_adapter.py).

Legend: S rows, E groups, D input width, F output width, G blocks, N rows of a
block.
"""

import dataclasses
import functools
import importlib
import math

import jax
import jax.numpy as jnp

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import tokamax_adapter
from paraxis.pallas_kernels.matmul import grouped_gpu

OP = 'grouped_matmul'
ROWS = 128  # of a tile of megablox
# The module: the package has a function of the same name over it.
megablox = importlib.import_module(
  'jax.experimental.pallas.ops.tpu.megablox.gmm'
)


@dataclasses.dataclass(frozen=True)
class GroupedSpec:
  """Properties of a call that decide whether an implementation can run.

  rows, dtype: of x. size: rows of a block. others: dtypes of what x is
  multiplied with. result: dtype of the result. most: elements of the matrices
  of all groups.
  """

  rows: int
  dtype: str
  size: int = grouped_gpu.MOST_ROWS
  others: tuple[str, ...] = ()
  result: str = 'float32'
  most: int = 0
  sharded: bool = False


def block(rows, groups, impl='auto'):
  """Rows of a block of the implementation that runs here; 1: it needs none.

  Half an even share, a multiple of 8 between 8 and 128 (pallas_gpu: a power of
  two between 16 and 128): on average a run then has a quarter of its length of
  zeros at its end.
  """
  name, half = registry.resolve(OP, impl).name, rows // (2 * groups)
  if name == 'pallas_gpu':
    return grouped_gpu.block(half)
  return min(max(half // 8 * 8, 8), 128) if name == 'blocks' else 1


def capacity(rows, groups, size):
  """S that always holds `rows` rows in runs rounded up to whole blocks."""
  return (-(-rows // size) + (groups if size > 1 else 0)) * size


def _group_of_block(sizes_E, size, count):
  """(group of each block, whether it is of a run)."""
  last = jnp.cumsum(sizes_E) // size
  found = jnp.searchsorted(last, jnp.arange(count), side='right')
  return jnp.minimum(found, sizes_E.size - 1), found < sizes_E.size


def _blocks(x_SD, w_EDF, sizes_E, size, dtype):
  x_GND = x_SD.reshape(-1, size, x_SD.shape[1])
  blocks = x_GND, *_group_of_block(sizes_E, size, len(x_GND))
  wide = jnp.promote_types(dtype, jnp.float32)  # narrow ones are slow on CPU
  dot = functools.partial(jnp.dot, preferred_element_type=wide)

  def one(args):
    x_ND, e, used = args
    return jax.lax.cond(
      used & jnp.any(x_ND != 0),
      lambda: dot(x_ND, w_EDF[e]).astype(dtype),
      lambda: jnp.zeros((size, w_EDF.shape[2]), dtype),
    )

  return jax.lax.map(one, blocks).reshape(len(x_SD), -1)


def _blocks_gradient(x_SD, g_SF, sizes_E, size, dtype):
  x_GND = x_SD.reshape(-1, size, x_SD.shape[1])
  g_GNF = g_SF.reshape(-1, size, g_SF.shape[1])
  blocks = x_GND, g_GNF, *_group_of_block(sizes_E, size, len(x_GND))
  shape = x_SD.shape[1], g_SF.shape[1]
  wide = jnp.promote_types(dtype, jnp.float32)

  def add(dw_EDF, args):
    x_ND, g_NF, e, used = args
    term = jax.lax.cond(
      used & jnp.any(x_ND != 0),
      lambda: jnp.dot(x_ND.T, g_NF, preferred_element_type=wide).astype(dtype),
      lambda: jnp.zeros(shape, dtype),
    )
    return dw_EDF.at[e].add(term), None

  zeros = jnp.zeros((sizes_E.size, *shape), dtype)
  return jax.lax.scan(add, zeros, blocks)[0]


def _ragged(x_SD, w_EDF, sizes_E, size, dtype):
  del size
  return jax.lax.ragged_dot(x_SD, w_EDF, sizes_E, preferred_element_type=dtype)


_BY_ROWS = jax.lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(((0,), (0,)), ((), ())),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[],
)


def _ragged_gradient(x_SD, g_SF, sizes_E, size, dtype):
  del size
  return jax.lax.ragged_dot_general(
    x_SD, g_SF, sizes_E, _BY_ROWS, preferred_element_type=dtype
  )


def _megablox(x_SD, w_EDF, sizes_E, size, dtype, interpret=False):
  del size
  return megablox.gmm(
    x_SD, w_EDF, sizes_E, dtype, (ROWS,) * 3, interpret=interpret
  )


def _megablox_gradient(x_SD, g_SF, sizes_E, size, dtype, interpret=False):
  del size
  return megablox.tgmm(
    x_SD.T, g_SF, sizes_E, dtype, (ROWS,) * 3, interpret=interpret
  )


def _megablox_supports(spec, target):
  if target.platform != 'tpu':
    return f'needs a TPU, target is {target.device_kind}'
  if spec is not None and spec.rows % ROWS:
    return f'{spec.rows} rows are not a multiple of {ROWS}'
  if spec is not None and spec.dtype not in ('bfloat16', 'float32'):
    return f'takes bfloat16 and float32, not {spec.dtype}'
  return None


def _chosen(impl, x_SD, other, result, size, matrices):
  """The implementation for a call; result, matrices: with shape and dtype."""
  name = lambda x: str(jnp.dtype(x.dtype))
  spec = GroupedSpec(
    len(x_SD),
    name(x_SD),
    size,
    (name(other),),
    name(result),
    math.prod(matrices.shape),
    registry.spread(x_SD) or registry.spread(other),
  )
  return registry.resolve(OP, impl, spec)


def product(x_SD, w_EDF, sizes_E, size, dtype, impl='auto'):
  """y_SF: each row times the matrix of its group.

  Args:
    x_SD: rows sorted by group; rows after the last run are not used, zeros
      (blocks, pallas_gpu) or anything (ragged) comes out.
    w_EDF: one matrix a group.
    sizes_E: int32 lengths of the runs, multiples of `size`; None: even runs.
    size: rows of a block; divides S.
    dtype: of accumulation and result.
    impl: 'auto' or the name of a registered implementation.

  Raises:
    errors.UserError: an implementation that cannot run here.
  """
  if sizes_E is None:
    x_ECD = x_SD.reshape(len(w_EDF), -1, x_SD.shape[1])
    y = jnp.einsum('ECD,EDF->ECF', x_ECD, w_EDF, preferred_element_type=dtype)
    return y.reshape(len(x_SD), -1)
  y = jax.ShapeDtypeStruct((len(x_SD), w_EDF.shape[2]), dtype)
  chosen = _chosen(impl, x_SD, w_EDF, y, size, w_EDF)
  return chosen.forward(x_SD, w_EDF, sizes_E, size, dtype)


def gradient(x_SD, g_SF, sizes_E, size, groups, dtype, impl='auto'):
  """dW_EDF of `product`, summed in `dtype`; groups: E."""
  if sizes_E is None:
    split = lambda a: a.reshape(groups, -1, a.shape[1])
    return jnp.einsum(
      'ECD,ECF->EDF', split(x_SD), split(g_SF), preferred_element_type=dtype
    )
  dw = jax.ShapeDtypeStruct((groups, x_SD.shape[1], g_SF.shape[1]), dtype)
  chosen = _chosen(impl, x_SD, g_SF, dw, size, dw)
  return chosen.backward(x_SD, g_SF, sizes_E, size, dtype)


def _on_tpu(spec, target):
  del spec
  if target.platform == 'tpu':
    return None
  return f'XLA on {target.platform} multiplies all rows with all matrices'


registry.register(
  OP,
  registry.Implementation('ragged', _ragged, _ragged_gradient, _on_tpu),
  registry.kernel('gpu', grouped_gpu),
  registry.Implementation('blocks', _blocks, _blocks_gradient),
  registry.Implementation(
    'megablox', _megablox, _megablox_gradient, _megablox_supports
  ),
  registry.Implementation(
    'tokamax',
    tokamax_adapter.product,
    functools.partial(
      tokamax_adapter.product, ragged_dot_dimension_numbers=_BY_ROWS
    ),
    tokamax_adapter.unfit,
  ),
)
