"""A run built and checked before anything is compiled."""

import jax
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.sequence import order as context_order
from paraxis.train import program
from paraxis.train.certify import check


def test_the_config_says_which_mesh_is_used(tiny):
  job = tiny.job(mesh='data=-1,tensor=2')
  mesh = job.config.mesh
  assert (mesh.data, mesh.fsdp, mesh.tensor) == (4, 1, 2)
  assert dict(job.mesh.shape)['data'] == 4
  rest = tiny.job()
  assert rest.config == tiny.config()
  # Tokens of the mean that a gradient is: of all rows, or of one replica's.
  tokens = rest.config.train.batch_size * rest.config.data.sequence_length
  assert rest.optimizer._tokens == tokens
  alone = {'outer.exchange': 'mean', 'outer.period': 2}
  alone = tiny.job(alone, 'replica=2,data=4')
  assert alone.optimizer._tokens == tokens // 2


def test_the_mesh_does_not_decide_the_state(tiny):
  """The seed does."""
  states = []
  meshes = ('fsdp=8', 0, 3), ('data=2,fsdp=2,tensor=2', 3, 3), ('fsdp=8', 0, 4)
  for mesh, zero, seed in meshes:
    job = tiny.job({'mesh.zero': zero, 'train.seed': seed}, mesh)
    with job.context():
      states.append(jax.tree.map(np.asarray, job.initial_state().params))
  jax.tree.map(np.testing.assert_array_equal, states[0], states[1])
  one, other = (state['embedding'] for state in states[1:])
  assert np.std(one) > 0.01 and (one != other).mean() > 0.99


@pytest.mark.parametrize(
  'mesh', ['data=8', 'data=2,tensor=4', 'tensor=4,data=2']
)
@pytest.mark.parametrize('microbatches', [1, 2])
def test_a_batch_on_the_mesh(tiny, mesh, microbatches):
  changes = {'train.batch_size': 16, 'train.microbatches': microbatches}
  job = tiny.job(changes, mesh)
  lo, hi = job.local_rows(16 // microbatches)
  assert (lo, hi) == (0, 16 // microbatches)  # this process holds all rows
  batch = job.batches.batch_at(3, lo, hi)
  placed = job.put(batch, lo)
  jax.tree.map(np.testing.assert_array_equal, placed, batch)
  shards = dict(job.mesh.shape)['data']
  rows = {s.data.shape[-2] for s in placed.tokens.addressable_shards}
  assert rows == {16 // microbatches // shards}
  for x, want in zip(placed[:6], batch[:6], strict=True):
    assert (x.shape, x.dtype) == (np.shape(want), np.asarray(want).dtype)


@pytest.mark.parametrize(
  'mesh, order', [('context=8', 'zigzag'), ('data=2,context=4', 'striped')]
)
@pytest.mark.parametrize('microbatches', [1, 2])
def test_tokens_are_in_the_order_of_the_context_axis(
  tiny, mesh, order, microbatches
):
  changes = {'mesh.context_order': order, 'train.microbatches': microbatches}
  job = tiny.job(changes, mesh)
  n = dict(job.mesh.shape)['context']
  wanted = context_order.order(order, n, 64)  # tokens of each rank
  at = wanted.ravel()
  batch = job.batches.batch_at(3, 0, 8 // microbatches)
  placed = job.put(batch)
  for x, whole in zip(placed[:6], batch[:6], strict=True):
    if not np.ndim(whole):
      assert float(x) == float(whole)
      continue
    assert x.sharding.is_equivalent_to(job.batch_sharding(x.ndim), x.ndim)
    np.testing.assert_array_equal(x, whole[..., at])
    # By device: the rank's own tokens, all fields alike.
    for shard in x.addressable_shards:
      rank = np.argwhere(job.mesh.devices == shard.device)[0][4]
      rows = whole[shard.index[:-1]]
      np.testing.assert_array_equal(shard.data, rows[..., wanted[rank]])
  assert not np.array_equal(placed.tokens, batch.tokens)


def test_without_a_context_axis_tokens_stay(tiny):
  assert tiny.job().token_order() is None
  one = tiny.job({'mesh.context_order': 'contiguous'}, 'context=8')
  np.testing.assert_array_equal(one.token_order(), np.arange(64))


@pytest.mark.parametrize('warmup, words', [(6, ['never reaches']), (5, [])])
def test_a_warm_up_that_does_not_end_is_said(tiny, warmup, words):
  said = []
  tiny.job({'optimizer.warmup_steps': warmup}, 'data=1', said.append)
  found = [line for line in said if 'warmup_steps=6 of train.steps=6' in line]
  assert len(found) == len(words)
  assert all(word in found[0] for word in words)


@pytest.mark.parametrize(
  'fields, said',
  [
    ({'train.microbatches': 2}, True),
    ({'train.microbatches': 2, 'mesh.collectives': 'explicit'}, False),
    ({'train.microbatches': 2, 'mesh.zero': 2}, False),
    ({}, False),
  ],
)
def test_gradients_that_are_summed_in_every_microbatch_are_said(
  tiny, fields, said
):
  """And they are: the sums that `check` predicts are as many more."""
  mesh = {f'mesh.{a}': 1 for a in mesh_lib.AXES} | {'mesh.data': 2}
  config = schema.with_values(tiny.config(), mesh | fields)
  lines = []
  program.make(config, devices=jax.devices()[:2], say=lines.append)
  words = 'summed over data=2 in each of 2 microbatches'
  assert any(words in line for line in lines) == said
  if fields.get('mesh.zero'):
    return

  def sent(config):
    found = check.check(config).messages
    return sum(c.total for c in found if c.phase != 'update')

  once = sent(schema.with_value(config, 'train.microbatches', 1))
  assert sent(config) > 1.9 * once if said else sent(config) < 1.1 * once


@pytest.mark.parametrize('scope, more', [('step', 1), ('microbatch', 0)])
def test_the_forward_pass_that_counts_loads_is_said(tiny, scope, more):
  fields = {f'model.experts.{k}': v for k, v in dict(
    count=4, top_k=2, d_ff=8, balance=0.01, balance_scope=scope
  ).items()}  # fmt: skip
  said = []
  tiny.job(fields | {'train.microbatches': 2}, 'data=1', said.append)
  text = 'one more forward pass of the 2 microbatches'
  assert sum(text in line for line in said) == more
