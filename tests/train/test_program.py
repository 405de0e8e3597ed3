"""A run built and checked before anything is compiled."""

import jax
import numpy as np
import pytest
import support

from paraxis.sharding import rules as rules_lib
from paraxis.train import program as job_lib
from paraxis.train import state as state_lib


def _make(tiny, changes=None, mesh='', say=lambda line: None):
  return job_lib.make(tiny.config(changes), mesh, say=say)


def test_the_config_says_which_mesh_is_used(tiny):
  job = _make(tiny, mesh='data=-1,tensor=2')
  mesh = job.config.mesh
  assert (mesh.data, mesh.fsdp, mesh.tensor) == (4, 1, 2)
  assert dict(job.mesh.shape)['data'] == 4
  rest = _make(tiny).config
  assert rest == tiny.config()


@pytest.mark.parametrize(
  'mesh, zero', [('data=2,fsdp=2,tensor=2', 0), ('data=4,context=2', 1)]
)
def test_the_shapes_of_the_state_are_those_of_the_state(tiny, mesh, zero):
  job = _make(tiny, {'mesh.zero': zero}, mesh)
  with job.context():
    state = state_lib.flatten(job.initial_state())
  shapes = state_lib.flatten(job.state)
  assert state.keys() == shapes.keys()
  for path, x in state.items():
    want = shapes[path]
    assert (x.shape, x.dtype) == (want.shape, want.dtype), path
    assert x.sharding.is_equivalent_to(want.sharding, x.ndim), path
  assert len(state['params/embedding'].addressable_shards) == 8
  for path, x in state.items():
    if '/mu/' in path or '/nu/' in path:
      leaf = path.split('/', 3)[-1]
      spec = rules_lib.stored(
        job.model.axes[leaf], x.shape, job.built.rules, dict(job.mesh.shape), 1
      )
      want = jax.NamedSharding(job.mesh, spec)
      assert x.sharding.is_equivalent_to(want, x.ndim), path
      assert ('data' in str(spec)) == bool(zero), path


def test_the_mesh_does_not_decide_the_state(tiny):
  states = []
  for mesh, zero in (('fsdp=8', 0), ('data=2,fsdp=2,tensor=2', 3)):
    job = _make(tiny, {'mesh.zero': zero}, mesh)
    with job.context():
      states.append(jax.tree.map(np.asarray, job.initial_state().params))
  jax.tree.map(np.testing.assert_array_equal, states[0], states[1])
  assert np.std(states[0]['embedding']) > 0.01


@pytest.mark.parametrize(
  'mesh', ['data=8', 'data=2,tensor=4', 'tensor=4,data=2']
)
@pytest.mark.parametrize('microbatches', [1, 2])
def test_a_batch_on_the_mesh(tiny, mesh, microbatches):
  changes = {'train.batch_size': 16, 'train.microbatches': microbatches}
  job = _make(tiny, changes, mesh)
  lo, hi = job.local_rows(16 // microbatches)
  assert (lo, hi) == (0, 16 // microbatches)  # this process holds all rows
  batch = job.batches.batch_at(3, lo, hi)
  placed = job.put(batch, lo)
  jax.tree.map(np.testing.assert_array_equal, placed, batch)
  shards = dict(job.mesh.shape)['data']
  rows = {s.data.shape[-2] for s in placed.tokens.addressable_shards}
  assert rows == {16 // microbatches // shards}
  for x, want in zip(placed, batch, strict=True):
    assert (x.shape, x.dtype) == (np.shape(want), np.asarray(want).dtype)


@pytest.mark.parametrize(
  'mesh, order', [('context=8', 'zigzag'), ('data=2,context=4', 'striped')]
)
@pytest.mark.parametrize('microbatches', [1, 2])
def test_tokens_lie_where_the_context_axis_wants_them(
  tiny, mesh, order, microbatches
):
  changes = {'mesh.context_order': order, 'train.microbatches': microbatches}
  job = _make(tiny, changes, mesh)
  n, at = dict(job.mesh.shape)['context'], job.token_order()
  size = 64 // n
  if order == 'striped':
    want = [[rank + n * i for i in range(size)] for rank in range(n)]
  else:  # runs rank and 2 n - 1 - rank, of 2 n
    run = size // 2
    want = [
      [*range(rank * run, rank * run + run)]
      + [*range(64 - (rank + 1) * run, 64 - rank * run)]
      for rank in range(n)
    ]
  np.testing.assert_array_equal(at.reshape(n, size), want)
  batch = job.batches.batch_at(3, 0, 8 // microbatches)
  placed = job.put(batch)
  for x, whole in zip(placed, batch, strict=True):
    if not np.ndim(whole):
      assert float(x) == float(whole)
      continue
    assert x.sharding.is_equivalent_to(job.batch_sharding(x.ndim), x.ndim)
    np.testing.assert_array_equal(x, whole[..., at])
    # By device: the rank's own tokens, all fields alike.
    for shard in x.addressable_shards:
      rank = np.argwhere(job.mesh.devices == shard.device)[0][4]
      rows = whole[shard.index[:-1]]
      np.testing.assert_array_equal(shard.data, rows[..., want[rank]])
  assert not np.array_equal(placed.tokens, batch.tokens)


def test_without_a_context_axis_tokens_stay(tiny):
  assert _make(tiny).token_order() is None
  one = _make(tiny, {'mesh.context_order': 'contiguous'}, 'context=8')
  np.testing.assert_array_equal(one.token_order(), np.arange(64))


def test_a_process_holds_some_rows(tiny):
  """Its slice of a batch is placed as the whole batch would be."""
  job = _make(tiny, mesh='data=8')
  whole, part = job.batches.batch_at(0), job.batches.batch_at(0, 4, 8)
  index = (slice(4, 5), slice(None))
  wanted = {}

  def make(shape, sharding, callback):
    wanted[shape] = callback(index) if shape else callback(())
    return wanted[shape]

  old = jax.make_array_from_callback
  jax.make_array_from_callback = make
  try:
    job.put(part, 4)
  finally:
    jax.make_array_from_callback = old
  np.testing.assert_array_equal(wanted[(8, 64)], whole.weights[4:5])
  assert wanted[()] == whole.denominator


@pytest.mark.parametrize(
  'changes, mesh, words',
  [
    ({'model.num_heads': 3}, '', ['d_model=32', 'num_heads=3']),
    ({}, 'data=3', ['3 places', '8 devices']),
    ({'mesh.rules': 'data'}, '', ['tensor=2', "'data'"]),
    ({'train.batch_size': 6}, '', ['batch_size=6', '4 shards']),
    ({'train.microbatches': 3}, '', ['batch_size=8', 'microbatches=3']),
    (
      {'model.position': 'learned', 'model.max_positions': 9},
      '',
      ['64 tokens', 'max_positions=9'],
    ),
    ({'model.pattern': 'W'}, '', ['W layers', 'window=0']),
    (
      {'data.sequence_length': 60, 'mesh.context_order': 'contiguous'},
      'context=4,tensor=2',
      ['data.sequence_length=60', 'context=4 x tensor=2', '8 shards'],
    ),
    (
      {'data.sequence_length': 60},
      'data=2,context=4',
      ['data.sequence_length=60', 'mesh.context=4', 'zigzag'],
    ),
    (
      {'mesh.context_form': 'ulysses', 'mesh.rules': 'data'},
      'context=8',
      ['mesh.context_form=ulysses', '4 heads', 'mesh.context=8'],
    ),
    ({'model.vocab_size': 258}, '', ['258', '259']),
    ({'data.tokenizer': 'no.json'}, '', ["'no.json'"]),
    ({'data.path': 'no.txt'}, '', ["'no.txt'"]),
    ({'data.mixture': 'song'}, '', ["'song'", 'domain=weight']),
    ({'data.held_out_fraction': 0.0}, '', ['0 of', 'held out']),
    ({'train.wandb': 'sea'}, '', ['package wandb']),
  ],
)
def test_what_does_not_fit_ends_here(tiny, changes, mesh, words, monkeypatch):
  monkeypatch.setattr(
    job_lib.metrics.importlib.util, 'find_spec', lambda name: None
  )
  monkeypatch.setattr(jax.stages.Lowered, 'compile', pytest.fail)
  with support.refused(*words):
    _make(tiny, changes, mesh)
