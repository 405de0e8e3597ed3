"""Collectives counted in compiled programs, against formulas and by breaking.

Real programs for 8 CPU devices, real ones for TPU where libtpu is installed,
and the texts of TPU's own notations.
"""

import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
import pytest
import support

from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import compiled
from paraxis.sharding.meter import hlo

ROWS = jax.P(('data', 'fsdp', 'tensor'))
HELD = 128 * 256 * 4  # bytes of one shard


def text_of(mesh, f):
  """Compiled text of f in a manual region; f: one shard of x -> one shard."""
  x = jax.ShapeDtypeStruct(
    (1024, 256), jnp.float32, sharding=jax.NamedSharding(mesh, ROWS)
  )
  region = jax.shard_map(
    f, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False
  )
  with jax.default_device(mesh.devices.flat[0]), jax.set_mesh(mesh):
    return jax.jit(region).trace(x).lower().compile().as_text()


def nested(x):
  inner = lambda x, _: (lax.psum(x, 'tensor') * 0.5, None)

  def outer(x, _):
    x, _ = lax.scan(inner, x, length=3)
    return lax.ppermute(x, 'fsdp', [(0, 1), (1, 0)]), None

  return lax.scan(outer, x, length=7)[0]


def branches(x):
  both = lambda x: lax.psum(x, 'data') + lax.psum(x * 2, 'tensor').mean()
  wanted = lax.psum(x.sum(), ('data', 'fsdp', 'tensor')) > 0
  return lax.cond(wanted, lambda x: lax.psum(x, 'fsdp'), both, x)


def ring(x, axes=('data', 'tensor'), n=4):
  return lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])


def half(x):
  """Only one of the two has something to send."""
  return lax.ppermute(x, 'data', [(0, 1)])


ALL = {
  'all-reduce': (
    lambda x: lax.psum(x, 'fsdp'),
    [('all-reduce', ('fsdp',), 2, HELD, 1)],
  ),
  'tuple': (
    lambda x: jnp.multiply(*lax.psum((x, jnp.sin(x)), ('fsdp', 'tensor'))),
    [('all-reduce', ('fsdp', 'tensor'), 4, 2 * HELD * 2 * 3 // 4, 1)],
  ),
  'all-gather': (
    lambda x: lax.all_gather(x, ('data', 'tensor'), tiled=True),
    [('all-gather', ('data', 'tensor'), 4, 3 * HELD, 1)],
  ),
  'reduce-scatter': (
    lambda x: lax.psum_scatter(x, ('fsdp', 'tensor'), tiled=True),
    [('reduce-scatter', ('fsdp', 'tensor'), 4, HELD * 3 // 4, 1)],
  ),
  'all-to-all': (
    lambda x: lax.all_to_all(x, ('fsdp', 'tensor'), 0, 1, tiled=True),
    [('all-to-all', ('fsdp', 'tensor'), 4, HELD * 3 // 4, 1)],
  ),
  'permute': (ring, [('collective-permute', ('data', 'tensor'), 4, HELD, 1)]),
  'half': (half, [('collective-permute', ('data',), 2, HELD, 1)]),
  'loops': (
    nested,
    [
      ('all-reduce', ('tensor',), 2, HELD, 21),
      ('collective-permute', ('fsdp',), 2, HELD, 7),
    ],
  ),
  'conditional': (  # the branch with two counts; a scalar decides
    branches,
    [
      ('all-reduce', ('data', 'fsdp', 'tensor'), 8, 8, 1),
      ('all-reduce', ('data',), 2, HELD, 1),
      ('all-reduce', ('tensor',), 2, HELD, 1),
    ],
  ),
  'nothing': (lambda x: x * 2, []),
}


@functools.cache
def cpu_mesh():
  return mesh_lib.make('data=2,fsdp=2,tensor=2')


@functools.cache
def cpu_text(name):
  return text_of(cpu_mesh(), ALL[name][0])


def brief(found):
  return sorted((c.kind, c.axes, c.group, c.bytes, c.count) for c in found)


@pytest.mark.parametrize('name', ALL)
def test_cpu(name):
  found = hlo.collectives(cpu_text(name), cpu_mesh())
  assert brief(found) == sorted(ALL[name][1])


def test_held_bytes_and_place():
  (c,) = hlo.collectives(cpu_text('reduce-scatter'), cpu_mesh())
  assert (c.operand_bytes, c.result_bytes) == (HELD, HELD // 4)
  assert 'shard_map' in c.where


def test_a_count_that_ignores_loops_is_wrong(monkeypatch):
  monkeypatch.setattr(compiled.CompiledProgram, 'trips', lambda self, loop: 1)
  found = hlo.collectives(cpu_text('loops'), cpu_mesh())
  assert brief(found) != sorted(ALL['loops'][1])
  assert [c.count for c in found] == [1, 1]


def test_a_trip_count_in_the_data_is_an_error():
  def f(x):
    turns = x.sum().astype(jnp.int32)
    return lax.fori_loop(0, turns, lambda _, x: lax.psum(x, 'tensor') / 2, x)

  with pytest.raises(ValueError, match='trip count .*depends on data'):
    hlo.collectives(text_of(cpu_mesh(), f), cpu_mesh())


def test_another_mesh_is_an_error():
  mesh = jax.sharding.AbstractMesh((4,), ('data',))
  with pytest.raises(ValueError, match='8 devices .* has 4'):
    hlo.collectives(cpu_text('all-gather'), mesh)


def test_sums_and_table():
  found = hlo.collectives(cpu_text('loops'), cpu_mesh())
  assert hlo.by_axis(found) == dict(fsdp=7 * HELD, tensor=21 * HELD)
  assert hlo.by_kind(found) == {
    'all-reduce': 21 * HELD,
    'collective-permute': 7 * HELD,
  }
  assert hlo.rows(found)[0] == ('all-reduce', 'tensor', 21, 21 * HELD)
  lines = hlo.table(found).splitlines()
  assert len(lines) == 4 and lines[1].split()[:3] == [
    'all-reduce',
    'tensor',
    '21',
  ]
  assert lines[-1].split() == ['all', f'{28 * HELD / 1e6:.3f}']


# --- TPU's notations, as text ------------------------------------------------

FUSED = """HloModule fused, is_scheduled=true, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (x: f32[8,16], y: f32[4]) -> (f32[8,8], f32[2]) {
  %x = f32[8,16]{1,0:T(8,128)} parameter(0)
  %y = f32[4]{0} parameter(1)
  %both = (f32[8,16]{1,0}, f32[4]{0}) all-reduce(%x, %y), channel_id=1, \
replica_groups={{0,2},{1,3},{4,6},{5,7}}, use_global_device_ids=true, \
to_apply=%sum
  %id = u32[] partition-id()
  %g0 = f32[8,16]{1,0} get-tuple-element(%both), index=0
  %s0 = f32[8,WIDTH]{1,0} dynamic-slice(%g0, %id, %id), \
dynamic_slice_sizes={8,WIDTH}
  %g1 = f32[4]{0} get-tuple-element(%both), index=1
  %s1 = f32[2]{0} dynamic-slice(%g1, %id), dynamic_slice_sizes={2}
  ROOT %out = (f32[8,WIDTH]{1,0}, f32[2]{0}) tuple(%s0, %s1)
}

ENTRY %main (p: f32[8,16], q: f32[4]) -> (f32[8,8], f32[2]) {
  %p = f32[8,16]{1,0:T(8,128)} parameter(0)
  %q = f32[4]{0} parameter(1)
  ROOT %f = (f32[8,WIDTH]{1,0}, f32[2]{0}) fusion(%p, %q), kind=kCustom, \
calls=%all-reduce-scatter.1, metadata={op_name="grad/dot"}
}
"""


def fused(width):
  """The one collective of FUSED."""
  found = hlo.collectives(FUSED.replace('WIDTH', f'{width}'), cpu_mesh())
  return brief(found)


def test_a_fused_all_reduce_and_slice_is_a_reduce_scatter(monkeypatch):
  held = (8 * 16 + 4) * 4
  reduced = [('all-reduce', ('fsdp',), 2, held, 1)]
  assert fused(8) == [('reduce-scatter', ('fsdp',), 2, held // 2, 1)]
  assert fused(12) == reduced  # a slice that keeps more than its share
  monkeypatch.setattr(hlo, '_sliced', lambda program, reduce: False)
  assert fused(8) == reduced  # without the rule


STEP = """
%{name} (p: f32[4]) -> f32[8] {{
  %p.{name} = f32[4]{{0}} parameter(0)
  ROOT %g.{name} = f32[8]{{0}} all-gather(%p.{name}), channel_id=9, \
replica_groups=[4,2]<=[8], dimensions={{0}}, \
frontend_attributes={{chain_id="3"}}
}}
"""
CHAIN = """HloModule chain, num_partitions=8
{steps}
%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %s = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4]{{0}} get-tuple-element(%s), index=1
  %middle = f32[8]{{0}} fusion(%x), kind=kOutput, calls=%step
  ROOT %t = (s32[], f32[4]{{0}}) tuple(%i, %x)
}}

%condition (s.2: (s32[], f32[4])) -> pred[] {{
  ROOT %s.2 = (s32[], f32[4]{{0}}) parameter(0)
}}

ENTRY %main (x: f32[4]) -> f32[8] {{
  %x = f32[4]{{0}} parameter(0)
  %zero = s32[] constant(0)
  %begin = f32[8]{{0}} fusion(%x), kind=kCustom, calls=%start
  %init = (s32[], f32[4]{{0}}) tuple(%zero, %x)
  %loop = (s32[], f32[4]{{0}}) while(%init), condition=%condition, \
body=%body, backend_config={{"known_trip_count":{{"n":"6"}}}}
  ROOT %end = f32[8]{{0}} fusion(%x), kind=kCustom, calls=%done
}}
"""


def test_the_steps_of_an_asynchronous_chain_are_one_collective():
  steps = ''.join(STEP.format(name=n) for n in ('start', 'step', 'done'))
  text = CHAIN.format(steps=steps)
  found = hlo.collectives(text, cpu_mesh())
  assert brief(found) == [('all-gather', ('tensor',), 2, 16, 1)]
  apart = hlo.collectives(text.replace('chain_id', 'x'), cpu_mesh())
  assert sum(c.count for c in apart) == 8  # 1 + 6 + 1


PAIRS = """HloModule m, is_scheduled=true, num_partitions=4

%inside (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  ROOT %c = f32[4,4]{1,0} convolution(%a, %a), dim_labels=bf_io->bf
}

%cheap (b: f32[4,4]) -> f32[4,4] {
  %b = f32[4,4]{1,0} parameter(0)
  ROOT %n = f32[4,4]{1,0} negate(%b)
}

ENTRY %main (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  %s1 = (f32[4,4]{1,0}, f32[4,4]{1,0}) collective-permute-start(%p)
  %f1 = f32[4,4]{1,0} fusion(%p), kind=kOutput, calls=%inside
  %s2 = (f32[4,4]{1,0}, f32[4,4]{1,0}) collective-permute-start(%f1)
  %f2 = f32[4,4]{1,0} fusion(%p), kind=kOutput, calls=%inside
  %d1 = f32[4,4]{1,0} collective-permute-done(%s1)
  %d2 = f32[4,4]{1,0} collective-permute-done(%s2)
  %s3 = (f32[4,4]{1,0}, f32[4,4]{1,0}) collective-permute-start(%d2)
  %f3 = f32[4,4]{1,0} fusion(%d1), kind=kLoop, calls=%cheap
  %d3 = f32[4,4]{1,0} collective-permute-done(%s3)
  %g = f32[16,4]{1,0} all-gather(%d3), dimensions={0}
  ROOT %f4 = f32[4,4]{1,0} fusion(%g), kind=kOutput, calls=%inside
}
"""


def products(found):
  return [len(o.products) for o in found]


def test_products_between_start_and_end():
  """Two, one, none in a fusion that has no product, none while all wait."""
  assert products(hlo.overlapped(PAIRS)) == [2, 1, 0, 0]
  steps = ''.join(STEP.format(name=n) for n in ('start', 'step', 'done'))
  product = (
    ' %dot = f32[4]{0} dot(%x, %x), lhs_contracting_dims={}\n  ROOT %end'
  )
  chain = CHAIN.format(steps=steps)
  assert products(hlo.overlapped(chain)) == [0]
  assert products(hlo.overlapped(chain.replace(' ROOT %end', product))) == [1]


def test_products_that_neither_wait_nor_are_waited_for():
  """%f2 beside all of them; %f1 and %f4 beside the first, too."""
  assert products(hlo.independent(PAIRS)) == [3, 1, 1, 1]
  late = PAIRS.replace(
    '%f2 = f32[4,4]{1,0} fusion(%p)', '%f2 = f32[4,4]{1,0} fusion(%s1)'
  )
  assert products(hlo.independent(late)) == [2, 1, 1, 1]


def one_line(line):
  """[Collective] of a program of one instruction on x."""
  text = (
    'HloModule m, num_partitions=8\nENTRY %main (x: f32[8]) -> f32[8] {\n'
    '  %x = f32[8]{0} parameter(0)\n  %long = f32[64]{0} parameter(1)\n'
    f'  ROOT %y = {line}\n}}\n'
  )
  return hlo.collectives(text, cpu_mesh())


@pytest.mark.parametrize(
  'line, expected',
  [
    (
      '((f32[8]{0}), f32[4]{0}) reduce-scatter-start(%x), '
      'replica_groups={{0,1},{2,3},{4,5},{6,7}}',
      ('reduce-scatter', ('tensor',), 2, 16, 1),
    ),
    (
      '(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), '
      'source_target_pairs={{0,4},{4,0}}',
      ('collective-permute', ('data',), 2, 32, 1),
    ),
    (
      'f32[8]{0} all-reduce-start(%x), replica_groups=[1,8]<=[8]',
      ('all-reduce', ('data', 'fsdp', 'tensor'), 8, 56, 1),
    ),
    (
      'f32[8]{0} ragged-all-to-all(%x, %x, %x), replica_groups=[4,2]<=[8]',
      ('ragged-all-to-all', ('tensor',), 2, 16, 1),
    ),
    (
      'f32[8]{0} ragged-all-to-all(%x, %long, %x), replica_groups=[4,2]<=[8]',
      ('ragged-all-to-all', ('tensor',), 2, 16, 1),
    ),
    (
      'f32[8]{0} ragged-all-to-all(%long, %x, %x), replica_groups=[4,2]<=[8]',
      ('ragged-all-to-all', ('tensor',), 2, 16, 1),
    ),
    (
      'f32[8]{0} collective-broadcast(%x), replica_groups=[4,2]<=[8]',
      ('collective-broadcast', ('tensor',), 2, 32, 1),
    ),
    ('f32[8]{0} all-reduce(%x), replica_groups=[8,1]<=[8]', None),
    ('f32[8]{0} collective-permute(%x), source_target_pairs={}', None),
    ('f32[8]{0} recv(%x), is_host_transfer=true', None),
  ],
)
def test_single_lines(line, expected):
  assert brief(one_line(line)) == ([expected] if expected else [])


def test_sends_between_devices_are_not_passed_over():
  with pytest.raises(ValueError, match='send between devices is not counted'):
    one_line('(f32[8]{0}, u32[]) send(%x), channel_id=1')


# --- Programs for TPU --------------------------------------------------------


@support.compiles('tpu')
@pytest.mark.parametrize('name', ['tuple', 'reduce-scatter', 'loops', 'half'])
def test_tpu_equals_cpu(name):
  devices = aot.topology('v5p:2x2x2').devices
  mesh = mesh_lib.make('data=2,fsdp=2,tensor=2', devices)
  found = hlo.collectives(text_of(mesh, ALL[name][0]), mesh)
  assert brief(found) == sorted(ALL[name][1])


@support.compiles('tpu')
def test_tpu_zero_gradient():
  """Weights sharded over fsdp, scanned: gathered and scattered once a layer.

  TPU makes the scatter a fusion of an all-reduce, and none by name.
  """
  devices = aot.topology('v5p:2x2x2').devices
  mesh = mesh_lib.make('fsdp=4,tensor=2', devices)
  place = lambda *spec: jax.NamedSharding(mesh, jax.P(*spec))
  w = jax.ShapeDtypeStruct(
    (6, 512, 512), jnp.float32, sharding=place(None, 'fsdp')
  )
  x = jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=place('fsdp'))

  def loss(w, x):
    product = lambda x, w: jnp.einsum('bd,df->bf', x, w, out_sharding=fsdp)
    fsdp = jax.P('fsdp', None)
    step = lambda x, w: (jnp.tanh(product(x, w)), None)
    return lax.scan(step, x, w)[0].sum()

  with jax.default_device(devices[0]), jax.set_mesh(mesh):
    text = jax.jit(jax.grad(loss)).trace(w, x).lower().compile().as_text()
  assert not re.search(r' reduce-scatter\(', text)
  rows = {k: (n, b) for k, a, n, b in hlo.rows(hlo.collectives(text, mesh))}
  layer = 512 * 512 * 4
  assert rows['reduce-scatter'] == (6, 6 * layer * 3 // 4)
  # Forward and backward, in bfloat16: what TPU multiplies float32 in.
  assert rows['all-gather'] == (12, 12 * layer * 3 // 8)
  assert set(rows) == {'reduce-scatter', 'all-gather'}


@support.compiles('tpu')
def test_tpu_slices():
  """What crosses slices leaves the program through the hosts."""
  devices = aot.topology('v5e:2x2', 2).devices
  mesh = mesh_lib.make('data=2,fsdp=2,tensor=2', devices)
  f = lambda x: lax.psum(x, ('data', 'fsdp'))
  found = hlo.collectives(text_of(mesh, f), mesh)
  assert brief(found) == [
    ('all-gather', ('fsdp',), 2, HELD // 2, 1),
    ('all-reduce', ('data',), 2, HELD // 2, 1),
    ('reduce-scatter', ('fsdp',), 2, HELD // 2, 1),
  ]
  swap = lambda x: lax.ppermute(x, 'data', [(0, 1), (1, 0)])
  found = hlo.collectives(text_of(mesh, swap), mesh)
  assert brief(found) == [('collective-permute', ('data',), 2, HELD, 1)]
