"""`paraxis plot --profile`: the costliest operations of a profile, as bars."""

import json
import pathlib

from paraxis.configs.base import errors
from paraxis.train.plot import figures
from paraxis.train.run import profile

NAME = 'profile.png'


def read(workdir):
  """(first step, last step, [profile.Row]) of a run; UserError: it has none."""
  path = pathlib.Path(workdir) / profile.FILE
  try:
    kept = json.loads(path.read_text(encoding='utf-8'))
    rows = [profile.Row(**row) for row in kept['rows']]
    return kept['first'], kept['last'], rows
  except OSError as e:
    raise errors.UserError(
      f'--workdir={workdir}: {path} does not exist; train with --profile=5:8.'
    ) from e
  except (ValueError, KeyError, TypeError) as e:
    raise errors.UserError(f'{path} is damaged; profile the run again.') from e


def draw(workdir, output=None):
  """Draws the bars -> path of the PNG, by default profile.png in the run."""
  first, last, rows = read(workdir)
  total, steps = sum(row.seconds for row in rows), last - first + 1
  shown = rows[: profile.SHOWN][::-1]
  sent = sum(row.seconds for row in rows if profile.is_collective(row.name))
  fig = figures.make(8.5, 4.2)
  ax = fig.subplots()
  ax.barh(
    range(len(shown)),
    [1e3 * row.seconds / steps for row in shown],
    color=[figures.COLOURS[profile.is_collective(r.name)] for r in shown],
  )
  labels = ['  '.join(filter(None, (r.name, r.scope, r.where))) for r in shown]
  ax.set_yticks(range(len(shown)), [figures.plain(label) for label in labels])
  ax.set_xlabel('ms a step, all traced devices together')
  # Of the figure: beside long labels the axes are narrower than their title.
  fig.suptitle(
    f'steps {first} to {last}: collectives (orange) {sent / (total or 1):.1%}'
  )
  figures.tidy(ax)
  return figures.save(fig, output or pathlib.Path(workdir) / NAME)
