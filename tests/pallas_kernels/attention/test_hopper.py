"""The attention kernels for Hopper GPUs: the definition, races, what is chosen.

They run here by jax's interpreter for Mosaic on GPUs, which jax 0.11 brought to
a state that can (0.10's waits for ever): numbers, barriers, copies and races,
not registers. What a device gave is in BENCHMARKS.md.
"""

import functools

import attention_cases
import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import kernel_cases
import pytest

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import hopper
from paraxis.pallas_kernels.attention import hopper_program
from paraxis.pallas_kernels.attention import op as attention

PARAMS = getattr(plgpu, 'InterpretGPUParams', None)
interprets = pytest.mark.skipif(
  PARAMS is None, reason='jax 0.10 has no interpreter that runs these kernels'
)
# A bfloat16 has 8 bits: p, ds and the results are rounded to it.
LIMITS = 2e-2, 3e-2
CASES = {
  'causal': dict(T=300, N=2, K=1, B=1),
  'everything': dict(
    T=130, S=200, N=2, K=1, window=50, softcap=3.0, packed=True, ordered=True,
    sinks=True,
  ),
  'full': dict(T=64, S=70, N=1, K=1, B=1, H=128, causal=False),
}  # fmt: skip


def problem(name):
  given = dict(H=64, scale=0.1) | CASES[name]
  return attention_cases.make(jnp.bfloat16, **given)


@functools.cache
def expected(name):
  return attention_cases.exact(problem(name))


@pytest.fixture
def attend(monkeypatch):
  """attention.attention by the kernels, interpreted, looking for races."""
  launch = attention_blocks.Launch(None, PARAMS and PARAMS(detect_races=True))
  ours = kernel_cases.with_options('ours', hopper, launch=launch)
  monkeypatch.setattr(registry, '_OPS', {'attention': (ours,)})
  yield functools.partial(attention.attention, impl='ours')
  for function in (hopper.forward, hopper.backward):
    function.clear_cache()  # what was traced may be of a broken one


@interprets
@pytest.mark.parametrize(
  'name',
  ['causal', 'full', pytest.param('everything', marks=pytest.mark.smoke)],
)
def test_equals_the_definition_without_a_race(attend, name):
  found = attention_cases.results(attend, problem(name))
  attention_cases.compare(found, expected(name), *LIMITS)
  assert not gpu_callbacks.get_races().races_found


def _open(plan, q, k, axis, partial):
  """Masks nothing in a block that has to be masked."""
  del plan, q, k, axis, partial
  return lambda s, value: s


def test_layers_that_are_alike_are_traced_once():
  """18 layers that were written out took a minute and a half to compile."""
  x = jax.ShapeDtypeStruct((1, 128, 1, 64), 'bfloat16')
  mask = attention.Mask(scale=0.125)

  def layers(q):
    for _ in range(3):
      q, _ = hopper.forward(q, q, q, None, None, mask)
    return q

  traced = jax.make_jaxpr(layers)(x).eqns
  inner = {id(e.params['jaxpr'].jaxpr) for e in traced if 'jaxpr' in e.params}
  assert len(traced) == 3 and len(inner) == 1


@interprets
@pytest.mark.parametrize('broken', ['mask', 'factor'])
def test_the_comparison_would_catch_a_wrong_kernel(attend, monkeypatch, broken):
  if broken == 'mask':
    monkeypatch.setattr(hopper_program, 'masked', _open)
  else:
    right = hopper_program.factor_of
    monkeypatch.setattr(hopper_program, 'factor_of', lambda m: 0.9 * right(m))
  found = attention_cases.results(attend, problem('causal'))
  with pytest.raises(AssertionError):
    attention_cases.compare(found, expected('causal'), *LIMITS)


def _at_once(count, slots, copy, *taken):
  """Copies that wait for nobody to have used what they overwrite."""
  for which in range(len(taken)):

    @pl.loop(0, count)
    def _block(i, which=which):
      copy(i, jax.lax.rem(i, jnp.int32(slots)), which)


@interprets
def test_a_copy_that_comes_too_early_would_be_found(attend, monkeypatch):
  monkeypatch.setattr(hopper_program, 'copies', _at_once)
  case = problem('causal')
  try:
    jax.block_until_ready(attend(*case[:3], case.mask))
  except jax.errors.JaxRuntimeError as e:
    # A block that came before anybody had waited for the one under it: the
    # interpreter says so in several ways, of a barrier's phases.
    assert 'arrier' in str(e) and 'phase' in str(e)
    return
  assert gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
  'kind, name',
  [
    ('NVIDIA H100 80GB HBM3', 'pallas_hopper'),
    ('NVIDIA H200', 'pallas_hopper'),
    ('NVIDIA GH200 480GB', 'pallas_hopper'),
    ('NVIDIA A100-SXM4-80GB', 'pallas_gpu'),
    ('NVIDIA B200', 'pallas_gpu'),
    ('NVIDIA GB200', 'pallas_gpu'),
  ],
)
def test_a_hopper_gpu_runs_them(kind, name):
  x = 1, 1024, 2, 128
  spec = attention.AttentionSpec(
    x, x, 'bfloat16', attention.Mask(), False, False
  )
  target = registry.Target('gpu', kind)
  for given in (None, spec):
    assert [i.name for i in attention.choose('auto', given, target)] == [
      name
    ] * 2
