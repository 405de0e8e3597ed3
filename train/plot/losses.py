"""`paraxis plot`: the loss of one run, or of several overlaid, as a PNG.

Above: training loss in nats per token, every step (faint) and smoothed, with
held-out bits per byte as points on the right axis. Below, small: the learning
rate. Smoothing is a centred mean over about 1/40 of the run; a step that was
skipped as not finite is left out.
"""

import pathlib

import numpy as np

from paraxis.configs.base import errors
from paraxis.train.plot import figures
from paraxis.train.run import metrics

NAME = 'loss.png'


def curve(rows, name):
  """(steps, values) of a metric, both float arrays, without missing values.

  Args:
    rows: {step: {name: value}} as metrics.read gives them.
  """
  found = [(s, r[name]) for s, r in rows.items() if r.get(name) is not None]
  return np.array(found, float).reshape(-1, 2).T


def smooth(values):
  """Centred mean over 1/40 of the points, at least 5; one-sided at the ends."""
  half = max(2, len(values) // 80)
  total = np.concatenate([[0.0], np.cumsum(values)])
  at = np.arange(len(values))
  low = np.maximum(at - half, 0)
  high = np.minimum(at + half + 1, len(values))
  return (total[high] - total[low]) / (high - low)


def labels(workdirs):
  """The shortest path suffixes that distinguish the runs."""
  parts = [pathlib.Path(w).resolve().parts for w in workdirs]
  for count in range(1, max(map(len, parts)) + 1):
    names = ['/'.join(p[-count:]) for p in parts]
    if len(set(names)) == len(names):
      return names
  return names  # one run, given twice


def _read(workdir):
  path = pathlib.Path(workdir)
  if not (path / metrics.FILE).is_file():
    raise errors.UserError(
      f'--workdir={workdir}: {path / metrics.FILE} does not exist; has a run '
      'begun there?'
    )
  rows = metrics.read(path, print)
  if not curve(rows, 'train/loss').size:
    raise errors.UserError(f'{path / metrics.FILE} holds no train/loss yet.')
  return rows


def _draw_run(axes, rows, label, colour, alone):
  """One run's curves on (loss, bits per byte, learning rate) axes."""
  from matplotlib import patheffects

  loss, bits, rate = axes
  steps, values = curve(rows, 'train/loss')
  loss.plot(steps, values, color=colour, alpha=0.22, linewidth=0.8)
  name = 'training loss' if alone else label
  loss.plot(steps, smooth(values), color=colour, linewidth=2.0, label=name)
  held, points = curve(rows, 'eval/bits_per_byte')
  if held.size:
    dark = '#111111' if alone else colour
    bits.plot(
      held,
      points,
      'o-',
      color=dark,
      linewidth=1.0,
      markersize=6,
      markeredgecolor='white',
      label='held-out text' if alone else None,
      zorder=5,
      clip_on=False,
    )
    halo = patheffects.withStroke(linewidth=4, foreground='white')
    bits.annotate(
      f'{points[-1]:.3f}',
      (held[-1], points[-1]),
      xytext=(0, 10),
      textcoords='offset points',
      ha='center',
      color=dark,
      fontsize=10,
      fontweight='bold',
      zorder=6,
      path_effects=[halo],
    )
  rate.plot(*curve(rows, 'train/learning_rate'), color=colour, linewidth=1.4)
  return values, points


def _limits(ax, values):
  """Room around values; a loss that starts high is not cut off."""
  low, high = min(values), max(values)
  pad = max(0.08 * (high - low), 0.02 * abs(high), 1e-9)
  ax.set_ylim(low - pad, high + pad)


def draw(workdirs, output=None):
  """Draws the runs -> path of the PNG.

  Args:
    workdirs: folders with a metrics.jsonl; several are overlaid with labels.
    output: file; default loss.png in the first folder.

  Raises:
    UserError: no folder, no metrics in one, or the file cannot be written.
  """
  runs = [_read(w) for w in workdirs]
  if not runs:
    raise errors.UserError('--workdir is missing: which run is to be drawn?')
  fig = figures.make(8.5, 5.4)
  loss, rate = fig.subplots(2, 1, sharex=True, height_ratios=(5, 1))
  bits = loss.twinx()
  names, alone = labels(workdirs), len(runs) == 1
  losses, points = [], []
  for i, (rows, name) in enumerate(zip(runs, names, strict=True)):
    colour = figures.COLOURS[i % len(figures.COLOURS)]
    shown = _draw_run((loss, bits, rate), rows, name, colour, alone)
    losses.extend(shown[0])
    points.extend(shown[1])
  _limits(loss, losses)
  loss.set_ylabel('training loss (nats per token)')
  rate.set_ylabel('learning\nrate')
  rate.set_xlabel('step')
  rate.set_ylim(bottom=0)
  if alone:
    loss.set_title(names[0], loc='left', fontweight='bold')
  elif points:
    bits.plot([], [], 'o-', color='#666666', linewidth=1, label='held-out text')
  _finish(fig, loss, bits, rate, points)
  return figures.save(fig, output or pathlib.Path(workdirs[0]) / NAME)


def _finish(fig, loss, bits, rate, points):
  """Grid, spines, the right axis and one legend for both axes."""
  for ax in (loss, rate):
    figures.tidy(ax)
    ax.margins(x=0.01)
  bits.spines[['top', 'left', 'bottom']].set_visible(False)
  if points:
    bits.set_ylim(0.75 * min(points), 1.25 * max(points))  # no false zoom
    bits.set_ylabel('held-out text (bits per byte)')
  else:
    bits.set_yticks([])
    bits.spines['right'].set_visible(False)
  handles = [
    h for ax in (loss, bits) for h in ax.get_legend_handles_labels()[0]
  ]
  loss.legend(handles=handles, loc='upper right', frameon=False)
  rate.ticklabel_format(axis='y', style='sci', scilimits=(-3, 3))
  fig.align_ylabels([loss, rate])
