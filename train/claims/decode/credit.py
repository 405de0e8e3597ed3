"""Claims about tokens that are believed sooner if they were likeliest before.

CreditDecoding (arXiv:2510.06133) on train/claims/on_lists.py's models: what
credits are, from a decoding's record, and what they save beside a threshold.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.decode.unmask import policies
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness
from paraxis.train.claims import knockouts
from paraxis.train.claims import on_lists
from paraxis.train.claims import on_tasks

FOUND = 'fewer calls', 'right answers lost', 'wrong one by one'


def exact(run, *, changes, prompts, new, policy, within):
  """EQ: tokens, choices and log probabilities of a decoding with credits, and
  of a loop in NumPy over passes of its canvases.

  Args:
    changes: {'section.field': value}; the model has random parameters. prompts:
      how many, of 3 to 8 tokens. new: tokens after each. policy: fields of
      decode.unmask, of count=threshold and credit_weight above 0.
  """
  with jax.enable_x64(True):
    made = on_tasks.random(run, changes)
    model, rng = made.built.model, np.random.default_rng(6)
    params = experiment.random_parameters(model)

    @jax.jit
    def read(row):
      ones = jnp.ones_like(row)[None]
      rows = experiment.rows_of(row[None], ones, jnp.cumsum(ones, 1) - 1)
      return model.logits(params, model.features(params, rows)[0])[0]

    mask = model.config.mask_id
    ids = [rng.integers(0, mask, 3 + i % 6).tolist() for i in range(prompts)]
    results = made.generate(
      ids, trace=True, method='unmask', unmask=policy, max_new_tokens=new,
      temperature=0.0,
    )  # fmt: skip
    rows = [
      _walked(read, mask, policy, *row)
      for row in zip(ids, results, strict=True)
    ]
  calls, other, helped = np.sum([r[:3] for r in rows], 0)
  gap = max(r[3] for r in rows)
  return harness.Outcome(
    f'0 calls differ, <= {within:.0e}',
    f'{other}, {gap:.1e}',
    f'{calls} calls for {prompts} texts of {new} tokens, float64; credits '
    f'change what {helped} of them take; log probabilities in nats, as float32',
    bool(not other and gap <= within and helped > 0),
  )


def _walked(read, mask, policy, prompt, result):
  """(calls, those that took other tokens, those that would have without
  credits, largest difference of a log probability) of a text."""
  trace, row = (
    result['trace'],
    np.array(prompt + [mask] * len(result['tokens'])),
  )
  width, at = policy['block'], len(prompt)
  credit, calls, other, helped, gap = None, 0, 0, 0, 0.0
  while at < len(row):
    places = [c for c in range(at, min(at + width, len(row))) if row[c] == mask]
    if credit is None:
      credit = {c: np.zeros(mask) for c in places}
    z = np.array(read(row), float)[:, :mask]
    with_, without = {}, {}
    for c in places:
      p = np.exp(z[c] - z[c].max())
      p /= p.sum()
      credit[c] *= policy['credit_decay']
      credit[c][p.argmax()] += p.max() ** policy['credit_power']
      fused = p * (1 + credit[c]) ** policy['credit_weight']
      with_[c], without[c] = fused / fused.sum(), p
    taken = _taken(with_, policy['threshold'])
    helped += taken != _taken(without, policy['threshold'])
    theirs = {
      at + int(c): int(trace.tokens[calls, c])
      for c in np.flatnonzero(trace.final[calls])
    }
    other += theirs != taken
    for c, token in theirs.items():
      z[c] -= np.log(np.exp(z[c] - z[c].max()).sum()) + z[c].max()
      gap = max(gap, abs(z[c][token] - trace.logprobs[calls, c - at]))
      row[c] = token
    calls += 1
    if mask not in row[at : at + width]:
      at, credit = at + width, None
  return calls, other, helped, gap


def _taken(p, threshold):
  """{place: token}: those above a threshold, and the likeliest of all."""
  best = max(p, key=lambda c: p[c].max())
  return {
    c: int(x.argmax()) for c, x in p.items()
    if c == best or x.max() > threshold
  }  # fmt: skip


def fewer(run, *, on, operations, ours, against, bounds, lists_of):
  """LEARN: calls of the best of some policies over those of the best of others.

  Args:
    on, operations: as of traces.filtered. ours, against: [fields of
      decode.unmask], of each the one with the fewest calls on other lists, of
      those that lose as few answers there as may be lost. bounds: [least ratio,
      most of the share of right answers that may be lost]. lists_of: [items,
      lists for an operation and a seed]; twice as many are chosen by.
  """
  (n, rows), (at_least, lost) = lists_of, bounds
  task, models, seconds = on_lists.trained(run, **on)
  found, shown = {name: [] for name in FOUND}, []
  for seed, config, params in models:
    made = on_tasks.generator(config, lambda _, params=params: params)
    ask = functools.partial(on_lists.over, made, task, operations, n)
    slow = ask({}, 2 * rows, on_lists.NEW + seed)
    picked = []
    for several in (ours, against):
      tried = [ask(policy, 2 * rows, on_lists.NEW + seed) for policy in several]
      picked.append(several[on_lists.fastest(tried, slow[0], lost)])
    right, calls, _ = ask(picked[0], rows, seed)
    _, best, _ = ask(picked[1], rows, seed)
    slow = ask({}, rows, seed)
    found['fewer calls'].append(best / calls)
    found['right answers lost'].append(slow[0] - right)
    found['wrong one by one'].append(1 - slow[0])
    shown.append([calls, best, slow[1]])
  means = np.mean(shown, 0)
  return ablation.outcome(
    run,
    found,
    on_lists.findings(found.values(), (at_least, lost), seconds),
    'calls of the best threshold over ours',
    f'{", ".join(operations)} of {n} items, {rows} lists of each for a seed, '
    f'greedy; {means[0]:.2f} calls, the best of the others {means[1]:.2f}, one '
    f'by one {means[2]:.2f}',
    seconds,
  )  # fmt: skip


def never_forgets():
  """Knock-out: credits are not less from call to call."""
  credited = policies.credited

  def kept(policy, z, credit, masks):
    _, more = credited(policy, z, jnp.zeros_like(credit), masks)
    credit += more
    return z + policy.credit_weight * jnp.log1p(credit).astype(z.dtype), credit

  return knockouts.patched(policies, 'credited', kept)
