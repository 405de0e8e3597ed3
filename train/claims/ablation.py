"""Variants x seeds: trainings that are kept, and what their numbers say.

    trainings = trained(run, {'new': config, 'old': config}, seeds=[0, 1, 2])
    found = numbers(trainings, 'bits_per_byte')        {variant: one a seed}
    finding = less(found, 'new', 'old', by=0.0)
    return outcome(run, found, [finding], 'bits per byte', ...)

A training of a variant and a seed lies in a folder of its own, RESULTS/
VARIANT-SEED, and resumes where it stopped. `training.json` in it holds its key:
the fields of its config, the files that a training runs (sources.py), those of
the claim that trains and those that the config's header names as the mechanism,
the text, tokenizer and template, versions.
A training of another key is refused; a finished one is not trained again.

The verdict is about gains, seed by seed: how much better one variant is than
the other in the same seed. With n gains of mean m and standard deviation s,

    standard error e = s / sqrt(n),    a claim of `by` holds: m - by > 2 e

in at least 3 seeds; m > 2 e is the direction alone, m < -2 e the opposite. What
took longer than `LIMIT` or has fewer seeds shows a direction at most.
"""

from collections.abc import Callable
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import pathlib
import re
import shutil
import time
from typing import Any, NamedTuple

import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import extra
from paraxis.configs.base import mixers
from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import sources
from paraxis.train.data import corpus
from paraxis.train.data import files

RECORD = 'training.json'
PART = f'{RECORD}.tmp'  # all that a full disk leaves of the first one
LIMIT = 1800  # CPU-seconds of a training, beyond which it shows a direction
ERRORS = 2  # standard errors at which a difference counts
VERSIONS = ('jax', 'jaxlib', 'optax', 'paraxis')
# No number depends on them; of data.path its text counts, wherever it lies.
FREE = (
  'checkpoint.', 'data.cache_dir', 'data.path', 'data.prefetch',
  'data.workers', 'decode.', 'train.drift_every', 'train.stall_seconds',
  'train.tensorboard', 'train.wandb',
)  # fmt: skip
SHOWN = 4  # differences that a refusal names


def _text(path: str, sources_of='') -> str:
  """sha256 of the text of data.path or data.sources: domains and contents."""
  read = corpus.sources(schema.Data(path=path, sources=sources_of))
  found = [(s.domain, s.group, corpus.fingerprint(s)) for s in read]
  return hashlib.sha256(repr(found).encode()).hexdigest()


def _template(path: str) -> str:
  """sha256 of the file of data.chat_template; '': there is none."""
  return files.sha256(path) if pathlib.Path(path).is_file() else ''


def _own(pattern: str) -> dict:
  """{file of a user's mixer in a pattern, or its name: sha256 of its code}."""
  letters, _ = mixers.of_pattern(pattern)
  own = {letter: mixers.OWN.get(letter) for letter in letters}
  return {o.file or f'mixer {n}': o.sha256 for n, o in own.items() if o}


def key(config: schema.Config, mechanism=(), task=None) -> dict:
  """What the numbers of a training depend on: {part: {name: value}}.

  Args:
    mechanism: files and folders of the repository, besides those that
      `sources.executed` finds.
    task: {name: JSON data} that the config does not say.
  """
  parts = {
    'task': task or {},
    'config': {
      name: schema.value(config, name)
      for name, _ in schema.fields()
      if not name.startswith((*FREE, f'{extra.NAME}.'))
    }
    | extra.flat(config.extra),
    'file': {
      'the text of data.path': _text(config.data.path, config.data.sources),
      'data.tokenizer': tokenizer_lib.load(config.data.tokenizer).fingerprint,
      'data.chat_template': _template(config.data.chat_template),
      **sources.hashes((*sources.executed(), *mechanism)),
      **_own(config.model.pattern),
    },
    'version': {name: importlib.metadata.version(name) for name in VERSIONS},
  }
  return json.loads(json.dumps(parts))


def digest(parts: dict) -> str:
  """sha256 of a `key`."""
  return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def differences(old: dict, new: dict) -> list[str]:
  """['train.steps 200 -> 100', 'models/aux.py changed', ...] of two keys."""
  found = []
  for part in new:
    was, now = old.get(part, {}), new[part]
    for name in sorted({*was, *now}):
      a, b = was.get(name), now.get(name)
      if a != b and part == 'file':
        found.append(
          f'{name} {"is gone" if b is None else "changed" if a else "is new"}'
        )
      elif a != b:
        found.append(f'{name} {a} -> {b}')
  return found


class Training:
  """One training of a variant with a seed.

  Attributes:
    config: schema.Config. folder: pathlib.Path. record: what its file holds:
      key, parts, finished, cpu_seconds, numbers.
  """

  def __init__(self, config: schema.Config, folder: pathlib.Path, parts: dict):
    """parts: its `key`; UserError: the folder holds anything else."""
    self.config, self.folder = config, folder
    self.record: dict[str, Any] = dict(
      key=digest(parts), parts=parts, finished=False, cpu_seconds=0.0,
      numbers={},
    )  # fmt: skip
    if (folder / RECORD).exists():
      self._resume()
    elif folder.exists() and {p.name for p in folder.iterdir()} - {PART}:
      raise errors.UserError(
        f'{folder} holds files, but no {RECORD}: it is no training of a claim. '
        'Take another --workdir, or remove it.'
      )

  def _resume(self):
    try:
      old = json.loads((self.folder / RECORD).read_text(encoding='utf-8'))
      same = old['key'] == self.record['key']
      why = differences(old['parts'], self.record['parts'])
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError):
      same, why = False, [f'{RECORD} is damaged']
    if not same:
      more = f', and {len(why) - SHOWN} more' if len(why) > SHOWN else ''
      raise errors.UserError(
        f'{self.folder} holds another training: {", ".join(why[:SHOWN])}{more}.'
        ' Take another --workdir, or --fresh, which removes it.'
      )
    self.record = old

  def save(self):
    """Writes the record."""
    self.folder.mkdir(parents=True, exist_ok=True)
    temporary = self.folder / PART
    temporary.write_text(json.dumps(self.record, indent=1), encoding='utf-8')
    os.replace(temporary, self.folder / RECORD)

  def finish(self, learn: Callable, say):
    """Trains to the end, unless that was done; learn: as for `trained`."""
    if self.record['finished']:
      return
    self.save()
    before = time.process_time()
    try:
      self.record['numbers'] |= learn(self.config, self.folder, say)
      self.record['finished'] = True
    finally:
      self.record['cpu_seconds'] += time.process_time() - before
      self.save()

  @functools.cached_property
  def opened(self):
    """(job.Job that reads whole rows of held-out text, trained parameters)."""
    whole = {'train.microbatches': 1, 'pipeline.microbatches': 0}
    config = experiment.fields(self.config, whole)
    devices = experiment.devices_of(config)
    job = job_lib.make(config, '', devices, say=lambda line: None)
    return job, experiment.restored(job, self.folder)

  def measured(self, name: str, measure: Callable) -> Any:
    """JSON data that `measure(job, params)` gives, kept under a name.

    It is measured again when the file that defines `measure` has changed.
    """
    source = files.sha256(inspect.getsourcefile(measure))
    kept = self.record['numbers'].get(name)
    if kept is None or kept['source'] != source:
      value = json.loads(json.dumps(measure(*self.opened)))
      kept = self.record['numbers'][name] = dict(source=source, value=value)
      self.save()
    return kept['value']


def by_loop(config, folder, say, make_step=step_lib.make) -> dict:
  """Trains by loop.run -> {'bits_per_byte': of held-out text}."""
  how = dict(make_step=make_step, devices=experiment.devices_of(config))
  found = claims.finish(config, folder, say, **how)
  return {'bits_per_byte': found.bits_per_byte}


def trained(
  run: claims.Run, variants: dict, seeds, learn=by_loop, task=None, code=()
) -> dict:
  """{variant: [Training of each seed, finished]}.

  Args:
    variants: {name: schema.Config}; the seed replaces train.seed.
    learn: function (config, folder, say) that trains, resumes what lies in the
      folder, and returns {name: number, or other JSON data}.
    task: what else the trainings depend on, as for `key`. code: functions and
      classes of claims that `learn` uses and its file does not import.

  Raises:
    UserError: a folder holds another training; with run.fresh it is removed.
    SystemExit: with 75, a signal stopped a training.
  """
  found = {name: [] for name in variants}
  mechanism = *run.mechanism, *run.replaced, *sources.of_claims(learn, *code)
  for seed in seeds:
    for name, config in variants.items():
      config = experiment.fields(config, {'train.seed': seed})
      label = re.sub(r'[^\w.+-]+', '_', f'{name}-{seed}')
      one = _training(run, config, label, key(config, mechanism, task))
      kept = one.record['finished']
      run.say(f'{label}: {"kept" if kept else "training"}')
      one.finish(learn, run.say)
      found[name].append(one)
  return found


def _training(run, config, label, parts):
  folder = run.results / label
  try:
    return Training(config, folder, parts)
  except errors.UserError:
    if not (run.fresh and (folder / RECORD).exists()):
      raise
  run.say(f'{folder} is removed')
  removed = folder.with_name(f'.removed-{label}')
  shutil.rmtree(removed, ignore_errors=True)  # what a kill left of an earlier
  folder.rename(removed)  # at once: half a training would have no record
  shutil.rmtree(removed)
  return Training(config, folder, parts)


def numbers(trainings: dict, name: str) -> dict:
  """{variant: [a number that `learn` gave, of each seed]}."""
  of = lambda row: [t.record['numbers'][name] for t in row]
  return {variant: of(row) for variant, row in trainings.items()}


def cpu_seconds(trainings: dict) -> float:
  """CPU-seconds of the longest training."""
  return max(t.record['cpu_seconds'] for r in trainings.values() for t in r)


class Finding(NamedTuple):
  """What gains, one a seed, say of a claim.

  Attributes:
    text: the claim. mean, error: of the gains, and its standard error.
    passed: whether it holds. verdict: one of harness.VERDICTS.
  """

  text: str
  mean: float
  error: float
  passed: bool
  verdict: str


def judged(text: str, gains, by=0.0, seconds=0.0, signed=True) -> Finding:
  """The `Finding` that gains are above `by`. Two standard errors of three seeds
  are a one-sided p of .09 (t with 2 degrees of freedom; of six seeds .05).

  Args:
    gains: one a seed, > 0 where it is as the claim says.
    seconds: CPU-seconds of the longest training.
    signed: False: 0 means nothing, so that nothing is the opposite of it.
  """
  n, mean = len(gains), float(np.mean(gains))
  error = float(np.std(gains, ddof=1)) / n**0.5 if n > 1 else 0.0
  passed = mean - by > ERRORS * error
  enough = n >= claims.ENOUGH_SEEDS
  counts = enough and signed and abs(mean) > ERRORS * error
  if passed:
    word = claims.VERDICTS[0 if enough and seconds <= LIMIT else 1]
  elif counts:
    word = claims.VERDICTS[1 if mean > 0 else 3]
  else:
    word = claims.VERDICTS[2]
  return Finding(text, mean, error, passed, word)


def less(found: dict, a: str, b: str, by=0.0, seconds=0.0) -> Finding:
  """That variant a has less than b, by more than `by`, in the same seeds."""
  gains = np.subtract(found[b], found[a])
  return judged(f'{a} below {b}{_by(by)}', gains, by, seconds)


def more(found: dict, a: str, b: str, by=0.0, seconds=0.0) -> Finding:
  """That variant a has more than b, by more than `by`, in the same seeds."""
  gains = np.subtract(found[a], found[b])
  return judged(f'{a} above {b}{_by(by)}', gains, by, seconds)


def at_most(text: str, values, bound: float, seconds=0.0) -> Finding:
  """That numbers, one a seed, are below a bound; the gain is what is left."""
  gains = bound - np.asarray(values)
  return judged(f'{text} below {bound:g}', gains, 0.0, seconds, signed=False)


def _by(by):
  return f' by {by:g}' if by else ''


def worst(findings) -> str:
  """The verdict of several findings: that of the worst."""
  return max((f.verdict for f in findings), key=claims.VERDICTS.index)


def difference(finding: Finding, n: int) -> str:
  """'0.0201 +-0.0032': the mean gain and its standard error."""
  error = f' +-{finding.error:.4f}' if n > 1 else ''
  return f'{finding.mean:.4f}{error}'


def table(found: dict, findings, what: str) -> str:
  """Mean and spread of each variant, then every finding, as text.

  Args:
    found: {variant: [number of each seed]}. what: the numbers are.
  """
  n = len(next(iter(found.values())))
  wide = max(map(len, [what, *found]))
  lines = [f'{what:{wide}}  {"mean":>9} {"lowest":>9} {"highest":>9}']
  for name, row in found.items():
    cells = ' '.join(f'{x:9.4f}' for x in (np.mean(row), min(row), max(row)))
    lines.append(f'{name:{wide}}  {cells}')
  lines.append(f'gain, mean +- standard error of {seeds_text(n)}')
  lines += [f'  {f.text}: {difference(f, n)}: {f.verdict}' for f in findings]
  return '\n'.join(lines)


def seeds_text(n: int) -> str:
  """'one seed', '3 seeds'."""
  return 'one seed' if n == 1 else f'{n} seeds'


def spread(found: dict) -> str:
  """'name mean (lowest to highest)' of {name: numbers}."""

  def one_of(name, row):
    ends = f' ({min(row):.4f} to {max(row):.4f})' if len(row) > 1 else ''
    return f'{name} {np.mean(row):.4f}{ends}'

  return '; '.join(one_of(name, row) for name, row in found.items())


def outcome(run, found: dict, findings, what: str, caveat: str, seconds=0.0):
  """harness.Outcome of findings; says the `table`.

  Args:
    found, what: as for `table`. caveat: about the trainings.
    seconds: CPU-seconds of the longest.
  """
  n = len(next(iter(found.values())))
  run.say(table(found, findings, what))
  slow = f'; {seconds:,.0f} CPU-seconds, more than {LIMIT:,}, for a training'
  return claims.Outcome(
    '; '.join(f.text for f in findings),
    ', '.join(difference(f, n) for f in findings),
    f'{what}: {spread(found)}; {seeds_text(n)}; {caveat}'
    + (slow if seconds > LIMIT else ''),
    all(f.passed for f in findings),
    worst(findings),
    n,
  )
