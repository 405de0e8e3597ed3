"""What the tests of claims share: `import claim_cases`."""

import types

import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.sharding.meter import aot
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.claims import papers
from paraxis.train.plot import losses as plot
from paraxis.train.run import evaluate


def run_of(name='', changes=(), folder='nowhere'):
  """claims.Run of a config that ships with paraxis, or of the defaults.

  Args:
    changes: {'section.field': value}. folder: the workdir.
  """
  config = schema.view(command_line.load(name)) if name else schema.Config()
  config = experiment.fields(config, dict(changes))
  return claims.Run(config, folder, say=lambda line: None)


def small(name, **model):
  """`run_of` a config whose sizes are small; model: fields of schema.Model."""
  sizes = dict(d_model=32, d_ff=64, num_heads=4, num_layers=2, vocab_size=64)
  step = {
    'data.sequence_length': 16, 'train.batch_size': 8, 'train.microbatches': 1
  }  # fmt: skip
  return run_of(name, experiment.under('model', sizes | model) | step)


def trains_to(monkeypatch, bits):
  """Trainings end at once -> list that their configurations are added to.

  Args:
    bits: {folder's name: held-out bits per byte}; 'VARIANT-SEED'.
  """
  seen = []

  def finish(config, folder, say, **how):
    seen.append(config)
    return evaluate.Evaluation(bits[folder.name], {}, 10)

  monkeypatch.setattr(claims, 'finish', finish)
  monkeypatch.setattr(plot, 'draw', lambda folders, path: path)
  return seen


def holds_until(module, name, wrong, claim, run=None, **given):
  """Asserts that a claim holds, and fails once `module.name` is `wrong`.

  Returns:
    The two harness.Outcomes.
  """
  right = claim(run, **given)
  assert right.passed, right
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(module, name, wrong)
    found = claim(run, **given)
  assert not found.passed, found
  return right, found


def falls(name, knockout, changes=(), **given):
  """Asserts that a claim of a config holds, and fails by its knock-out.

  Args:
    changes: as for `run_of`. given: parameters in place of the claim's.

  Returns:
    The two harness.Outcomes.
  """
  module, run = command_line.load_module(name), run_of(name, changes)
  found = {k.name: k for k in knockouts.of(module, name)}[knockout]
  claim = {c.name: c for c in papers.claims(module, name)}[found.claim]
  claim = claim._replace(parameters=claim.parameters | given)
  right = claims.outcome_of(run, claim)
  assert right.passed, right
  wrong = knockouts.without(run, found, claim)
  assert wrong.passed is False, wrong
  return right, wrong


def switched_off(*kinds):
  """[(path, knock-out, its claim)] of all configs' claims of these kinds."""
  found = []
  for path in command_line.papers():
    module = command_line.load_module(str(path))
    known = {c.name: c for c in papers.claims(module, path.name)}
    found += [
      pytest.param(path, off, known[off.claim], id=f'{path.stem}-{off.name}')
      for off in knockouts.of(module, path.name)
      if known[off.claim].kind in kinds
    ]
  return found


def loses(path, off, claim, folder):
  """Asserts that a claim of a config fails by a papers.Knockout."""
  outcome = knockouts.without(run_of(str(path), (), folder / 'run'), off, claim)
  assert outcome.passed is False, (off.name, outcome)


def compiled_to(monkeypatch, text, **memory):
  """Programs of experiment.for_chip have this text and this aot.Memory."""
  program = types.SimpleNamespace(as_text=lambda: text)
  held = types.SimpleNamespace(**memory)
  monkeypatch.setattr(experiment, 'for_chip', lambda *given: program)
  monkeypatch.setattr(aot, 'memory', lambda program: held)
