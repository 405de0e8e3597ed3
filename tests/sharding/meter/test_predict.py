"""Predicted messages: every rule by hand, whole steps against compiled text.

Legend: B rows, T tokens, D, F widths, V rows of a table.
"""

import collections
import math

import jax
import jax.numpy as jnp
import pytest

from paraxis.configs import schema
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import hlo
from paraxis.sharding.meter import predict
from paraxis.sharding.meter import traced
from paraxis.train.certify import check
from paraxis.train.claims import experiment

P = jax.P
SIZES = mesh_lib.abstract({'data': 4, 'fsdp': 2, 'tensor': 8})


def messages(function, *arrays):
  """(kind, axes, bytes, count) of each, and what is not predicted.

  arrays: (shape, spec) or (shape, spec, dtype), float32.
  """
  body = trace(function, *arrays)
  found, unknown = predict.collectives(body, dict(SIZES.shape))
  assert all(c.where for c in found)
  return [(c.kind, ','.join(c.axes), c.bytes, c.count) for c in found], unknown


def trace(function, *arrays):
  shapes = [
    jax.ShapeDtypeStruct(
      shape, *(dtype or [jnp.float32]), sharding=jax.NamedSharding(SIZES, spec)
    )
    for shape, spec, *dtype in arrays
  ]
  with jax.sharding.use_abstract_mesh(SIZES):
    return traced.trace(function, dict(SIZES.shape), *shapes)[0]


def region(function, specs, out):
  return lambda *x: jax.shard_map(
    function, in_specs=specs, out_specs=out, check_vma=False
  )(*x)


X = (64, 32), P(('data', 'fsdp'), None)  # 8192 bytes in all


@pytest.mark.parametrize(
  'old, new, wanted',
  [
    (P('data'), P('data'), []),
    (P(), P('data'), [('slice', 'data', 0)]),
    (P('data'), P(), [('all-gather', 'data', 8192 * 3 // 4)]),
    (P('data', 'tensor'), P('data'), [('all-gather', 'tensor', 2048 * 7 // 8)]),
    (P('data'), P(None, 'data'), [('all-to-all', 'data', 2048 * 3 // 4)]),
    (P(('data', 'fsdp')), P('data'), [('all-gather', 'fsdp', 2048 // 2)]),
    (P(('data', 'fsdp')), P(), [('all-gather', 'data,fsdp', 8192 * 7 // 8)]),
    (
      P(('data', 'fsdp')),
      P(('fsdp', 'data')),
      [('collective-permute', 'data,fsdp', 1024)],
    ),
    (
      P(None, unreduced={'data'}),
      P(),
      [('all-reduce', 'data', 2 * 8192 * 3 // 4)],
    ),
    (
      P(None, unreduced={'data'}),
      P(None, 'data'),
      [('reduce-scatter', 'data', 8192 * 3 // 4)],
    ),
    (
      P(None, unreduced={'data', 'fsdp'}),
      P('data'),
      [
        ('reduce-scatter', 'data', 8192 * 3 // 4),
        ('all-reduce', 'fsdp', 2 * 2048 // 2),
      ],
    ),
  ],
)
def test_a_reshard(old, new, wanted):
  found, unknown = messages(lambda x: jax.reshard(x, new), ((64, 32), old))
  assert found == [(*row, 1) for row in wanted] and not unknown


@pytest.mark.parametrize(
  'x, w, out, wanted',
  [
    # column parallel: nothing moves; row parallel: sums, scattered if asked
    (P('data'), P(None, 'tensor'), P('data', 'tensor'), []),
    (
      P('data', 'tensor'),
      P('tensor'),
      P('data'),
      [('all-reduce', 'tensor', 2 * (64 * 16 // 4 * 4) * 7 // 8)],
    ),
    (
      P('data', 'tensor'),
      P('tensor'),
      P('data', 'tensor'),
      [('reduce-scatter', 'tensor', (64 * 16 // 4 * 4) * 7 // 8)],
    ),
    # a weight sharded as the rows are is gathered
    (
      P(('data', 'fsdp')),
      P('fsdp'),
      P(('data', 'fsdp')),
      [('all-gather', 'fsdp', 32 * 16 * 4 // 2)],
    ),
    # a contracted dimension that one side splits: the other is cut for free
    (P('data', 'fsdp'), P(), P('data'), [('all-reduce', 'fsdp', 64 * 16)]),
    # rows that the result does not split
    (P('data'), P(), P(), [('all-gather', 'data', 64 * 32 * 4 * 3 // 4)]),
  ],
)
def test_a_product(x, w, out, wanted):
  found, unknown = messages(
    lambda x, w: jnp.einsum('BD,DF->BF', x, w, out_sharding=out),
    ((64, 32), x),
    ((32, 16), w),
  )
  assert found == [(*row, 1) for row in wanted] and not unknown


def test_a_weight_gradient_is_scattered_first():
  """Over fsdp, then what is left is summed over data."""
  found, _ = messages(
    lambda x, g: jnp.einsum('BD,BF->DF', x, g, out_sharding=P('fsdp')),
    X,
    ((64, 16), X[1]),
  )
  whole = 32 * 16 * 4
  assert found == [
    ('reduce-scatter', 'fsdp', whole // 2, 1),
    ('all-reduce', 'data', 2 * (whole // 2) * 3 // 4, 1),
  ]


def test_reductions_and_rows():
  assert messages(lambda x: x.sum(0), X)[0] == [
    ('all-reduce', 'data,fsdp', 2 * 32 * 4 * 7 // 8, 1)
  ]
  assert messages(lambda x: x.max(1), X)[0] == []
  rows = lambda table, ids: table.at[ids].get(out_sharding=P('data'))
  table, ids = ((128, 32), P('tensor')), ((64,), P('data'), jnp.int32)
  look = ('all-reduce', 'tensor', 2 * 16 * 32 * 4 * 7 // 8, 1)
  assert messages(rows, table, ids)[0] == [look]
  back = jax.grad(lambda t, ids: rows(t, ids).sum())
  found, _ = messages(back, table, ids)
  # The rows' gradient: 16 rows of the table on each device, summed over data.
  assert ('all-reduce', 'data', 2 * 16 * 32 * 4 * 3 // 4, 1) in found


def test_loops_multiply_and_branches_do_not_add():
  gather = lambda x: jax.reshard(x, P()).sum()
  one = 8192 * 7 // 8

  def loop(x):
    body = lambda c, _: (c + gather(x * c), ())
    inner = lambda c, _: (jax.lax.scan(body, c, None, 3)[0], ())
    return jax.lax.scan(inner, 0.0, None, 5)[0]

  found, unknown = messages(loop, X)
  assert found == [('all-gather', 'data,fsdp', one, 15)] and not unknown
  half = lambda x: jax.reshard(x, P('data')).sum(1).sum()
  found, _ = messages(lambda x: jax.lax.cond(x.max() > 0, half, gather, x), X)
  assert ('all-gather', 'data,fsdp', one, 1) in found
  assert not [row for row in found if row[1] == 'fsdp']
  forever = lambda x: jax.lax.while_loop(
    lambda c: c < 3, lambda c: c + gather(x * c), 0.0
  )
  found, unknown = messages(forever, X)
  assert found == [('all-gather', 'data,fsdp', one, 1)]
  assert len(unknown) == 1 and 'while' in unknown[0]
  silent = lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 1, jnp.sqrt, x)
  assert messages(silent, ((64, 32), P())) == ([], [])


def test_collectives_of_a_region_are_taken_as_written():
  names = 'data', 'fsdp'

  def body(x):
    y = jax.lax.all_gather(x, names, tiled=True)
    z = jax.lax.psum_scatter(y * 2, 'fsdp', tiled=True)
    z = jax.lax.ppermute(z, 'tensor', [(i, (i + 1) % 8) for i in range(8)])
    z = jax.lax.all_to_all(z, 'data', 1, 0, tiled=True)
    return z, jax.lax.psum(x.sum(), 'tensor')

  found, unknown = messages(
    region(body, (X[1],), (P(('data', 'fsdp')), P())), X
  )
  assert not unknown and found == [
    ('all-gather', 'data,fsdp', 8192 * 7 // 8, 1),
    ('reduce-scatter', 'fsdp', 8192 // 2, 1),
    ('collective-permute', 'tensor', 4096, 1),
    ('all-to-all', 'data', 4096 * 3 // 4, 1),
    ('all-reduce', 'tensor', 2 * 4, 1),  # 3.5 bytes, rounded up
  ]


def test_groups_of_an_axis():
  groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
  body = lambda x: jax.lax.all_gather(
    x, 'tensor', axis_index_groups=groups, tiled=True
  )
  found, _ = messages(
    region(body, (P('tensor'),), P('tensor')), ((64, 32), P('tensor'))
  )
  assert found[-1] == ('all-gather', 'tensor', 1024, 1)


def test_the_same_twice_is_once_unless_rematerialised():
  def layer(w, x):
    return jnp.einsum('BD,DF->BF', x, jax.reshard(w, P()), out_sharding=X[1])

  w = (32, 32), P('fsdp')
  gather = ('all-gather', 'fsdp', 2048)
  count = lambda found: sum(row[3] for row in found if row[:3] == gather)
  twice = lambda w, x: layer(w, layer(w, x)).sum()
  assert count(messages(twice, w, X)[0]) == 1
  assert count(messages(jax.grad(twice), w, X)[0]) == 1
  # Behind a barrier, gathered again.
  again = lambda w, x: jnp.sin(jax.checkpoint(layer)(w, jnp.sin(x))).sum()
  found = messages(jax.grad(again, (0, 1)), w, X)[0]
  assert count(found) == 2


def test_what_nobody_reads_is_not_sent():
  unused = lambda x: (jax.reshard(x, P()).sum(), x)[1]
  assert messages(unused, X)[0] == []


def test_what_the_compiler_lays_out_is_said():
  island = jax.sharding.auto_axes(lambda x: x @ x.T, out_sharding=P())
  found, unknown = messages(island, X)
  assert len(unknown) == 1 and 'test_predict.py' in unknown[0]


def test_a_message_says_where_it_comes_from():
  body = trace(lambda x: jax.reshard(x, P()), X)
  (c,), _ = predict.collectives(body, dict(SIZES.shape))
  assert 'test_predict.py:' in c.where
  assert c.what == 'f32[64@data+fsdp,32] -> f32[64,32]'
  assert c.phase == 'forward' and c.total == c.bytes


# ------------------------------------------- whole steps, against HLO text --


MODEL = dict(
  vocab_size=128, d_model=32, num_heads=8, d_ff=64, num_layers=2,
  tied_embedding=False,
)  # fmt: skip


def _config(mesh, remat='none', **choices):
  return schema.view(
    dict(
      model=MODEL,
      data=dict(sequence_length=32),
      train=dict(batch_size=16, remat=remat),
      mesh=mesh_lib.parse(mesh) | choices,
    )
  )


def _predicted(config):
  """[predict.Message] of the gradient of a step."""
  report = check.check(config)
  assert not report.unknown
  return [c for c in report.messages if c.phase != 'update']


def _sums(found):
  out = collections.Counter()
  for c in found:
    if c.kind != predict.SLICE:
      out[c.kind, ','.join(c.axes)] += c.total
  return dict(out)


def _on_cpu(found, sizes):
  """What XLA on CPU makes of messages that it places itself.

  It never scatters a sum, and it sums over one dimension's axes at a time.
  """
  for c in found:
    if c.manual or c.kind not in ('reduce-scatter', 'all-reduce'):
      yield c
      continue
    n = math.prod(sizes[a] for a in c.axes)
    whole = c.bytes * n // (n - 1) // (2 if c.kind == 'all-reduce' else 1)
    rows = tuple(a for a in c.axes if a in ('data', 'fsdp'))
    rest = tuple(a for a in c.axes if a not in rows)
    for axes in filter(None, (rows, rest)):
      n = math.prod(sizes[a] for a in axes)
      part = hlo.received('all-reduce', whole, n)
      yield c._replace(kind='all-reduce', axes=axes, bytes=part)


@pytest.mark.parametrize(
  'mesh, changes',
  [
    ('data=8', {}),
    ('fsdp=8', {'remat': 'full'}),
    ('tensor=8', {}),
    ('data=2,fsdp=2,tensor=2', {'remat': 'full'}),
    ('data=2,fsdp=2,tensor=2', {'collectives': 'explicit'}),
  ],
)
def test_a_gradient_step_is_predicted_to_the_byte(mesh, changes):
  config = _config(mesh, **changes)
  devices = tuple(jax.devices())
  compiled = _sums(experiment.step_collectives(config, devices))
  sizes = mesh_lib.parse(mesh)
  predicted = _sums(_on_cpu(_predicted(config), sizes))
  assert predicted == compiled
  assert sum(predicted.values()) > 0


def test_another_layout_is_not_the_one_compiled():
  """Such a comparison fails if the prediction is for something else."""
  one, other = (_sums(_predicted(_config(m))) for m in ('fsdp=8', 'data=8'))
  assert one != other
