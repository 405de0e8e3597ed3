"""Peers of the benches: other libraries, each in a process of its own.

    paraxis bench step --peer=hf:/path/to/venv/bin/python

A peer is started by the Python that is named, runs peer_process.py, and
measures itself when it is told to: one line there, one line back. So its rounds
stand among ours (measure.interleave), and noise falls on all alike. What is
missing, too old or breaks becomes a note of the report, never an error.

Standard library only.
"""

import contextlib
import json
import os
import pathlib
import select
import subprocess
import tempfile
from typing import Any

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.train.bench import measure
from paraxis.train.bench import peer_process

# name -> (the benches that it can run, what it is)
NAMES = {
  'hf': (('step',), 'a step of transformers, float32, not compiled'),
  'hf_autocast': (('step',), 'the same in bfloat16 autocast'),
  'torch_compile': (('step',), 'the same in float32, by torch.compile'),
  'maxtext': (('step',), "a step of MaxText's Llama, float32"),
  'xllamacpp': (('methods',), "llama.cpp's tokens, one by one"),
  'sdpa': (
    ('attention', 'prefill', 'decode', 'methods'),
    "torch's attention; transformers' prefill, generate",
  ),
}
# (peer, bench, dtype) -> least speed of ours / the peer's; None: a row without
# target, as the peer computes something else. What we allow is a time, here its
# inverse: 1.2 of eager's step is a speed of .83.
TARGETS = {
  ('hf', 'step', 'float32'): 0.83,  # 1.2 of its time
  ('hf_autocast', 'step', 'bfloat16'): 0.77,  # 1.3
  ('torch_compile', 'step', 'float32'): 1.0,
  ('maxtext', 'step', 'float32'): 1.0,
  ('sdpa', 'attention', 'float32'): 0.67,  # 1.5
  ('sdpa', 'attention', 'bfloat16'): 0.83,  # 1.2
  ('sdpa', 'prefill', 'float32'): 0.91,  # 1.1
  ('sdpa', 'decode', 'float32'): 1.0,
  ('sdpa', 'methods', 'float32'): 2.0,
  ('xllamacpp', 'methods', 'float32'): None,  # products of 8-bit integers
}
SCRIPT = pathlib.Path(peer_process.__file__)
NARROW = {'hf_autocast': 'bfloat16'}  # what they compute in, if not float32
WAIT = 900  # seconds for an answer; a compilation is one


class WithdrawnError(Exception):
  """A peer does not run, and why."""


def parse(given):
  """((name, path of a Python), ...) of values of --peer.

  Raises:
    UserError: an unknown name, one that is given twice, no program.
  """
  out = {}
  for value in given or ():
    name, _, path = value.partition(':')
    if name not in NAMES:
      raise errors.UserError(
        f'--peer={value}: {name!r} is none of {", ".join(NAMES)}; write '
        '--peer=NAME:/path/to/python.' + schema.suggest(name, NAMES)
      )
    if not (os.path.isfile(path) and os.access(path, os.X_OK)):
      raise errors.UserError(
        f'--peer={value}: {path!r} is no program; name the Python that has '
        f'the libraries of {name}.'
      )
    if name in out:
      raise errors.UserError(f'--peer={value}: {name} is given twice.')
    out[name] = path
  return tuple(out.items())


class Peer:
  """One process; `failed`: why it ended early, or None. dtype: of its work."""

  def __init__(self, name, python, bench, sizes):
    """Starts it and waits until it is ready; WithdrawnError: it is not."""
    self.name, self.failed, self.peaks = name, None, []
    narrow = sizes.get('dtype') or NARROW.get(name)
    self.dtype = narrow or 'float32'
    self._wall, self._rest = WAIT, b''
    keep = {k: v for k, v in os.environ.items() if not k.startswith('PYTHON')}
    # Threads that wait for work must not spin: CPU-seconds would count it.
    keep = dict(OMP_WAIT_POLICY='PASSIVE') | keep
    self._log = tempfile.TemporaryFile()
    job = json.dumps(dict(peer=name, bench=bench, sizes=sizes))
    pipe = subprocess.PIPE
    try:
      self._process: Any = subprocess.Popen(
        [python, str(SCRIPT), job],
        env=keep | dict(HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false'),
        stdin=pipe, stdout=pipe, stderr=self._log, bufsize=0,
      )  # fmt: skip
    except OSError as e:
      self._log.close()
      raise WithdrawnError(f'{python} does not start: {e.strerror}') from e
    try:
      answer = self._answer()
      if 'skip' in answer:
        raise WithdrawnError(answer['skip'])
      self.notes = answer['notes']
    except BaseException:
      self.close()
      raise

  def _answer(self):
    """The next line as JSON; WithdrawnError: there is none."""
    out = self._process.stdout
    while b'\n' not in self._rest:
      if not select.select([out], [], [], self._wall)[0]:
        raise WithdrawnError(f'no answer in {self._wall} seconds')
      more = out.read(4096)
      if not more:
        raise WithdrawnError(self._last_words())
      self._rest += more
    line, _, self._rest = self._rest.partition(b'\n')
    try:
      return json.loads(line)
    except ValueError as e:
      raise WithdrawnError(f'it wrote {line[:80]!r}') from e

  def _last_words(self):
    code = self._process.wait()
    self._log.seek(0)
    lines = self._log.read().decode('utf-8', 'replace').strip().splitlines()
    return f'exit {code}: {(lines or ["no message"])[-1][:200]}'

  def run(self):
    """One round, as a candidate of measure.interleave; {}: it has failed."""
    try:
      if self.failed is None:
        self._process.stdin.write(b'run\n')
        answer = self._answer()
        self.peaks.append(answer['peak'])
        return {'': answer['seconds']}
    except BrokenPipeError:
      self.failed = self._last_words()
    except WithdrawnError as e:
      self.failed = str(e)
    return {}

  def close(self):
    """Ends the process."""
    self._process.stdin.close()
    try:
      self._process.wait(10)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._process.stdout.close()
    self._log.close()


class Peers:
  """Those that started; candidates: {name: function} for interleave."""

  def __init__(self, report, started):
    self._report, self._started = report, started
    self.candidates = {peer.name: peer.run for peer in started}

  def judge(self, times, ours, what='', least=None):
    """Takes out of `times` those that failed, and compares the others.

    Adds the target of each (TARGETS), its peak memory and its versions.

    Args:
      times: what interleave gave.
      ours: name of our candidate, or {peer: name}.
      what: begins the name of the row.
      least: the target, in place of that of TARGETS.
    """
    report, kept = self._report, False
    for peer in self._started:
      if peer.failed:
        times.pop(peer.name, None)
        note(report, f'{peer.name}: left out: {peer.failed}')
        continue
      kept = True
      mine = ours.get(peer.name, ours['']) if isinstance(ours, dict) else ours
      speed = f'{what}speed of {mine} / {peer.name}'
      found = measure.ratios(times[peer.name], times[mine])
      target = least or TARGETS[peer.name, report.name, peer.dtype]
      if target is None:
        report.add({speed: found}, 'ratio')
      else:
        report.check(speed, found, target)
      report.add({f'{what}peak memory, {peer.name}': peer.peaks[1:]}, 'MiB')
      note(report, f'{peer.name}: {peer.notes}')
    if kept:
      peak = peer_process.peak()
      report.add({f'{what}peak memory, this process': [peak]}, 'MiB')


def sizes_of(m):
  """Those of a schema.Model, for `beside`."""
  names = 'vocab_size', 'd_model', 'd_ff', 'num_layers', 'num_heads'
  return {name: getattr(m, name) for name in names}


def note(report, line):
  """A note, once."""
  if line not in report.notes:
    report.notes.append(line)


def absent(report):
  """Notes the peers that do not apply to the bench of this report."""
  for name, _ in measure.current().peers:
    benches, _ = NAMES[name]
    if report.name not in benches:
      note(report, f'{name}: left out: it runs {", ".join(benches)} only')


@contextlib.contextmanager
def beside(report, sizes, say):
  """The session's peers that apply to the bench of `report`, as `Peers`.

  sizes: {name: value}, what peer_process.py needs to know; dtype where it is
    not the peer's own.
  """
  started = []
  try:
    for name, python in measure.current().peers:
      if report.name in NAMES[name][0]:
        say(f'starting {name}')
        try:
          started.append(Peer(name, python, report.name, sizes))
        except WithdrawnError as e:
          note(report, f'{name}: left out: {e}')
    yield Peers(report, started)
  finally:
    for peer in started:
      peer.close()
