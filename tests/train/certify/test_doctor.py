"""The report on versions, devices, kernels and the mesh."""

import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import snapshot
from paraxis.sharding.meter import aot
from paraxis.train.bench import kernel_matrix
from paraxis.train.certify import doctor

GOOD = dict(python='3.11.7', jax='0.10.2', flax='0.12.8')
NEW = dict(python='3.12.1', jax='0.12.0.1', flax='0.12.12')


@pytest.mark.parametrize(
  'version, condition, wanted',
  [
    ('0.10.2', '>=0.10.2', True),
    ('0.10.2', '>0.10.2', False),
    ('0.10.2', '<0.9', False),  # numbers, not text
    ('0.12.0', '==0.12', True),
    ('0.12.0.1', '>=0.11,<0.13', True),
    ('0.13.0rc1', '>=0.11,<0.13', False),
    ('3.12.1', '<=3.12', False),
  ],
)
def test_conditions(version, condition, wanted):
  assert doctor.fits(version, condition) is wanted


@pytest.mark.parametrize('have', [GOOD, NEW])
def test_the_tested_stacks_are_good(have):
  assert not doctor.found(doctor.BAD, have)


@pytest.mark.parametrize(
  'have, words',
  [
    (GOOD | dict(jax='0.11.0'), 'dropped Python 3.11'),
    (GOOD | dict(flax='0.12.12'), 'needs jax 0.11.1'),
    (NEW | dict(jax='0.10.2'), 'needs jax 0.11.1'),
    (NEW | dict(jax='0.9.0', flax='0.12.8'), 'paraxis needs jax 0.10.2'),
  ],
)
def test_known_bad_pairs(have, words):
  assert words in ' '.join(p.reason for p in doctor.found(doctor.BAD, have))


def test_a_package_that_is_missing_is_not_bad():
  pair = doctor.Incompatibility({'clu': '>=0'}, 'reason')
  assert not doctor.found([pair], GOOD)
  assert doctor.found([pair], GOOD | dict(clu='0.0.12')) == [pair]


def test_every_pair_can_be_read():
  for pair in doctor.BAD + doctor.NOTES:
    assert pair.reason
    for condition in pair.where.values():
      doctor.fits('1.0', condition)


def test_saves_that_block_are_said(monkeypatch):
  monkeypatch.setattr(snapshot, 'has_host_memory', lambda device: False)
  assert 'blocks training until it is written' in ''.join(doctor._devices())


def test_the_report(capsys, tmp_path, monkeypatch):
  monkeypatch.setenv('PARAXIS_CACHE', str(tmp_path))
  (tmp_path / 'tokens').mkdir()
  (tmp_path / 'tokens' / 'a').write_bytes(bytes(3 * 2**20))
  assert doctor.run() == 0
  shown = capsys.readouterr().out
  for name in doctor.PACKAGES:
    assert f'  {name} ' in shown
  assert '8 x cpu (cpu)' in shown and 'process 0 of 1' in shown
  assert 'copied to host memory beside the next gradient' in shown
  assert 'tokens             3.0 MiB' in shown
  assert 'incompatible versions\n  none' in shown and 'mesh\n  data=8' in shown
  kernels = [line.split() for line in shown.splitlines() if ' runs' in line]
  assert {row[0] for row in kernels} == set(kernel_matrix.PROGRAMS)
  for platform in aot.COMPILERS:  # how to get what is missing
    line = aot.missing(platform) or 'can compile'
    assert f'{platform:18} {line}' in shown


def test_a_config_on_a_mesh(capsys):
  config = schema.view(command_line.load('quickstart'))
  assert doctor.run(config) == 0
  shown = capsys.readouterr().out
  assert 'data=2,fsdp=2,tensor=2, rules fsdp_tensor' in shown
  assert '1,568,480 parameters (6.0 MiB), 393,440 on each device' in shown
  assert doctor.run(config, 'data=8') == 0
  assert '1,568,480 on each device' in capsys.readouterr().out


@pytest.mark.parametrize(
  'mesh, words',
  [('data=3', 'needs 3 devices, but 8'), ('tensor=8', 'heads')],
)
def test_an_impossible_mesh(mesh, words):
  config = schema.view(command_line.load('quickstart'))
  with support.refused(words):
    doctor.run(config, mesh)


def test_a_rule_that_the_mesh_cannot_serve():
  """Refused as `paraxis train` refuses it."""
  config = schema.with_values(
    schema.view(command_line.load('quickstart')),
    {
      'outer': schema.Outer(exchange='mean', period=2),
      'optimizer.name': 'muon',
    },
  )
  with support.refused('outer.exchange=mean', 'optimizer.name=muon'):
    doctor.run(config, 'replica=2,fsdp=4')


def test_rows_of_a_microbatch_are_those_of_the_mesh_that_is_given():
  config = schema.view(command_line.load('quickstart'))
  config = schema.with_value(config, 'train.batch_size', 4)
  with support.refused('train.batch_size=4 in 2 microbatches', 'data=4'):
    doctor.run(config, 'stage=2,data=4')


def test_a_bad_pair_ends_with_2(capsys, monkeypatch):
  have = doctor.versions() | dict(jax='0.9.0')
  monkeypatch.setattr(doctor, 'versions', lambda: have)
  assert doctor.run() == errors.EXIT_USER
  assert (
    'INCOMPATIBLE VERSIONS\n  jax 0.9.0: paraxis needs'
    in capsys.readouterr().out
  )
