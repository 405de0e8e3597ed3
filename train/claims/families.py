"""Families of models on the same text, and claims about what they learn.

A family is what a few fields of the configuration say: a pattern of layers
(models/layer.py), a tokenizer. All else is shared: width, depth, optimizer,
batches. Held-out loss is reported in bits per byte and drawn beside the
training losses. The number of parameters differs between families.

What a family has to beat is `unigram`: guessing every held-out token by how
often it is there, which no model without context does better.
"""

import itertools
import math

import numpy as np

from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.data import batch_ramp
from paraxis.train.data import batches
from paraxis.train.data import token_cache
from paraxis.train.plot import figures
from paraxis.train.plot import losses as plot
from paraxis.train.run import metrics

PICTURE = 'families.png'


def _draw(found, rows, path):
  """Smoothed losses of all families, and held-out bits per byte as bars.

  Args:
    found: {family: [bits per byte of each seed]}; bars are means.
    rows: {family: metrics of its last seed}.
  """
  found = {name: sum(row) / len(row) for name, row in found.items()}
  fig = figures.make(9.5, 3.8)
  loss, bars = fig.subplots(1, 2, width_ratios=(3, 2))
  colours = dict(zip(found, itertools.cycle(figures.COLOURS), strict=False))
  for name, row in rows.items():
    steps, values = plot.curve(row, 'train/loss')
    loss.plot(steps, plot.smooth(values), color=colours[name], label=name)
  order = sorted(found, key=lambda name: found[name], reverse=True)
  drawn = bars.barh(
    order,
    [found[name] for name in order],
    color=[colours[name] for name in order],
  )
  bars.bar_label(drawn, fmt='%.3f', padding=3)
  bars.set_xlim(0, 1.2 * max(found.values()))
  bars.set_xlabel('held-out text (bits per byte)')
  loss.set_xlabel('step')
  loss.set_ylabel('training loss (nats per token)')
  loss.legend(frameon=False)
  figures.tidy(loss)
  bars.spines[['top', 'right']].set_visible(False)
  return figures.save(fig, path)


def label(name, config) -> str:
  """Of a family; bits per byte of masks are a bound (run/evaluate.py)."""
  bound = config.train.objective != 'next_token'
  return f'{name} (upper bound)' if bound else name


def train(run, configs, seeds, folder=None):
  """({family: [bits per byte of each seed]}, most CPU-seconds), drawn.

  Args:
    run: harness.Run; the trainings lie in its results, and the picture does
      unless it has a folder of its own.
    configs: {name: schema.Config}. seeds: of the trainings.
  """
  trainings = ablation.trained(run, configs, seeds)
  return drawn(run, trainings, (folder or run.results) / PICTURE)


def drawn(run, trainings, path):
  """As `train`, of {family: [ablation.Training of each seed]}."""
  found = ablation.numbers(trainings, 'bits_per_byte')
  named = {n: label(n, t[0].config) for n, t in trainings.items()}
  rows = {named[n]: metrics.read(t[-1].folder) for n, t in trainings.items()}
  shown = {named[n]: row for n, row in found.items()}
  run.say(f'wrote {_draw(shown, rows, path)}')
  return found, ablation.cpu_seconds(trainings)


def unigram(config) -> float:
  """Bits per byte of the held-out text, its tokens' frequencies known.

      sum_v -n_v log2(n_v / n) / bytes

  n_v of all n targets that an evaluation of the config reads are token v; of
  train.objective=masked all tokens count, not those that are masks this time.
  """
  clean = {'train.objective': 'next_token', 'model.visibility': 'causal',
           'model.mask_id': -1, 'model.block': 0}  # fmt: skip
  config = experiment.fields(config, clean)
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  corpus = token_cache.tokens(config, tokenizer, lambda line: None)
  held_out = batches.evaluation(config, corpus)
  read = [held.batch_at(i) for held in held_out for i in range(len(held))]
  targets = np.concatenate([b.targets[b.weights > 0] for b in read])
  count = np.unique(targets, return_counts=True)[1]
  bits = math.fsum(-count * np.log2(count / count.sum()))
  return bits / sum(held.n_bytes for held in held_out)


def tokens(config) -> int:
  """Tokens that a training reads."""
  steps, ramp = config.train.steps, batch_ramp.of(config)
  rows = ramp.before(steps) if ramp else steps * config.train.batch_size
  return rows * config.data.sequence_length


def _learned(run, families, fields, seeds):
  """({label: [bits per byte]}, seconds, findings that all are below their
  `unigram`, what was read, {family: `label`}) of trainings as `learn` has
  them."""
  configs = {
    n: experiment.fields(run.config, fields, f) for n, f in families.items()
  }
  bounds = {n: round(unigram(c), 3) for n, c in configs.items()}
  found, seconds = train(run, configs, seeds)
  named = {n: label(n, c) for n, c in configs.items()}
  read = {f'{tokens(c):,}' for c in configs.values()}
  below = [
    ablation.at_most(named[n], found[n], bounds[n], seconds) for n in families
  ]
  found = {named[n]: row for n, row in found.items()}
  return found, seconds, below, f'{", ".join(sorted(read))} tokens', named


def _outcome(run, found, findings, read, seconds):
  return ablation.outcome(
    run,
    found,
    findings,
    'bits per byte',
    f'of held-out text after {read}; the bounds are its tokens guessed by '
    'their frequency alone',
    seconds,
  )


def learn(run, *, families, fields, seeds, better):
  """LEARN: held-out bits per byte of each family after the same training.

  All are below `unigram`, by their own tokens.

  Args:
    families: {name: {'section.field': value}}. fields: likewise, of all.
    seeds: of the trainings.
    better: list of [name, name, by]: the first has fewer by more than so many.
  """
  found, seconds, below, read, named = _learned(run, families, fields, seeds)
  more = [
    ablation.less(found, named[a], named[b], by, seconds) for a, b, by in better
  ]
  return _outcome(run, found, below + more, read, seconds)


def near(run, *, families, fields, seeds, within):
  """LEARN: families have hardly more bits per byte than others.

  Args:
    families, fields, seeds: as of `learn`.
    within: list of [name, name, share]: the first has at most so much more.
  """
  found, seconds, below, read, named = _learned(run, families, fields, seeds)
  pairs = [(named[a], named[b], share) for a, b, share in within]
  more = [
    ablation.at_most(
      f'{a} above {b}, as a share,',
      np.divide(found[a], found[b]) - 1,
      share,
      seconds,
    )
    for a, b, share in pairs
  ]
  return _outcome(run, found, below + more, read, seconds)
