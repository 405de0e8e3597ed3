"""The pipeline executor against a plain loop over microbatches and layers.

The model is a toy. Its layer divides by the root mean square of its input
without an epsilon, so that it is NaN on zeros: what an idle stage computes is
NaN, and shows wherever it is kept.

Legend: R rows of a microbatch, D features, K columns of the head on a stage.
"""

import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import kernel_cases
import numpy as np
import pytest
import schedule_cases

from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import hlo
from paraxis.sharding.pipeline import executor as pipeline
from paraxis.sharding.pipeline import schedules
from paraxis.sharding.pipeline import tables as schedule_tables
from paraxis.sharding.pipeline import ticks as pipeline_ticks

pytestmark = pytest.mark.usefixtures('float64')

R, D, K, IDS = 2, 4, 2, 3  # IDS: rows of the embedding on a stage
ENDS = dict(table=P('stage'), head=P(None, 'stage'), gain=P())
STACK = dict(weight=P('stage', 'fsdp'), bias=P('stage'))
FOUND = dict(total=P()), dict(count=P('stage'))  # beside gradients


def arrays(stages, microbatches, layers):
  """(ends, {path: layers in order}, data of every microbatch)."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape)
  m, p = microbatches, stages
  ends = dict(table=normal(p * IDS, D), head=normal(D, p * K), gain=normal(D))
  stack = dict(weight=normal(layers, D, D), bias=normal(layers, D))
  data = dict(
    ids=rng.integers(0, p * IDS, (m, R)),
    shift=normal(m, D),
    targets=normal(m, R, p * K),
  )
  return ends, stack, data


def layers_of(values, x, shift, layer_mask=None, taps=None):
  """Consecutive layers -> (y, input of every product)."""
  inputs = []
  for l in range(len(values['bias'])):
    h = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True))
    inputs.append(h)
    s = h @ values['weight'][l] + values['bias'][l] + shift
    y = x + jnp.tanh(s if taps is None else s + taps[l])
    x = y if layer_mask is None else jnp.where(layer_mask[l], y, x)
  return x, jnp.stack(inputs)


class Toy:
  """pipeline.Calls on a mesh of 'stage' and 'fsdp', in a manual region."""

  def __init__(self, data, split):
    self.data, self.split = data, split

  def embed(self, ends, i):
    local = self.data['ids'][i] - lax.axis_index('stage') * IDS
    here = (local >= 0) & (local < IDS)
    x = jnp.where(here[:, None], ends['table'][jnp.clip(local, 0, IDS - 1)], 0)
    return lax.psum(x, 'stage') * ends['gain']

  def loss(self, ends, y, i):
    start = lax.axis_index('stage') * K
    targets = self.data['targets'][i]
    mine = lax.dynamic_slice_in_dim(targets, start, K, 1)
    y = lax.psum(y, 'stage') * ends['gain']
    part = jnp.square(y @ ends['head'] - mine).sum()
    # The same on all stages; each differentiates its own columns.
    return part + lax.stop_gradient(lax.psum(part, 'stage') - part)

  def context_of(self, i):
    return self.data['shift'][i]

  def forward(self, rows, x, shift, layer_mask):
    y, inputs = layers_of(self.gather(rows), x, shift, layer_mask)
    if layer_mask is not None:
      inputs = jnp.where(layer_mask[:, None, None], inputs, 0)
    counts = (inputs**2).sum(1)
    return y, pipeline.Found(counts.sum(), {'count': counts}), ()

  def backward(self, rows, x, kept, g, shift, layer_mask):
    values = self.gather(rows)
    run = functools.partial(layers_of, shift=shift, layer_mask=layer_mask)
    if not self.split:
      _, back = jax.vjp(lambda v, x: run(v, x)[0], values, x)
      gradients, gx = back(g)
      return gx, self.scatter(gradients), ()
    bias = {'bias': values['bias']}
    taps = jnp.zeros((len(values['bias']), *x.shape), x.dtype)
    of = lambda bias, x, taps: run(values | bias, x, taps=taps)
    _, back, inputs = jax.vjp(of, bias, x, taps, has_aux=True)
    gradients, gx, gs = back(g)
    return gx, self.scatter(gradients), (inputs, gs)

  def weights(self, tapes):
    return self.scatter({'weight': jnp.einsum('lri,lro->lio', *tapes)})

  def gather(self, rows):
    whole = lax.all_gather(rows['weight'], 'fsdp', axis=1, tiled=True)
    return rows | {'weight': whole}

  def scatter(self, gradients):
    """The fsdp shards work on the same rows: the sum counts each twice."""
    out = dict(gradients)
    if 'weight' in out:
      n = lax.axis_size('fsdp')
      out['weight'] = lax.psum_scatter(
        out['weight'] / n, 'fsdp', scatter_dimension=1, tiled=True
      )
    return out

  def calls(self):
    return pipeline.Calls(
      self.embed, self.loss, self.context_of, self.forward, self.backward,
      self.weights,
    )  # fmt: skip


class Program:
  """The executor on the toy, to be compiled for a schedule."""

  def __init__(self, schedule, layers, fsdp=1):
    p, self.schedule = schedule.stages, schedule
    # Virtual stage -> its layers; (stages, chunks, height), -1 for no layer.
    self.parts = np.array_split(np.arange(layers), schedule.virtual_stages)
    height = len(self.parts[0])
    self.rows = np.full((*schedule.placement.shape, height), -1)
    for at, stage in np.ndenumerate(schedule.placement):
      self.rows[at][: len(self.parts[stage])] = self.parts[stage]
    held = self.rows >= 0
    self.mask = None if held.all() else held
    self.mesh = mesh_lib.make(
      dict(stage=p, fsdp=fsdp), jax.devices()[: p * fsdp]
    )
    self.plain = arrays(p, schedule.microbatches, layers)
    self.toy = functools.partial(Toy, split=schedule.weight is not None)

  @property
  def arguments(self):
    ends, stack, data = self.plain
    flat = self.rows.reshape(-1)
    held = {path: x[np.maximum(flat, 0)] for path, x in stack.items()}
    for x in held.values():
      x[flat < 0] = 0
    specs = ENDS, STACK, P()
    return jax.device_put((ends, held, data), specs)

  def run(self, ends, stack, data, table=None):
    """(loss, gradients of ends, of the stack), found beside them; for jit."""

    def local(ends, stack, data, table):
      if table is not None:
        pipeline_ticks.Executor.columns = lambda *_: table
      calls = self.toy(data).calls()
      loss, found, of_ends, of_stack = pipeline.gradients(
        self.schedule, calls, ends, stack, self.mask
      )
      # Of ends, what is not split over stages is summed over them once.
      of_ends['gain'] = lax.psum(of_ends['gain'], 'stage')
      of_ends['total'] = lax.psum(found.totals, 'stage')
      return loss, of_ends, of_stack | found.rows

    return jax.shard_map(
      local,
      in_specs=(ENDS, STACK, P(), P()),
      out_specs=(P(), ENDS | FOUND[0], STACK | FOUND[1]),
      check_vma=False,
    )(ends, stack, data, table)

  def compiled(self):
    with jax.set_mesh(self.mesh):
      return jax.jit(self.run).lower(*self.arguments).compile()

  def numbers(self):
    """(loss, gradients of ends, of layers in order), in NumPy."""
    with jax.set_mesh(self.mesh):
      return self.in_order(jax.jit(self.run)(*self.arguments))

  def in_order(self, found):
    loss, ends, stack = jax.device_get(found)
    flat = self.rows.reshape(-1)
    for g in stack.values():
      assert (g[flat < 0] == 0).all()  # an empty row learns nothing
    order = np.argsort(flat)[(flat < 0).sum() :]
    return loss, ends, {path: g[order] for path, g in stack.items()}


def differences(found, wanted):
  """{leaf: relative difference}; NaN is infinite."""
  flat = lambda loss, ends, stack: dict(loss=loss) | ends | stack
  found, wanted = flat(*found), flat(*wanted)
  assert found.keys() == wanted.keys()
  given = [found[name] for name in wanted]
  return kernel_cases.errors_of(wanted, given, wanted.values())


def reference(program):
  """`Program.numbers` of a plain loop over microbatches and layers."""
  ends, stack, data = program.plain

  def loss(ends, stack):
    total, counts = 0.0, jnp.zeros_like(stack['bias'])
    for i, path in enumerate(program.schedule.paths):
      mine = np.concatenate([program.parts[stage] for stage in path])
      x = ends['table'][data['ids'][i]] * ends['gain']
      values = {p: v[mine] for p, v in stack.items()}
      y, inputs = layers_of(values, x, data['shift'][i])
      counts = counts.at[mine].add((inputs**2).sum(1))
      z = (y * ends['gain']) @ ends['head'] - data['targets'][i]
      total += jnp.square(z).sum()
    return total, counts

  differentiated = jax.value_and_grad(loss, (0, 1), has_aux=True)
  found = jax.device_get(differentiated(ends, stack))
  (value, counts), (of_ends, of_stack) = found
  of_ends |= {'total': counts.sum()}
  return value, of_ends, of_stack | {'count': counts}


# ----------------------------------------------------------------- equality


@pytest.mark.parametrize(
  'arguments, layers',
  [
    (('gpipe', 2, 3), 4),
    (('gpipe', 4, 4, 2), 8),
    (('one_f_one_b', 2, 1), 2),
    (('one_f_one_b', 2, 5), 3),  # uneven
    (('one_f_one_b', 4, 6), 7),
    (('interleaved', 2, 4, 2), 7),
    (('interleaved', 2, 4, 3), 6),
    (('interleaved', 4, 8, 2), 9),
    (('zero_bubble', 2, 3), 3),
    (('zero_bubble', 4, 4, 3), 13),
    (('v_half', 2, 3, 2), 5),
    (('v_half', 4, 5, 2), 8),
    (('skip', 4, 5, 1, 0.25), 6),
  ],
  ids=str,
)
def test_equal_to_a_plain_loop(arguments, layers):
  program = Program(schedules.make(*arguments), layers)
  wanted = reference(program)
  found = differences(program.numbers(), wanted)
  assert max(found.values()) < 1e-12, found


def test_the_loss_alone():
  program = Program(schedules.make('v_half', 2, 4, 2), 5)

  def local(ends, stack, data):
    args = program.toy(data).calls(), ends, stack, program.mask
    loss, found = pipeline.forward(program.schedule, *args)
    return loss, lax.psum(found.totals, 'stage')

  run = jax.shard_map(
    local, in_specs=(ENDS, STACK, P()), out_specs=(P(), P()), check_vma=False
  )
  with jax.set_mesh(program.mesh):
    loss, total = jax.jit(run)(*program.arguments)
  wanted, ends, _ = reference(program)
  np.testing.assert_allclose(loss, wanted, rtol=1e-13)
  np.testing.assert_allclose(total, ends['total'], rtol=1e-13)


def test_idle_work_multiplied_away_is_seen(monkeypatch):
  """What idle stages compute is NaN here: 0 * NaN would be kept."""
  multiply = lambda on, tree: jax.tree.map(lambda x: x * on, tree)
  monkeypatch.setattr(pipeline_ticks, '_select', multiply)
  program = Program(schedules.make('gpipe', 2, 2), 4)
  found = differences(program.numbers(), reference(program))
  assert np.isinf(found['weight']) and np.isinf(found['table']), found


# ------------------------------------------------------ tables and messages

# Fields that a device reads while the phase of their first letter is on.
READ = (
  'f_microbatch', 'f_chunk', 'f_slot', 'f_first', 'b_on', 'b_microbatch',
  'b_chunk', 'b_slot', 'b_cotangent', 'b_first',
)  # fmt: skip
SPLIT_OFF = ('b_store', 'w_on', 'w_chunk', 'w_slot')


def entries(tables, split):
  """(field, index) of what decides: active entries, and what receives."""
  for field in READ + SPLIT_OFF * split:
    read = getattr(tables.rows, f'{field[0]}_on')
    if field == 'b_first':  # where a microbatch leaves
      read = read & (tables.rows.embed_back >= 0)[:, None]
    for at in np.argwhere(read):
      yield field, tuple(at)
  for field in ('f_receive', 'b_receive', 'loss_slot'):
    trash = getattr(tables, schedule_cases.BUFFERS[field])
    kept = getattr(tables.rows, field) != trash
    for at in np.argwhere(kept):
      yield field, tuple(at)
  for at in np.argwhere(tables.rows.loss >= 0):
    yield 'loss_device', tuple(at)


@pytest.mark.parametrize('name', ['interleaved', 'zero_bubble'])
def test_every_entry_of_the_table_counts(monkeypatch, name):
  """The table is an argument of one compiled program: each entry in turn."""
  monkeypatch.setattr(
    pipeline_ticks.Executor, 'columns', pipeline_ticks.Executor.columns
  )  # put back what `run` sets
  schedule = schedules.make(name, 2, 2, 2)
  program = Program(schedule, 4)
  wanted, tables = reference(program), schedule_tables.tables(schedule)
  with jax.set_mesh(program.mesh):
    arguments, call = program.arguments, jax.jit(program.run)
    numbers = lambda table: differences(
      program.in_order(call(*arguments, table)), wanted
    )
    right = numbers(tables.rows)
    assert max(right.values()) < 1e-12, right
    every = list(entries(tables, schedule.weight is not None))
    unread = []
    for field, at in every:
      wrong = schedule_cases.changed(tables, field, at)
      found = numbers(tables.rows._replace(**{field: wrong}))
      if max(found.values()) < 1e-6:
        unread.append((field, at))
  assert len(every) > 80 and not unread, unread


@pytest.mark.parametrize(
  'name, link',
  [('interleaved', 1), ('interleaved', -1), ('v_half', 3), ('v_half', -1)],
)
def test_a_missing_message_is_seen(monkeypatch, name, link):
  """On 4 stages, forward links are 1, and 3 where v_half goes back up."""
  right = pipeline_ticks.Executor.send
  wrong = lambda self, x, to: x if to == link else right(self, x, to)
  monkeypatch.setattr(pipeline_ticks.Executor, 'send', wrong)
  program = Program(schedules.make(name, 4, 4, 2), 8)
  found = differences(program.numbers(), reference(program))
  assert (found['loss'] > 1e-6) == (link > 0) and found['weight'] > 1e-6, found


# ----------------------------------------------------------------- programs


@pytest.mark.parametrize(
  'arguments, links',
  [
    (('one_f_one_b', 4, 4), 1),
    (('interleaved', 4, 8, 2), 1),
    (('v_half', 4, 4, 2), 2),  # down and back up; the turn stays on a device
  ],
)
def test_messages_and_nothing_at_the_boundary(arguments, links):
  """Two permutes a link and tick; parameters are gathered in phases alone."""
  program = Program(schedules.make(*arguments), 16, fsdp=2)
  found = hlo.collectives(program.compiled().as_text(), program.mesh)
  kinds = {}
  for c in found:
    kinds.setdefault(c.kind, []).append(c)
  ticks = program.schedule.ticks
  sent = kinds.pop('collective-permute')
  assert len(sent) == 2 * links
  assert {c.count for c in sent} == {ticks}
  assert {(c.bytes, c.axes) for c in sent} == {(R * D * 8, ('stage',))}
  # F and B each gather the layers of one chunk, over fsdp.
  gathers = kinds.pop('all-gather')
  layers = 16 // program.schedule.virtual_stages
  share = layers * D * D * 8 // 2
  assert [(c.operand_bytes, c.axes) for c in gathers] == 2 * [
    (share, ('fsdp',))
  ]
  table = schedule_tables.tables(program.schedule).rows
  assert [c.count for c in gathers] == [table.any_f.sum(), table.any_b.sum()]
  # Of stages: what embedding and loss sum, in each direction, and `gain`.
  over = lambda axis: [
    c for cs in kinds.values() for c in cs if c.axes == (axis,)
  ]
  assert {c.kind for c in over('fsdp')} <= {'reduce-scatter', 'all-reduce'}
  # XLA may merge two of them.
  assert max(c.operand_bytes for c in over('stage')) <= 2 * R * D * 8
  assert sum(len(over(a)) for a in ('stage', 'fsdp')) == sum(
    map(len, kinds.values())
  )


@pytest.mark.parametrize('late', [False, True])
@pytest.mark.parametrize(
  'arguments', [('one_f_one_b', 4, 4), ('v_half', 4, 4, 2)]
)
def test_no_tick_copies_a_buffer(monkeypatch, arguments, late):
  """Inputs stay where they lie; a read after a write would move them."""
  if late:
    Executor, right = pipeline_ticks.Executor, pipeline_ticks.Executor.tick

    def tick(self, carry, turn):
      slot = self.mine(turn)[0].b_slot
      wrong = right(self, carry, turn)[0]
      return wrong._replace(x_b=carry.inputs[slot]), None

    monkeypatch.setattr(Executor, 'tick', tick)
  program = Program(schedules.make(*arguments), 8)
  rows = schedule_tables.tables(program.schedule).inputs + 1
  text = program.compiled().as_text()
  body = text[: text.index('\nENTRY ')]  # where the carry is set up
  assert f'f64[{rows},{R},{D}]' in body
  copied = re.findall(r'= f64\[(\d+),\d+,\d+\]\S* copy\(', body)
  assert (str(rows) in copied) == late, copied
