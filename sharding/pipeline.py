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

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from paraxis.sharding import schedule_tables
from paraxis.sharding import turns
from paraxis.sharding import uniform

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


def _zeros(function, *args):
  """Zeros like what a function gives."""
  shapes = jax.eval_shape(function, *args)
  return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _wide(x):
  """In which a sum of x is kept."""
  return jnp.promote_types(x.dtype, jnp.float32)


def _when(name, flags, predicate, function):
  """function() where a predicate that is equal on all devices holds, or 0.

  flags: (ticks,) bool on the host, what the predicate is in each tick.
  """

  def run():
    with jax.named_scope(name):
      return function()

  with turns.scope(int(np.sum(flags)), len(flags)):
    return lax.cond(predicate, run, functools.partial(_zeros, function))


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
    i = jnp.maximum(row['embed'], 0)
    on = row['embed'] >= 0
    run = lambda: self.calls.embed(self.ends, i)
    return _when('embed', self.rows['embed'] >= 0, on, run)

  def forward(self, row, inputs, entering):
    """-> (x, y, kept) of the chunk that runs forward."""

    def run():
      x = jnp.where(row['f_first'], entering, inputs[row['f_slot']])
      values, on = self.values(row['f_chunk'])
      return x, *self.calls.forward(values, x, row['f_microbatch'], on)

    return _when('forward', self.rows['any_f'], row['any_f'], run)

  def loss(self, row, y):
    """-> (loss, gradients of the ends, cotangent of y)."""
    i = jnp.maximum(row['loss'], 0)
    last = self.me == row['loss_device']

    def run():
      of = lambda ends, y: self.calls.loss(ends, y, i)
      loss, back = jax.vjp(of, self.ends, _select(last, y))
      return loss, *back(jnp.ones((), loss.dtype))

    return _when('loss', self.rows['loss'] >= 0, row['loss'] >= 0, run)

  def only_loss(self, row, y):
    """`loss` without its gradients."""
    i, on = jnp.maximum(row['loss'], 0), row['loss'] >= 0
    y = _select(self.me == row['loss_device'], y)
    run = lambda: self.calls.loss(self.ends, y, i)
    return _when('loss', self.rows['loss'] >= 0, on, run)

  def backward(self, row, carry):
    """-> (gx, gradients as they are kept, tapes) of the chunk that returns."""

    def run():
      values, on = self.values(row['b_chunk'])
      gx, gradients, tapes = self.calls.backward(
        values,
        carry.inputs[row['b_slot']],
        _read(carry.kept, row['b_slot']),
        carry.cotangents[row['b_cotangent']],
        row['b_microbatch'],
        on,
      )
      return gx, self.calls.scatter(gradients), tapes

    gx, gradients, tapes = _when(
      'backward', self.rows['any_b'], row['any_b'], run
    )
    return *_select(row['b_on'], (gx, gradients)), tapes

  def weights(self, row, tapes):
    """Gradients of the chunk whose W it is."""
    run = lambda: self.calls.scatter(
      self.calls.weights(_read(tapes, row['w_slot']))
    )
    made = _when('weights', self.rows['any_w'], row['any_w'], run)
    return _select(row['w_on'], made)

  def embed_back(self, row, gx):
    """Gradients of the ends from the microbatch that leaves."""
    i = jnp.maximum(row['embed_back'], 0)
    g = _select(row['b_first'], gx)

    def run():
      of = lambda ends: self.calls.embed(ends, i)
      return jax.vjp(of, self.ends)[1](g)[0]

    on = row['embed_back'] >= 0
    return _when('embed_back', self.rows['embed_back'] >= 0, on, run)

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

    loss, ends, gy = self.loss(row, y)
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
    tables, calls = self.tables, self.calls
    embed = lambda: calls.embed(self.ends, 0)
    values = lambda: self.values(0)

    def forward():
      whole, on = values()
      return calls.forward(whole, embed(), 0, on)

    def backward():
      (whole, on), (y, kept) = values(), forward()
      _, gradients, tapes = calls.backward(whole, embed(), kept, y, 0, on)
      late = calls.weights(tapes) if jax.tree.leaves(tapes) else {}
      return kept, calls.scatter(gradients | late), tapes

    uniform.check(forward, what='a layer in a pipeline stage')
    x = jax.eval_shape(embed)
    kept, sums, tapes = jax.eval_shape(backward)
    loss = lambda: calls.loss(self.ends, embed(), 0)
    return _Carry(
      _rows(x, tables.inputs),
      _rows(kept, tables.inputs),
      _rows(x, tables.cotangents),
      _rows(tapes, tables.stores),
      _zeros(loss),
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
  x = lambda: calls.embed(ends, 0)

  def kept():
    values, rows = run.values(0)
    found = calls.forward(values, x(), 0, rows)[1]
    return found if isinstance(found, dict) else {}

  def tick(carry, row):
    inputs, total, sums = carry
    row = run.mine(row)
    x, y, kept = run.forward(row, inputs, run.embed(row))
    if sums:
      sums = run.add(sums, _select(row['f_on'], kept), row['f_chunk'])
    slot = jnp.where(row['f_first'], row['f_slot'], run.tables.inputs)
    inputs = inputs.at[slot].set(x)
    total = total + run.only_loss(row, y)
    for k, link in enumerate(run.tables.links):
      inputs = inputs.at[row['f_receive'][k]].set(run.send(y, link))
    return (inputs, total, sums), None

  start = (
    _rows(jax.eval_shape(x), run.tables.inputs),
    _zeros(lambda: calls.loss(ends, x(), 0)),
    jax.tree.map(run.of_chunks, jax.eval_shape(kept)),
  )
  _, total, sums = lax.scan(tick, start, run.columns())[0]
  return total, sums


def total(schedule, calls, ends, stack, on=None):
  """The loss alone, of this shard."""
  return forward(schedule, calls, ends, stack, on)[0]
