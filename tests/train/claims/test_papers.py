"""The index of papers and what a well-formed claim is."""

import types

import pytest

from paraxis.configs.base import errors
from paraxis.train.claims import experiment
from paraxis.train.claims import harness
from paraxis.train.claims import held_out
from paraxis.train.claims import papers

GOOD = '''
"""Ring attention

paper: arXiv:2310.01889
mechanism: sharding/sequence/attention.py
test: tests/a.py, tests/b.py
run: paraxis reproduce ring
expect: equal to one device; bytes as counted: 3 hops
  and it goes on here
differs: nothing
"""
raise RuntimeError('a header is read, not run')
'''.lstrip()


def _config(tmp_path, text=GOOD, name='ring'):
  path = tmp_path / f'{name}.py'
  path.write_text(text)
  return path


def test_a_header_is_read_without_running_the_file(tmp_path):
  paper = papers.header(_config(tmp_path))
  assert (paper.name, paper.title) == ('ring', 'Ring attention')
  assert paper.fields['expect'] == (
    'equal to one device; bytes as counted: 3 hops and it goes on here'
  )
  assert papers.files(paper) == [
    'sharding/sequence/attention.py',
    'tests/a.py',
    'tests/b.py',
  ]


@pytest.mark.parametrize(
  'old, new, words',
  [
    ('differs: nothing\n', '', 'lacks differs'),
    ('differs: nothing', 'differs:', 'lacks differs'),
    ('differs: nothing', 'differ: nothing', "Did you mean 'differs'"),
    ('differs: nothing', 'paper: again', "'paper' is there twice"),
    ('"""Ring attention', '"""', 'lacks paper'),
    ('"""', '#', 'lacks paper'),
    ('run: ', 'cost: two minutes\nrun: ', '390 CPU-seconds'),
    ('run: ', 'cost: 20 seconds\nrun: ', 'ring: cost: 20 seconds'),
    ('run: ', 'cost: -1 CPU-seconds\nrun: ', 'a number of CPU-seconds'),
    ('raise', 'rase this', 'invalid syntax'),
  ],
)
def test_a_wrong_header(tmp_path, old, new, words):
  text = GOOD.replace(old, new)
  if old == '"""':
    text = '\n'.join(f'# {line}' for line in GOOD.splitlines())
  path = _config(tmp_path, text)
  with pytest.raises(errors.UserError, match='^[^\n]*$') as caught:
    papers.header(path)
  assert words in str(caught.value) and path.stem in str(caught.value)


def test_a_cost_is_in_cpu_seconds(tmp_path):
  read = lambda text: papers.cost(
    papers.header(_config(tmp_path, GOOD.replace('run: ', text + 'run: ')))
  )
  assert read('cost: 390 CPU-seconds\n') == 390
  assert read('cost: 1,900 CPU-seconds\n') == 1900
  with pytest.raises(errors.UserError, match='ring: cost: is missing'):
    read('')  # a config of one's own may lack it, until it is asked for


def test_the_mechanism_of_a_header(tmp_path):
  path = _config(tmp_path, GOOD.replace('.py\ntest', '.py,\n  models\ntest'))
  assert papers.mechanism(path) == ('sharding/sequence/attention.py', 'models')
  assert papers.mechanism(_config(tmp_path, 'x = 1')) == ()


def test_the_index_is_searched_in_every_field(tmp_path):
  paths = [
    _config(tmp_path),
    _config(tmp_path, GOOD.replace('Ring', 'Tree'), 'tree'),
  ]
  names = lambda word: [p.name for p in papers.index(word, paths)]
  assert names('') == ['ring', 'tree'] and names('RING ATT') == ['ring']
  assert names('2310.01889') == ['ring', 'tree'] and names('zebra') == []
  # A word begins so: 'ring' is not within 'during'.
  text = GOOD.replace('Ring', 'Tree').replace('ring', 'tree')
  text = text.replace('differs: nothing', 'differs: sums during a step')
  paths.append(_config(tmp_path, text, 'later'))
  assert names('ring') == ['ring', 'tree'] and names('during') == ['later']
  assert names('sum') == ['later'] and names('uring') == []
  found = papers.index('', paths[:2])
  short, long = papers.table(found, False), papers.table(found, True)
  assert 'ring  Ring attention [arXiv:2310.01889]' in short
  assert 'goes on here' not in short and 'goes on here' in long
  assert max(map(len, long.splitlines())) <= 80


def test_the_shipped_index(capsys):
  papers.run('')
  assert 'quickstart' in capsys.readouterr().out
  with pytest.raises(errors.UserError, match="Did you mean 'quickstart'"):
    papers.run('quikstart')


def _claims(*rows):
  module = types.SimpleNamespace(claims=lambda: list(rows))
  return papers.claims(module, 'mine.py')


CASES = [dict(mesh='data=2')]
EQ = dict(check=experiment.equals_one_device, cases=CASES, within=1e-9)


def test_a_claim_is_taken_apart():
  (claim,) = _claims(('same', 'EQ', EQ, 1.5))
  assert claim.check is experiment.equals_one_device and claim.paper == 1.5
  assert claim.parameters == dict(cases=CASES, within=1e-9)
  assert 'check' in EQ  # the config's own dict is left alone


@pytest.mark.parametrize(
  'name, given',
  [
    ('claims.equals_one_device', dict(mesh='data=2')),
    ('claims_experts.equals_one_device', dict(cases=CASES)),
    ('claims_pipeline_step.equals_one_device', dict(cases=CASES)),
  ],
)
def test_names_of_before_are_found(name, given):
  """For one release; three checks of equality have become one."""
  old = dict(check=name, within=1e-9, **given)
  kept = dict(old)
  (claim,) = _claims(('same', 'EQ', old, None))
  assert claim.check is experiment.equals_one_device and old == kept
  assert claim.parameters == dict(cases=CASES, within=1e-9)
  bound = dict(check='claims.held_out_at_most', bits_per_byte=2.0)
  (claim,) = _claims(('held out', 'LEARN', bound, None))
  assert claim.check is held_out.at_most


@pytest.mark.parametrize(
  'row, words',
  [
    (('same', 'EQ', EQ), 'is not a tuple'),
    (['same', 'EQ', EQ, None], 'is not a tuple'),
    (('same', 'LERN', EQ, None), "Did you mean 'LEARN'"),
    (('same', 'EQ', 2.4, None), 'expected must be a dict'),
    (('same', 'EQ', {'within': 1e-9}, None), 'expected must be a dict'),
    (('same', 'EQ', EQ | {'check': 'claims.equal'}, None), 'no check'),
    (('same', 'EQ', EQ | {'check': 'os.remove'}, None), 'no check'),
    (('same', 'EQ', EQ | {'axis': 1}, None), "takes ['cases', 'within']"),
    (('same', 'EQ', {'check': EQ['check']}, None), "takes ['cases', 'within']"),
    (('same', 'EQ', EQ | {'within': print}, None), 'more than names and plain'),
    (('same', 'EQ', EQ, {1, 2}), 'more than names and plain'),
    (('same', 'EQ', EQ | {'admits': 'reproduced'}, None), "admits 'reprod"),
    (('same', 'EQ', EQ | {'published': {'by': 1}}, 2), 'asks for 2, the pap'),
    (('same', 'EQ', EQ | {'published': {'within': 1}}, None), 'asks for None'),
  ],
)
def test_a_malformed_claim(row, words):
  with pytest.raises(errors.UserError) as caught:
    _claims(('same', 'EQ', EQ, None), row)
  assert words in str(caught.value) and 'mine.py: claim 1' in str(caught.value)


def test_no_claims():
  with pytest.raises(errors.UserError, match='is empty'):
    _claims()
  with pytest.raises(errors.UserError, match='defines no claims'):
    papers.claims(types.SimpleNamespace(), 'mine.py')


def test_a_helper_with_other_arguments_is_no_check(monkeypatch):
  def good(run, *, bound): ...
  def _private(run): ...
  def helper(x): ...
  def two(run, x): ...

  checks = good, _private, helper, two
  assert all(papers.parameters(check) is None for check in checks)  # of a test
  for check in checks:
    monkeypatch.setattr(check, '__module__', harness.__name__)
  found = list(map(papers.parameters, checks))
  assert found == [['bound'], None, None, None]
  assert papers.parameters(harness.Run) is papers.parameters('good') is None
