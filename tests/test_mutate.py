"""The runner of `make mutants`, on a small repository; its table, on this one.

What it finds in this repository takes half an hour: `make mutants`.
"""

import ast
import json
import os
import subprocess
import tempfile
import threading
import time

from mutants.mutation import Mutation
import mutate
import pytest

TOY = {
  'toy/__init__.py': '"""A package."""\n',
  'toy/add.py': 'def add(a, b):\n  return a + b\n',
  'test_add.py': """
from paraxis.toy import add
def test_sum(): assert add.add(2, 3) == 5
def test_nothing(): assert add.add
def test_wrong(): assert not add.add
def test_loop():
  import time
  if add.add(1, 1) != 2: time.sleep(60)
""",
  'pytest.ini': '[pytest]\n',
  '.gitignore': '.cache\n__pycache__\n',
}
SIGN = Mutation(
  'sign', 'toy/add.py', 'a + b', 'a - b', 'sums', 'test_add.py::test_sum'
)


@pytest.fixture
def toy(tmp_path, monkeypatch):
  """A repository with one package, `paraxis.toy`."""
  monkeypatch.setattr(mutate, 'IMPORTED', ('pytest',))
  monkeypatch.setenv('PYTEST_DISABLE_PLUGIN_AUTOLOAD', '1')
  root = tmp_path / 'repository'
  (root / '.pkg' / 'paraxis').mkdir(parents=True)
  (root / '.pkg' / 'paraxis' / 'toy').symlink_to('../../toy')
  for name, text in TOY.items():
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text)
  commit(root, '-q', '--initial-branch=main')
  return root


def commit(root, *init):
  env = {k: v for k, v in os.environ.items() if not k.startswith('GIT_')}
  who = ('-c', 'user.name=a', '-c', 'user.email=a@example.org')
  steps = (('init', *init),) if init else ()
  for step in (*steps, ('add', '-A'), (*who, 'commit', '-qm', 'a')):
    subprocess.run(['git', *step], cwd=root, env=env, check=True)


def run(root, *table, **options):
  """(exit code, what was said) of a run."""
  said = []
  return mutate.run(list(table), root, say=said.append, **options), said


def test_what_is_seen_is_not_tried_again(toy):
  before = {p: p.read_bytes() for p in toy.rglob('*.*') if p.is_file()}
  code, said = run(toy, SIGN)
  assert code == 0 and said[-1] == '1 of 1 seen', said
  assert any(line.startswith('sign: seen in') for line in said)
  # The table: what it breaks, and what saw it.
  (row,) = [line for line in said if 'sums; test_add.py::test_sum' in line]
  assert row.startswith('sign ')
  assert before == {p: p.read_bytes() for p in before}
  code, said = run(toy, SIGN)
  assert code == 0 and said[0] == 'mutations: 1, to try: 0, by 0 commands'
  # Another tree, or another mutation of the name, is tried.
  again = SIGN._replace(after='a * b')
  assert run(toy, again)[1][0].startswith('mutations: 1, to try: 1')
  (toy / 'toy' / 'add.py').write_text(TOY['toy/add.py'] + '\n')
  assert run(toy, SIGN)[1][0].startswith('What is not committed is not tried')
  commit(toy)
  assert run(toy, SIGN)[1][0] == 'mutations: 1, to try: 1, by 1 commands'


def test_what_survives_fails(toy):
  """In turn on one file; the next sees the file whole."""
  table = [
    SIGN._replace(name='kept', command='test_add.py::test_nothing'),
    SIGN,
    SIGN._replace(name='odd', after='__import__("os")._exit(3)'),
    SIGN._replace(name='red', command='test_add.py::test_wrong'),
    SIGN._replace(name='none', command='test_add.py::test_gone'),
  ]
  code, said = run(toy, *table, jobs=2)
  text = '\n'.join(said)
  assert code == 1 and said[-2:] == [
    '1 of 5 seen', 'not seen: kept, odd, red, none'
  ], text  # fmt: skip
  assert 'kept: SURVIVED' in text
  assert 'red: NO CHECK in 0 s: without the mutation it ends with 1' in text
  assert 'none: NO CHECK in 0 s: without the mutation it ends with 4' in text
  # A command that told nothing is run again, for all others the result holds.
  found = json.loads((toy / '.cache' / 'mutants.json').read_text())
  assert {v for v, *_ in found.values()} == {'ENDS WITH 3', 'SURVIVED', 'seen'}


@pytest.mark.parametrize(
  'changes, text',
  [
    (dict(before='a - b'), "stale: no line has 'a - b' in toy/add.py"),
    (dict(before='a'), "3 places have 'a' in toy/add.py"),
    (dict(after='a + b'), 'nothing changes in toy/add.py'),
    (dict(file='toy/gone.py'), 'stale: there is no toy/gone.py'),
  ],
)
def test_a_mutation_that_does_not_fit_fails(toy, changes, text):
  code, said = run(toy, SIGN._replace(**changes))
  assert code == 1 and f'STALE in 0 s: {text}' in '\n'.join(said)


def test_a_command_that_hangs_has_seen_nothing(toy, monkeypatch):
  monkeypatch.setattr(mutate, 'SECONDS', 2)
  code, said = run(toy, SIGN._replace(command='test_add.py::test_loop'))
  assert code == 1 and any(line.startswith('sign: HANGS') for line in said)


def test_a_run_that_is_stopped_keeps_what_it_has(toy, tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  loop = SIGN._replace(name='loop', command='test_add.py::test_loop')
  join = threading.Thread.join

  def interrupted(thread):
    monkeypatch.setattr(threading.Thread, 'join', join)
    while not (toy / '.cache' / 'mutants.json').exists():  # of the first
      time.sleep(0.1)
    raise KeyboardInterrupt

  monkeypatch.setattr(threading.Thread, 'join', interrupted)
  with pytest.raises(KeyboardInterrupt):
    run(toy, SIGN, loop)
  assert not list(tmp_path.glob('paraxis-mutants-*'))
  assert run(toy, SIGN)[1][0].endswith('to try: 0, by 0 commands')


def test_a_clone_that_is_stopped_between_two_commands(toy, tmp_path):
  clone = mutate.Clone(toy, tmp_path / 'clone')
  assert clone.run(SIGN.command).code == 0
  clone.stop()
  clone._server.wait()
  assert clone.run(SIGN.command).code is None


def test_packages_of_the_original_are_refused(toy):
  (toy / '.pkg' / 'paraxis' / 'toy').unlink()
  commit(toy)
  with pytest.raises(mutate.UsageError, match='does not import its own'):
    run(toy, SIGN)


def test_bad_input(capsys, tmp_path):
  name = mutate.TABLE[0].name
  for words, text in (
    ([f'--only={name}x'], f'did you mean {name}?'),
    (['--only=//'], '--list shows the names'),
    (['--jobs=0'], '--jobs=0: at least 1'),
  ):
    assert mutate.main(words) == 2
    assert text in capsys.readouterr().err
  with pytest.raises(mutate.UsageError, match='two mutations are named sign'):
    run(tmp_path, SIGN, SIGN)
  with pytest.raises(mutate.UsageError, match='not a git repository'):
    run(tmp_path, SIGN)
  assert mutate.main(['--list', f'--only={name}']) == 0
  assert capsys.readouterr().out.startswith(f'{name}: ')


def test_the_table_fits_this_tree():
  """None is stale, and what it leaves is Python; commands name what is here."""
  assert len({m.name for m in mutate.TABLE}) == len(mutate.TABLE) >= 40
  read = lambda name: (mutate.ROOT / name).read_text(encoding='utf-8')
  for m in mutate.TABLE:
    ast.parse(mutate.mutated(m, read(m.file)))
    if not m.command.startswith('paraxis verify '):
      file, _, case = m.command.partition('::')
      assert f'def {case.partition("[")[0]}(' in read(file), m.name


# Mistakes that nothing saw when they were tried first, and the usual ones.
NAMED = """
  bias_sign muon_experts layernorm_bf16 dw_bf16 post_norm embedding_scale
  scan_permute hot_twice kv_replicated eval_denominator ring_direction
  lse_correction window_hop tied_stage_part global_norm cache_position
  document_reset microbatch_index drop_order rsa_is_the_ring one_host
  skipped_certified drops_certified clip_norm initial_seed adafactor_floor
  mars_limit adam_epsilon kron_late
"""


def test_the_table_has_what_was_once_not_seen():
  assert set(NAMED.split()) <= {m.name for m in mutate.TABLE}
