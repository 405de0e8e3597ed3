"""Claims about calls of the model that a method saves, on synthetic tasks.

Small models are trained on rows of train/claims/tasks.py: texts whose words are
to be corrected, pictures that are drawn pixel by pixel. New rows are decoded
one token a call and with a method; the texts must be the same, token for token,
where the judge is `replay`.
"""

import pathlib

import jax.numpy as jnp
import numpy as np

from paraxis.decode.drafts import copying
from paraxis.train.claims import ablation
from paraxis.train.claims import knockouts
from paraxis.train.claims import on_tasks
from paraxis.train.claims import tasks
from paraxis.train.plot import figures
from paraxis.train.run import workdir as workdir_lib

ALONE = dict(method='autoregressive')


def _calls(made, ids, new, how):
  """(texts, calls of the model a token after the first)."""
  found = made.generate(ids, max_new_tokens=new, **how)
  calls = sum(r['calls'] for r in found)
  return [r['tokens'] for r in found], calls / (len(ids) * (new - 1))


def corrections(run, *, task, fields, method, noises, expected, rows, seeds):
  """LEARN: tokens a call of correcting texts, by the share of words to correct.

  Args:
    task: fields of tasks.Words. fields: {'section.field': value} of the
      training. method: fields of schema.Decode.
    noises: shares of words. expected: [one of them, tokens a call that are
      claimed there]. rows: texts of each.
  """
  task, (at, at_least) = tasks.make('words', **task), expected
  models, seconds = on_tasks.models(run, task, fields, seeds)
  gains, same = {noise: [] for noise in noises}, True
  for made, _ in models:
    for noise in noises:
      rng = np.random.default_rng([int(1000 * noise), 9])
      drawn = tasks.make('words', count=task.count, words=task.words,
                         noise=noise)  # fmt: skip
      tokens, _, _ = drawn.document(task.length, rows, rng, True)
      ids = tokens[:, : task.count + 2].tolist()
      greedy = dict(temperature=0.0)
      wanted, alone = _calls(made, ids, task.count, greedy | ALONE)
      texts, ours = _calls(made, ids, task.count, greedy | method)
      same &= texts == wanted
      gains[noise].append(alone / ours)
  path = _draw(gains, run)
  run.say(f'wrote {path}')
  curve = ', '.join(f'{n:g}: {np.mean(x):.2f}' for n, x in gains.items())
  above = [x - at_least for x in gains[at]]
  asked = f'>= {at_least:g} tokens a call'
  found = ablation.outcome(
    run,
    {f'{n:g} misspelled': x for n, x in gains.items()},
    [ablation.judged(asked, above, 0.0, seconds, signed=False)],
    'tokens a call',
    f'by the share of words that are misspelled: {curve}; texts of '
    f'{task.count} words, {models[0][1]:.1%} right; '
    f'{"the same" if same else "NOT the same"} texts as one by one',
    seconds,
  )
  worst = np.mean(gains[max(noises)])
  if (
    same and worst < at_least
  ):  # the more there is to correct, the less is kept
    return found
  return found._replace(passed=False, verdict='')


def pictures(run, *, task, fields, methods, at_most, rows, seeds):
  """LEARN: calls of the model over those of one pixel a call, drawn pictures.

  Args:
    task: fields of tasks.Picture. fields: of the training. methods: {name:
      fields of schema.Decode}; all must hold. at_most: of the calls. rows:
      pictures.
  """
  task = tasks.make('picture', **task)
  models, seconds = on_tasks.models(run, task, fields, seeds)
  shares, same = {name: [] for name in methods}, True
  new, begin = task.length, [[task.colours]] * rows
  for made, _ in models:
    drawn = dict(temperature=1.0, seed=1)
    wanted, _ = _calls(made, begin, new, drawn | ALONE)
    for name, method in methods.items():
      texts, calls = _calls(made, begin, new, drawn | method)
      shares[name].append(calls)
      if method.get('judge', 'replay') == 'replay':
        same &= texts == wanted
  found = ablation.outcome(
    run,
    shares,
    [
      ablation.at_most(f'{name}: calls', x, at_most, seconds)
      for name, x in shares.items()
    ],
    'calls over those of one by one',
    f'{rows} pictures drawn at temperature 1, {models[0][1]:.1%} of held-out '
    'pixels are the most likely colour; with the judge replay '
    f'{"the same" if same else "NOT the same"} pictures as one by one',
    seconds,
  )
  return found if same else found._replace(passed=False, verdict='')


def _draw(gains, run):
  """Tokens a call over the share of words -> path of the PNG."""
  points = sorted((100 * n, np.mean(x)) for n, x in gains.items())
  curves = {'copied from the source': np.array(points).T}
  fig, ax = figures.lines(curves, 'misspelled words (%)', 'tokens a call')
  ax.set_ylim(0, None)
  path = pathlib.Path(workdir_lib.prepare(run.results)) / 'corrections.png'
  return figures.save(fig, path)


# ------------------------------------------------------------------ knock-outs


def never_again():
  """Knock-out: once a word is another, nothing is copied."""

  def wrong(text_S, length, source, place, n):
    order = jnp.arange(text_S.shape[0], dtype=jnp.int32)
    new = text_S[jnp.clip(length - n + order, 0, len(order) - 1)]
    old = text_S[jnp.clip(place + order, 0, len(order) - 1)]
    copied = jnp.all((new == old) | (order >= n))
    return jnp.where(copied, place + n, source).astype(jnp.int32)

  return knockouts.patched(copying, '_followed', wrong)
