"""Blocks that layers share: parameters once, their gradient a sum over uses.

A model with as many blocks as layers, all of them equal to those of a model
that shares, computes the same. Peers: tests/models/huggingface/test_zamba.py;
layouts: tests/train/certify/test_invariance_mixers.py.
"""

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import lora
from paraxis.configs.base import mixers as fields
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models import parameter
from paraxis.models import stack
from paraxis.models import trained
from paraxis.train.certify import target_compile

pytestmark = pytest.mark.usefixtures('float64')

USES = 4
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 12)).astype(np.int32)


def model_of(blocks, **more):
  """Eight layers, Mamba-2 and H in turn."""
  own = dict(
    vocab_size=32, d_model=16, num_heads=2, pattern='MH', num_layers=2 * USES,
    mlp='none', dtype='float64', param_dtype='float64', attention_block=8,
    mamba=fields.Mamba(head_dim=4, state=4),
    hybrid=fields.Hybrid(blocks, d_ff=12, attention_rank=3, mlp_rank=2),
  )  # fmt: skip
  return schema.Model(**own | more)


def shares(path):
  return '/block/' in path and '_adapter_' not in path


def gradients(blocks, params, **more):
  """(logits, {path: gradient})."""
  model = decoder.Decoder(model_of(blocks, **more))
  see = module_cases.see_of([(12,)] * 2, 12)
  data = module_cases.batch.Batch(TOKENS, None, *see[:2], None, None)

  def loss(params):
    z = model.logits(params, model.features(params, data)[0])
    return (z**2).mean(), z

  grads, z = jax.jit(jax.grad(loss, has_aux=True))(params)
  return z, grads


def both(blocks, **more):
  """({path: error}, error of logits) of a model that shares, against copies."""
  few = decoder.Decoder(model_of(blocks))
  params = module_cases.parameters(few, 0.5)
  turns = np.arange(USES) % blocks
  copies = {p: x[turns] if shares(p) else x for p, x in params.items()}
  z, found = gradients(blocks, params, **more)
  want_z, every = gradients(USES, copies)
  out = {}
  for path, g in found.items():
    want = np.asarray(every[path])
    if shares(path):
      want = np.stack([want[turns == i].sum(0) for i in range(blocks)])
    out[path] = np.abs(g - want).max() / np.abs(want).max()
  return out, np.abs(z - want_z).max() / np.abs(want_z).max()


@pytest.mark.parametrize('blocks, unroll', [(1, 1), (2, 1), (2, 8), (3, 1)])
def test_layers_that_share_are_layers_with_copies(blocks, unroll):
  far, logits = both(blocks, unroll=unroll)
  assert logits < 1e-12 and max(far.values()) < 1e-11
  assert sum(map(shares, far)) == 9


def test_the_wrong_block_and_lost_adapters_are_seen(monkeypatch):
  params = module_cases.parameters(decoder.Decoder(model_of(2)), 0.5)
  logits = lambda: module_cases.logits(
    decoder.Decoder(model_of(2)), params, TOKENS
  )
  want = logits()
  first = lambda self, path, use: 0 if path in self._blocks else use
  monkeypatch.setattr(stack.Stack, '_row', first)
  assert np.abs(logits() - want).max() > 1e-3 * np.abs(want).max()
  monkeypatch.undo()
  monkeypatch.setattr(parameter, '_adapters_of', lambda module, name: ())
  assert np.abs(logits() - want).max() > 1e-3 * np.abs(want).max()


def test_parameters_stand_once_and_states_for_every_use():
  model = decoder.Decoder(model_of(2))
  params = jax.eval_shape(model.init, jax.random.key(0))
  inside = 'layers/mamba2/block/attention/query'
  assert params[inside].shape == (2, 32, 2, 8)
  assert params[f'{inside}_adapter_b'].shape == (USES, 3, 2, 8)
  assert params['layers/mamba2/join'].shape == (USES, 16, 16)
  assert params['layers/mamba2/gate'].shape[0] == 2 * USES
  loose = [p for p in jax.eval_shape(model.unstack, params) if 'block' in p]
  assert sum(p.endswith('attention/query') for p in loose) == 2
  assert sum(p.endswith('query_adapter_a') for p in loose) == USES
  cache = jax.eval_shape(lambda: model.init_cache(3, 5))
  slots = [state[1][0].shape for state in cache.states[1::2]]
  assert slots == [(3, 2, 5, 8)] * USES


def test_operations_count_every_use():
  few, many = (
    target_compile.model_flops(config, build.build(config, abstract=True))
    for config in (
      schema.Config(model=model_of(n), data=schema.Data(sequence_length=16))
      for n in (2, USES)
    )
  )
  assert few == many


def test_greedy_decoding_is_the_uncached_pass():
  model = decoder.Decoder(model_of(2))
  params = module_cases.parameters(model, 0.5)
  whole = module_cases.logits(model, params, TOKENS)
  (start, *steps), _ = module_cases.decoded(
    model, model.unstack(params), TOKENS, [7, 5], 4
  )
  for b, n in enumerate((7, 5)):
    assert np.allclose(start[b, :n], whole[b, :n], 1e-11, 1e-11)
    for t, z in enumerate(steps):
      assert np.allclose(z[b], whole[b, n + t], 1e-11, 1e-11)
      assert z[b].argmax() == whole[b, n + t].argmax()


def test_lora_on_a_block_is_one_for_all_its_uses():
  own = trained.of(
    schema.Train(lora=lora.Lora(2, targets='layers/mamba2/block/mlp/up'))
  )
  model = decoder.Decoder(model_of(2), trained=own)
  params = module_cases.parameters(model, 0.5)
  inside = 'layers/mamba2/block/mlp/up'
  assert params[f'{inside}_lora_a'].shape[0] == 2
  merged = trained.merged(jax.tree.map(jnp.asarray, params), own.scale)
  bare = decoder.Decoder(model_of(2))
  want = module_cases.logits(model, params, TOKENS)
  found = module_cases.logits(bare, merged, TOKENS)
  assert np.allclose(found, want, 1e-11, 1e-11)


def test_stages_are_refused():
  config = schema.Config(mesh=schema.Mesh(stage=2), model=model_of(2))
  with support.refused("model.pattern='MH'", 'mesh.stage=2'):
    build.build(config, abstract=True)


def test_one_norm_for_both_is_refused():
  with support.refused("model.residual='shared'"):
    build.build(schema.Config(model=model_of(2, residual='shared')))
