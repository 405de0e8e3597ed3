"""A trace of some steps, and which operations took their time.

`paraxis train --profile=5:8` writes RUN/profile/, for TensorBoard or Perfetto,
and RUN/profile.json, for `paraxis plot --profile`.

An operation's time is its own: that of a loop is without those inside of it. A
collective's holds the waiting for other devices. Of several processes only the
first traces, its own devices. The line of source and the scopes
('layer_F/attention': jax.named_scope in models/, train/step.py, a user's own
mixer) are from the compiled program; a fusion has those of its root.
"""

import collections
import contextlib
import json
import pathlib
import re
from typing import Any, NamedTuple

import jax

FOLDER = 'profile'
FILE = 'profile.json'
SHOWN = 10
COLLECTIVES = (
  'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all',
  'collective-permute', 'ragged-all-to-all', 'collective-broadcast',
)  # fmt: skip
_OP = re.compile(
  r'^\s*(?:ROOT )?%?([\w.-]+) = .*?metadata={(?:[^}]*?op_name="([^"]*)")?'
  r'[^}]*?(?:stack_frame_id=(\d+)|source_file="([^"]*)"[^}]*?source_line='
  r'(\d+))',
  re.M,
)
# What jax adds to a path of scopes: transformations around a name, and names.
_AROUND = ('jvp', 'transpose', 'vmap')
_BESIDE = (
  'jit', 'pjit', 'while', 'body', 'cond', 'closed_call', 'core_call', 'scan',
  'checkpoint', 'remat', 'rematted_computation', 'shard_map', 'pallas_call',
  'custom_jvp_call', 'custom_vjp_call',
)  # fmt: skip
_COUNTED = re.compile(r'branch_\d|turns_\d|about_\d')  # sharding/turns.py
_FILE = re.compile(r'^(\d+) "(.*)"$', re.M)
_PLACE = re.compile(r'^(\d+) {file_name_id=(\d+) .*?\bline=(\d+)', re.M)
_FRAME = re.compile(
  r'^(\d+) {file_location_id=(\d+)(?: parent_frame_id=(\d+))?', re.M
)
_ROOT = pathlib.Path(__file__).resolve().parents[2]


class Row(NamedTuple):
  """Operations of one name, line and scope: how often, seconds, of all devices
  of the process.

  scope: 'backward layer_F/mlp'; '': none.
  """

  name: str
  where: str
  times: int
  seconds: float
  scope: str = ''


class Profile:
  """Traces steps first to last of a run into its folder.

  Attributes:
    programs: compiled programs of the steps, whose lines of source are shown.
  """

  def __init__(self, steps, workdir, say, apart: Any = contextlib.nullcontext):
    """steps: what early.traced gives; None: nothing is traced.

    apart: context manager in which time is no step's (rates.Rates.apart).
    """
    self._steps: Any = None if jax.process_index() else steps
    self._path, self._say = pathlib.Path(workdir), say
    self._apart, self.programs = apart, []
    self._last = 0  # step that was traced

  def say_missed(self, done):
    """Says so if the steps to trace begin before those that are left.

    done: steps that were taken before.
    """
    if self._steps and self._steps[0] <= done:
      first, last = self._steps
      self._say(
        f'--profile={first}:{last}: nothing is traced, {done} steps were taken '
        'before: name later ones, or another --workdir.'
      )

  def over(self, batches, state):
    """Yields (t, batch) of batches, and traces while its steps are taken.

    state: function without arguments: what the step that was dispatched last
      returns; it is waited for before the trace begins and ends.
    """
    tracing = False
    try:
      for t, batch in batches:
        if self._steps and t + 1 == self._steps[0]:
          jax.block_until_ready(state())
          with self._apart():
            jax.profiler.start_trace(str(self._path / FOLDER))
          tracing = True
        self._last = t + 1
        yield t, batch
        if tracing and t + 1 == self._steps[1]:
          tracing = False
          self._finish(state())
    finally:
      batches.close()
      if tracing:  # the run ends with the last traced step, or before
        self._finish(state())

  def _finish(self, state):
    jax.block_until_ready(state)
    with self._apart():
      jax.profiler.stop_trace()
      self._report()

  def _report(self):
    lines = {}
    for program in self.programs:
      lines |= sources(program.as_text() or '')
    files = (self._path / FOLDER).rglob('*.xplane.pb')
    newest = max(files, key=lambda path: path.stat().st_mtime_ns)
    found = rows(jax.profiler.ProfileData.from_file(str(newest)), lines)
    first, last = self._steps[0], self._last
    kept = dict(first=first, last=last, rows=[r._asdict() for r in found])
    (self._path / FILE).write_text(json.dumps(kept, indent=1), encoding='utf-8')
    self._say(table(found, first, last))


def sources(text: str) -> dict[str, tuple[str, str]]:
  """{instruction: ('file:line', scope)} of a compiled program's text.

  The line is the innermost of our own, else the innermost. Programs name it
  themselves or, newer ones, by a frame of the tables in their head.
  """
  head = text.partition('FunctionNames')[0]
  files = dict(_FILE.findall(head))
  places = {n: (files.get(f, ''), at) for n, f, at in _PLACE.findall(text)}
  frames = {n: (places[p], up) for n, p, up in _FRAME.findall(text)}
  found = {}
  for name, path, frame, file, line in _OP.findall(text):
    stack = [(file, line)] if file else list(_stack(frame, frames))
    if stack:
      ours = (f'{_own_file(f)}:{n}' for f, n in stack if _own_file(f))
      file, line = stack[0]
      library = file.rpartition('site-packages/')[2]
      found[name] = next(ours, f'{library}:{line}'), scope(path)
  return found


def scope(path: str) -> str:
  """'jit(f)/transpose(jvp(loss))/head/dot' -> 'backward loss/head'.

  path: op_name of an instruction; of instructions that XLA merged, the first.
  """
  first, names = path.partition(':')[0], []
  for part in first.split('/')[:-1]:
    words = re.findall(r'[\w.-]+', part)
    while words and words[0] in _AROUND:
      del words[0]
    beside = not words or words[0] in _BESIDE or _COUNTED.match(words[0])
    if not beside and '->' not in part:
      names += words[:1]
  return 'backward ' * ('transpose(' in first) + '/'.join(names)


def _own_file(name):
  """A file of paraxis, relative to its root; '': it is another's."""
  path = pathlib.Path(name)
  if 'site-packages' in path.parts[len(_ROOT.parts) :]:
    return ''
  own = path.is_relative_to(_ROOT)
  return path.relative_to(_ROOT).as_posix() if own else ''


def _stack(frame, frames):
  """(file, line) of a frame and of those that called it."""
  seen = set()
  while frame in frames and frame not in seen:
    seen.add(frame)
    place, frame = frames[frame]
    yield place


def rows(data, lines=None) -> list[Row]:
  """`Row`s of a jax.profiler.ProfileData, the costliest first.

  lines: {operation: (where it is from, its scope)}.
  """
  lines = lines or {}
  times, seconds = collections.Counter(), collections.defaultdict(float)
  for plane in data.planes:
    for line in plane.lines:
      events = [e for e in line.events if 'hlo_op' in dict(e.stats)]
      for event, own in _own([e for e in events if e.duration_ns]):
        op = str(dict(event.stats)['hlo_op'])
        kind = re.sub(r'[.\d]+$', '', op)
        key = kind, *lines.get(op, ('', ''))
        times[key] += 1
        seconds[key] += own / 1e9
  made = [
    Row(kind, where, times[kind, where, scope], s, scope)
    for (kind, where, scope), s in seconds.items()
  ]
  return sorted(made, key=lambda row: -row.seconds)


def _own(events):
  """[(event, nanoseconds without the events inside of it)] of one thread."""
  found, open_ = [], []
  for event in sorted(events, key=lambda e: (e.start_ns, -e.duration_ns)):
    while open_ and event.start_ns >= open_[-1][0].end_ns:
      found.append(tuple(open_.pop()))
    if open_:
      open_[-1][1] -= event.duration_ns
    open_.append([event, event.duration_ns])
  return found + [tuple(pair) for pair in reversed(open_)]


def is_collective(name: str) -> bool:
  """Whether an operation moves data between devices; its start and end do."""
  return name.startswith(COLLECTIVES)


def table(found: list[Row], first: int, last: int) -> str:
  """The costliest operations, and the share of collectives, as text."""
  total = sum(row.seconds for row in found)
  if not total:
    return f'profile of steps {first} to {last}: the trace holds no operations'
  sent = sum(row.seconds for row in found if is_collective(row.name))
  lines = [
    f'profile of steps {first} to {last}: {total:.3f} device-seconds, '
    f'collectives and waiting for them {sent / total:.1%}',
    f'{"share":>7} {"ms a step":>10} {"times":>7}  operation',
  ]
  steps = last - first + 1
  for row in found[:SHOWN]:
    each = 1e3 * row.seconds / steps
    lines.append(
      f'{row.seconds / total:7.1%} {each:10.2f} {row.times:7,}  '
      + '  '.join(filter(None, (row.name, row.scope, row.where)))
    )
  return '\n'.join(lines)
