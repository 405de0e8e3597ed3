"""Plots of experts: loads over training, and which experts each domain uses.

Above, a map for each layer (for more than 6, the mean over those with as many
experts): steps to the right, experts down, the colour the share of assignments
over an even share, so that 1, white, is an expert that gets what it should.
Below: the busiest expert over the mean, the share of assignments dropped, the
entropy of the router. Loads are logged every train.print_every steps.
"""

import numpy as np

from paraxis.configs.base import errors
from paraxis.train.plot import figures
from paraxis.train.plot import losses as plot

NAME = 'experts.png'
PREFIX = 'experts/load/'
MOST_LAYERS = 6
LINES = {  # metric: (label, what would be ideal)
  'experts/imbalance': ('busiest /\nmean', 1.0),
  'experts/dropped': ('share\ndropped', 0.0),
  'experts/entropy': ('entropy\n(nats)', None),
}


def present(rows):
  """Whether rows of metrics (metrics.read) hold loads of experts."""
  return any(name.startswith(PREFIX) for r in rows.values() for name in r)


def panels(rows):
  """[(title, steps, load_ES)]: shares over an even share, step by step.

  Layers are counted among those with experts: no load says of others.
  """
  paths = sorted({n for r in rows.values() for n in r if n.startswith(PREFIX)})
  layers = []
  for path in paths:
    steps = [s for s, r in rows.items() if path in r]
    loads = np.array([rows[s][path] for s in steps], float)  # (S, L, E)
    name = path.removeprefix(PREFIX).split('/')[1] if len(paths) > 1 else ''
    for l in range(loads.shape[1]):
      even = loads[:, l].T * loads.shape[2]
      layers.append((f'{name} expert layer {l}'.strip(), steps, even))
  if len(layers) <= MOST_LAYERS:
    return layers
  groups = {}
  for _, steps, even in layers:
    groups.setdefault((len(even), tuple(steps)), []).append(even)
  return [
    (f'mean of {len(same)} layers of {n} experts', [*steps], np.mean(same, 0))
    for (n, steps), same in groups.items()
  ]


def _edges(steps):
  """Borders of columns: a column reaches from the load before it to its own."""
  first = steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)
  return np.array([max(first, 0), *steps], float)


def _norm(maps):
  """Colours: 1 in the middle, the largest load at the end, 2 at least."""
  from matplotlib import colors

  top = max(2.0, max(float(np.nanmax(m)) for m in maps))
  return colors.TwoSlopeNorm(1.0, 0.0, top)


def _bar(fig, image, axes, label):
  """A colour bar that marks the even share."""
  top = image.norm.vmax
  bar = fig.colorbar(image, ax=axes, pad=0.01, aspect=30)
  bar.set_ticks([0, 0.5, 1, top], labels=['0', '0.5', 'even', f'{top:.1f}'])
  bar.set_label(label)
  bar.outline.set_visible(False)


def draw(rows, path, title=''):
  """Draws the loads of one run -> path of the PNG.

  Args:
    rows: {step: {name: value}} as metrics.read gives them.
    path: of the PNG. title: above the picture.

  Raises:
    UserError: the rows hold no loads, or the file cannot be written.
  """
  maps = panels(rows)
  if not maps:
    raise errors.UserError(f'{path}: the run has no experts, or no loads yet.')
  curves = {name: plot.curve(rows, name) for name in LINES}
  lines = [(name, curve) for name, curve in curves.items() if curve.size]
  heights = [1.5] * len(maps) + [0.9] * len(lines)
  fig = figures.make(8.5, 1 + sum(heights))
  all_axes = fig.subplots(
    len(heights), 1, sharex=True, squeeze=False, height_ratios=heights
  )[:, 0]
  norm = _norm([m for *_, m in maps])
  for ax, (name, steps, even) in zip(all_axes, maps, strict=False):
    image = ax.pcolormesh(
      _edges(steps), np.arange(len(even) + 1) - 0.5, even,
      cmap='RdBu_r', norm=norm, rasterized=True,
    )  # fmt: skip
    ax.set_ylim(len(even) - 0.5, -0.5)
    ax.set_title(name, loc='left', fontsize=9)
    ax.set_ylabel('expert')
    ax.set_yticks(range(0, len(even), max(1, len(even) // 4)))
    ax.spines[:].set_visible(False)
  _bar(fig, image, list(all_axes[: len(maps)]), 'load / even load')
  for ax, (name, curve), colour in zip(
    all_axes[len(maps) :], lines, figures.COLOURS, strict=False
  ):
    _line(ax, name, curve, colour)
  all_axes[-1].set_xlabel('step')
  fig.suptitle(figures.plain(title), fontweight='bold')
  fig.align_ylabels(all_axes)
  return figures.save(fig, path)


def _line(ax, name, curve, colour):
  """One metric; a thin line where it would be ideal."""
  (label, ideal), (steps, values) = LINES[name], curve
  ax.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
  ax.plot(steps, plot.smooth(values), color=colour, linewidth=1.8)
  if ideal is not None:
    ax.axhline(ideal, color='#666666', linewidth=0.8, linestyle=':')
  top = max(float(np.max(values)), (ideal or 0) + 0.01)
  ax.set_ylim(0 if ideal == 0 else None, top * 1.05)
  ax.set_ylabel(label)
  figures.tidy(ax)
  ax.margins(x=0.0)


def draw_domains(runs, path):
  """Draws which experts each domain uses -> path of the PNG.

  Args:
    runs: {title: {domain: (L, E) assignments}}; a row of maps for each.
    path: of the PNG.
  """
  shares = {
    title: np.array(list(loads.values()), float)
    for title, loads in runs.items()
  }
  shares = {t: x / x.sum(-1, keepdims=True) for t, x in shares.items()}
  domains = [figures.plain(name) for name in next(iter(runs.values()))]
  layers = next(iter(shares.values())).shape[1]
  fig = figures.make(1.6 + 2.1 * layers, 0.6 + 1.7 * len(runs))
  axes = fig.subplots(
    len(runs), layers, sharex=True, sharey=True, squeeze=False
  )
  norm = _norm([x * x.shape[-1] for x in shares.values()])
  for row, (title, share) in zip(axes, shares.items(), strict=True):
    for l, ax in enumerate(row):
      image = ax.imshow(
        share[:, l] * share.shape[-1], cmap='RdBu_r', norm=norm, aspect='auto'
      )
      ax.set_title(figures.plain(f'{title}, layer {l}'), fontsize=9)
      ax.spines[:].set_visible(False)
      ax.set_yticks(range(len(domains)), labels=domains, fontsize=8)
      ax.set_xticks([])
      if ax in axes[-1]:
        ax.set_xlabel('expert')
  _bar(fig, image, axes, 'share of the domain / even share')
  return figures.save(fig, path)
