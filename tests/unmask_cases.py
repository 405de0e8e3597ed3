"""Scores and counts of decode/unmask/policies.py, one place at a time; and the
smallest training on lists."""

import math

from paraxis.train.claims import tasks

TASK = dict(least=4, most=4, items=6)
FIELDS = {
  'model.d_model': 32, 'model.num_layers': 2, 'model.num_heads': 4,
  'model.d_ff': 32, 'model.visibility': 'full',
  'model.mask_id': tasks.make('lists', **TASK).mask,
  'train.objective': 'masked', 'train.steps': 2, 'train.batch_size': 8,
  'optimizer.warmup_steps': 1,
}  # fmt: skip


def score(name, logits, token):
  """Of one place, from its logits."""
  top = max(logits)
  p = [math.exp(z - top) for z in logits]
  p = [x / sum(p) for x in p]
  if name in ('confidence', 'filter'):
    return p[token]
  p = sorted(p)
  if name == 'margin':
    return p[-1] - p[-2]
  return 1 + sum(x * math.log(x) for x in p if x) / math.log(len(p))


def credited(policy, logits, credit):
  """Logits of one place; adds to its credit (V,)."""
  top = max(logits)
  p = [math.exp(z - top) for z in logits]
  best = p.index(max(p))
  credit *= policy.credit_decay
  credit[best] += (1 / sum(p)) ** policy.credit_power
  gain = [policy.credit_weight * math.log1p(c) for c in credit]
  return logits + gain


def filtered(own, confidence):
  """Scores of a canvas by a filter, from its confidences."""
  hidden = [
    sum(c * w[j] for c, w in zip(confidence, own['inner'], strict=True))
    + own['inner_bias'][j]
    for j in range(len(confidence))
  ]
  hidden = [h / (1 + math.exp(-h)) for h in hidden]
  odds = [
    sum(h * w[j] for h, w in zip(hidden, own['outer'], strict=True))
    + own['outer_bias'][j]
    for j in range(len(confidence))
  ]
  return [1 / (1 + math.exp(-x)) for x in odds]


def chosen(policy, scores, masks, call):
  """Places of one row that become final.

  Args:
    policy: Unmask. scores: place -> score. masks: ascending places.
  """
  order = sorted(masks, key=lambda c: (-scores[c], c))
  if not order:
    return set()
  above = [c for c in order if scores[c] > policy.threshold]
  if policy.count == 'fixed':
    taken = order[: policy.tokens]
  elif policy.count == 'ascending':
    taken = order if len(order) == 2**call + 1 else order[: 2**call]
  elif policy.count == 'threshold':
    taken = above
  elif policy.count == 'factor':
    passing = [
      n for n, c in enumerate(order, 1)
      if (n + 1) * (1 - scores[c]) < policy.factor
    ]  # fmt: skip
    taken = order[: max(passing, default=0)]
  else:
    taken, run = above, []
    for c in [*masks, None]:
      if run and c != run[-1] + 1:
        taken = [*taken, min(run, key=lambda c: (-scores[c], c))]
        run = []
      run.append(c)
  return {*taken, order[0]}
