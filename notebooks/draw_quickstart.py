"""Draws quickstart.png, the picture in the README, from two finished runs.

    paraxis train --config=configs/quickstart.py --workdir=runs/quickstart
    paraxis train --config=configs/quickstart.py --workdir=runs/one_device \\
      --mesh=data=1 --devices=1
    python notebooks/draw_quickstart.py runs/quickstart runs/one_device

Left: the training loss on both meshes, and below it their absolute difference.
Both sum the same float32 numbers in a different order; rounding differences
grow with the steps, as in any training. Right: held-out bits per byte.
"""

import pathlib
import sys

import numpy as np

from paraxis.train.data import baselines
from paraxis.train.plot import figures
from paraxis.train.plot import losses as plot
from paraxis.train.run import metrics

OUTPUT = pathlib.Path(__file__).with_name('quickstart.png')
BLUE, ORANGE, GREY = '#1f5fa8', '#e08a3c', '#b8bfc8'


def draw_losses(above, below, mesh, one):
  """The loss of two runs, and the absolute difference of each step."""
  steps, on_mesh = plot.curve(mesh, 'train/loss')
  _, on_one = plot.curve(one, 'train/loss')
  above.plot(steps, on_one, color=ORANGE, linewidth=3.2, label='one device')
  above.plot(
    steps,
    on_mesh,
    color=BLUE,
    linewidth=0.9,
    label='8 devices: data=2, fsdp=2, tensor=2',
  )
  above.set_ylabel('training loss\n(nats per token)')
  above.legend(frameon=False, loc='upper right')
  apart = np.maximum(np.abs(on_mesh - on_one), 1e-8)
  below.semilogy(steps, apart, color='#444444', linewidth=0.8)
  below.set_ylim(1e-8, 1)
  below.set_yticks([1e-7, 1e-4, 1e-1])
  below.set_ylabel('difference')
  below.set_xlabel('step')


def draw_bits(ax, mesh, one):
  """Held-out bits per byte of both runs and of gzip and xz."""
  base = baselines.text_baselines()
  last = lambda rows: plot.curve(rows, 'eval/bits_per_byte')[1][-1]
  bars = [
    ('gzip -9', base.gzip, GREY),
    ('xz -9e', base.xz, GREY),
    ('one device', last(one), ORANGE),
    ('8 devices', last(mesh), BLUE),
    ('xz -9e, given the\ntraining text too', base.xz_given_training, GREY),
  ]
  names, values, colours = zip(*bars[::-1], strict=True)
  drawn = ax.barh(names, values, color=colours, height=0.62)
  ax.bar_label(drawn, [f'{v:.3f}' for v in values], padding=3)
  ax.set_xlim(0, 1.25 * max(values))
  ax.set_xlabel('held-out text (bits per byte)')
  ax.tick_params(axis='y', length=0)


def main(mesh, one):
  """mesh, one: workdirs of the run on 8 devices and of that on one."""
  mesh, one = metrics.read(mesh), metrics.read(one)
  fig = figures.make(10, 3.9)
  left, right = fig.subfigures(1, 2, width_ratios=(1.6, 1))
  above, below = left.subplots(2, 1, sharex=True, height_ratios=(3, 1))
  draw_losses(above, below, mesh, one)
  bits = right.subplots()
  draw_bits(bits, mesh, one)
  for ax in (above, below, bits):
    figures.tidy(ax)
    ax.margins(x=0.01)
  bits.grid(False)
  left.align_ylabels([above, below])
  fig.savefig(OUTPUT, dpi=120)
  print(f'wrote {OUTPUT}, {OUTPUT.stat().st_size:,} bytes')


if __name__ == '__main__':
  main(*sys.argv[1:3])
