"""`paraxis reproduce NAME --knockout`: without its mechanism a claim must fail.

A proof that cannot be lost proves nothing. A config names beside its claims how
to switch a mechanism off, or how to replace it by what it improves on, and the
claim that must then FAIL by its own verdict:

    knockouts() -> [(name, claim's name, change), ...]

    {'model.experts.hot': 0}    a field of the config that the check is given
    {'bits_per_byte': 1.0}      a parameter of the claim's check
    a function                  without arguments: the context manager in which
                                the claim is checked; `patched` makes most;
                                a fourth entry may then be data as above

papers.knockouts says what is well formed. Such functions stand beside the
claim's check (train/claims/<mechanism>/), that of experiment.py's check here: a
claim that layouts equal one device has it without a row (`of`). A check that
stops with an error has not failed: the error is shown, and ends the command
with its own exit code.
"""

from collections.abc import Iterator
import contextlib
import itertools
import sys
import textwrap
from typing import Any

import jax

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import papers
from paraxis.train.claims import sources


def forget():
  """Drops programs and results that caches of jax and of paraxis keep."""
  jax.clear_caches()
  for name, module in list(sys.modules.items()):
    if name.startswith('paraxis.'):
      for value in list(vars(module).values()):
        if hasattr(value, 'cache_clear') and hasattr(value, 'cache_info'):
          value.cache_clear()


@contextlib.contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
  """`owner.name` (of a dict: owner[name]) is another object for a while.

  Nothing that was compiled or kept before is used within, nothing that was
  compiled or kept within is used afterwards. Only what is looked up in `owner`
  when it is used is replaced.

  Raises:
    UserError: there is nothing of that name to replace.
  """
  held = owner if isinstance(owner, dict) else vars(owner)
  if name not in held:
    raise errors.UserError(f'a knock-out replaces {name!r}, which is gone.')
  before = held[name]
  put = lambda value: (
    owner.__setitem__(name, value)
    if isinstance(owner, dict)
    else setattr(owner, name, value)
  )
  forget()
  put(replacement)
  try:
    yield
  finally:
    put(before)
    forget()


def one_parameter_wrong() -> contextlib.AbstractContextManager[None]:
  """Knock-out of `experiment.equals_one_device`: on a mesh the first of the
  parameters is a millionth too large; on one device it is right."""
  right = trial.Runner.start

  def start(runner, params):
    if len(runner.devices) > 1:
      first = min(params)
      params = params | {first: params[first] * (1 + 1e-6)}
    return right(runner, params)

  return patched(trial.Runner, 'start', start)


RIGHT = 'right_parameters'


def of(module: Any, where: Any) -> list[papers.Knockout]:
  """The knock-outs of a loaded config: its own, and those that need no row.

  A claim of `experiment.equals_one_device` that none of its own reaches has
  `one_parameter_wrong`, in the last of its cases: `RIGHT`, RIGHT_2, ...

  Raises:
    UserError: one of its own is malformed.
  """
  found = papers.knockouts(module, where)
  taken = {knockout.name for knockout in found}
  reached = {knockout.claim for knockout in found}
  each = itertools.chain([RIGHT], (f'{RIGHT}_{i}' for i in itertools.count(2)))
  names = (name for name in each if name not in taken)
  for claim in papers.claims(module, where):
    layouts = claim.check is experiment.equals_one_device and not claim.admits
    if layouts and claim.name not in reached:
      *others, last = claim.parameters['cases']
      change = {'cases': [last]} if others else {}
      off = one_parameter_wrong
      found.append(papers.Knockout(next(names), claim.name, change, off))
  return found


def uncovered(module: Any, where: Any) -> list[papers.Claim]:
  """The claims that hold and that no knock-out of a loaded config reaches."""
  reached = {knockout.claim for knockout in of(module, where)}
  found = papers.claims(module, where)
  return [c for c in found if not c.admits and c.name not in reached]


def without(run: claims.Run, knockout: papers.Knockout, claim: papers.Claim):
  """harness.Outcome of the claim, its mechanism switched off.

  What it trains lies in a folder of its own, beside the run's.

  Raises:
    UserError: the change changes no field; what the check raises.
  """
  change = knockout.change
  fields = {name: x for name, x in change.items() if '.' in name}
  given = {name: x for name, x in change.items() if '.' not in name}
  config = experiment.fields(run.config, fields)
  if fields and config == run.config:
    raise errors.UserError(
      f'knock-out {knockout.name}: the config has {fields} already.'
    )
  other = run.other(config, knockout.name)
  # What is trained without the mechanism depends on what replaces it.
  other.replaced = sources.of_claims(knockout.off)
  with knockout.off():
    return claims.outcome_of(
      other, claim._replace(parameters=claim.parameters | given)
    )


def chosen(found: list, name: str, where: str) -> list:
  """The knock-outs of that name, or all; UserError: there is none."""
  if name == command_line.ALL:
    return found
  names = [knockout.name for knockout in found]
  if name not in names:
    raise errors.UserError(
      f'{where} has no knock-out {name!r}; there are {", ".join(names)}.'
      + schema.suggest(name, names)
    )
  return [found[names.index(name)]]


def sentence(name: str, outcome: claims.Outcome) -> str:
  """Whether the claim fell, in words."""
  if outcome.passed is None:
    return f'SKIPPED ({outcome.caveat})'
  if outcome.passed:
    return 'STILL HOLDS: the claim proves nothing'
  return f'FAILS without {name}: as it must'


def unproven(found: list) -> str:
  """The claims of `uncovered` in a few lines of 80 columns."""
  names = '; '.join(f'{claim.kind} {claim.name}' for claim in found)
  text = f'claims without a knock-out ({len(found)}): {names}'
  return textwrap.fill(text, 80, subsequent_indent='  ')


def reproduce(
  name, which=command_line.ALL, workdir='', as_json=False, fresh=False
):
  """Runs a config's knock-outs -> exit code 0 if every claim of theirs fails.

  What cannot be checked here is skipped, with its reason. 1: one still holds;
  77: all are skipped.

  Args:
    name: a config that ships with paraxis, or a file.
    which: a knock-out's name, or command_line.ALL.
    workdir, fresh: as for harness.run_of.
    as_json: print one JSON document.

  Raises:
    UserError: no such config or knock-out; one that is malformed.
  """
  path = command_line.find_config(name)
  module = command_line.load_module(name)
  known = {claim.name: claim for claim in papers.claims(module, path)}
  rows = chosen(of(module, path), which, path.name)
  say = claims.speaker(as_json)
  run = claims.run_of(name, workdir, say, fresh, module)
  shown, found = [], []
  for knockout in rows:
    claim = known[knockout.claim]
    say(f'without {knockout.name}: {claim.kind}: {claim.name}')
    outcome = without(run, knockout, claim)
    words = sentence(knockout.name, outcome)
    say(f'  expected {outcome.expected}, measured {outcome.measured}')
    say(f'  {words}')
    found.append(outcome.passed)
    shown.append(
      dict(knockout=knockout.name, result=words) | claims.row(claim, outcome)
    )
  if as_json:
    claims.print_json(path.stem, 'knockouts', shown)
  held = found.count(True)
  both = zip(rows, found, strict=True)
  skipped = [knockout.name for knockout, passed in both if passed is None]
  say(
    f'{found.count(False)} of {len(found)} claims fail without their mechanism'
    + (f', {held} STILL HOLD' if held else '')
    + (f', {len(skipped)} SKIPPED: {", ".join(skipped)}' if skipped else '')
  )
  alone = uncovered(module, path)
  if alone:
    say(unproven(alone))
  if held:
    return errors.EXIT_DIFFERENT
  return errors.EXIT_OK if False in found else errors.EXIT_SKIPPED
