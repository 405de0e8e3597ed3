"""`paraxis plot schedule NAME`: a pipeline schedule as a chart.

Devices go down, time to the right; a box is one operation, its colour the
phase, its shade the chunk, its number the microbatch. Time is that of the
lock-step machine (sharding/planner/simulate.py) with F, B and W of one chunk
equal to 1; where the schedule does not split W off, B takes 2. Gaps are
waiting. Training runs in lock step; a schedule that skips stages is compared
with 1F1B in both machines.
"""

from typing import NamedTuple

from paraxis.configs.base import errors
from paraxis.sharding.pipeline import schedules
from paraxis.sharding.planner import simulate
from paraxis.train.plot import figures

COLOURS = {'F': '#1f5fa8', 'B': '#d1602b', 'W': '#2f8f5b'}
PHASES = {'F': 'forward', 'B': 'backward', 'W': 'weight gradient'}
MOST_BOXES = 20_000  # a picture of more has nothing to see, and takes minutes
WIDTH = 8.0, 40.0  # inches: the least, the most
UNIT = 0.2  # inches for a unit of time, where the most allows it
ROW = 0.42  # inches for a device
READABLE = 4.0  # points: smaller numbers are left out


class Box(NamedTuple):
  """One operation on the chart; time in chunks of forward."""

  device: int
  start: float
  width: float
  phase: str
  microbatch: int
  chunk: int


def boxes(schedule):
  """[Box] of all operations of a schedules.Schedule, by start."""
  whole = dict.fromkeys(('forward', 'backward', 'weight'), schedule.chunks)
  when = simulate.timeline(schedule, 'lock_step', **whole)
  found = []
  for (phase, microbatch, stage), (start, end) in when.items():
    device, chunk = schedule.device_of(stage)
    found.append(Box(device, start, end - start, phase, microbatch, chunk))
  return sorted(found, key=lambda b: (b.start, b.device))


def summary(schedule):
  """Two lines: stages, microbatches; time / ideal, inputs held per device.

  Of skip more: its ideal is that of its fewer operations, so the time itself
  stands beside 1F1B's, which runs all.
  """
  result = simulate.run(schedule, 'lock_step')
  ratio, held = float(result.time / result.ideal), result.peak
  chunks = f' of {schedule.chunks} chunks' if schedule.chunks > 1 else ''
  text = ' '.join(map(str, held)) if len(held) <= 8 else f'at most {max(held)}'
  text = (
    f'{schedule.name}: stages {schedule.stages}{chunks}, microbatches '
    f'{schedule.microbatches}\ntime / ideal {ratio:.4f} in lock step, '
    f'chunk inputs held {text}'
  )
  return text if schedule.name != 'skip' else f'{text}\n{against(schedule)}'


def against(schedule):
  """Two lines: units of time (F = B = W = 1) of a schedule and of 1F1B.

  1F1B has as many stages and microbatches, and leaves no stage out.
  """
  whole = schedules.make('one_f_one_b', schedule.stages, schedule.microbatches)
  lines = []
  for model in simulate.MODELS:
    own, other = (float(simulate.run(s, model).time) for s in (schedule, whole))
    word = 'gains' if own < other else 'LOSES' if own > other else 'equals'
    lines.append(
      f'{model.replace("_", " ")}: {own:g} units of time, 1F1B {other:g}: '
      f'{word}' + (f' {abs(1 - own / other):.1%}' if own != other else '')
    )
  return '\n'.join(lines)


def _shade(phase, chunk, chunks):
  """Colour of a phase, the lighter the later the chunk."""
  from matplotlib import colors

  light = 0.62 * chunk / max(chunks - 1, 1)
  r, g, b = (c + (1 - c) * light for c in colors.to_rgb(COLOURS[phase]))
  return r, g, b


def _ink(colour):
  """Black or white, whichever is read better on a colour."""
  r, g, b = colour
  return 'black' if 0.299 * r + 0.587 * g + 0.114 * b > 0.55 else 'white'


def chart(schedule):
  """matplotlib figure of a schedules.Schedule.

  Raises:
    UserError: more operations than a picture can show.
  """
  count = sum(map(len, schedule.when.values()))
  if count > MOST_BOXES:
    raise errors.UserError(
      f'{schedule.name}: {count:,} operations do not fit a picture, at most '
      f'{MOST_BOXES:,} do: fewer microbatches show the same pattern.'
    )
  shown = boxes(schedule)
  end = max(b.start + b.width for b in shown)
  width = min(max(WIDTH[0], 1.2 + UNIT * end), WIDTH[1])
  height = 1.5 + ROW * schedule.stages
  fig = figures.make(width, height)
  ax = fig.subplots()
  digits = len(str(schedule.microbatches - 1))
  narrowest = min(b.width for b in shown) * 72 * (width - 1.2) / end  # points
  size = min(9.0, 1.35 * narrowest / digits)
  for box in shown:
    _draw(ax, box, schedule.chunks, size)
  ax.set_xlim(0, end)
  ax.set_ylim(schedule.stages - 0.5, -0.5)
  ax.set_yticks(range(schedule.stages))
  ax.set_yticklabels([f'device {d}' for d in range(schedule.stages)])
  ax.tick_params(axis='y', length=0)
  ax.spines[['top', 'right', 'left']].set_visible(False)
  ax.set_xlabel('time (forward of a chunk = 1)')
  ax.set_title(summary(schedule), loc='left', fontsize=10)
  _legend(fig, schedule)
  return fig


def _draw(ax, box, chunks, size):
  """A box, and its number where one of `size` points can be read."""
  from matplotlib import patches

  colour = _shade(box.phase, box.chunk, chunks)
  corner = box.start, box.device - 0.42
  ax.add_patch(
    patches.Rectangle(
      corner,
      box.width,
      0.84,
      facecolor=colour,
      edgecolor='white',
      linewidth=0.6,
    )
  )
  if size >= READABLE:
    ax.text(
      box.start + box.width / 2,
      box.device,
      str(box.microbatch),
      ha='center',
      va='center',
      fontsize=size,
      color=_ink(colour),
    )


def _legend(fig, schedule):
  """A patch for each phase and chunk, below the chart."""
  from matplotlib import patches

  handles = []
  for phase in schedule.when:
    for chunk in range(schedule.chunks):
      name = PHASES[phase] + (f', chunk {chunk}' if schedule.chunks > 1 else '')
      colour = _shade(phase, chunk, schedule.chunks)
      handles.append(patches.Patch(facecolor=colour, label=name))
  columns = len(handles) if schedule.chunks <= 2 else schedule.chunks
  fig.legend(
    handles=handles,
    loc='outside lower center',
    ncols=columns,
    frameon=False,
    fontsize=8,
  )


def draw(name, stages, microbatches, chunks=0, output='', fraction=0.0):
  """Draws a schedule by name -> (path of the PNG, schedules.Schedule).

  Args:
    name, stages, microbatches, chunks, fraction: as for schedules.make;
      chunks=0: the fewest that the schedule takes.
    output: file; '': NAME.png in the current folder.

  Raises:
    UserError: no such schedule, numbers that do not fit it, or the file cannot
      be written.
  """
  least = schedules.CHUNKS.get(name, (1, 1))[0]
  schedule = schedules.make(
    name, stages, microbatches, chunks or least, fraction
  )
  fig = chart(schedule)
  return figures.save(fig, output or f'{name}.png'), schedule
