"""The search for block sizes: what is counted, left out, chosen and written."""

import types

import jax
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels.attention import block_table
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import xla as attention_xla
from paraxis.sharding.meter import aot
from paraxis.train.bench import kernel_schedules
from paraxis.train.bench import kernel_tune as tune

SILENT = lambda _: None
SETTING = tune.Setting('tpu', 'TPU v5 lite', 128)


def test_visits_are_those_of_a_causal_mask():
  assert tune.visits((512, 512), 'partial') == (120, 16)
  assert tune.visits((512, 512), 'full') == (256, 0)
  assert tune.visits((1024, 512), 'partial') == (56, 16)


def schedules(full, partial):
  row = lambda n: dict.fromkeys(
    tune.PASSES, kernel_schedules.StaticSchedule(n, 0.5, 0)
  )
  return dict(full=row(full), partial=row(partial))


def test_figures_weigh_both_kinds_of_block():
  found = {(512, 512): schedules(10, 20), (1024, 512): schedules(30, 100)}
  masked = tune.static_figures(found, 'partial')['dq']
  assert masked == {(512, 512): 120 * 10 + 16 * 20, (1024, 512): 1680 + 1600}
  full = tune.static_figures(found, 'full')['dq']
  assert full == {(512, 512): 2560, (1024, 512): 128 * 30}


def test_the_least_is_chosen_beside_the_default():
  figures = dict.fromkeys(tune.PASSES, {(512, 512): 9, (1024, 512): 8})
  rows = tune.best(SETTING, 'partial', figures, 'static', 'bundles')
  assert [r.key.which for r in rows] == list(tune.PASSES)
  assert {r[1:] for r in rows} == {((1024, 512), 'static', 'bundles', 8, 9)}
  with pytest.raises(errors.UserError, match='no block of dq runs on TPU v5'):
    tune.best(SETTING, 'partial', {'dq': {}}, 'static', 'bundles')


def test_static_leaves_out_what_does_not_compile_or_fit(monkeypatch):
  devices = [types.SimpleNamespace(device_kind='TPU v5 lite')]
  topology = types.SimpleNamespace(devices=devices)
  monkeypatch.setattr(aot, 'topology', lambda name: topology)
  monkeypatch.setattr(tune, 'fits', lambda t, block, head: block[0] < 1024)

  def measured(name, block, head, forms):
    if block[1] > 1024:
      raise RuntimeError('out of memory')
    return schedules(2e5 / sum(block), 2e5 / sum(block))

  monkeypatch.setattr(kernel_schedules, 'measure', measured)
  lines = []
  grid = [(512, 512), (512, 1024), (1024, 1024), (512, 2048)]
  rows = tune.static('v5e:1x1', 64, lines.append, grid)
  assert len(rows) == 6 and {r.block for r in rows} == {(512, 1024)}
  assert {r.key.head for r in rows} == {64}
  assert 'does not fit' in lines[2] and 'out of memory' in lines[3]


def standing_in(form):
  """XLA's form as a kernel that takes a Launch."""

  def call(*args):
    *given, launch = args
    return form(*given)

  return call


def test_measured_on_a_cpu_by_what_stands_in(monkeypatch):
  kernels = types.SimpleNamespace(
    forward=standing_in(attention_xla.forward),
    backward=standing_in(attention_xla.backward),
  )
  monkeypatch.setattr(tune.block_table, 'MASKS', ('partial',))
  setting = tune.Setting('tpu', 'cpu', 8, 'float32')
  with jax.enable_x64(False):
    rows = tune.measured(setting, kernels, [(8, 8)], (1, 16, 2), 1, SILENT)
  assert [r.key.which for r in rows] == list(tune.PASSES)
  assert {(r.source, r.unit, r.default) for r in rows} == {
    ('measured', 's', None)
  }
  assert all(r.figure > 0 for r in rows)


def test_the_table_goes_where_it_was_asked_to(monkeypatch, tmp_path):
  key = block_table.Key('attention', 'dq', 'TPU', 8, 'bfloat16', 'full')
  row = block_table.TunedBlock(key, (1, 2), 'static')
  before = block_table.OWN.read_bytes()
  monkeypatch.setattr(tune, 'TOPOLOGIES', ('v5e:1x1',))
  monkeypatch.setattr(tune, 'HEADS', (8,))
  monkeypatch.setattr(tune, 'static', lambda *args: [row])
  path = tmp_path / 'table.json'
  lines = tune.tune(str(path), 1, SILENT)
  assert lines == ['dq TPU 8 bfloat16 full: 1x2, static']
  assert block_table.read(path) == {key: row}
  assert block_table.OWN.read_bytes() == before
  with pytest.raises(errors.UserError, match='give the file to write'):
    tune.tune('', 1, SILENT)
  with pytest.raises(errors.UserError, match='nowhere'):
    tune.tune(str(tmp_path / 'nowhere' / 'x'), 1, SILENT)
  with pytest.raises(errors.UserError, match='is a folder: name a file in it'):
    tune.tune(str(tmp_path), 1, SILENT)


def test_the_grid_holds_the_defaults():
  for platform, grid in tune.GRID.items():
    assert set(attention_blocks.BLOCKS[platform].values()) <= set(grid)
