"""Claims about sampling from models of recurrent depth (decode/wavefront.py).

Models learn to add numbers. Cost is counted in passes over the core one after
the other: a pass for many tokens at once is one.
"""

import pathlib

import jax
import numpy as np

from paraxis.models import build
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness
from paraxis.train.claims import on_tasks
from paraxis.train.claims import tasks
from paraxis.train.plot import figures
from paraxis.train.run import workdir as workdir_lib

ALONE = dict(method='autoregressive')
PASSES = 'model.recurrence.iterations'


def alone(run, *, passes, inner, prompts, new, within):
  """EQ: a wavefront of one token is decoding one by one, and so is a whole row.

  Args:
    passes: r of the model, of random parameters. inner: passes of a call.
    prompts: lists of ids. new: tokens after each.
  """
  with jax.enable_x64(True):
    same, worst, stepped = _alone(run, passes, inner, prompts, new)
  return harness.Outcome(
    f'the same text, log probabilities within {within:g}',
    f'{"the same" if same else "OTHER"} text, {worst:.2g}',
    f'{passes} passes, {inner} a call, {len(prompts)} prompts, {new} tokens, '
    f'greedy and drawn; float64; cached steps and whole rows: {stepped:.2g}',
    same and max(worst, stepped) <= within,
  )


def _alone(run, passes, inner, prompts, new):
  """(whether texts are the same, largest gaps of log probabilities and of
  features, cached against whole rows)."""
  made = on_tasks.random(run, {PASSES: passes})
  same, worst = True, 0.0
  how = dict(method='wavefront', wavefront=dict(width=1, inner=inner))
  for draw in (dict(temperature=0.0), dict(temperature=1.0, seed=3)):
    one, ours = (
      made.generate(prompts, max_new_tokens=new, **draw, **method)
      for method in (ALONE, how)
    )
    for a, b in zip(one, ours, strict=True):
      same &= a['tokens'] == b['tokens']
      gap = np.subtract(a['logprobs'], b['logprobs'])
      worst = max(worst, float(abs(gap).max()))
  model = made.built.model
  with build.use(made.built):
    params = experiment.random_parameters(model)
    rows = experiment.documents(2, 12, model.config.vocab_size)
    whole = jax.jit(model.features)(params, rows)[0]
    cached = experiment.stepped(model, model.unstack(params), rows, 5)
  return same, worst, float(abs(whole - cached).max())


def fewer_passes(
  run, *, task, fields, wavefront, each, bounds, rows, seeds
):  # fmt: skip
  """LEARN: passes of one by one, as few as are right as often, over ours.

  After the prompt on both sides: reading it makes the first token of one by
  one, and none of a wavefront. The ratio with it is shown, not judged, and so
  is that of layers one after the other: a call has those around the core too.

  Args:
    task: fields of tasks.Addition. fields: of the training. wavefront: fields
      of configs.base.decode.Wavefront. each: passes that a token may have, one
      by one; the last one is r of the model. bounds: [least ratio, most of the
      right sums that fewer passes, or ours, may lose]. rows: sums of a seed.
  """
  task, (at_least, lost) = tasks.make('addition', **task), bounds
  given = {PASSES: each[-1]} | fields
  found, seconds = on_tasks.trained(run, task, given, seeds)
  ratios, losses, wrong, points = [], [], [], []
  tokens = task.digits + 1
  for (config, params, _), seed in zip(found, seeds, strict=True):
    asked, answers = _sums(task, rows, seed)
    curve = {}
    for passes in each:
      few = experiment.fields(config, {PASSES: passes})
      made = on_tasks.generator(few, lambda _, params=params: params)
      curve[passes] = _right(made, asked, answers, **ALONE)[0]
    best = curve[each[-1]]
    enough = min(n for n, right in curve.items() if right >= best - lost)
    right, calls = _right(
      made, asked, answers, method='wavefront', wavefront=wavefront
    )
    passes = calls * wavefront['inner']
    ratios.append(enough * (tokens - 1) / passes)
    losses.append(best - right)
    wrong.append(1 - best)
    points.append((curve, passes, right, enough))
  path = _draw(points, tokens, run)
  run.say(f'wrote {path}')
  return ablation.outcome(
    run,
    {'fewer passes': ratios, 'right sums lost': losses},
    [
      ablation.judged(
        f'>= {at_least:g} times fewer passes', [r - at_least for r in ratios],
        0.0, seconds, signed=False,
      ),
      ablation.at_most('right sums lost', losses, lost, seconds),
      ablation.at_most('wrong one by one', wrong, 0.1, seconds),
    ],
    'fewest passes of one by one over ours, after the prompt',
    f'{task.about}, {rows} of a seed, greedy, at most {lost:.0%} lost; '
    + _in_numbers(points, tokens, found[0][0].model, wavefront['inner']),
    seconds,
  )  # fmt: skip


def _in_numbers(points, tokens, model, inner):
  """Passes of both sides, and their ratios as others may count."""
  core, most = model.recurrence.core, max(points[0][0])
  around = model.num_layers - core
  ours, enough = np.array([(x, n) for _, x, _, n in points]).T
  layers = (tokens - 1) * (core * enough + around)
  layers = layers / (core * ours + around * ours / inner)
  return (
    f'one by one needs {", ".join(f"{n:g}" for n in enough)} passes for each '
    f'of {tokens - 1} tokens, ours has {", ".join(f"{n:.2f}" for n in ours)} '
    f'for all {tokens}; with those that read the prompt, {most} of ours: '
    f'{np.mean(enough * tokens / (ours + most)):.2f} times fewer; in layers '
    f'one after the other, with the {around} around the core in every call: '
    f'{np.mean(layers):.2f} times fewer; over the {most} of training: '
    f'{np.mean(most * (tokens - 1) / ours):.1f} times fewer'
  )


def _sums(task, rows, seed):
  """(prompts, answers), lists of ids, of new sums."""
  rng = np.random.default_rng([seed, 11])
  tokens, targets, _ = task.document(task.length, rows, rng, True)
  first = 2 * task.digits + 2
  return tokens[:, :first].tolist(), targets[:, first - 1 :].tolist()


def _right(made, asked, answers, **how):
  """(share of the sums that are right, calls a sum)."""
  found = made.generate(
    asked, max_new_tokens=len(answers[0]), temperature=0.0, **how
  )
  right = [r['tokens'] == a for r, a in zip(found, answers, strict=True)]
  return np.mean(right), np.mean([r['calls'] for r in found])


def _draw(points, tokens, run):
  """Right sums over passes a text, of so many tokens -> path of the PNG."""
  curves = {}
  for n, (curve, ours, right, _) in enumerate(points):
    name = f', seed {n}'
    one = sorted((n * (tokens - 1), 100 * x) for n, x in curve.items())
    curves[f'one by one{name}'] = np.array(one).T
    curves[f'wavefront{name}'] = np.array([[ours], [100 * right]])
  fig, _ = figures.lines(
    curves,
    'passes over the core a text, one after the other, after the prompt',
    'right sums (%)',
  )
  path = pathlib.Path(workdir_lib.prepare(run.results)) / 'passes.png'
  return figures.save(fig, path)
