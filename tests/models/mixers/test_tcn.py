"""Convolutions and chunks against dense matrices, and sharded.

Legend: B rows, T tokens, D model, Z width of a key, U of a value, W taps, C
tokens of a chunk, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.models.mixers import attention
from paraxis.models.mixers import recurrence
from paraxis.models.mixers import tcn

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, Z, U, V = 3, 15, 6, 4, 9, 32
W, C = 3, 4
TINY = dict(
  vocab_size=V, d_model=D, num_heads=2, d_ff=16, num_layers=2, pattern='C',
  dtype='float64', param_dtype='float64', attention_block=8,
)  # fmt: skip
OWN = dict(
  kernel=W, dilation=2, depth=2, chunk=C, key_dim=Z, value_expand=U / D
)
close = module_cases.close


def config_of(own=(), **fields):
  own = mixer_schema.Tcn(**OWN | dict(own))
  return schema.Model(**TINY | fields, tcn=own)


@functools.cache
def module(**own):
  """(config, run(values, x, see, state) -> (y, state, aux), values)."""
  config, kind = config_of(own), tcn.ConvolutionAttention
  model_checks.check_model(config)
  return config, *module_cases.module(kind, config, 'C', 0.5)


SEE = module_cases.see_of(((6, 1, 7), (15,), (2, 9)), T)
X = np.random.default_rng(1).normal(size=(B, T, D))


def dense(own, w, x):
  """Convolutions and attention as matrices (T, T) of what sees what."""
  segments, t = SEE.segments, np.arange(x.shape[1])
  same = (segments[:, :, None] == segments[:, None]) & (
    segments[:, :, None] > 0
  )
  h = x @ w['channels']
  for i in range(own.depth):
    far = own.dilation**i
    taps = ((t[:, None] - t == j * far) & same for j in range(own.kernel))
    y = sum(m @ h * w[f'taps_{i}'][j] for j, m in enumerate(taps))
    h = h + jax.nn.silu(y)
  mixed = h @ w['mixed']
  z = jax.nn.silu(mixed @ w['shared'] + w['shared_bias'])
  q, k = z * w['query_scale'] + w['query_bias'], z * w['key_scale']
  v = jax.nn.silu(x @ w['value'] + w['value_bias'])
  chunk = SEE.positions // own.chunk
  ok = same & (chunk[:, :, None] == chunk[:, None]) & (t[:, None] >= t)
  e = jnp.where(ok, jnp.exp(q @ k.swapaxes(1, 2) / own.key_dim**0.5), 0)
  o = e / jnp.maximum(e.sum(-1, keepdims=True), 1e-30) @ v
  reset = jax.nn.silu(mixed @ w['reset'] + w['reset_bias'])
  update = 1 / (1 + jnp.exp(-(mixed @ w['update'] + w['update_bias'])))
  new = mixed @ w['hidden'] + w['hidden_bias'] + (reset * o) @ w['output']
  return update * (jax.nn.silu(new) - x)


@pytest.mark.parametrize('own', [{}, dict(kernel=2, depth=3, chunk=5)], ids=str)
def test_equals_dense_matrices(own):
  config, run, values = module(**own)
  module_cases.assert_equal(
    lambda w, x: run(w, x, SEE)[0], functools.partial(dense, config.tcn),
    values, X, SEE.segments > 0,
  )  # fmt: skip


@pytest.mark.parametrize(
  'own',
  [dict(kernel=2, depth=3), dict(kernel=4, dilation=3)],
  ids=str,
)
def test_the_receptive_field_is_the_formula(own):
  """Chunks of one token, taps that are not 0: only convolutions reach back."""
  config, run, values = module(**own, chunk=1)
  values = values | {k: abs(v) for k, v in values.items() if 'taps' in k}
  x = np.random.default_rng(1).normal(size=(1, 40, D))
  other, see = x.copy(), module_cases.see_of(((40,),), 40)
  other[0, 3] += 1
  outputs = jax.jit(lambda x: run(values, x, see)[0])
  change = np.abs(outputs(other) - outputs(x))[0].max(1)
  seen = np.flatnonzero(change > 1e-14)
  field = tcn.receptive_field(config.tcn)
  last = 1 + (config.tcn.kernel - 1) * sum(
    config.tcn.dilation**i for i in range(config.tcn.depth)
  )
  assert field == last < 30 and seen[0] == 3 and seen[-1] == 3 + field - 1


def cut(see, begin, end, rows=slice(None)):
  return attention.Visibility(*(a[rows, begin:end] for a in see[:2]))


def test_padding_changes_no_state():
  """Short rows, and one without a token."""
  _, run, values = module()
  see = module_cases.see_of(((T,),) * B, T)
  first, run = jax.jit(functools.partial(run, state='empty')), jax.jit(run)
  _, state, _ = first(values, X[:, :6], cut(see, 0, 6))
  lengths = np.array([3, 0, 1])
  valid = np.arange(4) < lengths[:, None]
  short = (np.where(valid, x, 0) for x in cut(see, 6, 10)[:2])
  _, state, _ = run(values, X[:, 6:10], attention.Visibility(*short), state)
  for b, n in enumerate(6 + lengths):
    row = cut(see, 0, n, slice(b, b + 1))
    _, want, _ = first(values, X[b : b + 1, :n], row)
    tails, slots = state
    for got, kept in zip(tails, want[0], strict=True):
      assert close(got[b : b + 1], kept, 1e-12)
    held = (n - 1) % C + 1  # of the chunk of the last token
    for got, kept in zip(slots, want[1], strict=True):
      assert close(got[b : b + 1, :held], kept[:, :held], 1e-12)


def test_decoding_on_a_mesh_equals_one_device():
  config = config_of(dict(value_expand=10 / D))
  model = decoder.Decoder(config)
  params = module_cases.parameters(model, 0.4)
  tokens = np.random.default_rng(3).integers(0, V, (4, T)).astype(np.int32)
  rows = tokens, [6, 3, 0, 8], 3
  (_, *want), _ = module_cases.decoded(model, model.unstack(params), *rows)
  mesh = dict(tensor=2, data=2, fsdp=2)
  (_, *found), _ = module_cases.decoded_on_mesh(mesh, config, params, *rows)
  assert close(found, want, 1e-12)


# ------------------------------------------------------------------- layouts


def certified(mesh, pattern='C'):
  """module_cases.certified; a chunk of 6 tokens is on three shards of 4."""
  own = dict(key_dim=4, value_expand=1.0, chunk=6)
  model = config_of(own, num_heads=8, d_model=16, pattern=pattern)
  return module_cases.certified(model, **mesh)


# What tests/train/certify/test_invariance_mixers.py does not meet.
LAYOUTS = [
  ('C', dict(context=8)),
  ('C', dict(context=4, data=2, context_form='token_ring')),
  ('CF', dict(context=2, tensor=2, fsdp=2)),
]


@pytest.mark.parametrize('pattern, mesh', LAYOUTS, ids=str)
def test_a_layout_equals_one_device(pattern, mesh):
  rows = certified(mesh, pattern)
  assert len(rows) == 2 and all(row.passed for row in rows), rows


def test_a_shard_without_the_tokens_before_it_is_seen(monkeypatch):
  """The test of train/claims/scans/tcn.py has the other case: chunks cut."""
  whole = recurrence.scan.causal_conv
  local = lambda *args, **options: whole(*args[:5], None, **options)
  monkeypatch.setattr(recurrence.scan, 'causal_conv', local)
  assert not all(row.passed for row in certified(dict(context=8)))


# ----------------------------------------------------------------- bad input


def test_values_of_no_width_are_refused():
  with pytest.raises(errors.UserError, match='value_expand=0.01 of .*=6'):
    model_checks.check_model(config_of(dict(value_expand=0.01)))


def test_heads_that_would_be_exchanged_are_refused():
  with pytest.raises(errors.UserError, match='ulysses exchanges heads'):
    certified(dict(context=8, context_form='ulysses'))
