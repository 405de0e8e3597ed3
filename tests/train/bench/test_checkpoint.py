"""Bench of checkpoints: its rows, what counts as a stall, wrong candidates."""

import types

import pytest

from paraxis.train.bench import checkpoint as bench_checkpoint

SILENT = lambda line: None


def test_it_has_all_rows():
  report = bench_checkpoint.checkpoint(1, True, SILENT)
  assert len(report.checks) == 7
  rows = {
    what.removeprefix('0.046875 MiB: '): v
    for what, (_, v) in report.rows.items()
  }
  for name in bench_checkpoint.FORMS:
    assert 0 < rows[f'{name}, save blocks'][0] <= rows[f'{name}, save'][0]
    assert rows[f'{name}: on disk'] > [0]
  for name in ('Orbax', 'ours'):
    for part in ('stall of begin', 'stall of barrier', 'begun to committed'):
      assert rows[f'{name}, {part}'] >= [0]
    assert f'{name}, step with a save less one without' in rows
  for part in ('restore', 'restore unverified', 'restore on another mesh'):
    assert rows[f'ours, {part}'] > [0]
  assert 'fingerprint' in rows and 'gradients of a step' in rows
  blocked = report.checks[-1]
  own, theirs = (
    rows[f'{name}, stall of begin'][0] + rows[f'{name}, stall of barrier'][0]
    for name in ('ours', 'Orbax')
  )
  assert blocked.what.endswith('blocks a step / that Orbax does')
  assert blocked.values == [own / theirs] and blocked.target == 2


def test_the_other_mesh_is_cut_otherwise():
  rows, both = bench_checkpoint.places()
  shape = 64, bench_checkpoint.COLUMNS
  assert rows.shard_shape(shape) != both.shard_shape(shape)
  assert rows.shard_shape(shape)[1] == shape[1] > both.shard_shape(shape)[1]


def test_a_checkpoint_that_comes_back_changed_is_no_candidate():
  class Wrong(bench_checkpoint.Ours):
    def restore(self, like):
      return {p: x + 1 for p, x in super().restore(like).items()}

  tree = bench_checkpoint.arrays(1, 64)
  with pytest.raises(RuntimeError, match='not what was saved'):
    bench_checkpoint.once(Wrong, tree, [], iter(range(9)).__next__)


@pytest.fixture
def passes(monkeypatch):
  """A function after whose result, called, a clock shows so much more."""
  seconds = [0.0]
  clock = types.SimpleNamespace(perf_counter=lambda: seconds[0])
  monkeypatch.setattr(bench_checkpoint, 'time', clock)

  def take(n):
    seconds[0] += n

  return lambda n: lambda *tree: take(n)


def test_a_stall_is_what_blocks_a_step(passes):
  """Not what its gradients take, or what is written beside them."""
  tree = bench_checkpoint.arrays(1, 64)
  store = types.SimpleNamespace(begin=passes(3.0), barrier=passes(0.5))
  found = bench_checkpoint.stalls(store, tree, passes(10.0), saves=2)
  assert found == {
    bench_checkpoint.BEGIN: 3.0,
    bench_checkpoint.BARRIER: 0.5,
    bench_checkpoint.STEPS: 37.0,
  }
  found = bench_checkpoint.stalls(None, tree, passes(10.0), saves=2)
  assert list(found.values()) == [0, 0, 30.0]


def test_a_store_that_waits_stalls_in_begin(tmp_path):
  """The baseline: committed before the gradients begin."""
  tree, steps = bench_checkpoint.arrays(1, 64), []
  store = bench_checkpoint.Synchronous(tmp_path)
  committed = lambda: steps.append([p.name for p in tmp_path.glob('?')])
  try:
    bench_checkpoint.stalls(store, tree, committed, saves=2)
  finally:
    store.close()
  assert steps == [['0'], ['1'], ['1']]
