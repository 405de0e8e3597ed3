"""`paraxis reproduce NAME`: runs the claims of a config and says PASS or FAIL.

Every public function below whose first argument is `run` is a check that a
config can name (train/claims/papers.py); its other arguments are the data that
the config gives. It returns an `Outcome`. A row of the table is the claim, its
kind, what is expected, the paper's number, what was measured, the caveat and
the verdict; one failed claim makes the exit code 1.

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

import math
import pathlib
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


class Outcome(NamedTuple):
  """expected, measured, caveat: texts for the table."""

  expected: str
  measured: str
  caveat: str
  passed: bool


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
  """

  def __init__(self, config, workdir, say=print):
    self.config, self.workdir, self.say = config, pathlib.Path(workdir), say
    self._trained = self._baselines = None

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
      self.say(f'wrote {plot.draw([self.workdir])}')
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


def table(rows):
  """(Claim, Outcome) rows as text of 80 columns, each caveat below its row."""
  head = ('', 'claim', 'kind', 'expected', 'paper', 'measured')
  cells = [
    (
      'PASS' if outcome.passed else 'FAIL',
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
  for row, (_, outcome) in zip(cells, rows, strict=True):
    indent = ' ' * (wide[0] + 2)
    lines += [
      line(row),
      textwrap.fill(
        outcome.caveat, 80, initial_indent=indent, subsequent_indent=indent
      ),
    ]
  return '\n'.join(lines)


def reproduce(name, workdir='', say=print):
  """Runs every claim of a config -> exit code 0, or 1 if one fails.

  Args:
    name: a config that ships with paraxis, or a file.
    workdir: of the training that LEARN claims need; '': runs/NAME.
    say: prints one line.

  Raises:
    UserError: no such config, a malformed claim, too few devices.
  """
  path = command_line.find_config(name)
  module = command_line.load_module(name)
  claims = papers.claims(module, path)
  config = schema.view(command_line.load(name))
  run = Run(config, workdir or pathlib.Path('runs') / path.stem, say)
  rows = []
  for claim in claims:
    say(f'{claim.kind}: {claim.name}')
    rows.append((claim, claim.check(run, **claim.parameters)))
  say(table(rows))
  failed = [claim.name for claim, outcome in rows if not outcome.passed]
  if failed:
    say(f'{len(failed)} of {len(rows)} claims FAILED: {"; ".join(failed)}')
    return errors.EXIT_DIFFERENT
  say(f'all {len(rows)} claims hold')
  return errors.EXIT_OK
