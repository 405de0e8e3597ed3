"""Which tests a session runs: a sample that rotates, all, or what a change
reaches.

`make test` runs every cheap test and, of the dear ones, a sample. A test is
dear if `make test-all` measured 0.15 CPU-seconds or more for its function; then
one in N of its cases is kept, those with (crc32(node id) + turn) mod N == 0.
The turn is the number of commits, so N commits in a row run every test;
--turn=K repeats another one. Marks:

  @pytest.mark.sampled(N)    one in N at most (1: always)
  @pytest.mark.array(P, N)   of a covering array: the P cases that a greedy
                             choice takes first, and block (turn mod N) of the
                             rest; N turns in a row cover every pair

A file of tests whose content is not what `make test-all` ran is kept whole, as
far as a minute of measured cost goes. --all keeps everything, and so does
naming files or node ids without --turn. --changed[=REV] keeps the tests that
execute a module that differs from REV (HEAD).

`make test-all` (--all --record) writes two tables beside this file:
ledger.json    {'costs': {function: [CPU-seconds a case, cases]} (today's are
                seconds of one of two workers, which waits too),
                'files': {test file: hash of its content}}
executed.json  {'modules': [...], 'files': {test file: [index in modules]}}
"""

import ast
import fnmatch
import gc
import hashlib
import itertools
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import zlib

import pytest

HERE = pathlib.Path(__file__).resolve().parent
LEDGER, EXECUTED = HERE / 'ledger.json', HERE / 'executed.json'
# CPU-seconds a case from which one in N runs.
BRACKETS = ((4.0, 96), (1.5, 56), (0.6, 24), (0.3, 12), (0.15, 5))
# Bytes of a process beyond which compiled programs are freed between files: two
# workers with those of a whole room fill a machine of 24 GB.
MOST_RESIDENT = 5 * 2**30
PEERS = ('hf', 'aot', 'lm_eval', 'extras')  # not in .venv, but in .ci/run
SELDOM = 8  # one in so many of dear tests with them, whatever they cost
GUARD = 7.0  # CPU-seconds that a guard may cost and run in every turn
RECORDED = 0.1  # cheaper functions are left out of the ledger
WHOLE = 60.0  # CPU-seconds that changed files may add to a turn
# A change of these reaches every test.
EVERYWHERE = ('tests/conftest.py', 'setup.cfg', 'requirements.txt')
FOLDERS = ('configs', 'pallas_kernels', 'sharding', 'models', 'decode', 'train')


def one_in(cost):
  """N for a function of `cost` CPU-seconds a case; 1: cheap, always kept."""
  return next((n for bound, n in BRACKETS if cost >= bound), 1)


def sampled(name, cost, mark=None, peers=False):
  """N of a function: of its mark, or what its cost asks for if that is more.

  Guards of the whole tree (tests/test_*.py) run in every turn, but for the
  dearest; tests with peers, which run in .ci/run alone, one in SELDOM.
  """
  if peers:
    return mark or min(one_in(cost), SELDOM)
  always = mark == 1 or (name.count('/') == 1 and cost < GUARD)
  return 1 if always else max(mark or 1, one_in(cost))


def kept(nodeid, turn, n):
  """Whether a case of a dear function is in this turn's sample."""
  return (zlib.crc32(nodeid.encode()) + turn) % n == 0


def greedy(pairs):
  """Indices of cases, each time the one with the most pairs not seen yet.

  pairs: for each case the set of pairs of options that it covers.
  """
  seen, order, left = set(), [], list(range(len(pairs)))
  while left:
    best = max(left, key=lambda i: (len(pairs[i] - seen), -i))
    left.remove(best)
    order.append(best)
    seen |= pairs[best]
  return order


def block(order, prefix, blocks, turn):
  """The greedy prefix, and of the rest every `blocks`-th."""
  return order[:prefix] + order[prefix:][turn % blocks :: blocks]


def _git(root, *arguments):
  command = ['git', *arguments]
  out = subprocess.run(command, cwd=root, capture_output=True, check=True)
  return out.stdout.decode().strip()


def turn_of(root):
  """Commits up to HEAD; in a shallow clone HEAD's tree; 0 without git."""
  try:
    if _git(root, 'rev-parse', '--is-shallow-repository') == 'true':
      return int(_git(root, 'rev-parse', 'HEAD^{tree}')[:8], 16)
    return int(_git(root, 'rev-list', '--count', 'HEAD'))
  except (OSError, subprocess.CalledProcessError):
    return 0


def digest(path):
  """Hash of a file's content, or ''."""
  try:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
  except OSError:
    return ''


def table(path):
  """A JSON table, {} where there is none yet."""
  return json.loads(path.read_text()) if path.exists() else {}


# ------------------------------------------------------------ what a turn keeps


class Sample:
  """What one session keeps. turn: int, or None where nothing is sampled."""

  def __init__(self, config):
    self.turn, self.changed, self.counts, self.notes = None, None, (0, 0), []
    given = getattr(config, 'workerinput', None)
    if given:
      self.turn, self.changed = given['turn'], given['changed']
      return
    turn = config.getoption('turn')
    named = config.args_source is config.ArgsSource.ARGS
    if config.getoption('changed'):
      self.changed = reached(config.rootpath, config.getoption('changed'))
    elif not config.getoption('all') and not (named and turn is None):
      self.turn = turn_of(config.rootpath) if turn is None else turn

  def text(self):
    if self.changed is not None:
      return f'tests of what changed: {len(self.changed)} files'
    if self.turn is None:
      return 'every test (--all, or named on the command line)'
    return f'sample of the dear tests: --turn={self.turn}'

  def select(self, items):
    """-> (kept, cut)."""
    if self.changed is not None:
      keep = [i for i in items if file_of(i) in self.changed]
    elif self.turn is not None:
      keep = self._sample(items)
    else:
      keep = list(items)
    wanted = set(keep)
    return keep, [item for item in items if item not in wanted]

  def _sample(self, items):
    ledger = table(LEDGER)
    costs = {k: c for k, (c, _) in ledger.get('costs', {}).items()}
    arrays, keep, cut = {}, [], []
    for item in items:
      mark = item.get_closest_marker('array')
      if mark:
        arrays.setdefault(function_of(item), (mark.args, []))[1].append(item)
        continue
      mark = item.get_closest_marker('sampled')
      name = function_of(item)
      n = sampled(
        name, costs.get(name, 0), mark and mark.args[0],
        any(item.get_closest_marker(peer) for peer in PEERS),
      )  # fmt: skip
      (keep if kept(item.nodeid, self.turn, n) else cut).append(item)
    for (prefix, blocks), family in arrays.values():
      pairs = [pairs_of(item.callspec.params['case']) for item in family]
      order = block(greedy(pairs), prefix, blocks, self.turn)
      keep += [family[i] for i in order]
      cut += [item for i, item in enumerate(family) if i not in set(order)]
    whole = self._whole(cut, ledger.get('files', {}), costs)
    wanted = {*keep, *(item for item in cut if file_of(item) in whole)}
    return [item for item in items if item in wanted]

  def _whole(self, cut, hashes, costs):
    """Files that are not as `make test-all` ran them, within WHOLE."""
    missing = {}
    for item in cut:
      cost = costs.get(function_of(item), 1.0)
      missing[file_of(item)] = missing.get(file_of(item), 0.0) + cost
    changed = [f for f in missing if digest(HERE.parent / f) != hashes.get(f)]
    left, whole = WHOLE, set()
    for file in sorted(changed, key=missing.__getitem__):
      if missing[file] <= left:
        left -= missing[file]
        whole.add(file)
      else:
        self.notes.append(
          f'{file} changed and is sampled all the same: whole it would take '
          f'{missing[file]:.0f} CPU-seconds more'
        )
    return whole


def pairs_of(case):
  """Pairs of options that a case covers: {(name, value, name, value)}."""
  options = [(name, str(value)) for name, value in sorted(case.items())]
  return {(*a, *b) for a, b in itertools.combinations(options, 2)}


def function_of(item):
  """'tests/a/test_b.py::test_c' of one of its cases."""
  return item.nodeid.split('[')[0]


def file_of(item):
  return item.nodeid.split('::')[0]


# ----------------------------------------------------- what a change reaches


def reached(root, revision):
  """Test files that a change since `revision` reaches, sorted.

  A module reaches the files whose tests executed it; one that no test executed
  when the table was made, the files that import it. Guards (tests/test_*.py)
  always run.
  """
  changed = _git(root, 'diff', '--name-only', revision).splitlines()
  changed += _git(
    root, 'ls-files', '--others', '--exclude-standard'
  ).splitlines()
  files = sorted(
    str(path.relative_to(root)) for path in HERE.rglob('test_*.py')
  )
  if set(changed) & set(EVERYWHERE):
    return files
  made = table(EXECUTED)
  modules, known = made.get('modules', []), made.get('files', {})
  found = {f for f in files if f.count('/') == 1 or f not in known}
  found |= set(changed) & set(files)
  for name in changed:
    folder, *_ = name.split('/')
    if name.startswith('tests/') and name.endswith('.py'):
      found |= {f for f in files if _imports(root / f, pathlib.Path(name).stem)}
    elif name.endswith('.py') and folder in FOLDERS:
      module = 'paraxis.' + name.removesuffix('.py').replace('/', '.')
      number = modules.index(module) if module in modules else None
      if number is None:
        found |= {f for f in files if _imports(root / f, module)}
      found |= {f for f in known if number in known[f] and f in files}
    elif folder in FOLDERS:
      near = f'tests/{name.rpartition("/")[0]}/'
      found |= {f for f in files if fnmatch.fnmatch(f, f'{near}*')}
  return sorted(found)


def _imports(path, module):
  """Whether a file imports a module, wherever in it."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom):
      names = {f'{node.module}.{alias.name}' for alias in node.names}
      if module in (node.module, *names):
        return True
    elif isinstance(node, ast.Import):
      if module in {alias.name for alias in node.names}:
        return True
  return False


# --------------------------------------------------------- what is recorded


class Recorder:
  """CPU-seconds of every test, and the modules that each file executes."""

  def __init__(self):
    self.costs, self.executed, self._file = {}, {}, None
    self.failed = set()  # files; known where reports arrive, not in workers
    self._noted = sys.modules.get('sitecustomize')
    if not hasattr(self._noted, 'ran'):
      self._noted = None
    self._folder = tempfile.TemporaryDirectory(prefix='paraxis-executed-')

  def before(self, item):
    """Starts a test; what jax traced for another file is traced again."""
    if self._noted and file_of(item) != self._file:
      if 'jax' in sys.modules:
        sys.modules['jax'].clear_caches()
    self._file = file_of(item)
    if self._noted:
      os.environ[self._noted.VARIABLE] = self._folder.name
      self._noted.seen.clear()
    return _spent()

  def after(self, item, before):
    """Ends it: notes its cost, and what ran here and in its processes."""
    self.costs[item.nodeid] = _spent() - before
    if not self._noted:
      return
    ran = self.executed.setdefault(file_of(item), set())
    ran |= self._noted.seen
    for path in pathlib.Path(self._folder.name).iterdir():
      ran |= set(path.read_text().split())
      path.unlink()

  def output(self):
    """As plain data, for the process that writes the tables."""
    files = {name: sorted(ran) for name, ran in self.executed.items()}
    return dict(costs=self.costs, executed=files)


def _resident():
  """Bytes of this process in memory; 0: not known."""
  try:
    pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
    return pages * resource.getpagesize()
  except (OSError, IndexError):
    return 0


def _spent():
  """CPU-seconds of this process and of those that it waited for."""
  used = map(
    resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  )
  return sum(u.ru_utime + u.ru_stime for u in used)


def write(costs, executed, failed=(), root=HERE.parent):
  """Writes both tables from {node id: CPU-seconds}, {file: modules}.

  failed: files, to be kept whole until they pass.
  """
  by_function = {}
  for nodeid, cost in costs.items():
    by_function.setdefault(nodeid.split('[')[0], []).append(cost)
  rows = {
    name: [round(sum(v) / len(v), 1), len(v)]
    for name, v in sorted(by_function.items())
    if sum(v) / len(v) >= RECORDED
  }
  files = sorted({name.split('::')[0] for name in costs})
  hashes = {f: digest(root / f) for f in files if f not in failed}
  ledger = dict(costs=rows, files=hashes)
  _save(LEDGER, ledger)
  if executed:
    modules = sorted(set().union(*executed.values()))
    number = {name: i for i, name in enumerate(modules)}
    of_file = {f: [number[m] for m in sorted(executed[f])] for f in files}
    _save(EXECUTED, dict(modules=modules, files=of_file))


def _save(path, made):
  """JSON with one line for each entry, so that a diff can be read."""
  path.write_text(json.dumps(made).replace(', "', ',\n"') + '\n')


# --------------------------------------------------------------------- pytest

_SAMPLE, _RECORDER = pytest.StashKey(), pytest.StashKey()
_RECORDING = []  # the session's Recorder, for hooks that get no config


def pytest_addoption(parser):
  group = parser.getgroup('which tests run')
  group.addoption('--turn', type=int, help='which sample (commits decide)')
  group.addoption('--all', action='store_true', help='every test')
  group.addoption('--record', action='store_true', help='write the tables')
  group.addoption(
    '--changed', nargs='?', const='HEAD', metavar='REV',
    help='only tests that execute what differs from REV (HEAD)',
  )  # fmt: skip


def pytest_configure(config):
  config.addinivalue_line('markers', 'sampled(N): one case in N runs in a turn')
  config.addinivalue_line('markers', 'array(P, N): greedy prefix, blocks')
  config.stash[_SAMPLE] = Sample(config)
  if config.getoption('record'):
    config.stash[_RECORDER] = recorder = Recorder()
    _RECORDING[:] = [recorder]


def pytest_report_header(config):
  return config.stash[_SAMPLE].text()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
  sample = node.config.stash[_SAMPLE]
  node.workerinput.update(turn=sample.turn, changed=sample.changed)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
  sample = config.stash[_SAMPLE]
  keep, cut = sample.select(items)
  sample.counts = len(keep), len(cut)
  items[:] = keep
  if cut:
    config.hook.pytest_deselected(items=cut)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
  recorder = item.config.stash.get(_RECORDER, None)
  before = recorder.before(item) if recorder else None
  try:
    return (yield)
  finally:
    if recorder:
      recorder.after(item, before)
    other = nextitem is None or file_of(nextitem) != file_of(item)
    if other and 'jax' in sys.modules and _resident() > MOST_RESIDENT:
      sys.modules['jax'].clear_caches()
      gc.collect()  # cycles hold some, and are looked for rarely


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
  del error
  given = getattr(node, 'workeroutput', {})
  sample = node.config.stash[_SAMPLE]
  # Every worker collects everything, so all count the same.
  sample.counts = tuple(given.get('counts', sample.counts))
  sample.notes = given.get('notes', sample.notes)
  recorder = node.config.stash.get(_RECORDER, None)
  if recorder:
    recorder.costs |= given.get('costs', {})
    for name, ran in given.get('executed', {}).items():
      recorder.executed.setdefault(name, set()).update(ran)


def pytest_runtest_logreport(report):
  if report.failed and _RECORDING:
    _RECORDING[0].failed.add(report.nodeid.split('::')[0])


def pytest_sessionfinish(session, exitstatus):
  config = session.config
  sample = config.stash[_SAMPLE]
  recorder = config.stash.get(_RECORDER, None)
  if hasattr(config, 'workeroutput'):
    config.workeroutput.update(counts=sample.counts, notes=sample.notes)
    config.workeroutput.update(recorder.output() if recorder else {})
  elif recorder and int(exitstatus) in (0, 1):
    write(recorder.costs, recorder.executed, recorder.failed)


def pytest_terminal_summary(terminalreporter, config):
  sample = config.stash[_SAMPLE]
  ran, cut = sample.counts
  for line in (*sample.notes, f'{sample.text()}; {ran} kept, {cut} cut'):
    terminalreporter.write_line(line)
