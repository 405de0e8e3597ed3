"""Layers of each stage: `share_out` against a plain loop, and its inverse.

Legend: L layers, D features.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.models import depth
from paraxis.sharding import mesh as mesh_lib

ROUND = lambda p, v: [[c * p + d for c in range(v)] for d in range(p)]
DOWN_AND_UP = lambda p: [[d, 2 * p - 1 - d] for d in range(p)]


def dealt(layers, parts, unit):
  """Runs of layers, one a virtual stage: units dealt one by one to the first
  stages that have fewest, what is left of a unit to the last."""
  if layers // unit < parts:
    unit = 1
  sizes = [0] * parts
  for _ in range(layers // unit):
    sizes[sizes.index(min(sizes))] += unit
  sizes[-1] += layers % unit
  order = iter(range(layers))
  return [[next(order) for _ in range(n)] for n in sizes]


@pytest.mark.parametrize(
  'layers, placement, unit',
  [
    (4, ROUND(2, 1), 1),
    (4, ROUND(4, 1), 1),
    (7, ROUND(4, 1), 1),  # uneven
    (5, ROUND(2, 2), 1),
    (8, ROUND(2, 2), 1),
    (11, ROUND(2, 3), 1),
    (7, DOWN_AND_UP(2), 1),
    (8, DOWN_AND_UP(4), 1),
    (8, ROUND(2, 1), 2),  # pattern units
    (6, ROUND(2, 1), 2),
    (7, ROUND(3, 1), 2),
    (7, ROUND(2, 1), 3),
    (12, DOWN_AND_UP(2), 3),
  ],
)
def test_share_out_equals_dealing(layers, placement, unit):
  kinds = tuple('FWG'[i % unit] for i in range(layers))
  found = depth.share_out(kinds, placement, unit)
  runs = dealt(layers, np.size(placement), unit)
  assert found.rows.shape == (*np.shape(placement), max(map(len, runs)))
  for at, stage in np.ndenumerate(np.array(placement)):
    row = list(found.rows[at])
    run = runs[stage]
    assert row == run + [-1] * (len(row) - len(run))
    assert list(found.kinds[: len(run)]) == [kinds[i] for i in run]
  assert sorted(found.rows[found.rows >= 0]) == list(range(layers))
  sizes = [len(run) // unit for run in runs]
  assert max(sizes) - min(sizes) <= 1
  assert found.even == (len({*map(len, runs)}) == 1)


def test_one_stage_holds_all_in_order():
  found = depth.whole('WWF')
  assert found == (None, ('W', 'W', 'F')) and found.even
  assert depth.stack_rows(found, [0, 1]) is None
  x = np.arange(6.0).reshape(3, 2)
  assert depth.from_order(x, None) is x and depth.to_order(x, None) is x


@pytest.mark.parametrize(
  'kinds, placement, unit, text',
  [
    ('FFF', ROUND(2, 2), 1, 'num_layers=3 .*mesh.stage=2 x pipeline.chunks=2'),
    ('F', ROUND(2, 1), 1, 'num_layers=1 .*every chunk needs a layer'),
  ],
)
def test_what_does_not_share_out(kinds, placement, unit, text):
  with pytest.raises(errors.UserError, match=text) as found:
    depth.share_out(tuple(kinds), placement, unit)
  assert not re.search(r'\n', str(found.value))


IRREGULAR = [
  # Two units for four stages: runs of one layer, of either kind.
  ('WFWF', ROUND(4, 1), 2, 'WF'),
  # The fourth stage begins with the second layer of a unit.
  ('WFWFWF', ROUND(4, 1), 2, 'WF'),
  ('DEEEEEEE', ROUND(2, 1), 8, 'DEEEE'),
  ('DEEEEEEE', ROUND(2, 2), 8, 'DEE'),
  ('DEEEEEEE', DOWN_AND_UP(2), 8, 'DEE'),
  ('DDDEEEEEEEEEEEEE', ROUND(4, 1), 16, 'DDDEEEE'),
  ('MMMFMMMF', ROUND(3, 1), 4, 'MMMF'),
  ('FMMF', ROUND(2, 1), 4, 'MMF'),
  # Rows are layers in sequence, MFFM, of which no stage takes the third.
  ('MMMFFM', ROUND(3, 1), 6, 'MFM'),
  ('ABCABC', ROUND(2, 2), 3, 'ABC'),
]


@pytest.mark.parametrize('kinds, placement, unit, wanted', IRREGULAR)
def test_stages_of_different_kinds_share_rows(kinds, placement, unit, wanted):
  found = depth.share_out(tuple(kinds), placement, unit)
  assert found.kinds == tuple(wanted) and not found.even
  assert found.empty == found.rows.size - len(kinds)
  by_part = {s: at for at, s in np.ndenumerate(np.array(placement))}
  order = [
    (int(layer), found.kinds[row])
    for part in range(len(by_part))
    for row, layer in enumerate(found.rows[by_part[part]])
    if layer >= 0
  ]
  assert order == list(enumerate(kinds))  # each once, in order, of its kind
  for at in by_part.values():
    assert (found.rows[at] >= 0).any()
  for row in range(len(found.kinds)):
    assert (found.rows[..., row] >= 0).any()


@pytest.mark.parametrize('kinds, placement, unit, wanted', IRREGULAR)
def test_no_fewer_rows_would_do(kinds, placement, unit, wanted):
  """Of all sequences of the kinds, tried one by one."""
  del unit
  parts = np.size(placement)
  assert served(kinds, wanted, parts)
  for rows in itertools.product(sorted(set(kinds)), repeat=len(wanted) - 1):
    assert not served(kinds, rows, parts), rows


def served(kinds, rows, parts):
  """Whether each of `parts` may take layers in sequence, at least one."""
  ends = {0}
  for _ in range(parts):
    after = set()
    for at in ends:
      for row in rows:
        if at < len(kinds) and kinds[at] == row:
          at += 1
          after.add(at)
    ends = after
  return len(kinds) in ends


def loop(x, found, owners):
  """A stack as memory holds it, row by row; empty rows are zero."""
  out = []
  for d, c in np.ndindex(found.rows.shape[:2]):
    for l in range(found.rows.shape[2]):
      anywhere = set(found.rows[..., l].flat) & set(owners)
      layer = found.rows[d, c, l]
      if anywhere:
        zero = np.zeros_like(x[0])
        out.append(x[owners.index(layer)] if layer >= 0 else zero)
  return np.array(out)


@pytest.mark.parametrize('xp', [np, jnp], ids=['numpy', 'jax'])
@pytest.mark.parametrize(
  'kinds, placement, unit, owner',
  [
    ('FFFFF', ROUND(2, 2), 1, 'F'),
    ('FFFFFFF', DOWN_AND_UP(2), 1, 'F'),
    ('FFFFFFFF', ROUND(2, 2), 1, 'F'),
    ('WFWFWF', ROUND(2, 1), 2, 'F'),  # a parameter of every other layer
    ('WWFWWFWWF', ROUND(2, 1), 3, 'W'),  # two of three: slots 0 and 1
    ('DEEEEEEE', ROUND(2, 2), 8, 'E'),  # rows that are not on every stage
    ('MMMFMMMF', ROUND(3, 1), 4, 'F'),
  ],
)
def test_from_order_and_back(xp, kinds, placement, unit, owner):
  found = depth.share_out(tuple(kinds), placement, unit)
  owners = [i for i, kind in enumerate(kinds) if kind == owner]
  rows = depth.stack_rows(found, owners)
  x_LD = np.random.default_rng(0).normal(size=(len(owners), 3))
  x_LD = x_LD.astype(np.float32)
  held = depth.from_order(xp.asarray(x_LD), rows)
  assert isinstance(held, np.ndarray) == (xp is np)
  np.testing.assert_array_equal(held, loop(x_LD, found, owners))
  empty = rows < 0
  assert empty.any() == (not found.even)
  assert (np.asarray(held)[empty] == 0).all()
  np.testing.assert_array_equal(depth.to_order(held, rows), x_LD)
  # And the other way, for what keeps its empty rows zero.
  back = depth.from_order(depth.to_order(held, rows), rows)
  np.testing.assert_array_equal(back, held)


def test_an_empty_row_hides_nothing():
  """What stands in an empty row does not come back as a layer."""
  found = depth.share_out('FFF', ROUND(2, 1))
  rows = depth.stack_rows(found, [0, 1, 2])
  assert list(rows) == [0, 1, 2, -1]
  held = np.array([1.0, 2, 3, np.nan])
  np.testing.assert_array_equal(depth.to_order(held, rows), [1, 2, 3])
  poisoned = np.array([np.nan, 2.0, 3])  # row -1 reads layer 0, selected away
  assert depth.from_order(poisoned, rows)[3] == 0


def test_layouts_on_a_mesh_are_kept():
  """Axis 0 whole, another sharded: moving rows moves nothing else."""
  found = depth.share_out('FFFFF', ROUND(2, 2))
  rows = depth.stack_rows(found, [*range(5)])
  x_LD = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
  mesh = mesh_lib.make('fsdp=2', jax.devices()[:2])
  with jax.set_mesh(mesh):
    x = jax.device_put(x_LD, jax.NamedSharding(mesh, jax.P(None, 'fsdp')))
    held = jax.jit(lambda x: depth.from_order(x, rows))(x)
    back = jax.jit(lambda x: depth.to_order(x, rows))(held)
  for y in (held, back):
    assert y.sharding.spec == jax.P(None, 'fsdp')
  wanted = loop(x_LD, found, [*range(5)])
  np.testing.assert_array_equal(jax.device_get(held), wanted)
  np.testing.assert_array_equal(jax.device_get(back), x_LD)


@pytest.mark.parametrize('xp', [np, jnp], ids=['numpy', 'jax'])
def test_experts_out_of_order_and_back(xp):
  """With layers out of order, and numbers behind those of the experts."""
  order, rows = (2, 0, 3, 1), (1, -1, 0)
  x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
  held = np.asarray(depth.from_order(xp.asarray(x), rows, (2, order)))
  for row, layer in enumerate(rows):
    for slot, expert in enumerate((*order, 4, 5)):
      wanted = x[layer, :, expert] if layer >= 0 else np.zeros(3)
      np.testing.assert_array_equal(held[row, :, slot], wanted)
  back = depth.to_order(xp.asarray(held), rows, (2, order))
  np.testing.assert_array_equal(back, x)
  alone = depth.from_order(xp.asarray(x), None, (2, order))
  assert (np.asarray(alone) != x).any()
  np.testing.assert_array_equal(depth.to_order(alone, None, (2, order)), x)
