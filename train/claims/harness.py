"""`paraxis reproduce NAME`: runs the claims of a config and says PASS or FAIL.

Every public function below whose first argument is `run` is a check that a
config can name (train/claims/papers.py); its other arguments are the data that
the config gives. It returns an `Outcome`. A row of the table is the claim, its
kind, what is expected, the paper's number, what was measured, the verdict in
words and the caveat; one failed claim makes the exit code 1. A claim that needs
what is not installed (errors.MissingError) is SKIPPED, with the reason. A claim
of the paper that fails as the config's header admits is a MISS, no failure; an
outcome that is not `sound` is one, whatever the header admits.

Some arguments mean the same in every check, which then does not explain them:

    run                    Run: the config, the workdir; many checks ignore it
    mesh                   text as for --mesh; axes that it leaves out are 1
    topology, topologies   of real machines, as for sharding/meter/aot.py
    length, lengths        tokens of a row
    within                 how far a number may be from what is expected; of an
                           EQ claim: the largest difference, relative to the
                           maximum of each array
    at_most, at_least      bounds on what is measured
    rounds                 of measurements of CPU-seconds, in turn
"""

import functools
import json
import pathlib
import sys
import textwrap
from typing import Any, NamedTuple

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train import loop
from paraxis.train.claims import papers
from paraxis.train.run import workdir as workdir_lib

RESULTS = 'results'  # folder of what `paraxis reproduce` finds
LAST = 'last.json'  # what it found last, in a folder for each config
VERDICTS = papers.VERDICTS
ENOUGH_SEEDS = 3  # with fewer a trained claim shows a direction at most


class Outcome(NamedTuple):
  """What a check found.

  Attributes:
    expected, measured, caveat: texts for the table.
    passed: whether the claim holds; None: it could not be checked, the caveat
      says why.
    verdict: one of VERDICTS; '': 'not reproduced' if it failed, else the best
      that its kind and its seeds allow.
    seeds: of the trainings behind a LEARN claim.
    sound: False: what is compared is not comparable, or the mechanism does not
      work (texts are not those of decoding one by one, sizes are apart, no
      draft is kept): the claim FAILs, whatever its header admits.
  """

  expected: str
  measured: str
  caveat: str
  passed: bool | None
  verdict: str = ''
  seeds: int = 1
  sound: bool = True


def verdict(claim, outcome) -> str:
  """The verdict in words.

  Raises:
    ValueError: the check gave another word, or says reproduced of a failure or
      of a training with too few seeds.
  """
  if outcome.passed is None:
    return f'SKIPPED ({outcome.caveat})'
  few = claim.kind == 'LEARN' and outcome.seeds < ENOUGH_SEEDS
  best = VERDICTS[1 if few else 0]
  word = outcome.verdict or (best if outcome.passed else VERDICTS[2])
  if word not in VERDICTS or (
    word == VERDICTS[0] and (few or not outcome.passed)
  ):
    raise ValueError(
      f'{claim.name}: {word!r} of {outcome.passed=}, {outcome.seeds=}'
    )
  seeds = {1: ', one seed', 2: ', two seeds'}
  return word + (seeds[outcome.seeds] if few else '')


def outcome_of(run, claim) -> Outcome:
  """What a papers.Claim finds; skipped: it needs what is not installed."""
  ask = lambda **more: claim.check(run, **claim.parameters | more)
  try:
    found = ask()
    met = not claim.published or ask(**claim.published).passed
  except errors.MissingError as e:
    return Outcome('', 'SKIPPED', str(e), None)
  if found.passed and not met:
    caveat = f"not the paper's {claim.paper}; {found.caveat}"
    found = found._replace(verdict=VERDICTS[1], caveat=caveat)
  passed = None if found.passed is None else bool(found.passed)
  return found._replace(passed=passed)


def finish(config, folder, say, **how) -> Any:
  """Trains, or resumes, the run of a folder to its end.

  Args:
    config: schema.Config. say: prints one line. how: as for loop.run.

  Raises:
    SystemExit: with 75, a signal stopped the training.
  """
  result = loop.run(config, folder, say=say, **how)
  if result['stopped']:
    say('the same command resumes from here')
    raise SystemExit(errors.EXIT_PREEMPTED)
  return result['evaluation']


class Run:
  """What the checks of one config share.

  Attributes:
    config: schema.Config.
    results: folder of the trainings that train/claims/ablation.py compares.
    mechanism: files and folders that the config's header names as such.
    replaced: files of what a knock-out puts in its place.
    fresh: whether trainings of other code or another config are removed there.
  """

  mechanism: tuple = ()
  replaced: tuple = ()
  fresh = False

  def __init__(self, config, results, say=print):
    self.config, self.say = config, say
    self.results = workdir_lib.resolve(results)

  def other(self, config, name=''):
    """A Run of another config; name: with a folder of its own, beside this."""
    path = self.results
    path = path.with_name(f'{path.name}-{name}') if name else path
    return self._alike(config, path)

  def shared(self, name):
    """A Run whose folder `name`, beside this one's, a knock-out reads too."""
    return self._alike(self.config, self.results.with_name(name))

  def _alike(self, config, results):
    run = Run(config, results, self.say)
    run.mechanism, run.replaced = self.mechanism, self.replaced
    run.fresh = self.fresh
    return run


def at_ends(chosen: dict, tried: list[dict]) -> list[str]:
  """Names of what a chosen trial has at the least or the most that was tried.

  chosen: {name: number}, one of `tried`. What all have alike has no end.
  """
  values = {name: {t[name] for t in tried} for name in chosen}
  at = lambda x, row: len(row) > 1 and x in (min(row), max(row))
  return [name for name, x in chosen.items() if at(x, values[name])]


def state(claim, outcome) -> str:
  """PASS, FAIL, SKIP, or MISS: it fails no worse than the header admits."""
  if outcome.passed is None:
    return 'SKIP'
  if not outcome.sound:
    return 'FAIL'
  if outcome.passed:
    return 'PASS'
  word = outcome.verdict or VERDICTS[2]
  admits = VERDICTS.index(claim.admits) if claim.admits else -1
  return 'MISS' if VERDICTS.index(word) <= admits else 'FAIL'


def table(rows):
  """(Claim, Outcome) rows as text of 80 columns, each caveat below its row."""
  head = ('', 'claim', 'kind', 'expected', 'paper', 'measured')
  cells = [
    (
      state(claim, outcome),
      textwrap.shorten(claim.name, 39, placeholder='...'),
      claim.kind,
      outcome.expected,
      'none' if claim.paper is None else str(claim.paper),
      outcome.measured,
    )
    for claim, outcome in rows
  ]
  wide = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
  line = lambda row: '  '.join(map(str.ljust, row, wide)).rstrip()
  lines = [line(head), '-' * 80]
  for row, (claim, outcome) in zip(cells, rows, strict=True):
    indent = ' ' * (wide[0] + 2)
    text = verdict(claim, outcome)
    if outcome.passed is not None:
      text += f': {outcome.caveat}'
    lines += [
      line(row),
      textwrap.fill(text, 80, initial_indent=indent, subsequent_indent=indent),
    ]
  return '\n'.join(lines)


def row(claim, outcome) -> dict:
  """A claim and its outcome as JSON can hold them."""
  about = dict(
    claim=claim.name, kind=claim.kind, paper=claim.paper, admits=claim.admits
  )
  return about | outcome._asdict() | dict(verdict=verdict(claim, outcome))


def speaker(as_json: bool):
  """Prints a line; to stderr where stdout carries a JSON document."""
  return functools.partial(print, file=sys.stderr) if as_json else print


def print_json(name: str, what: str, rows: list):
  """One JSON document of a config's `row`s."""
  print(json.dumps({'config': name, what: rows}, indent=2))


def keep(folder, name: str, rows: list):
  """Writes a config's `row`s into a folder, for `paraxis papers --html`."""
  text = json.dumps({'config': name, 'claims': rows}, indent=2)
  (workdir_lib.prepare(folder) / LAST).write_text(text, encoding='utf-8')


def run_of(name, workdir='', say=print, fresh=False, module=None) -> Run:
  """`Run` of a config by name or file.

  Args:
    workdir: of all trainings and results; '': results/NAME.
    fresh: as for `Run`.
    module: of the config, loaded already. Executed again, a file registers
      mixers anew, and not those that its knock-outs know.
  """
  path = command_line.find_config(name)
  config = schema.view(command_line.load(name, module))
  run = Run(config, workdir or pathlib.Path(RESULTS) / path.stem, say)
  run.mechanism, run.fresh = papers.mechanism(path), fresh
  return run


def reproduce(name, workdir='', as_json=False, fresh=False):
  """Runs every claim of a config -> exit code; writes `LAST` in run.results.

  0: all hold that could be checked here; 1: one fails; 77: none could be.

  Args:
    name: a config that ships with paraxis, or a file.
    workdir, fresh: as for `run_of`.
    as_json: print one JSON document instead of the table.

  Raises:
    UserError: no such config, a malformed claim, too few devices.
  """
  path = command_line.find_config(name)
  module = command_line.load_module(name)
  claims = papers.claims(module, path)
  say = speaker(as_json)
  run = run_of(name, workdir, say, fresh, module)
  rows = []
  for claim in claims:
    say(f'{claim.kind}: {claim.name}')
    rows.append((claim, outcome_of(run, claim)))
  shown = [row(*pair) for pair in rows]
  keep(run.results, path.stem, shown)
  if as_json:
    print_json(path.stem, 'claims', shown)
  else:
    say(table(rows))
  text, code = summary(rows)
  say(text)
  return code


def summary(rows):
  """(last line, exit code) of (Claim, Outcome) rows."""
  names = lambda what: [c.name for c, o in rows if state(c, o) == what]
  failed, skipped, missed = map(names, ('FAIL', 'SKIP', 'MISS'))
  note = f'; {len(skipped)} SKIPPED: {"; ".join(skipped)}' if skipped else ''
  if missed:
    note += f'; {len(missed)} NOT REPRODUCED, as the header says: '
    note += '; '.join(missed)
  if failed:
    text = f'{len(failed)} of {len(rows)} claims FAILED: {"; ".join(failed)}'
    return text + note, errors.EXIT_DIFFERENT
  if len(skipped) == len(rows):
    return f'no claim could be checked{note}', errors.EXIT_SKIPPED
  held = len(names('PASS'))
  return f'all {held} claims hold{note}', errors.EXIT_OK
