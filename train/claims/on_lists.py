"""Masked models on lists, one for each seed, for claims about decoding.

A small masked model is trained on every operation of lists.py and answers new
lists under policies of decode/unmask/policies.py. All configs share these
models, in the folder SHARED beside their results; a config whose training
differs trains its own.
"""

import math

import numpy as np

from paraxis.train.claims import ablation
from paraxis.train.claims import harness
from paraxis.train.claims import lists
from paraxis.train.claims import on_tasks

SHARED = 'masked_lists', 'shifted_lists'
TOGETHER = 50  # lists that are decoded in one batch
NEW = 10_000  # added to a seed: lists to learn from, none is asked for later
WRONG = 0.15  # of answers one by one; a model that knows nothing loses nothing


def shared(run):
  """A harness.Run whose trainings are in the folder that configs share."""
  name = SHARED[run.config.model.mask_shift]
  other = harness.Run(run.config, run.results.with_name(name), run.say)
  other.fresh = run.fresh
  return other  # of no mechanism: several configs share its trainings


def models(run, task, fields, seeds):
  """on_tasks.models of that folder."""
  return on_tasks.models(shared(run), task, fields, seeds)


def trained(run, task, fields, seeds):
  """(lists.Lists, [(seed, schema.Config, {path: array})], CPU-seconds of a
  training) of that folder; task: fields of Lists."""
  task = lists.Lists(**task)
  found, seconds = on_tasks.trained(shared(run), task, fields, seeds)
  rows = [
    (seed, config, params)
    for seed, (config, params, _) in zip(seeds, found, strict=True)
  ]
  return task, rows, seconds


def questions(task, operation, n, rows, seed):
  """[(prompt ids, items)] of new lists of n items."""
  rng = np.random.default_rng([seed, n, lists.OPERATIONS.index(operation), 7])
  items = [rng.permutation(task.items)[:n].tolist() for _ in range(rows)]
  return [(task.prompt(operation, x), x) for x in items]


def answered(made, task, asked, n, policy, **options):
  """What `generate` gives for prompts [(ids, items)], n tokens each; policy:
  None: from left to right."""
  model = made.built.model.config
  # Where a token is predicted at the one before it, a row has one more.
  first = [0] if model.visibility == 'causal' or model.mask_shift else []
  how: dict = dict(method='autoregressive')
  if policy is not None:
    how = dict(method='unmask', unmask=dict(block=task.most) | policy)
  return made.generate(
    [[*first, *ids] for ids, _ in asked], max_new_tokens=n, **how, **options
  )


def answers(made, task, operation, n, policy, rows, seed=0, temperature=1.0):
  """[(right, lists.chances, calls, `correlation`)] of new lists of n items."""
  asked = questions(task, operation, n, rows, seed)
  found = answered(
    made, task, asked, n, policy, trace=True, temperature=temperature, seed=seed
  )
  return [
    (
      lists.is_right(task, operation, x, r['tokens']),
      lists.chances(task, operation, x, drawn(r['trace'])),
      r['calls'],
      correlation(operation, r['trace'].final.sum(1).tolist()),
    )
    for (_, x), r in zip(asked, found, strict=True)
  ]


def correlation(operation, counts) -> float:
  """Nats that calls of so many tokens lose: the sum of the conditional total
  correlations of what is drawn together, its expectation over right answers.

    shuffle   ln(m^k (m - k)! / m!),  k tokens of m open places
    replace   m / n (k H(1/m, 1 - 1/m) - H(1/m, .., 1/m, 1 - k/m)),  m / n: of n
              tokens none is replaced yet

  (ParallelBench, arXiv:2510.04767, section 3.) One that knows all is right with
  probability exp(- this) at least, with shuffles exactly (`lists.ceiling`).
  """
  n = left = sum(counts)
  total, of = 0.0, lambda x: x * math.log(x) if x else 0.0
  for k in filter(None, counts):
    if operation == 'shuffle':
      total += k * math.log(left) - math.log(math.perm(left, k))
    elif operation == 'replace':
      total += (k * (of(left) - of(left - 1)) - of(left) + of(left - k)) / n
    left -= k
  return total


def drawn(trace):
  """[{place: token}] that calls made final; one canvas has all places."""
  every = zip(trace.final, trace.tokens, strict=True)
  return [{c: ids[c] for c in np.flatnonzero(final)} for final, ids in every]


def _greedy(made, task, operation, n, policy, rows, seed, **options):
  """(share right, calls a text, [ids of prompt and text], texts' results)."""
  asked = questions(task, operation, n, rows, seed)
  found = []
  for at in range(0, rows, TOGETHER):  # of one shape: one program of a policy
    part = asked[at : at + TOGETHER]
    found += answered(made, task, part, n, policy, temperature=0.0, **options)
  right = [
    lists.is_right(task, operation, x, r['tokens'])
    for (_, x), r in zip(asked, found, strict=True)
  ]
  texts = [
    [*ids, *r['tokens']] for (ids, _), r in zip(asked, found, strict=True)
  ]
  calls = np.mean([r['calls'] for r in found])
  return np.mean(right), calls, texts


def over(made, task, operations, n, policy, rows, seed, **options):
  """(share right, calls a text, [texts]) over operations: `_greedy`."""
  every = [
    _greedy(made, task, o, n, policy, rows, seed, **options) for o in operations
  ]
  right, calls = np.mean([x[:2] for x in every], 0)
  return right, calls, [x for *_, texts in every for x in texts]


def fastest(tried, right, lost):
  """Number of the one with the fewest calls whose answers are as often right,
  but for `lost`; the last one if none is."""
  able = [i for i, x in enumerate(tried) if x[0] >= right - lost]
  return min(able, key=lambda i: tried[i][1], default=-1)


def findings(measured, bounds, seconds):
  """[ablation.Finding] of what takes fewer calls and answers as well.

  Args:
    measured: three lists, one number a seed: ratios of calls, shares of right
      answers that are lost, and of answers one by one that are wrong. bounds:
      (least ratio, most of the share that may be lost). seconds: CPU-seconds of
      the longest training.
  """
  (ratios, losses, wrong), (at_least, lost) = measured, bounds
  text, gains = (
    f'>= {at_least:g} times fewer calls',
    np.array(ratios) - at_least,
  )
  return [
    ablation.judged(text, gains.tolist(), 0.0, seconds, signed=False),
    ablation.at_most('right answers lost', losses, lost, seconds),
    ablation.at_most('wrong one by one', wrong, WRONG, seconds),
  ]
