"""matplotlib figures without a display or global state, and their PNG files."""

import os
import pathlib

from paraxis.configs.base import errors

COLOURS = (
  '#1f5fa8', '#d1602b', '#2f8f5b', '#8a4fae', '#b03060', '#5f6b7a', '#a08a1e',
  '#3aa6a6',
)  # fmt: skip


def make(width, height, **options):
  """matplotlib Figure of width x height inches; options: as for Figure."""
  from matplotlib import figure

  return figure.Figure((width, height), layout='constrained', **options)


def tidy(ax):
  """A grey grid behind the data; no frame above and on the right."""
  ax.grid(color='#dddddd', linewidth=0.7)
  ax.set_axisbelow(True)
  ax.spines[['top', 'right']].set_visible(False)


def lines(curves, xlabel, ylabel, **legend):
  """A line with points for each curve -> (Figure, its axes).

  Args:
    curves: {label: (x values, y values)}. legend: options of Axes.legend.
  """
  fig = make(6.4, 4.4)
  ax = fig.subplots()
  for i, (label, points) in enumerate(curves.items()):
    colour = COLOURS[i % len(COLOURS)]
    ax.plot(*points, 'o-', color=colour, label=label)
  ax.set(xlabel=xlabel, ylabel=ylabel)
  ax.legend(frameon=False, **legend)
  tidy(ax)
  return fig, ax


def plain(text: str) -> str:
  """A name as a text of a figure: not read as mathematics, and no label that
  a legend leaves out, as it does those that begin with '_'."""
  hidden = '\u200b' if text.startswith('_') else ''
  return hidden + text.replace('$', r'\$')


def save(fig, path: str | os.PathLike) -> pathlib.Path:
  """Writes the figure as a PNG -> its path; UserError if it cannot."""
  try:
    fig.savefig(path, dpi=150)
  except (OSError, ValueError) as e:
    raise errors.UserError(f'{path}: cannot be written ({e}).') from e
  return pathlib.Path(path)
