"""Claims about cut rows fail where a piece is no piece, or costs no less."""

import claim_cases
import numpy as np
import pytest

from paraxis.configs.base import command_line
from paraxis.models import batch as batch_lib
from paraxis.train import loop
from paraxis.train.claims import experiment
from paraxis.train.claims import families
from paraxis.train.claims import knockouts
from paraxis.train.claims import papers
from paraxis.train.claims.attention import shapes
from paraxis.train.data import shape_cycle

SMALL = {
  'model.num_layers': 1,
  'model.d_model': 16, 'model.d_ff': 32, 'model.vocab_size': 64,
  'model.attention_scale': 0.5, 'data.tokenizer': 'bytes',
}  # fmt: skip


def test_a_piece_of_other_tokens_is_seen():
  given = dict(mesh='data=2,context=2')
  claim_cases.falls('multigrid', 'strided', SMALL, **given)


def test_operations_are_those_of_every_shape():
  """Of the claim's own cycle: by hand, from rows of each length."""
  module = command_line.load_module('multigrid')
  run = claim_cases.run_of('multigrid')
  of = lambda **more: experiment.fields(
    run.config, {f'{k.replace("__", ".")}': v for k, v in more.items()}
  )
  whole = {
    k: loop.cost(of(data__sequence_length=2048 // k, train__shape_cycle=''))
    for k in (8, 1)
  }
  cut = of(train__shape_cycle='8:3,1:1', train__steps=8)
  mean = (3 * whole[8].flops + whole[1].flops) / 4
  assert loop.cost(cut).flops == pytest.approx(mean)
  assert shapes._work(cut) == pytest.approx(mean * 8 * 2048)
  grown = of(
    train__shape_cycle='8:1,1', train__steps=3, train__batch_size=4,
    train__batch_ramp='2:1:1',
  )  # fmt: skip
  wanted = (2 * whole[8].flops + 7 * whole[1].flops) / 9
  assert loop.cost(grown).flops == pytest.approx(wanted)
  cycle, constant, fewer = (
    shapes._work(experiment.fields(run.config, f))
    for f in module.FAMILIES.values()
  )
  assert cycle < 0.8 * constant and abs(fewer / cycle - 1) < 0.01


def test_a_cut_row_of_other_targets_is_trained_apart(monkeypatch, tmp_path):
  """What the knock-out feeds, and where: not among the claim's trainings."""
  seen, text = {}, np.arange(8)[None]
  batch = batch_lib.Batch(text, text + 1, *[np.ones((1, 8), int)] * 3, 8)

  def train(run, configs, seeds, folder):
    targets = [shape_cycle.fold(batch, k).targets.ravel() for k in (1, 2)]
    seen[run.results.name] = np.concatenate(targets).tolist()
    return {name: [2.0] * len(seeds) for name in configs}, 0.0

  monkeypatch.setattr(families, 'train', train)
  module = command_line.load_module('multigrid')
  claims = {c.name: c for c in papers.claims(module, '')}
  (off,) = (k for k in papers.knockouts(module, '') if 'targets' in k.name)
  run, claim = claim_cases.run_of('multigrid', (), tmp_path), claims[off.claim]
  knockouts.without(run, off, claim)
  claim.check(run, **claim.parameters)
  right, other = [1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 1, 2, 3, 4]
  assert seen == {
    f'{tmp_path.name}-other_targets': right + other, shapes.SHARED: 2 * right
  }  # fmt: skip


BITS = {'cut': 2.0, 'whole': 2.1, 'long': 2.3}


def test_operations_and_bits_are_judged(monkeypatch, tmp_path):
  bits = {
    f'{name}-{seed}': n + 0.01 * seed for name, n in BITS.items()
    for seed in range(3)
  }  # fmt: skip
  claim_cases.trains_to(monkeypatch, bits)
  monkeypatch.setattr(families, '_draw', lambda found, rows, path: path)
  monkeypatch.setattr(families.metrics, 'read', lambda folder: {})
  run = claim_cases.run_of('multigrid', {'train.shape_cycle': ''}, tmp_path)
  cycle = {'train.shape_cycle': '8:1,1:1'}
  check = lambda better, most=0.8: shapes.cheaper(
    run, families={'cut': cycle, 'whole': {}, 'long': {}}, fields={},
    seeds=[0, 1, 2], better=better, at_most={'cut': ['whole', most]},
  )  # fmt: skip
  right = check([['cut', 'whole', 0.0], ['whole', 'long', 0.1]])
  assert right.passed and 'operations cut' in right.caveat
  wrong = check([['long', 'whole', 0.0]])
  assert not wrong.passed and wrong.verdict == 'opposite'
  dear = check([['cut', 'whole', 0.0]], 0.5)
  assert not dear.passed and dear.verdict == 'not reproduced'
  assert dear.caveat.startswith('NOT fewer operations')


def test_seconds_of_whole_rows_are_no_fewer(monkeypatch):
  """Every program runs as often as its share of the steps says."""
  run = claim_cases.run_of('multigrid', SMALL | {'data.sequence_length': 64})
  calls = []

  def compile_step(name, function, variables, batch):
    del name, function, variables
    return lambda variables, batch: calls.append(batch.tokens.shape)

  def interleave(ways, rounds, clock):
    for way in ways.values():
      way()
    return {'cycle': [0.6], 'constant': [1.0]}

  monkeypatch.setattr(shapes.compiling, 'compile_step', compile_step)
  monkeypatch.setattr(shapes.bench_measure, 'interleave', interleave)
  check = lambda most: shapes.seconds(
    run, steps=4, rounds=1, at_most=most,
    families={
      'cycle': {'train.shape_cycle': '4:2,1:2', 'train.steps': 8},
      'constant': {'train.shape_cycle': '', 'train.steps': 8},
    },
  )  # fmt: skip
  assert check(0.9).passed and not check(0.5).passed
  assert calls[:8] == [(4, 16)] * 2 + [(1, 64)] * 2 + [(1, 64)] * 4
  assert shape_cycle.of(run.config).all(480) == [1, 2, 4, 8]
