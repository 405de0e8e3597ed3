"""Every row of the matrix of faults has a test that provokes it, and every
invariant, which none of them may break, one that shows it.

`pytest -m fault` and `pytest -m invariant` run them; a row without one fails
here. `python tests/test_faults.py` prints both tables with the tests of each,
from their marks.
"""

import ast
import json
import pathlib
import re

ROWS = {
  1: 'a process is killed',
  2: 'process 0 is killed',
  3: 'a kill in an asynchronous save',
  4: 'a kill of one of several processes in a save',
  5: 'a kill in a restore',
  6: 'an exception in one process',
  7: 'a host that is frozen or stuck',
  8: 'a host that is slow',
  9: 'a process that is missing at the start',
  10: 'a process that is late at a barrier',
  11: 'processes of other configuration, code, text or numbers',
  12: 'SIGTERM to one of several processes',
  13: 'SIGTERM to a process alone',
  14: 'a second signal',
  15: 'a disk that is full at a save',
  16: 'a disk that is too small for what is kept',
  17: 'a folder that cannot be written, a path that is no file',
  18: 'a flipped bit in arrays',
  19: 'files that are cut short, missing or zero',
  20: 'damaged metadata',
  21: 'folders that are no steps',
  22: 'no checkpoint that is whole',
  23: 'leaves of another architecture',
  24: 'leaves of another type',
  25: 'another layout or count of processes',
  26: 'another stacking of layers',
  27: 'numbers that are not finite',
  28: 'a loss that spikes',
  29: 'replicas that differ',
  30: 'an unknown key of a configuration',
  31: 'a mesh that does not fit the devices',
  32: 'sizes that do not divide',
  33: 'a step that needs more memory than there is',
  34: 'memory that runs out',
  35: 'text that is missing or too short',
  36: 'tokens that are damaged under a run',
  37: 'text that changed since the checkpoint',
  38: 'a token beyond the vocabulary',
  39: 'a prompt beyond the cache',
  40: 'a draft for another tokenizer or vocabulary',
  41: 'other versions, a newer format',
  42: 'a checkpoint of an older format',
  43: 'two runs in one folder',
  44: 'a step that is saved twice',
  45: 'a hostile checkpoint',
  46: 'Ctrl-C in a notebook',
  47: 'a damaged cache of compiled programs',
}
INVARIANTS = {
  1: 'after any kills losses and state are bitwise those without',
  2: 'any layout is restored on any other bit for bit',
  3: 'saved, restored and saved again: the same fingerprints',
  4: 'a fingerprint is the same on every layout and count of processes',
  5: 'every batch is taken once in the history that is kept, or left out in it',
  6: 'a verified checkpoint exists at every moment',
  7: 'nothing begins at step 0 beside checkpoints unless it is asked for',
  8: 'lost work is what was not committed, and is counted so',
  9: 'an abnormal end has one cause, an exit code, and leaves no process',
  10: 'a save that fails changes nothing and is reported at the next step',
  11: 'other configuration, code, versions or text are refused or reported',
  12: 'on another layout losses stay within a stated bound',
  13: 'no number that is not finite is ever committed',
  14: 'a checkpoint that is read runs no code and takes no memory beyond a cap',
  15: 'the account of a run adds up to its time',
  16: 'a save does not wait for the disk, and outlives donation',
}
# Seconds of all tests of faults, on two cores, by the ledger.
MOST = 8 * 60
_TESTS = pathlib.Path(__file__).parent


def marked(sources, mark='fault'):
  """{row: [file::test]} of {file: source}, by a mark with rows."""
  wanted = re.compile(rf'pytest\.mark\.{mark}\(([0-9, ]+)\)')
  found = {}
  for file, source in sources.items():
    for node in ast.walk(ast.parse(source)):
      if not isinstance(node, ast.FunctionDef):
        continue
      for decorator in node.decorator_list:
        if match := wanted.fullmatch(ast.unparse(decorator)):
          for row in match[1].split(','):
            found.setdefault(int(row), []).append(f'{file}::{node.name}')
  return found


def _sources():
  files = sorted(_TESTS.rglob('test_*.py'))
  read = lambda p: p.read_text(encoding='utf-8')
  return {str(p.relative_to(_TESTS)): read(p) for p in files}


def faults(found, rows=ROWS):
  """Rows without a test, and marks of rows that there are not."""
  return sorted(set(rows) ^ set(found))


def test_every_fault_is_provoked():
  found = marked(_sources())
  assert not faults(found), 'rows without a test, or marks without a row'
  assert all(
    test.split('::')[1].startswith('test_')
    for t in found.values()
    for test in t
  )


def test_every_invariant_is_shown():
  found = marked(_sources(), 'invariant')
  assert not faults(found, INVARIANTS), 'as above'


def test_the_matrix_takes_minutes():
  """By the costs that `make test-all` recorded; cheap tests have none."""
  costs = json.loads((_TESTS / 'ledger.json').read_text('utf-8'))['costs']
  tests = {f'tests/{t}' for ts in marked(_sources()).values() for t in ts}
  known = [costs[test] for test in tests if test in costs]
  assert len(known) > len(tests) / 2
  assert sum(cost * cases for cost, cases in known) / 2 < MOST


def test_a_row_without_a_test_is_seen():
  source = '@pytest.mark.fault(3, 99)\ndef test_x():\n  pass\n'
  found = marked({'test_x.py': source})
  assert found == {3: ['test_x.py::test_x'], 99: ['test_x.py::test_x']}
  assert faults(found) == sorted({*ROWS, 99} - {3})
  source = source.replace('fault(3, 99)', 'invariant(2)')
  found = marked({'test_x.py': source}, 'invariant')
  assert faults(found, INVARIANTS) == sorted({*INVARIANTS} - {2})


if __name__ == '__main__':
  for kind, rows in (('fault', ROWS), ('invariant', INVARIANTS)):
    width = max(map(len, rows.values()))
    print(f'{kind}s')
    for row, tests in sorted(marked(_sources(), kind).items()):
      print(f'{row:3}  {rows[row]:{width}}  {tests[0]}')
      for test in tests[1:]:
        print(f'{"":{width + 5}}  {test}')
