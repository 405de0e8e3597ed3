"""Dequantised blocks are those of the package `gguf`, bit by bit."""

import gguf
import numpy as np
import pytest

from paraxis.models.huggingface import gguf_types

KINDS = sorted(gguf_types.FORMS)
# Where the float16 numbers of a block lie.
HALVES = {
  'F16': [0], 'Q4_0': [0], 'Q4_1': [0, 2], 'Q5_0': [0], 'Q5_1': [0, 2],
  'Q8_0': [0], 'Q4_K': [0, 2], 'Q5_K': [0, 2], 'Q6_K': [208],
}  # fmt: skip


def blocks(kind, count=257, seed=0):
  """Random bytes of blocks, all of whose values are finite."""
  form, rng = gguf_types.FORMS[kind], np.random.default_rng(seed)
  if form.name in ('F32', 'BF16'):
    x = rng.normal(size=count).astype('<f4').view('u1').reshape(count, 4)
    return x[:, 4 - form.size :].copy()
  raw = rng.integers(0, 256, (count, form.size), dtype=np.uint8)
  for at in HALVES[form.name]:
    some = rng.normal(size=count).astype('<f2')
    raw[:, at : at + 2] = some[:, None].view('u1')
  return raw


@pytest.mark.parametrize('kind', KINDS)
def test_blocks(kind):
  form, theirs = gguf_types.FORMS[kind], gguf.GGMLQuantizationType(kind)
  assert form.name == theirs.name
  assert (form.values, form.size) == gguf.GGML_QUANT_SIZES[theirs]
  raw = blocks(kind)
  found = form.dequantize(raw)
  assert found.dtype == np.float32 and np.isfinite(found).all()
  assert found.std() > 0
  wanted = gguf.dequantize(raw, theirs).reshape(-1)
  np.testing.assert_array_equal(found.view('u4'), wanted.view('u4'))


def _six(scales, j):
  """get_scale_min_k4 of ggml-quants.c, of group j."""
  if j < 4:
    return scales[j] & 63, scales[j + 4] & 63
  low, high = scales[j + 4] & 15, scales[j + 4] >> 4
  return low | scales[j - 4] >> 6 << 4, high | scales[j] >> 6 << 4


def _q5_k(block):
  """By hand, in Python's integers."""
  d, e = (float(x) for x in np.frombuffer(block[:4], '<f2'))
  scales, high, low = block[4:16], block[16:48], block[48:]
  out = []
  for j in range(8):
    s, m = _six(scales, j)
    for i in range(32):
      q = low[j // 2 * 32 + i] >> j % 2 * 4 & 15 | (high[i] >> j & 1) << 4
      out.append(d * s * q - e * m)
  return out


def _q6_k(block):
  out, d = [], float(np.frombuffer(block[208:], '<f2')[0])
  for i in range(256):
    half, within = divmod(i, 128)
    low = block[half * 64 + within % 64] >> within // 64 * 4 & 15
    high = block[128 + half * 32 + within % 32] >> within // 32 * 2 & 3
    s = int(np.int8(np.uint8(block[192 + i // 16])))
    out.append(d * s * ((low | high << 4) - 32))
  return out


@pytest.mark.parametrize('kind, slow', [(13, _q5_k), (14, _q6_k)])
def test_blocks_by_hand(kind, slow):
  raw = blocks(kind, 3)
  found = gguf_types.FORMS[kind].dequantize(raw).reshape(3, 256)
  wanted = np.array([slow(bytes(block)) for block in raw])
  np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * wanted.max())


@pytest.mark.parametrize('kind', [k for k in KINDS if k not in (0, 1, 30)])
def test_every_bit_of_a_block_is_read(kind):
  """A bit that is turned around, of four blocks, turns a value of one."""
  form, raw = gguf_types.FORMS[kind], blocks(kind, 4)
  raw[:, HALVES[form.name][0] + 1] = 0x3C  # scales of about 1
  before = form.dequantize(raw)
  for at in range(form.size):
    for bit in range(8):
      other = raw.copy()
      other[:, at] ^= 1 << bit
      with np.errstate(invalid='ignore'):
        assert (form.dequantize(other) != before).any(), (at, bit)


def test_numbers_of_types_that_are_not_read():
  for kind, name in gguf_types.UNREAD.items():
    assert gguf.GGMLQuantizationType(kind).name == name
