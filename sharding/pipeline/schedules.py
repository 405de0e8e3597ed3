"""Pipeline schedules as values: which microbatch runs where at which tick.

A schedule of p stages (devices), v chunks on each, m microbatches is a table
of phased ticks. In a tick every device runs at most one forward F, then one
backward B, then one weight gradient W; messages travel at the end of it.
Virtual stage s of S = p v holds the s-th run of layers. With g = i // p and
r = i % p, microbatch i is at virtual stage s at tick

    one_f_one_b   F(i, s) = g p v + r + s,   B(i, s) = F(i, S - 1) + S - 1 - s
    interleaved   the same with v > 1
    gpipe         the same F; every B later, the first after the last F
    zero_bubble   and W(i, s) = B(i, s) + s mod p, on all devices at once
    v_half        F(i, s) = 2 i + s,   B(i, s) = F(i, S - 1) + S - 1 - s, where
                  chunk 1 of device d is stage 2 p - 1 - d; W on all at once
    skip          paths that leave stages out (paths.py)

But for gpipe, F and B of the last stage share a tick, with the loss between
them. A tick has both F and B, because devices synchronise at every message:
with one of them a tick, the forward of a device would share a tick with the
backward of its neighbour, and every tick would cost the dearer of the two.

Time over ideal time is 1 + (p - 1) / (v m); with W split off and F = B = W it
is 1 + (2/3) (p - 1) / (v m), for v_half 1 + (2/3) (p - 1) / m. Inputs of chunks
in flight on a device are up to m v in gpipe, 2 (p - 1) + (v - 1) p + 1 in the
others, and 2 p on every device in v_half, each of half a stage: about half of
the 2 p - 1 whole ones of one_f_one_b (p in 1F1B without synchronous ticks).

Sources: GPipe arXiv:1811.06965; 1F1B and interleaving arXiv:2104.04473, section
2.2; the split backward pass arXiv:2401.10241; the V placement arXiv:2405.15362;
SkipPipe arXiv:2502.19913. Closed forms of phased ticks are ours.
"""

import dataclasses
import functools

import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.sharding.pipeline import checks as schedule_check
from paraxis.sharding.pipeline import paths as schedule_paths

# Name -> chunks that it takes: the fewest, the most.
CHUNKS = {
  'gpipe': (1, None),
  'one_f_one_b': (1, 1),
  'interleaved': (2, None),
  'zero_bubble': (1, None),
  'v_half': (2, 2),
  'skip': (1, 1),
}
NAMES = tuple(CHUNKS)
MOST_CELLS = 2**18  # of a table, which a Python loop fills in seconds


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
  """What runs where and when; NumPy on the host.

  Attributes:
    name: one of NAMES, or 'paths'.
    stages, chunks, microbatches: p, v, m.
    placement: (p, v) int32, the virtual stage that is chunk c of device d.
    forward, backward: (ticks, p, 2) int32, (microbatch, chunk) or (-1, -1).
    weight: the same, or None when B computes weight gradients too.
    paths: for each microbatch the virtual stages that it visits, in order.
  """

  name: str
  stages: int
  chunks: int
  microbatches: int
  placement: np.ndarray
  forward: np.ndarray
  backward: np.ndarray
  weight: np.ndarray | None
  paths: tuple

  @property
  def ticks(self):
    return len(self.forward)

  @property
  def virtual_stages(self):
    """S = p v."""
    return self.placement.size

  @property
  def phases(self):
    """{'F': forward, 'B': backward}, and 'W': weight where it is split off."""
    found = {'F': self.forward, 'B': self.backward}
    return found if self.weight is None else found | {'W': self.weight}

  def device_of(self, stage):
    """Virtual stage -> (device, chunk)."""
    return self._homes[stage]

  @functools.cached_property
  def _homes(self):
    return {int(s): at for at, s in np.ndenumerate(self.placement)}

  @functools.cached_property
  def when(self):
    """{'F': {(microbatch, virtual stage): tick}, 'B': ..., 'W': ...}."""
    out = {}
    for phase, table in self.phases.items():
      found = out[phase] = {}
      for tick, device in np.argwhere(table[..., 0] >= 0):
        microbatch, chunk = table[tick, device]
        stage = int(self.placement[device, chunk])
        found[int(microbatch), stage] = int(tick)
    return out

  def visits(self):
    """Yields (microbatch, stage before, stage, stage after); None: an end."""
    for i, path in enumerate(self.paths):
      around = zip((None, *path), path, (*path[1:], None), strict=False)
      for before, stage, after in around:
        yield i, before, stage, after

  def ends(self):
    """{'embed' | 'loss' | 'embed_back': tick of each microbatch}.

    What all devices do together: before the first F, after the last F, and
    after the last B of a microbatch.
    """
    F, B = self.when['F'], self.when['B']
    paths = list(enumerate(self.paths))
    return {
      'embed': [F[i, path[0]] for i, path in paths],
      'loss': [F[i, path[-1]] for i, path in paths],
      'embed_back': [B[i, path[0]] for i, path in paths],
    }

  def spans(self):
    """{(microbatch, stage): (first, last tick that its input is held)}.

    An input arrives at the end of the tick of the forward before it, so it is
    held from the next one on; the first is embedded where it is used.
    """
    F, B = self.when['F'], self.when['B']
    return {
      (i, s): (F[i, s] if before is None else F[i, before] + 1, B[i, s])
      for i, before, s, _ in self.visits()
    }

  def in_flight(self):
    """Most chunk inputs that each device holds at once: a tuple of p ints."""
    change = np.zeros((self.ticks + 2, self.stages), int)
    for (_, stage), (first, last) in self.spans().items():
      device, _ = self.device_of(stage)
      change[first, device] += 1
      change[last + 1, device] -= 1
    return tuple(int(n) for n in change.cumsum(0).max(0))

  def faults(self):
    """[text] of the rules of checks.py that this breaks; [] if it is valid."""
    return schedule_check.faults(self)

  def text(self, width=80, rows=64):
    """A table, a line for each tick and a column for each device.

    F3.1: forward of microbatch 3 through the device's chunk 1. The table is
    cut to `width` columns of text and `rows` ticks; then the last line says how
    many devices and ticks are missing.
    """
    size = max(len(self._cell(0, 0)), len(f'device {self.stages - 1}')) + 2
    devices = min(self.stages, max(1, (width - 5) // size))
    head = ''.join(f'{f"device {d}":{size}}' for d in range(devices))
    lines = [f'tick {head}'.rstrip()]
    for tick in range(min(self.ticks, rows)):
      cells = ''.join(f'{self._cell(tick, d):{size}}' for d in range(devices))
      lines.append(f'{tick:4} {cells}'.rstrip())
    cut = []
    if devices < self.stages:
      cut.append(f'{self.stages - devices} more devices')
    if self.ticks > rows:
      cut.append(f'{self.ticks - rows} more ticks')
    if cut:
      lines.append(f'(not shown: {", ".join(cut)})')
    return '\n'.join(lines)

  def _cell(self, tick, device):
    """Text of a cell; all are equally wide."""

    def text(phase, microbatch, chunk):
      return f'{phase}{microbatch}' + f'.{chunk}' * (self.chunks > 1)

    size = len(text('F', self.microbatches - 1, self.chunks - 1))
    parts = []
    for phase, table in self.phases.items():
      active = table[tick, device, 0] >= 0
      part = text(phase, *table[tick, device]) if active else '.'
      parts.append(f'{part:{size}}')
    return ' '.join(parts)


def make(name, stages, microbatches, chunks=1, fraction=0.0, seed=0):
  """A schedule by name.

  Args:
    name: of NAMES.
    stages, microbatches, chunks: p, m, v.
    fraction, seed: of the schedule skip, as for schedule_paths.skip_paths.

  Raises:
    UserError: no such schedule, or numbers that do not fit it.
  """
  if name not in CHUNKS:
    raise errors.UserError(
      f'{name!r} is not a schedule; there are {", ".join(NAMES)}.'
      + schema.suggest(name, NAMES)
    )
  _check(name, stages, microbatches, chunks)
  if name == 'skip':
    paths = schedule_paths.skip_paths(stages, microbatches, fraction, seed)
    return dataclasses.replace(from_paths(stages, paths), name='skip')
  if fraction:
    raise errors.UserError(
      f'{name} leaves no stage out: a skip fraction of {fraction:g} is for the '
      'schedule skip.'
    )
  forward, backward, weight = _closed_form(name, stages, microbatches, chunks)
  paths = (tuple(range(stages * chunks)),) * microbatches
  every = [(i, s) for i, path in enumerate(paths) for s in path]
  ticks = [
    None if f is None else {key: f(*key) for key in every}
    for f in (forward, backward, weight)
  ]
  return _build(name, _placement(name, stages, chunks), paths, *ticks)


def of_size(schedule, microbatches):
  """The same schedule for another number of microbatches.

  If paths differ, the first ones are kept: there must be enough of them.

  Raises:
    UserError: as `make`.
  """
  if schedule.microbatches == microbatches:
    return schedule
  if schedule.name in CHUNKS and schedule.name != 'skip':
    return make(schedule.name, schedule.stages, microbatches, schedule.chunks)
  made = from_paths(schedule.stages, schedule.paths[:microbatches])
  return dataclasses.replace(made, name=schedule.name)


def check_size(schedule, microbatches, what):
  """UserError, which begins with `what`, if that many do not fit it."""
  if schedule.name in CHUNKS:
    try:
      _check(schedule.name, schedule.stages, microbatches, schedule.chunks)
    except errors.UserError as e:
      raise errors.UserError(f'{what}: {e}') from None


def from_paths(stages, paths):
  """A schedule of one chunk a stage for paths of one's own.

  Args:
    paths: for each microbatch the stages it visits, in order, none twice.

  Raises:
    UserError: a path is empty, visits a stage twice or one beyond `stages`.
  """
  if not paths:
    raise errors.UserError('there is no path: a schedule needs a microbatch.')
  for i, path in enumerate(paths):
    wrong = [s for s in path if s not in range(stages)]
    if not path or wrong or len(set(path)) < len(path):
      raise errors.UserError(
        f'the path {tuple(path)} of microbatch {i} must visit at least one of '
        f'the stages 0..{stages - 1}, and none twice.'
      )
  paths = tuple(tuple(int(s) for s in path) for path in paths)
  ticks = schedule_paths.place(paths)
  return _build('paths', _placement('paths', stages, 1), paths, *ticks, None)


def _check(name, stages, microbatches, chunks):
  """UserError where the numbers do not fit the schedule."""
  for what, n in (('stages', stages), ('microbatches', microbatches)):
    if n < 1:
      raise errors.UserError(f'{name}: {what}={n}, but at least 1 is needed.')
  fewest, most = CHUNKS[name]
  if not fewest <= chunks <= (most or chunks):
    wanted = f'{fewest} chunk' + 's' * (fewest > 1)
    wanted = wanted if fewest == most else f'at least {wanted}'
    other = {'one_f_one_b': 'interleaved', 'interleaved': 'one_f_one_b'}
    hint = f', or take {other[name]}' if name in other else ''
    raise errors.UserError(
      f'{name} runs {wanted} on each stage, got chunks={chunks}{hint}.'
    )
  cells = stages * chunks * (microbatches + stages)
  if cells > MOST_CELLS:
    raise errors.UserError(
      f'{name}: stages={stages} x chunks={chunks} x (microbatches='
      f'{microbatches} + stages) is a table of {cells:,} operations, more than '
      f'{MOST_CELLS:,}: take fewer.'
    )
  if name != 'v_half' and chunks > 1 and microbatches % stages:
    below = microbatches // stages * stages
    nearest = [n for n in (below, below + stages) if n]
    raise errors.UserError(
      f'{name} with chunks={chunks} runs microbatches in groups of as many as '
      f'stages: microbatches={microbatches} is not a multiple of '
      f'stages={stages}; the nearest that are: '
      f'{", ".join(map(str, nearest))}.'
    )


def _placement(name, p, v):
  """(p, v) virtual stages: cyclic, or V-shaped."""
  d, c = np.arange(p)[:, None], np.arange(v)[None]
  place = np.where(c == 0, d, 2 * p - 1 - d) if name == 'v_half' else c * p + d
  return place.astype(np.int32)


def _closed_form(name, p, m, v):
  """Ticks of F, B and W (or None), functions of (microbatch, stage)."""
  last = p * v - 1
  if name == 'v_half':

    def weight(i, s):
      # B of chunk 0 is on device d d ticks before it is on device 0, B of chunk
      # 1 d ticks after. With these delays W of a chunk is on one parity of
      # ticks, the same on all devices.
      d = min(s, last - s)
      delay = d if s < p else p - 1 + (p % 2 == 0) - d
      return backward(i, s) + delay

    forward = lambda i, s: 2 * i + s
    backward = lambda i, s: 2 * i + last + last - s
    return forward, backward, weight
  start = lambda i: i // p * p * v + i % p
  forward = lambda i, s: start(i) + s
  # Backward passes start after the last microbatch in GPipe, after the first
  # one in the others.
  turn = start(m - 1) + last + 1 if name == 'gpipe' else last
  backward = lambda i, s: turn + start(i) + last - s
  if name != 'zero_bubble':
    return forward, backward, None
  return forward, backward, lambda i, s: backward(i, s) + s % p


def _build(name, placement, paths, forward, backward, weight):
  """Schedule from dicts {(microbatch, virtual stage): tick}."""
  stages, chunks = placement.shape
  homes = {int(s): at for at, s in np.ndenumerate(placement)}
  phases = [forward, backward, weight]
  ticks = 1 + max(t for phase in phases if phase for t in phase.values())

  def table(phase):
    out = np.full((ticks, stages, 2), -1, np.int32)
    for (i, stage), tick in phase.items():
      device, chunk = homes[stage]
      if out[tick, device, 0] >= 0:
        raise AssertionError(f'{name}: two at tick {tick}, device {device}')
      out[tick, device] = i, chunk
    return out

  return Schedule(
    name,
    stages,
    chunks,
    len(paths),
    placement,
    table(forward),
    table(backward),
    None if weight is None else table(weight),
    paths,
  )
