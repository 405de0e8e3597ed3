"""Claims about experts: they hold, measure what they say, and can fail."""

import types

import claim_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import deepspeed_moe
from paraxis.configs import demons_lbl
from paraxis.configs import hecate
from paraxis.configs import moe_parallel_folding
from paraxis.configs import se_moe
from paraxis.sharding.experts import dispatch as expert
from paraxis.train.certify import target_compile
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import papers
from paraxis.train.claims.experts import layer as claims_experts
from paraxis.train.claims.experts import loads as claims_expert_loads
from paraxis.train.claims.experts import messages as claims_expert_messages
from paraxis.train.claims.experts import training as claims_expert_training
from paraxis.train.plot import experts as plot_experts
from paraxis.train.run import metrics

CUBE = 'data=2,context=2,tensor=2'
run_of = claim_cases.run_of


def given(module, check):
  """Parameters of a config's first claim by its check."""
  found = [c for c in papers.claims(module, '') if c.check.__name__ == check]
  return found[0].parameters


def test_axis_by_axis_is_bitwise(monkeypatch):
  check = lambda mesh: claims_experts.axis_by_axis_is_bitwise(
    None, meshes=[mesh], tokens=4
  )
  assert check(CUBE).passed

  def swap(x, plan):
    """Axis by axis, all but the first are left out."""
    axes = plan.region[:1] if plan.hierarchical else plan.region
    return jax.lax.all_to_all(
      x.reshape(jax.lax.axis_size(axes), -1, *x.shape[1:]), axes, 0, 0,
      tiled=True,
    ).reshape(x.shape)  # fmt: skip

  monkeypatch.setattr(expert, '_swap', swap)
  wrong = check('context=2,tensor=2')
  assert not wrong.passed and 'NOT equal' in wrong.caveat


@pytest.mark.parametrize('wrong', ['exchange', 'slots', 'capacity'])
def test_drops_are_counted(wrong):
  swap = expert._swap
  if wrong == 'exchange':
    rolled = lambda x, plan: jax.numpy.roll(swap(x, plan), 1, 0)
    patch = expert, '_swap', rolled
  elif wrong == 'slots':
    slots = expert.slots
    patch = expert, 'slots', lambda *given: slots(*given) + 1
  else:  # of the loop, in which all assignments find a slot
    patch = claims_experts, '_served', lambda ids, slots: ids >= 0
  claim_cases.holds_until(
    *patch, claims_experts.drops_are_counted,
    mesh='tensor=2', region='tensor', factors=[0.5], tokens=16,
  )  # fmt: skip


def test_some_assignments_must_be_dropped():
  check = lambda *factors: claims_experts.drops_are_counted(
    None, mesh='tensor=2', region='tensor', factors=factors, tokens=16
  )
  assert check(8.0, 1.0).passed
  found = check(8.0)
  assert not found.passed and '8: 0 (0.0%)' in found.caveat


def test_parameters_are_those_of_the_paper():
  how = given(deepspeed_moe, 'parameter_counts')
  run = run_of('deepspeed_moe')
  outcome = claims_experts.parameter_counts(run, **how)
  assert outcome.passed and '4,115,145,728' in outcome.caveat
  one = {'350M+PR-MoE-32/64': how['cases']['350M+PR-MoE-32/64']}
  fewer = {
    name: case | {'experts': case['experts'] | {'count': 28}}
    for name, case in one.items()
  }
  outcome = claims_experts.parameter_counts(run, cases=fewer, within=0.03)
  assert not outcome.passed and outcome.measured.startswith('equal')


@pytest.mark.parametrize(
  'gaps, programs, gathered, sent, passed',
  [
    ([1e-15, 2e-15], 1, {(0, 1), (1, 2)}, {0}, True),
    ([1e-15, 1e-6], 1, {(0, 1), (1, 2)}, {0}, False),
    ([1e-15, np.nan], 1, {(0, 1), (1, 2)}, {0}, False),
    ([1e-15, 2e-15], 2, {(0, 1), (1, 2)}, {0}, False),
    ([1e-15, 2e-15], 1, {(0, 1)}, {0}, False),
    ([1e-15, 2e-15], 1, {(0, 1), (1, 2)}, {0, 3}, False),
    ([1e-15, 2e-15], 1, set(), set(), False),
  ],
)
def test_any_hot_set_and_one_program(
  monkeypatch, gaps, programs, gathered, sent, passed
):
  chosen = {(0, 1), (1, 2)}
  measured = lambda *given: claims_experts._Hot(
    8, gaps, programs, chosen, gathered, sent
  )
  monkeypatch.setattr(claims_experts, '_hot_sets', measured)
  found = claims_experts.any_hot_set(
    run_of('hecate'), mesh='data=2', hot=2, sets=2, within=1e-9
  )
  assert found.passed == passed and '8 experts of which 2 hot' in found.caveat
  assert f'programs: {programs} (' in found.caveat


def test_exchanges_are_counted():
  check = lambda backward: claims_expert_messages.exchanges_per_layer(
    run_of('moe_parallel_folding'), mesh=CUBE, regions=['data+tensor'],
    forward=2, backward=backward,
  )  # fmt: skip
  assert check(2).passed
  wrong = check(1)
  assert not wrong.passed and wrong.measured == '2 + 2'
  with claims_expert_messages.unfolded():
    found = check(2)
  assert not found.passed and 'NOT just over' in found.caveat


def test_folded_experts_receive_fewer_bytes(monkeypatch):
  """Two layers: 4 exchanges of 64 tokens' two choices, 64 numbers of 4 bytes;
  16 experts of 3 x 64 x 128 numbers, a half of them summed over 4 devices."""
  sent, summed = 2 * 4 * 64 * 2 * 64 * 4, 2 * 2 * 8 * 3 * 64 * 128 * 4
  right = {'data': [sent / 2, summed * 3 / 4 + 843372]}
  right['data+context+tensor'] = [sent * 7 / 8, 843372]

  def check(**changed):
    totals = right | {k.replace('_', '+'): x for k, x in changed.items()}
    kinds = ('all-to-all', 'all-reduce')
    monkeypatch.setattr(
      experiment, 'step_collectives', lambda config, devices: [
        types.SimpleNamespace(kind=kind, axes=('data',), total=total)
        for kind, total in zip(
          kinds, totals[config.model.experts.region], strict=True
        )
      ],
    )  # fmt: skip
    return claims_expert_messages.folded_bytes(
      run_of('moe_parallel_folding'), mesh=CUBE, counts=[16], regions=[*right]
    )

  assert check().passed and check().measured == '0.32'
  found = check(data=[sent / 2, 4e6])
  assert not found.passed and 'NOT as the formulas' in found.caveat
  assert not check(data_context_tensor=[sent / 2, 843372]).passed


def test_residual_sends_half_of_what_top_2_does():
  right, wrong = claim_cases.falls(
    'deepspeed_moe', 'second_expert', {'data.sequence_length': 32}
  )
  assert right.measured == '0.5' and wrong.measured == '1'


def test_fewest_devices():
  how = given(moe_parallel_folding, 'least_devices')
  how |= dict(cases=how['cases'][:2], devices=how['devices'][:2])
  run = run_of('moe_parallel_folding')
  assert claims_expert_messages.least_devices(run, **how).passed
  how['devices'] = [[32, 8], [512, 64]]
  outcome = claims_expert_messages.least_devices(run, **how)
  assert not outcome.passed and outcome.measured == '64->8 512->64'


def test_axis_by_axis_sends_what_the_formula_says():
  slots = claims_expert_messages._slots
  more = lambda *given: (slots(*given)[0] + 8, slots(*given)[1])
  how = dict(mesh='data=2,tensor=4', region='data+tensor')
  right, _ = claim_cases.holds_until(
    claims_expert_messages, '_slots', more,
    claims_expert_messages.axis_by_axis, run_of('se_moe'), **how,
  )  # fmt: skip
  assert 'peers 7 -> 4' in right.caveat
  with claims_expert_messages.at_once():
    found = claims_expert_messages.axis_by_axis(run_of('se_moe'), **how)
  assert not found.passed


def test_hot_experts_cost_what_the_formula_says():
  claim_cases.holds_until(
    claims_expert_messages.moe, 'width', lambda config: 65,
    claims_expert_messages.hot_bytes, run_of('hecate'),
    mesh='data=2,tensor=4', hots=[0, 1],
  )  # fmt: skip


def test_scopes_agree(monkeypatch):
  asked = given(demons_lbl, 'scopes_agree') | dict(
    equal=[['step', 4]], other=['microbatch', 4], within=1e-9, apart=1e-3
  )
  for gaps, right in [
    ([1e-15, 0.1], True),
    ([1e-8, 0.1], False),  # what should be the same is not
    ([1e-15, 1e-4], False),  # what should differ does not
  ]:
    monkeypatch.setattr(
      claims_expert_loads, '_scope_gaps', lambda config, cases, g=gaps: g
    )
    found = claims_expert_loads.scopes_agree(run_of('demons_lbl'), **asked)
    assert found.passed == right and 'step of 4' in found.caveat


def test_the_busiest_rank():
  loads = [6, 0, 1, 1]
  assert claims_expert_loads.busiest(loads, 2) == 6 / 4
  assert claims_expert_loads.busiest(loads, 2, [0]) == (1 + 1 + 3) / 4
  assert claims_expert_loads.busiest(loads, 2, [0, 2, 3]) == 1


def test_zipf_stragglers():
  right, wrong = claim_cases.falls('hecate', 'coldest')
  for row in (
    '1.38 1.30 1.24 1.19 1.17 1.16',
    '2.33 1.72 1.46 1.29 1.18 1.11',
    '3.82 2.02 1.54 1.26 1.12 1.05',
  ):
    assert row in right.caveat
  assert 'NOT fall' in wrong.measured
  assert right.verdict == 'direction only'  # 3.63 x at the last s alone
  how = given(hecate, 'zipf_stragglers') | dict(falls=1.2)
  assert not claims_expert_loads.zipf_stragglers(None, **how).passed


def test_what_is_gathered_and_sent_is_seen(monkeypatch, float64):
  w, x, ids, mix = claims_experts._drawn(6)
  plan = expert.DispatchPlan(8, ('tensor',))
  run = lambda rows, weights, multiply: multiply(rows, weights[0], 1)

  def local(w, hot):
    given = [w], x, jnp.asarray(ids), mix, jnp.ones(6, bool), plan
    return expert.dispatch(run, *given, hot)[0]

  def watched(*hots):
    mesh, split = experiment.mesh_of('tensor=2'), jax.P('tensor')
    with claims_experts._watched() as found, jax.set_mesh(mesh):
      call = jax.shard_map(
        local, in_specs=(split, jax.P()), out_specs=split, check_vma=False
      )
      mine = jax.device_put(w, jax.NamedSharding(mesh, split))
      for hot in hots:
        jax.block_until_ready(jax.jit(call)(mine, jnp.array(hot)))
    return found

  assert watched([2, 0], [1, 3]) == ({(0, 2), (1, 3)}, {0})

  def sends_all(run, weights, x, ids, mix, valid, plan, hot):
    keep = jnp.broadcast_to(valid[:, None], ids.shape)
    return expert._padded(run, weights, x, ids, mix, keep, plan), 0

  monkeypatch.setattr(expert, 'dispatch', sends_all)
  gathered, sent = watched([2, 0])
  assert gathered == {(0, 2)} and sent == {int(np.isin(ids, [0, 2]).sum())}


def test_an_mlp_beside_the_experts():
  one = {'model.num_layers': 1, 'model.experts.pattern': 'E'}
  _, wrong = claim_cases.falls('deepspeed_moe', 'experts_alone', one)
  assert float(wrong.measured) > 0.1


def test_devices_of_tasks():
  how = given(se_moe, 'elastic_tasks')
  assert claims_expert_loads.elastic_tasks(None, **how).passed
  with claims_expert_loads.evenly():
    assert not claims_expert_loads.elastic_tasks(None, **how).passed


def test_mutual_information():
  found = claims_expert_training.mutual_information
  apart = {'a': [[4, 0]], 'b': [[0, 9]]}
  assert found(apart) == 1.0  # one bit: a domain has an expert of its own
  assert found({'a': [[1, 3]], 'b': [[2, 6]]}) == 0.0
  p = 0.75
  entropy = -p * np.log2(p) - (1 - p) * np.log2(1 - p)
  both = {'a': [[3, 1], [4, 0]], 'b': [[1, 3], [0, 4]]}
  assert found(both) == pytest.approx((1 - entropy + 1) / 2)


def test_variants_are_compared(monkeypatch, tmp_path):
  bits = {'a-0': 2.0, 'a-1': 2.2, 'a-2': 2.1}
  bits |= {'b-0': 2.3, 'b-1': 2.4, 'b-2': 2.35}  # 0.25 +-0.029 more
  claim_cases.trains_to(monkeypatch, bits)
  run = run_of('demons_lbl', folder=tmp_path)
  given = dict(variants={'a': {}, 'b': {}}, seeds=[0, 1, 2])
  better = lambda *pair, by=0.0: claims_expert_training.learn_better(
    run, better=[pair], by=by, shares=[], **given
  )
  assert better('a', 'b', by=0.19).verdict == 'reproduced'
  assert not better('a', 'b', by=0.2).passed
  assert better('b', 'a').verdict == 'opposite'
  assert not better('a', 'a').passed  # equal to the bit


def test_a_share_of_a_gain_is_judged(monkeypatch, tmp_path):
  """low - high is 0.4 in each seed, low - mine 0.3, 0.28 and 0.32."""
  rows = {'low': [2.4, 2.5, 2.6], 'high': [2.0, 2.1, 2.2]}
  rows['mine'] = [2.1, 2.22, 2.28]
  bits = {f'{n}-{i}': x for n, row in rows.items() for i, x in enumerate(row)}
  claim_cases.trains_to(monkeypatch, bits)
  check = lambda share, *names: claims_expert_training.learn_better(
    run_of('demons_lbl', folder=tmp_path),
    variants={name: {} for name in rows}, seeds=[0, 1, 2], better=[], by=0.0,
    shares=[[*names, share]],
  )  # fmt: skip
  found = check(0.5, 'mine', 'low', 'high')
  assert found.passed and found.measured.startswith('0.1000 +-')
  assert found.expected == 'mine gains over low 0.5 of what high does'
  assert not check(0.75, 'mine', 'low', 'high').passed
  assert not check(0.5, 'low', 'low', 'high').passed


def test_experts_specialise_more_or_less(monkeypatch, tmp_path):
  both = {name: 2.0 for name in ('a-0', 'a-1', 'a-2', 'b-0', 'b-1', 'b-2')}
  claim_cases.trains_to(monkeypatch, both)
  apart = {'x': [[9, 1]], 'y': [[1, 9]]}
  alike = {'x': [[6, 4]], 'y': [[4, 6]]}
  loads = iter([apart] * 3 + [alike] * 3)  # 0.531 and 0.029 bits
  monkeypatch.setattr(
    claims_expert_training, 'domain_loads',
    lambda *given: {d: np.array(x) for d, x in next(loads).items()},
  )  # fmt: skip
  monkeypatch.setattr(ablation.Training, 'opened', (None, None))
  run = run_of('demons_lbl', folder=tmp_path)
  check = lambda times, *pair: claims_expert_training.specialise(
    run, variants={'a': {}, 'b': {}}, seeds=[0, 1, 2], more=pair, times=times
  )
  found = check(18, 'a', 'b')
  assert found.passed and found.verdict == 'reproduced'
  assert '18.3 18.3 18.3' in found.caveat and 'a 0.5310' in found.caveat
  assert check(19, 'a', 'b').verdict == 'direction only'
  assert check(1, 'b', 'a').verdict == 'opposite'
  assert (tmp_path / claims_expert_training.PICTURE).exists()


def test_recorded_stragglers(monkeypatch):
  rows = {step: {'experts/load/a': [[6, 0, 1, 1]]} for step in (1, 2)}
  training = types.SimpleNamespace(folder=None, record=dict(cpu_seconds=1))
  monkeypatch.setattr(
    ablation, 'trained', lambda *given: {'loads': [training] * 3}
  )
  monkeypatch.setattr(metrics, 'read', lambda folder: rows)
  monkeypatch.setattr(plot_experts, 'draw', lambda rows, path, title: path)
  check = lambda falls: claims_expert_loads.recorded_stragglers(
    run_of('hecate'), seeds=[0] * 3, steps=2, ranks=2, hots=[0, 1], falls=falls
  )
  found = check(1.19)
  assert found.passed and found.verdict == 'reproduced'
  assert '0 hot 1.5000' in found.caveat and '1 hot 1.2500' in found.caveat
  assert 'falls 1.20 1.20 1.20 x' in found.caveat
  assert not check(1.21).passed


def test_a_compiled_step_is_judged(monkeypatch):
  def report(config, mesh, topology):
    peak, total = sizes[config.model.experts.region]
    sent = types.SimpleNamespace(axes=('data',), total=total * 10**9)
    return types.SimpleNamespace(
      programs={'gradient': types.SimpleNamespace(collectives=[sent])},
      peak=lambda name: peak * 2**30, worst='gradient', fits=peak < 4,
      parameters=2e9, cpu_seconds=1,
    )  # fmt: skip

  monkeypatch.setattr(target_compile, 'compile_config', report)

  def check(**given):
    sizes.update(given)
    return claims_expert_messages.compiled(
      run_of('se_moe'), fields={}, mesh='data=8', topology='v5p:2x2x1',
      regions=['data', 'tensor'],
    )  # fmt: skip

  sizes = {}
  found = check(data=(3, 20), tensor=(2, 10))
  assert found.passed and found.measured == '3.0 GiB 20.0 GB | 2.0 GiB 10.0 GB'
  assert not check(tensor=(3, 10)).passed
  assert not check(tensor=(2, 20)).passed
  assert not check(tensor=(2, 10), data=(5, 20)).passed  # does not fit
