"""What tests of kernels share: targets, gradients, regions, errors."""

import functools

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
import numpy as np

from paraxis.pallas_kernels import registry
from paraxis.sharding.meter import hlo

CPU = registry.Target('cpu', 'cpu')
TPU = registry.Target('tpu', 'TPU v5 lite')
GPU = registry.Target('gpu', 'NVIDIA H200 141GB HBM3e')
# What a compiled text has once for every kernel that it calls on a TPU.
TPU_CALL = 'custom_call_target="tpu_custom_call"'
GPU_CALL = 'custom_call_target="mosaic_gpu'  # on a GPU, of Mosaic
# A TPU's semantics: memory starts as NaN; reads and writes must not race.
STRICT = pltpu.InterpretParams(uninitialized_memory='nan', detect_races=True)


def races():
  """Whether a kernel that was interpreted with STRICT had a race."""
  return interpret_pallas_call.races.races_found


def with_gradients(run, arrays, cotangents):
  """(*results, *gradients of arrays) of run(*arrays), one program."""

  @jax.jit
  def both(arrays, cotangents):
    out, back = jax.vjp(run, *arrays)
    return *out, *back(cotangents)

  return both(tuple(arrays), tuple(cotangents))


def on_mesh(run, mesh, args, specs, out=None):
  """Results of run(*args) on a mesh, whose devices exchange nothing.

  Args:
    specs: PartitionSpecs of args. out: those of the results of a manual region;
      None: there is none, and axes are Explicit.
  """
  with jax.set_mesh(mesh):
    if out is not None:
      run = jax.shard_map(run, in_specs=specs, out_specs=out)
    placed = jax.device_put(args, specs)
    program = jax.jit(run).lower(*placed).compile()
    assert hlo.collectives(program.as_text(), mesh) == []
    return program(*placed)


def shapes_in_region(run, *arrays):
  """Shapes of run's results where four devices have the rows of all arrays.

  Traced with checked types: every result varies over devices as the arrays do.
  """
  rows = jax.P('data')
  with jax.set_mesh(jax.make_mesh((4,), ('data',), devices=jax.devices()[:4])):
    local = jax.shard_map(run, in_specs=rows, out_specs=rows)
    found = jax.eval_shape(local, *jax.device_put(arrays, rows))
  return [x.shape for x in found]


def with_options(name, module, **options):
  """The `registry.Implementation` of a kernel's module, called with options.

  For example interpret=True, so that it runs here.
  """
  passes = (
    functools.partial(f, **options) for f in (module.forward, module.backward)
  )
  return registry.Implementation(name, *passes)


def errors_of(names, actual, expected, least=0.0):
  """{name: largest difference over the largest entry}; not finite: infinite.

  Args:
    least: what a difference is divided by where all entries are smaller.
  """
  found = {}
  for name, a, b in zip(names, actual, expected, strict=True):
    a, b = np.asarray(a, 'f8'), np.asarray(b, 'f8')
    assert a.shape == b.shape, name
    error = np.abs(a - b).max()
    error = error / max(least, np.abs(b).max()) if error else 0.0
    found[name] = error if np.isfinite(a).all() else np.inf
  return found


def wrong(names, actual, expected, tolerance, least=0.0):
  """Names of the results whose error (`errors_of`) is above a tolerance."""
  found = errors_of(names, actual, expected, least)
  return [name for name, error in found.items() if not error <= tolerance]
