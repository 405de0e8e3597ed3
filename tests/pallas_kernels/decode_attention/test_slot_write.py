"""The kernel that writes a token of each row, interpreted, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest

from paraxis.pallas_kernels.decode_attention import slot_write_tpu


def make(slots, dtype):
  """(caches, row, place, keep, new); K and H of the two are not the same."""
  rng = np.random.default_rng(0)
  normal = lambda *s: jnp.asarray(rng.normal(size=s), dtype)
  caches = normal(5, 2, slots, 8), normal(5, 1, slots, 4)
  row = np.array([3, 0, 4, 1], np.int32)
  place = np.array([0, slots - 1, slots // 2, 5], np.int32)
  keep = np.array([True, True, True, False])
  return caches, row, place, keep, (normal(4, 2, 8), normal(4, 1, 4))


def wanted(caches, row, place, keep, new):
  out = [np.array(x, 'f4') for x in caches]
  for i in np.flatnonzero(keep):
    for old, x in zip(out, new, strict=True):
      old[row[i], :, place[i]] = np.asarray(x, 'f4')[i]
  return out


@pytest.mark.parametrize(
  'slots, dtype',
  [(32, 'float32'), (32, 'bfloat16'), (40, 'bfloat16'), (6, 'float32')],
)
def test_tokens_are_at_their_places_and_nothing_else_changes(slots, dtype):
  """Whole tiles; a last tile that is not whole; fewer slots than a tile."""
  case = make(slots, dtype)
  run = jax.jit(functools.partial(slot_write_tpu.write, interpret=True))
  found = [np.asarray(x, 'f4') for x in run(*case)]
  for a, b in zip(found, wanted(*case), strict=True):
    np.testing.assert_array_equal(a, b)
  caches, row, place, keep, new = case
  moved = wanted(caches, row, (place + 1) % slots, keep, new)
  assert not np.array_equal(found[0], moved[0])
  assert not np.array_equal(found[0], wanted(*case[:3], ~keep, new)[0])


def test_no_race_and_nothing_read_before_it_is_written():
  """TPU semantics: what is not fetched is NaN."""
  case = make(32, 'float32')
  strict = functools.partial(
    slot_write_tpu.write, interpret=kernel_cases.STRICT
  )
  for a, b in zip(jax.jit(strict)(*case), wanted(*case), strict=True):
    np.testing.assert_array_equal(a, b)
  assert not kernel_cases.races()


def test_what_it_does_not_take():
  of = lambda *dtypes: [jnp.zeros(1, d) for d in dtypes]
  assert slot_write_tpu.supports(of('bfloat16', 'float32')) is None
  assert 'these are bfloat16, int8' in slot_write_tpu.supports(
    of('int8', 'bfloat16')
  )
