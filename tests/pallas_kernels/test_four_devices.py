"""The TPU kernels on four devices at once, interpreted with a TPU's semantics.

Memory starts as NaN, reads and writes must not race. The interpreter needs a
thread for every device and core, or it waits forever: a process of its own.

Legend: B rows, T tokens or slots, N heads, H head size, D channels.
"""

import os
import subprocess
import sys

PROGRAM = """
import functools
import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
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
from paraxis.pallas_kernels import registry

how = pltpu.InterpretParams(uninitialized_memory='nan', detect_races=True)
rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype('f4')
mesh = jax.make_mesh((4,), ('data',))


def equal(name, kernel, wanted, arrays):
  rows = jax.P('data')
  with jax.set_mesh(mesh):
    place = jax.NamedSharding(mesh, rows)
    put = [jax.device_put(x, place) for x in arrays]
    run = jax.shard_map(
      kernel, in_specs=(rows,) * len(put), out_specs=rows, check_vma=False
    )
    found = jax.tree.map(np.asarray, jax.jit(run)(*put))
  for a, b in zip(found, jax.jit(wanted)(*arrays), strict=True):
    assert np.abs(a - b).max() < 1e-5 * np.abs(b).max(), name
  assert not interpret_pallas_call.races.races_found, name
  print(name, 'equal on', len(mesh.devices), 'devices')


def passes(op, module, arrays):
  # Outputs and gradients, the op's own derivative around the kernel.
  forward, backward = (
    functools.partial(f, interpret=how)
    for f in (module.forward, module.backward)
  )
  kernel = registry.Implementation(
    'kernel', forward, backward, lambda spec, target: None
  )
  name = op.__name__
  registry.register(name, kernel, *registry._OPS[name])

  def run(impl, *x):
    out, back = jax.vjp(lambda *x: op(*x, impl=impl)[0], *x[:-1])
    return out, *back(x[-1])

  equal(
    name, functools.partial(run, 'kernel'), functools.partial(run, 'xla'),
    arrays,
  )


gated_scan.CHUNKS['kernel'] = 8
q, k, v, g, do = (draw(4, 10, 1, 8) for _ in range(5))
passes(gated_scan.gated_scan, gated_scan_tpu, (q, k, v, -np.abs(g), do))
passes(
  linear_scan.linear_scan, linear_scan_tpu, [draw(4, 10, 3) for _ in range(3)]
)
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
  (q[:, :1], k, v, begins, ends),
)
"""


def test_every_kernel():
  env = dict(
    os.environ, NPROC='32', PJRT_NPROC='32', JAX_PLATFORMS='cpu',
    XLA_FLAGS='--xla_force_host_platform_device_count=4',
  )  # fmt: skip
  done = subprocess.run(
    [sys.executable, '-c', PROGRAM], env=env, capture_output=True, text=True,
    timeout=500,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.count('equal on 4 devices') == 4
