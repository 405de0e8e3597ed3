"""Claims about the largest step that fits a machine, in one layout or another.

What fits is searched for by compiling ahead of time for a topology
(sharding/meter/aot.py): the gradient program of a step, and the optimizer's
state. A polynomial through the memory of the sizes tried says which to try
next; the answer fits, and a size at most `close` larger does not.
"""

import contextlib
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.sharding.meter import aot
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.run import memory as memory_lib


@contextlib.contextmanager
def _quickly():
  """XLA's lowest level: a quarter of the time, up to a fifth more memory."""
  config: Any = jax.config
  before = config.jax_optimization_level
  try:
    jax.config.update('jax_optimization_level', 'O0')
    yield
  finally:
    jax.config.update('jax_optimization_level', before)


def _config(base, model, mesh, rows, tokens):
  """schema.Config of a step of `rows` rows of `tokens` tokens."""
  if model.get('position') == 'learned':
    model = {**model, 'max_positions': tokens}
  sizes = {'data.sequence_length': tokens, 'train.batch_size': rows}
  config = experiment.fields(base, experiment.under('model', model), sizes)
  return dataclasses.replace(config, mesh=mesh)


def needed(config, topology):
  """Bytes of a device in a step's gradient program and for the optimizer.

  Args:
    config: schema.Config; with adamw, which keeps two numbers a parameter.
    topology: aot.Topology.

  Returns:
    inf if the compiler finds that it does not fit.
  """
  with topology.context():
    job = job_lib.of_shapes(config, '', topology.devices)
    grads = step_lib.make(job.built, None, 0.0).grads
    with job.context(), _quickly():
      traced = jax.jit(grads).trace(job.built.params, job.batch_shapes())
      try:
        memory = aot.memory(aot.compile_for(topology, 'gradient', traced))
      except aot.TooLargeError:
        return math.inf
  optimizer = 2 * memory_lib.device_bytes(job.built.params)
  return memory.peak + memory.code + optimizer


def most(need, have, start, step, close):
  """(largest multiple of `step` that fits, or 0; smallest that does not).

  Args:
    need: size -> bytes, which grow with it; inf: it does not fit, and how much
      is missing is not known.
    have: bytes there are.
    start: the first that is tried, a multiple of `step`.
    step, close: how far apart the two sizes may be: one step, or this share.
  """
  known, good, bad, size = {}, 0, math.inf, start
  while True:
    known[size] = need(size)
    if known[size] <= have:
      good = max(good, size)
    else:
      bad = min(bad, size)
    gap = max(1, int(good * close) // step) * step
    if bad - good <= gap:
      return good, bad
    size = _guess(known, have) // step * step
    if size < good + 2 * gap:  # as good as found: see whether the next fails
      size = good + gap
    if size >= bad:
      size = (good + bad) // 2 // step * step


def _guess(known, have):
  """Where a polynomial through the largest known sizes reaches `have`."""
  points = sorted((x, y) for x, y in known.items() if math.isfinite(y))[-3:]
  if not points:
    return min(known) // 2
  x, y = np.transpose([(0, 0), *points] if len(points) == 1 else points)
  line = np.polyfit(x / x[-1], y / have, len(x) - 1)
  roots = np.roots(line - np.eye(len(line))[-1])
  ahead = [r.real for r in roots if abs(r.imag) < 1e-9 and r.real > 0]
  return int(min([*ahead, 4]) * x[-1])  # no further than 4 times what is known


def _largest(base, model, layout, vary, given, start, close):
  """(largest that fits, bytes of its device, devices) of one layout."""
  topology = aot.topology(layout['topology'])
  mesh, found = schema.Mesh(**layout['mesh']), {}

  def need(size):
    rows, tokens = (size, given) if vary == 'rows' else (given, size)
    config = _config(base, model, mesh, rows, tokens)
    found[size] = needed(config, topology)
    return found[size]

  step = mesh.data
  if vary == 'tokens':
    step = math.lcm(64, mesh.context * (mesh.tensor if mesh.sequence else 1))
  start = math.ceil(start / step) * step
  fits, _ = most(need, topology.hbm, start, step, close)
  return fits, found.get(fits, math.inf), len(topology.devices)


def most_that_fits(run, *, vary, given, start, model, layouts, at_least, close):
  """AOT: the largest step of the first layout against that of the second.

  Args:
    vary: 'rows' or 'tokens' of a row; the other is `given`.
    given, start: numbers; `start`: the first that is tried.
    model: fields of schema.Model beyond the config's.
    layouts: {name: {'topology': for sharding/meter/aot.py, 'mesh': fields of
      schema.Mesh}}; those after the second are only reported.
    at_least: the first, divided by the second; while it is above 1, less than
      this is `direction only`. close: see `most`.
  """
  found = {
    name: _largest(run.config, model, layout, vary, given, start, close)
    for name, layout in layouts.items()
  }
  (first, *_), (second, *_), *_ = found.values()
  lines = [
    f'{name} {size:,} ({devices} chips, {memory / 2**30:.1f} GiB on each)'
    for name, (size, memory, devices) in found.items()
  ]
  other = {'rows': 'tokens', 'tokens': 'rows'}[vary]
  return claims.Outcome(
    f'>= {at_least:g}x',
    f'{first / max(1, second):.1f}x',
    f'{vary} at {given:,} {other}: {"; ".join(lines)}; each to {close:.0%}; '
    'gradient program and optimizer, compiled at the lowest effort, nothing '
    'run',
    first > second > 0,
    '' if first >= at_least * second else claims.VERDICTS[1],
  )
