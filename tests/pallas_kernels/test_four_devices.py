"""The TPU kernels on four devices at once, interpreted with a TPU's semantics.

Memory starts as NaN, reads and writes must not race. The interpreter needs a
thread for every device and core, or it waits forever: a process of its own.

Legend: B rows, T tokens or slots, N heads, H head size, D channels.
"""

import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent.parent
PROGRAM = """
import functools
import jax
import kernel_cases
import numpy as np
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import tpu as attention_tpu
from paraxis.pallas_kernels.attention import xla as attention_xla
from paraxis.pallas_kernels.decode_attention import op as decode_attention
from paraxis.pallas_kernels.decode_attention import tpu as decode_attention_tpu
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import gated_tpu as gated_scan_tpu
from paraxis.pallas_kernels.scans import linear as linear_scan
from paraxis.pallas_kernels.scans import linear_tpu as linear_scan_tpu
from paraxis.pallas_kernels.scans import selective
from paraxis.pallas_kernels.scans import selective_tpu
from paraxis.pallas_kernels import registry

how = kernel_cases.STRICT
rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype('f4')
mesh = jax.make_mesh((4,), ('data',))


def equal(name, kernel, wanted, arrays):
  rows = jax.P('data')
  with jax.set_mesh(mesh):
    put = jax.device_put(arrays, rows)
    run = jax.shard_map(kernel, in_specs=rows, out_specs=rows, check_vma=False)
    found = jax.tree.map(np.asarray, jax.jit(run)(*put))
  for a, b in zip(found, jax.jit(wanted)(*arrays), strict=True):
    assert np.abs(a - b).max() < 1e-5 * np.abs(b).max(), name
  assert not kernel_cases.races(), name
  print(name, 'equal on', len(mesh.devices), 'devices')


def passes(op, module, arrays):
  # Outputs and gradients, the op's own derivative around the kernel.
  kernel = kernel_cases.with_options('kernel', module, interpret=how)
  name = op.__name__
  registry.register(name, kernel, *registry._OPS[name])

  def run(impl, *x):
    out, back = jax.vjp(lambda *x: op(*x, impl=impl)[0], *x[:-1])
    return out, *back(x[-1])

  both = (functools.partial(run, impl) for impl in ('kernel', 'xla'))
  equal(name, *both, arrays)


gated_scan.CHUNKS['kernel'] = 8
q, k, v, g, do = (draw(4, 10, 2, 8) for _ in range(5))
passes(gated_scan.gated_scan, gated_scan_tpu, (q, k, v, -np.abs(g), do))
rows = [draw(8, 37, 3) for _ in range(3)]
passes(linear_scan.linear_scan, linear_scan_tpu, rows)
rate = -np.abs(draw(3, 4))


def selective_scan(x, dt, shared, impl):
  return selective.selective_scan(x, abs(dt), shared, rate, impl=impl)


tokens = rows[0], rows[1], draw(8, 37, 2, 4), rows[2]
passes(selective_scan, selective_tpu, tokens)
causal = attention.Mask(), attention_blocks.Launch((8, 8), how)
q, k, v = (draw(4, 16, n, 8) for n in (2, 1, 1))
equal(
  'attention',
  lambda *x: attention_tpu.forward(*x, None, None, *causal),
  lambda *x: attention_xla.forward(*x, None, None, causal[0]),
  (q, k, v),
)
begins, ends = np.array([[0, 5, 9, 2], [16, 6, 9, 13]], 'i4')
plain = attention.Mask(causal=False)
equal(
  'decode_attention',
  lambda q, *x: decode_attention_tpu.forward(
    q[:, 0], *x, plain, tile=8, workers=3, interpret=how
  ),
  lambda q, k, v, b, e: [
    y[:, 0]
    for y in decode_attention.ragged(q, k, v, plain, e - b, begins_B=b)
  ],
  (q[:, :1], k.swapaxes(1, 2), v.swapaxes(1, 2), begins, ends),
)
"""


def test_every_kernel():
  env = dict(
    os.environ, PYTHONPATH=str(TESTS), NPROC='32', PJRT_NPROC='32',
    JAX_PLATFORMS='cpu',
    XLA_FLAGS='--xla_force_host_platform_device_count=4',
  )  # fmt: skip
  done = subprocess.run(
    [sys.executable, '-c', PROGRAM], env=env, capture_output=True, text=True,
    timeout=500,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.count('equal on 4 devices') == 5
