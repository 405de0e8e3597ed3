"""Claims about the layouts of a step are judged as they should be.

Messages of a layer and of ZeRO are counted; all else is judged on numbers that
are given.
"""

import types

import claim_cases
import numpy as np

from paraxis.sharding import rules
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims.layouts import step as claims_layouts

ON = dict(mesh='tensor=4')
run_of = claim_cases.small


def test_volumes_of_zero(monkeypatch):
  check = lambda volumes, **model: claims_layouts.zero_volume(
    run_of('zero', **model), mesh='data=4', volumes=volumes, within=0.35
  )
  right = check([2, 2, 2, 3])
  assert right.passed and right.measured.startswith('2.00 2.00 2.00 2.')
  # Of two microbatches: one more scatter; two more gathers and one scatter.
  assert '2.00 2.00 3.00 5.' in right.caveat
  assert 'norm/scale' in right.caveat and 'mlp/up' not in right.caveat
  assert not check([2, 2, 3, 3]).passed and not check([2, 2, 2, 2]).passed
  # Never scattered, but all-reduced, cut and gathered: 3, as before ZeRO.
  monkeypatch.setattr(rules, 'GRADIENTS', 4)
  monkeypatch.setattr(rules, 'SUMS', 4)
  wrong = check([2, 2], d_ff=32)  # not a program that is kept
  assert not wrong.passed and wrong.measured == '2.00 3.00'


def test_trajectories_of_zero(monkeypatch):
  off = {}  # by stage: how far the steps of a mesh are from one device's

  class Steps:
    """In the place of trial.Runner: every number moves by one."""

    def __init__(self, config, devices):
      self.by = 1 + (off.get(config.mesh.zero, 0) if len(devices) > 1 else 0)

    def steps(self, params, batches):
      assert len(batches) == 3
      moved = {path: x + self.by for path, x in params.items()}
      return types.SimpleNamespace(params=moved)

  start = types.SimpleNamespace(params={'mlp/up': np.zeros(3)})
  monkeypatch.setattr(trial, 'Runner', Steps)
  monkeypatch.setattr(trial, 'reference', lambda *given: start)
  check = lambda: claims_layouts.zero_trajectories(
    run_of('zero'), mesh='data=4', stages=[1, 3], steps=3, within=1e-9
  )
  assert check().passed
  off[3] = 1e-6
  wrong = check()
  assert not wrong.passed and 'stage 1: 0e+00, stage 3: 1e-06' in wrong.caveat


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
  held = [64, 16_384]
  messages = lambda *given: [
    types.SimpleNamespace(result_bytes=n) for n in held
  ]
  monkeypatch.setattr(experiment, 'step_collectives', messages)
  check = lambda: claims_layouts.logits_stay(
    run_of('megatron', vocab_size=512), **ON
  )
  right = check()
  assert right.passed and 'explicit, sequence: 16,384' in right.caveat
  # 8 rows of 16 tokens, of 512 numbers of 4 bytes a quarter.
  held.append(8 * 16 * 512 * 4 // 4)
  wrong = check()
  assert not wrong.passed and wrong.caveat.count(f': {held[-1]:,}') == 3
