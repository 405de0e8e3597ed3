"""The event simulator: queues by hand, closed forms, a naive reference."""

import fractions
import itertools
import math
import random

import pytest
import support

from paraxis.sharding.pipeline import schedules
from paraxis.sharding.planner import events
from paraxis.sharding.planner import overlap
from paraxis.sharding.planner import simulate

ONE = fractions.Fraction(1)
Task = events.Task


def _ends(tasks, **resources):
  return {n: s.end for n, s in events.run(tasks, resources).items()}


def test_a_queue_by_hand():
  """a and b arrive together, c later but before a has ended."""
  tasks = [
    Task('c', 1, ('sleep',), 'door'),
    Task('b', 2, (), 'door'),
    Task('a', 3, (), 'door'),
    Task('sleep', 1),
    Task('last', 0, ('a', 'b', 'c')),
  ]
  found = events.run(tasks, {'door': 'one'})
  assert list(found) == ['c', 'b', 'a', 'sleep', 'last']
  assert found['a'] == (0, 3) and found['b'] == (3, 5) and found['c'] == (5, 6)
  assert found['last'] == (6, 6)
  # Without the door nobody waits; each has a door: the same.
  free = _ends([Task(t.name, t.duration, t.after) for t in tasks])
  assert free == {'c': 2, 'b': 2, 'a': 3, 'sleep': 1, 'last': 3}


def test_a_shared_link_by_hand():
  """Two share until c joins: thirds; then c is alone on the link."""
  tasks = [
    Task('a', 2, (), 'link'),
    Task('b', 2, (), 'link'),
    Task('wait', 1),
    Task('c', 2, ('wait',), 'link'),
  ]
  found = events.run(tasks, {'link': 'shared'})
  third = fractions.Fraction(11, 2)  # 1 + 3 * (2 - 1/2)
  assert found['a'] == (0, third) and found['b'] == (0, third)
  assert found['c'] == (1, 6)  # no work is lost: 2 + 2 + 2
  one = _ends([Task('a', '1/3', (), 'link')], link='shared')
  assert one['a'] == ONE / 3


def test_arrivals_and_departures_of_one_server():
  """Lindley's recursion: end_k = max(end_{k-1}, arrival_k) + service_k."""
  rng = random.Random(3)
  gaps = [rng.randint(0, 4) for _ in range(50)]
  service = [rng.randint(1, 4) for _ in range(50)]
  arrivals = list(itertools.accumulate(gaps))
  tasks = [Task(f'at{k:02}', arrival) for k, arrival in enumerate(arrivals)]
  tasks += [
    Task(f'job{k:02}', s, (f'at{k:02}',), 'desk') for k, s in enumerate(service)
  ]
  found, end = _ends(tasks, desk='one'), 0
  for k, s in enumerate(service):
    end = max(end, arrivals[k]) + s
    assert found[f'job{k:02}'] == end


def _gpipe(p, m, forward, backward):
  """All forwards, then all backwards; a device serves one at a time."""
  flush = tuple(f'F{i:02}.{p - 1}' for i in range(m))
  for i, s in itertools.product(range(m), range(p)):
    before = (f'F{i:02}.{s - 1}',) if s else ()
    yield Task(f'F{i:02}.{s}', forward, before, f'device{s}')
    after = (f'B{i:02}.{s + 1}',) if s < p - 1 else flush
    yield Task(f'B{i:02}.{s}', backward, after, f'device{s}')


@pytest.mark.parametrize('p, m', [(1, 3), (2, 5), (4, 8), (5, 3), (8, 16)])
def test_a_pipeline_is_its_closed_form(p, m):
  """Bubble (p - 1) / m, and what simulate.py says of the same schedule."""
  forward, backward = ONE, 5 * ONE / 2
  devices = {f'device{s}': 'one' for s in range(p)}
  found = events.run(_gpipe(p, m, forward, backward), devices)
  time = max(span.end for span in found.values())
  ideal = m * (forward + backward)
  assert time / ideal - 1 == ONE * (p - 1) / m
  costs = dict(forward=forward, backward=backward, weight=0 * ONE)
  assert time == simulate.run(schedules.make('gpipe', p, m), **costs).time


def _ring(product, send, n, **links):
  """Chunks of a product, and messages that need the link and the one before."""
  tasks = [Task(f'chunk{k}', product / n, (), 'device') for k in range(n)]
  for k in range(n - 1):
    before = (f'message{k - 1}',) if k else ()
    tasks.append(Task(f'message{k}', send, (f'chunk{k}', *before), 'link'))
  found = _ends(tasks, device='one', link='one', **links)
  return max(found.values())


@pytest.mark.parametrize('send', [0, '1/7', '1/3', 2])
@pytest.mark.parametrize('n', [2, 3, 8])
def test_a_ring_beside_a_product_is_its_closed_form(n, send):
  product, send = 2 * ONE, fractions.Fraction(send)
  assert _ring(product, send, n) == overlap.overlapped(product, send, n)
  assert _ring(product, send, n) <= overlap.sequential(product, send, n)


def test_rings_on_one_link_share_it():
  """k all-gathers of n - 1 messages at once take k times as long."""
  for rings, n in [(1, 4), (3, 4), (2, 8)]:
    tasks = [
      Task((r, k), ONE / 3, ((r, k - 1),) if k else (), 'link')
      for r in range(rings)
      for k in range(n - 1)
    ]
    found = _ends(tasks, link='shared')
    assert max(found.values()) == rings * (n - 1) * ONE / 3


def _naive(tasks, kinds):
  """{name: (start, end)}, by steps to the next end, with lists alone.

  Tasks have durations above 0. At each time: who is ready joins; a server
  takes who came first; all that are served move on by the same step.
  """
  left = {t.name: fractions.Fraction(t.duration) for t in tasks}
  ready, start, end, now = {}, {}, {}, fractions.Fraction(0)
  while len(end) < len(tasks):
    for t in tasks:
      if t.name not in ready and all(a in end for a in t.after):
        ready[t.name] = now
    speed = {}
    for t in tasks:
      if t.name in ready and t.name not in end and kinds.get(t.on) != 'one':
        speed[t.name] = ONE
    for resource, kind in kinds.items():
      here = [
        t.name
        for t in tasks
        if t.on == resource and t.name in ready and t.name not in end
      ]
      if kind == 'shared':
        speed |= {name: ONE / len(here) for name in here}
      elif here:
        key = lambda name: (name not in start, ready[name], name)
        speed[min(here, key=key)] = ONE
    step = min(left[name] / v for name, v in speed.items())
    for name, v in speed.items():
      start.setdefault(name, now)
      left[name] -= v * step
    now += step
    end |= {name: now for name in speed if left[name] == 0}
  return {t.name: (start[t.name], end[t.name]) for t in tasks}


def _random(rng):
  """Tasks and resources, many times equal."""
  kinds = {'A': 'one', 'B': 'shared', 'C': rng.choice(events.KINDS)}
  names = [f't{i:02}' for i in range(rng.randint(1, 14))]
  tasks = [
    Task(
      name,
      fractions.Fraction(rng.randint(1, 6), rng.choice([1, 1, 2, 3])),
      tuple(rng.sample(names[:i], rng.randint(0, min(i, 2)))),
      rng.choice(['', 'A', 'A', 'B', 'B', 'C']),
    )
    for i, name in enumerate(names)
  ]
  rng.shuffle(tasks)
  return tasks, kinds


def test_it_is_the_naive_simulator():
  rng = random.Random(0)
  for _ in range(300):
    tasks, kinds = _random(rng)
    assert events.run(tasks, kinds) == _naive(tasks, kinds), tasks


@pytest.mark.parametrize('wrong', ['last', 'alone'])
def test_the_naive_simulator_finds_a_wrong_one(wrong, monkeypatch):
  """The newest task first; a link that all have for themselves."""
  if wrong == 'alone':
    monkeypatch.setitem(events._SERVERS, 'shared', events._Alone)
  else:
    push = events._One.add
    add = lambda self, now, *rest: push(self, -now, *rest)
    monkeypatch.setattr(events._One, 'add', add)
  rng = random.Random(0)
  cases = [_random(rng) for _ in range(50)]
  assert any(events.run(t, k) != _naive(t, k) for t, k in cases)


def test_work_is_kept_and_the_order_of_tasks_is_no_matter():
  """A busy resource does one unit of work a second, whatever serves it."""
  rng = random.Random(1)
  for kind, _ in itertools.product(events.KINDS, range(20)):
    tasks = [Task(f't{i:02}', rng.randint(0, 5), (), 'r') for i in range(9)]
    found = events.run(tasks, {'r': kind})
    assert max(s.end for s in found.values()) == sum(t.duration for t in tasks)
    assert found == events.run(tasks[::-1], {'r': kind})


def test_what_lasts_nothing():
  """It delays nobody, and releases others before a resource is given out."""
  tasks = [
    Task('b', 1, (), 'r'),
    Task('gate', 0),
    Task('a', 1, ('gate',), 'r'),
    Task('x', 0, (), 'r'),
    Task('y', 0, ('x',), 'r'),
  ]
  found = events.run(tasks, {'r': 'one'})
  assert found['a'] == (0, 1) and found['b'] == (1, 2)
  assert found['x'] == (2, 2) and found['y'] == (2, 2)
  assert events.run([]) == {}


@pytest.mark.parametrize(
  'tasks, message',
  [
    ([('a', 1, ('c',)), ('b', 1, ('a',)), ('c', 1, ('b',))], 'in a circle'),
    ([('a', 1, ('a',))], 'a -> a'),
    ([('read', 1), ('b', 1, ('reed',))], "Did you mean 'read'"),
    ([('a', 1, (), 'lnk')], "resource 'lnk', only link. Did you mean 'link'"),
    ([('a', -1)], "task 'a': a duration of -1 is below 0"),
    ([('a', math.nan)], "task 'a': nan is no duration"),
    ([('a', math.inf)], "task 'a': inf is no duration"),
    ([('a', 'soon')], "task 'a': 'soon' is no duration"),
    ([('a', 1), ('a', 2)], "task 'a' is there twice"),
  ],
)
def test_what_cannot_run_is_refused(tasks, message):
  with support.refused(message):
    events.run([Task(*t) for t in tasks], {'link': 'one'})


def test_a_circle_is_named_and_a_kind_known():
  circle = [Task('a', 1, ('c',)), Task('b', 1, ('a',)), Task('c', 1, ('b',))]
  with support.refused('a -> b -> c -> a'):
    events.run([*circle, Task('d', 1)])
  with support.refused("'share' is not one of one, shared. Did you mean 'sh"):
    events.run([], {'link': 'share'})
