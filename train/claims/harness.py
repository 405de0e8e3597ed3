"""`paraxis reproduce NAME`: runs the claims of a config and says PASS or FAIL.

Every public function below whose first argument is `run` is a check that a
config can name (train/claims/papers.py); its other arguments are the data that
the config gives. It returns an `Outcome`. A row of the table is the claim, its
kind, what is expected, the paper's number, what was measured, the verdict in
words and the caveat; one failed claim makes the exit code 1. A claim that needs
what is not installed (errors.MissingError) is SKIPPED, with the reason. A claim
of the paper that fails as the config's header admits is a MISS, no failure.

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
import math
import pathlib
import sys
import textwrap
from typing import Any, NamedTuple

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train import loop
from paraxis.train.claims import papers
from paraxis.train.data import baselines as baselines_lib
from paraxis.train.plot import losses as plot
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
  """

  expected: str
  measured: str
  caveat: str
  passed: bool | None
  verdict: str = ''
  seeds: int = 1


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
  return found._replace(passed=bool(found.passed))


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
  """What the checks of one config share; trains at most once.

  Attributes:
    config: schema.Config. workdir: folder of the training run.
    results: folder of the trainings that train/claims/ablation.py compares.
    mechanism: files and folders that the config's header names as such.
    fresh: whether trainings of other code or another config are removed there.
  """

  mechanism: tuple = ()
  fresh = False

  def __init__(self, config, workdir, say=print, results=None):
    """results: None: the workdir."""
    self.config, self.workdir, self.say = config, pathlib.Path(workdir), say
    self.results = workdir_lib.resolve(results or workdir)
    self._trained = self._baselines = None

  def other(self, config, name=''):
    """A Run of another config; name: with folders of its own, beside these."""
    beside = lambda path: path.with_name(f'{path.name}-{name}')
    folders = self.workdir, self.results
    workdir, results = map(beside, folders) if name else folders
    run = Run(config, workdir, self.say, results)
    run.mechanism, run.fresh = self.mechanism, self.fresh
    return run

  def trained(self) -> Any:
    """evaluate.Evaluation of the run in the workdir; trains if need be.

    Raises:
      UserError: the folder holds a run of another configuration.
      SystemExit: with 75, a signal stopped the training.
    """
    if self._trained is None:
      self._check_workdir()
      self._trained = finish(self.config, self.workdir, self.say)
      self.say(domain_table(self._trained, self.baselines()))
      self.results.mkdir(parents=True, exist_ok=True)
      path = self.results / plot.NAME
      self.say(f'wrote {plot.draw([self.workdir], path)}')
    return self._trained

  def _check_workdir(self):
    """A claim is about this config alone: not even train.steps may differ."""
    path = self.workdir.expanduser().resolve()
    if not (path / workdir_lib.CONFIG).exists():
      return
    old = workdir_lib.read_config(path)
    for name, was, now in workdir_lib.differences(old, self.config):
      if name in ('train.steps', 'train.eval_batches'):
        raise errors.UserError(
          f'{path} holds a run with {name}={was!r}, the claims are about '
          f'{now!r}: take another --workdir.'
        )

  def baselines(self):
    """baselines.Baselines of the held-out text, xz included."""
    if self._baselines is None:
      data = self.config.data
      self._baselines = baselines_lib.text_baselines(
        data.path, data.held_out_fraction
      )
    return self._baselines


def domain_table(evaluation, base):
  """Model against gzip -9, domain by domain, in bits per byte: text.

  Args:
    evaluation: evaluate.Evaluation.
    base: baselines.Baselines; xz lines are left out where it did not run.
  """
  rows = [
    (domain, bits, base.gzip_by_domain.get(domain, math.nan))
    for domain, bits in evaluation.domains.items()
  ]
  rows.append(('all', evaluation.bits_per_byte, base.gzip))
  width = max(len(name) for name, *_ in rows)
  lines = [f'{"bits per byte":{width + 2}} {"model":>7} {"gzip -9":>8}']
  for name, bits, gzip in rows:
    note = '  gzip is better' if gzip < bits else ''
    lines.append(f'  {name:{width}} {bits:7.3f} {gzip:8.3f}{note}')
  if not math.isnan(base.xz):
    lines.append(f'  xz -9e {base.xz:.3f}, given the training text too ')
    lines[-1] += f'{base.xz_given_training:.3f}'
  return '\n'.join(lines)


def held_out_at_most(run, *, bits_per_byte):
  """LEARN: held-out bits per byte after training, at most a bound."""
  measured = run.trained()
  return Outcome(
    f'<= {bits_per_byte:.2f}',
    f'{measured.bits_per_byte:.4f}',
    f'one seed ({run.config.train.seed}), {run.config.train.steps} steps, '
    f'{measured.n_bytes:,} bytes of held-out text',
    measured.bits_per_byte <= bits_per_byte,
  )


def held_out_below_xz(run):
  """LEARN: held-out bits per byte below xz -9e on the same text alone."""
  measured, base = run.trained(), run.baselines()
  return Outcome(
    f'< {base.xz:.3f}',
    f'{measured.bits_per_byte:.4f}',
    f'one seed ({run.config.train.seed}), {run.config.train.steps} steps, '
    f'{measured.n_bytes:,} bytes; xz given the training text too has '
    f'{base.xz_given_training:.3f}',
    measured.bits_per_byte < base.xz,
  )


def held_out_below_gzip(run):
  """LEARN: held-out bits per byte below gzip -9 on the same text."""
  measured, base = run.trained(), run.baselines()
  lost = [
    domain
    for domain, bits in measured.domains.items()
    if bits >= base.gzip_by_domain.get(domain, math.inf)
  ]
  caveat = (
    f'xz -9e has {base.xz:.3f}, given the training text too '
    f'{base.xz_given_training:.3f}; '
  )
  if lost:
    caveat += f'gzip wins in {", ".join(lost)}'
  else:
    caveat += 'no domain is lost'
  if 'translation' in measured.domains:
    caveat += (
      '; translation may lose: gzip copies the English strings that a document '
      'repeats'
    )
  return Outcome(
    f'< {base.gzip:.3f}',
    f'{measured.bits_per_byte:.4f}',
    caveat,
    measured.bits_per_byte < base.gzip,
  )


def state(claim, outcome) -> str:
  """PASS, FAIL, SKIP, or MISS: it fails no worse than the header admits."""
  if outcome.passed is None:
    return 'SKIP'
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


def run_of(name, workdir='', say=print, fresh=False) -> Run:
  """`Run` of a config by name or file.

  Args:
    workdir: of all trainings; '': runs/NAME for the config's own, as `paraxis
      train` would, and results/NAME for those that are compared.
    fresh: as for `Run`.
  """
  path = command_line.find_config(name)
  config = schema.view(command_line.load(name))
  own = workdir or pathlib.Path('runs') / path.stem
  run = Run(config, own, say, workdir or pathlib.Path(RESULTS) / path.stem)
  run.mechanism, run.fresh = papers.mechanism(path), fresh
  return run


def reproduce(name, workdir='', as_json=False, fresh=False):
  """Runs every claim of a config -> exit code; writes `LAST` in run.results.

  0: all hold that could be checked here; 1: one fails; 2: none could be.

  Args:
    name: a config that ships with paraxis, or a file.
    workdir, fresh: as for `run_of`.
    as_json: print one JSON document instead of the table.

  Raises:
    UserError: no such config, a malformed claim, too few devices.
  """
  path = command_line.find_config(name)
  claims = papers.claims(command_line.load_module(name), path)
  say = speaker(as_json)
  run = run_of(name, workdir, say, fresh)
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
    return f'no claim could be checked{note}', errors.EXIT_USER
  held = len(names('PASS'))
  return f'all {held} claims hold{note}', errors.EXIT_OK
