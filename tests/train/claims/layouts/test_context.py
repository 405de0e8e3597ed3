"""Claims about context parallel attention hold, and fail where they should."""

import claim_cases
import jax
import pytest

from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.sequence import forms as context_forms
from paraxis.train.claims.layouts import context as claims_context

SHAPE = dict(ranks=4, tokens=4, heads=4, width=8)


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
  found = check(None, form='token_ring', shape=shape), against([1])
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


def against(groups):
  return claims_context.bytes_against_ring(
    None, form='token_ring', shape=SHAPE, groups=groups
  )


def test_bytes_against_the_ring():
  """(n - 1) (5 N + 3 N / H) of (n - 1) 4 K + n 2 K numbers, and positions."""
  tokens, ring = 3 * (5 + 3 / 8) * 4, lambda kv: (3 * 4 + 4 * 2) * kv
  positions = 2 * 3 * 2 / 8
  right = [(tokens + positions) / (ring(4 / g) + positions) for g in (1, 2)]
  outcome = against([1, 2])
  text = ', '.join(f'{x:.2f}x' for x in right)
  assert outcome.passed and outcome.measured == text == '0.81x, 1.59x'
  assert 'even at 1.23' in outcome.caveat
  assert not against([2]).passed  # more than the ring's


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


def test_scores_are_kept_by_one_form_alone():
  shape = SHAPE | dict(kv_heads=2)
  ask = lambda form: claims_context.scores_are_kept(
    claim_cases.run_of('ring_self_attention', {'mesh.context_form': form}),
    shape=shape,
  )
  found = ask('rsa')
  assert found.passed and found.measured == f'{4 * 4 * 4 * 16:,} bytes'
  for form in ('ring', 'token_ring'):
    assert not ask(form).passed and 'online ring' in ask(form).caveat
