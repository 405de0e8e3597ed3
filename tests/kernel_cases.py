"""What tests of kernels share: targets, errors, interpreters, compilers."""

import functools

import jax
import numpy as np
import pytest

from paraxis.pallas_kernels import registry
from paraxis.sharding.meter import aot

CPU = registry.Target('cpu', 'cpu')
TPU = registry.Target('tpu', 'TPU v5 lite')
GPU = registry.Target('gpu', 'NVIDIA H200 141GB HBM3e')
ONE_TPU = 'v5e:1x1', 'v5p:1x1x1', 'v6e:1x1', 'tpu7x:1x1x1'
ONE_GPU = 'h100:1', 'h200:1'
# How often a compiled text calls kernels of ours.
TPU_CALL = 'custom_call_target="tpu_custom_call"'
GPU_CALL = '__gpu$xla.gpu.triton'


def compiles(platform):
  """Decorator of a test that compiles for 'tpu' or 'cuda'."""
  lacking = aot.missing(platform)
  skip = pytest.mark.skipif(bool(lacking), reason=str(lacking))
  return lambda test: pytest.mark.aot(skip(test))


def compile_on(name, function, *shapes):
  """function, compiled ahead of time for one device of a topology.

  Args:
    shapes: pytrees of jax.ShapeDtypeStruct without sharding.

  Returns:
    (jax.stages.Compiled, jax.stages.Traced).
  """
  topology = aot.topology(name)
  one = jax.sharding.SingleDeviceSharding(topology.devices[0])
  put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one)
  with topology.context():
    traced = jax.jit(function).trace(*jax.tree.map(put, shapes))
  return aot.compile_for(topology, 'kernel', traced), traced


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
