"""The tables, read by a plain interpreter that passes labels for arrays.

It does tick by tick what an executor does, keeps labels ('x', microbatch,
virtual stage) where that keeps arrays, and checks each label that is read.
"""

import contextlib
import dataclasses

import numpy as np
import pytest
import schedule_cases

from paraxis.sharding.pipeline import schedules
from paraxis.sharding.pipeline import tables as schedule_tables


class Buffer:
  """Rows of labels on each device; the last row is trash."""

  def __init__(self, devices, rows):
    self.trash = rows
    self.cells = [[None] * (rows + 1) for _ in range(devices)]

  def read(self, device, slot, want):
    assert 0 <= slot < self.trash, f'reads slot {slot} for {want}'
    got = self.cells[device][slot]
    assert got == want, f'reads {got}, wants {want}'

  def write(self, device, slot, label):
    assert 0 <= slot <= self.trash, f'writes slot {slot}'
    self.cells[device][slot] = label


class Interpreter:
  """Runs the tables; AssertionError at the first wrong read.

  Attributes:
    done: {'F' | 'B' | 'W': {(microbatch, virtual stage)}}.
  """

  def __init__(self, schedule, t):
    p = schedule.stages
    self.schedule, self.t, self.devices = schedule, t.rows, range(p)
    self.links = t.links
    self.inputs = Buffer(p, t.inputs)
    self.cotangents = Buffer(p, t.cotangents)
    self.stores = Buffer(p, t.stores)
    self.done = {'F': set(), 'B': set(), 'W': set()}

  def run(self):
    """-> number of F, B and W."""
    t, m = self.t, self.schedule.microbatches
    for k in range(self.schedule.ticks):
      outputs = [self.forward(k, d) for d in self.devices]
      self.loss(k, outputs)
      gradients = [self.backward(k, d) for d in self.devices]
      for d in self.devices:
        self.weight(k, d)
      self.send(k, outputs, gradients)
    assert (t.embed >= 0).sum() == (t.loss >= 0).sum() == m
    assert (t.embed_back >= 0).sum() == m
    return {phase: len(keys) for phase, keys in self.done.items()}

  def _enter(self, phase, k, d, i, c):
    """The virtual stage of an operation, noted as done."""
    s = int(self.schedule.placement[d, c])
    assert (i, s) not in self.done[phase]
    self.done[phase].add((i, s))
    assert getattr(self.t, f'any_{phase.lower()}')[k]
    return s

  def _next(self, i, stage, step):
    """The stage after (before) one on the path, None at the end (start)."""
    path = self.schedule.paths[i]
    at = path.index(stage) + step
    return path[at] if 0 <= at < len(path) else None

  def forward(self, k, d):
    t, slot = self.t, self.t.f_slot[k, d]
    if not t.f_on[k, d]:
      assert slot == self.inputs.trash
      return None
    i, c = int(t.f_microbatch[k, d]), int(t.f_chunk[k, d])
    s = self._enter('F', k, d, i, c)
    assert t.f_first[k, d] == (self._next(i, s, -1) is None)
    if t.f_first[k, d]:
      assert t.embed[k] == i
      self.inputs.write(d, slot, ('x', i, s))
    self.inputs.read(d, slot, ('x', i, s))
    return ('x', i, self._next(i, s, 1))

  def loss(self, k, outputs):
    t = self.t
    i, d = int(t.loss[k]), t.loss_device[k]
    if i < 0:
      assert t.loss_slot[k] == self.cotangents.trash
      return
    assert outputs[d] == ('x', i, None)
    label = ('dy', i, self.schedule.paths[i][-1])
    self.cotangents.write(d, t.loss_slot[k], label)

  def backward(self, k, d):
    t = self.t
    slots = t.b_slot[k, d], t.b_cotangent[k, d], t.b_store[k, d]
    if not t.b_on[k, d]:
      buffers = self.inputs, self.cotangents, self.stores
      assert slots == tuple(b.trash for b in buffers)
      return None
    i, c = int(t.b_microbatch[k, d]), int(t.b_chunk[k, d])
    s = self._enter('B', k, d, i, c)
    self.inputs.read(d, slots[0], ('x', i, s))
    self.cotangents.read(d, slots[1], ('dy', i, s))
    self.stores.write(d, slots[2], ('w', i, s))
    before = self._next(i, s, -1)
    assert t.b_first[k, d] == (before is None)
    assert (before is None) == (t.embed_back[k] == i)
    return ('dy', i, before)

  def weight(self, k, d):
    t, slot = self.t, self.t.w_slot[k, d]
    if not t.w_on[k, d]:
      assert slot == self.stores.trash
      return
    i, c = self.schedule.weight[k, d].tolist()
    assert t.w_chunk[k, d] == c
    self.stores.read(d, slot, ('w', i, self._enter('W', k, d, i, c)))

  def send(self, k, outputs, gradients):
    """Every link, in every tick; a device that is idle sends nothing."""
    t = self.t
    for n, shift in enumerate(self.links):
      for d in self.devices:
        source, back = (d - shift) % len(outputs), (d + shift) % len(outputs)
        self.inputs.write(d, t.f_receive[k, d, n], outputs[source])
        self.cotangents.write(d, t.b_receive[k, d, n], gradients[back])


def interpret(schedule, tables):
  return Interpreter(schedule, tables).run()


def test_every_read_is_right():
  found = set()
  for arguments in schedule_cases.admissible((1, 2, 3, 4), (1, 3, 4, 8)):
    found.add((arguments[0], arguments[3]))
    schedule = schedules.make(*arguments)
    tables = schedule_tables.tables(schedule)
    work = schedule.microbatches * schedule.virtual_stages
    split = work * (schedule.weight is not None)
    counts = interpret(schedule, tables)
    assert counts == {'F': work, 'B': work, 'W': split}, arguments
    assert tables.inputs == max(schedule.in_flight()), arguments
    for name, x in tables.rows._asdict().items():
      assert x.dtype in (np.int32, bool) and len(x) == schedule.ticks, name
  assert len(found) == 11


def test_every_read_is_right_on_paths():
  for seed in range(12):
    p = 3 + seed % 4
    given = dict(fraction=seed % 2 / p, seed=seed)
    schedule = schedules.make('skip', p, 2 * p + seed, **given)
    tables = schedule_tables.tables(schedule)
    work = sum(map(len, schedule.paths))
    assert interpret(schedule, tables) == {'F': work, 'B': work, 'W': 0}
  free = schedules.from_paths(3, [(2, 0), (1,), (0, 2, 1), (2, 1, 0)] * 2)
  interpret(free, schedule_tables.tables(free))


def test_links():
  links = lambda *a, **k: schedule_tables.tables(schedules.make(*a, **k)).links
  assert links('interleaved', 4, 8, 2) == links('gpipe', 4, 8) == (1,)
  assert links('v_half', 4, 8, 2) == (1, 3, 0)
  assert links('v_half', 2, 8, 2) == (1, 0)
  assert links('v_half', 1, 8, 2) == links('interleaved', 1, 2, 3) == (0,)
  assert links('one_f_one_b', 1, 8) == ()
  assert set(links('skip', 4, 8, fraction=0.5)) == {1, 2, 3}


def test_rows_are_no_more_than_must_be():
  for p, v in [(2, 1), (4, 1), (4, 2), (4, 3), (3, 2)]:
    name = 'one_f_one_b' if v == 1 else 'interleaved'
    tables = schedule_tables.tables(schedules.make(name, p, 3 * p, v))
    assert tables.inputs == 2 * (p - 1) + (v - 1) * p + 1
    assert (tables.cotangents, tables.stores) == (1, 0)
    split = schedule_tables.tables(schedules.make('zero_bubble', p, 3 * p, v))
    # Device d waits d ticks with its weight gradients.
    assert (split.inputs, split.stores) == (tables.inputs, p)
  half = schedule_tables.tables(schedules.make('v_half', 4, 16, 2))
  assert (half.inputs, half.cotangents) == (8, 1)
  gpipe = schedule_tables.tables(schedules.make('gpipe', 4, 8))
  assert (gpipe.inputs, gpipe.cotangents) == (8, 8)


def _last_use(tables, field):
  """Index of the last entry of a field that some device needs."""
  rows, x = tables.rows, getattr(tables.rows, field)
  if field in schedule_cases.BUFFERS:
    used = x < getattr(tables, schedule_cases.BUFFERS[field])
  elif field == 'loss_device':
    used = rows.loss >= 0
  elif x.dtype == bool:
    used = x
  elif x.ndim == 1:
    used = x >= 0
  else:
    used = getattr(rows, f'{field[0]}_on')
  return tuple(np.argwhere(used)[-1])


@pytest.mark.parametrize(
  'arguments', [('zero_bubble', 3, 6, 2), ('v_half', 3, 5, 2)]
)
def test_one_wrong_entry_is_found(arguments):
  schedule = schedules.make(*arguments)
  tables = schedule_tables.tables(schedule)
  interpret(schedule, tables)
  work = schedule.microbatches * schedule.virtual_stages
  for name in tables.rows._fields:
    wrong = schedule_cases.changed(tables, name, _last_use(tables, name))
    rows = tables.rows._replace(**{name: wrong})
    with contextlib.suppress(AssertionError):
      counts = interpret(schedule, dataclasses.replace(tables, rows=rows))
      if counts == {'F': work, 'B': work, 'W': work}:
        pytest.fail(name)


def test_a_row_given_out_too_early_is_found(monkeypatch):
  """Were a row free in the tick of its last read, F would overwrite it."""
  colour = schedule_tables.colour

  def hasty(spans, device):
    return colour({k: (a, b - (b > a)) for k, (a, b) in spans.items()}, device)

  monkeypatch.setattr(schedule_tables, 'colour', hasty)
  schedule = schedules.make('one_f_one_b', 4, 8)
  with pytest.raises(AssertionError, match='wants'):
    interpret(schedule, schedule_tables.tables(schedule))


def test_a_schedule_with_faults_has_no_tables():
  good = schedules.make('gpipe', 2, 2)
  bad = dataclasses.replace(good, forward=good.forward[::-1])
  with pytest.raises(ValueError, match='gpipe: F of microbatch'):
    schedule_tables.tables(bad)
