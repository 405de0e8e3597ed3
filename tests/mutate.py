"""Breaks one line at a time and asks whether a check sees it: `make mutants`.

    python tests/mutate.py [--only=NAME,NAME] [--list] [--jobs=2]

A mutation (mutants/) replaces one text of a file; its command must pass
without it, and fail with exit code 1 with it. Commands run in clones of HEAD in
a temporary folder: the working tree does not change, and what is not committed
is not tried. Results are kept in .cache/mutants.json, by the mutation and the
tree of HEAD: a run that was stopped goes on where it was. Exit codes: 0 every
mutation is seen, 1 one is not, 2 bad input, 130 stopped.
"""

import argparse
import contextlib
import difflib
import hashlib
import importlib
import itertools
import json
import os
import pathlib
import queue
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from typing import NamedTuple

from mutants import decode
from mutants import models
from mutants import pallas_kernels
from mutants import reliability
from mutants import sharding
from mutants import train
from mutants import updates

TABLE = [
  *pallas_kernels.TABLE, *sharding.TABLE, *models.TABLE, *decode.TABLE,
  *reliability.TABLE, *train.TABLE, *updates.TABLE,
]  # fmt: skip
ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 900  # after which a command is taken for one that hangs
# What nearly all commands import: it takes longer than most of them do.
IMPORTED = ('pytest', 'jax', 'flax.nnx', 'optax')
SEEN, UNCHECKED = 'seen', 'NO CHECK'
# The line that says what failed; the last one where none does.
_FAILED = re.compile(r'^(?:FAIL |E  |.*\.py:\d+: ).*', re.M)
_SKIPPED = re.compile(r'^\d+ skipped.* in \S+s', re.M)


class UsageError(Exception):
  """One line for whoever started the run."""


class Outcome(NamedTuple):
  """Of a command: exit code (None: it hangs), seconds, what it said."""

  code: int | None
  seconds: float
  said: str


class Result(NamedTuple):
  """Of a mutation: SEEN or what else, seconds, what the command said."""

  verdict: str
  seconds: float
  said: str


def git(root, *arguments):
  """Output of git in `root`; UsageError with its last line."""
  done = subprocess.run(
    ['git', '-C', root, *arguments], capture_output=True, text=True
  )
  if done.returncode:
    last = (done.stderr.strip() or 'no reason given').splitlines()[-1]
    raise UsageError(f'git {arguments[0]} in {root}: {last}')
  return done.stdout.strip()


def key(mutation, tree):
  """Of a result: it holds for this mutation of this tree."""
  text = '\0'.join((tree, *mutation))
  return hashlib.sha256(text.encode()).hexdigest()[:24]


def mutated(mutation, text):
  """The text of the file with the mutation; UsageError: it does not fit."""
  count = text.count(mutation.before)
  if count != 1:
    what = 'stale: no line has' if not count else f'{count} places have'
    raise UsageError(f'{what} {mutation.before!r} in {mutation.file}')
  out = text.replace(mutation.before, mutation.after)
  if out == text:
    raise UsageError(f'nothing changes in {mutation.file}')
  return out


# ------------------------------------------------------------------ commands


def serve(imported):
  """Runs commands, each in a fork of this process, which has the imports.

  A line [log, command] on standard input is answered by an exit code.
  """
  sys.path[0] = ''  # as of `python -m pytest`
  for name in imported:
    importlib.import_module(name)
  for line in sys.stdin:
    log, command = json.loads(line)
    child = os.fork()
    if not child:
      out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
      os.dup2(out, 1)
      os.dup2(out, 2)
      os._exit(_execute(command))
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)


def _execute(command):
  """Exit code of a pytest node id or a `paraxis` command, run here."""
  code = 70
  try:
    if command.startswith('paraxis '):
      main = importlib.import_module('paraxis.train.cli').main
      code = main(shlex.split(command)[1:])
    else:
      main = importlib.import_module('pytest').main
      code = main(['-q', '-x', '--tb=line', '-p', 'no:cacheprovider', command])
  except BaseException:
    traceback.print_exc()
  sys.stdout.flush()
  sys.stderr.flush()
  return int(code)


def kill(server):
  """Ends a process and all that it started, if it has not ended."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(server.pid, signal.SIGKILL)


class Clone:
  """HEAD of a repository in a folder of its own, where commands run."""

  _times = itertools.count(1)

  def __init__(self, root, folder):
    self.folder, self.stopped, self._server = folder, False, None
    git(root, 'clone', '--quiet', '--shared', str(root), str(folder))
    # .pkg/paraxis links to the clone's folders. It comes before what an
    # editable install names: that is asked only where no path has a package.
    self._env = os.environ | dict(
      JAX_PLATFORMS='cpu',
      PYTHONPATH=str(folder / '.pkg'),
      PARAXIS_CACHE=str(root / '.cache' / 'mutants'),
    )

  def imported(self, package):
    """Whether commands import a package of this clone, not of the original."""
    code = (
      'import importlib.util, os, sys\n'
      'spec = importlib.util.find_spec(sys.argv[1])\n'
      'print(os.path.realpath(spec.origin) if spec else "")'
    )
    found = subprocess.run(
      [sys.executable, '-c', code, package],
      cwd=self.folder, env=self._env, capture_output=True, text=True,
    )  # fmt: skip
    path = pathlib.Path(found.stdout.strip() or '/')
    return path.is_relative_to(self.folder.resolve())

  def read(self, file):
    try:
      return (self.folder / file).read_text(encoding='utf-8')
    except FileNotFoundError:
      raise UsageError(f'stale: there is no {file}') from None

  def write(self, file, text):
    """With a time of its own: Python goes by it and the length to compile."""
    path = self.folder / file
    path.write_text(text, encoding='utf-8')
    stamp = next(self._times)
    os.utime(path, (stamp, stamp))

  def run(self, command):
    """`Outcome` of a command."""
    start, log = time.monotonic(), self.folder.with_suffix('.log')
    log.write_text('')
    if self._server is None:
      self._server = subprocess.Popen(
        [sys.executable, __file__, '--serve', *IMPORTED],
        cwd=self.folder, env=self._env, start_new_session=True, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1,
      )  # fmt: skip
    server = self._server
    try:
      print(json.dumps([str(log), command]), file=server.stdin)
      answered, _, _ = select.select([server.stdout], [], [], SECONDS)
      answer = server.stdout.readline() if answered else ''
    except BrokenPipeError:  # stopped between two commands
      answer = ''
    if not answer:
      self.end()
    seconds, text = time.monotonic() - start, log.read_text(errors='replace')
    code = int(answer) if answer else None
    if code == 0 and _SKIPPED.search(text):
      code = 5  # pytest's, where it ran nothing
    said = _FAILED.search(text)
    said = said.group() if said else (text.strip().splitlines() or [''])[-1]
    return Outcome(code, seconds, said.strip()[:160])

  def stop(self):
    """Ends what another thread runs; its results mean nothing from then on."""
    self.stopped, server = True, self._server
    if server:
      kill(server)

  def end(self):
    """Ends all processes; the next command starts them again."""
    server, self._server = self._server, None
    if server:
      kill(server)
      server.communicate()


# ----------------------------------------------------------------- mutations


def passes(clone, command):
  """None, or why a command tells nothing: without a mutation it must pass."""
  outcome = clone.run(command)
  if outcome.code == 0:
    return None
  if outcome.code is None:
    return f'without the mutation it does not end within {SECONDS} s'
  return f'without the mutation it ends with {outcome.code}: {outcome.said}'


def attempt(clone, mutation):
  """`Result` of a mutation whose command passes without it."""
  try:
    original = clone.read(mutation.file)
    clone.write(mutation.file, mutated(mutation, original))
  except UsageError as e:
    return Result('STALE', 0.0, str(e))
  code, seconds, said = clone.run(mutation.command)
  clone.write(mutation.file, original)
  verdict = {1: SEEN, 0: 'SURVIVED', None: 'HANGS'}.get(
    code, f'ENDS WITH {code}'
  )
  return Result(verdict, seconds, said)


class Results:
  """{key: Result}; a JSON file, whole at any time, has those that hold."""

  def __init__(self, path):
    self._path, self._lock, self._kept = path, threading.Lock(), {}
    if path.exists():
      self._kept = json.loads(path.read_text(encoding='utf-8'))
    self.found = {name: Result(*row) for name, row in self._kept.items()}

  def add(self, name, result):
    with self._lock:
      self.found[name] = result
      if result.verdict == UNCHECKED:  # the next run looks again
        return
      self._kept[name] = result
      self._path.parent.mkdir(parents=True, exist_ok=True)
      new = self._path.with_suffix('.new')
      new.write_text(json.dumps(self._kept, indent=1), encoding='utf-8')
      new.replace(self._path)


def work(clone, groups, add):
  """Takes groups of mutations with one command until none is left."""
  while True:
    try:
      command, mutations = groups.get_nowait()
    except queue.Empty:
      return
    fault = passes(clone, command)
    for mutation in mutations:
      result = Result(UNCHECKED, 0.0, fault)
      if fault is None:
        result = attempt(clone, mutation)
      if clone.stopped:
        return
      add(mutation, result)


def chosen(table, only):
  """The mutations named, or all; UsageError on a name that is not there."""
  names = [m.name for m in table]
  for name in {n for n in names if names.count(n) > 1}:
    raise UsageError(f'two mutations are named {name}')
  for name in only:
    if name not in names:
      near = difflib.get_close_matches(name, names, 1)
      hint = f'did you mean {near[0]}?' if near else '--list shows the names.'
      raise UsageError(f'--only: no mutation is named {name!r}; {hint}')
  return [m for m in table if m.name in only or not only]


def run(table, root=ROOT, only=(), jobs=1, say=print):
  """Tries mutations and prints the table -> exit code 0 or 1.

  Args:
    table: list of mutation.Mutation. root: of the repository. only: names, ()
      for all. jobs: clones, each with one command at a time.
  """
  table = chosen(table, only)
  tree = git(root, 'rev-parse', 'HEAD^{tree}')
  results = Results(root / '.cache' / 'mutants.json')
  left = {}
  for m in table:
    if key(m, tree) not in results.found:
      left.setdefault(m.command, []).append(m)
  if git(root, 'status', '--porcelain'):
    say('What is not committed is not tried: mutations are of HEAD.')
  count = sum(map(len, left.values()))
  say(f'mutations: {len(table)}, to try: {count}, by {len(left)} commands')

  def add(mutation, result):
    results.add(key(mutation, tree), result)
    verdict, seconds, said = result
    say(f'{mutation.name}: {verdict} in {seconds:.0f} s: {said}')

  with tempfile.TemporaryDirectory(prefix='paraxis-mutants-') as folder:
    folders = [pathlib.Path(folder, str(i)) for i in range(jobs)]
    clones = [Clone(root, f) for f in folders[: len(left)]]
    for package in {m.file.split('/')[0] for m in table} if clones else ():
      if not clones[0].imported(f'paraxis.{package}'):
        raise UsageError(f'the clone does not import its own paraxis.{package}')
    try:
      _share(left, clones, add)
    finally:
      for clone in clones:
        clone.end()
  return report(table, lambda m: results.found.get(key(m, tree)), say)


def _share(left, clones, add):
  """Every clone works on what is left, {command: mutations}."""
  groups = queue.SimpleQueue()
  for group in left.items():
    groups.put(group)
  threads = [
    threading.Thread(target=work, args=(clone, groups, add), daemon=True)
    for clone in clones
  ]
  for thread in threads:
    thread.start()
  try:
    for thread in threads:
      thread.join()
  except BaseException:  # Ctrl-C, too
    for clone in clones:
      clone.stop()
    for thread in threads:
      thread.join()
    raise


def report(table, found, say):
  """Prints what each mutation came to -> exit code."""
  width = max(len(m.name) for m in table)
  say(f'\n{"mutation":{width}} {"seconds":>7}  what it breaks; seen by')
  missed = []
  for m in table:
    verdict, seconds, said = found(m) or ('NOT TRIED', 0.0, '')
    say(f'{m.name:{width}} {seconds:7.0f}  {m.breaks}; {m.command}')
    if verdict != SEEN:
      say(f'{"":{width}} {verdict}: {said}')
      missed.append(m.name)
  say(f'{len(table) - len(missed)} of {len(table)} seen')
  if missed:
    say(f'not seen: {", ".join(missed)}')
  return 1 if missed else 0


def main(argv=None):
  parser = argparse.ArgumentParser(prog='mutate.py', description=__doc__)
  parser.add_argument('--only', default='', help='names, with commas')
  parser.add_argument('--list', action='store_true', help='print the names')
  parser.add_argument('--jobs', type=int, default=1, help='commands at a time')
  parser.add_argument('--serve', nargs='*', help=argparse.SUPPRESS)
  given = parser.parse_args(argv)
  try:
    if given.serve:
      serve(given.serve)
      return 0
    if given.jobs < 1:
      raise UsageError(f'--jobs={given.jobs}: at least 1.')
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    only = [name for name in given.only.split(',') if name]
    if given.list:
      for m in chosen(TABLE, only):
        print(f'{m.name}: {m.file}: {m.breaks}')
      return 0
    return run(TABLE, only=only, jobs=given.jobs)
  except UsageError as e:
    print(e, file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print('stopped; the next run goes on from here', file=sys.stderr)
    return 130


if __name__ == '__main__':
  sys.exit(main())
