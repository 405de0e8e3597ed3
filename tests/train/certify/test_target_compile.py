"""`paraxis compile`: reports, bad input, and golden results of large shapes.

The golden results are of one version of libtpu; with another one their test is
skipped. To write them again: UPDATE_GOLDEN=1 pytest -m aot THIS_FILE -k golden.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import pathlib

import jax
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.models import build
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import flops
from paraxis.train import program as job_lib
from paraxis.train.certify import target_compile

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / 'golden'
TINY = dict(
  model=dict(
    vocab_size=512,
    d_model=256,
    num_layers=3,
    num_heads=4,
    d_ff=512,
    dtype='bfloat16',
    tied_embedding=False,
    attention_block=128,
  ),
  train=dict(batch_size=4),
  data=dict(sequence_length=256),
)

on_tpu = functools.partial(pytest.param, marks=support.needs('tpu'))


def tiny(**sections):
  """schema.Config of TINY, changed by sections of fields."""
  both = {
    name: {**TINY.get(name, {}), **sections.get(name, {})}
    for name in {*TINY, *sections}
  }
  return schema.view(both)


@contextlib.contextmanager
def jax_level(level):
  """XLA's effort; at its lowest a quarter of the time."""
  before = jax.config.jax_optimization_level
  jax.config.update('jax_optimization_level', level)
  yield
  jax.config.update('jax_optimization_level', before)


def counted(config, mesh='data=1'):
  """(flops.Flops of the gradient, operations of the model) on CPU devices."""
  sizes = [int(part.partition('=')[2]) for part in mesh.split(',')]
  devices = jax.devices()[: math.prod(sizes)]
  job = job_lib.of_shapes(config, mesh, devices)
  found = flops.of_jaxpr(target_compile.trace(job)['gradient'].jaxpr)
  return found, target_compile.model_flops(job.config, job.built)


def test_scan_counts_as_unrolled_and_never_below_the_model():
  scanned, model = counted(tiny())
  unrolled, same = counted(tiny(model=dict(unroll=3)))
  assert model == same
  assert scanned.total == pytest.approx(unrolled.total, rel=0.02)
  assert model <= scanned.total <= 1.1 * model
  # By hand: matrices and head, causal scores; forward and twice that backward.
  weights = 3 * (4 * 256 * 256 + 3 * 256 * 512) + 512 * 256
  scores = 3 * 4 * 64 * 256 * 257 // 2
  assert model == 3 * 4 * (2 * weights * 256 + 4 * scores)


def test_recomputing_costs_a_forward_pass():
  plain, model = counted(tiny())
  full, _ = counted(tiny(train=dict(remat='full')))
  assert 1.2 < full.total / plain.total < 4 / 3 + 0.01
  assert full.total > model


def test_windows_and_a_tied_head():
  _, full = counted(tiny())
  _, windows = counted(tiny(model=dict(pattern='W', window=64)))
  _, tied = counted(tiny(model=dict(tied_embedding=True)))
  pairs = 256 * 257 // 2 - sum(min(t + 1, 64) for t in range(256))
  assert full - windows == 3 * 4 * 3 * 4 * 256 * pairs
  assert tied == full


@pytest.mark.parametrize(
  'mesh, options',
  [
    ('data=2,tensor=2', {}),
    ('fsdp=2,tensor=2', dict(collectives='explicit')),
  ],
)
def test_devices_share_the_work(mesh, options):
  """Annotated and explicit: a quarter each, nothing repeated."""
  one, _ = counted(tiny())
  found, _ = counted(tiny(mesh=options), mesh)
  assert found.per_device == pytest.approx(one.total / 4, rel=0.02)
  assert found.total == pytest.approx(one.total, rel=0.02)


@pytest.fixture(scope='module')
def report():
  """A tiny run on four TPU v5e chips."""
  config = tiny(train=dict(remat='full'), model=dict(num_layers=2))
  return target_compile.compile_config(config, 'fsdp=2,tensor=2', 'v5e:2x2')


@support.compiles('tpu')
def test_memory(report):
  """Classes add up to the peak; the known ones are the arrays' own bytes."""
  for name in target_compile.PROGRAMS:
    classes = report.classes(name)
    assert sum(classes.values()) == report.peak(name)
    assert all(size > 0 for size in classes.values()), classes
  config = report.config
  built = build.build(config, '', 'full', report.topology.devices)
  shards = [
    math.prod(p.sharding.shard_shape(p.shape)) for p in built.params.values()
  ]
  assert (
    report.held['parameters'] == report.held['gradients'] == sum(shards) * 4
  )
  assert report.held['optimizer'] == 2 * sum(shards) * 4 + 4  # and a counter
  assert report.parameters == 2 * (4 * 256**2 + 3 * 256 * 512 + 512) + 262400
  assert report.fits
  small = dataclasses.replace(report.topology.chip, hbm=2**20)
  small = dataclasses.replace(report.topology, chip=small)
  small = dataclasses.replace(report, topology=small)
  assert not small.fits
  assert 'DOES NOT FIT' in target_compile.text(small)


@support.compiles('tpu')
def test_collectives(report):
  """Each layer's weights are gathered twice and their gradients scattered."""
  gradient = report.programs['gradient'].collectives
  axes = {c.axes for c in gradient}
  assert {('fsdp',), ('tensor',)} <= axes
  kinds = {c.kind for c in gradient if c.axes == ('fsdp',)}
  assert {'all-gather', 'reduce-scatter'} <= kinds
  layer = (4 * 256**2 + 3 * 256 * 512) // 2 * 2  # of tensor=2, bfloat16
  gathered = sum(
    c.total
    for c in gradient
    if (c.kind, c.axes) == ('all-gather', ('fsdp',)) and c.count % 2 == 0
  )
  assert gathered >= 2 * 2 * layer // 2  # layers, passes, half of it each


@support.compiles('tpu')
def test_a_pipeline_holds_the_slots_of_its_schedule_and_no_more():
  """1F1B keeps 2 p - 1 inputs for any number of microbatches, GPipe all.

  A microbatch is 32 rows of 1,024 tokens, 256 wide: 16 MiB in bfloat16, beside
  which batches of integers are small.
  """

  def temporaries(schedule, microbatches):
    config = tiny(
      model=dict(num_layers=4),
      train=dict(batch_size=32 * microbatches, remat='full'),
      data=dict(sequence_length=1024),
      pipeline=dict(schedule=schedule, microbatches=microbatches),
    )
    target = aot.topology('v5e:2x2')
    with target.context():
      job = job_lib.of_shapes(config, 'stage=4', target.devices)
      traced = target_compile.trace(job)['gradient']
    with job.context(), jax_level('O0'):
      compiled = aot.compile_for(target, 'gradient', traced)
    return aot.memory(compiled).temporaries / 2**20

  few, many = (temporaries('one_f_one_b', m) for m in (8, 16))
  # The batch itself: 5 arrays of 4 bytes a token.
  assert abs(many - few) <= 8 * 5 * 4 * 32 * 1024 / 2**20 + 1, (few, many)
  grown = temporaries('gpipe', 16) - many
  assert grown >= (16 - 7) * 16, grown


@support.compiles('tpu')
def test_json(report):
  found = json.loads(json.dumps(target_compile.to_json(report)))
  assert found['topology'] == 'v5e:2x2' and found['devices'] == 4
  assert found['mesh'] == 'fsdp=2,tensor=2'
  assert found['peak_bytes'] == max(map(report.peak, report.programs))
  by_axis = found['collective_bytes_by_axis']
  rows = [r for rows in found['collectives'].values() for r in rows]
  assert sum(by_axis.values()) == sum(r['bytes'] for r in rows) > 0
  work = found['flops']
  assert work['model'] < work['total'] < 1.5 * work['model']
  assert work['per_device'] == pytest.approx(work['total'] / 4, rel=0.01)
  seconds = found['seconds_model_not_measured']['gradient']
  chip = report.topology.chip
  assert seconds['compute'] == pytest.approx(work['per_device'] / chip.flops)


@support.compiles('tpu')
def test_text(report):
  text = target_compile.text(report)
  assert 'a model, not measured' in text
  assert 'optimal' not in text
  for words in ('parameters', 'optimizer', 'temporaries', 'fits: ', 'fsdp'):
    assert words in text
  assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize(
  'config, mesh, topology, slices, words',
  [
    (tiny(), 'data=4', 'v9:2x2', 1, ('v9:2x2', 'v5p:8x8x8')),
    (tiny(), 'data=4', '', 1, ('--topology=:', 'v5p:8x8x8')),
    (tiny(), 'data=4', 'v5e:2x2', 0, ('--slices=0',)),
    on_tpu(tiny(), 'data=8', 'v5e:2x2', 1, ('data=8', '4 devices')),
    on_tpu(tiny(), 'rows=4', 'v5e:2x2', 1, ("'rows'",)),
    on_tpu(tiny(train=dict(batch_size=6)), 'data=4', 'v5e:2x2', 1,
           ('train.batch_size=6', 'data=4')),
    on_tpu(tiny(train=dict(batch_size=4, microbatches=3)), 'data=4', 'v5e:2x2',
           1, ('train.batch_size=4', 'train.microbatches=3')),
    on_tpu(tiny(model=dict(num_heads=2, head_dim=64)), 'tensor=4', 'v5e:2x2', 1,
           ("'heads' has size 2", 'tensor=4')),
  ],
)  # fmt: skip
def test_bad_input_before_compiling(
  monkeypatch, config, mesh, topology, slices, words
):
  never = lambda *_: pytest.fail('compiled')
  monkeypatch.setattr(aot, 'compile_for', never)
  with support.refused(*words):
    target_compile.run(config, mesh, topology, slices)


@support.compiles('cuda')
def test_gpus():
  config = tiny(train=dict(batch_size=8), model=dict(num_heads=8))
  printed = []
  code = target_compile.run(
    config, 'data=2,tensor=8', 'h200:16', as_json=True, say=printed.append
  )
  found = json.loads(printed[0])
  assert code == 0 and found['fits'] and found['devices'] == 16
  seconds = found['seconds_model_not_measured']['gradient']['links_by_axis']
  sizes = found['collective_bytes_by_axis']
  # data crosses hosts, tensor does not.
  assert seconds['data'] / sizes['data'] > 5 * (
    seconds['tensor'] / sizes['tensor']
  )


# Config: machine; the mesh and the batch are the config's own.
LARGE = {'llama_7b': 'v5p:8x8x8', 'llama_70b': 'v5p:16x16x16'}


def close(found, golden, path=''):
  """Yields what differs: bytes by more than 1%, memory by more than 2%."""
  if isinstance(golden, dict):
    for name in sorted({*found, *golden}):
      if name not in found or name not in golden:
        yield f'{path}/{name}: only in one of the two'
      else:
        yield from close(found[name], golden[name], f'{path}/{name}')
    return
  within = 0.0
  if path.startswith('/collective_bytes'):
    within = max(1e-2, 1e4 / max(golden, 1))  # a few scalars may move
  elif path == '/peak_bytes':
    within = 2e-2
  if not math.isclose(found, golden, rel_tol=within):
    yield f'{path}: {found} is not {golden}'


def test_a_difference_is_found():
  golden = dict(peak_bytes=100, flops=7, collective_bytes_by_axis=dict(a=10**8))
  near = dict(
    peak_bytes=101, flops=7, collective_bytes_by_axis=dict(a=100500000)
  )
  assert not list(close(near, golden))
  assert len(list(close(near | dict(flops=8), golden))) == 1
  assert len(list(close(near | dict(peak_bytes=103), golden))) == 1
  other = dict(collective_bytes_by_axis=dict(a=10**8, b=1))
  assert len(list(close(near | other, golden))) == 1


@support.compiles('tpu')
@pytest.mark.parametrize('name', LARGE)
def test_golden(name):
  """40 CPU-seconds each, in less than 3 GB of memory."""
  file, version = GOLDEN / f'{name}.json', importlib.metadata.version('libtpu')
  write = os.environ.get('UPDATE_GOLDEN')
  golden = {} if write else json.loads(file.read_text())
  if not write and golden['libtpu'] != version:
    pytest.skip(f'golden results of libtpu {golden["libtpu"]}, not {version}')
  config = schema.view(command_line.load(name))
  report = target_compile.compile_config(config, '', LARGE[name])
  whole = target_compile.to_json(report)
  assert whole['fits'] and whole['flops']['total'] > whole['flops']['model']
  assert report.peak_rss < 3e9
  kept = ('parameters', 'peak_bytes', 'collective_bytes_by_axis', 'flops')
  found = {k: whole[k] for k in kept}
  if write:
    GOLDEN.mkdir(exist_ok=True)
    about = dict(libtpu=version, topology=LARGE[name], mesh=whole['mesh'])
    file.write_text(json.dumps(about | found, indent=1) + '\n')
  else:
    assert not list(close(found, {k: golden[k] for k in kept}))
