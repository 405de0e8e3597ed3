"""`paraxis check`: numbers by hand, what does not divide, JSON, bad input."""

import json
import math
import os

import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train import cli
from paraxis.train.certify import check
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims.layouts import check as claims_check

LAYOUT = 'data=64,fsdp=8,tensor=8'


def _config(changes=(), name='quickstart'):
  config = schema.view(command_line.load(name))
  return experiment.fields(config, dict(changes))


@pytest.fixture(scope='module')
def report():
  return check.check(_config(name='llama_70b'), LAYOUT)


def test_bytes_of_70b_on_4096_chips(report):
  """Every matrix is divided by fsdp x tensor, norms are not."""
  assert math.prod(report.mesh.values()) == 4096
  assert report.parameters == 70_553_706_496
  norms = (2 * 80 + 1) * 8192
  each = 4 * ((report.parameters - norms) // 64 + norms)
  assert report.held['parameters'] == report.held['gradients'] == each
  assert report.held['optimizer'] == 2 * each + 4  # and optax's counter
  # Inputs of 80 layers, 2 rows of 4096 / 8 tokens, are among what is saved.
  inputs = 80 * 2 * 512 * 8192 * 2
  assert inputs in [k.bytes for k in report.memory.kept]
  assert report.held['activations'] >= inputs
  total = each * 3 + report.held['activations']
  assert report.peak > total


def test_messages_of_70b_on_4096_chips(report):
  """Sequence-sharded tensor parallelism, ZeRO 3 over fsdp, sums over data."""
  sent = {}
  for c in report.messages:
    key = c.kind, ','.join(c.axes)
    sent[key] = sent.get(key, 0) + c.total
  matrices = (report.parameters - (2 * 80 + 1) * 8192) // 8  # over tensor
  # Gathered in bfloat16 and again to rematerialise, less what is read at once:
  # the head and the embedding are gathered once; so is each row-parallel
  # matrix in the backward pass.
  gathered = sent['all-gather', 'fsdp']
  assert 1.9 < gathered / (2 * matrices * 7 / 8) <= 2.0
  # Gradients are scattered over fsdp and summed over data once, in float32.
  assert sent['reduce-scatter', 'fsdp'] == 4 * matrices * 7 // 8
  assert sent['all-reduce', 'data'] == 2 * (4 * matrices // 8) * 63 // 64
  # Of a layer: 3 gathers of the 2 inputs (forward, recompute, backward), less
  # the mlp's last; a gather of both outputs' gradients; and the ends.
  part = 2 * 4096 * 8192 * 2 * 7 // 8
  assert sent['all-gather', 'tensor'] % part == 0
  assert sent['reduce-scatter', 'tensor'] == (80 * 5 + 2) * part
  assert not report.unknown


def test_zero_stages_divide_what_they_say():
  """Optimizer state from stage 1, the gradients handed on too, weights at 3."""
  whole = 4 * check.parameters(_config())
  shares = {0: (1, 1, 2), 1: (1, 1 / 8, 2 / 8), 3: (1 / 8, 1 / 8, 2 / 8)}
  for stage, parts in shares.items():
    changes = {'mesh.zero': stage, 'optimizer.name': 'adamw'}
    held = check.check(_config(changes), 'data=8').held
    for name, part in zip(check.CLASSES, parts, strict=False):
      wanted = pytest.approx(part * whole, rel=0.02)  # norms may stay whole
      assert held[name] == wanted, (stage, name)


def test_the_text_and_the_json_say_the_same(report):
  text = check.text(report)
  assert max(map(len, text.splitlines())) <= 80
  data = json.loads(json.dumps(check.to_json(report)))
  assert data['chips'] == 4096 and data['problems'] == []
  assert f'{data["parameters"]:,} parameters' in text
  assert data['bytes_per_chip'] == report.held
  by_axis = data['bytes_received_by_axis']
  assert sum(by_axis.values()) == sum(
    row['total'] for row in data['messages_predicted']
  )
  assert f'{sum(by_axis.values()) / 1e6:,.3f}' in text.splitlines()[-1]
  for row in data['messages_predicted']:
    assert row['where'] in ' '.join(text.split())


def test_everything_that_does_not_divide_is_one_line():
  config = _config(name='llama_70b')
  with support.refused(
    'vocab=128,256 of embedding over tensor=7 (nearest 6)',
    'heads=64 of layers/attention/',
    'residual_length=4,096 of data.sequence_length=4096 over tensor=7',
    'batch=1,024 of train.batch_size=1024 over data=60 (nearest 32)',
    'With tensor=4 or 8',
    'With data=32 or 64',
  ):
    check.run(config, 'data=60,tensor=7')
  shown = []
  code = check.run(config, 'data=60,tensor=7', True, shown.append)
  assert code == errors.EXIT_USER
  data = json.loads(shown[0])
  # Not mlp: 28672 / 7 = 4096.
  assert {p['axis']: p['nearest'] for p in data['problems']} == {
    'vocab': 6, 'heads': 4, 'residual_length': 4, 'batch': 32,
  }  # fmt: skip
  assert data['fits'] == {'data': [32, 64], 'tensor': [4, 8]}
  # The sizes it names do fit.
  assert check.problems(config, 'data=64,tensor=8') == ([], {})


def test_microbatches_are_those_of_the_mesh_that_is_asked_for():
  """--mesh= replaces the stages of the config, and what they say."""
  config = experiment.fields(
    schema.Config(), {'mesh.stage': 4, 'train.batch_size': 8}
  )
  assert check.problems(config, 'data=8') == ([], {})
  rows = [
    check.resolved(config, mesh).microbatch_rows
    for mesh in ('data=8', 'stage=2,data=4', '')
  ]
  assert rows == [8, 4, 2]


def test_both_sides_of_a_direction_read_the_same_rows():
  """Over replica x data they would not divide."""
  config = _config({'train.estimator': 'zeroth_order', 'train.batch_size': 8})
  assert check.problems(config, 'replica=2,data=8') == ([], {})
  found, fits = check.problems(config, 'replica=2,data=16')
  assert [p.mesh for p in found] == [{'data': 16}]
  assert fits == {'data': [4, 8]}


def test_fewer_kv_heads_than_shards_are_possible():
  report = check.check(_config(name='llama_70b'), 'data=64,tensor=64')
  assert 'kv_heads' not in [name for name, *_ in report.sharded]


@pytest.mark.parametrize(
  'mesh, changes, words',
  [
    ('data=-1', {}, 'without devices every size must be given'),
    ('dta=8', {}, "Did you mean 'data'"),
    ('stage=8', {}, 'mesh.stage=8'),
    ('data=8', {'train.microbatches': 3}, 'train.microbatches=3'),
    ('data=8', {'train.microbatches': 2}, 'in 2 microbatches'),
    ('tensor=2', {'mesh.rules': 'fsdp'}, 'tensor=2'),
    ('data=2', {'model.num_kv_heads': 3}, 'model.num_kv_heads=3'),
    ('context=3', {}, 'over context=3 (nearest 2)'),
  ],
)
def test_an_impossible_layout_is_one_line(mesh, changes, words):
  with support.refused(words):
    check.run(_config(changes), mesh)


@pytest.mark.parametrize(
  'mesh, changes',
  [
    ('fsdp=2,context=2,tensor=2', {'train.microbatches': 2}),
    ('context=4', {'mesh.context_form': 'ulysses'}),
    ('data=4,tensor=2', {'mesh.collective_matmul': 'all'}),
  ],
)
def test_other_layouts_are_read_too(mesh, changes):
  shown = []
  assert check.run(_config(changes), mesh, say=shown.append) == errors.EXIT_OK
  assert 'per mesh axis' in shown[0]


def test_muon_moves_what_types_do_not_say():
  """Muon runs in an auto_axes island: reported, not guessed."""
  report = check.check(_config(), 'data=2,fsdp=2,tensor=2')
  assert report.unknown
  assert all('matrices.py' in what for what in report.unknown)
  assert 'not predicted' in check.text(report)


def test_the_command(capsys, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  argv = ['check', '--config=llama_7b', '--mesh=data=16,tensor=4', '--json']
  assert cli.main(argv) == errors.EXIT_OK
  data = json.loads(capsys.readouterr().out)
  assert data['parameters'] == 6_738_415_616 and data['chips'] == 64
  argv[2] = '--mesh=data=16,tensor=3'
  assert cli.main(argv) == errors.EXIT_USER
  assert json.loads(capsys.readouterr().out)['problems']
  assert cli.main(argv[:3]) == errors.EXIT_USER
  assert 'tensor=3' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['llama_7b', 'llama_70b'])
def test_the_shapes_are_the_published_ones(name, tmp_path):
  assert claims.reproduce(name, tmp_path) == errors.EXIT_OK


def test_a_wrong_number_fails():
  run = claims.Run(_config(name='llama_7b'), 'unused')
  assert not claims_check.parameters(run, expected=7_000_000_000).passed


AVERAGED = {'outer.exchange': 'none', 'outer.period': 0}


@pytest.mark.parametrize(
  ('exchange', 'factor', 'trees'),
  # Of means two trees in shards; of anchors, of momentum, their mean.
  [('mean', 2 * 3 / 4, 2 / 4), ('pairs', 1, 3)],
)
def test_what_replicas_exchange_stands_apart(exchange, factor, trees):
  """Once a period, of the shards of a device; nothing of a step is of it."""
  config = _config({'outer.exchange': exchange}, 'diloco')
  found = check.check(config, 'replica=4,fsdp=2')
  alone = check.check(_config(AVERAGED, 'diloco'), 'fsdp=2')
  shards = alone.held['parameters']
  sent = [c for c in found.exchanges if c.axes == ('replica',)]
  within = [c for c in found.exchanges if c not in sent]
  # What both of a replica's devices hold, each sends half of.
  both = sum(c.total for c in within) * 2
  assert sum(c.total for c in sent) == factor * (shards - both / 2)
  assert {c.axes for c in within} <= {('fsdp',)} and both < shards / 100
  assert not any('replica' in c.axes for c in found.messages)
  assert found.held['outer'] == trees * (shards - both / 2)
  assert found.peak > sum(found.held.values()) - found.held['activations']
  text = check.text(found)
  assert 'once in 50 steps' in text and text.count('of fragment 0') == 1
  as_data = json.loads(json.dumps(check.to_json(found)))
  assert as_data['period'] == 50 and len(as_data['exchanged_in_a_period'])
  assert not alone.exchanges and 'replicas' not in check.text(alone)
