"""Weights of 4 bits: the integers, the bound on their error, the products."""

import dataclasses
import functools
import re

import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels.matmul import quantized as quantized_matmul
from paraxis.pallas_kernels.matmul import quantized_gpu as quantized_matmul_gpu
from paraxis.pallas_kernels.matmul import quantized_tpu as quantized_matmul_tpu


def weights(D=384, F=256, dtype='f4'):
  rng = np.random.default_rng(0)
  w = rng.normal(size=(D, F)) * np.exp(rng.normal(size=(1, F)))
  w[:128, 0] = 0  # a group of zeros
  return w.astype(dtype)


def loop(x, q, scale, group=128):
  """y by definition, one group after the other, in float64."""
  q, y = np.asarray(q, 'f8'), 0
  for g, s in enumerate(np.asarray(scale, 'f8')):
    rows = slice(group * g, group * (g + 1))
    y = y + (np.asarray(x, 'f8')[:, rows] @ q[rows]) * s
  return y


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_rounding_is_off_by_half_a_step_at_most(dtype):
  w = weights()
  q, scale = quantized_matmul.quantize(w, jnp.dtype(dtype))
  assert q.dtype == jnp.int4 and scale.dtype == dtype
  assert q.shape == w.shape and scale.shape == (3, 256)
  # The largest of 128 rows of a column is 7 steps.
  most = np.abs(w).reshape(3, 128, 256).max(1)
  wanted = np.where(most == 0, 1, most / 7)
  np.testing.assert_allclose(np.asarray(scale, 'f4'), wanted, 2**-8)
  step = np.repeat(np.asarray(scale, 'f4'), 128, 0)
  error = np.abs(quantized_matmul.dequantize(q, scale) - w) / step
  assert error.max() <= 0.5 + 1e-5 and error.mean() > 0.2
  assert not np.asarray(q[:128, 0], 'i4').any()
  whole = np.asarray(q, 'i4')
  assert whole.min() == -7 and whole.max() == 7
  # Without scales of their own, columns are off by far more.
  assert np.abs(np.round(w / step.max()) * step.max() - w).max() > step.min()


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(
  seed=strategies.integers(0, 2**31), groups=strategies.sampled_from([1, 3]),
  size=strategies.sampled_from(quantized_matmul.GROUPS),
)  # fmt: skip
def test_packing_loses_nothing(seed, groups, size):
  q = np.random.default_rng(seed).integers(-8, 8, (size * groups, 5))
  packed, half = (
    quantized_matmul.pack(jnp.asarray(q, jnp.int4), size),
    size // 2,
  )
  assert packed.dtype == jnp.uint8 and packed.shape == (half * groups, 5)
  for r in range(q.shape[0]):
    byte = int(packed[r // size * half + r % half, 2])
    bits = byte & 15 if r % size < half else byte >> 4
    assert (bits ^ 8) - 8 == q[r, 2]
  back = quantized_matmul.unpack(packed, size)
  assert back.dtype == jnp.int4
  np.testing.assert_array_equal(back.astype(jnp.int32), q)
  again = quantized_matmul.pack(back, size)
  np.testing.assert_array_equal(again, packed)


@pytest.mark.parametrize('group', quantized_matmul.GROUPS)
@pytest.mark.parametrize('form', ['int4', 'uint8'])
def test_xla_equals_the_loop_in_float64(form, group):
  with jax.enable_x64(True):
    x = np.random.default_rng(1).normal(size=(2, 3, 384))
    w = weights(dtype='f8')
    q, scale = quantized_matmul.quantize(w, jnp.float64, group)
    assert scale.shape == (384 // group, 256)
    given = quantized_matmul.pack(q, group) if form == 'uint8' else q
    y = jax.jit(quantized_matmul.quantized_matmul)(x, given, scale)
    assert y.dtype == np.dtype('f8') and y.shape == (2, 3, 256)
    expected = loop(x.reshape(6, 384), q, scale, group)
    np.testing.assert_allclose(y.reshape(6, 256), expected, rtol=0, atol=1e-12)
    wrong = loop(x.reshape(6, 384), -q.astype(jnp.int8), scale, group)
    assert np.abs(expected - wrong).max() > 1


def product(x, q, scale, **options):
  run = lambda *a: quantized_matmul_tpu.forward(*a, **options)
  return jax.jit(run)(x, q, scale)


@pytest.mark.parametrize(
  'form, T, sizes, dtype, tolerance',
  [
    ('int4', 5, dict(), 'float32', 1e-6),
    ('uint8', 130, dict(D=1280, F=384), 'float32', 1e-6),
    ('uint8', 16, dict(), 'bfloat16', 5e-3),
  ],
)
def test_the_kernel_equals_the_loop(form, T, sizes, dtype, tolerance):
  w = weights(**sizes)
  x = np.random.default_rng(1).normal(size=(T, len(w)))
  x = jnp.asarray(x, dtype)
  q, scale = quantized_matmul.quantize(w)
  given = quantized_matmul.pack(q) if form == 'uint8' else q
  y = product(x, given, scale, interpret=True)
  assert y.dtype == dtype
  expected = loop(x, q, scale)
  error = np.abs(np.asarray(y, 'f8') - expected).max()
  assert error <= tolerance * np.abs(expected).max()
  assert np.abs(loop(x, q, scale[::-1]) - expected).max() > 1


@pytest.mark.parametrize(
  'T, D, group, dtype, tolerance, launch',
  [
    (1, 384, 128, 'bfloat16', 5e-3, dict()),
    (7, 384, 64, 'float32', 1e-6, dict(shares=4)),  # 6 groups: 2, 2, 2
    (5, 384, 128, 'float32', 1e-6, dict(shares=2)),  # 3 groups: 2, 1
    (64, 384, 32, 'float16', 1e-3, dict(outputs=64, shares=5)),
    (33, 384, 128, 'float32', 1e-6, dict()),  # a tile of 64
  ],
)
def test_the_kernel_for_gpus_equals_the_loop(
  T, D, group, dtype, tolerance, launch
):
  w = weights(D=D)
  x = jnp.asarray(np.random.default_rng(1).normal(size=(T, D)), dtype)
  q, scale = quantized_matmul.quantize(w, group=group)
  launch = quantized_matmul_gpu.Int4Launch(interpret=True, **launch)
  run = functools.partial(quantized_matmul_gpu.forward, launch=launch)
  y = jax.jit(run)(x, quantized_matmul.pack(q, group), scale)
  assert y.dtype == dtype and y.shape == (T, 256)
  expected = loop(x, q, scale, group)
  error = np.abs(np.asarray(y, 'f8') - expected).max()
  assert error <= tolerance * np.abs(expected).max()
  assert np.abs(loop(x, q, scale[::-1], group) - expected).max() > 1


@pytest.mark.parametrize(
  'T, F, outputs, shares, stages',
  [
    (1, 5632, 128, 16, 4),
    (1, 64, 64, 16, 4),  # no more shares than groups
    (16, 5632, 64, 8, 4),
    (64, 8192, 64, 4, 2),
    (64, 256, 64, 4, 2),  # partial sums of as many bytes as the weights
    (64, 32768, 64, 1, 2),
  ],
)
def test_there_are_programs_for_a_gpu(T, F, outputs, shares, stages):
  launch = quantized_matmul_gpu.Int4Launch()
  fitted, rows = quantized_matmul_gpu._fit(launch, T, 2048, 16, F)
  assert fitted[:2] == (outputs, shares) and fitted.stages == stages
  assert rows == min(max(T, 16), 64)


def evaluated(text, word):
  """The two registers that PTX makes of one, all lanes of a NumPy array."""
  held = {'$2': word}
  read = lambda name: held[name] if name in held else np.uint32(int(name, 0))
  halves = lambda x: (x & 0xFFFF, x >> 16)
  number = lambda x: x.astype(np.uint16).view(jnp.bfloat16).astype('f4')
  bits = lambda x: x.astype(jnp.bfloat16).view(np.uint16).astype(np.uint32)
  for line in re.findall(r'[a-z][a-z0-9.]+ [^;{}]+(?=;)', text):
    name, into, *given = re.split(r',? ', line)
    if name == '.reg' or into == '.b32':
      continue
    given = [read(x) for x in given]
    if name == 'prmt.b32':
      pair = [g >> 8 * i & 255 for g in given[:2] for i in range(4)]
      at = [int(given[2]) >> 4 * i & 15 for i in range(4)]
      out = sum(pair[a] << np.uint32(8 * i) for i, a in enumerate(at))
    elif name == 'fma.rn.bf16x2':
      a, b, c = ([number(h) for h in halves(np.atleast_1d(x))] for x in given)
      low, high = (bits(a[i] * b[i] + c[i]) for i in (0, 1))
      out = low | high << 16
    else:
      run = {'xor.b32': np.bitwise_xor, 'and.b32': np.bitwise_and,
             'shr.u32': np.right_shift, 'mov.b32': np.array}  # fmt: skip
      out = run[name](*given)
    held[into] = out
  return [halves(held[name]) for name in ('$0', '$1')]


def test_the_ptx_makes_bfloat16_of_four_bytes():
  """No processor here runs it: an evaluator of its seven instructions does."""
  word = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32)
  for text, shift in (
    (quantized_matmul_gpu._LOW, 0), (quantized_matmul_gpu._HIGH, 4)
  ):  # fmt: skip
    found = [h for pair in evaluated(text, word) for h in pair]
    for k, half in enumerate(found):
      nibble = word >> 8 * k + shift & 15
      wanted = (nibble.astype(np.int32) ^ 8) - 8
      value = half.astype(np.uint16).view(jnp.bfloat16)
      np.testing.assert_array_equal(value.astype('f4'), wanted)


def test_no_race_and_nothing_read_before_it_is_written():
  """TPU semantics; 20 tokens do not fill whole blocks."""
  w = weights(D=256, F=256)
  x = np.random.default_rng(1).normal(size=(20, 256)).astype('f4')
  q, scale = quantized_matmul.quantize(w)
  packed, how = quantized_matmul.pack(q), kernel_cases.STRICT
  y = product(x, packed, scale, interpret=how)
  np.testing.assert_allclose(y, loop(x, q, scale), rtol=1e-4, atol=1e-4)
  assert not kernel_cases.races()


@pytest.mark.parametrize(
  'change, words',
  [
    (dict(x=np.ones((2, 256))), r'x \(2, 256\), q int4 \(384, 256\)'),
    (dict(scale_GF=np.ones((2, 256))), r'scales \(2, 256\)'),
    (dict(q=np.ones((384, 256), 'i1')), 'q is int8'),
  ],
)
def test_what_does_not_fit(change, words):
  q, scale = quantized_matmul.quantize(weights())
  given = dict(x=np.ones((2, 384)), q=q, scale_GF=scale) | change
  with pytest.raises(errors.UserError, match=words):
    quantized_matmul.quantized_matmul(**given)
  with pytest.raises(errors.UserError, match='200 inputs'):
    quantized_matmul.quantize(np.ones((200, 8)))


def test_the_kernel_takes_groups_of_128():
  spec = quantized_matmul.QuantizedSpec((16, 256), 256, 'bfloat16', 'int4')
  other = dataclasses.replace(spec, group=64)
  assert quantized_matmul_tpu.limits(spec, None) is None
  assert 'groups of 64' in quantized_matmul_tpu.limits(other, None)
