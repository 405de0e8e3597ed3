"""Mamba-2 and Mamba against plain loops over tokens, cut up, and sharded.

Legend: B rows, T tokens, D model, N heads, P head width, G groups, S numbers of
the state, F inner width, R rank of the steps, W taps.
"""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import mixer_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models import checks as model_checks
from paraxis.models import parameter
from paraxis.models.mixers import attention
from paraxis.models.mixers import mamba
from paraxis.models.mixers import recurrence
from paraxis.train.certify import verify

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, V = 3, 13, 8, 32
N, P, S, W, R = 4, 4, 3, 4, 2
QUICK = {'xla_backend_optimization_level': 0}  # to compile
TINY = dict(
  vocab_size=V, d_model=D, num_heads=2, head_dim=4, d_ff=16, num_layers=3,
  dtype='float64', param_dtype='float64', attention_block=8,
)  # fmt: skip
OWN = dict(head_dim=P, state=S, conv_width=W, dt_rank=R)
# name -> (module, fields of mixer_schema.Mamba)
KINDS = {
  'M': (mamba.Mamba2, dict(groups=2)),
  'S': (mamba.Mamba, {}),
  'S normed': (mamba.Mamba, dict(inner_norm=True)),
}
jit = functools.partial(jax.jit, compiler_options=QUICK)
close = mixer_cases.close


def config_of(own, **fields):
  return schema.Model(**TINY | fields, mamba=mixer_schema.Mamba(**OWN | own))


@functools.cache
def module(name):
  """(config, run(values, x, see, state) -> (y, state), random values)."""
  kind, own = KINDS[name]
  config = config_of(own)
  kind.check(config)
  return config, *mixer_cases.module(kind, config, name[0], 0.4)


def see_of(lengths, length=T):
  return mixer_cases.see_of(lengths, length)


PACKED = ((4, 1, 6), (13,), (2, 9))
PARTS = ((4, 9), (8,), (2, 11))


def inputs(rows=B, length=T, seed=1):
  return np.random.default_rng(seed).normal(size=(rows, length, D))


def softplus(x):
  return jnp.log1p(jnp.exp(x))


def silu(x):
  return x / (1 + jnp.exp(-x))


def convolved(w, name, past_BW, x, first):
  """silu(taps of the document's inputs + bias) of a token, and those inputs."""
  past = jnp.concatenate([x[:, None], jnp.where(first, 0, past_BW)], 1)
  y = jnp.einsum('bw...,w...->b...', past, w[f'{name}_conv'])
  return silu(y + w[f'{name}_bias']), past[:, :-1]


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
  dt = softplus(x @ w['step'] + w['step_bias'])
  # Heads of a group follow one another.
  b, c = (shared[:, i, np.arange(N) * groups // N] for i in range(2))
  a = jnp.exp(-dt * jnp.exp(w['a_log']))
  h = jnp.where(at(4), 0, h) * a[:, :, None, None]
  h = h + jnp.einsum('bns,bn,bnp->bnsp', b, dt, v)
  o = jnp.einsum('bns,bnsp->bnp', c, h) + w['skip'][:, None] * v
  o = rms((o * silu(z)).reshape(len(x), groups, -1), config)
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
    shared = rms(shared, config) * w['shared_norm']
    low = rms(low, config) * w['step_norm']
  dt = softplus(low @ w['step_up'] + w['step_bias'])
  a = jnp.exp(-dt[:, :, None] * jnp.exp(w['a_log']))
  h = jnp.where(at, 0, h) * a + (dt * v)[:, :, None] * shared[:, 0, None]
  o = (h * shared[:, 1, None]).sum(-1) + w['skip'] * v
  return (past, h), (o * silu(x @ w['gate'])) @ w['output']


def rms(x, config):
  return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + config.norm_epsilon)


def loop(name, w, x, see, config):
  """Token after token -> (y_BTD, what is carried)."""
  wide = lambda *shape: jnp.zeros((len(x), *shape))
  groups, f = config.mamba.groups, mamba.inner(config)
  carry, one = (wide(W - 1, f), wide(f, S)), step_mamba
  if name[0] == 'M':
    own = wide(W - 1, N, P), wide(W - 1, 2, groups, S), wide(N, S, P)
    carry, one = own, step_mamba2

  def token(old, at):
    x, first, valid = at
    new, y = one(w, config, old, x, first)
    keep = lambda a, b: jnp.where(valid.reshape(-1, *[1] * (a.ndim - 1)), a, b)
    return jax.tree.map(keep, new, old), y

  rows = x.swapaxes(0, 1), (see.positions == 0).T, (see.segments > 0).T
  carry, out = jax.lax.scan(token, carry, rows)
  return out.swapaxes(0, 1), carry


def gradients(run, values, see, seed=2):
  """(outputs of tokens, {name: gradient}, gradient of x)."""
  u = np.random.default_rng(seed).normal(size=(B, T, D))
  mask = (see.segments > 0)[..., None]

  def value(values, x):
    y = jnp.where(mask, run(values, x), 0)
    return jnp.sum(y * u), y

  return jit(jax.grad(value, (0, 1), has_aux=True))(values, inputs())


@pytest.mark.parametrize('name', KINDS)
def test_equals_a_loop_over_tokens(name):
  config, run, values = module(name)
  see = see_of(PACKED)
  (want, dx), y = gradients(
    lambda w, x: loop(name, w, x, see, config)[0], values, see
  )
  (found, dx_found), out = gradients(
    lambda w, x: run(w, x, see)[0], values, see
  )
  assert close(out, y, 1e-12) and close(dx_found, dx, 1e-12)
  assert set(found) == set(want) == set(values)
  far = [p for p in values if not close(found[p], want[p], 1e-11)]
  assert not far


def cut(see, begin, end):
  return attention.Visibility(*(a[:, begin:end] for a in see[:2]))


@pytest.mark.parametrize('name', ['M', 'S normed'])
def test_a_row_in_parts_equals_the_row(name):
  """Documents begin within parts; padding leaves states as they are."""
  config, run, values = module(name)
  see, x = see_of(PARTS), inputs()
  here = (see.segments > 0)[..., None]
  want, carry = jit(functools.partial(loop, name, see=see, config=config))(
    values, x
  )
  once, first = jit(run), jit(functools.partial(run, state='empty'))
  parts = [x[:, 0:6], x[:, 6:12], x[:, 12:]]
  sees = [cut(see, 0, 6), cut(see, 6, 12), cut(see, 12, 13)]
  y, state = first(values, parts[0], sees[0])
  found = [y]
  for part, own in zip(parts[1:], sees[1:], strict=True):
    before = state
    y, state = once(values, part, own, before)
    found.append(y)
  assert close(np.where(here, np.concatenate(found, 1), 0), here * want, 1e-12)
  memory, tails = state
  *past, h = carry
  assert close(memory, h, 1e-12)
  tails = tails if name[0] == 'M' else (tails,)
  for tail, newest_first in zip(tails, past, strict=True):
    assert close(tail, newest_first[:, ::-1], 1e-12)
  leaves, tree = jax.tree.flatten(before)
  for i, lost in enumerate(leaves):  # each is needed
    kept = [*leaves[:i], jnp.zeros_like(lost), *leaves[i + 1 :]]
    y = once(values, parts[2], sees[2], jax.tree.unflatten(tree, kept))[0]
    assert not close(y[:1], found[2][:1], 1e-3)


@pytest.mark.parametrize('name', ['M', 'S normed'])
def test_narrow_arithmetic_keeps_wide_states(name):
  """bfloat16 inside, float32 in steps, decays and states."""
  config, run, values = module(name)
  see, x = see_of(PACKED), inputs()
  exact = jit(lambda w, x: loop(name, w, x, see, config)[0])(values, x)
  cast = lambda tree, dtype: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
  run = functools.partial(run, see=see, state='empty')
  y, (memory, tails) = jit(run)(cast(values, 'f4'), cast(x, jnp.bfloat16))
  assert y.dtype == jnp.bfloat16 and memory.dtype == jnp.float32
  assert {t.dtype for t in jax.tree.leaves(tails)} == {jnp.dtype('bfloat16')}
  here = (see.segments > 0)[..., None]
  error = np.abs(here * (y.astype(np.float64) - exact)).max()
  assert 1e-4 < error / np.abs(here * exact).max() < 0.03


def test_what_is_drawn():
  """Steps log-uniform, rates uniform or 1 to S, and nothing of them decays."""
  own = dict(head_dim=1, state=5, dt_min=0.01, dt_max=0.2)
  config = config_of(own, d_model=64)
  two, one = (drawn(kind, config) for kind in (mamba.Mamba2, mamba.Mamba))
  low, high = np.log([0.01, 0.2])
  for values, kinds in (two, one):
    dt = np.log(softplus(values['step_bias']))
    assert low - 1e-6 <= dt.min() < dt.max() <= high + 1e-6
    assert abs(dt.mean() - (low + high) / 2) < 0.1 * (high - low)
    for name in ('step_bias', 'a_log', 'skip', 'value_bias'):
      assert kinds[name] == 'vector'
    assert kinds['value_conv'] == 'embedding'
  rates = np.exp(two[0]['a_log'])
  assert 1 <= rates.min() < rates.max() <= 16 and abs(rates.mean() - 8.5) < 1
  np.testing.assert_allclose(
    np.exp(one[0]['a_log']), np.arange(1, 6) * np.ones((128, 1)), rtol=1e-6
  )


def drawn(kind, config):
  """({name: value at the start}, {name: kind of parameter})."""
  make = lambda: nnx.to_flat_state(nnx.state(kind(config, nnx.Rngs(0), '')))
  kinds = {p[0]: parameter.metadata(v)[1] for p, v in nnx.eval_shape(make)}
  return jit(lambda: {p[0]: v[...] for p, v in make()})(), kinds


@pytest.mark.parametrize('kind, own, text', [
  ('M', dict(head_dim=5), 'inner width of 16, which .*head_dim=5'),
  ('M', dict(groups=3), 'groups=3 does not divide the 4 heads'),
  ('S', dict(dt_min=0.5), 'dt_min=0.5 is above .*dt_max=0.1'),
])  # fmt: skip
def test_fields_that_contradict(kind, own, text):
  with pytest.raises(errors.UserError, match=text):
    model_checks.check_model(config_of(own, pattern=kind))


# ------------------------------------------------------------------- sharded


def certified(pattern, mesh, **own):
  """Rows of verify: a layout on 8 devices against one device."""
  config = schema.Config(
    mesh=schema.Mesh(**mesh),
    model=config_of(
      dict(head_dim=2, groups=2) | own, pattern=pattern, num_heads=4,
      num_layers=max(2, len(pattern.replace('-', ''))),
    ),
    data=schema.Data(sequence_length=32),
    optimizer=schema.Optimizer(name='adamw', warmup_steps=0),
    train=schema.Train(batch_size=8),
  )  # fmt: skip
  subject = verify.Case(config, jax.devices(), True, ())
  return verify.certify(subject, ('loss', 'gradients'))


MIXED = dict(context=2, tensor=2, fsdp=2)
EXPLICIT = dict(collectives='explicit')
MORE = [
  ('M', dict(context=8), {}),
  ('M', MIXED, {}),
  ('M', dict(tensor=8, sequence=False), {}),
  ('M', dict(stage=2, tensor=4), {}),
  ('S', dict(tensor=8), {}),
  ('S', MIXED | EXPLICIT | dict(context_scan='gather'), {}),
  ('S', dict(stage=2, tensor=4), dict(inner_norm=True)),
  ('M-M-F-', dict(tensor=4, fsdp=2), {}),
  ('M-M-F-', dict(context=8), {}),
]


def text_of(x):
  return x if isinstance(x, str) else '.'.join(f'{k}{v}' for k, v in x.items())


@pytest.mark.parametrize(
  'pattern, mesh, own',
  [
    ('M', dict(tensor=8) | EXPLICIT, dict(groups=1)),
    ('S', dict(context=8), {}),
    ('M-SF-', MIXED, dict(inner_norm=True)),
    *MORE,
  ],
  ids=text_of,
)
def test_a_layout_equals_one_device(pattern, mesh, own):
  rows = certified(pattern, mesh, **own)
  assert len(rows) == 2 and all(row.passed for row in rows), rows


@pytest.mark.parametrize('pattern, op', [('M', 'gated'), ('S', 'selective')])
def test_a_dropped_hand_over_is_seen(pattern, op, monkeypatch):
  """Every shard of the length begins from nothing."""
  scan = recurrence.scan
  whole = getattr(scan, op)

  def alone(*args, **options):
    local = lambda x: None if isinstance(x, scan.ScanPlan) else x
    return whole(*map(local, args), **options)

  monkeypatch.setattr(scan, op, alone)
  rows = certified(pattern, dict(context=8))
  assert not any(row.passed for row in rows)
