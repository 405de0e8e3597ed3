"""Convolutions and chunks against dense matrices, cut up, and sharded.

Legend: B rows, T tokens, D model, Z width of a key, U of a value, W taps, C
tokens of a chunk, V vocabulary.
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
from paraxis.decode import step
from paraxis.models import build
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.models.mixers import attention
from paraxis.models.mixers import recurrence
from paraxis.models.mixers import tcn
from paraxis.sharding import annotate
from paraxis.train.certify import verify

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, Z, U, V = 3, 15, 6, 4, 9, 32
W, C = 3, 4
QUICK = {'xla_backend_optimization_level': 0}  # to compile
TINY = dict(
  vocab_size=V, d_model=D, num_heads=2, d_ff=16, num_layers=2, pattern='C',
  dtype='float64', param_dtype='float64', attention_block=8,
)  # fmt: skip
OWN = dict(
  kernel=W, dilation=2, depth=2, chunk=C, key_dim=Z, value_expand=U / D
)
jit = functools.partial(jax.jit, compiler_options=QUICK)
close = mixer_cases.close


def config_of(own=(), **fields):
  own = mixer_schema.Tcn(**OWN | dict(own))
  return schema.Model(**TINY | fields, tcn=own)


@functools.cache
def module(**own):
  """(config, run(values, x, see, state) -> (y, state), random values)."""
  config, kind = config_of(own), tcn.ConvolutionAttention
  model_checks.check_model(config)
  return config, *mixer_cases.module(kind, config, 'C', 0.5)


def see_of(lengths, length=T):
  return mixer_cases.see_of(lengths, length)


PACKED = ((6, 1, 7), (15,), (2, 9))


def inputs(rows=B, length=T, seed=1):
  return np.random.default_rng(seed).normal(size=(rows, length, D))


def silu(x):
  return x / (1 + jnp.exp(-x))


def dense(own, w, x, see):
  """Convolutions and attention as matrices (T, T) of what sees what."""
  segments, t = see.segments, np.arange(x.shape[1])
  same = (segments[:, :, None] == segments[:, None]) & (
    segments[:, :, None] > 0
  )
  h = x @ w['channels']
  for i in range(own.depth):
    far = own.dilation**i
    taps = ((t[:, None] - t == j * far) & same for j in range(own.kernel))
    h = h + silu(sum(m @ h * w[f'taps_{i}'][j] for j, m in enumerate(taps)))
  mixed = h @ w['mixed']
  z = silu(mixed @ w['shared'] + w['shared_bias'])
  q, k = z * w['query_scale'] + w['query_bias'], z * w['key_scale']
  v = silu(x @ w['value'] + w['value_bias'])
  chunk = see.positions // own.chunk
  ok = same & (chunk[:, :, None] == chunk[:, None]) & (t[:, None] >= t)
  e = jnp.where(ok, jnp.exp(q @ k.swapaxes(1, 2) / own.key_dim**0.5), 0)
  o = e / jnp.maximum(e.sum(-1, keepdims=True), 1e-30) @ v
  reset = silu(mixed @ w['reset'] + w['reset_bias'])
  update = 1 / (1 + jnp.exp(-(mixed @ w['update'] + w['update_bias'])))
  new = mixed @ w['hidden'] + w['hidden_bias'] + (reset * o) @ w['output']
  return update * (silu(new) - x)


def gradients(run, values, see):
  """(({name: gradient}, gradient of x), outputs of tokens)."""
  u = np.random.default_rng(2).normal(size=(B, T, D))
  mask = (see.segments > 0)[..., None]

  def value(values, x):
    y = jnp.where(mask, run(values, x), 0)
    return jnp.sum(y * u), y

  return jit(jax.grad(value, (0, 1), has_aux=True))(values, inputs())


@pytest.mark.parametrize('own', [{}, dict(kernel=2, depth=3, chunk=5)], ids=str)
def test_equals_dense_matrices(own):
  config, run, values = module(**own)
  see = see_of(PACKED)
  (want, dx), y = gradients(
    lambda w, x: dense(config.tcn, w, x, see), values, see
  )
  (found, dx_found), out = gradients(
    lambda w, x: run(w, x, see)[0], values, see
  )
  assert close(out, y, 1e-12) and close(dx_found, dx, 1e-12)
  assert set(found) == set(want) == set(values)
  assert not [p for p in values if not close(found[p], want[p], 1e-11)]


def changed(values, at, **own):
  """(T,) bool: tokens of one document that see a change of token `at`."""
  _, run, _ = module(**own)
  x, see = inputs(1, 40), see_of(((40,),), 40)
  other = x.copy()
  other[0, at] += 1
  see_it = jit(lambda x: run(values, x, see)[0])
  return np.abs(np.asarray(see_it(other) - see_it(x)))[0].max(1) > 1e-14


@pytest.mark.parametrize(
  'own',
  [dict(kernel=2, depth=3), dict(kernel=4, dilation=3)],
  ids=str,
)
def test_the_receptive_field_is_the_formula(own):
  """Chunks of one token, taps that are not 0: only convolutions reach back."""
  config, _, values = module(**own, chunk=1)
  values = values | {k: abs(v) for k, v in values.items() if 'taps' in k}
  seen = np.flatnonzero(changed(values, 3, **own, chunk=1))
  field = tcn.receptive_field(config.tcn)
  last = 1 + (config.tcn.kernel - 1) * sum(
    config.tcn.dilation**i for i in range(config.tcn.depth)
  )
  assert field == last < 30 and seen[0] == 3 and seen[-1] == 3 + field - 1


def cut(see, begin, end):
  return attention.Visibility(*(a[:, begin:end] for a in see[:2]))


def test_a_row_in_parts_equals_the_row():
  """Chunks, then tokens; documents begin within them."""
  _, run, values = module()
  see, x = see_of(((6, 1, 8), (15,), (2, 13))), inputs()
  want = jit(run)(values, x, see)[0]
  run, y, state = jit(run), [], module_state()
  for begin, end in ((0, 5), (5, 10), (10, 11), (11, 12), (12, 13)):
    part, state = run(values, x[:, begin:end], cut(see, begin, end), state)
    y.append(part)
  assert close(np.concatenate(y, 1), want[:, :13], 1e-12)


def module_state(rows=B):
  config, _, _ = module()
  kind = tcn.ConvolutionAttention
  return kind(config, nnx.Rngs(0), 'C').init_state(rows, 0, jnp.float64)


def test_padding_changes_no_state():
  """Short rows, and one without a token."""
  _, run, values = module()
  x, see = inputs(), see_of(((15,),) * 3)
  run = jit(run)
  _, state = run(values, x[:, :6], cut(see, 0, 6), module_state())
  lengths = np.array([3, 0, 1])
  short = cut(see, 6, 10)
  there = np.arange(4) < lengths[:, None]
  short = attention.Visibility(
    np.where(there, short.segments, 0), np.where(there, short.positions, 0)
  )
  _, state = run(values, x[:, 6:10], short, state)
  for b, n in enumerate(6 + lengths):
    _, want = run(values, x[b : b + 1, :n], see_of(((n,),), n), module_state(1))
    tails, slots = state
    for got, kept in zip(tails, want[0], strict=True):
      assert close(got[b : b + 1], kept, 1e-12)
    held = (n - 1) % C + 1  # of the chunk of the last token
    for got, kept in zip(slots, want[1], strict=True):
      assert close(got[b : b + 1, :held], kept[:, :held], 1e-12)


def model_of(**fields):
  model = decoder.Decoder(config_of(**fields))
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return model, {p: rng.normal(0, 0.4, s.shape) for p, s in shapes.items()}


def decoded(model, params, put=lambda x: x):
  """Logits of three steps (B, 3, V) after a prefill."""
  tokens = np.random.default_rng(3).integers(0, V, (4, T)).astype(np.int32)
  lengths, rows = np.array([6, 3, 0, 8]), np.arange(4)
  start = jit(lambda p, x, n: step.prefill(model, p, x, n, T)[1])
  cache = start(params, put(tokens[:, :8]), put(lengths))
  advance, out = jit(functools.partial(step.advance, model)), []
  for i in range(3):
    at = lengths + i
    given = map(put, (tokens[rows, at], at, at >= 0))
    z, cache = advance(params, cache, *given)
    out.append(np.asarray(z))
  return np.stack(out, 1)


def test_decoding_on_a_mesh_equals_one_device():
  model, params = model_of(own=dict(value_expand=10 / D))
  config = schema.Config(
    mesh=schema.Mesh(tensor=2, data=2, fsdp=2, sequence=False),
    model=model.config,
  )
  want = decoded(model, model.unstack(params))
  built = build.build(config)
  with build.layout(built):
    put = lambda x: jax.device_put(
      x, jax.NamedSharding(built.mesh, annotate.spec(('batch',)))
    )
    params = {
      p: jax.device_put(params[p], leaf.sharding)
      for p, leaf in built.params.items()
    }
    params = jit(built.model.unstack)(params)
    found = decoded(built.model, params, put)
  assert close(found, want, 1e-12)


# ------------------------------------------------------------------- layouts


def certified(mesh, pattern='C', **own):
  """Rows of verify: a layout on 8 devices against one device."""
  own = dict(key_dim=4, value_expand=1.0, chunk=6) | own
  config = schema.Config(
    mesh=schema.Mesh(**mesh),
    model=config_of(own, num_heads=8, d_model=16, pattern=pattern),
    data=schema.Data(sequence_length=32),
    optimizer=schema.Optimizer(warmup_steps=0),
    train=schema.Train(batch_size=8),
  )
  subject = verify.Case(config, jax.devices(), True, ())
  return verify.certify(subject, ('loss', 'gradients'))


# What tests/train/certify/test_invariance_mixers.py does not meet.
MORE = [
  ('C', dict(context=4, data=2, context_form='token_ring')),
  ('CF', dict(context=2, tensor=2, fsdp=2)),
]


@pytest.mark.parametrize(
  'pattern, mesh',
  [
    ('C', dict(context=8)),
    *MORE,
  ],
  ids=str,
)
def test_a_layout_equals_one_device(pattern, mesh):
  """A chunk of 6 tokens is on three shards of 4."""
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
