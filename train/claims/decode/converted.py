"""Claims about an autoregressive model that goes on as one of blocks of masks.

Trainings on train/claims/lists.py, answered by train/claims/on_lists.py.
"""

import numpy as np

from paraxis.train.claims import ablation
from paraxis.train.claims import lists
from paraxis.train.claims import on_lists
from paraxis.train.claims import on_tasks
from paraxis.train.claims import tasks


def fewer_calls(run, *, on, blocks, policy, operations, bounds, lists_of):
  """LEARN: calls of an autoregressive model over those of the one that it was
  converted to (Fast-dLLM v2, arXiv:2509.26328, section 3.2).

  After the prompt on both sides: reading it draws the first token from left to
  right, and none of blocks. The ratio with it is shown, not judged.

  Args:
    on: dict(task, fields, seeds): fields of lists.Lists, {'section.field':
      value} of the first training. blocks: those that the second one changes,
      which begins with the parameters of the first. policy: fields of
      decode.unmask. operations: of lists.OPERATIONS. bounds: [least ratio of
      calls, most of the share of right answers that may be lost, most tokens of
      the second training over those of the first]. lists_of: [items, lists for
      an operation and a seed].
  """
  (n, rows), (at_least, lost, share) = lists_of, bounds
  task, fields = tasks.make('lists', **on['task']), on['fields']
  seeds = on['seeds']
  first, seconds = on_tasks.trained(run, task, fields, seeds, 'base')
  begin = {
    seed: params for seed, (_, params, _) in zip(seeds, first, strict=True)
  }
  after, more = on_tasks.trained(
    run, task, fields | blocks, seeds, 'blocks', (begin, fields)
  )
  found = {name: [] for name in ('fewer calls', 'right answers lost', 'wrong')}
  read = []
  for seed, *both in zip(seeds, first, after, strict=True):
    ask = lambda one, how, seed=seed: _asked(
      one, task, operations, n, how, rows, seed
    )
    one, two = ask(both[0], None), ask(both[1], policy)
    found['fewer calls'].append(one[1] / two[1])
    read.append((one[1] + 1) / (two[1] + 1))
    found['right answers lost'].append(one[0] - two[0])
    found['wrong'].append(1 - one[0])
  tokens = [_tokens(config) for config, *_ in (first[0], after[0])]
  seconds += more
  return ablation.outcome(
    run,
    found,
    [
      ablation.judged(
        f'>= {at_least:g} times fewer calls',
        [r - at_least for r in found['fewer calls']],
        0.0, seconds, signed=False,
      ),
      ablation.at_most(
        'right answers lost', found['right answers lost'], lost, seconds
      ),
      ablation.at_most(
        'wrong from left to right', found['wrong'], on_lists.WRONG, seconds
      ),
      ablation.at_most(
        'tokens of the conversion', [tokens[1] / tokens[0]] * len(seeds),
        share + 1e-9, seconds,
      ),
    ],
    'calls from left to right over ours, after the prompt',
    f'{", ".join(operations)} of {n} items, {rows} lists of each for a seed, '
    f'greedy; converted in {tokens[1]:,} tokens of rows after {tokens[0]:,}; '
    f'with the call that reads the prompt: {np.mean(read):.2f} '
    f'({min(read):.2f} to {max(read):.2f}) times fewer',
    seconds,
  )  # fmt: skip


def _tokens(config):
  """Of the rows of a training, each as often as it is read."""
  train = config.train
  return train.steps * train.batch_size * config.data.sequence_length


def _asked(one, task, operations, n, policy, rows, seed):
  """(share right, calls after the prompt) of a model's answers."""
  config, params, _ = one
  made = on_tasks.generator(config, lambda _: params)
  right, calls = [], []
  for operation in operations:
    asked = on_lists.questions(task, operation, n, rows, seed)
    every = on_lists.answered(made, task, asked, n, policy, temperature=0.0)
    for (_, items), r in zip(asked, every, strict=True):
      right.append(lists.is_right(task, operation, items, r['tokens']))
      calls.append(r['calls'])
  return np.mean(right), np.mean(calls)
