"""The first screen of a run, against counts by hand."""

import math
import os
import types

import jax
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.pallas_kernels import registry
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import target
from paraxis.train import loop
from paraxis.train import program
from paraxis.train import step
from paraxis.train.certify import check
from paraxis.train.run import header

D, F, V, L, T, HEADS, KV, WIDE = 32, 48, 96, 2, 16, 4, 2, 8


def _config(**model):
  sizes = dict(
    d_model=D, d_ff=F, vocab_size=V, num_layers=L, num_heads=HEADS,
    num_kv_heads=KV, mlp='swiglu', tied_embedding=False,
  )  # fmt: skip
  plain = schema.Config()
  return schema.with_values(
    plain,
    {f'model.{k}': v for k, v in (sizes | model).items()}
    | {'data.sequence_length': T, 'data.tokenizer': 'bytes'},
  )


def _sizes(config):
  made = program.on_devices(config, devices=jax.devices()[:1])
  return header.sizes(made.model, made.state.params)


ATTENTION = D * WIDE * (HEADS + KV + KV + HEADS)
NORMS = (2 * L + 1) * D


def test_parameters_by_hand():
  found = _sizes(_config())
  inner = L * (ATTENTION + 3 * D * F) + NORMS
  assert found == (inner + 2 * V * D, inner, inner + 2 * V * D, 0)
  tied = _sizes(_config(tied_embedding=True))
  assert tied == (inner + V * D, inner, inner + V * D, 0)
  frozen = _config()
  frozen = schema.with_value(frozen, 'train.freeze', 'embedding,head')
  assert _sizes(frozen) == (*found[:3], 2 * V * D)


def test_a_token_meets_some_of_the_experts():
  experts = {'experts.count': 8, 'experts.top_k': 2, 'experts.shared': 1}
  found = _sizes(_config(**experts))
  beside = L * (ATTENTION + D * 8 + 3 * D * F) + NORMS + 2 * V * D
  assert found.total == beside + L * 8 * 3 * D * F
  assert found.active == beside + L * 2 * 3 * D * F


def test_operations_of_a_token_by_hand():
  """Twice a weight forward, thrice that with the gradient; and attention."""
  matrices = L * (ATTENTION + 3 * D * F) + V * D
  attention = L * 4 * T * HEADS * WIDE  # q k and p v, all pairs of one block
  assert loop.cost(_config()).flops == 3 * (2 * matrices + attention)


@pytest.mark.parametrize('count, top_k', [(8, 2), (64, 1), (4, 4)])
def test_operations_of_experts_are_those_of_a_tokens_own(count, top_k):
  """Not of the room that runs of rows are rounded up to, 1.5 to 5 times."""
  chosen = {'experts.count': count, 'experts.top_k': top_k}
  sums = top_k * D  # of what they gave
  matrices = L * (ATTENTION + D * count + top_k * 3 * D * F + sums) + V * D
  attention = L * 4 * T * HEADS * WIDE
  found = loop.cost(_config(**chosen)).flops
  assert found == pytest.approx(3 * (2 * matrices + attention), rel=1e-6)


@pytest.mark.parametrize(
  'fields',
  [
    {'mesh.data': 2, 'mesh.tensor': 4},
    {'mesh.stage': 2, 'pipeline.microbatches': 4},
    {'train.microbatches': 4, 'train.remat': 'full'},
  ],
)
def test_layouts_do_not_change_the_operations(fields):
  laid_out = schema.with_values(_config(), fields)
  assert loop.cost(laid_out) == loop.cost(_config())


def test_work_that_depends_on_data_is_not_counted(monkeypatch):
  def refuse(jaxpr):
    raise ValueError('a while loop')

  monkeypatch.setattr(header.flops, 'of_jaxpr', refuse)
  found = loop.cost(_config())
  assert math.isnan(found.flops) and found.why == 'a while loop'


def test_the_peak_of_known_devices():
  kind = lambda name: types.SimpleNamespace(device_kind=name)
  h200, v5e = target.CHIPS['h200'].flops, target.CHIPS['v5e'].flops
  assert header.peak([kind('NVIDIA H200')] * 2) == 2 * h200
  assert header.peak([kind('TPU v5 lite')]) == v5e
  assert header.peak([kind('TPU v5')]) == target.CHIPS['v5p'].flops
  assert header.peak([kind('NVIDIA H100 80GB HBM3'), kind('cpu')]) is None
  for other in ('H100 PCIe', 'H100 NVL', 'H200 NVL'):
    assert header.peak([kind(f'NVIDIA {other}')]) is None
  core = lambda *coords, of=0: types.SimpleNamespace(
    device_kind='TPU7x', coords=coords, slice_index=of
  )
  chip = target.CHIPS['tpu7x'].flops
  places = [core(x, 0, 0, of=s) for s in (0, 1) for x in (0, 1)]
  assert header.peak(places) == 4 * chip
  assert header.peak(places * 2) == 4 * chip  # two devices a chip


def test_the_screen(tiny):
  config = schema.with_values(
    tiny.config(), {'train.steps': 6, 'checkpoint.every': 3}
  )
  job = program.make(config, say=lambda line: None)
  cost = header.Cost(2.5e6)
  traced = header.Traced(3 * 2**30, {'a': ('x', 'y'), 'b': ('z',)})
  lines = header.text(job, cost, 'runs/x', traced).splitlines()
  shown = {line[:12].strip(): line[13:] for line in lines}
  total = sum(math.prod(x.shape) for x in job.state.params.values())
  assert shown['model'].startswith(f'{total:,} parameters, ')
  assert '8 x cpu, virtual' in shown['devices']
  rows, length = config.train.batch_size, config.data.sequence_length
  assert f'{rows} rows of {length} tokens' in shown['step']
  read = 6 * rows / job.batches.rows
  assert read < 1 and f'read to {100 * read:.3g}%;' in shown['data']
  held = sum(held.n_pairs for held in job.held_out)
  assert shown['held out'].startswith(f'{held:,} tokens of ')
  assert shown['compute'].startswith('2.5 MFLOP a token; no MFU')
  assert shown['kernels'] == 'a x/y, b z'
  ram = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30
  assert shown['memory'] == (
    f'3.00 GiB a device, predicted, of {ram:.1f} GiB of RAM, shared by all 8'
  )
  assert shown['checkpoints'] == 'every 3 steps, the last 3 kept, in runs/x'
  own = header.text(job, cost._replace(own=True))
  assert 'FLOP a token of the standard loss (make_step has its own); no' in own
  why = header.text(job, header.Cost(math.nan, 'a loop'))
  assert 'not counted: a loop' in why and 'memory' not in why
  assert why.splitlines()[-1].split(None, 1) == [
    'checkpoints', 'none without --workdir'
  ]  # fmt: skip


def test_held_out_text_beside_the_training():
  fields = {'train.batch_size': 4, 'train.steps': 10}
  held = [
    types.SimpleNamespace(n_pairs=n) for n in (4 * T * 300, 4 * T * 7 + 32)
  ]

  def told(number, **more):
    more = {f'train.{name}': value for name, value in more.items()}
    config = schema.with_values(_config(), fields | more)
    job = types.SimpleNamespace(config=config, held_out=held[:number])
    return header.held_out(job)

  assert told(1, steps=300) == (
    '19,200 tokens of 1 domains, read at the end: as many as 300 steps train on'
  )
  assert told(2, eval_every=5) == (
    '19,680 tokens of 2 domains, read every 5 steps: 30.8 times the training '
    '(cap: train.eval_batches)'
  )


def test_what_zero_cannot_share_is_said(tiny):
  """Five places divide no size of this model, two all but little."""
  said = {}
  for data in (5, 2):
    mesh = {'mesh.data': data, 'mesh.zero': 1, 'train.batch_size': 10}
    config = schema.with_values(
      tiny.config(), {f'mesh.{a}': 1 for a in mesh_lib.AXES} | mesh
    )
    job = program.make(
      config, devices=jax.devices()[:data], say=lambda line: None
    )
    said[data] = header.whole(job.built)
    whole = job.state.optimizer
    spread = [x for x in jax.tree.leaves(whole) if x.ndim > 1]
    parts = [x.sharding.shard_shape(x.shape) == x.shape for x in spread]
    assert all(parts) if data == 5 else not any(parts)
    assert ('ZeRO ' in header.text(job, header.Cost(1.0))) == (data == 5)
    found = check.text(check.check(config))
    assert ('mesh.zero: data=5 divides' in found) == (data == 5)
  assert said[5].startswith('data=5 divides no size of ')
  assert said[5].endswith('100% of the optimizer state is not sharded')
  assert said[2] == ''


@pytest.mark.parametrize('n, one_out', [(2, False), (3, True), (4, False)])
def test_of_an_odd_number_of_replicas_one_meets_nobody(n, one_out):
  fields = {'mesh.replica': n, 'outer': schema.Outer('pairs', 4)}
  config = schema.with_values(schema.Config(), fields)
  line = header._replicas(types.SimpleNamespace(config=config))
  assert line.startswith(f'{n} step alone; each meets another')
  assert ('another, one of them none, drawn anew every 4' in line) == one_out


@pytest.mark.parametrize(
  'epochs, shown',
  [(1, '1.00 times'), (12.345, '12.35 times'), (0.999, 'to 99.9%'),
   (0.25, 'to 25%'), (0.003149, 'to 0.315%'), (4e-7, 'to 4e-05%')],
)  # fmt: skip
def test_small_runs_read_a_share(epochs, shown):
  assert header._times(epochs) == shown


@pytest.mark.parametrize('mesh', ['data=8', 'data=2,fsdp=2,tensor=2'])
def test_memory_is_that_of_check(tiny, mesh):
  """And the trace is the one that is compiled."""
  config = tiny.config({'train.microbatches': 2, 'train.batch_size': 16})
  made = program.on_devices(config, mesh)
  grads = step.make(made.built, made.optimizer, 1.0).grads
  found = header.trace(made, grads).memory
  assert found == check.check(config, mesh).peak > 0
  traces = []
  spy = lambda *a: traces.append(1) or grads(*a)
  header.trace(made, spy)
  with made.context():
    jax.jit(spy, donate_argnums=()).trace(
      made.state.params, made.batch_shapes()
    )
  assert len(traces) == 1


@pytest.mark.parametrize(
  'fields, ops',
  [
    ({}, {'attention'}),
    ({'model.pattern': 'M'}, {'gated_scan'}),
    ({'model.pattern': 'GF'}, {'gated_scan', 'attention'}),
    ({'model.pattern': 'S'}, {'selective_scan'}),
    ({'model.pattern': 'R'}, {'linear_scan'}),
    ({'model.pattern': 'L'}, {'affine_scan'}),
    ({'model.pattern': 'D'}, {'delta_scan'}),
    (
      {'model.experts.count': 4, 'model.experts.top_k': 2},
      {'attention', 'grouped_matmul'},
    ),
  ],
)
def test_kernels_of_every_op(fields, ops):
  """Those that the traced program runs, each resolved for its own call."""
  config = schema.with_values(_config(), fields)
  made = program.on_devices(config, devices=jax.devices()[:1])
  found = header.trace(made, step.make(made.built, made.optimizer, 1.0).grads)
  assert ops <= set(found.kernels) <= ops | {'cross_entropy'}
  for op, names in found.kernels.items():
    assert names and set(names) <= {n for n, *_ in registry.explain(op)}
  line = header._kernels(found.kernels)
  assert all(f'{op} {"/".join(found.kernels[op])}' in line for op in ops)


def test_an_asked_for_kernel_is_the_one_shown():
  config = schema.with_values(
    _config(), {'model.pattern': 'M', 'model.scan': 'loop'}
  )
  made = program.on_devices(config, devices=jax.devices()[:1])
  found = header.trace(made, step.make(made.built, made.optimizer, 1.0).grads)
  assert found.kernels['gated_scan'] == ('loop',)


@pytest.mark.parametrize(
  'kind, stats, shown',
  [
    ('NVIDIA H100 80GB HBM3', dict(bytes_limit=60 * 2**30), ', of 60.0 GiB'),
    ('TPU v5 lite', None, ', of 16.0 GiB'),  # of the table of chips
    ('unheard of', {}, ''),
  ],
)
def test_memory_that_a_device_has(kind, stats, shown):
  device = types.SimpleNamespace(
    platform='other', device_kind=kind, process_index=0,
    memory_stats=lambda: stats,
  )  # fmt: skip
  mesh = types.SimpleNamespace(devices=np.array([device, device]))
  job = types.SimpleNamespace(mesh=mesh)
  line = header._memory(job, 2**31)
  assert line == f'2.00 GiB a device, predicted{shown}'
