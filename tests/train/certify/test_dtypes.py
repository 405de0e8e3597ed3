"""Sums of gradients in bfloat16 are read off a program; numbers would not show.

Both sides of a comparison would round alike: so programs are only traced here.
"""

import dataclasses
import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import peers
import pytest

from paraxis.configs import schema
from paraxis.models import decoder
from paraxis.models import norm
from paraxis.sharding.tensor import project
from paraxis.train.certify import certification
from paraxis.train.certify import dtypes
from paraxis.train.certify import properties
from paraxis.train.certify import trial

CONFIG = schema.Config(
  mesh=schema.Mesh(data=2, tensor=2),
  model=schema.Model(
    vocab_size=32, d_model=16, num_layers=2, num_heads=2, d_ff=16,
    attention_block=16, norm='layernorm', dtype='bfloat16',
  ),
  data=schema.Data(sequence_length=16),
  train=schema.Train(batch_size=8),
)  # fmt: skip


def found_in(function, *shapes):
  """{primitive: count} that is too narrow in a function that returns sums."""
  program = jax.jit(function).trace(
    *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
  )
  jaxpr = program.jaxpr.jaxpr
  found, sums, lost = dtypes.narrow_sums(jaxpr, range(len(jaxpr.outvars)))
  assert not lost
  return sorted(n.primitive for n in found), sums


ROWS = (8, 16), jnp.bfloat16
WIDE = jnp.float32


def product(x, y, dtype):
  return jnp.einsum('ND,NF->DF', x, y, preferred_element_type=dtype)


@pytest.mark.parametrize(
  'function, narrow',
  [
    (lambda x, y: product(x, y, WIDE), []),
    (lambda x, y: product(x, y, jnp.bfloat16).astype(WIDE), ['dot_general']),
    (lambda x, y: (x * y).astype(WIDE).sum(0), []),
    (
      lambda x, y: jax.lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None)
      + y[0].astype(WIDE),
      ['reduce_sum'],
    ),
    # Two microbatches, summed in a loop.
    (
      lambda x, y: jax.lax.scan(
        lambda s, z: (s + product(z[0], z[1], s.dtype), ()),
        jnp.zeros((16, 16), jnp.bfloat16),
        (x.reshape(2, 4, 16), y.reshape(2, 4, 16)),
      )[0],
      ['add', 'dot_general'],
    ),
    # A residual, an activation: a term and no sum of a gradient.
    (lambda x, y: product(x + y, y, WIDE), []),
    (lambda x, y: product((x + y) * jax.lax.rsqrt(y), y, WIDE), ['rsqrt']),
    # A parameter that is used through a function of it: a = -e^(a_log).
    (
      lambda x, y: -jnp.exp(y[0].astype(WIDE))
      * jax.lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None),
      ['reduce_sum'],
    ),
    (
      lambda x, y: jnp.zeros((4, 16), jnp.bfloat16)
      .at[jnp.arange(8) % 4].add(x).astype(WIDE).reshape(-1) * y[0, 0],
      ['scatter-add'],
    ),
  ],
)  # fmt: skip
def test_sums_of_a_program(function, narrow):
  found, sums = found_in(function, ROWS, ROWS)
  assert found == narrow and sums


def row_of(config=CONFIG):
  """The verdict of the property, on four devices."""
  runner = trial.Runner(config, jax.devices()[:4])
  run = certification.Certification.__new__(certification.Certification)
  run.runner, run.config, run.devices = runner, config, runner.devices
  run.narrow, run.bounds = True, (2.0, 2.0)
  params = {
    p: np.zeros(x.shape, x.dtype) for p, x in runner.job.built.params.items()
  }
  vars(run)['state'] = runner.start(params)
  run.reference = type('', (), dict(batches=trial.batches(config, True)))
  (row,) = properties.PROPERTIES['dtypes'](run)
  return row


@pytest.mark.parametrize(
  'choices', [{}, dict(collectives='explicit'), dict(data=1, stage=2)], ids=str
)
def test_every_sum_of_a_step_is_wide(choices):
  mesh = dataclasses.replace(CONFIG.mesh, **choices)
  row = row_of(dataclasses.replace(CONFIG, mesh=mesh))
  assert row.passed and int(row.name.split()[3]) >= 20, row


EXPERTS = dict(count=4, top_k=2, d_ff=8)


@pytest.mark.parametrize(
  'fields',
  [
    dict(mlp='xielu'),
    dict(experts=EXPERTS | dict(shared=1, shared_gate=True)),
    dict(experts=EXPERTS | dict(top_k=1, residual=True, normalise=False)),
    dict(experts=EXPERTS | dict(scale_inputs=True)),
    dict(wiring='streams', streams=2),
    dict(pattern='A', latent=dict(rank=8, nope_dim=4, rope_dim=4, value_dim=8)),
  ],
  ids=['slopes', 'gate', 'residual', 'inputs', 'streams', 'rotated key'],
)  # fmt: skip
def test_what_is_broadcast_has_a_wide_gradient(fields):
  """Where a product lies behind it, too: the walk from gradients ends there."""
  small = dict(vocab_size=32, d_model=16, num_layers=2, num_heads=2, d_ff=16)
  given = small | dict(dtype='bfloat16') | fields
  model = decoder.Decoder(schema.view(dict(model=given)).model)
  data = peers.rows(32, (2, 16))

  def loss(params):
    x, _ = model.features(params, data)
    return model.nll(params, x, data.targets).sum()

  params = jax.eval_shape(model.init, jax.random.key(0))
  traced = jax.jit(jax.grad(loss)).trace(params).jaxpr.jaxpr
  narrow = [
    eqn.invars[0].aval.shape
    for eqn in dtypes.equations(traced)
    if eqn.primitive.name == 'reduce_sum'
    and eqn.outvars[0].aval.dtype == jnp.bfloat16
    and eqn.outvars[0].aval.size < eqn.invars[0].aval.size
  ]
  assert not narrow


def mutated(monkeypatch, owner, name, space, before, after):
  """owner.name with other text."""
  text = textwrap.dedent(inspect.getsource(getattr(owner, name)))
  assert text.count(before) == 1
  space = dict(space)
  exec(text.replace(before, after), space)  # noqa: S102
  monkeypatch.setattr(owner, name, space[name])


def test_a_norm_in_bfloat16(monkeypatch):
  mutated(
    monkeypatch, norm.Norm, '__call__', vars(norm),
    'y = x.astype(jnp.promote_types(x.dtype, jnp.float32))', 'y = x',
  )  # fmt: skip
  row = row_of()
  assert not row.passed and row.worst.endswith('rsqrt'), row
  assert row.measured >= 1


def test_weight_gradients_summed_in_bfloat16(monkeypatch):
  """Of products; they are float32 again when they arrive."""
  right = project.weight_gradients

  def narrow(group, x, cotangents):
    own = tuple(jnp.dtype(jnp.bfloat16) for _ in group.dtypes)
    group = group._replace(dtypes=own)
    return [g.astype(WIDE) for g in right(group, x, cotangents)]

  monkeypatch.setattr(project, 'weight_gradients', narrow)
  row = row_of()
  assert not row.passed and 'dot_general' in row.worst, row


# --------------------------------------------------- errors over one device's


def test_an_error_is_measured_against_one_device():
  exact = dict(a=np.full(4, 8.0), b=np.array([1.0, -1.0]))
  own = dict(a=exact['a'] + 0.5, b=exact['b'] + 0.25)
  assert trial.excess(own, own, exact) == (1.0, 'a')
  found = dict(a=exact['a'] - 1.5, b=exact['b'])
  assert trial.excess(found, own, exact) == (3.0, 'a')
  ratio, path = trial.excess(own | dict(b=exact['b'] + 1), own, exact)
  assert (ratio, path) == (4.0, 'b')


def test_an_error_of_rounding_is_none():
  """Of one device 0 by chance: a rounding of the leaf is allowed, not more."""
  exact = dict(a=np.full(4, 8.0), b=np.full(4, 1e-9))
  step = 8 * trial.ROUNDING
  found = dict(a=exact['a'] + step, b=exact['b'])
  assert trial.excess(found, exact, exact) == (1.0, 'a')
  # A leaf of rounding alone counts as a hundredth of the largest.
  found = dict(a=exact['a'], b=exact['b'] + 3 * step * trial.FLOOR)
  ratio, path = trial.excess(found, exact, exact)
  assert path == 'b' and ratio == pytest.approx(3)
  lost = dict(a=exact['a'] * np.nan, b=exact['b'])
  assert trial.excess(lost, exact, exact) == (np.inf, 'a')
