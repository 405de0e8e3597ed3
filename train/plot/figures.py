"""A matplotlib figure without a display or global state, and its PNG file."""

import os
import pathlib

from paraxis.configs.base import errors


def make(width, height, **options):
  """matplotlib Figure of width x height inches; options: as for Figure."""
  from matplotlib import figure

  return figure.Figure((width, height), layout='constrained', **options)


def save(fig, path: str | os.PathLike) -> pathlib.Path:
  """Writes the figure as a PNG -> its path; UserError if it cannot."""
  try:
    fig.savefig(path, dpi=150)
  except (OSError, ValueError) as e:
    raise errors.UserError(f'{path}: cannot be written ({e}).') from e
  return pathlib.Path(path)
