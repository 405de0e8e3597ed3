"""`paraxis compile`: reports, bad input, and golden results of large shapes.

The golden results are of one version of libtpu; with another one their test is
skipped. To write them again: UPDATE_GOLDEN=1 pytest -m aot THIS_FILE -k golden.
"""

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
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import flops
from paraxis.train import program as job_lib
from paraxis.train.certify import target_compile
from paraxis.train.claims import experiment

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / 'golden'
TINY = schema.Config(
  model=schema.Model(
    vocab_size=512,
    d_model=256,
    num_layers=3,
    num_heads=4,
    d_ff=512,
    dtype='bfloat16',
    tied_embedding=False,
    attention_block=128,
  ),
  train=schema.Train(batch_size=4),
  data=schema.Data(sequence_length=256),
)
# TINY with {'section.field': value} changed.
tiny = functools.partial(experiment.fields, TINY)

on_tpu = functools.partial(pytest.param, marks=support.needs('tpu'))


def counted(config, mesh='data=1'):
  """(flops.Flops of the gradient, operations of the model) on CPU devices."""
  devices = jax.devices()[: math.prod(mesh_lib.parse(mesh).values())]
  job = job_lib.of_shapes(config, mesh, devices)
  found = flops.of_jaxpr(target_compile.trace(job)['gradient'].jaxpr)
  return found, target_compile.model_flops(job.config, job.built)


def test_scan_counts_as_unrolled_and_never_below_the_model():
  scanned, model = counted(tiny())
  unrolled, same = counted(tiny({'model.unroll': 3}))
  assert model == same
  assert scanned.total == pytest.approx(unrolled.total, rel=0.02)
  assert model <= scanned.total <= 1.1 * model
  # By hand: matrices and head, causal scores; forward and twice that backward.
  weights = 3 * (4 * 256 * 256 + 3 * 256 * 512) + 512 * 256
  scores = 3 * 4 * 64 * 256 * 257 // 2
  assert model == 3 * 4 * (2 * weights * 256 + 4 * scores)


def test_every_pass_of_a_core_mixes():
  """The last ones have gradients: each counts three times, others once."""

  def of(passes, last):
    core = dict(
      prelude=1, core=1, iterations=passes, gradients=last, spread=0.0
    )
    return tiny({f'model.recurrence.{k}': v for k, v in core.items()})

  def count(passes, last=8):
    job = job_lib.of_shapes(of(passes, last), abstract=True)
    return target_compile.model_flops(job.config, job.built)

  weights = 5 * 256 * 256 + 3 * 256 * 512  # of a layer and of what joins states
  once = 4 * (2 * weights * 256 + 4 * 4 * 64 * 256 * 257 // 2)
  assert count(5) - count(2) == 3 * 3 * once
  assert count(5, 2) - count(2) == 3 * once
  assert count(5, 3) - count(5, 2) == 2 * once
  found, model = counted(of(5, 2))
  assert model <= found.total <= 1.1 * model


def test_every_token_sees_the_prefix_of_its_stream():
  def of(keys, **more):
    streams = dict(wiring='streams', streams=2, stream_prefix=keys) | more
    return counted(tiny({f'model.{k}': v for k, v in streams.items()}))

  found, few = of(8)
  pairs = 3 * 256 * (24 - 8)  # of three layers
  assert of(24)[1] - few == 3 * 4 * 2 * 4 * 64 * 4 * pairs
  window = dict(pattern='W', window=16)  # which the prefix is not part of
  assert of(24, **window)[1] - of(8, **window)[1] == of(24)[1] - few
  assert few <= found.total <= 1.1 * few


def test_recomputing_costs_a_forward_pass():
  plain, model = counted(tiny())
  full, _ = counted(tiny({'train.remat': 'full'}))
  assert 1.2 < full.total / plain.total < 4 / 3 + 0.01
  assert full.total > model


def test_a_step_without_a_gradient_is_two_forward_passes():
  _, model = counted(tiny())
  found, twice = counted(tiny({'train.estimator': 'zeroth_order'}))
  assert twice == 2 * model / 3
  assert twice <= found.total <= 1.1 * twice


def test_windows_and_a_tied_head():
  _, full = counted(tiny())
  _, windows = counted(tiny({'model.pattern': 'W', 'model.window': 64}))
  _, tied = counted(tiny({'model.tied_embedding': True}))
  pairs = 256 * 257 // 2 - sum(min(t + 1, 64) for t in range(256))
  assert full - windows == 3 * 4 * 3 * 4 * 256 * pairs
  assert tied == full


@pytest.mark.parametrize(
  'mesh, options',
  [
    ('data=2,tensor=2', {}),
    ('fsdp=2,tensor=2', {'mesh.collectives': 'explicit'}),
  ],
)
def test_devices_share_the_work(mesh, options):
  """Annotated and explicit: a quarter each, nothing repeated."""
  one, _ = counted(tiny())
  found, _ = counted(tiny(options), mesh)
  assert found.per_device == pytest.approx(one.total / 4, rel=0.02)
  assert found.total == pytest.approx(one.total, rel=0.02)


@pytest.fixture(scope='module')
def report():
  """A tiny run on four TPU v5e chips."""
  config = tiny({'train.remat': 'full', 'model.num_layers': 2})
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


@support.compiles('tpu')
def test_what_replicas_exchange_stands_apart():
  """In the anchor's shards, once a period; a step is without it.

  Of reduce-scatters as small as these the compiler for TPUs makes all-reduces.
  """
  loop = {'outer.exchange': 'mean', 'outer.period': 20, 'outer.fragments': 2}
  narrow = {'model.param_dtype': 'float32', 'model.num_layers': 2}
  config = tiny(loop | narrow)
  found = target_compile.compile_config(config, 'replica=2,fsdp=2', 'v5e:2x2')
  names = [f'exchange of fragment {p}' for p in (0, 1)]
  assert list(found.exchanges) == names
  every = [c for n in names for c in found.exchanges[n].collectives]
  over = [c for c in every if c.axes == ('replica',)]
  assert {c.axes for c in every if c not in over} <= {('fsdp',)}  # of norms
  sent = sum(c.total for c in over)
  shards = found.held['parameters']
  # 2 (R - 1) / R of the parameters, to 3: a sum whole, gathered as well.
  assert 0.95 * shards <= sent < 1.5 * shards
  assert 0.98 * shards <= found.held['outer'] <= shards  # two trees of 1 / R
  for name in names:
    assert sum(found.classes(name).values()) == found.peak(name)
  of_steps = [c for p in found.programs.values() for c in p.collectives]
  assert not any('replica' in c.axes for c in of_steps)
  text = target_compile.text(found)
  assert text.count('once in 20 steps') == 4  # messages, roofline
  as_data = json.loads(json.dumps(target_compile.to_json(found)))
  assert set(names) <= set(as_data['collectives']) and as_data['period'] == 20
  assert 'replica' not in as_data['collective_bytes_by_axis']


@pytest.mark.parametrize(
  'config, mesh, topology, slices, words',
  [
    (tiny(), 'data=4', 'v9:2x2', 1, ('v9:2x2', 'v5p:8x8x8')),
    (tiny(), 'data=4', '', 1, ('--topology=:', 'v5p:8x8x8')),
    (tiny(), 'data=4', 'v5e:2x2', 0, ('--slices=0',)),
    on_tpu(tiny(), 'data=8', 'v5e:2x2', 1, ('data=8', '4 devices')),
    on_tpu(tiny({'train.batch_size': 6}), 'data=4', 'v5e:2x2', 1,
           ('train.batch_size=6', 'data=4')),
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
  config = tiny({'train.batch_size': 8, 'model.num_heads': 8})
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
@pytest.mark.sampled(8)
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
