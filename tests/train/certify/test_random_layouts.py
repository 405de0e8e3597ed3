"""Random configurations: drawn again alike, printed as commands, shrunk."""

import shlex

import jax
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.configs.base import mixers
from paraxis.train import cli
from paraxis.train.certify import certification
from paraxis.train.certify import options
from paraxis.train.certify import random_layouts
from paraxis.train.certify import verify

BASE = schema.with_values(
  schema.view(command_line.load(random_layouts.CONFIG)), random_layouts._ONE
)


@pytest.fixture(scope='module')
def drawn():
  """Three of a seed."""
  return list(random_layouts.draw(3, 5, BASE, jax.devices()))


def test_a_seed_gives_the_same_configurations(drawn):
  assert len(drawn) == 3 and drawn[0] != drawn[1]
  again = random_layouts.draw(1, 5, BASE, jax.devices())
  assert next(again) == drawn[0]
  known = {name for name, _ in schema.fields()}
  for fields in drawn:
    assert set(fields) <= known and 'model.dtype' not in fields
    case = verify.prepare(schema.with_values(BASE, fields))
    assert not case.changes and len(case.devices) == 8


def test_every_kind_of_layer_is_drawn():
  patterns = [m['pattern'] for m in options.MODELS.values()]
  patterns += [each.get('model.pattern', '') for each in random_layouts.LAYERS]
  missing = set(mixers.TABLE).difference(''.join(patterns))
  assert not missing, f'no configuration of --random has {sorted(missing)}'


def test_the_printed_command_is_the_configuration(
  drawn, monkeypatch, settings_stay
):
  seen = []
  monkeypatch.setattr(verify, 'run', lambda *args: seen.append(args) or 0)
  monkeypatch.setattr(command_line, 'prepare_devices', lambda count: None)
  for fields in drawn:
    _, *argv = shlex.split(random_layouts.command(fields, 'float32'))
    assert cli.main(argv) == errors.EXIT_OK
    config, mesh, as_json, dtype = seen.pop()
    assert (as_json, dtype) == (False, 'float32')
    case = verify.prepare(config, mesh)
    assert (
      case.config == verify.prepare(schema.with_values(BASE, fields)).config
    )


def test_the_first_that_differs_is_shrunk_to_a_command(drawn, monkeypatch):
  """As if every muon with a context axis, or two fields, were wrong."""
  needed = dict(list(drawn[1].items())[:2])
  row = certification.Verdict('loss', 1e-9, 0.5, False, 'norm/scale')
  wrong = schema.with_values(BASE, needed)

  def certify(case, properties):
    assert properties == random_layouts.PROPERTIES
    same = [
      schema.value(case.config, n) == schema.value(wrong, n) for n in needed
    ]
    return [row] if all(same) else [row._replace(passed=True)]

  monkeypatch.setattr(verify, 'certify', certify)
  monkeypatch.setattr(
    verify, 'prepare',
    lambda config, *_, **__: verify.Case(config, jax.devices()),
  )  # fmt: skip
  monkeypatch.setattr(random_layouts, 'draw', lambda *_: iter(drawn))
  lines = []
  code = random_layouts.run(3, 5, say=lines.append)
  assert code == errors.EXIT_DIFFERENT
  tried = [line.split(' ', 1) for line in lines if line[1:2] == '/']
  assert tried[0] == ['1/3', random_layouts.command(drawn[0], 'float64')]
  assert any(line.startswith('FAIL  loss') for line in lines)
  assert lines[-1] == 'DIFFERS, shrunk: ' + random_layouts.command(
    needed, 'float64'
  )


def test_a_command_names_devices_that_are_not_8(drawn, monkeypatch):
  monkeypatch.setattr(verify, 'certify', lambda *_: [])
  lines = []
  random_layouts.run(1, 5, 'float32', lines.append, jax.devices()[:4])
  assert ' --devices=4 --dtype=float32 ' in lines[0]
  assert '--devices' not in random_layouts.command(drawn[0], 'float64')


def test_too_few_devices_for_any_mesh_are_refused():
  too_few = support.refused('--random=2', 'need 4 devices', 'there are 3;')
  with support.within(60), too_few:  # draws would go on for ever
    random_layouts.run(2, 1, devices=jax.devices()[:3])


def test_one_configuration_holds():
  lines = []
  assert random_layouts.run(1, 1, say=lines.append) == errors.EXIT_OK
  assert lines[0].startswith('1/1 paraxis verify --config=')
  assert lines[-1] == 'all 1 configurations hold'


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--random=2', '--mesh=data=8'], ['--random=2 draws', '--mesh']),
    (['--random=2', '--config=quickstart'], ['leave out --config']),
    ([], ['--config is missing']),
  ],
)
def test_flags_that_do_not_go_together(flags, words):
  with support.refused(*words):
    cli.COMMANDS['verify'](flags)
