"""Writes into slots equal a loop over tokens, whichever way they are made."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.models.mixers import slot_writes

SIZE, ROWS, HEADS, WIDTH = 9, 4, 2, 3


def make(tokens, first, seed=0):
  """(slots, row, place, keep, new): a lane a row, in another order."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype('f4')
  slots = tuple(normal(ROWS, HEADS, SIZE, WIDTH) for _ in range(2))
  row = np.broadcast_to(np.array([2, 0, 3])[:, None], (3, tokens))
  place = np.asarray(first)[:, None] + np.arange(tokens)
  keep = np.arange(tokens) < np.array([tokens, 1, 0])[:, None]
  new = [normal(3, tokens, HEADS, WIDTH) for _ in range(2)]
  new[1][0, 0, 1, 2] = np.nan
  i32 = lambda x: np.asarray(x, np.int32)
  return slots, i32(row), i32(place), keep, new


def wanted(slots, row, place, keep, new):
  """Token by token; what is not finite is 0."""
  out = [x.copy() for x in slots]
  for i, j in np.ndindex(*keep.shape):
    if keep[i, j] and 0 <= place[i, j] < SIZE:
      for old, x in zip(out, new, strict=True):
        old[row[i, j], :, place[i, j]] = np.nan_to_num(x[i, j], nan=0.0)
  return out


LANES = functools.partial(slot_writes._write_lanes, False)
SHARED, SCATTERED = slot_writes._write_shared, slot_writes._scattered


@pytest.mark.parametrize(
  'write, tokens, first',
  [
    (LANES, 1, [0, 4, 8]),
    (LANES, 3, [6, 8, 2]),  # the second ends behind the slots
    (SHARED, 3, [-2, 8, 3]),  # two begin, or end, on another shard
    (SCATTERED, 1, [0, 4, 8]),
    (SCATTERED, 3, [6, 8, 2]),
    (SCATTERED, 3, [-2, 8, 3]),
    (SCATTERED, 12, [-4, 0, 9]),
  ],
)
def test_every_kept_token_is_at_its_place(write, tokens, first):
  slots, *given, new = make(tokens, first)
  found = jax.jit(lambda s, *x: write(s, *x[:3], *x[3]))(slots, *given, new)
  expected = wanted(slots, *given, new)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a, b)
  moved = wanted(slots, given[0], given[1] + 1, given[2], new)
  assert not np.array_equal(found[0], moved[0])  # the place does matter


def write_rows(monkeypatch, rows):
  """(slots, program) of slot_writes.write of a token of so many rows."""
  slots, _, place, keep, new = make(1, [0, 4, 8])
  cut = lambda *xs: [jnp.asarray(x[:rows]) for x in xs]
  place, valid, *given = cut(place, keep | True, keep, *new)
  ids = types.SimpleNamespace(valid=valid, position=place)
  group = types.SimpleNamespace(own=True, tree=False, width=1, fresh=False)
  lanes = lambda *_: [(group, given[0], ids, *given[1:])]
  monkeypatch.setattr(slot_writes.packed, 'lanes', lanes)
  slots = [jnp.asarray(x) for x in slots]
  run = lambda: slot_writes.write(None, 2, *slots, *new, keep, ids)
  return run(), str(jax.make_jaxpr(run)())


@pytest.mark.parametrize('rows', [1, 3])
@pytest.mark.parametrize(
  'platform, kind, form',
  [('gpu', 'NVIDIA H200', 'scatter'), ('tpu', 'TPU v5e', 'slot_write_tpu')],
)
def test_many_rows_are_written_at_once(monkeypatch, platform, kind, form, rows):
  expected, loop = write_rows(monkeypatch, rows)
  target = slot_writes.registry.Target(platform, kind)
  monkeypatch.setattr(slot_writes.registry, 'current_target', lambda: target)
  kernel = slot_writes.slot_write_tpu
  interpreted = functools.partial(kernel.write, interpret=True)
  monkeypatch.setattr(kernel, 'write', interpreted)
  found, program = write_rows(monkeypatch, rows)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a, b)
  assert (form in program) == (rows > 1)
  assert form not in loop


def test_a_scatter_writes_in_place():
  slots, *given, new = make(1, [0, 4, 8])
  slots = [np.tile(x, (1, 1, 100, 8)) for x in slots]
  new = [np.tile(x, (1, 1, 1, 8)) for x in new]

  def temporary(write):
    run = lambda s, *x: write(s, *x[:3], *x[3])
    program = jax.jit(run, donate_argnums=0).lower(slots, *given, new).compile()
    return program.memory_analysis().temp_size_in_bytes

  copied = lambda s, *x: SCATTERED([jnp.sort(y, -1) for y in s], *x)
  assert temporary(SCATTERED) < slots[0].nbytes / 4 < temporary(copied)
