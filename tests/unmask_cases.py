"""Scores and counts of decode/unmask/policies.py, one place at a time."""

import math


def score(name, logits, token):
  """Of one place, from its logits."""
  top = max(logits)
  p = [math.exp(z - top) for z in logits]
  p = [x / sum(p) for x in p]
  if name == 'confidence':
    return p[token]
  p = sorted(p)
  if name == 'margin':
    return p[-1] - p[-2]
  return 1 + sum(x * math.log(x) for x in p if x) / math.log(len(p))


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
    taken = order[: 2**call]
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
