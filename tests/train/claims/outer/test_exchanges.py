"""Claims about exchanges fail where a sum is read early, a clipped number is
dropped, replicas wait, or a message is of all of them."""

import json

import claim_cases
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.train.claims import ablation
from paraxis.train.claims import families
from paraxis.train.claims import knockouts
from paraxis.train.claims import papers
from paraxis.train.claims.outer import exchanges
from paraxis.train.claims.outer import learning

SMALL = {
  'model.d_model': 16, 'model.d_ff': 32, 'model.vocab_size': 64,
  'data.sequence_length': 16,
}  # fmt: skip
SHORT = {'outer.period': 3, 'outer.delay': 3}


def test_a_sum_that_is_read_early_is_seen():
  check = lambda changes: exchanges.unread(
    claim_cases.run_of('co2', SMALL | changes), meshes=['replica=2'], steps=3
  )
  right = check(SHORT)
  assert right.passed and right.measured == 'after 3'
  wrong = check(SHORT | {'outer.delay': 2, 'outer.penalty': False})
  assert not wrong.passed and wrong.measured == 'after 2'


def test_a_clipped_momentum_that_is_dropped_is_seen():
  run = claim_cases.run_of('co2', SMALL | SHORT)
  claim_cases.holds_until(
    exchanges.outer, 'clipped', lambda momentum, most: momentum,
    exchanges.clips, run, mesh='replica=2', most=0.002,
  )  # fmt: skip
  assert not exchanges.clips(run, mesh='replica=2', most=100.0).passed  # none


def test_replicas_that_exchange_by_sums_are_seen():
  check = lambda changes: exchanges.by_twos(
    claim_cases.run_of('noloco', SMALL | changes), mesh='replica=4'
  )
  assert check({}).passed
  found = check({'outer.exchange': 'mean', 'outer.pull': 0.0})
  assert not found.passed and found.measured.startswith('all-gather, reduce-sc')


def test_one_fragment_has_the_whole_peak():
  run = claim_cases.run_of('streaming_diloco', SMALL)
  check = lambda fragments: exchanges.peak(
    run, mesh='replica=2', within=0.7,
    changes={'model.num_layers': 4, 'outer.fragments': fragments},
  )  # fmt: skip
  assert check(2).passed
  assert check(1).measured.startswith('1.000, 1.') and not check(1).passed


def test_a_fragment_that_is_never_sent_is_seen(monkeypatch):
  """Without it the most of one step is less, not more."""
  right = exchanges.received

  def first(*given):
    sent = right(*given)
    return {name: x for name, x in sent.items() if name != 'send of fragment 1'}

  monkeypatch.setattr(exchanges, 'received', first)
  found = exchanges.peak(
    claim_cases.run_of('streaming_diloco', SMALL),
    mesh='replica=2', within=1.0, changes={'model.num_layers': 4},
  )  # fmt: skip
  assert not found.passed and ', 0.' in found.measured, found


def without_ends(plan, tree, p, right=exchanges.outer.Plan.of):
  return {q: x for q, x in right(plan, tree, p).items() if q in plan.stacked}


@pytest.mark.parametrize('name, fewer', [
  ('diloco', 50), ('streaming_diloco', 300), ('noloco', 39)
])  # fmt: skip
def test_parameters_that_are_never_sent_are_seen(name, fewer):
  """Fewer bytes are no proof where the embedding stays at home."""
  run = claim_cases.run_of(name, SMALL)
  _, wrong = claim_cases.holds_until(
    exchanges.outer.Plan, 'of', without_ends, exchanges.messages, run,
    meshes=['replica=2'], fewer=fewer,
  )  # fmt: skip
  assert ' 0.' in wrong.measured


def test_waiting_is_of_the_schedule():
  """By hand: steps of 1 second, a message of 3."""
  waits = lambda steps, message, **fields: exchanges.waits(
    schema.Outer('mean', 4, **fields), [1.0] * steps, message
  )
  assert waits(8, 3.0) == (6.0, 6.0)  # at once: all of both
  assert waits(8, 3.0, delay=2) == (1.0, 6.0)  # the second is not due yet
  assert waits(10, 3.0, delay=2) == (2.0, 6.0)
  assert waits(12, 3.0, delay=4) == (0.0, 9.0)
  assert waits(12, 6.0, delay=4) == (4.0, 18.0)
  # Two fragments at once: the second message waits for the first.
  assert waits(8, 3.0, delay=3, fragments=2)[0] == 1.0


BITS = {'plain': 2.0, 'mean': 2.1, 'good': 2.01, 'bad': 2.3}


@pytest.mark.parametrize('warm', [0, 5])
def test_families_are_compared_seed_by_seed(monkeypatch, tmp_path, warm):
  """The best of some; trainings lie in the folder that configs share."""
  more = '_warm' if warm else ''
  bits = {f'warm-{seed}': 9.0 for seed in range(3)}
  for name, n in BITS.items():
    bits |= {f'{name}{more}-{seed}': n + 0.001 * seed for seed in range(3)}
  seen = claim_cases.trains_to(monkeypatch, bits)
  monkeypatch.setattr(families, '_draw', lambda found, rows, path: path)
  monkeypatch.setattr(families.metrics, 'read', lambda folder: {})
  monkeypatch.setattr(learning.origin, 'Run', lambda text: text)
  run = claim_cases.run_of('diloco', {}, tmp_path / 'own')
  loops = {
    'plain': {}, 'mean': dict(exchange='mean', period=5),
    'good': dict(exchange='mean', period=7),
    'bad': dict(exchange='pairs', period=5),
  }  # fmt: skip
  check = lambda within: learning.above(
    run, families=loops, seeds=[0, 1, 2], warm=warm,
    compare=[[['bad', 'good'], 'plain', within], [['mean'], 'bad', 0.0]],
  )  # fmt: skip
  right = check(0.01)
  assert right.passed and 'good above plain' in right.expected, right
  assert len(seen) == 12 + 3 * bool(warm)
  assert (tmp_path / 'replicas' / f'good{more}-0').exists()
  wrong = check(0.002)
  assert not wrong.passed and wrong.verdict == 'not reproduced'


@pytest.mark.parametrize(
  'config, knockout, name, other, file',
  [
    ('co2', 'no_penalty', 'CO2, switched off', 'CO2, no penalty', 'exchanges'),
    ('noloco', 'unpaired', 'NoLoCo, alone', 'NoLoCo', 'equations'),
  ],
)
def test_what_a_knock_out_replaces_is_in_the_key(
  config, knockout, name, other, file, monkeypatch, tmp_path
):
  """Of the training that it changes; what is compared is trained once."""
  folder = lambda label: label.replace(', ', '_').replace(' ', '_')
  module = command_line.load_module(config)
  off = {k.name: k for k in knockouts.of(module, '')}[knockout]
  claim = {c.name: c for c in papers.claims(module, '')}[off.claim]
  own = claim.parameters['families']
  assert name in off.change['families'] and name not in own
  others = {n: x for n, x in off.change['families'].items() if n != name}
  bits = {
    f'{folder(label)}-{seed}': 2.0 + 0.01 * seed + (label == name)
    for label in (*own, name)
    for seed in range(3)
  }
  seen = claim_cases.trains_to(monkeypatch, bits)
  monkeypatch.setattr(families, '_draw', lambda found, rows, path: path)
  monkeypatch.setattr(families.metrics, 'read', lambda folder: {})
  run = claim_cases.run_of(config, {}, tmp_path / 'own')
  learning.above(run, **claim.parameters | dict(families=own))
  assert others.keys() <= own.keys() and len(seen) == 3 * len(own)
  assert not knockouts.without(run, off, claim).passed
  assert len(seen) == 3 * len(own) + 3
  files = lambda label: json.loads(
    (tmp_path / 'replicas' / f'{folder(label)}-0' / ablation.RECORD).read_text()
  )['parts']['file']
  replaces = f'train/claims/outer/{file}.py'
  assert replaces in files(name) and replaces not in files(other)


def test_replicas_that_drift_apart_are_seen(monkeypatch, tmp_path):
  rows = {480: 0.2, 1000: 0.1}
  bits = {f'NoLoCo-{seed}': 2.0 for seed in range(3)}
  claim_cases.trains_to(monkeypatch, bits)
  monkeypatch.setattr(families, '_draw', lambda found, rows, path: path)
  monkeypatch.setattr(families.metrics, 'read', lambda folder: {})
  read = lambda folder: {t: {'eval/spread': x} for t, x in rows.items()}
  monkeypatch.setattr(learning.metrics, 'read', read)
  run = claim_cases.run_of('noloco', {}, tmp_path / 'own')
  check = lambda early=480: learning.spread(
    run, families={'NoLoCo': dict(exchange='pairs', period=40)},
    seeds=[0, 1, 2], name='NoLoCo', early=early,
  )  # fmt: skip
  assert check().passed
  rows[1000] = 0.3
  assert check().verdict == 'opposite'
  with support.refused('500 and 1000', 'outer.period=40'):
    check(500)


def test_bytes_are_those_of_a_period():
  run = claim_cases.run_of('diloco', SMALL)
  check = lambda fewer: exchanges.messages(
    run, meshes=['replica=2,tensor=2'], fewer=fewer
  )
  right = check(50)
  assert right.passed and right.measured.startswith('0 in a step, 51.')
  assert not check(60).passed
  often = claim_cases.run_of('diloco', SMALL | {'outer.period': 5})
  found = exchanges.messages(often, meshes=['replica=2,tensor=2'], fewer=50)
  assert not found.passed and found.measured.startswith('0 in a step, 5.')
