"""Claims about held-out text after the config's own training, and baselines.

The training is one variant of train/claims/ablation.py, kept under the key of
what it depends on: one of other code is not taken for it.
"""

import functools
import math

from paraxis.configs.base import errors
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.data import baselines as baselines_lib
from paraxis.train.data import corpus
from paraxis.train.data import readers
from paraxis.train.data import tables
from paraxis.train.plot import losses as plot
from paraxis.train.run import evaluate

# More held-out text than this is not compressed for comparison after a run, nor
# is any of larger files, all of which would be in memory at once.
COMPARED_BYTES, READ_BYTES = 20_000_000, 400_000_000


def _learn(config, folder, say):
  devices = experiment.devices_of(config)
  found = claims.finish(config, folder, say, devices=devices)
  return {n: getattr(found, n) for n in ('bits_per_byte', 'domains', 'n_bytes')}


def trained(run) -> evaluate.Evaluation:
  """What the config's own training reaches; it is drawn, and tabled."""
  variants, seeds = {'own': run.config}, [run.config.train.seed]
  [one] = ablation.trained(run, variants, seeds, _learn)['own']
  found = evaluate.Evaluation(**one.record['numbers'])
  run.say(domain_table(found, baselines(run.config)))
  run.say(f'wrote {plot.draw([one.folder], run.results / plot.NAME)}')
  return found


def baselines(config, xz=True) -> baselines_lib.Baselines:
  """Of the config's held-out text; xz takes seconds a megabyte."""
  data = config.data
  texts = [(s, corpus.fingerprint(s)) for s in corpus.source_files(data.path)]
  given = data.path, data.held_out_fraction, xz, data.text_key
  return _baselines(tuple(texts), *given)


@functools.lru_cache(maxsize=2)
def _baselines(texts, *given):
  del texts  # of the key alone: a text may be written anew
  return baselines_lib.text_baselines(*given)


def domain_table(evaluation, base):
  """Model against gzip -9, domain by domain, in bits per byte: text.

  Args:
    evaluation: evaluate.Evaluation.
    base: baselines.Baselines; xz lines are left out where it did not run.
  """
  rows = [
    (domain, bits, base.gzip_by_domain.get(domain, math.nan))
    for domain, bits in evaluation.domains.items()
  ]
  rows.append(('all', evaluation.bits_per_byte, base.gzip))
  width = max(len(name) for name, *_ in rows)
  lines = [f'{"bits per byte":{width + 2}} {"model":>7} {"gzip -9":>8}']
  for name, bits, gzip in rows:
    note = '  gzip is better' if gzip < bits else ''
    lines.append(f'  {name:{width}} {bits:7.3f} {gzip:8.3f}{note}')
  if not math.isnan(base.xz):
    lines.append(f'  xz -9e {base.xz:.3f}, given the training text too ')
    lines[-1] += f'{base.xz_given_training:.3f}'
  return '\n'.join(lines)


def _other_text(config):
  """Why a model's held-out text is not that of the baselines; '': it is."""
  if config.train.eval_batches:
    return 'train.eval_batches leaves text out'
  if config.data.sources:
    return 'data.sources mixes several texts'
  return ''


def against_gzip(config, evaluation):
  """The model and gzip -9 on the same held-out text, or why not: text."""
  if why := _other_text(config):
    return f'gzip -9: not compared, {why}'
  try:  # the run is over: whatever became of its text is no error of it
    return _compared(config, evaluation)
  except (errors.UserError, OSError) as error:
    return f'gzip -9: not compared, {error}'


def _compared(config, evaluation):
  """`against_gzip`, which reads the text again."""
  config = corpus.with_places(config)
  sources = corpus.source_files(config.data.path)
  key = config.data.text_key
  chat = any(readers.is_chat(s, key) for s in sources)
  if chat or any(readers.kind(s.file) == 'bin' for s in sources):
    return 'gzip -9: not compared, the data are conversations or tokens'
  if evaluation.n_bytes > COMPARED_BYTES:
    return (
      f'gzip -9: not compared, {evaluation.n_bytes:,} bytes of held-out text '
      f'are more than {COMPARED_BYTES:,}'
    )
  size = sum(
    file.stat().st_size
    for s in sources
    for file in (tables.dataset_files(s.file) if s.file.is_dir() else [s.file])
  )
  if size > READ_BYTES:
    return (
      f'gzip -9: not compared, files of {size:,} bytes are more than '
      f'{READ_BYTES:,}'
    )
  return domain_table(evaluation, baselines(config, xz=False))


def at_most(run, *, bits_per_byte):
  """LEARN: held-out bits per byte after training, at most a bound."""
  measured = trained(run)
  return claims.Outcome(
    f'<= {bits_per_byte:.2f}',
    f'{measured.bits_per_byte:.4f}',
    f'{run.config.train.steps} steps, {measured.n_bytes:,} bytes of held-out '
    'text',
    measured.bits_per_byte <= bits_per_byte,
  )


def _both(run):
  """(what training reaches, the baselines) of the same held-out text."""
  if why := _other_text(run.config):
    raise errors.UserError(
      f'gzip and xz read all held-out text of data.path, but {why} '
      f'(train.eval_batches={run.config.train.eval_batches}, '
      f'data.sources={run.config.data.sources!r}): the claim needs '
      "train.eval_batches=0 and data.sources=''."
    )
  return trained(run), baselines(run.config)


def below_xz(run):
  """LEARN: held-out bits per byte below xz -9e on the same text alone."""
  measured, base = _both(run)
  return claims.Outcome(
    f'< {base.xz:.3f}',
    f'{measured.bits_per_byte:.4f}',
    f'{run.config.train.steps} steps, {measured.n_bytes:,} bytes; xz given the '
    f'training text too has {base.xz_given_training:.3f}',
    measured.bits_per_byte < base.xz,
  )


def below_gzip(run):
  """LEARN: held-out bits per byte below gzip -9 on the same text."""
  measured, base = _both(run)
  lost = [
    domain
    for domain, bits in measured.domains.items()
    if bits >= base.gzip_by_domain.get(domain, math.inf)
  ]
  caveat = (
    f'xz -9e has {base.xz:.3f}, given the training text too '
    f'{base.xz_given_training:.3f}; '
  )
  if lost:
    caveat += f'gzip wins in {", ".join(lost)}'
  else:
    caveat += 'no domain is lost'
  if 'translation' in measured.domains:
    caveat += (
      '; translation may lose: gzip copies the English strings that a document '
      'repeats'
    )
  return claims.Outcome(
    f'< {base.gzip:.3f}',
    f'{measured.bits_per_byte:.4f}',
    caveat,
    measured.bits_per_byte < base.gzip,
  )
