"""The choice of an implementation: preference, reasons, target."""

import dataclasses

import jax
import kernel_cases
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.matmul import grouped as grouped_matmul
from paraxis.pallas_kernels.matmul import quantized as quantized_matmul
from paraxis.pallas_kernels.scans import delta as delta_scan
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import linear as linear_scan
from paraxis.pallas_kernels.scans import selective as selective_scan

CPU, TPU, GPU = kernel_cases.CPU, kernel_cases.TPU, kernel_cases.GPU


def only(platform):
  def supports(spec, target):
    if target.platform != platform:
      return f'needs a {platform}, target is {target.device_kind}'
    return f'size {spec} is odd' if spec and spec % 2 else None

  return supports


@pytest.fixture
def op(monkeypatch):
  monkeypatch.setattr(registry, '_OPS', {})
  registry.register(
    'toy',
    registry.Implementation('fast', max, None, only('tpu')),
    registry.Implementation('plain', min, None, lambda spec, target: None),
  )
  return 'toy'


def test_nothing_that_can_run_is_an_error_with_all_reasons(op):
  registry.register('none', registry.Implementation('a', 0, 0, only('gpu')))
  with pytest.raises(errors.UserError, match=r'cannot run on tpu \(TPU v5'):
    registry.resolve('none', target=TPU)


def test_explain_prints_what_resolve_does(op):
  assert registry.explain(op, CPU) == [
    ('fast', False, 'needs a tpu, target is cpu'),
    ('plain', True, ''),
  ]
  assert registry.explain(op, TPU) == [('fast', True, ''), ('plain', False, '')]
  with pytest.raises(KeyError, match='nothing'):
    registry.explain('nothing', CPU)


def test_the_target_is_the_device_of_the_mesh_then_the_default_device():
  assert registry.current_target() == CPU
  mesh = jax.make_mesh((2,), ('data',))
  with jax.set_mesh(mesh):
    assert registry.current_target() == CPU
  with jax.default_device(jax.devices('cpu')[1]):
    assert registry.current_target() == CPU


def test_an_abstract_mesh_names_a_device_that_is_not_here():
  kind = jax.sharding.AbstractDevice
  device = kind('TPU v5 lite', num_cores=1, platform='tpu')
  mesh = jax.sharding.AbstractMesh((2,), ('data',), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    assert registry.current_target() == TPU
    assert str(registry.current_target()) == 'tpu (TPU v5 lite)'


# ------------------------------------------------------------ of our kernels --

X, CACHE = (1, 1024, 2, 128), (1, 64, 2, 16)
MASK = attention.Mask()
# A call of every op that all its kernels take.
SPECS = dict(
  attention=attention.AttentionSpec(X, X, 'bfloat16', MASK, False, False),
  decode_attention=attention.AttentionSpec(
    (1, 1, 2, 16), CACHE, 'float32', MASK, False, False, CACHE,
    ('float32', 'float32'),
  ),
  gated_scan=gated_scan.GatedScanSpec((1, 256, 2, 64), 64, 'bfloat16', 0),
  delta_scan=delta_scan.DeltaScanSpec((1, 256, 2, 64), 64, 'bfloat16', 0),
  linear_scan=linear_scan.LinearScanSpec((1, 8, 128), 'float32'),
  selective_scan=selective_scan.SelectiveScanSpec((1, 8, 128, 16), 'float32'),
  quantized_matmul=quantized_matmul.QuantizedSpec(
    (16, 256), 256, 'bfloat16', 'uint8'
  ),
  grouped_matmul=grouped_matmul.GroupedSpec(256, 'bfloat16'),
)  # fmt: skip
KERNELS = 'pallas_tpu', 'pallas_gpu'
CHOSEN = dict(  # on a CPU, a TPU, a GPU
  attention=('xla', 'pallas_tpu', 'pallas_hopper'),
  decode_attention=('xla', *KERNELS),
  gated_scan=('xla', *KERNELS),
  delta_scan=('xla', 'xla', 'batched'),
  linear_scan=('loop', *KERNELS),
  selective_scan=('loop', *KERNELS),
  quantized_matmul=('xla', *KERNELS),
  grouped_matmul=('blocks', 'ragged', 'pallas_gpu'),
)


@pytest.mark.parametrize('name', SPECS)
def test_which_runs_where(name):
  for spec in (None, SPECS[name]):
    found = [
      registry.resolve(name, spec=spec, target=t).name for t in (CPU, TPU, GPU)
    ]
    assert found == [*CHOSEN[name]]


def both(T=1024, H=128):
  """Shapes of q and k."""
  return dict.fromkeys('qk', (1, T, 2, H))


def cached(*shape):
  return dict.fromkeys('kv', shape)


def in_dtype(name):
  return dict(dtype=name, others=(name, name))


def test_kernels_on_gpu_take_float16():
  for op, half in dict(
    linear_scan=dict(dtype='float16'), decode_attention=in_dtype('float16')
  ).items():
    spec = dataclasses.replace(SPECS[op], **half)
    assert registry.resolve(op, spec=spec, target=GPU).name == 'pallas_gpu'


TWO = dict(q=(1, 2, 2, 16)), 'takes one query a row, these are 2'
TWO_SIDED = attention.Mask(causal=False, window=4)
REFUSED = dict(
  attention=[
    ('pallas_tpu', dict(dtype='float64'), 'not float64'),
    ('pallas_tpu', both(H=100), 'head size 100'),
    ('pallas_tpu', both(H=512), 'head size 512'),
    ('pallas_tpu', dict(sharded=True), 'manual region'),
    ('pallas_tpu', both(T=2**19) | dict(order=True), 'blocks to list'),
    ('pallas_hopper', dict(dtype='float32'), 'bfloat16 and float16, not'),
    ('pallas_hopper', both(H=32), 'head sizes 32 and 32: takes 64, or 128'),
    ('pallas_hopper', both(T=63), '63 queries a row: takes 64 and more'),
    ('pallas_hopper', both(T=2**24), 'more than 2147483647'),
    ('pallas_hopper', dict(others=('bfloat16', 'float32')), 'takes one dtype'),
    (
      'pallas_hopper',
      dict(q=(2**15, 64, 2, 64), k=(2**15, 64, 2, 64)),
      '32768 rows x 2 heads',
    ),
    ('pallas_gpu', dict(dtype='float64'), 'not float64'),
    ('pallas_gpu', both(H=96), 'head size 96'),
    ('pallas_gpu', both(H=256), 'head size 256'),
    ('pallas_gpu', dict(sharded=True), 'manual region'),
    ('pallas_gpu', both(T=2**24), 'more than 2147483647'),
    ('splash', dict(order=True), 'takes no order'),
    ('splash', both(T=100), 'length 100 is not'),
    ('cudnn', dict(segments=True), 'takes no segments'),
    ('cudnn', dict(mask=attention.Mask(softcap=2.0)), 'no softcap'),
    ('cudnn', dict(mask=TWO_SIDED), 'only together with a causal'),
  ],
  decode_attention=[
    ('pallas_tpu', *TWO),
    ('pallas_gpu', *TWO),
    ('pallas_tpu', dict(segments=True), 'by their lengths'),
    ('pallas_tpu', dict(mask=attention.Mask(window=4)), 'no window'),
    ('pallas_tpu', dict(sharded=True), 'manual region'),
    ('pallas_tpu', dict(others=('bfloat16',) * 2), 'takes one dtype'),
    ('pallas_tpu', in_dtype('float16'), 'not float16'),
    ('pallas_tpu', dict(q=(1, 1, 8192, 16)), 'query heads'),
    ('pallas_tpu', cached(4096, 2**20, 8, 128), 'tiles to list'),
    ('pallas_gpu', cached(1, 64, 2, 48), 'head size 48'),
    ('pallas_gpu', in_dtype('float64'), 'not float64'),
    ('pallas_gpu', cached(64, 2**17, 8, 128), 'addresses fewer'),
  ],
  gated_scan=[
    ('pallas_tpu', dict(dtype='float64'), 'computes in float32, takes'),
    ('pallas_tpu', dict(q=(1, 256, 2, 512)), 'key size 512 is above 256'),
    ('pallas_tpu', dict(chunk=512), 'chunk 512 is above 256'),
    ('pallas_gpu', dict(dtype='float64'), 'computes in float32, takes'),
    ('pallas_gpu', dict(values=96), 'value size 96 is not one of'),
    ('pallas_gpu', dict(chunk=64), 'chunk 64 is not one of (16, 32): shared'),
  ],
  linear_scan=[
    ('pallas_tpu', dict(dtype='float64'), 'bfloat16 and float32, not float64'),
    ('pallas_tpu', dict(dtype='float16'), 'not float16'),
    ('pallas_tpu', dict(sharded=True), 'manual region'),
    ('pallas_gpu', dict(dtype='float64'), 'float16, float32, not float64'),
    ('pallas_gpu', dict(shape=(64, 2**17, 512)), 'addresses fewer'),
  ],
  selective_scan=[
    ('pallas_tpu', dict(dtype='float64'), 'takes float32, not float64'),
    ('pallas_tpu', dict(shape=(1, 8, 128, 65)), '65 numbers, at most 64'),
    ('pallas_tpu', dict(sharded=True), 'manual region'),
    ('pallas_gpu', dict(dtype='float64'), 'takes float32, not float64'),
    ('pallas_gpu', dict(shape=(1, 8, 128, 65)), '65 numbers, at most 64'),
    ('pallas_gpu', dict(shape=(16, 2**17, 1024, 16)), 'addresses fewer'),
  ],
  quantized_matmul=[
    ('pallas_tpu', dict(features=200), '200 outputs'),
    ('pallas_tpu', dict(dtype='float64'), 'not float64'),
    ('pallas_tpu', dict(sharded=True), 'manual region'),
    ('pallas_gpu', dict(features=200), '200 outputs'),
    ('pallas_gpu', dict(form='int4'), 'packed form'),
    ('pallas_gpu', dict(x=(65, 256)), '65 tokens: takes 64'),
    ('pallas_gpu', dict(x=(1, 2**18), features=2**14), '2147483648 bytes'),
    ('pallas_gpu', dict(dtype='float64'), 'not float64'),
  ],
  grouped_matmul=[
    ('megablox', dict(rows=40), '40 rows'),
    ('megablox', dict(dtype='float64'), 'not float64'),
  ],
)


@pytest.mark.parametrize(
  'op, name, change, words',
  [(op, *row) for op, rows in REFUSED.items() for row in rows],
)
def test_what_a_kernel_does_not_take(op, name, change, words):
  spec = dataclasses.replace(SPECS[op], **change)
  gpu = 'pallas_hopper', 'pallas_gpu', 'cudnn'
  target = GPU if name in gpu else TPU
  with support.refused(words):
    registry.resolve(op, name, spec, target)
  if name in KERNELS:
    assert registry.resolve(op, spec=spec, target=target).name == 'xla'


@pytest.mark.parametrize(
  'op, name, target, words',
  [
    ('attention', 'pallas_tpu', CPU, 'needs a TPU, target is cpu'),
    ('decode_attention', 'pallas_tpu', GPU, 'needs a TPU, target is NVIDIA'),
    ('decode_attention', 'pallas_gpu', CPU, 'needs a GPU, target is cpu'),
    ('linear_scan', 'loop', GPU, 'launch for every token'),
    ('linear_scan', 'pallas_tpu', GPU, 'needs a TPU, target is NVIDIA H200'),
    ('quantized_matmul', 'pallas_tpu', GPU, 'needs a TPU'),
    ('grouped_matmul', 'megablox', CPU, 'needs a TPU'),
    ('grouped_matmul', 'ragged', CPU, 'all rows with all matrices'),
  ],
)
def test_where_an_implementation_does_not_run(op, name, target, words):
  with support.refused(words):
    registry.resolve(op, name, SPECS[op], target)


def test_an_op_refuses_what_the_registry_refuses():
  x = np.ones((1, 8, 1, 16), 'f4')
  with support.refused("no implementation 'flash4'; have auto, pallas_tpu"):
    attention.attention(x, x, x, MASK, impl='flash4')
  with support.refused('needs a TPU, target is cpu'):
    gated_scan.gated_scan(x, x, x, -x, impl='pallas_tpu')
