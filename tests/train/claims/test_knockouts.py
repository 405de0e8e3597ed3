"""Knock-outs: what is well formed, what is switched off, how they end."""

import contextlib
import functools
import inspect
import json
import pathlib
import subprocess
import sys
import types

import claim_cases
import jax
import jax.numpy as jnp
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.configs.base import user_file
from paraxis.train import cli
from paraxis.train.claims import experiment
from paraxis.train.claims import harness
from paraxis.train.claims import knockouts
from paraxis.train.claims import papers
from paraxis.train.claims.decode import layer_groups
from paraxis.train.claims.layouts import check

# A check's __module__ is of claims (papers.parameters).
STUB = """
from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.train.claims import harness
from paraxis.train.claims import knockouts as lib
get_config = schema.default
MECHANISM = {'on': True}

def check(run, *, least):
  layers = run.config.model.num_layers
  if layers == 7:
    raise errors.MissingError('nothing to compile with')
  if layers == 8:
    raise errors.UserError('8 layers are too many')
  if layers == 9:
    raise RuntimeError('a crash')
  found = layers if MECHANISM['on'] else 0
  return harness.Outcome(f'>= {least}', str(found), 'of a stub', found >= least)

check.__module__ = 'paraxis.train.claims.stub'

def claims():
  return [('layers', 'EQ', dict(check=check, least=4), None)]

def off():
  return lib.patched(MECHANISM, 'on', False)

def knockouts():
  return ROWS
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
  """Writes a config whose knock-outs are the given text -> its path.

  Results lie in the same folder.
  """
  monkeypatch.chdir(tmp_path)

  def write(rows):
    path = tmp_path / 'mine.py'
    path.write_text(STUB.replace('ROWS', rows))
    return str(path)

  return write


ALL = (
  "[('field', 'layers', {'model.num_layers': 1}),"
  " ('bound', 'layers', {'least': 99}), ('context', 'layers', off)]"
)


def test_every_kind_of_change_makes_the_claim_fail(config, capsys):
  path = config(ALL[:-1] + ", ('both', 'layers', off, {'least': 1})]")
  assert knockouts.reproduce(path) == errors.EXIT_OK
  shown = capsys.readouterr().out
  for name in ('field', 'bound', 'context', 'both'):
    assert f'FAILS without {name}: as it must' in shown
  assert 'expected >= 99, measured 4' in shown
  assert 'expected >= 1, measured 0' in shown
  assert shown.endswith('4 of 4 claims fail without their mechanism\n')
  assert harness.reproduce(path) == errors.EXIT_OK  # all is on again


OWN = """

from paraxis.models import layer
from paraxis.train.claims import harness
from paraxis.train.claims import knockouts as lib

def check(run):
  found = layer.MIXERS['Q'].mixing_flops(run.config.model, 'Q', 1)
  return harness.Outcome('> 0', str(found), 'of a mixer', found > 0)

check.__module__ = 'paraxis.train.claims.stub'

def claims():
  return [('counts', 'EQ', dict(check=check), None)]

def off():
  return lib.patched(Ema, 'mixing_flops', staticmethod(lambda *args: 0))

def knockouts():
  return [('idle', 'counts', off)]
"""


def test_a_mixer_of_the_file_is_the_one_that_is_replaced(
  own_file, tmp_path, monkeypatch, capsys
):
  """The file is executed once: what it registers is what its rows know."""
  monkeypatch.chdir(tmp_path)
  path = own_file()
  path.write_text(path.read_text() + OWN)
  assert harness.reproduce(str(path)) == errors.EXIT_OK
  assert knockouts.reproduce(str(path)) == errors.EXIT_OK
  assert 'FAILS without idle: as it must' in capsys.readouterr().out


def test_a_claim_that_still_holds_is_told(config, capsys):
  path = config("[('none', 'layers', {'model.num_layers': 5})]")
  assert knockouts.reproduce(path) == errors.EXIT_DIFFERENT
  assert 'STILL HOLDS: the claim proves nothing' in capsys.readouterr().out


def test_claims_that_no_knockout_reaches_are_named(config, capsys):
  path = pathlib.Path(config(ALL))
  more = "('%s', 'SIM', dict(check=check, least=4), None)"
  text = path.read_text().replace('None)]', f'None), {more}]')
  path.write_text(text % 'second')
  assert knockouts.reproduce(str(path)) == errors.EXIT_OK
  words = 'claims without a knock-out (1): SIM second\n'
  assert capsys.readouterr().out.endswith(words)
  long = papers.Claim('a name ' * 9, 'EQ', print, {}, None)
  lines = knockouts.unproven([long] * 3).splitlines()
  assert len(lines) == 4 and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
  'layers, code, words',
  [
    (7, errors.EXIT_SKIPPED, 'SKIPPED (nothing to compile with)'),
    (8, errors.EXIT_USER, '8 layers are too many'),
    (9, errors.EXIT_USER, 'mine.py:16: RuntimeError: a crash'),
  ],
)
@pytest.mark.filterwarnings('ignore')
def test_an_error_is_no_failure(config, capsys, layers, code, words):
  path = config(f"[('more', 'layers', {{'model.num_layers': {layers}}})]")
  assert cli.main(['reproduce', path, '--knockout']) == code
  shown = capsys.readouterr()
  assert words in shown.out + shown.err and 'as it must' not in shown.out


@pytest.mark.filterwarnings('ignore')
def test_a_crash_of_a_shipped_config_is_no_failure(config, capsys, monkeypatch):
  monkeypatch.setattr(user_file, 'SHIPPED', pathlib.Path.cwd())
  path = config("[('more', 'layers', {'model.num_layers': 9})]")
  assert cli.main(['reproduce', path, '--knockout']) == errors.EXIT_CRASH
  shown = capsys.readouterr()
  assert 'a crash' in shown.err and 'as it must' not in shown.out


def test_one_is_chosen_by_name(config, capsys):
  path = config(ALL)
  assert cli.main(['reproduce', path, '--knockout=bound']) == errors.EXIT_OK
  assert '1 of 1 claims' in capsys.readouterr().out
  for wrong in ('bond', ''):
    code = cli.main(['reproduce', path, f'--knockout={wrong}'])
    assert code == errors.EXIT_USER
    assert 'there are field, bound, context' in capsys.readouterr().err


def test_json(config, capsys):
  path = config(ALL)
  command = ['reproduce', path, '--json']
  assert cli.main([*command, '--knockout']) == errors.EXIT_OK
  rows = json.loads(capsys.readouterr().out)['knockouts']
  assert [row['passed'] for row in rows] == [False] * 3
  assert rows[0]['result'] == 'FAILS without field: as it must'
  assert cli.main(command) == errors.EXIT_OK
  (row,) = json.loads(capsys.readouterr().out)['claims']
  assert row['passed'] and row['verdict'] == 'reproduced'


def test_a_change_that_changes_nothing_is_refused(config):
  path = config("[('same', 'layers', {'model.num_layers': 4})]")
  with pytest.raises(errors.UserError, match='has .* already'):
    knockouts.reproduce(path)


EQ = dict(check=experiment.equals_one_device, cases=[], within=1e-9)
CLAIM = [
  ('same', 'EQ', EQ, None),
  ('missed', 'EQ', EQ | {'admits': 'opposite'}, None),
]


@pytest.mark.parametrize(
  'rows, words',
  [
    ([('a', 'same')], 'is not a tuple'),
    ([('a', 'same', {'within': 0}, {'cases': 0})], 'is not a tuple'),
    ([('a', 'same', lambda: None, {})], 'neither a function nor plain data'),
    ([('A b', 'same', {'within': 0})], 'is no name'),
    ([('a', 'same', {'within': 0})] * 2, "'a' is there twice"),
    ([('a', 'sane', {'within': 0})], "Did you mean 'same'"),
    ([('a', 'same', {'withn': 0})], "Did you mean 'within'"),
    ([('a', 'same', {'model.layers': 0})], 'neither a config field nor'),
    ([('a', 'same', {'within': 1e-9})], 'changes nothing'),
    ([('a', 'same', {})], 'neither a function nor plain data'),
    ([('a', 'same', {'within': print})], 'neither a function nor plain data'),
    ([('a', 'same', lambda x: x)], 'takes arguments'),
    ([('a', 'missed', {'within': 0})], "'missed' is opposite as it is"),
    ([], 'is empty'),
  ],
)
def test_a_malformed_knockout(rows, words):
  module = types.SimpleNamespace(claims=lambda: CLAIM, knockouts=lambda: rows)
  with pytest.raises(errors.UserError, match='^[^\n]*$') as caught:
    papers.knockouts(module, 'mine.py')
  assert words in str(caught.value) and 'mine.py' in str(caught.value)


def test_which_claims_have_none():
  other = dict(check=check.parameters, expected=1)
  rows = [*CLAIM, ('alone', 'EQ', other, None)]
  off = [('a', 'same', {'within': 0})]
  module = types.SimpleNamespace(claims=lambda: rows, knockouts=lambda: off)
  (alone,) = knockouts.uncovered(module, 'mine.py')
  assert alone.name == 'alone'  # and not what is opposite as it is


def test_layouts_have_one_without_a_row():
  """A parameter wrong in the last case; not where the config names another."""
  meshes = 'data=2', 'tensor=2'
  one, two = (experiment.on_layouts(*meshes[:n]) for n in (1, 2))
  rows = [
    ('named', 'EQ', two, None), ('first', 'EQ', one, None),
    ('both', 'EQ', two, None),
    ('missed', 'EQ', two | {'admits': 'opposite'}, None),
  ]  # fmt: skip
  off = [('right_parameters', 'named', {'within': 0.5})]
  module = types.SimpleNamespace(claims=lambda: rows, knockouts=lambda: off)
  mine, first, both = knockouts.of(module, 'mine.py')
  assert mine.claim == 'named' and mine.change == {'within': 0.5}
  assert (first.name, first.claim) == ('right_parameters_2', 'first')
  assert (both.name, both.claim) == ('right_parameters_3', 'both')
  assert first.change == {} and both.change == {
    'cases': [dict(mesh='tensor=2')]
  }
  assert first.off is both.off is knockouts.one_parameter_wrong
  assert not knockouts.uncovered(module, 'mine.py')


def test_none_at_all():
  module = types.SimpleNamespace(claims=lambda: CLAIM)
  with pytest.raises(errors.UserError, match='defines no knockouts'):
    papers.knockouts(module, 'mine.py')


def test_patched_uses_nothing_kept_before_or_within(monkeypatch):
  module = types.ModuleType('paraxis.stub')
  module.double = lambda x: 2 * x
  module.run = jax.jit(lambda x: module.double(x))
  module.kept = functools.lru_cache(lambda x: float(module.run(jnp.float32(x))))
  monkeypatch.setitem(sys.modules, 'paraxis.stub', module)
  assert module.kept(3) == 6
  before = module.double
  with (
    contextlib.suppress(KeyError),
    knockouts.patched(module, 'double', lambda x: 3 * x),
  ):
    assert module.kept(3) == 9
    raise KeyError  # it is undone all the same
  assert module.kept(3) == 6 and module.double is before
  with (
    pytest.raises(errors.UserError, match="'triple', which is gone"),
    knockouts.patched(module, 'triple', None),
  ):
    pass


CONFIGS = command_line.papers()


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_every_claim_of_a_config_has_a_knockout(path):
  """But what it admits to be otherwise than the paper says."""
  module = command_line.load_module(str(path))
  assert not [c.name for c in knockouts.uncovered(module, path.name)]


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_what_a_knockout_changes_is_there(path):
  """Of those too that train or compile, which no test runs."""
  module = command_line.load_module(str(path))
  claims = {claim.name: claim for claim in papers.claims(module, path)}
  for knockout in knockouts.of(module, path.name):
    with knockout.off():
      pass
    check = claims[knockout.claim].check
    given = {name for name in knockout.change if '.' not in name}
    assert given <= set(inspect.signature(check).parameters), knockout.name
    fields = {k: x for k, x in knockout.change.items() if '.' in k}
    if fields:
      config = schema.view(module.get_config())
      assert experiment.fields(config, fields) != config, knockout.name


BOUNDS = {
  'above', 'at_least', 'at_most', 'below', 'bounds', 'by', 'power', 'within'
}  # fmt: skip
ROWS = 'better', 'compare', 'within'  # of [name or names, name, number]


def _rows(given):
  """[(what the names of a row stand for, a number)] of a check's parameters."""
  arms = given.get('families') or given.get('sets') or {}

  def meant(name):
    stem, _, way = name.rpartition(', ')
    return (arms[stem], way) if stem in arms else arms.get(name, name)

  each = lambda x: [meant(n) for n in ([x] if isinstance(x, str) else x)]
  rows = [r for n in ROWS if isinstance(given.get(n), list) for r in given[n]]
  return [
    ([*map(each, row[:2])], row[2])
    for row in rows
    if isinstance(row, list) and len(row) == 3 and isinstance(row[1], str)
  ]


def _hollow(claim, knockout):
  """Why a knock-out says nothing of the mechanism; '': it may say something.

  Args: papers.Claim and papers.Knockout.
  """
  given = {k: x for k, x in knockout.change.items() if '.' not in k}
  now = claim.parameters | given
  if any(len(a) == 1 and a == b for (a, b), _ in _rows(now)):
    return 'compares what is one and the same'
  if given != knockout.change or knockout.off is not contextlib.nullcontext:
    return ''
  names = lambda rows: [row[0] for row in rows]
  moved = names(_rows(now)) == names(_rows(claim.parameters))
  if all(k in BOUNDS or k in ROWS and _rows(now) and moved for k in given):
    return 'moves a bound alone'
  return ''


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_no_knockout_of_a_config_is_hollow(path):
  module = command_line.load_module(str(path))
  claims = {claim.name: claim for claim in papers.claims(module, path)}
  why = {k.name: _hollow(claims[k.claim], k) for k in knockouts.of(module, '')}
  assert not {name: words for name, words in why.items() if words}


def test_hollow_knockouts_are_found():
  claim = lambda **given: papers.Claim('a', 'LEARN', print, given, None)
  ask = lambda given, change, *off: _hollow(
    claim(**given), papers.Knockout('x', 'a', change, *off)
  )
  same, moved = 'compares what is one and the same', 'moves a bound alone'
  sets = {'mine': ['domains', 1], 'other': ['random', 1]}
  rows = dict(sets=sets, better=[['mine, ensemble', 'other, ensemble', 0.0]])
  assert ask(rows, {'sets': dict.fromkeys(sets, ['random', 1])}) == same
  assert not ask(rows, {'sets': sets | {'mine': ['domains', 0]}})
  assert not ask(rows, {'better': [['other, ensemble', 'dense', 0.0]]})
  assert ask(rows, {'better': [['dense', 'dense', 0.0]]}) == same
  assert ask(rows, {'better': [[*rows['better'][0][:2], 9.0]]}) == moved
  best = dict(families={'a': 1, 'b': 2}, compare=[[['a', 'b'], 'b', 0.0]])
  assert not ask(best, {'families': {'a': 3, 'b': 2}})
  assert ask(best, {'compare': [[['b'], 'b', 0.0]]}) == same
  for bound in ({'within': 1e-9}, {'within': 1e-9, 'at_most': 0.0}):
    assert ask({'within': 1.0, 'at_most': 1.0}, bound) == moved
    assert not ask({'within': 1.0}, bound | {'model.num_layers': 3})
    assert not ask({'within': 1.0}, bound, contextlib.suppress)


@pytest.mark.sampled(28)
@pytest.mark.parametrize('path, off, claim', claim_cases.switched_off('SIM'))
def test_a_simulated_claim_fails_without_its_mechanism(
  path, off, claim, tmp_path
):
  """EQ and HLO: test_switched_off.py; `make knockouts` runs all."""
  claim_cases.loses(path, off, claim, tmp_path)


def test_a_training_without_the_mechanism_depends_on_what_replaces_it(tmp_path):
  seen = []

  def check(run):
    seen.append((*run.mechanism, *run.replaced))
    return harness.Outcome('', '', '', False)

  run = harness.Run(command_line.schema.Config(), tmp_path / 'mine')
  run.mechanism = ('models/norm.py',)
  claim = papers.Claim('a', 'LEARN', check, {}, None)
  for off in (layer_groups.one_by_one, contextlib.nullcontext):
    knockouts.without(run, papers.Knockout('x', 'a', {}, off), claim)
  assert 'train/claims/decode/layer_groups.py' in seen[0]
  assert seen[1] == run.mechanism == ('models/norm.py',)


def test_a_training_without_the_mechanism_has_its_own_folder(tmp_path):
  folders = []

  def check(run):
    folders.append(run.results)
    return harness.Outcome('', '', '', False)

  run = harness.Run(None, tmp_path / 'mine')
  run.config = command_line.schema.Config()
  claim = papers.Claim('a', 'LEARN', check, {}, None)
  off = papers.Knockout('gate', 'a', {})
  assert not knockouts.without(run, off, claim).passed
  assert folders == [tmp_path / 'mine-gate']


@pytest.mark.parametrize(
  'code, made, words',
  [
    (errors.EXIT_OK, 0, ''),
    (errors.EXIT_SKIPPED, 0, 'skipped: two'),
    (errors.EXIT_DIFFERENT, 2, 'not as they must: two'),
    # A malformed knock-out is bad input: it has shown nothing.
    (errors.EXIT_USER, 2, 'not as they must: two'),
  ],
)
def test_make_knockouts_fails_but_for_what_was_skipped(
  tmp_path, code, made, words
):
  for name, text in (
    ('python', 'echo one two'),
    ('paraxis', f'test "$2" != two || exit {code}'),
  ):
    path = tmp_path / 'bin' / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\n{text}\n')
    path.chmod(0o755)
  stamp = f'{tmp_path}/.installed'
  done = subprocess.run(
    ['make', 'knockouts', f'VENV={tmp_path}', f'--assume-old={stamp}'],
    cwd=pathlib.Path(__file__).parents[3], capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == made and words in done.stdout + done.stderr
