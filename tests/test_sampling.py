"""The sample of `make test` rotates through every test; tables are honest."""

import ast
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import textwrap

import pytest
import sampling

# CPU-seconds of a turn by the ledger, which was measured with programs cached:
# compiled afresh, and with cheaper tests, 6 minutes on two cores.
DEAREST_TURN = 400.0
DEAR_CASES = 60  # of one file; more are a covering array, or another file


def test_n_turns_in_a_row_run_every_case_once():
  ids = [f'tests/test_x.py::test_y[{i}]' for i in range(500)]
  for n in (1, 4, 6, 8):
    ran = [
      i for turn in range(77, 77 + n) for i in ids if sampling.kept(i, turn, n)
    ]
    assert sorted(ran) == sorted(ids)


def test_what_a_function_is_sampled_by():
  dear, guard = 'tests/a/test_b.py::test_c', 'tests/test_b.py::test_c'
  most = sampling.BRACKETS[0][1]
  assert sampling.sampled(dear, 0.0) == sampling.sampled(dear, 99.0, 1) == 1
  assert sampling.sampled(dear, 99.0) == sampling.sampled(dear, 99.0, 2) == most
  assert sampling.sampled(dear, 0.0, 9) == 9
  assert sampling.sampled(guard, sampling.GUARD - 1) == 1
  assert sampling.sampled(guard, sampling.GUARD) == most
  for mark, n in ((None, sampling.SELDOM), (2, 2), (16, 16)):
    assert sampling.sampled(dear, 99.0, mark, peers=True) == n


def test_blocks_in_a_row_run_every_case_of_an_array():
  space = [('a', range(4)), ('b', range(3)), ('c', range(5)), ('d', 'xy')]
  names, values = zip(*space, strict=True)
  every = itertools.product(*values)
  rows = [dict(zip(names, row, strict=True)) for row in every]
  pairs = [sampling.pairs_of(row) for row in rows]
  order = sampling.greedy(pairs)
  assert sorted(order) == list(range(120))
  for start in (0, 1, 12345678):
    turns = [sampling.block(order, 5, 7, t) for t in range(start, start + 7)]
    assert all(turn[:5] == order[:5] for turn in turns)
    assert {i for turn in turns for i in turn} == set(order)
    rest = [i for turn in turns for i in turn[5:]]
    assert len(rest) == len(set(rest)) == 115
  greedy, plain = order[:5], range(5)
  covered = lambda some: len(set().union(*(pairs[i] for i in some)))
  assert covered(greedy) > covered(plain)


def arrays(tree, kind='array'):
  """{function's node id: arguments of its mark of that kind} of all tests."""
  found = {}
  for name, module in tree.code.items():
    for node in module.body if name.startswith('tests/') else ():
      for mark in getattr(node, 'decorator_list', ()):
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith(
          f'mark.{kind}'
        ):
          found[f'{name}::{node.name}'] = [a.value for a in mark.args]
  return found


ITEMS = [f'tests/a/test_b.py::test_dear[{i}]' for i in range(24)]
CHEAP = ['tests/a/test_b.py::test_cheap', 'tests/a/test_c.py::test_cheap']


class Item:
  """What of a pytest item is looked at. nodeid: its name."""

  def __init__(self, nodeid):
    self.nodeid = nodeid

  def get_closest_marker(self, name):
    return None


def _items(ids=(*ITEMS, *CHEAP)):
  return [Item(i) for i in ids]


def _sample(monkeypatch, turn=3, hashes=None, cost=2.0):
  """A Sample whose ledger knows the tests of ITEMS, and their files."""
  files = {'tests/a/test_b.py': 'same', 'tests/a/test_c.py': 'same'}
  ledger = dict(costs={ITEMS[0].split('[')[0]: [cost, 24]}, files=files)
  monkeypatch.setattr(sampling, 'table', lambda path: ledger)
  monkeypatch.setattr(
    sampling, 'digest', lambda path: (hashes or {}).get(path.name, 'same')
  )
  sample = sampling.Sample.__new__(sampling.Sample)
  sample.turn, sample.changed, sample.notes = turn, None, []
  return sample


def test_cheap_tests_always_run_and_dear_ones_in_turn(monkeypatch):
  ran = []
  for turn in range(sampling.one_in(2.0)):
    keep, cut = _sample(monkeypatch, turn).select(_items())
    ids = [item.nodeid for item in keep]
    assert set(CHEAP) <= set(ids) and len(keep) + len(cut) == 26
    ran += [i for i in ids if i in ITEMS]
  assert sorted(ran) == sorted(ITEMS)


def test_a_changed_file_is_kept_whole_within_a_minute(monkeypatch):
  changed = {'test_b.py': 'other'}
  keep, cut = _sample(monkeypatch, hashes=changed).select(_items())
  assert len(keep) == 26 and not cut
  dear = _sample(monkeypatch, hashes=changed, cost=30.0)
  keep, cut = dear.select(_items())
  assert cut and 'tests/a/test_b.py changed and is sampled' in dear.notes[0]
  keep, cut = _sample(monkeypatch).select(_items())  # nothing changed
  assert cut


def test_the_turn_of_a_repository(tmp_path):
  assert sampling.turn_of(tmp_path) == 0
  git = lambda *a: subprocess.run(
    ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', *a],
    cwd=tmp_path, check=True, capture_output=True,
  )  # fmt: skip
  git('init', '-q')
  for i in range(3):
    (tmp_path / 'a').write_text(str(i))
    git('add', 'a')
    git('commit', '-qm', 'x')
  assert sampling.turn_of(tmp_path) == 3
  git('clone', '-q', '--depth=1', f'file://{tmp_path}', str(tmp_path / 'b'))
  assert sampling.turn_of(tmp_path / 'b') > 3


PLAIN = """
  import pytest

  @pytest.mark.parametrize('i', range(12))
  @pytest.mark.sampled(2)
  def test_dear(i): pass

  def test_cheap(): pass
"""


def _pytest(folder, *arguments):
  """Runs pytest with the plugin on the tests of a folder, by two workers."""
  text = 'import sampling\nsampling.WHOLE = -1\npytest_plugins = ["sampling"]\n'
  (folder / 'conftest.py').write_text(text)
  return subprocess.run(
    [
      sys.executable, '-m', 'pytest', '-q', '-n2', '-c', '/dev/null',
      f'--rootdir={folder}', '-p', 'no:cacheprovider', *arguments,
    ],
    cwd=folder, env=_environment(folder), capture_output=True, text=True,
  )  # fmt: skip


def _environment(folder, **more):
  path = f'{sampling.HERE}{os.pathsep}{folder}'
  return {**os.environ, 'PYTHONPATH': path, **more}


def test_sessions_say_what_they_keep_and_can_be_repeated(tmp_path):
  (tmp_path / 'test_a.py').write_text(textwrap.dedent(PLAIN))
  seen = 0
  for turn in range(2):
    out = _pytest(tmp_path, f'--turn={turn}').stdout
    line = next(x for x in out.splitlines() if f'--turn={turn};' in x)
    ran, cut = (int(word) for word in line.split() if word.isdigit())
    assert ran + cut == 13 and f'{ran} passed' in out
    seen += ran - 1
  assert seen == 12
  assert '13 passed' in _pytest(tmp_path, '--all').stdout


def test_what_runs_is_recorded_in_children_too(tmp_path):
  """Of two modules imported, the one that runs; no program changes."""
  program = (
    'import subprocess, sys\n'
    'from paraxis.configs.base import errors, field\n'
    'from paraxis.train.data import batch_ramp\n'
    'child = "from paraxis.train.data import packing as p;"\n'
    'child += "\\ntry: p.first_fit(*[None] * 4)\\nexcept Exception: pass"\n'
    'subprocess.run([sys.executable, "-c", child], check=True)\n'
    'try: batch_ramp.of(None)\n'
    'except AttributeError as e: line = e.__traceback__.tb_next.tb_lineno\n'
    'import inspect\n'
    'text, first = inspect.getsourcelines(batch_ramp.of)\n'
    'assert first < line < first + len(text)\n'
  )
  notes = tmp_path / 'notes'
  notes.mkdir()
  environment = _environment(
    sampling.HERE / 'executed', PARAXIS_EXECUTED=str(notes)
  )
  done = subprocess.run(
    [sys.executable, '-c', program],
    env=environment, capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  ran = {x for path in notes.iterdir() for x in path.read_text().split()}
  assert {
    'paraxis.train.data.batch_ramp', 'paraxis.train.data.packing'
  } <= ran  # fmt: skip
  assert 'paraxis.configs.base.field' not in ran
  assert len(list(notes.iterdir())) == 2


def test_a_change_reaches_the_tests_that_execute_it(tree, monkeypatch):
  made = dict(
    modules=['paraxis.models.norm', 'paraxis.models.depth'],
    files={
      'tests/models/test_norm.py': [0],
      'tests/models/test_depth.py': [1],
      'tests/models/test_decoder.py': [0, 1],
    },
  )
  monkeypatch.setattr(sampling, 'table', lambda path: made)
  known = set(made['files'])

  def reached(*changed):
    answers = ['\n'.join(changed), '']
    monkeypatch.setattr(sampling, '_git', lambda *a: answers.pop(0))
    return set(sampling.reached(tree.root, 'HEAD'))

  assert reached('models/norm.py') & known == {
    'tests/models/test_norm.py', 'tests/models/test_decoder.py'
  }  # fmt: skip
  assert reached('README.md') & known == set()
  assert reached('tests/models/test_depth.py') & known == {
    'tests/models/test_depth.py'
  }
  assert reached('setup.cfg') >= known
  assert 'tests/test_layers.py' in reached('README.md')
  assert 'tests/test_covering.py' in reached('tests/covering.py')


@pytest.fixture
def ledger():
  made = sampling.table(sampling.LEDGER)
  if not made:
    pytest.skip('no ledger yet: make test-all writes it')
  return made


def test_a_turn_fits(ledger, tree):
  """By the costs that `make test-all` measured: no timing here."""
  marked, sampled = arrays(tree), arrays(tree, 'sampled')
  total = 0.0
  for name, (cost, cases) in ledger['costs'].items():
    n = sampling.sampled(name, cost, *sampled.get(name, ()))
    prefix, blocks = marked.get(name, (0, n))
    prefix = min(prefix, cases)
    total += cost * (prefix + (cases - prefix) / blocks)
  assert total <= DEAREST_TURN, f'a turn costs {total:.0f} CPU-seconds'


def test_no_file_gathers_dear_cases(ledger, tree):
  marked, dear = arrays(tree) | arrays(tree, 'sampled'), {}
  for name, (cost, cases) in ledger['costs'].items():
    if sampling.one_in(cost) > 1 and name not in marked:
      file = name.split('::')[0]
      dear[file] = dear.get(file, 0) + cases
  assert not {f: n for f, n in dear.items() if n > DEAR_CASES}


def test_arrays_cover_every_pair_in_as_many_turns_as_blocks(tree):
  """The real arrays, by enumeration; one turn covers more than half."""
  marked = arrays(tree)
  assert marked
  for name, (prefix, blocks) in marked.items():
    file = importlib.util.spec_from_file_location('array', name.split('::')[0])
    module = importlib.util.module_from_spec(file)
    file.loader.exec_module(module)
    cases = module.cases()
    pairs = [sampling.pairs_of(case) for case in cases]
    order = sampling.greedy(pairs)
    every = set().union(*pairs)
    turns = [sampling.block(order, prefix, blocks, t) for t in range(blocks)]
    assert {i for t in turns for i in t} == set(range(len(cases)))
    share = [len(set().union(*(pairs[i] for i in t))) for t in turns]
    assert min(share) > len(every) / 2, name


def test_tables_are_readable_json(tmp_path, monkeypatch):
  monkeypatch.setattr(sampling, 'LEDGER', tmp_path / 'ledger.json')
  monkeypatch.setattr(sampling, 'EXECUTED', tmp_path / 'executed.json')
  (tmp_path / 'test_a.py').write_text('')
  costs = {'test_a.py::test_b[0]': 1.0, 'test_a.py::test_b[1]': 2.04}
  costs['test_a.py::test_c'] = 0.01
  ran = {'test_a.py': {'paraxis.b', 'paraxis.a'}}
  sampling.write(costs, ran, root=tmp_path)
  ledger = json.loads(sampling.LEDGER.read_text())
  assert ledger['costs'] == {'test_a.py::test_b': [1.5, 2]}
  assert len(ledger['files']['test_a.py']) == 16
  sampling.write(costs, ran, {'test_a.py'}, tmp_path)
  assert not json.loads(sampling.LEDGER.read_text())['files']
  executed = json.loads(sampling.EXECUTED.read_text())
  assert executed['modules'] == ['paraxis.a', 'paraxis.b']
  assert executed['files'] == {'test_a.py': [0, 1]}
