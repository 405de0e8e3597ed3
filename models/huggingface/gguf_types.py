"""Types of tensors in a GGUF file: bytes of blocks -> float32.

    Q4_0, Q5_0, Q8_0   w = d (q - z)        z: 8, 16, 0
    Q4_1, Q5_1         w = d q + m
    Q4_K, Q5_K         w = d s_b q - e m_b  s, m: of 6 bits, one for 32 values
    Q6_K               w = d s_b (q - 32)   s: of 8 bits, one for 16 values

d, e and m are float16, one of each for a block: 32 values, of the last three
256. Where a q is of 5 or 6 bits, its upper ones lie apart from its lower four.

Source: block_q4_0 to block_q6_K of ggml-common.h and dequantize_row_q4_0 to
dequantize_row_q6_K of ggml-quants.c, github.com/ggml-org/ggml; products and
sums are in their order, so values are equal bit by bit.

Legend: N blocks, B bytes of a block, K values of a block.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Form(NamedTuple):
  """A type that is read.

  values, size: values and bytes of a block. read: uint8 (N, size) -> float32
  (N, values).
  """

  name: str
  values: int
  size: int
  read: Callable[[np.ndarray], np.ndarray]

  def dequantize(self, raw: np.ndarray) -> np.ndarray:
    """uint8 bytes of whole blocks -> float32, flat."""
    return self.read(raw.reshape(-1, self.size)).reshape(-1)


def _as(dtype):
  """Values that need no scale, stored as little-endian `dtype`."""
  return lambda raw_NB: _view(raw_NB, dtype).astype(np.float32)


def _view(raw_NB, dtype):
  return np.ascontiguousarray(raw_NB).view(dtype)


def _halves(raw_NB):
  """Float16 numbers."""
  return _view(raw_NB, '<f2').astype(np.float32)


def _bfloat16(raw_NB):
  return (_view(raw_NB, '<u2').astype(np.uint32) << 16).view(np.float32)


def _nibbles(raw_NB, group=16):
  """Every `group` bytes: their low halves, then their high halves."""
  raw = raw_NB.reshape(len(raw_NB), -1, 1, group)
  return np.concatenate([raw & 15, raw >> 4], 2).reshape(len(raw_NB), -1)


def _fifth(raw_NB):
  """4 bytes: bit i is the fifth of value i."""
  return np.unpackbits(raw_NB, 1, bitorder='little') << 4


def _float(q):
  return q.astype(np.float32)


def _q4_0(raw_NB):
  return _halves(raw_NB[:, :2]) * (_float(_nibbles(raw_NB[:, 2:])) - 8)


def _q4_1(raw_NB):
  d_N1, m_N1 = _halves(raw_NB[:, :2]), _halves(raw_NB[:, 2:4])
  return d_N1 * _float(_nibbles(raw_NB[:, 4:])) + m_N1


def _q5_0(raw_NB):
  q_NK = _nibbles(raw_NB[:, 6:]) | _fifth(raw_NB[:, 2:6])
  return _halves(raw_NB[:, :2]) * (_float(q_NK) - 16)


def _q5_1(raw_NB):
  d_N1, m_N1 = _halves(raw_NB[:, :2]), _halves(raw_NB[:, 2:4])
  q_NK = _nibbles(raw_NB[:, 8:]) | _fifth(raw_NB[:, 4:8])
  return d_N1 * _float(q_NK) + m_N1


def _q8_0(raw_NB):
  return _halves(raw_NB[:, :2]) * _float(_view(raw_NB[:, 2:], np.int8))


def _sixes(raw_NB):
  """12 bytes -> (s, m), 8 numbers of 6 bits each.

  s_0..3 and m_0..3 are the lower 6 bits of bytes 0..3 and 4..7. Of s_4..7 and
  m_4..7 the lower four lie in bytes 8..11, the upper two on top of those eight.
  """
  s, m, both = raw_NB[:, :4], raw_NB[:, 4:8], raw_NB[:, 8:]
  later_s = both & 15 | s >> 6 << 4
  later_m = both >> 4 | m >> 6 << 4
  join = lambda first, later: np.concatenate([first & 63, later], 1)
  return join(s, later_s), join(m, later_m)


def _of_eight(raw_NB, q_NK):
  """w of 8 groups of 32 values, whose scales begin the block."""
  s_N8, m_N8 = _sixes(raw_NB[:, 4:16])
  d_N8 = _halves(raw_NB[:, :2]) * _float(s_N8)
  e_N8 = _halves(raw_NB[:, 2:4]) * _float(m_N8)
  q = _float(q_NK).reshape(-1, 8, 32)
  return (d_N8[..., None] * q - e_N8[..., None]).reshape(q_NK.shape)


def _q4_k(raw_NB):
  return _of_eight(raw_NB, _nibbles(raw_NB[:, 16:], 32))


def _q5_k(raw_NB):
  """Bit g of byte i of 32 is the fifth of value i of group g."""
  bits = raw_NB[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & 1
  high_NK = bits.swapaxes(1, 2).reshape(len(raw_NB), -1) << 4
  return _of_eight(raw_NB, _nibbles(raw_NB[:, 48:], 32) | high_NK)


def _q6_k(raw_NB):
  """Two halves of 128 values: 64 bytes of lower bits, 32 of upper ones each."""
  n = len(raw_NB)
  high = raw_NB[:, 128:192].reshape(n, 2, 1, 32)
  high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
  q_NK = _nibbles(raw_NB[:, :128], 64) | high.reshape(n, -1) << 4
  s_N16 = _float(_view(raw_NB[:, 192:208], np.int8))
  d_N16 = _halves(raw_NB[:, 208:]) * s_N16
  q = _float(q_NK).reshape(n, 16, 16) - 32
  return (d_N16[..., None] * q).reshape(q_NK.shape)


# By their numbers in files.
FORMS = {
  0: Form('F32', 1, 4, _as('<f4')),
  1: Form('F16', 1, 2, _as('<f2')),
  2: Form('Q4_0', 32, 18, _q4_0),
  3: Form('Q4_1', 32, 20, _q4_1),
  6: Form('Q5_0', 32, 22, _q5_0),
  7: Form('Q5_1', 32, 24, _q5_1),
  8: Form('Q8_0', 32, 34, _q8_0),
  12: Form('Q4_K', 256, 144, _q4_k),
  13: Form('Q5_K', 256, 176, _q5_k),
  14: Form('Q6_K', 256, 210, _q6_k),
  30: Form('BF16', 1, 2, _bfloat16),
}
UNREAD = {
  9: 'Q8_1', 10: 'Q2_K', 11: 'Q3_K', 15: 'Q8_K', 16: 'IQ2_XXS', 17: 'IQ2_XS',
  18: 'IQ3_XXS', 19: 'IQ1_S', 20: 'IQ4_NL', 21: 'IQ3_S', 22: 'IQ2_S',
  23: 'IQ4_XS', 24: 'I8', 25: 'I16', 26: 'I32', 27: 'I64', 28: 'F64',
  29: 'IQ1_M', 34: 'TQ1_0', 35: 'TQ2_0', 39: 'MXFP4', 40: 'NVFP4',
}  # fmt: skip
