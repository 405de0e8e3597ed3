"""The bench of an accelerator, run on a CPU with XLA's form of attention.

What is measured, counted, compared and refused; never its times.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest

from paraxis.pallas_kernels import registry
from paraxis.train.bench import kernel_device as device
from paraxis.train.bench import kernels as bench_kernels
from paraxis.train.bench import measure

SILENT = lambda _: None
SIZES = device.Sizes((1, 16, 2, 8), 32, 3)


def test_a_candidate_warms_up_repeats_and_divides(monkeypatch):
  waits = []
  real = jax.block_until_ready
  monkeypatch.setattr(
    jax, 'block_until_ready', lambda x: waits.append(float(x)) or real(x)
  )
  clock = itertools.count(0, 12).__next__
  run = device.timed(
    lambda x, y: x + y, (jnp.zeros(()), jnp.ones(())), 4, clock
  )
  assert waits == [4.0] * device.WARM  # four steps, each on what one gave
  assert run() == {'': 12 / 4}
  assert len(waits) == device.WARM + 1  # the clock is read when it is done


def report(times):
  out = measure.BenchReport('kernels', '', '')
  device.rates(out, times, SIZES)
  return out


def test_rates_are_work_over_time():
  b, t, n, h = SIZES.shape
  flops, moved = device.work('xla forward', SIZES)
  assert flops == 4 * b * n * h * t * t / 2
  assert moved == 4 * b * t * n * h * 2
  assert device.work('xla with gradients', SIZES) == (3.5 * flops, 3 * moved)
  times = {'product': [1.0, 2.0], 'copy': [1.0, 1.0], 'xla forward': [4.0, 5.0]}
  rows = report(times).rows
  assert rows['product: rate'] == (
    'TF/s',
    [2 * 32**3 / s / 1e12 for s in (1, 2)],
  )
  assert rows['copy: moved'] == ('GB/s', [2 * 4 * 2 * 32**2 / 1e9] * 2)
  assert rows['xla forward: rate'] == (
    'TF/s',
    [flops / s / 1e12 for s in (4, 5)],
  )


def test_a_rate_above_its_ceiling_is_called_wrong():
  good = {'product': [1.0], 'copy': [1.0], 'xla forward': [8.0]}
  found = report(good)
  assert not found.notes and {c.verdict for c in found.checks} == {'met'}
  found = report(good | {'xla forward': [0.1]})
  assert [c.verdict for c in found.checks] == ['missed', 'missed']
  assert 'WRONG: xla forward / product, operations' in found.notes[0]
  # A clock that is too fast for the ceiling alone is no fault of the row.
  assert not report(good | {'product': [0.01]}).notes


def test_ratios_are_within_a_round():
  out = measure.BenchReport('kernels', '', '')
  times = {
    f'{n} {device.FORWARD}': s for n, s in (('a', [1, 2]), ('b', [3, 4]))
  }
  device.against(out, times, 'a', True)
  assert [(c.what, c.values) for c in out.checks] == [
    ('b forward / a forward', [3.0, 2.0])
  ]


def test_the_whole_of_it_on_a_cpu(monkeypatch):
  def explain(op, target=None, spec=None):
    return [('xla', True, ''), ('cudnn', False, 'needs an NVIDIA GPU')]

  monkeypatch.setattr(registry, 'explain', explain)
  found = device.kernels(2, True, SILENT, SIZES)
  seconds = {r: v for r, (unit, v) in found.rows.items() if unit == 's'}
  ours = {'xla forward', 'xla with gradients'}
  assert set(seconds) == ours | {'product', 'copy'}
  assert all(len(v) == 2 and min(v) > 0 for v in seconds.values())
  assert 'cudnn is not available: needs an NVIDIA GPU' in found.notes
  assert {c.what.split(' / ')[0] for c in found.checks} == ours
  assert 'cpu' in found.setup


def test_the_bench_has_facts_and_continues(monkeypatch, tmp_path):
  """On an accelerator, which is a CPU here."""
  given, real = {}, device.kernels
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(device, 'kernels', lambda *_, **fields: given | fields)
  given |= bench_kernels.kernels(1, True, SILENT)
  monkeypatch.undo()
  row = lambda x, *_: x
  monkeypatch.setattr(device, 'steps', lambda *_: ({'a forward': row}, {}))
  fields = dict(path=tmp_path / 'a.json', facts=dict(quick=True), say=SILENT)
  with measure.session(**fields):
    found = real(1, True, SILENT, SIZES, **given)
    assert found.facts == fields['facts']
    assert {c.verdict for c in found.checks} == {'-'}
    found.finish()
  with measure.session(**fields, resume=True):
    with pytest.raises(measure.KeptError):
      real(1, True, SILENT, SIZES, **given)


def test_what_does_not_compile_is_a_line(monkeypatch):
  def refuse(*args):
    raise NotImplementedError('no such\n instruction')

  monkeypatch.setattr(
    device, 'steps', lambda *args: ({'a forward': refuse}, {})
  )
  found = device.kernels(1, True, SILENT, SIZES)
  assert found.notes[0].endswith('NotImplementedError: no such instruction')


@pytest.mark.parametrize('name', sorted(device.PEERS))
def test_with_gradients_others_use_their_own(name, monkeypatch):
  monkeypatch.setattr(
    registry, 'explain', lambda op, target=None, spec=None: [(name, True, '')]
  )
  called = []
  peer = lambda q, k, v, mask: called.append(mask) or q * k * v
  monkeypatch.setitem(device.PEERS, name, peer)
  found, _ = device.steps('mask', None)
  x = jnp.full((1,), 2.0)
  assert found[f'{name} with gradients'](x, x, x) == 3 * 8 * 4  # o = 8, x^2 = 4
  assert called == ['mask']
