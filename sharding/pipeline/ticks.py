"""A tick of a pipeline on one device: its phases, its buffers, its messages.

One device's part of sharding/pipeline/executor.py, for every schedule: its
column of the tables says which microbatch, chunk and slot a phase is for.

Two rules let XLA update buffers in place. A row of inputs is read at the end of
the tick before: a buffer that is read and then written in one iteration of a
loop is copied whole, as nothing orders the two. Sums of gradients go through
the branch that adds to them: a tick without the phase would add zeros, as many
as there are parameters.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from paraxis.sharding import turns
from paraxis.sharding.pipeline import phases as pipeline_phases
from paraxis.sharding.pipeline import tables as schedule_tables

AXIS = 'stage'


class Found(NamedTuple):
  """What a chunk of layers gives besides its output.

  totals: pytree, summed over chunks and microbatches. rows: {path: (layers of
  the chunk that have it, ...)}, summed over microbatches.
  """

  totals: Any
  rows: Any


class _Carry(NamedTuple):
  """inputs, kept: a row for each chunk input in flight, and a trash row.

  x_f, x_b: the rows of inputs that F and B of this tick read. cotangents: as
  inputs. tapes: from B to W. loss, found, ends, stack: sums.
  """

  inputs: Any
  x_f: Any
  x_b: Any
  kept: Any
  cotangents: Any
  tapes: Any
  loss: Any
  found: Any
  ends: Any
  stack: Any


class _Ahead(NamedTuple):
  """Rows of inputs that F and B of the next tick read."""

  f_slot: Any
  b_slot: Any


class _ForwardCarry(NamedTuple):
  """As `_Carry`."""

  inputs: Any
  x_f: Any
  loss: Any
  found: Any


def _wide(x):
  """Dtype of a sum of arrays like x."""
  return jnp.promote_types(x.dtype, jnp.float32)


def _add(sums, more):
  return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, more)


def _select(on, tree):
  """The tree, or zeros: never a product with zero, for 0 * inf is not 0."""
  return jax.tree.map(lambda x: jnp.where(on, x, jnp.zeros((), x.dtype)), tree)


def _either(on, a, b):
  return jax.tree.map(lambda a, b: jnp.where(on, a, b), a, b)


def _zeros(shapes):
  return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _write(buffers, row, tree):
  put = lambda b, x: lax.dynamic_update_index_in_dim(b, x, row, 0)
  return jax.tree.map(put, buffers, tree)


def _read(buffers, row):
  pick = lambda b: lax.dynamic_index_in_dim(b, row, keepdims=False)
  return jax.tree.map(pick, buffers)


def _rows(shapes, n):
  """Buffers for n of these, and a trash row."""
  return jax.tree.map(lambda s: jnp.zeros((n + 1, *s.shape), s.dtype), shapes)


class Executor:
  """The phases of a tick, on the arrays of this device."""

  def __init__(self, schedule, calls, ends, stack, mask, forward=False):
    """mask: (stages, chunks, layers) bool, which rows hold a layer, or None.

    forward: as many ticks as F takes.
    """
    self.schedule, self.calls = schedule, calls
    self.tables = schedule_tables.tables(schedule)
    table = self.tables.rows
    last = np.flatnonzero(table.any_f)[-1] if forward else schedule.ticks
    self.rows = jax.tree.map(lambda x: x[: last + 1], table)
    self.ends, self.stack = ends, stack
    self.me = lax.axis_index(AXIS)
    self._mask = None if mask is None else jnp.asarray(mask)[self.me]
    self.phases = pipeline_phases.Phases(calls, ends, self.rows_of)

  def columns(self):
    """The tables as arrays, made in this region: it may close over none."""
    return jax.tree.map(jnp.asarray, self.rows)

  def scan(self, tick, start):
    """The carry after the last tick; tick(carry, (row, slots ahead))."""
    columns = self.columns()
    ahead = _Ahead(
      jnp.roll(columns.f_slot, -1, axis=0), jnp.roll(columns.b_slot, -1, axis=0)
    )
    return lax.scan(tick, start, (columns, ahead))[0]

  def mine(self, row):
    """Rows of tables, their columns of this device picked."""
    return jax.tree.map(lambda x: x[self.me] if x.ndim else x, row)

  def rows_of(self, chunk):
    """(rows of every stack that are a chunk's, its layer_mask).

    Of v chunks each has as many rows.
    """
    v = self.schedule.chunks

    def pick(x):
      size = x.shape[0] // v
      return x if v == 1 else lax.dynamic_slice_in_dim(x, chunk * size, size)

    mask = None if self._mask is None else self._mask[chunk]
    return jax.tree.map(pick, self.stack), mask

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

  def add_found(self, sums, row, found):
    """Sums of `Found` with that of the chunk that runs forward, if one does."""
    found = _select(row.f_on, found)
    rows = self.add(sums.rows, found.rows, row.f_chunk)
    return Found(_add(sums.totals, found.totals), rows)

  def no_found(self):
    """Sums of `Found` before the first tick."""
    totals, rows = self.phases.forward.shapes[1]
    zeros = lambda x: jnp.zeros(x.shape, _wide(x))
    totals = jax.tree.map(zeros, totals)
    return Found(totals, jax.tree.map(self.of_chunks, rows))

  def _when(self, name, row, field, phase, otherwise, *sums):
    """phase(*sums) in ticks in which `field` of the tables is active.

    Args:
      field: equal on all devices: a flag, or a microbatch, -1 for none.
      otherwise: the results of a tick that leaves the phase out.
    """
    active = lambda x: x if x.dtype == bool else x >= 0
    flags = active(getattr(self.rows, field))

    def run(*sums):
      with jax.named_scope(name):
        return phase(*sums)

    with turns.scope(int(np.sum(flags)), len(flags)):
      return lax.cond(active(getattr(row, field)), run, otherwise, *sums)

  def embed(self, row):
    """x of the microbatch that enters now."""
    phase = self.phases.embed
    run = lambda: phase(jnp.maximum(row.embed, 0))
    return self._when('embed', row, 'embed', run, phase.zeros)

  def forward(self, row, x_f, entering):
    """-> (x, y, found, kept) of the chunk that runs forward."""
    phase = self.phases.forward
    x = _either(row.f_first, entering, x_f)
    # Arrays: in the branch, XLA would compute angles once for every head.
    context = self.calls.context_of(row.f_microbatch)
    run = lambda: phase(row.f_chunk, x, context)
    return x, *self._when('forward', row, 'any_f', run, phase.zeros)

  def _of_loss(self, row, y):
    """Arguments of the phases that give the loss."""
    last = self.me == row.loss_device
    return _select(last, y), jnp.maximum(row.loss, 0)

  def loss_alone(self, row, y):
    """The loss of the microbatch whose last chunk ran."""
    phase = self.phases.only_loss
    run = lambda: phase(*self._of_loss(row, y))
    return self._when('loss', row, 'loss', run, phase.zeros)

  def loss(self, row, y, ends):
    """-> (loss, sums of the ends, cotangent of y)."""
    phase = self.phases.loss

    def run(ends):
      loss, made, gy = phase(*self._of_loss(row, y))
      return loss, _add(ends, made), gy

    def otherwise(ends):
      loss, _, gy = phase.zeros()
      return loss, ends, gy

    return self._when('loss', row, 'loss', run, otherwise, ends)

  def backward(self, row, carry):
    """-> (gx, sums of the stack, tapes) of the chunk that returns."""
    phase = self.phases.backward
    context = self.calls.context_of(row.b_microbatch)

    def run(stack):
      kept = _read(carry.kept, row.b_slot)
      g = _read(carry.cotangents, row.b_cotangent)
      gx, made, tapes = phase(row.b_chunk, carry.x_b, kept, g, context)
      gx, made = _select(row.b_on, (gx, made))
      return gx, self.add(stack, made, row.b_chunk), tapes

    def otherwise(stack):
      gx, _, tapes = phase.zeros()
      return gx, stack, tapes

    return self._when('backward', row, 'any_b', run, otherwise, carry.stack)

  def weights(self, row, tapes, stack):
    """Sums of the stack with the chunk whose W it is."""

    def run(stack):
      made = self.phases.weights(_read(tapes, row.w_slot))
      return self.add(stack, _select(row.w_on, made), row.w_chunk)

    return self._when('weights', row, 'any_w', run, lambda x: x, stack)

  def embed_back(self, row, gx, ends):
    """Sums of the ends with the microbatch that leaves."""
    phase, mine = self.phases.embed_back, _select(row.b_first, gx)
    run = lambda ends: _add(ends, phase(mine, jnp.maximum(row.embed_back, 0)))
    return self._when('embed_back', row, 'embed_back', run, lambda x: x, ends)

  def send(self, x, link):
    """x of the device `link` places before this one."""
    n = self.schedule.stages
    if link % n == 0:
      return x
    pairs = [(d, (d + link) % n) for d in range(n)]
    return jax.tree.map(lambda x: lax.ppermute(x, AXIS, pairs), x)

  def tick(self, carry, turn):
    """All phases of one tick."""
    tables = self.tables
    row, ahead = self.mine(turn)
    x, y, found, kept = self.forward(row, carry.x_f, self.embed(row))
    entered = jnp.where(row.f_first, row.f_slot, tables.inputs)
    carry = carry._replace(
      inputs=_write(carry.inputs, entered, x),
      # A path of one chunk returns in the tick in which it enters.
      x_b=_either(row.b_slot == entered, x, carry.x_b),
      kept=_write(carry.kept, row.f_slot, kept),
    )

    loss, ends, gy = self.loss(row, y, carry.ends)
    mine = (self.me == row.loss_device) & (row.loss >= 0)
    slot = jnp.where(mine, row.loss_slot, tables.cotangents)
    carry = carry._replace(cotangents=_write(carry.cotangents, slot, gy))

    gx, stack, tapes = self.backward(row, carry)
    carry = carry._replace(tapes=_write(carry.tapes, row.b_store, tapes))
    if jax.tree.leaves(carry.tapes):
      stack = self.weights(row, carry.tapes, stack)
    ends = self.embed_back(row, gx, ends)

    inputs, cotangents = carry.inputs, carry.cotangents
    for k, link in enumerate(tables.links):
      inputs = _write(inputs, row.f_receive[k], self.send(y, link))
      back = self.send(gx, -link)
      cotangents = _write(cotangents, row.b_receive[k], back)
    return carry._replace(
      inputs=inputs,
      x_f=_read(inputs, ahead.f_slot),
      x_b=_read(inputs, ahead.b_slot),
      cotangents=cotangents,
      loss=carry.loss + loss,
      found=self.add_found(carry.found, row, found),
      ends=ends,
      stack=stack,
    ), None

  def start(self):
    """The carry before the first tick."""
    tables = self.tables
    x, _, kept = self.phases.forward.shapes
    _, sums, tapes = self.phases.backward.shapes
    if jax.tree.leaves(tapes):
      sums = sums | self.phases.weights.shapes
    nothing = _zeros(x)
    return _Carry(
      _rows(x, tables.inputs),
      nothing,
      nothing,
      _rows(kept, tables.inputs),
      _rows(x, tables.cotangents),
      _rows(tapes, tables.stores),
      self.phases.loss.zeros()[0],
      self.no_found(),
      jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x)), self.ends),
      jax.tree.map(self.of_chunks, sums),
    )

  def forward_tick(self, carry, turn):
    """The phases of one tick that lead to the loss."""
    inputs, x_f, loss, sums = carry
    row, ahead = self.mine(turn)
    x, y, found, _ = self.forward(row, x_f, self.embed(row))
    sums = self.add_found(sums, row, found)
    slot = jnp.where(row.f_first, row.f_slot, self.tables.inputs)
    inputs = _write(inputs, slot, x)
    loss = loss + self.loss_alone(row, y)
    for k, link in enumerate(self.tables.links):
      inputs = _write(inputs, row.f_receive[k], self.send(y, link))
    x_f = _read(inputs, ahead.f_slot)
    return _ForwardCarry(inputs, x_f, loss, sums), None

  def start_forward(self):
    """The carry of `forward_tick` before the first tick."""
    x = self.phases.forward.shapes[0]
    return _ForwardCarry(
      _rows(x, self.tables.inputs),
      _zeros(x),
      self.phases.only_loss.zeros(),
      self.no_found(),
    )
