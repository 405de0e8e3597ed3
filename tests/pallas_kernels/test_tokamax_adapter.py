"""tokamax behind our contracts: reasons, and numbers where it is installed.

Legend: B batch, T query length, N query heads, K kv heads, H head size, S rows,
E groups, D input width, F output width.
"""

import importlib.util

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import tokamax_adapter
from paraxis.pallas_kernels.attention import adapters
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import xla as attention_xla
from paraxis.pallas_kernels.matmul import grouped as grouped_matmul
from paraxis.train.claims import experiment

THERE = importlib.util.find_spec('tokamax') is not None
needs_tokamax = pytest.mark.skipif(not THERE, reason=tokamax_adapter.MISSING)
CPU, TPU = kernel_cases.CPU, kernel_cases.TPU


def spec(T=1024, dtype='bfloat16', segments=False, **mask):
  x = (1, T, 2, 128)
  mask = attention.Mask(**mask)
  return attention.AttentionSpec(x, x, dtype, mask, segments, False)


@pytest.mark.parametrize('op', ['attention', 'grouped_matmul'])
def test_without_it_the_reason_says_how_to_get_it(op, monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  *_, last = registry.explain(op, CPU)
  assert last == ('tokamax', False, tokamax_adapter.MISSING)
  with pytest.raises(errors.UserError, match='pip install tokamax'):
    registry.resolve(op, 'tokamax', target=CPU)


@pytest.mark.parametrize('op', ['attention', 'grouped_matmul'])
def test_it_is_never_chosen_unless_asked(op, monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
  for kind in ('cpu', 'TPU v5 lite', 'NVIDIA H200'):
    target = registry.Target(registry._platform('', kind), kind)
    assert registry.resolve(op, 'auto', target=target).name != 'tokamax'
    assert registry.resolve(op, 'tokamax', target=target).name == 'tokamax'


@pytest.mark.parametrize(
  'kind, name',
  [
    ('cpu', 'xla'),
    ('TPU v4', None),
    ('TPU v5 lite', 'mosaic_tpu'),
    ('TPU7x', 'mosaic_tpu'),
    ('NVIDIA H200 141GB HBM3e', 'mosaic_gpu'),
    ('NVIDIA GH200 480GB', 'mosaic_gpu'),
    ('NVIDIA A100-SXM4-80GB', 'triton'),
    ('AMD Instinct MI300X', None),
  ],
)
def test_the_form_for_a_target(kind, name):
  target = registry.Target(registry._platform('', kind), kind)
  assert tokamax_adapter.form(target) == name


@pytest.mark.parametrize(
  'target, given, reason',
  [
    (CPU, dict(dtype='float64'), 'not float64'),
    (CPU, dict(segments=True), 'neither segments'),
    (CPU, dict(window=4, causal=False), 'only together with a causal'),
    (TPU, dict(window=4), 'no window on TPU'),
    (TPU, dict(T=100), 'length 100'),
  ],
)
def test_what_it_does_not_take(target, given, reason, monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
  found = adapters.tokamax_supports(spec(**given), target)
  assert reason in found


@needs_tokamax
@pytest.mark.parametrize('mask', [{}, dict(window=5, softcap=3.0)])
def test_attention_gives_the_same_output_lse_and_gradients(mask):
  rng = np.random.default_rng(0)
  make = lambda n: jnp.asarray(rng.normal(size=(2, 24, n, 16)), jnp.float32)
  q, k, v = make(4), make(2), make(2)
  mask = attention.Mask(scale=0.3, **mask)

  def total(impl):
    def loss(*x):
      o, lse = attention.attention(*x, mask, impl=impl)
      return jnp.sin(o).sum() + jnp.cos(lse).sum(), (o, lse)

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  jax.tree.map(close, total('tokamax/auto'), total('xla'))
  wrong = attention.Mask(scale=0.3, window=6, softcap=3.0)
  o, _ = attention_xla.forward(q, k, v, None, None, wrong)
  found, _ = attention.attention(q, k, v, mask, impl='tokamax/auto')
  assert np.abs(found - o).max() > 1e-3


@needs_tokamax
def test_grouped_products_are_the_same():
  rng = np.random.default_rng(0)
  draw = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)
  x, w, g = draw(32, 3), draw(4, 3, 5), draw(32, 5)
  sizes = jnp.array([8, 0, 16, 8], jnp.int32)
  for name, args in (
    ('product', (x, w, sizes, 8, jnp.float32)),
    ('gradient', (x, g, sizes, 8, 4, jnp.float32)),
  ):
    call = getattr(grouped_matmul, name)
    np.testing.assert_allclose(
      call(*args, 'tokamax'), call(*args, 'blocks'), rtol=1e-5, atol=1e-5
    )


@needs_tokamax
@support.compiles('tpu')
def test_its_kernel_is_in_a_program_for_tpu():
  make = lambda n: jax.ShapeDtypeStruct((1, 256, n, 128), 'bfloat16')
  call = lambda *x: attention.attention(
    *x, attention.Mask(), impl='tokamax/xla'
  )
  shapes = make(4), make(2), make(2)
  program = experiment.for_chip('v5e:1x1', 'kernel', call, shapes)
  assert program.as_text().count(kernel_cases.TPU_CALL) == 1
