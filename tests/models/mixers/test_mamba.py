"""Mamba-2 and Mamba against plain loops over tokens, and sharded.

Legend: B rows, T tokens, D model, N heads, P head width, G groups, S numbers of
the state, F inner width, R rank of the steps, W taps.
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
from paraxis.models import skeleton as skeleton_lib
from paraxis.models.mixers import mamba

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, V = 3, 13, 8, 32
N, P, S, W, R = 4, 4, 3, 3, 2
TINY = dict(
  vocab_size=V, d_model=D, num_heads=2, head_dim=4, d_ff=16, num_layers=3,
  dtype='float64', param_dtype='float64', attention_block=8,
)  # fmt: skip
OWN = dict(head_dim=P, state=S, conv_width=W, dt_rank=R)
# name -> (module, fields of mixer_schema.Mamba)
KINDS = {
  'M': (mamba.Mamba2, dict(groups=2, step_floor=0.6)),
  'S': (mamba.Mamba, {}),
  'S normed': (mamba.Mamba, dict(inner_norm=True)),
  'S unscaled': (
    mamba.Mamba,
    dict(inner_norm=True, inner_norm_scale=False, norm_epsilon=0.1),
  ),
}


def config_of(own, **fields):
  return schema.Model(**TINY | fields, mamba=mixer_schema.Mamba(**OWN | own))


@functools.cache
def module(name):
  """(config, run(values, x, see, state) -> (y, state, aux), values)."""
  kind, own = KINDS[name]
  config = config_of(own)
  kind.check(config)
  return config, *module_cases.module(kind, config, name[0], 0.4)


SEE = module_cases.see_of(((4, 1, 6), (13,), (2, 9)), T)
X = np.random.default_rng(1).normal(size=(B, T, D))


def convolved(w, name, past_BW, x, first):
  """silu(taps of the document's inputs + bias) of a token, and those inputs."""
  past = jnp.concatenate([x[:, None], jnp.where(first, 0, past_BW)], 1)
  y = jnp.einsum('bw...,w...->b...', past, w[f'{name}_conv'])
  return jax.nn.silu(y + w[f'{name}_bias']), past[:, :-1]


def step_mamba2(w, config, carry, x, first):
  """One token of every row; first: (B,) bool, it begins a document."""
  groups, (past, others, h) = config.mamba.groups, carry
  at = lambda ndim: first.reshape(-1, *[1] * (ndim - 1))
  v, past = convolved(
    w, 'value', past, jnp.einsum('bd,dnp->bnp', x, w['value']), at(4)
  )
  shared = jnp.einsum('bd,dcgs->bcgs', x, w['shared'])
  shared, others = convolved(w, 'shared', others, shared, at(5))
  z = jnp.einsum('bd,dnp->bnp', x, w['gate'])
  dt = jax.nn.softplus(x @ w['step'] + w['step_bias'])
  dt = jnp.maximum(dt, config.mamba.step_floor)
  # Heads of a group follow one another.
  b, c = (shared[:, i, np.arange(N) * groups // N] for i in range(2))
  a = jnp.exp(-dt * jnp.exp(w['a_log']))
  h = jnp.where(at(4), 0, h) * a[:, :, None, None]
  h = h + jnp.einsum('bns,bn,bnp->bnsp', b, dt, v)
  o = jnp.einsum('bns,bnsp->bnp', c, h) + w['skip'][:, None] * v
  o = rms((o * jax.nn.silu(z)).reshape(len(x), groups, -1), config)
  o = o.reshape(len(x), N, P) * w['norm']
  return (past, others, h), jnp.einsum('bnp,npd->bd', o, w['output'])


def step_mamba(w, config, carry, x, first):
  """One token of every row."""
  past, h = carry
  at = first[:, None, None]
  v, past = convolved(w, 'value', past, x @ w['value'], at)
  shared = jnp.einsum('bf,fcs->bcs', v, w['shared'])
  low = v @ w['step_down']
  if config.mamba.inner_norm:
    shared = rms(shared, config, config.mamba.norm_epsilon)
    low = rms(low, config, config.mamba.norm_epsilon)
    shared = shared * w.get('shared_norm', 1)
    low = low * w.get('step_norm', 1)
  dt = jax.nn.softplus(low @ w['step_up'] + w['step_bias'])
  a = jnp.exp(-dt[:, :, None] * jnp.exp(w['a_log']))
  h = jnp.where(at, 0, h) * a + (dt * v)[:, :, None] * shared[:, 0, None]
  o = (h * shared[:, 1, None]).sum(-1) + w['skip'] * v
  return (past, h), (o * jax.nn.silu(x @ w['gate'])) @ w['output']


def rms(x, config, epsilon=0.0):
  epsilon = epsilon or config.norm_epsilon
  return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


def loop(name, w, x):
  """y_BTD, token after token."""
  config, *_ = module(name)
  wide = lambda *shape: jnp.zeros((len(x), *shape))
  groups, f = config.mamba.groups, mamba.inner(config)
  carry, one = (wide(W - 1, f), wide(f, S)), step_mamba
  if name[0] == 'M':
    own = wide(W - 1, N, P), wide(W - 1, 2, groups, S), wide(N, S, P)
    carry, one = own, step_mamba2

  rows = x.swapaxes(0, 1), (SEE.positions == 0).T
  token = lambda carry, at: one(w, config, carry, *at)
  return jax.lax.scan(token, carry, rows)[1].swapaxes(0, 1)


@pytest.mark.parametrize('name', KINDS)
def test_equals_a_loop_over_tokens(name):
  _, run, values = module(name)
  module_cases.assert_equal(
    lambda w, x: run(w, x, SEE)[0], functools.partial(loop, name),
    values, X, SEE.segments > 0,
  )  # fmt: skip


@pytest.mark.parametrize('name', ['M', 'S normed'])
def test_narrow_arithmetic_keeps_wide_states(name):
  """bfloat16 inside, float32 in steps, decays and states."""
  _, run, values = module(name)
  exact = jax.jit(functools.partial(loop, name))(values, X)
  cast = lambda tree, dtype: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
  run = jax.jit(functools.partial(run, see=SEE, state='empty'))
  y, (memory, tails), _ = run(cast(values, 'f4'), cast(X, jnp.bfloat16))
  assert y.dtype == jnp.bfloat16 and memory.dtype == jnp.float32
  assert {t.dtype for t in jax.tree.leaves(tails)} == {jnp.dtype('bfloat16')}
  here = (SEE.segments > 0)[..., None]
  error = np.abs(here * (y.astype(np.float64) - exact)).max()
  assert 1e-4 < error / np.abs(here * exact).max() < 0.03


def test_what_is_drawn():
  """Steps log-uniform, rates uniform or 1 to S, and nothing of them decays."""
  own = dict(head_dim=1, state=5, expand=3, dt_min=0.01, dt_max=0.2)
  config = config_of(own, d_model=64)
  two, one = (drawn(kind, config) for kind in (mamba.Mamba2, mamba.Mamba))
  low, high = np.log([0.01, 0.2])
  for values, kinds in (two, one):
    dt = np.log(jax.nn.softplus(values['step_bias']))
    assert low - 1e-6 <= dt.min() < dt.max() <= high + 1e-6
    assert abs(dt.mean() - (low + high) / 2) < 0.1 * (high - low)
    for name in ('step_bias', 'a_log', 'skip', 'value_bias'):
      assert kinds[name] == 'vector'
    assert kinds['value_conv'] == 'embedding'
  rates = np.exp(two[0]['a_log'])
  assert 1 <= rates.min() < rates.max() <= 16 and abs(rates.mean() - 8.5) < 1
  np.testing.assert_allclose(
    np.exp(one[0]['a_log']), np.arange(1, 6) * np.ones((192, 1)), rtol=1e-6
  )


def drawn(kind, config):
  """({name: value at the start}, {name: kind of parameter})."""
  skeleton = skeleton_lib.Skeleton(lambda rngs: kind(config, rngs, ''))
  init = jax.jit(lambda key: skeleton.init(key, jnp.float64))
  kinds = {name: leaf.kind for name, leaf in skeleton.leaves.items()}
  return init(jax.random.key(0)), kinds


@pytest.mark.parametrize('kind, own, text', [
  ('M', dict(head_dim=5), 'inner width of 16, which .*head_dim=5'),
  ('M', dict(groups=3), 'groups=3 does not divide the 4 heads'),
  ('S', dict(dt_min=0.5), 'dt_min=0.5 is above .*dt_max=0.1'),
])  # fmt: skip
def test_fields_that_contradict(kind, own, text):
  with pytest.raises(errors.UserError, match=text):
    model_checks.check_model(config_of(own, pattern=kind))


# What tests/train/certify/test_invariance_mixers.py does not meet: one head a
# shard, one group, inner norms, and attention beside both.
EXPLICIT = dict(collectives='explicit')
LAYOUTS = [
  ('M', dict(tensor=8) | EXPLICIT, dict(groups=1)),
  ('M', dict(tensor=8, sequence=False), dict(groups=2)),
  ('S', dict(tensor=8), {}),
  (
    'S', dict(stage=2, tensor=4),
    dict(inner_norm=True, inner_norm_scale=False, norm_epsilon=1e-3),
  ),
  (
    'M-SF-', dict(context=2, tensor=2, fsdp=2),
    dict(groups=2, inner_norm=True),
  ),
]  # fmt: skip


@pytest.mark.parametrize('pattern, mesh, own', LAYOUTS, ids=str)
def test_a_layout_equals_one_device(pattern, mesh, own):
  layers = max(2, len(pattern.replace('-', '')))
  model = config_of(
    dict(head_dim=2) | own, pattern=pattern, num_heads=4, num_layers=layers
  )
  rows = module_cases.certified(model, **mesh)
  assert len(rows) == 2 and all(row.passed for row in rows), rows
