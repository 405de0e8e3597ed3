"""config.extra: declared by the user's file, typed, kept in every manifest."""

import dataclasses
import json

import ml_collections
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import extra
from paraxis.configs.base.field import field
from paraxis.train.claims import knockouts
from paraxis.train.run import workdir

pytestmark = pytest.mark.usefixtures('own_file')


@dataclasses.dataclass(frozen=True)
class Inner:
  taps: int = field(3, 'taps', low=1)


@dataclasses.dataclass(frozen=True)
class Own:
  decay: float = field(0.5, 'what a step keeps', low=0.0, high=1.0)
  form: str = field('sum', 'how', ('sum', 'mean'))
  plain: bool = True
  inner: Inner = Inner()


def _own(given):
  return schema.declare_extra(schema.default(), given)


def test_values_are_typed_locked_and_hashable():
  config = _own(Own())
  config.extra.decay = 1  # an integer is a float
  view = schema.view(config)
  assert view.extra.decay == 1.0 and type(view.extra.decay) is float
  assert view.extra.inner.taps == 3 and view.model.extra is view.extra
  assert hash(view) == hash(schema.view(config))
  with pytest.raises(dataclasses.FrozenInstanceError):
    view.extra.decay = 2.0
  with pytest.raises((AttributeError, KeyError)):
    config.extra.deacy = 0.1
  with pytest.raises(TypeError):
    config.extra.inner.taps = 'many'


@pytest.mark.parametrize(
  'given', [dict(decay=0.5, inner=dict(taps=3)),
            ml_collections.ConfigDict(dict(decay=0.5, inner=dict(taps=3)))],
)  # fmt: skip
def test_a_dict_declares_as_a_dataclass_does(given):
  view = schema.view(_own(given))
  assert (view.extra.decay, view.extra.inner.taps) == (0.5, 3)


def test_json_carries_it_without_its_class():
  config = schema.with_value(schema.view(_own(Own())), 'extra.inner.taps', 7)
  text = schema.to_json(config)
  assert json.loads(text)['extra']['inner'] == {'taps': 7}
  assert 'extra' not in json.loads(text)['model']
  assert schema.from_json(text) == config
  extra.forget()
  again = schema.from_json(text)
  assert again == config and again.extra.form == 'sum'
  assert [n for n, _ in schema.fields() if n.startswith('extra')] == []


@pytest.mark.parametrize(
  'given, words',
  [
    (3, 'a dataclass or a dict of defaults'),
    (dict(decay=[1]), 'the default of extra.decay is list'),
    (dict(decay=None), 'the default of extra.decay is NoneType'),
    ({'a b': 1}, "extra.a b: a name of letters"),
    (dict(_x=1), 'extra._x'),
    ({'lambda': 0.1}, 'extra.lambda: lambda is a keyword of Python'),
    ({'in': dict(x=1)}, 'extra.in: in is a keyword'),
    (dict(inner={'if': 1}), 'extra.inner.if: if is a keyword'),
    (dict(x=float('nan')), 'extra.x=nan'),
    (dict(inner=dict(x=())), 'the default of extra.inner.x is tuple'),
    (Own(decay=2.0), 'extra.decay=2.0 is above'),
  ],
)  # fmt: skip
def test_what_cannot_be_declared(given, words):
  with support.refused(words):
    _own(given)


@pytest.mark.parametrize(
  'data, words',
  [
    (dict(deacy=1.0), "unknown config key extra.deacy. Did you mean 'decay'?"),
    (dict(decay=-1.0), 'extra.decay=-1.0 is below'),
    (dict(decay='x'), 'extra.decay must be float'),
    (dict(form='men'), "Did you mean 'mean'?"),
    (dict(inner=3), 'extra.inner is a section'),
    (dict(inner=dict(taps=0)), 'extra.inner.taps=0 is below'),
    (dict(inner=dict(tap=1)), "extra.inner.tap. Did you mean 'taps'?"),
  ],
)
def test_a_wrong_value(data, words):
  _own(Own())
  with support.refused(words):
    schema.view(dict(extra=data))


FILE = """
from paraxis.configs import schema

def get_config():
  config = schema.declare_extra(schema.default(), dict(decay=0.5, on=True))
  config.extra.decay = 0.25
  return config
"""


def test_flags_override_it(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text(FILE)
  parse = lambda *argv: command_line.parse([f'--config={file}', *argv])[1]
  assert schema.view(parse()).extra.decay == 0.25
  changed = schema.view(
    parse('--config.extra.decay=0.9', '--noconfig.extra.on')
  )
  assert changed.extra.decay == 0.9 and changed.extra.on is False
  for flag, words in (
    ('--config.extra.decya=0.9', "Did you mean 'extra.decay'?"),
    ('--config.extra.decay=much', 'config.extra.decay=much'),
    ('--config.extra=1', 'is a section'),
  ):
    with support.refused(words):
      parse(flag)


def test_another_config_knows_nothing_of_it(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text(FILE)
  command_line.load(str(file))
  assert command_line.load('quickstart').extra.to_dict() == {}


def test_a_config_is_what_it_is_alone(own_file):
  """Whatever other files a notebook has loaded before it, or after."""
  early = command_line.load('quickstart')
  alone = schema.view(early)
  mine = command_line.load(str(own_file()))
  seen = schema.view(mine)
  assert seen.extra.decay == 0.5 and seen.extra.ema.taps == 9
  late = command_line.load('quickstart')
  assert schema.view(early) == schema.view(late) == alone
  assert alone.extra == extra.NOTHING
  # As decode/load.py gives the config of a run.
  of_run = ml_collections.ConfigDict(schema.to_dict(seen)).lock()
  assert schema.view(mine) == schema.view(of_run) == seen
  of_run.extra.ema.taps = 0
  with support.refused('extra.ema.taps=0 is below'):
    schema.view(of_run)
  # The section of a mixer that another one's config has is its own.
  late.extra.ema.taps = 5
  assert schema.view(late).extra.ema.taps == 5
  late.model.pattern, late.extra.ema.taps = 'Q-F', 9
  assert schema.view(late).extra.ema.taps == 9


def test_a_run_of_before_may_have_the_section_of_an_idle_mixer(own_file):
  command_line.load(str(own_file()))
  plain = schema.view(command_line.load('quickstart'))
  data = schema.to_dict(plain)
  assert not data['extra']
  data['extra'] = dict(ema=dict(taps=9))
  assert schema.from_json(json.dumps(data)) == plain
  data['extra'] = dict(ema=dict(taps=8))
  assert schema.from_json(json.dumps(data)).extra.ema.taps == 8


def test_two_declarations_in_one_process():
  one, two = _own(dict(decay=0.5)), _own(dict(rate=0.25))
  assert extra.flat(schema.view(one).extra) == {'extra.decay': 0.5}
  assert extra.flat(schema.view(two).extra) == {'extra.rate': 0.25}


def test_a_later_declaration_keeps_what_there_is(own_file):
  """Of a base config, and of a mixer: declared, and with its values."""
  command_line.load(str(own_file()))
  config = schema.default()
  config.extra.ema.taps = 64
  config = schema.declare_extra(config, Own())
  config.extra.decay, config.extra.inner.taps = 0.9, 5
  _own(dict(rate=0.25))  # another one, in between
  for more in (dict(beta=1.0), dict(beta=2.0)):
    config = schema.declare_extra(config, more)
    assert config.extra.to_dict() == more | dict(
      ema=dict(taps=64), decay=0.9, form='sum', plain=True, inner=dict(taps=5)
    )
  names = {name for name, _ in schema.fields()}
  assert {'extra.decay', 'extra.inner.taps', 'extra.beta'} <= names
  assert 'rate' not in config.extra
  config = schema.declare_extra(schema.default(), Own())
  config = schema.declare_extra(config, dict(beta=1.0))
  with support.refused('extra.decay=2.0 is above'):  # its bounds, too
    schema.view(dict(extra=dict(decay=2.0)))
  config.extra.decay = 0.9
  assert schema.declare_extra(config, dict(decay=0.1)).extra.decay == 0.1


def test_a_run_with_other_values_is_another_run():
  old = schema.view(_own(dict(decay=0.5, gone=1)))
  new = schema.view(_own(dict(decay=0.25, late=2)))
  found = workdir.differences(old, new)
  assert found == [
    ('extra.decay', 0.5, 0.25), ('extra.gone', 1, None), ('extra.late', None, 2)
  ]  # fmt: skip
  with support.refused('extra.decay was 0.5, is now 0.25', '--init_from'):
    workdir.compare('RUN', old, new)


def test_equal_values_stay_equal_when_caches_are_emptied():
  before = schema.Config()
  knockouts.forget()
  assert before == schema.view(schema.default()) == schema.Config()
