"""`paraxis plot`: the loss of one run, or of several overlaid, as a PNG.

Above: training loss in nats per token, every step (faint) and smoothed, and
held-out text on the same scale as points, each run's last in the legend with
its bits per byte. Below, small: the learning rate, the norm of the gradient and
tokens per second. Smoothing is a centred mean over about 1/40 of the run; a
step that was skipped as not finite is left out.
"""

import pathlib

import numpy as np

from paraxis.configs.base import errors
from paraxis.train.plot import figures
from paraxis.train.run import evaluate
from paraxis.train.run import metrics

NAME = 'loss.png'
AXES = {
  'step': 'step',
  'tokens': 'tokens that carried loss',
  'flops': 'floating-point operations of the model',
}
PANELS = (
  ('train/learning_rate', 'learning\nrate'),
  ('train/grad_norm', 'gradient\nnorm'),
  ('perf/tokens_per_second', 'tokens\nper second'),
)


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


def along(rows, x):
  """{step: where it is drawn}: itself, or the tokens or FLOPs up to it.

  Raises:
    UserError: the run was recorded without them.
  """
  if x == 'step':
    return {step: step for step in rows}
  name, total, out = f'train/{x}', 0.0, {}
  for step, row in rows.items():
    total += row.get(name) or 0.0
    out[step] = total
  if not total:
    raise errors.UserError(
      f'--x={x}: {metrics.FILE} holds no {name}; take --x=step.'
    )
  return out


def _held_out(rows):
  """(steps, losses, the last one in words) of held-out text; '': none."""
  held, points = curve(rows, 'eval/loss')
  bits = curve(rows, 'eval/bits_per_byte')[1]
  text = f'{points[-1]:.3f}' if held.size else ''
  if held.size and bits.size:
    bound = curve(rows, evaluate.BOUND)[1].size
    text += f' ({bits[-1]:.3f} bits per byte{", upper bound" if bound else ""})'
  return held, points, text


def _draw_run(axes, rows, where, label, colour, alone):
  """One run's curves on axes (loss, *PANELS).

  Its last held-out number is in the legend: beside its point it would stand on
  the curve.
  """
  loss, *panels = axes
  at = lambda steps: [where[int(s)] for s in steps]
  held, points, text = _held_out(rows)
  steps, values = curve(rows, 'train/loss')
  loss.plot(at(steps), values, color=colour, alpha=0.22, linewidth=0.8)
  name = figures.plain(f'{label}: {text} held out' if text else label)
  name = 'training loss' if alone else name
  loss.plot(at(steps), smooth(values), color=colour, linewidth=2.0, label=name)
  for ax, (name, _) in zip(panels, PANELS, strict=True):
    steps, values = curve(rows, name)
    dot = '.' if len(values) == 1 else ''  # a line of one point shows nothing
    ax.plot(at(steps), values, color=colour, linewidth=1.2, marker=dot)
  if text:
    loss.plot(
      at(held), points, 'o', color='#111111' if alone else colour, markersize=6,
      markeredgecolor='white', zorder=5, clip_on=False,
      label=f'held-out text: {text}' if alone else None,
    )  # fmt: skip


def draw(workdirs, output=None, x='step'):
  """Draws the runs -> path of the PNG.

  Args:
    workdirs: folders with a metrics.jsonl; several are overlaid with labels.
    output: file; default loss.png in the first folder.
    x: one of AXES.

  Raises:
    UserError: no folder, no metrics in one, or the file cannot be written.
  """
  runs = [_read(w) for w in workdirs]
  if not runs:
    raise errors.UserError('--workdir is missing: which run is to be drawn?')
  fig = figures.make(8.5, 7.0)
  axes = fig.subplots(
    1 + len(PANELS), 1, sharex=True, height_ratios=(5, 1, 1, 1)
  )
  names, alone = labels(workdirs), len(runs) == 1
  for i, (rows, name) in enumerate(zip(runs, names, strict=True)):
    colour = figures.COLOURS[i % len(figures.COLOURS)]
    _draw_run(axes, rows, along(rows, x), name, colour, alone)
  loss, *panels = axes
  if alone:
    loss.set_title(figures.plain(names[0]), loc='left', fontweight='bold')
  for ax in axes:
    figures.tidy(ax)
    ax.margins(x=0.01)
  loss.set_ylabel('loss (nats per token)')
  loss.legend(loc='upper right', frameon=False)
  for ax, (_, label) in zip(panels, PANELS, strict=True):
    ax.set_ylabel(label)
    ax.set_ylim(bottom=0)
    ax.ticklabel_format(axis='y', style='sci', scilimits=(-3, 3))
  panels[-1].set_xlabel(AXES[x])
  fig.align_ylabels(axes)
  return figures.save(fig, output or pathlib.Path(workdirs[0]) / NAME)
