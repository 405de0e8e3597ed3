"""Drawings of a layout: the shard of each device, memory and traffic, losses.

`grid` draws arrays as squares, cut as their shardings cut them. A part that one
device holds has its colour and number; a part that several hold is grey and
shows them all. Rows of tokens are drawn in the order of the text, so that a
context order (zigzag, striped) shows.
"""

import io
import math
from typing import Any, NamedTuple

from paraxis.train.plot import figures

SURFACE = '#eef0f2'  # of a part with several holders
DEVICES = (
  '#8dd3c7', '#fdb462', '#80b1d3', '#fccde5', '#b3de69', '#ffed6f', '#bc80bd',
  '#fb8072',
)  # fmt: skip
COLOURS = {
  'parameters': '#1f5fa8',
  'gradients': '#d1602b',
  'optimizer': '#2f8f5b',
  'temporary': '#b8bfc8',
  'all-reduce': '#b03060',
  'all-gather': '#1f5fa8',
  'reduce-scatter': '#e08a3c',
  'all-to-all': '#2f8f5b',
  'collective-permute': '#8a4fae',
}


class Picture(NamedTuple):
  """Two dimensions of an array, to be drawn.

  title: text. shape: of the whole array. sharding: jax.NamedSharding. names: of
  all dimensions. dims: the two drawn, down and across. order: place on the mesh
  -> place in the text, of the dimension across; None: the same.
  """

  title: str
  shape: tuple
  sharding: Any
  names: tuple
  dims: tuple = (0, 1)
  order: Any = None


def holders(picture):
  """Who holds which part.

  Returns:
    {((top, bottom), (left, right)): [places of devices in the mesh, sorted]},
    in elements of the two dimensions; together they cover each element once.

  Raises:
    ValueError: a dimension that is not drawn is sharded.
  """
  shape, sharding = picture.shape, picture.sharding
  for i, axes in enumerate(sharding.spec):
    if axes and i not in picture.dims:
      raise ValueError(
        f'{picture.title}: dimension {i} ({picture.names[i]}) is sharded over '
        f'{axes} and not drawn.'
      )
  held = sharding.devices_indices_map(tuple(shape))
  out = {}
  for place, device in enumerate(sharding.mesh.devices.flat):
    down, across = (held[device][i].indices(shape[i])[:2] for i in picture.dims)
    for run in _runs(across, picture.order):
      out.setdefault((down, run), []).append(place)
  return out


def _runs(span, order):
  """Spans [first, last) of the text that one span of the mesh's order holds."""
  if order is None:
    return [span]
  places = sorted(int(p) for p in order[slice(*span)])
  cuts = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
  ends = zip([0, *cuts], [*cuts, len(places)], strict=True)
  return [(places[a], places[b - 1] + 1) for a, b in ends]


def _axes_of(picture, dim):
  """'vocab' or 'vocab over tensor'."""
  axes = picture.sharding.spec[dim] if dim < len(picture.sharding.spec) else ()
  axes = axes if isinstance(axes, tuple) else (axes,) if axes else ()
  name = picture.names[dim].replace('_', ' ')
  return f'{name}\nover {", ".join(axes)}' if axes else name


def _draw(ax, picture):
  """One picture on matplotlib axes."""
  colour = lambda device: DEVICES[device % len(DEVICES)]
  rows, columns = (picture.shape[i] for i in picture.dims)
  for (down, across), devices in holders(picture).items():
    left, width = across[0] / columns, (across[1] - across[0]) / columns
    top, height = down[0] / rows, (down[1] - down[0]) / rows
    one = len(devices) == 1
    fill, thin = colour(devices[0]) if one else SURFACE, min(width, height)
    frame = 0.8 if thin > 0.04 else 0  # stripes: the colour alone
    ax.add_patch(_rectangle((left, top, width, height), fill, frame))
    # Chips of the holders: a part of all the width has four in a line.
    n = 1 if one else min(len(devices), max(1, round(4 * width)))
    lines = math.ceil(len(devices) / n)
    for i, device in enumerate(devices):
      x = left + width * (i % n + 0.5) / n
      y = top + height * (i // n + 0.5) / lines
      if not one:
        w, h = 0.8 * width / n, min(0.8 * height / lines, 0.2)
        box = x - w / 2, y - h / 2, w, h
        ax.add_patch(_rectangle(box, colour(device), 0))
      if frame:
        size = 5 if thin < 0.1 else 6.5
        ax.text(x, y, device, ha='center', va='center', fontsize=size)
  ax.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
  ax.set_xlabel(_axes_of(picture, picture.dims[1]), fontsize=7, labelpad=2)
  ax.set_ylabel(_axes_of(picture, picture.dims[0]), fontsize=7, labelpad=2)
  ax.spines[:].set_visible(False)


def _rectangle(box, colour, line):
  from matplotlib import patches

  left, top, width, height = box
  return patches.Rectangle(
    (left, top), width, height, facecolor=colour, edgecolor='#222222',
    linewidth=line, clip_on=False,
  )  # fmt: skip


def png(fig):
  """A Figure as the bytes of a PNG."""
  out = io.BytesIO()
  fig.savefig(out, format='png')
  return out.getvalue()


def grid(rows):
  """Pictures in rows, a row a layout -> matplotlib Figure.

  Args:
    rows: {label: [Picture]}, all rows with the same titles.
  """
  columns = max(map(len, rows.values()))
  fig = figures.make(1.75 * columns, 1.6 * len(rows), dpi=160)
  axes = fig.subplots(len(rows), columns, squeeze=False)
  for line, (label, pictures) in zip(axes, rows.items(), strict=True):
    for ax, picture in zip(line, pictures, strict=True):
      _draw(ax, picture)
    line[0].annotate(
      label, (-0.42, 0.5), xycoords='axes fraction', rotation=90, fontsize=8,
      fontweight='bold', ha='center', va='center', annotation_clip=False,
    )  # fmt: skip
  for ax, picture in zip(axes[0], pictures, strict=True):
    ax.set_title(picture.title, fontsize=8, fontweight='bold')
  return fig


def costs(held, received):
  """What a device holds and receives, as two bar charts -> matplotlib Figure.

  Args:
    held: {layout: {class: bytes}}.
    received: {layout: [(kind, mesh axes, bytes)]}.
  """
  fig = figures.make(8.75, 0.45 * len(held) + 1.4, dpi=160)
  left, right = fig.subplots(1, 2, sharey=True, width_ratios=(1, 1.8))
  classes = {k: [(a, '', b) for a, b in row.items()] for k, row in held.items()}
  _bars(left, classes)
  _bars(right, received)
  left.set_title('MB held by a device', fontsize=9, loc='left')
  right.set_title('MB received by a device in a step', fontsize=9, loc='left')
  left.invert_yaxis()
  return fig


def _bars(ax, bars):
  """Stacked bars of {layout: [(kind, text, bytes)]}."""
  top = max(sum(row[2] for row in rows) for rows in bars.values())
  for layout, rows in bars.items():
    start = 0
    for kind, text, size in rows:
      ax.barh(
        layout, size / 1e6, left=start / 1e6, height=0.62, label=kind,
        color=COLOURS.get(kind, '#5f6b7a'), edgecolor='white',
      )  # fmt: skip
      if size > 0.04 * top:
        ax.text(
          (start + size / 2) / 1e6, layout, text, ha='center', va='center',
          color='white', fontsize=7 if size > 0.12 * top else 5,
        )  # fmt: skip
      start += size
  ax.spines[['top', 'right', 'left']].set_visible(False)
  ax.tick_params(axis='y', length=0)
  handles, names = ax.get_legend_handles_labels()
  once = dict(zip(names, handles, strict=True))
  ax.legend(
    once.values(), once, fontsize=7, frameon=False, ncols=2,
    loc='upper center', bbox_to_anchor=(0.5, -0.12),
  )  # fmt: skip


def losses(curves, one):
  """Losses of every layout, and how far they are from one device's -> Figure.

  Args:
    curves: {layout: losses of the steps}.
    one: those of one device, the same steps.
  """
  fig = figures.make(8.75, 2.9, dpi=160)
  left, right = fig.subplots(1, 2)
  steps = range(1, len(one) + 1)
  left.plot(steps, one, color='#c8ccd2', linewidth=9, label='one device')
  floor = 1e-17
  for i, (layout, values) in enumerate(curves.items()):
    colour = f'C{i}'
    width = 1.2 * (len(curves) - i)
    left.plot(steps, values, color=colour, linewidth=width, label=layout)
    apart = [max(abs(a - b), floor) for a, b in zip(values, one, strict=True)]
    right.semilogy(steps, apart, 'o-', color=colour, markersize=3, label=layout)
  left.set_title('loss (nats per token)', fontsize=9, loc='left')
  right.set_title('difference from one device', fontsize=9, loc='left')
  right.set_ylim(floor / 3, 1)
  for ax in (left, right):
    ax.set_xticks(steps)
    ax.set_xlabel('step')
    figures.tidy(ax)
  left.legend(fontsize=7, frameon=False)
  return fig
