"""Block sizes as data: read, refused with a reason, looked up, used."""

import json

import jax
import jax.numpy as jnp
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import block_table
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import gpu as attention_gpu
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import tpu as attention_tpu

KEY = block_table.Key('attention', 'dq', 'TPU v9', 128, 'bfloat16', 'partial')
ROW = block_table.TunedBlock(KEY, (256, 384), 'static', 'bundles', 9e3, 1e4)
CALL = attention_blocks.Call(128, 'bfloat16', True, 'TPU v9')


@pytest.fixture
def table(monkeypatch, tmp_path):
  """Path of a table of ROW, in use."""
  path = tmp_path / 'blocks.json'
  block_table.write(path, [ROW])
  monkeypatch.setenv(block_table.VARIABLE, str(path))
  return path


def test_what_is_written_is_read(table):
  assert block_table.read(table) == {KEY: ROW}
  assert block_table.find(KEY) == ROW
  assert ROW.report() == 'static: 9e+03 bundles, 1e+04 with the default'


def test_the_rows_of_the_package_are_rows():
  rows = block_table.read(block_table.OWN)
  for key, row in rows.items():
    assert key.op == 'attention' and key.which in ('forward', 'dq', 'dkv')
    assert all(n % attention_tpu.LANES == 0 for n in row.block)
    # Without a device nothing is measured.
    assert row.source == 'static' and row.figure <= row.default


GOOD = dict(
  op='attention', device='d', head=64, dtype='f', mask='full', block=[1, 1],
  source='static',
) | {'pass': 'dq'}  # fmt: skip


@pytest.mark.parametrize(
  'rows, words',
  [
    ([GOOD | dict(source='guess')], "row 1: ValueError: source 'guess'"),
    ([GOOD, GOOD], 'row 2: ValueError: a second row'),
    ([GOOD | dict(block=[0, 8])], 'not two numbers above 0'),
    ([GOOD | dict(speed=1)], 'speed'),
    ([{}], "row 1: KeyError: 'op'"),
    (3, 'TypeError'),
  ],
)
def test_what_is_no_table_is_an_error_with_its_row(rows, words, tmp_path):
  path = tmp_path / 'bad.json'
  path.write_text(json.dumps(rows))
  with pytest.raises(errors.UserError, match=words):
    block_table.read(path)
  path.write_text(json.dumps([GOOD]))
  assert len(block_table.read(path)) == 1


def test_a_file_that_is_not_there():
  with pytest.raises(errors.UserError, match='FileNotFound'):
    block_table.read('nowhere.json')
  with pytest.raises(errors.UserError, match='--tune=nowhere'):
    block_table.write('nowhere/blocks.json', [])


def test_a_row_is_chosen_for_what_it_is_for_alone(table):
  found = attention_blocks.choose('tpu', 'dq', CALL)
  assert found == ((256, 384), 'static', ROW.report())
  for other in (
    CALL._replace(head=64),
    CALL._replace(dtype='float32'),
    CALL._replace(masked=False),
    CALL._replace(device='TPU v8'),
  ):
    found = attention_blocks.choose('tpu', 'dq', other)
    assert found[:2] == ((512, 512), 'default')
    assert f'no row for {other.device}, head size {other.head}' in found.reason
  assert attention_blocks.choose('tpu', 'forward', CALL).source == 'default'
  assert attention_blocks.choose('gpu', 'dq', CALL).block == (256, 384)


def test_the_kernels_take_the_row(table, monkeypatch):
  target = registry.Target('tpu', 'TPU v9')
  monkeypatch.setattr(registry, 'current_target', lambda: target)
  x = jnp.zeros((1, 1024, 1, 128), jnp.bfloat16)
  given = (x, x, x), None, None, attention.Mask(), attention_blocks.DEFAULT
  plan = attention_tpu._plan('dq', *given)
  assert (plan.block_q, plan.block_k) == (256, 384)
  plan = attention_tpu._plan('dkv', *given)
  assert (plan.block_q, plan.block_k) == (512, 512)
  plan = attention_gpu._plan('dq', *given)
  assert (plan.block_q, plan.block_k) == (256, 384)
  x = jax.ShapeDtypeStruct((1, 2**20, 1, 128), 'bfloat16')
  spec = attention.AttentionSpec(
    x.shape, x.shape, 'bfloat16', attention.Mask(), 0, 1
  )
  # 2048 x 2048 blocks of 512, but 4096 x 2731 of the row's.
  reason = registry.kernel('tpu', attention_tpu).supports(spec, target)
  assert 'blocks to list' in reason
