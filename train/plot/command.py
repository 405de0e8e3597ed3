"""The plot commands: curves of a run, where its time went, pipeline schedules.

Nothing that draws, and no jax, is imported before the arguments are read.
"""

import json
import pathlib

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors


def _run(values, _, words):
  if words:
    hint = schema.suggest(words[0], ('schedule',))
    raise errors.UserError(f'write --workdir={words[0]}.{hint}')
  if values.goodput and values.profile:
    raise errors.UserError('--goodput and --profile: one picture at a time.')
  if values.json and not values.goodput:
    raise errors.UserError('--json prints what --goodput found: give both.')
  if values.profile or values.goodput:
    (_profile if values.profile else _goodput)(values, _one(values))
    return
  from paraxis.train.plot import losses as plot

  if values.x not in plot.AXES:
    raise errors.UserError(
      f'--x={values.x} is not one of {", ".join(plot.AXES)}.'
      + schema.suggest(values.x, plot.AXES)
    )
  print(f'wrote {plot.draw(values.workdir, values.output, values.x)}')
  _experts(values.workdir, plot.labels(values.workdir))


def _one(values):
  """The only run; UserError: it is not one."""
  if len(values.workdir) != 1:
    flag = '--profile' if values.profile else '--goodput'
    raise errors.UserError(
      f'{flag} draws one run: {len(values.workdir)} --workdir are given.'
    )
  return values.workdir[0]


def _profile(values, workdir):
  from paraxis.train.plot import profile as plot

  print(f'wrote {plot.draw(workdir, values.output)}')


def _goodput(values, workdir):
  from paraxis.train.run import goodput

  account = goodput.account(workdir)
  if values.json:
    print(json.dumps(account, indent=1))
    return
  from paraxis.train.plot import goodput as plot

  print(plot.text(account))
  print(f'wrote {plot.draw(workdir, account, values.output)}')


def _experts(workdirs, names):
  """Loads of experts, for each run that has them."""
  from paraxis.train.plot import experts as plot_experts
  from paraxis.train.run import metrics

  for workdir, name in zip(workdirs, names, strict=True):
    rows = metrics.read(workdir)
    if plot_experts.present(rows):
      path = pathlib.Path(workdir) / plot_experts.NAME
      print(f'wrote {plot_experts.draw(rows, path, name)}')


def _schedule(values, _, words):
  from paraxis.sharding.pipeline import schedules

  if not words:
    raise errors.UserError(
      f'plot which schedule? There are {", ".join(schedules.NAMES)}.'
    )
  from paraxis.train.plot import schedule as draw_schedule

  path, schedule = draw_schedule.draw(
    words[0],
    values.stages,
    values.microbatches,
    values.chunks,
    values.output,
    values.skip_fraction,
  )
  print(schedule.text())
  print(draw_schedule.summary(schedule))
  print(f'wrote {path}')


COMMANDS = (
  command_line.Command(
    _run,
    'plot',
    '--workdir=RUN [-o loss.png]',
    "draw the loss of runs, and experts' loads (RUN/experts.png)",
    (
      ('paths', 'workdir=RUN', [], 'run directory; repeated: overlaid'),
      ('path', 'output=FILE', '', 'PNG; empty: loss.png in the first RUN', 'o'),
      (str, 'x=AXIS', 'step', 'step, tokens, or flops of the model'),
      (bool, 'profile', False, 'draw what train --profile measured instead'),
      (
        bool,
        'goodput',
        False,
        'draw and print where the time of all starts '
        'of a run went instead: steps, replay, saves, ... (RUN/goodput.png)',
      ),
      (bool, 'json', False, 'with --goodput: print it as JSON, draw nothing'),
    ),
    words=None,
  ),
  command_line.Command(
    _schedule,
    'plot schedule',
    'NAME --stages=4 --microbatches=8 [-o NAME.png]',
    'draw a pipeline schedule, print it as a table, and its cost',
    (
      ('count', 'stages=N', 4, 'pipeline stages, one device each'),
      ('count', 'microbatches=N', 8, 'microbatches in a step'),
      ('count', 'chunks=N', 0, 'chunks of layers per stage; 0: the fewest'),
      (float, 'skip_fraction=F', 0.0, 'schedule skip: share of stages skipped'),
      ('path', 'output=FILE', '', 'PNG; empty: NAME.png in this folder', 'o'),
    ),
    words=1,
    notes=(
      'Schedules: gpipe, one_f_one_b, interleaved, zero_bubble, v_half, skip.',
    ),
  ),
)
