"""Claims about memory hold, and fail when something is wrong."""

import claim_cases
import pytest
import support

from paraxis.configs import frontier
from paraxis.configs.base import errors
from paraxis.sharding import rules
from paraxis.train.certify import check as check_lib
from paraxis.train.claims import experiment
from paraxis.train.claims.layouts import memory as claims_memory

run_of = claim_cases.small


def test_bytes_held_by_stage():
  check = lambda expected: claims_memory.zero_memory(
    run_of('zero'), mesh='data=4', bytes_per_parameter=expected, within=0.1
  )
  expected = [16, 10, 7, 4]
  right = check(expected)
  assert right.passed and right.measured.startswith('16.00 10.00 7.00 4.0')
  assert 'sums over microbatches 4.00 4.00 1.00 1.00' in right.caveat
  assert 'leave the step as 4.00 1.00 1.00 1.00' in right.caveat
  assert 'stage 3: layers/attention_norm/scale, layers/mlp' in right.caveat
  for stage in range(4):
    wrong = [v + (i == stage) for i, v in enumerate(expected)]
    assert not check(wrong).passed


def test_sums_that_stay_whole_are_seen(monkeypatch):
  monkeypatch.setattr(rules, 'SUMS', 3)
  run = run_of('zero', d_ff=32)
  parts = {'train.microbatches': 2}  # stage 2
  row, _ = claims_memory._held(*experiment.on(run.config, 'data=4', parts))
  nats = 2 * 4  # of both microbatches
  assert row['sums'] == row['parameters'] + nats == 4 * row['gradients'] + nats


def test_the_papers_table_in_small():
  """Vocabulary 64, width 32, mlp 64, two layers, on 8 devices."""
  matrices = 2 * 64 * 32 + 2 * (4 * 32 * 32 + 2 * 32 * 64)
  whole = 5 * 32  # scales of norms, sharded once they are no parameters
  n, all_ = 8, matrices + whole
  expected = [
    16 * all_,
    4 * all_ + 12 * all_ / n,
    2 * all_ + 14 * all_ / n,
    2 * (matrices / n + whole) + 14 * all_ / n,
  ]
  check = lambda expected: claims_memory.zero_published(
    run_of('zero'),
    model={},
    devices=n,
    widths=[2, 2, 12],
    gigabytes=[e / 1e9 for e in expected],
    within=1e-9,
  )
  right = check(expected)
  assert right.passed and '0.00B parameters' in right.caveat
  assert not check([*expected[:3], expected[3] * 1.01]).passed


@support.compiles('tpu')
def test_what_a_tpu_holds():
  model = {
    'model.d_model': 256, 'model.d_ff': 512, 'model.num_heads': 2,
    'model.num_layers': 3,
  }  # fmt: skip
  check = lambda within: claims_memory.zero_compiled(
    run_of('zero'), model=model, topologies=['v5p:2x2x1'], within=within
  )
  right = check(0.05)
  assert right.passed and 'v5p:2x2x1' in right.caveat
  assert not check(1e-6).passed  # norms are whole at stage 3


BASE = {'mesh.data': 4, 'train.batch_size': 64, 'mesh.zero': 0}
HALVES = {'mesh.data': 2, 'mesh.tensor': 2}


def ratios(steps, **found):
  return claims_memory.predicted_ratios(
    run_of('frontier'),
    models={'small': {}, 'wide': {'model.d_ff': 128}},
    base=BASE,
    steps=steps,
    ratios=found,
    within=0.1,
  )


def test_predicted_ratios():
  steps = [{'mesh.zero': 1}, HALVES]
  right = ratios(steps, optimizer=[1 / 4, 1 / 2], parameters=[1, 1 / 2])
  assert right.passed and 'small optimizer' in right.caveat
  assert (
    'wide optimizer' in right.caveat and '-> mesh.zero=1 ->' in right.caveat
  )
  assert not ratios(steps, optimizer=[1 / 4, 1 / 4]).passed
  assert not ratios(steps, parameters=[1 / 4, 1 / 2]).passed
  # Received over data: half the parameters, and half as much.
  assert ratios([HALVES], data=[1 / 3]).passed


def test_predicted_at_most():
  check = lambda ratio: claims_memory.predicted_at_most(
    run_of('frontier'),
    base=BASE | {'train.remat': 'none'},
    step={'train.remat': 'full'},
    quantity='activations',
    ratio=ratio,
  )
  right = check(0.5)
  assert right.passed and 0 < float(right.measured) < 0.5
  assert not check(float(right.measured) / 2).passed


def test_predicted_fits():
  check = lambda **fits: claims_memory.predicted_fits(
    run_of('frontier'),
    models={'small': {}, 'large': frontier.MODELS['1T']},
    layouts=[{'mesh.data': 8, 'mesh.zero': stage} for stage in (0, 3)],
    memory=5e12,
    fits=fits,
  )
  right = dict(small=[True, True], large=[False, True])
  assert check(**right).passed
  wrong = check(**right | dict(large=[True, True]))
  assert not wrong.passed and wrong.measured == 'small yes yes; large no yes'


def test_nothing_is_claimed_of_what_cannot_be_predicted(monkeypatch):
  real = check_lib.check
  monkeypatch.setattr(
    claims_memory, '_report', lambda c: real(c)._replace(unknown=['a sort'])
  )
  with pytest.raises(errors.UserError, match='a sort: not predicted'):
    ratios([{'mesh.zero': 1}], optimizer=[1 / 4])


def test_hosts_of_an_axis():
  meshes = ['data=8,tensor=2', 'stage=2,data=2,tensor=4', 'data=2,tensor=8']
  check = lambda crosses, axis='tensor': claims_memory.axis_within_host(
    None, axis=axis, host=4, meshes=meshes, crosses=crosses
  )
  assert check([1, 1, 2]).passed and not check([1, 1, 1]).passed
  assert check([4, 2, 2], 'data').passed
  with claims_memory.tensor_outermost():
    found = check([1, 1, 2])
  assert not found.passed and found.measured == '2 4 4'
