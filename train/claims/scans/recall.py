"""Claims about what a state keeps: synthetic tasks, and models of their rows.

The tasks, train/claims/tasks.py: associative recall, a phone book, parity, hops
through a row. A state of S numbers cannot hold N bindings when N is well above
S, attention holds all; a linear recurrence with decays in (0, 1) cannot flip a
bit, a nonlinear one can. Accuracy: share of answers on new rows whose every
token is the most likely one, given those before it.

Legend: B rows, T tokens.
"""

import dataclasses
import pathlib

import numpy as np

from paraxis.models import layer
from paraxis.models.mixers import protocol as mixer
from paraxis.train.certify import check
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import on_tasks
from paraxis.train.claims import tasks
from paraxis.train.plot import figures
from paraxis.train.run import workdir as workdir_lib

RECURRENT = {
  k for k, m in layer.MIXERS.items() if m.capabilities == mixer.RECURRENT
}
# Of every model; the state of Mamba-2 is well below the bindings of a row.
SMALL = {
  'model.d_model': 64,
  'model.num_heads': 2,
  'model.num_kv_heads': 0,
  'model.mlp': 'none',
  'model.qk_norm': 'head',
  'model.attention_scale': 3 * 32**-0.5,
  'model.rope_theta': 100.0,  # rows are short
  'model.embedding_scale': 50.0,  # a token counts as much as what it attends to
  'model.mamba.head_dim': 32,
  'model.mamba.state': 8,
  'optimizer.final_fraction': 0.3,
}


def _config(run, task, fields, pattern, layers, own=()):
  """schema.Config of one model on rows of a task; fields: of all, own: its."""
  # A recurrence tells tokens apart by their order, attention alone does not.
  position = 'none' if set(pattern) & RECURRENT else 'rope'
  given = {
    'model.vocab_size': task.vocabulary,
    'data.sequence_length': task.length,
    'model.pattern': pattern,
    'model.num_layers': layers,
    'model.position': position,
  }
  return experiment.fields(run.config, SMALL, given, fields, dict(own))


def recall(run, *, task, models, seeds, more, learned, picture, fields):
  """LEARN: which model answers more questions; draws all curves.

  Args:
    task: its kind and fields, train/claims/tasks.py.
    models: {name: [pattern, layers]}, or [pattern, layers, fields of its own].
    seeds: of the trainings.
    more: list of [name, name, margin]: the share of answers that the first has
      right is above the second's by more, at the end; a margin may be below 0.
    learned: {name: share of right answers} of a model that has learned the
      task; where it has not, a comparison with it shows nothing: it FAILS.
    picture: name of the PNG in the results.
    fields: {dotted name: value} of all models and trainings, in place of those
      of SMALL; the first model is measured ten times, all as often in steps.
  """
  made = tasks.make(**task)
  configs = {name: _config(run, made, fields, *m) for name, m in models.items()}
  curves, seconds = _curves(run, made, configs, seeds, picture)
  run.say(f'wrote {_draw(curves, made.guess, run.results, picture)}')
  last = {name: [c[-1][1] for c in row] for name, row in curves.items()}
  weak = [n for n, share in learned.items() if np.mean(last[n]) < share]
  found = ablation.outcome(
    run,
    last,
    [ablation.more(last, a, b, margin, seconds) for a, b, margin in more],
    'share of answers right',
    _caveat(made, configs, curves)
    + ''.join(f'; {n} below {learned[n]:.0%}: not learned' for n in weak),
    seconds,
  )
  if weak:
    return found._replace(passed=False, verdict=claims.VERDICTS[2])
  return found


def _caveat(task, configs, curves):
  """What was asked, of which models, and shares besides the one compared."""
  shared = next(iter(configs.values()))
  own = shared.train
  sizes = ', '.join(f'{n} {check.parameters(c):,}' for n, c in configs.items())
  steps = {n: c.train.steps for n, c in configs.items()}
  each = ', '.join(f'{n} {k:,}' for n, k in steps.items())
  trained = f'{own.steps:,}' if len(set(steps.values())) == 1 else each
  ends = lambda at: {n: [c[-1][at] for c in row] for n, row in curves.items()}
  also = [
    f'; {what}: {ablation.spread(ends(at))}'
    for at, what in enumerate(task.also, 2)
  ]
  return (
    f'{task.about}; {trained} steps of {own.batch_size} rows of '
    f'{task.length} tokens; parameters {sizes}, state of Mamba-2 '
    f'{shared.model.mamba.state}' + ''.join(also)
  )


def _curves(run, task, configs, seeds, picture):
  """({name: [what `train` returns, of each seed]}, most CPU-seconds)."""
  stem = pathlib.Path(picture).stem
  every = max(next(iter(configs.values())).train.steps // 10, 1)

  def learn(config, folder, say):
    return {'curve': on_tasks.train(config, task, every, folder, say)}

  variants = {f'{stem} {name}': config for name, config in configs.items()}
  rows = dataclasses.asdict(task) | dict(kind=type(task).__name__)
  also = dict(rows=rows, every=every)
  made = ablation.trained(run, variants, seeds, learn, also)
  curves = ablation.numbers(made, 'curve').values()
  return dict(zip(configs, curves, strict=True)), ablation.cpu_seconds(made)


def _draw(curves, guess, folder, picture):
  """Accuracy over steps, its mean over seeds -> path of the PNG."""
  curves = {
    name: np.mean(row, 0)[:, :2].T * [[1], [100]]
    for name, row in curves.items()
  }
  fig, ax = figures.lines(
    curves, 'step', 'right answers (%)', loc='center right'
  )
  share, who = guess
  ax.axhline(100 * share, color='#888888', linestyle=':', linewidth=1)
  ax.annotate(who, (0, 100 * share + 1), color='#555')
  ax.set_ylim(0, 104)
  path = workdir_lib.resolve(folder) / picture
  path.parent.mkdir(parents=True, exist_ok=True)
  return figures.save(fig, path)
