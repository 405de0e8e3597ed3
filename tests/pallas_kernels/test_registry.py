"""The choice of an implementation: preference, reasons, target."""

import jax
import kernel_cases
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.decode_attention import op as decode_attention

CPU, TPU = kernel_cases.CPU, kernel_cases.TPU


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


def test_auto_takes_the_first_that_can_run(op):
  assert registry.resolve(op, target=CPU).name == 'plain'
  assert registry.resolve(op, target=TPU).name == 'fast'
  assert registry.resolve(op, spec=3, target=TPU).name == 'plain'


def test_a_named_one_that_cannot_run_says_why(op):
  assert registry.resolve(op, 'plain', target=TPU).name == 'plain'
  with pytest.raises(errors.UserError, match='needs a tpu, target is cpu'):
    registry.resolve(op, 'fast', target=CPU)
  with pytest.raises(errors.UserError, match='size 3 is odd'):
    registry.resolve(op, 'fast', spec=3, target=TPU)
  with pytest.raises(errors.UserError, match="'quick'; have auto, fast, plain"):
    registry.resolve(op, 'quick', target=TPU)


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


def test_the_ops_of_this_package_run_everywhere():
  assert attention.NEG < 0 and decode_attention.MAX_ROWS
  for name in ('attention', 'decode_attention'):
    assert name in registry.ops()
    for target in (CPU, TPU):
      assert any(chosen for _, chosen, _ in registry.explain(name, target))


def test_an_unknown_implementation_of_attention_is_a_user_error():
  x = jax.numpy.ones((1, 4, 2, 8))
  with pytest.raises(errors.UserError, match="no implementation 'flash4'"):
    attention.attention(x, x, x, attention.Mask(), impl='flash4')
