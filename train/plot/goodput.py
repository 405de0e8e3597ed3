"""`paraxis plot --goodput`: where the time of a run went, over all its starts.

Above, a row for each start: time to the right, the colour what most of the
time in that column went to, after its end how long nothing ran. Below, the
parts of the whole. A run of more than `ROWS` starts has one row.
"""

import datetime
import pathlib

import numpy as np

from paraxis.train.plot import figures
from paraxis.train.run import goodput

NAME = 'goodput.png'
ROWS = 30
COLUMNS = 1500
COLOURS = dict(
  zip(
    goodput.PARTS,
    (
      '#2f8f5b', '#d1602b', '#1f5fa8', '#8a4fae', '#e0b03c', '#5fb0c8',
      '#b03060', '#8c959f', '#dfe3e6',
    ),
    strict=True,
  )
)  # fmt: skip
UNITS = (
  (2 * 86400, 86400, 'days'),
  (7200, 3600, 'hours'),
  (120, 60, 'minutes'),
)


def text(account):
  """The table of goodput.account's account."""
  lost, starts = account['lost_steps'], account['attempts']
  lines = [
    f'goodput {account["goodput"]:.1%} of {account["wall"]:,.1f} s in '
    f'{len(starts)} start{"s" * (len(starts) != 1)}; {lost} '
    f'step{"s" * (lost != 1)} done and lost',
    f'{"share":>7} {"seconds":>12}  part',
  ]
  for part, seconds in account['seconds'].items():
    share = seconds / account['wall']
    lines.append(f'{share:7.1%} {seconds:12,.1f}  {part}')
  # What a start takes but for the restore: compiling and the part 'other'.
  costs = {
    n.replace('compile', 'start'): x for n, x in account['costs'].items()
  }
  each = (f'{name} {seconds:.3g}' for name, seconds in costs.items())
  lines.append(f'seconds of one: {", ".join(each)}')
  lines.append(
    f'{"start":>7} {"seconds":>12}  {"began (UTC)":19}  {"steps":>17} '
    f'{"committed":>9} {"lost":>6}  ended'
  )
  hidden = max(len(starts) - ROWS, 0)
  lines += [f'        ... {hidden} earlier ones'] if hidden else []
  for i, one in enumerate(starts[hidden:], hidden + 1):
    lines.append(_start(i, one, i == len(starts)))
  if bad := account['damaged_lines']:
    lines.append(f'{bad} damaged lines are left out')
  return '\n'.join(lines)


def _start(i, one, newest):
  """A row of the table: start i, a dict of an account's attempts."""
  began = datetime.datetime.fromtimestamp(one['began'], datetime.UTC)
  steps = '-' if one['last'] is None else f'{one["first"]} to {one["last"]}'
  committed = '-' if one['committed'] is None else one['committed']
  why = one['ended'] or ('killed, or it runs' if newest else 'killed')
  why = ''.join(c if c.isprintable() else '?' for c in why)  # no escape codes
  return (
    f'{i:7} {one["seconds"]:12,.1f}  {began:%Y-%m-%d %H:%M:%S}  {steps:>17} '
    f'{committed:>9} {one["lost"]:6}  {why}'
  )


def columns(spans, starts, count=COLUMNS):
  """Which part most of a column went to, (rows, count) int; -1: none.

  Args:
    spans: [goodput.Span]. starts: how many; a row each.
  """
  first, last = spans[0].start, spans[-1].end
  rows = starts if 1 < starts <= ROWS else 1
  shares = np.zeros((rows, count, len(goodput.PARTS)))
  for span in spans:
    row = shares[max(span.attempt - 1, 0) if rows > 1 else 0]
    part = goodput.PARTS.index(span.part)
    a, b = (
      (t - first) * count / (last - first) for t in (span.start, span.end)
    )
    i, j = min(int(a), count - 1), min(int(b), count - 1)
    if i == j:
      row[i, part] += b - a
    else:
      row[i, part] += i + 1 - a
      row[i + 1 : j, part] += 1
      row[j, part] += b - j
  return np.where(shares.any(-1), shares.argmax(-1), -1)


def draw(workdir, account, output=None):
  """Draws a run -> path of the PNG, by default goodput.png in its folder.

  account: that goodput.account gives for it.
  """
  spans, starts, _ = goodput.read(workdir)
  wall, unit, name = account['wall'], 1, 'seconds'
  for least, size, word in reversed(UNITS):
    if wall >= least:
      unit, name = size, word
  cells = columns(spans, len(starts))
  height = 0.7 + 0.28 * len(cells)
  fig = figures.make(8.5, 3.6 + height)
  above, below = fig.subplots(2, 1, height_ratios=(height, 2.4))
  palette = [*COLOURS.values(), '#ffffff']  # the last one is -1
  rgb = np.array([[int(c[k : k + 2], 16) for k in (1, 3, 5)] for c in palette])
  above.imshow(
    rgb[cells].astype(np.uint8),
    aspect='auto',
    interpolation='nearest',
    extent=(0, wall / unit, len(cells) + 0.5, 0.5),
  )
  above.set_xlabel(name)
  above.set_ylabel('start' if len(cells) > 1 else '')
  above.set_yticks(range(1, len(cells) + 1, 1 + len(cells) // 8))
  parts = list(account['seconds'])
  shares = [account['seconds'][part] / wall for part in parts]
  bars = below.barh(
    parts, shares, color=[COLOURS[part] for part in parts], edgecolor='#8c959f',
    linewidth=0.4,
  )  # fmt: skip
  below.bar_label(bars, [f'{share:.1%}' for share in shares], padding=4)
  below.invert_yaxis()
  below.set_xlim(0, 1.12 * max(shares))
  below.xaxis.set_major_formatter(lambda x, _: f'{x:.0%}')
  figures.tidy(below)
  fig.suptitle(
    f'goodput {account["goodput"]:.1%}, {len(starts)} starts, '
    f'{account["lost_steps"]} steps lost',
    fontweight='bold',
  )
  return figures.save(fig, output or pathlib.Path(workdir) / NAME)
