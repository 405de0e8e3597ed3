"""Claims about recall: attention, a state of one size, and both in one model.

Rows are drawn from a seed, without text. Multi-query associative recall
(arXiv:2312.04927, section 3) binds keys to values, then asks for each key once,
in another order; a phone book (arXiv:2406.07887, section 4) does so with names
of two words and numbers of two digits, and is asked about names that training
has never seen. Each answer counts in the loss, nothing else does:

    k1 v1 k2 v2 ... kN vN  |  k5 v5 k2 v2 ...

A state of S numbers cannot hold N bindings when N is well above S; attention
holds all. Accuracy: share of answers on new rows whose every token is the most
likely one, given those before it.

Legend: B rows, T tokens, N bindings of a row, W words of a name, V of a value.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.models import batch as batch_lib
from paraxis.models import layer
from paraxis.models.mixers import protocol as mixer
from paraxis.train import program as job_lib
from paraxis.train import state as state_lib
from paraxis.train import step as step_lib
from paraxis.train.certify import check
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.plot import figures
from paraxis.train.run import compiling
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


@dataclasses.dataclass(frozen=True)
class Task:
  """What is drawn: `pairs` bindings, each asked for once.

  words: of a name; word i is one of `choices` tokens of its own. digits: of a
  value, likewise. unseen: one name in so many is kept from training; 0: none.
  mix: bindings of a document in training, each for as many rows; several short
  documents are packed into a row. Without short ones attention takes thousands
  of steps to begin.
  """

  pairs: int
  words: int
  digits: int
  choices: int
  values: int
  unseen: int = 0
  mix: tuple = ()

  @property
  def length(self):
    """T."""
    return 2 * self.pairs * (self.words + self.digits)

  @property
  def vocabulary(self):
    """Tokens that may occur."""
    return self.words * self.choices + self.digits * self.values

  def names(self, held_out):
    """(names, W) tokens, of training or kept from it."""
    grid = np.indices((self.choices,) * self.words).reshape(self.words, -1).T
    if self.unseen:
      grid = grid[(grid.sum(1) % self.unseen == 0) == held_out]
    return grid + self.choices * np.arange(self.words)


def draw(task, rows, seed, held_out=False):
  """batch.Batch (B, T) of new rows, in NumPy, a pure function of the seed.

  Training mixes documents of several lengths, held-out rows are one document.
  """
  rng = np.random.default_rng([seed, held_out])
  mix = (task.pairs,) if held_out else task.mix or (task.pairs,)
  parts = [_documents(task, rows // len(mix), n, rng, held_out) for n in mix]
  tokens, weights, segments, positions = map(
    np.concatenate, zip(*parts, strict=True)
  )
  return batch_lib.Batch(
    tokens, np.roll(tokens, -1, 1), segments, positions, weights,
    np.float32(weights.sum()),
  )  # fmt: skip


def _documents(task, rows, n, rng, held_out):
  """(tokens, weights, segments, positions) of rows packed with n bindings."""
  names, each = task.names(held_out), task.pairs // n
  count, wide = rows * each, task.words + task.digits
  order = np.argsort(rng.random((count, len(names))), 1)[:, :n]
  first = task.words * task.choices + task.values * np.arange(task.digits)
  values = first + rng.integers(0, task.values, (count, n, task.digits))
  bound = np.concatenate([names[order], values], 2)
  again = np.argsort(rng.random((count, n)), 1)
  asked = np.take_along_axis(bound, again[..., None], 1)
  tokens = np.concatenate([bound, asked], 1).reshape(rows, -1)
  weights = np.zeros((count, 2, n, wide), np.float32)
  weights[:, 1, :, task.words - 1 : -1] = 1  # where an answer is the next token
  at = np.arange(task.length) + 0 * tokens
  length = task.length // each
  return (
    tokens.astype(np.int32),
    weights.reshape(rows, -1),
    (at // length + 1).astype(np.int32),
    (at % length).astype(np.int32),
  )


def right(model, task, params, batch):
  """() share of the answers whose every digit is the most likely token."""
  x_BTD, _ = model(params, batch)
  hit = model.logits(params, x_BTD).argmax(-1) == batch.targets
  n, wide = task.pairs, task.words + task.digits
  asked = hit.reshape(-1, 2, n, wide)[:, 1, :, task.words - 1 : -1]
  return asked.all(-1).mean()


def train(config, task, every, folder, say):
  """[[step, accuracy on new rows], ...] of a training.

  Args:
    config: schema.Config; its vocabulary and length are those of the task.
    task: `Task`. every: steps between measurements.
    folder: pathlib.Path; a training resumes from the last measurement there.
  """
  # Orbax starts slowly.
  from paraxis.sharding.checkpoint import store as store_lib

  rows = config.train.batch_size
  job = job_lib.of_shapes(config, '', jax.devices()[:1])
  made = step_lib.make(job.built, job.optimizer, config.optimizer.clip_norm)
  jit = functools.partial(jax.jit, compiler_options=compiling.options())
  grads, update = jit(made.grads), jit(made.update, donate_argnums=0)
  measure = jit(functools.partial(right, job.model, task))
  path = folder / workdir_lib.CHECKPOINTS
  with job.context(), store_lib.Store(path, 1, False, say=say) as store:
    state, curve = _resumed(job, store, say)
    held = [job.put(draw(task, rows, seed, True)) for seed in range(4)]
    for t in range(curve[-1][0] if curve else 0, config.train.steps):
      batch = job.put(draw(task, rows, config.train.seed + 1000 + t))
      state, numbers = update(state, *grads(state.params, batch))
      if (t + 1) % every == 0 or t + 1 == config.train.steps:
        found = float(
          jnp.stack([measure(state.params, b) for b in held]).mean()
        )
        curve.append([t + 1, found])
        axes = state_lib.axes(job.state, job.model)
        store.save(t + 1, state_lib.flatten(state), axes, dict(curve=curve))
        say(f'step {t + 1}: loss {float(numbers["loss"]):.3f}, {found:.1%}')
  return curve


def _resumed(job, store, say):
  """(state, curve) of the newest checkpoint, or of the start."""
  found = store.restore_latest_good(state_lib.flatten(job.state))
  if found is None:
    return job.initial_state(), []
  step, tree, meta = found
  say(f'resumed from step {step}')
  return state_lib.unflatten(job.state, tree), meta['curve']


def _config(run, task, pattern, layers, fields):
  """schema.Config of one model on rows of a task; fields: its own."""
  # A recurrence tells tokens apart by their order, attention alone does not.
  position = 'none' if set(pattern) & RECURRENT else 'rope'
  own = {
    'model.vocab_size': task.vocabulary,
    'data.sequence_length': task.length,
    'model.pattern': pattern,
    'model.num_layers': layers,
    'model.position': position,
  }
  return experiment.fields(run.config, SMALL, own, fields)


def recall(run, *, task, models, seeds, more, learned, picture, fields):
  """LEARN: which model answers more questions; draws all curves.

  Args:
    task: fields of `Task`. models: {name: [pattern, layers]}.
    seeds: of the trainings.
    more: list of [name, name, margin]: the share of answers that the first has
      right is above the second's by more, at the end; a margin may be below 0.
    learned: {name: share of right answers} of a model that has learned the
      task; where it has not, a comparison shows a direction only.
    picture: name of the PNG in the results.
    fields: {dotted name: value} of all models and trainings, before those of
      SMALL; a training is measured ten times.
  """
  task = Task(**task)
  configs = {
    name: _config(run, task, pattern, layers, fields)
    for name, (pattern, layers) in models.items()
  }
  shared = next(iter(configs.values()))
  own = shared.train
  curves, seconds = _curves(run, task, configs, seeds, picture)
  run.say(f'wrote {_draw(curves, task, run.results, picture)}')
  last = {name: [c[-1][1] for c in row] for name, row in curves.items()}
  sizes = {name: check.parameters(c) for name, c in configs.items()}
  weak = [n for n, share in learned.items() if np.mean(last[n]) < share]
  found = ablation.outcome(
    run,
    last,
    [ablation.more(last, a, b, margin, seconds) for a, b, margin in more],
    'share of answers right',
    f'on new rows of {task.pairs} bindings, chance '
    f'{task.values**-task.digits:.1%}; {own.steps} steps of {own.batch_size} '
    f'rows of {task.length} tokens; parameters '
    + ', '.join(f'{n} {x:,}' for n, x in sizes.items())
    + f', state of Mamba-2 {shared.model.mamba.state}'
    + ''.join(f'; {n} below {learned[n]:.0%}: not learned' for n in weak),
    seconds,
  )
  reproduced = found.verdict == claims.VERDICTS[0]
  if reproduced and weak:
    return found._replace(verdict=claims.VERDICTS[1])
  return found


def _curves(run, task, configs, seeds, picture):
  """({name: [what `train` returns, of each seed]}, most CPU-seconds)."""
  stem = pathlib.Path(picture).stem
  every = max(next(iter(configs.values())).train.steps // 10, 1)

  def learn(config, folder, say):
    return {'curve': train(config, task, every, folder, say)}

  variants = {f'{stem} {name}': config for name, config in configs.items()}
  also = dict(rows=dataclasses.asdict(task), every=every)
  made = ablation.trained(run, variants, seeds, learn, also)
  curves = ablation.numbers(made, 'curve').values()
  return dict(zip(configs, curves, strict=True)), ablation.cpu_seconds(made)


def _draw(curves, task, folder, picture):
  """Accuracy over steps, its mean over seeds -> path of the PNG."""
  curves = {
    name: np.mean(row, 0).T * [[1], [100]] for name, row in curves.items()
  }
  fig, ax = figures.lines(
    curves,
    'step',
    f'right answers of {task.pairs} (%)',
    loc='center right',
  )
  guess = 100 / task.pairs
  ax.axhline(guess, color='#888888', linestyle=':', linewidth=1)
  ax.annotate('one of the values of the row', (0, guess + 1), color='#555')
  ax.set_ylim(0, 104)
  path = workdir_lib.resolve(folder) / picture
  path.parent.mkdir(parents=True, exist_ok=True)
  return figures.save(fig, path)
