"""What the bench of kernels runs and reads; never its times."""

import pathlib
import pkgutil
import re

import jax
import numpy as np
import pytest
import support

from paraxis import pallas_kernels
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.scans import newton
from paraxis.sharding.meter import aot
from paraxis.train.bench import kernel_schedules
from paraxis.train.bench import kernels as bench_kernels
from paraxis.train.bench import measure

SILENT = lambda _: None
TABLE = """\
== CAPACTIY:
MXU, XLU, VSTORE, VSTORE:SPILL
    4     3     1     1
== UTILIZATION:
0 0 0 0
4 1 1 1
2 0 1 1
0 0 1 0
"""


def test_a_table_is_read():
  assert kernel_schedules.read(TABLE) == (4, 6 / 16, 2)
  with pytest.raises(ValueError, match='not a table'):
    kernel_schedules.read('nothing')


@pytest.mark.parametrize(
  'name, which',
  [
    ('17-attention_tpu_forward.1-70-final', 'forward'),
    ('17-attention_tpu_dkv.12-9-final', 'dkv'),
    ('17-splash_mha_fwd_no_residuals.3-70-final', 'fwd'),
    ('17-splash_mha_dq-70-final', 'dq'),
    ('17-attention_tpu_dq.1-68-pre-delay', None),
    ('17-copy.5-64-final', None),
  ],
)
def test_files_of_kernels(name, which):
  tail = '_hlo-static-per-bundle-utilization.txt'
  found = kernel_schedules._FILE.search(name + tail)
  assert (found and found[1]) == which


def test_one_branch_and_back():
  plan = attention_blocks.BlockPlan.present
  with pytest.raises(KeyError), kernel_schedules._one_branch(1):
    assert attention_blocks.BlockPlan.present(None) == (1,)
    raise KeyError
  assert attention_blocks.BlockPlan.present is plan


def test_a_process_that_fails_is_named():
  with pytest.raises(RuntimeError, match='schedules for v5x:1x1: .*UserError'):
    kernel_schedules.measure('v5x:1x1', 128)


@support.compiles('tpu')
def test_schedules_of_small_blocks():
  found = kernel_schedules.measure('v5e:1x1', 128)
  assert set(found) == set(kernel_schedules.KINDS)
  for passes in found.values():
    assert set(passes) == {'forward', 'dq', 'dkv'}
    for x in passes.values():
      assert x.bundles > 100 and 0 < x.mxu < 1
  # What a mask costs is in the partial branch alone.
  for which in ('forward', 'dq', 'dkv'):
    assert found['partial'][which].bundles > found['full'][which].bundles


def schedules(full):
  one = lambda n: kernel_schedules.StaticSchedule(n, 0.5, 7)
  row = lambda n: dict.fromkeys(('forward', 'dq', 'dkv'), one(n))
  return dict(full=row(full), partial=row(120), splash=row(100))


def static(monkeypatch, full):
  report = measure.BenchReport('kernels', '', '')
  monkeypatch.setattr(aot, 'missing', lambda platform: None)
  monkeypatch.setattr(
    kernel_schedules, 'measure', lambda name, block: schedules(full)
  )
  kernel_schedules.judge(report, SILENT)
  return report


def test_schedules_are_judged_and_labelled(monkeypatch):
  report = static(monkeypatch, 90)
  assert [c.verdict for c in report.checks] == ['met'] * 6
  assert {unit for unit, _ in report.rows.values()} == {'static'}
  assert 'not measured' in report.notes[-1]
  assert report.rows['v5e 512 dq, full: spills'] == ('static', [7])
  worse = static(monkeypatch, 97).checks
  assert [c.verdict for c in worse].count('missed') == 3


def test_without_libtpu_it_says_so(monkeypatch):
  monkeypatch.setattr(aot, 'missing', lambda platform: 'libtpu is not there')
  report = measure.BenchReport('kernels', '', '')
  kernel_schedules.judge(report, SILENT)
  assert report.notes == ['no static schedules: libtpu is not there']


def test_both_forms_of_every_op_give_the_same():
  with jax.enable_x64(False):
    report = bench_kernels.kernels(1, True, SILENT)
  ops = [pair.op for pair in bench_kernels.comparisons(True)]
  held = [c for c in report.checks if 'temporaries' in c.what]
  assert len(report.checks) - len(held) == len(ops) == len(set(ops)) == 17
  assert [c.what.split(' T')[0] for c in held] == ['selective scan'] * 2
  for check in held:
    op = check.what.split(':')[0]
    ours, loops = (
      report.rows[f'{op}: {name}, temporaries'][1][0]
      for name in ('ours', 'nested loops')
    )
    assert check.values == [ours / loops] and check.target == 1
  assert all(c.verdict == '-' and min(c.values) > 0 for c in report.checks)
  assert len(report.rows) == 5 * len(ops)
  gaps = [v for unit, v in report.rows.values() if unit == 'relative']
  assert len(gaps) == len(ops) and max(gaps) < [1e-4]


# Files of a room of pallas_kernels that are forms of an op, or parts of them.
FORM = re.compile(
  r'(?:.*_)?(xla|tpu|gpu|host|chunk|batched|schedule|adapters|blocks|block_table)'
  r'|hopper(_\w+)?'
)


def op_modules():
  """Modules of all ops: in a room of pallas_kernels, and no form of one."""
  prefix = f'{pallas_kernels.__name__}.'
  found = pkgutil.walk_packages(pallas_kernels.__path__, prefix)
  names = [m.name for m in found if m.name.count('.') == 3]
  return {n for n in names if not FORM.fullmatch(n.rpartition('.')[2])}


def without_row(pairs):
  """Modules of ops that no comparison is of."""
  return op_modules() - {pair.of.__name__ for pair in pairs}


def test_every_op_has_a_row():
  pairs = list(bench_kernels.comparisons(True))
  assert not without_row(pairs)
  fewer = [pair for pair in pairs if pair.of is not newton]
  assert without_row(fewer) == {newton.__name__}
  # No file that registers an op passes as a form of another.
  root = pathlib.Path(pallas_kernels.__path__[0])
  for path in root.glob('*/*.py'):
    if 'registry.register(' in path.read_text(encoding='utf-8'):
      name = f'{pallas_kernels.__name__}.{path.parent.name}.{path.stem}'
      assert name in op_modules()


def test_a_gap_is_found():
  x = np.ones(3, np.float32)
  assert bench_kernels.largest_gap((x, x), (x, 2 * x)) == 0.5
