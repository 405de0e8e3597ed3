"""Every row of the matrix of faults has a test that provokes it.

`pytest -m fault` runs them; a row without one fails here. `python
tests/test_faults.py` prints the matrix with its tests, from their marks.
"""

import ast
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
_MARK = re.compile(r'pytest\.mark\.fault\(([0-9, ]+)\)')
_TESTS = pathlib.Path(__file__).parent


def marked(sources):
  """{row: [file::test]} of {file: source}."""
  found = {}
  for file, source in sources.items():
    for node in ast.walk(ast.parse(source)):
      if not isinstance(node, ast.FunctionDef):
        continue
      for decorator in node.decorator_list:
        if match := _MARK.fullmatch(ast.unparse(decorator)):
          for row in match[1].split(','):
            found.setdefault(int(row), []).append(f'{file}::{node.name}')
  return found


def _sources():
  files = sorted(_TESTS.rglob('test_*.py'))
  read = lambda p: p.read_text(encoding='utf-8')
  return {str(p.relative_to(_TESTS)): read(p) for p in files}


def faults(found):
  """Rows without a test, and marks of rows that there are not."""
  return sorted(set(ROWS) ^ set(found))


def test_every_fault_is_provoked():
  found = marked(_sources())
  assert not faults(found), 'rows without a test, or marks without a row'
  assert all(
    test.split('::')[1].startswith('test_')
    for t in found.values()
    for test in t
  )


def test_a_row_without_a_test_is_seen():
  source = '@pytest.mark.fault(3, 99)\ndef test_x():\n  pass\n'
  found = marked({'test_x.py': source})
  assert found == {3: ['test_x.py::test_x'], 99: ['test_x.py::test_x']}
  assert faults(found) == sorted({*ROWS, 99} - {3})


if __name__ == '__main__':
  for row, tests in sorted(marked(_sources()).items()):
    print(f'{row:3}  {ROWS[row]:56}  {tests[0]}')
    for test in tests[1:]:
      print(f'{"":61}  {test}')
