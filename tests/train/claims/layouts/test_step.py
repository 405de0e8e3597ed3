"""Claims about the layouts of a step hold, and fail when something is wrong."""

import jax
import jax.numpy as jnp
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.sharding import rules
from paraxis.train import loss
from paraxis.train.certify import properties
from paraxis.train.certify import verify
from paraxis.train.claims import harness as claims
from paraxis.train.claims import papers
from paraxis.train.claims.layouts import step as claims_layouts

ON = dict(mesh='tensor=4')
DATA = dict(mesh='data=4')


def run_of(name, **fields):
  """claims.Run of a config, as small as its claims allow."""
  config = command_line.load(name)
  config.model.update(
    dict(d_model=32, d_ff=64, num_heads=4, num_layers=2, vocab_size=64) | fields
  )
  config.data.sequence_length = 16
  config.train.update(batch_size=8, microbatches=1)
  return claims.Run(schema.view(config), '', say=lambda text: None)


@pytest.mark.parametrize('name', ['zero', 'megatron', 'pangu', 'frontier'])
def test_the_configs_are_well_formed(name):
  module, path = command_line.load_module(name), command_line.find_config(name)
  assert papers.claims(module, path)
  assert all(
    'tbd' not in field for field in papers.header(path).fields.values()
  )


def test_volumes_of_zero():
  check = lambda volumes: claims_layouts.zero_volume(
    run_of('zero'), **DATA, volumes=volumes, within=0.35
  )
  right = check([2, 2, 2, 3])
  assert right.passed and right.measured.startswith('2.00 2.00 2.00 2.')
  # One more scatter; and two more gathers and one more scatter.
  assert '2.00 2.00 3.00 5.' in right.caveat
  assert 'norm/scale' in right.caveat and 'mlp/up' not in right.caveat
  assert not check([2, 2, 3, 3]).passed and not check([2, 2, 2, 2]).passed


def test_gradients_that_are_never_scattered_cost_more(monkeypatch):
  """All-reduced, cut, and gathered: 3, as before ZeRO's reduce-scatter."""
  monkeypatch.setattr(rules, 'GRADIENTS', 4)
  monkeypatch.setattr(rules, 'SUMS', 4)
  found = claims_layouts.zero_volume(
    run_of('zero', d_ff=32), **DATA, volumes=[2, 2], within=0.1
  )
  assert not found.passed and found.measured == '2.00 3.00'


def test_trajectories_of_zero(monkeypatch):
  check = lambda stages, steps: claims_layouts.zero_trajectories(
    run_of('zero'), **DATA, stages=stages, steps=steps, within=1e-9
  )
  right = check([1, 3], 3)
  assert right.passed and 0 < float(right.measured) < 1e-10

  def own_chunk(x, axis, *, scatter_dimension, tiled):
    size = x.shape[scatter_dimension] // jax.lax.axis_size(axis)
    first = jax.lax.axis_index(axis) * size
    return jax.lax.dynamic_slice_in_dim(x, first, size, scatter_dimension)

  monkeypatch.setattr(jax.lax, 'psum_scatter', own_chunk)
  wrong = check([0, 2], 1)
  plain, zero = map(float, wrong.caveat.split(': ')[-1].split(', '))
  assert not wrong.passed and plain < 1e-9 < zero


REDUCED = dict(
  sequence=False, forward={'all-reduce': 2}, backward={'all-reduce': 2}
)
SCATTERED = dict(
  sequence=True,
  forward={'all-gather': 2, 'reduce-scatter': 2},
  backward={'all-gather': 4, 'reduce-scatter': 2},
)


def test_messages_of_a_layer():
  check = lambda **expected: claims_layouts.messages_per_layer(
    run_of('megatron'), **ON, **expected
  )
  right = check(**REDUCED)
  assert right.passed and '3 + 3 of that; 8 (t - 1) / t is 6' in right.caveat
  assert not check(**REDUCED | dict(backward={'all-reduce': 3})).passed
  assert not check(**REDUCED | dict(backward={'all-gather': 2})).passed
  assert check(**SCATTERED).passed
  assert not check(**SCATTERED | dict(forward=REDUCED['forward'])).passed
  ratios = lambda backward: claims_layouts.sequence_volume(
    run_of('megatron'), **ON, forward=1.0, backward=backward
  )
  assert ratios(1.5).passed and not ratios(1.0).passed


def test_messages_of_the_wrong_size_are_seen(monkeypatch):
  monkeypatch.setattr(claims_layouts, '_activation', lambda config: 1024)
  found = claims_layouts.messages_per_layer(run_of('megatron'), **ON, **REDUCED)
  assert not found.passed and found.measured == found.expected


def test_logits_stay(monkeypatch):
  check = lambda **fields: claims_layouts.logits_stay(
    run_of('megatron', vocab_size=512, **fields), **ON
  )
  right = check()
  assert right.passed and 'explicit, sequence: 16,384' in right.caveat

  def gathered(z, targets):
    if jax.typeof(z).sharding.mesh.are_all_axes_explicit:
      z = jax.reshard(z, jax.P())
    else:
      z = jax.lax.all_gather(z, 'tensor', axis=2, tiled=True)
    hit = jnp.arange(z.shape[-1]) == targets[..., None]
    return jax.nn.logsumexp(z, -1) - jnp.where(hit, z, 0).sum(-1)

  monkeypatch.setattr(loss, 'negative_log_likelihood', gathered)
  wrong = check(d_ff=32)
  # Of each of the three ways: 8 rows of 16 tokens, 512 numbers of 4 bytes.
  assert not wrong.passed and wrong.caveat.count(f'{8 * 16 * 512 * 4:,}') == 4


def test_every_combination_of_options(monkeypatch):
  certify, seen = verify.certify, {}

  def record(subject, names):
    mesh, train = subject.config.mesh, subject.config.train
    case = mesh.data, mesh.tensor, mesh.zero, train.remat
    seen[case] = subject
    assert len(subject.devices) == mesh.data * mesh.tensor
    if case == (2, 2, 1, 'full'):
      return certify(subject, names)
    gap = 1e-3 if case == worst else 0.0
    return [properties.Row('loss', 1.0, gap, True, '')]

  monkeypatch.setattr(verify, 'certify', record)
  check = lambda: claims_layouts.options_equal(
    run_of('pangu'), devices=4, zero=1, within=1e-9
  )
  worst = None
  right = check()
  assert right.passed and right.measured.startswith('16 of 16')
  assert len(seen) == 16 and 0 < float(right.measured.split()[-1]) < 1e-12
  assert {case[:2] for case in seen} == {(1, 1), (4, 1), (1, 4), (2, 2)}
  worst = (4, 1, 0, 'full')
  wrong = check()
  assert not wrong.passed and 'differ: data remat;' in wrong.caveat
