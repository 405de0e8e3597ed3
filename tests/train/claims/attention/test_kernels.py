"""Checks of attention in blocks hold, and fail where what they check breaks."""

import claim_cases
import jax.numpy as jnp
import numpy as np
import support

from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import tpu as attention_tpu
from paraxis.train.bench import measure as bench_measure
from paraxis.train.claims.attention import kernels as claims_attention
from paraxis.train.claims.attention import parts as claims_attention_parts

SHAPE = [2, 1, 8]
TINY = dict(length=40, block=16, packed=True, window=9)


EQUAL = dict(shape=SHAPE, within=1e-5)


def test_the_xla_form_equals_dense_until_lse_is_wrong():
  real = attention.attention

  def shifted(*arrays, **how):
    o, lse = real(*arrays, **how)
    return o, jnp.where(lse > -1e29, lse + 1e-3, lse)

  right, _ = claim_cases.holds_until(
    attention, 'attention', shifted, claims_attention.equals_dense,
    impl='xla', cases=[TINY], **EQUAL,
  )  # fmt: skip
  assert float(right.measured) < 1e-12


def test_kernels_equal_dense_until_one_hides_a_block():
  real = attention_blocks.block_kinds

  def hides(mask, *infos):
    kinds = real(mask, *infos)
    return kinds * (np.arange(kinds.shape[1])[:, None] != 1)

  case = TINY | dict(block=[16, 32])
  assert claims_attention.equals_dense(
    None, impl='pallas_gpu', cases=[case], **EQUAL
  ).passed
  claim_cases.holds_until(
    attention_blocks, 'block_kinds', hides, claims_attention.equals_dense,
    impl='pallas_tpu', cases=[case], **EQUAL,
  )  # fmt: skip


def temporaries(dense_at_least=3.0):
  return claims_attention.temporaries(
    None, lengths=[1024, 2048], shape=[1, 1, 16], within=0.1,
    dense_at_least=dense_at_least,
  )  # fmt: skip


def test_temporaries_are_linear_until_ours_is_dense():
  assert temporaries().passed
  assert not temporaries(dense_at_least=5).passed
  with claims_attention.dense():
    found = temporaries()
  assert not found.passed and 'NOT only dense' in found.caveat


def test_the_largest_array_of_a_text():
  text = '%a = f32[2,3]{1,0} add(f32[2,3] %b, s8[5,7] %c), (pred[], bf16[4])'
  assert claims_attention.largest(text) == (35, 's8[5,7]')


def visited(windows):
  return claims_attention.blocks_visited(
    None, length=256, block=32, windows=windows, shape=SHAPE
  )


def test_blocks_visited_are_those_of_the_formula(monkeypatch):
  found = visited([0, 1, 33, 34])
  assert found.passed and found.measured == '36 8 15 21'
  with claims_attention.every_block():
    found = visited([0])
  assert not found.passed and found.measured == '64'
  cost = attention_blocks.cost
  half = lambda *given: cost('forward', *given[1:])
  monkeypatch.setattr(attention_tpu.blocks, 'cost', half)
  found = visited([0])
  assert found.measured == '36' and not found.passed


def test_cost_is_a_ratio(monkeypatch):
  times = lambda *given: {'dense': [2.0, 9.0, 5.0], 'ours': [1.0, 1.0, 2.0]}
  monkeypatch.setattr(bench_measure, 'interleave', times)
  check = lambda at_least: claims_attention.cost(
    None, lengths=[64], shape=[1, 1, 8], rounds=3, at_least=at_least
  )
  assert check(2.5).passed and 'T=64: 2.0 2.5 9.0' in check(2.5).caveat
  assert not check(2.6).passed


def tiles(blocks):
  return claims_attention_parts.mask_is_a_slice(None, length=48, blocks=blocks)


def test_tiles_of_a_mask_are_slices(monkeypatch):
  assert tiles([[8, 8], [16, 8], [8, 24]]).passed
  real = attention_blocks.visible
  monkeypatch.setattr(
    attention_blocks, 'visible', lambda *given: jnp.tril(real(*given), -1)
  )
  assert tiles([[8, 8]]).measured == '6 differ'


def test_tiles_without_a_mask_are_seen():
  with claims_attention_parts.no_mask():
    assert tiles([[8, 8]]).measured == '21 differ'


def test_parts_of_a_row_merge_by_lse():
  ask = lambda: claims_attention_parts.host_part(
    None, slots=20, on_host=[1, 19], rows=2, shape=[4, 2, 8], within=1e-12
  )
  right = ask()
  assert right.passed and '136 numbers cross' in right.caveat
  with claims_attention_parts.mean_of_parts():
    assert not ask().passed


@support.compiles('tpu')
def test_no_square_is_compiled_for_a_tpu():
  check = lambda at_most: claims_attention.compiled_is_linear(
    None, topologies=['v5e:1x1'], lengths=[1024], shape=[2, 1, 128], window=0,
    at_most=at_most,
  )  # fmt: skip
  assert check(2).passed
  with claims_attention.dense():
    found = check(100)
  assert not found.passed and found.measured.startswith('FOUND')
