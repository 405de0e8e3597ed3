"""Claims about context parallel attention hold, and fail where they should."""

import itertools
import math
import types

import claim_cases
import jax
import pytest
import support

from paraxis.configs import schema
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import aot
from paraxis.sharding.sequence import forms as context_forms
from paraxis.train.claims.layouts import context as claims_context

SHAPE = dict(ranks=4, tokens=4, heads=4, width=8)


@pytest.fixture
def run():
  return claim_cases.run_of('ring_self_attention')


# --------------------------------------------------------------------- sends --


@pytest.mark.parametrize('form', ['ring', 'rsa', 'token_ring'])
def test_sends_are_counted(form):
  shape = dict(SHAPE, kv_heads=2)
  check = claims_context.sends_equal_formulas
  outcome = check(None, form=form, shape=shape)
  rings = '6 + 14 permutes'  # 2 (n - 1) and 2 (n - 1) + 2 n
  right = '9 + 15 permutes' if form == 'token_ring' else rings
  assert outcome.passed and outcome.measured == right


def test_a_wrong_formula_is_found(monkeypatch):
  formulas = claims_context.formulas
  wrong = lambda form, shape: formulas('ring', shape)
  monkeypatch.setattr(claims_context, 'formulas', wrong)
  check = claims_context.sends_equal_formulas
  shape = dict(SHAPE, kv_heads=2)
  assert check(None, form='rsa', shape=shape).passed
  found = (
    check(None, form='token_ring', shape=shape),
    against([[1, 0.81]], 0.01),
  )
  for outcome in found:
    assert not outcome.passed and 'NOT as' in outcome.caveat


def test_a_detour_is_found(monkeypatch):
  """The right rank gets it, but over its neighbour."""
  shift, counted = context_forms.ContextCall.shift, claims_context._counted
  detour = lambda job, tree, by=1: shift(job, shift(job, tree, by - 1), 1)
  monkeypatch.setattr(context_forms.ContextCall, 'shift', detour)
  monkeypatch.setattr(claims_context, '_counted', counted.__wrapped__)
  outcome = claims_context.sends_equal_formulas(
    None, form='token_ring', shape=dict(SHAPE, kv_heads=2)
  )
  assert not outcome.passed and outcome.expected == '9 + 15 permutes'


def against(ratios, within):
  return claims_context.bytes_against_ring(
    None, form='token_ring', shape=SHAPE, ratios=ratios, within=within
  )


def test_bytes_against_the_ring():
  """(n - 1) (5 N + 3 N / H) of (n - 1) 4 K + n 2 K numbers, and positions."""
  tokens, ring = 3 * (5 + 3 / 8) * 4, lambda kv: (3 * 4 + 4 * 2) * kv
  positions = 2 * 3 * 2 / 8
  right = [
    [g, (tokens + positions) / (ring(4 / g) + positions)] for g in (1, 2)
  ]
  outcome = against(right, 1e-6)
  assert outcome.passed and outcome.measured == '0.81x, 1.59x'
  assert 'even at 1.23' in outcome.caveat
  right[1][1] += 0.01
  assert not against(right, 0.005).passed


TEXT = """HloModule m, is_scheduled=true, num_partitions=3

ENTRY %main (p: f32[4,4]) -> f32[12,4] {
  %p = f32[4,4] parameter(0)
  %i = s32[3] constant({0,1,2})
  %a = f32[4,4] collective-permute(%p), source_target_pairs={{0,2},{1,0},{2,1}}
  %b = s32[3] collective-permute(%i), source_target_pairs={{0,1},{1,2},{2,0}}
  ROOT %g = f32[12,4] all-gather(%a), replica_groups={{0,1,2}}, dimensions={0}
}
"""


def test_sends_of_a_text():
  mesh = mesh_lib.make('context=3', jax.devices()[:3])
  found = claims_context.sends(TEXT, mesh)
  assert found == ({1: 12, 2: 64}, 1, 2 * 64)
  with pytest.raises(ValueError, match=r'a sends by \[1, 2\]'):
    claims_context.sends(TEXT.replace('{0,2},{1,0}', '{0,1},{1,0}'), mesh)


# ----------------------------------------------------------------- what fits --


def largest(need, start, step, close):
  """(largest that fits, tries) against a plain search."""
  tried = []

  def counted(size):
    assert size > 0 and size % step == 0 and size not in tried
    tried.append(size)
    return need(size)

  good, bad = claims_context.most(counted, 100.0, start, step, close)
  right = max(n for n in range(0, 20000 * step, step) if need(n) <= 100)
  assert good <= right < bad <= good + max(step, close * good)
  assert (bad in tried and good in tried) or not good
  return good, len(tried)


def test_most_finds_what_a_plain_search_finds():
  for base, line, square, known in itertools.product(
    (0.0, 30.0), (1.0, 0.02), (0.0, 1e-3, 1e-5), (True, False)
  ):

    def need(size, base=base, line=line, square=square, known=known):
      used = base + line * size + square * size**2
      return used if known or used <= 100 else math.inf

    for start, step, close in ((8, 1, 0.02), (64, 8, 0.0), (512, 64, 0.05)):
      _, tries = largest(need, start, step, close)
      assert tries <= 10


def test_most_with_steps_and_when_nothing_fits():
  padded = lambda size: -(-size // 100) * 5.0  # tiles of 100
  assert largest(padded, 10, 1, 0.0)[0] == 2000
  assert largest(lambda size: 101.0 * (size > 0), 512, 64, 0.02)[0] == 0
  assert largest(lambda size: size * math.inf if size else 0, 64, 64, 0)[0] == 0


@pytest.fixture
def chips(monkeypatch):
  """Machines of 100 bytes a device; a step needs what `price` says."""
  made = lambda name: types.SimpleNamespace(hbm=100.0, devices=range(int(name)))
  monkeypatch.setattr(aot, 'topology', made)
  asked = []

  def price(config, topology):
    asked.append(config)
    rows, tokens = config.train.batch_size, config.data.sequence_length
    shards = config.mesh.context * config.mesh.tensor
    assert shards == len(topology.devices)
    return 1 + rows * tokens / shards / 4

  monkeypatch.setattr(claims_context, 'needed', price)
  return asked


def fits(run, at_least, **given):
  return claims_context.most_that_fits(
    run,
    model=dict(position='learned', num_layers=3),
    layouts={
      'long': dict(topology='8', mesh=dict(context=8, context_form='rsa')),
      'wide': dict(topology='2', mesh=dict(tensor=2, sequence=False)),
    },
    at_least=at_least,
    close=0.0,
    **given,
  )


def test_layouts_are_compared(run, chips):
  rows = dict(vary='rows', given=8, start=4)
  outcome = fits(run, 4, **rows)
  assert outcome.passed and outcome.measured == '4.0x'  # 396 / 99
  assert 'long 396 (8 chips' in outcome.caveat
  assert 'wide 99 (2 chips' in outcome.caveat
  assert not fits(run, 4.01, **rows).passed
  tokens = dict(vary='tokens', given=1, start=64)
  outcome = fits(run, 4, **tokens)
  assert outcome.passed and outcome.measured == '4.1x'  # 3136 / 768, by 64
  models = {(c.model.num_layers, c.model.max_positions) for c in chips}
  assert models == {(3, c.data.sequence_length) for c in chips}
  assert {c.mesh.context_form for c in chips if c.mesh.context > 1} == {'rsa'}


def test_a_layout_that_never_fits_proves_nothing(run, chips):
  outcome = fits(run, 2, vary='rows', given=10**6, start=4)
  assert not outcome.passed and 'wide 0 ' in outcome.caveat


def test_settings_of_the_compiler_come_back():
  level = jax.config.jax_optimization_level
  with pytest.raises(KeyError), claims_context._quickly():
    assert jax.config.jax_optimization_level == 'O0' != level
    raise KeyError
  assert jax.config.jax_optimization_level == level


MODEL = dict(
  vocab_size=256, d_model=128, num_layers=2, num_heads=4, d_ff=256,
  num_kv_heads=0,
)  # fmt: skip


@support.compiles('tpu')
def test_scores_are_kept_by_one_form_and_not_by_the_other(run):
  topology = aot.topology('v5e:2x2')

  def need(form, tokens, rows=8):
    mesh = schema.Mesh(context=4, context_form=form, context_order='contiguous')
    config = claims_context._config(run.config, MODEL, mesh, rows, tokens)
    return claims_context.needed(config, topology)

  growth = {}
  for form in ('rsa', 'ring'):
    small, large = need(form, 1024), need(form, 2048)
    growth[form] = large / small
  scores = 2 * 8 * 4 * 2048 * 2048 * 4 / 4  # layers, rows, heads, float32
  assert large + scores < need('rsa', 2048)
  assert growth['ring'] < 2.1 < 2.5 < growth['rsa']
  assert need('rsa', 2048, rows=2048) == math.inf
