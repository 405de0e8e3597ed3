"""One executor for every pipeline schedule: a scan over phased ticks.

    tick:  E embed | F forward | loss | B backward | W weights | two messages

Every device runs the same program on its own column of the tables
(sharding/schedule_tables.py). A phase is entered by a condition on which all
devices agree (some stage is active), so that collectives may stand inside it;
what an idle stage computes there is *selected* away, never multiplied by zero,
and written to a trash row. Messages are one ppermute a link and direction at
the end of a tick. Buffers have as many rows as the schedule has inputs in
flight: memory does not grow with the number of microbatches.

The embedding and the loss are spread over all stages (vocabulary parallelism,
arXiv:2411.05288): a microbatch passes them in the tick in which the first, or
last, stage needs it. Functions of local arrays, for a fully manual region with
check_vma=False; what is differentiated in here sums nothing over devices but
what `Calls` does, and the caller adds up gradients once, after the last tick.

Sources: PipeDream-Flush / Megatron-LM (arXiv:1909.08053, 2104.04473), GPipe
(1811.06965), zero bubble (2401.10241). Cost: ticks of the schedule; F and B of
a tick run one after the other.

Legend: B rows of a microbatch, T tokens, D model.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from paraxis.sharding import pipeline_phases
from paraxis.sharding import schedule_tables
from paraxis.sharding import turns

AXIS = 'stage'


class Calls(NamedTuple):
  """The model as a pipeline sees it; i is a microbatch, traced.

  embed(ends, i) -> x_BTD, the same on all stages; where it is differentiated,
    only the first stage has a cotangent that is not zero.
  loss(ends, y_BTD, i) -> () of this shard's tokens, the same on all stages;
    y is zero but on the last stage.
  forward(values, x, i, on) -> (y_BTD, kept): a chunk of layers. kept: a pytree
    that `backward` reads, () to recompute it.
  backward(values, x, kept, g_BTD, i, on) -> (gx_BTD, gradients, tapes): the
    gradients of `values`, or of some of them; tapes: a pytree from which
    `weights` makes the others, () if there are none.
  weights(tapes) -> gradients.
  gather(rows) -> values: {path: rows of a chunk} whole, once for a phase.
  scatter(gradients) -> the same in the layout in which sums are kept.
  """

  embed: Any
  loss: Any
  forward: Any
  backward: Any
  weights: Any
  gather: Any
  scatter: Any


class _Carry(NamedTuple):
  """inputs, kept: a row for each chunk input in flight, and a trash row.

  cotangents: likewise. tapes: from B to W. loss, ends, stack: sums.
  """

  inputs: Any
  kept: Any
  cotangents: Any
  tapes: Any
  loss: Any
  ends: Any
  stack: Any


def _wide(x):
  """In which a sum of x is kept."""
  return jnp.promote_types(x.dtype, jnp.float32)


def _when(name, flags, predicate, phase, arguments):
  """phase(*arguments()) where a predicate equal on all devices holds, or 0.

  flags: (ticks,) bool on the host, what the predicate is in each tick.
  """

  def run():
    with jax.named_scope(name):
      return phase(*arguments())

  with turns.scope(int(np.sum(flags)), len(flags)):
    return lax.cond(predicate, run, phase.zeros)


def _select(on, tree):
  """The tree, or zeros: never a product with zero, for 0 * inf is not 0."""
  return jax.tree.map(lambda x: jnp.where(on, x, jnp.zeros((), x.dtype)), tree)


def _write(buffers, row, tree):
  return jax.tree.map(lambda b, x: b.at[row].set(x), buffers, tree)


def _read(buffers, row):
  return jax.tree.map(lambda b: b[row], buffers)


def _rows(shapes, n):
  """Buffers for n of these, and a trash row."""
  return jax.tree.map(lambda s: jnp.zeros((n + 1, *s.shape), s.dtype), shapes)


class _Executor:
  """The phases of a tick, on the arrays of this device."""

  def __init__(self, schedule, calls, ends, stack, on, forward=False):
    """on: (stages, chunks, layers) bool, which rows hold a layer, or None.

    forward: as many ticks as F takes.
    """
    self.schedule, self.calls = schedule, calls
    self.tables = schedule_tables.tables(schedule)
    table = self.tables.rows()
    last = np.flatnonzero(table['any_f'])[-1] if forward else schedule.ticks
    self.rows = {name: x[: last + 1] for name, x in table.items()}
    self.ends, self.stack = ends, stack
    self.me = lax.axis_index(AXIS)
    self._on = on if on is None else jnp.asarray(on)[self.me]
    self.phases = pipeline_phases.Phases(calls, ends, self.values)

  def columns(self):
    """The tables as arrays, made in here: a region closes over none."""
    return {name: jnp.asarray(x) for name, x in self.rows.items()}

  def mine(self, row):
    """A row of the table, its columns of this device picked."""
    return {n: x[self.me] if x.ndim else x for n, x in row.items()}

  def _chunk(self, tree, chunk):
    """Rows of a chunk of every stack; of v chunks each has as many."""
    v = self.schedule.chunks

    def pick(x):
      size = x.shape[0] // v
      return x if v == 1 else lax.dynamic_slice_in_dim(x, chunk * size, size)

    return jax.tree.map(pick, tree)

  def values(self, chunk):
    """Whole parameters of a chunk, and which of its layers there are."""
    on = None if self._on is None else self._on[chunk]
    return self.calls.gather(self._chunk(self.stack, chunk)), on

  def of_chunks(self, like):
    """Zeros for sums over a stack, given those of one chunk."""
    rows = like.shape[0] * self.schedule.chunks
    return jnp.zeros((rows, *like.shape[1:]), _wide(like))

  def add(self, sums, gradients, chunk):
    """Sums of a stack with those of one chunk added."""
    v, out = self.schedule.chunks, dict(sums)
    for path, g in gradients.items():
      total, size = out[path], out[path].shape[0] // v
      g = g.astype(total.dtype)
      if v == 1:
        out[path] = total + g
        continue
      old = lax.dynamic_slice_in_dim(total, chunk * size, size)
      out[path] = lax.dynamic_update_slice_in_dim(
        total, old + g, chunk * size, 0
      )
    return out

  def embed(self, row):
    """x of the microbatch that enters now."""
    i, on = row['embed'], row['embed'] >= 0
    arguments = lambda: (jnp.maximum(i, 0),)
    return _when(
      'embed', self.rows['embed'] >= 0, on, self.phases.embed, arguments
    )

  def forward(self, row, inputs, entering):
    """-> (x, y, kept) of the chunk that runs forward."""

    def arguments():
      x = jnp.where(row['f_first'], entering, inputs[row['f_slot']])
      return row['f_chunk'], x, row['f_microbatch']

    any_f = self.rows['any_f']
    return _when('forward', any_f, row['any_f'], self.phases.forward, arguments)

  def loss(self, row, y, phase):
    """-> (loss, gradients of the ends, cotangent of y), or the loss alone."""
    i, on = row['loss'], row['loss'] >= 0
    last = self.me == row['loss_device']
    arguments = lambda: (_select(last, y), jnp.maximum(i, 0))
    return _when('loss', self.rows['loss'] >= 0, on, phase, arguments)

  def backward(self, row, carry):
    """-> (gx, gradients as they are kept, tapes) of the chunk that returns."""
    arguments = lambda: (
      row['b_chunk'],
      carry.inputs[row['b_slot']],
      _read(carry.kept, row['b_slot']),
      carry.cotangents[row['b_cotangent']],
      row['b_microbatch'],
    )
    any_b = self.rows['any_b']
    made = _when(
      'backward', any_b, row['any_b'], self.phases.backward, arguments
    )
    gx, gradients, tapes = made
    return *_select(row['b_on'], (gx, gradients)), tapes

  def weights(self, row, tapes):
    """Gradients of the chunk whose W it is."""
    arguments = lambda: (_read(tapes, row['w_slot']),)
    any_w = self.rows['any_w']
    made = _when('weights', any_w, row['any_w'], self.phases.weights, arguments)
    return _select(row['w_on'], made)

  def embed_back(self, row, gx):
    """Gradients of the ends from the microbatch that leaves."""
    i, on = row['embed_back'], row['embed_back'] >= 0
    arguments = lambda: (_select(row['b_first'], gx), jnp.maximum(i, 0))
    flags = self.rows['embed_back'] >= 0
    return _when('embed_back', flags, on, self.phases.embed_back, arguments)

  def send(self, x, link):
    """x of the device `link` places before this one."""
    n = self.schedule.stages
    if link % n == 0:
      return x
    pairs = [(d, (d + link) % n) for d in range(n)]
    return lax.ppermute(x, AXIS, pairs)

  def tick(self, carry, row):
    """All phases of one tick."""
    tables = self.tables
    row = self.mine(row)
    x, y, kept = self.forward(row, carry.inputs, self.embed(row))
    entered = jnp.where(row['f_first'], row['f_slot'], tables.inputs)
    carry = carry._replace(
      inputs=carry.inputs.at[entered].set(x),
      kept=_write(carry.kept, row['f_slot'], kept),
    )

    loss, ends, gy = self.loss(row, y, self.phases.loss)
    mine = (self.me == row['loss_device']) & (row['loss'] >= 0)
    slot = jnp.where(mine, row['loss_slot'], tables.cotangents)
    carry = carry._replace(cotangents=carry.cotangents.at[slot].set(gy))

    gx, gradients, tapes = self.backward(row, carry)
    carry = carry._replace(tapes=_write(carry.tapes, row['b_store'], tapes))
    stack = self.add(carry.stack, gradients, row['b_chunk'])
    if jax.tree.leaves(carry.tapes):
      late = self.weights(row, carry.tapes)
      stack = self.add(stack, late, row['w_chunk'])
    more = self.embed_back(row, gx)

    inputs, cotangents = carry.inputs, carry.cotangents
    for k, link in enumerate(tables.links):
      inputs = inputs.at[row['f_receive'][k]].set(self.send(y, link))
      cotangents = cotangents.at[row['b_receive'][k]].set(self.send(gx, -link))
    total = jax.tree.map(lambda a, b, c: a + b + c, carry.ends, ends, more)
    return carry._replace(
      inputs=inputs,
      cotangents=cotangents,
      loss=carry.loss + loss,
      ends=total,
      stack=stack,
    ), None

  def start(self):
    """The carry before the first tick."""
    tables = self.tables
    x, _, kept = self.phases.forward.shapes
    _, sums, tapes = self.phases.backward.shapes
    if jax.tree.leaves(tapes):
      sums = sums | self.phases.weights.shapes
    return _Carry(
      _rows(x, tables.inputs),
      _rows(kept, tables.inputs),
      _rows(x, tables.cotangents),
      _rows(tapes, tables.stores),
      self.phases.loss.zeros()[0],
      jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x)), self.ends),
      jax.tree.map(self.of_chunks, sums),
    )


def gradients(schedule, calls, ends, stack, on=None):
  """Loss and gradients of all microbatches of a schedule, of this shard.

  Args:
    schedule: schedules.Schedule.
    calls: `Calls`.
    ends: parameters of embedding, last norm and head, whole, the vocabulary
      spread over all stages.
    stack: {path: (chunks x layers that have it, ...)}, layers of this stage.
    on: (stages, chunks, layers) bool: which rows hold a layer; None: all.

  Returns:
    (loss, gradients of ends, gradients of the stack): sums over microbatches of
    this shard's terms, in at least float32; the caller adds them up over the
    mesh axes that a parameter's layout lacks.
  """
  run = _Executor(schedule, calls, ends, stack, on)
  carry, _ = lax.scan(run.tick, run.start(), run.columns())
  return carry.loss, carry.ends, carry.stack


def forward(schedule, calls, ends, stack, on=None):
  """Forward phases alone: the loss, and sums of what they keep.

  Args: as `gradients`. What calls.forward keeps is added up if it is a dict,
  {path: (layers of a chunk, ...)}, and dropped otherwise.

  Returns:
    (loss, {path: (chunks x layers, ...)}), of this shard.
  """
  run = _Executor(schedule, calls, ends, stack, on, forward=True)
  x, _, kept = run.phases.forward.shapes

  def tick(carry, row):
    inputs, total, sums = carry
    row = run.mine(row)
    x, y, kept = run.forward(row, inputs, run.embed(row))
    if sums:
      sums = run.add(sums, _select(row['f_on'], kept), row['f_chunk'])
    slot = jnp.where(row['f_first'], row['f_slot'], run.tables.inputs)
    inputs = inputs.at[slot].set(x)
    total = total + run.loss(row, y, run.phases.only_loss)
    for k, link in enumerate(run.tables.links):
      inputs = inputs.at[row['f_receive'][k]].set(run.send(y, link))
    return (inputs, total, sums), None

  start = (
    _rows(x, run.tables.inputs),
    run.phases.only_loss.zeros(),
    jax.tree.map(run.of_chunks, kept if isinstance(kept, dict) else {}),
  )
  _, total, sums = lax.scan(tick, start, run.columns())[0]
  return total, sums


def total(schedule, calls, ends, stack, on=None):
  """The loss alone, of this shard."""
  return forward(schedule, calls, ends, stack, on)[0]
