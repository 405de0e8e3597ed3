"""Every part of `paraxis bench device` in sizes of --quick, in this process."""

import json
import types

import jax
import pytest

from paraxis.sharding.meter import target
from paraxis.train.bench import kernel_device
from paraxis.train.bench import measure
from paraxis.train.bench.device import kernels as kernels
from paraxis.train.bench.device import model as model
from paraxis.train.bench.device import parts as parts
from paraxis.train.bench.device import report as device_report
from paraxis.train.bench.device import speed as speed

UNITS = {'s', 'TF/s', 'GB/s', 'GiB', 'tokens/s', 'share', 'ratio'}


def measured(folder):
  """Puts ceilings there: a product of 2 TF/s, a copy of 4 GB/s."""
  report = measure.BenchReport('ceilings', '', '')
  report.add({speed.PRODUCT: [2.0]}, 'TF/s')
  report.add({speed.COPY: [4.0]}, 'GB/s')
  made = device_report.begin('ceilings', {})
  device_report.write(folder, device_report.with_figures(made, 'a', report))


def run(name, folder):
  """The record of a part that ran here."""
  with jax.enable_x64(False):
    assert parts.main([name, str(folder), '{}', '1', '--quick']) == 0
  return device_report.read(folder, name)


@pytest.mark.sampled(9)
@pytest.mark.parametrize('name', [p.name for p in parts.PARTS])
def test_a_part(name, tmp_path):
  if name != 'ceilings':
    measured(tmp_path)
  record = run(name, tmp_path)
  assert record['state'] == 'ok', device_report.why(record)
  assert set(record['names']) == record['cases'].keys()
  report = device_report.report_of(record)
  assert {unit for unit, _ in report.rows.values()} <= UNITS
  assert all(min(v) > 0 for _, v in report.rows.values())
  assert report.rows or report.checks or report.notes
  judged = {c.verdict for c in report.checks}
  assert judged <= ({'met'} if name == 'correct' else {'-'})
  goals = [c.what for c in report.checks if c.what.startswith('goal: ')]
  wanted = {g for g, part in device_report.GOALS.items() if part == name}
  if name in ('decode', 'kernels'):  # the others need a device
    assert {g.removeprefix('goal: ') for g in goals} == wanted
  assert not list(tmp_path.glob('checkpoint-*'))


def test_goals_are_those_that_parts_judge():
  names = {p.name for p in parts.PARTS}
  assert set(device_report.GOALS.values()) <= names
  rows = (kernel_device.FORWARD, kernel_device.BOTH)
  made = {f'attention {w}: speed of ours / cudnn' for w in rows}
  assert made <= device_report.GOALS.keys()


OURS = model.FORMS['our kernels']


def fake(name, kind, **stats):
  return types.SimpleNamespace(
    device_kind=kind, platform=name, memory_stats=lambda: stats
  )


def test_memory_is_what_the_device_says_or_its_maker():
  chip = target.CHIPS['v5e']
  assert model.memory_of(fake('tpu', 'TPU v5 lite')) == chip.hbm
  assert model.memory_of(fake('tpu', 'TPU v5e', bytes_limit=7)) == 7
  assert model.memory_of(fake('cpu', 'cpu')) is None


def test_sizes_are_what_they_are_called():
  """Counted by hand: embedding, head; four matrices of attention, three."""
  for name, least, most in (('1b', 1.0e9, 1.1e9), ('125m', 1.2e8, 1.4e8)):
    m = model.SIZES[name]
    d, f = m['d_model'], m['d_ff']
    count = 2 * m['vocab_size'] * d + m['num_layers'] * (4 * d * d + 3 * d * f)
    assert least < count < most
  for rungs in model.LADDER.values():
    assert all(size in model.SIZES for size, _, _ in rungs)


def test_layers_are_unrolled_in_the_form_that_says_so():
  for form, unroll in ((OURS, 1), (model.FORMS[model.UNROLLED], 2)):
    assert model.config('tiny', form=form).model.unroll == unroll


def test_a_smaller_size_is_taken_and_said(monkeypatch):
  """16 GiB: what is predicted to be larger is not tried, nor what was."""
  tried, said = [], []

  class Ours:
    def __init__(self, c, mesh, now):
      tried.append((c.model.d_model, c.train.batch_size))

    def run(self):
      if len(tried) == 1:
        raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 17 GiB')

  device = fake('tpu', 'TPU v5 lite')
  monkeypatch.setattr(model.jax, 'devices', lambda: [device])
  monkeypatch.setattr(model.bench_train, 'Ours', Ours)
  need = {2048: 20, 1024: 10, 768: 5}
  monkeypatch.setattr(
    model, 'predicted', lambda c: need[c.model.d_model] * 2**30
  )
  rung, _ = model.first_that_fits(model.LADDER['1b'], OURS, said.append)
  assert rung == ('350m', 4, 'full') and tried == [(1024, 8), (1024, 4)]
  assert len(said) == 4 and '20.0 GiB predicted of 16.0' in said[0]
  assert 'ran out of memory' in said[-1]
  with pytest.raises(MemoryError):
    model.first_that_fits(model.LADDER['1b'][:3], OURS, said.append)


def test_a_smaller_model_is_decoded_and_said(monkeypatch):
  """8 GiB: the largest is not tried, the second runs out of memory."""
  tried, said = [], []

  class Ours:
    def __init__(self, c):
      tried.append(c.model.d_model)

    def run(self, rows, new):
      assert (rows, new) == (64, 16)
      if len(tried) == 1:
        raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 9 GiB')

  device = fake('tpu', 'TPU v5 lite', bytes_limit=8 * 2**30)
  monkeypatch.setattr(model.jax, 'devices', lambda: [device])
  monkeypatch.setattr(model.bench_decode, 'Ours', Ours)
  sizes = ['1b', '350m', '125m']
  size, *_ = model.first_that_decodes(sizes, 'loaded', 64, 16, said.append)
  assert size == '125m' and tried == [1024, 768]
  assert 'has 8.0 GiB' in said[0] and 'ran out of memory' in said[1]
  with pytest.raises(MemoryError):
    model.first_that_decodes(['1b'], 'loaded', 64, 16, said.append)


def test_a_fault_that_is_not_memory_is_raised(monkeypatch):
  def fail(*_):
    raise jax.errors.JaxRuntimeError('INTERNAL: illegal address')

  monkeypatch.setattr(model.bench_train, 'Ours', fail)
  with pytest.raises(jax.errors.JaxRuntimeError, match='illegal'):
    model.first_that_fits(model.LADDER['tiny'], OURS, lambda _: None)


def test_bytes_of_a_cache():
  c = model.config('tiny')  # 2 layers, 4 heads of 16, k and v, bfloat16
  assert model.cache_bytes(c, 15) == (16 + 8) * 2 * 2 * 4 * 16 * 2


def test_a_device_that_failed_is_started_again(tmp_path, monkeypatch):
  def fail(work):
    raise jax.errors.JaxRuntimeError('INTERNAL: illegal address')

  made = dict(a=fail, b=lambda work: None)
  monkeypatch.setattr(parts, 'cases', lambda part, quick: made)
  argv = ['correct', str(tmp_path), json.dumps({}), '1', '--quick']
  assert parts.main(argv) == parts.AGAIN
  assert list(device_report.read(tmp_path, 'correct')['cases']) == ['a']
  assert parts.main(argv) == 0
  record = device_report.read(tmp_path, 'correct')
  assert record['state'] == 'failed'
  assert [s for s, _ in record['cases'].values()] == ['failed', 'ok']


def test_work_of_a_kernel_is_counted():
  """A decode step reads k and v once; gradients are three forward passes."""
  step = kernels.KERNELS['decode attention'](True)
  assert step.moved == sum(x.nbytes for x in step.arrays[1:])
  once, both = (
    kernels.KERNELS[f'gated scan{g}'](True) for g in ('', ', gradients')
  )
  assert both.flops == 3 * once.flops and both.moved == 3 * once.moved
  int4 = kernels.KERNELS['int4 product'](True)
  assert int4.moved == 128 * 128 / 2 + 4 * 128
