"""The plot command: what a run learned, or what a pipeline does when.

Nothing that draws, and no jax, is imported before the arguments are read.
"""

import pathlib

from absl import flags

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors

HELP = """\
usage: paraxis plot --workdir=RUN [-o loss.png]
       paraxis plot schedule NAME --stages=4 --microbatches=8 [-o NAME.png]

Draws the loss of a run, or of several overlaid, and experts.png in the folder
of each run that has experts: their loads over training:

  --workdir=RUN        folder of a run; given again: overlaid
  --output=FILE, -o    PNG to write; default loss.png in the first workdir

or a pipeline schedule, prints it as a table, and says what it costs:

  --stages=N           devices of the pipeline (default 4)
  --microbatches=N     of a step (default 8)
  --chunks=N           runs of layers on each stage; default: the fewest
  --skip_fraction=F    schedule skip: share of the stages left out (default 0)
  --output=FILE, -o    PNG to write; default NAME.png in this folder

Schedules: gpipe, one_f_one_b, interleaved, zero_bubble, v_half, skip.
"""


def _output(values):
  flags.DEFINE_string('output', '', '', flag_values=values, short_name='o')


def _run_flags(values):
  flags.DEFINE_multi_string('workdir', [], '', flag_values=values)
  _output(values)


def _schedule_flags(values):
  for name, default in (('stages', 4), ('microbatches', 8), ('chunks', 0)):
    flags.DEFINE_integer(name, default, '', lower_bound=0, flag_values=values)
  flags.DEFINE_float('skip_fraction', 0.0, '', flag_values=values)
  _output(values)


def _parse(argv, define):
  """command_line.parse of a command that reads no --config."""
  values, config, left = command_line.parse(argv, define)
  if config is not None:
    raise errors.UserError('--config: this command does not read it.')
  return values, left


def _run(argv):
  values, left = _parse(argv, _run_flags)
  if left:
    hint = schema.suggest(left[0], ('schedule',))
    raise errors.UserError(f'write --workdir={left[0]}.{hint}')
  from paraxis.train.plot import losses as plot

  print(f'wrote {plot.draw(values.workdir, values.output)}')
  _experts(values.workdir, plot.labels(values.workdir))


def _experts(workdirs, names):
  """Loads of experts, for each run that has them."""
  from paraxis.train.plot import experts as plot_experts
  from paraxis.train.run import metrics

  for workdir, name in zip(workdirs, names, strict=True):
    rows = metrics.read(workdir)
    if plot_experts.present(rows):
      path = pathlib.Path(workdir) / plot_experts.NAME
      print(f'wrote {plot_experts.draw(rows, path, name)}')


def _schedule(argv):
  values, left = _parse(argv, _schedule_flags)
  from paraxis.sharding.pipeline import schedules

  if not left:
    raise errors.UserError(
      f'plot which schedule? There are {", ".join(schedules.NAMES)}.'
    )
  if len(left) > 1:
    raise errors.UserError(f'unexpected argument {left[1]!r}.')
  from paraxis.train.plot import schedule as draw_schedule

  path, schedule = draw_schedule.draw(
    left[0],
    values.stages,
    values.microbatches,
    values.chunks,
    values.output,
    values.skip_fraction,
  )
  print(schedule.text())
  print(draw_schedule.summary(schedule))
  print(f'wrote {path}')


def main(argv):
  """Runs the command; argv: arguments after its name. -> exit code."""
  if any(arg in ('--help', '-help', '-h') for arg in argv):
    print(HELP, end='')
    return errors.EXIT_OK
  if argv[:1] == ['schedule']:
    _schedule(argv[1:])
  else:
    _run(argv)
  return errors.EXIT_OK
