"""Claims about what learns from decoded texts: filters, and models themselves.

Models and lists of train/claims/on_lists.py; an answer is one canvas.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paraxis.decode.drafts import heads
from paraxis.decode.unmask import filters
from paraxis.decode.unmask import tuning
from paraxis.models import build
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness
from paraxis.train.claims import knockouts
from paraxis.train.claims import lists
from paraxis.train.claims import on_lists
from paraxis.train.claims import on_tasks
from paraxis.train.run import workdir as workdir_lib

FIRST_RATIO = 1e-4  # |r - 1| of a first update: float32, two programs
FILTERED = 'calls over the other', 'right answers lost', 'wrong one by one'


def _reader(model, params):
  """ids (N, T) -> (likeliest tokens, their probabilities), of one pass."""

  @jax.jit
  def run(ids):
    p = jax.nn.softmax(
      tuning.logits(model, params, ids, jnp.ones_like(ids) > 0)
    )
    return p.argmax(-1).astype(jnp.int32), p.max(-1)

  return run


def filtered(run, *, on, operations, chosen, against, bounds, lists_of, steps):
  """LEARN: calls with a trained filter over those of another policy.

  Args:
    on: dict(task, fields, seeds), as of canvases.ceilings. operations: of
      lists.OPERATIONS.
    chosen: thresholds; the filter's is the one with the fewest calls on the
      lists that it learns from, of those that lose no answer of them. against:
      [], the decoding that knows the end, or thresholds of the confidence, of
      which one is chosen likewise. bounds: [most calls over the other's, most
      of the share of right answers that may be lost]. lists_of: [items, lists
      for an operation and a seed]; 4 times as many are learned from. steps: of
      the filter's training.
  """
  (n, rows), (at_most, lost) = lists_of, bounds
  task, models, seconds = on_lists.trained(run, **on)
  found = {name: [] for name in FILTERED}
  shown, spent = [], []
  for seed, config, params in models:
    made = on_tasks.generator(config, lambda _, params=params: params)
    ask = functools.partial(on_lists.over, made, task, operations, n)
    began = time.process_time()
    own, oracle = _filter(made, params, ask, (task, n, steps), (rows, seed))
    spent.append(time.process_time() - began)
    path = workdir_lib.prepare(run.results) / f'filter-{seed}.npz'
    heads.save(path, *own)
    by = dict(score='filter', count='threshold'), dict(count='threshold')
    given = dict(draft=str(path))
    learned = 4 * rows, on_lists.NEW + seed
    slow = ask({}, *learned)
    tried = [ask(by[0] | dict(threshold=t), *learned, **given) for t in chosen]
    best = chosen[on_lists.fastest(tried, slow[0], 0.0)]
    right, calls, _ = ask(by[0] | dict(threshold=best), rows, seed, **given)
    other = oracle
    if against:
      tried = [ask(by[1] | dict(threshold=t), *learned) for t in against]
      plain = against[on_lists.fastest(tried, slow[0], 0.0)]
      other = ask(by[1] | dict(threshold=plain), rows, seed)[1]
    slow = ask({}, rows, seed)
    found['calls over the other'].append(calls / other)
    found['right answers lost'].append(slow[0] - right)
    found['wrong one by one'].append(1 - slow[0])
    shown.append([calls, other, oracle, best])
  means = np.mean(shown, 0)
  seconds += max(spent)
  return ablation.outcome(
    run,
    found,
    [
      ablation.at_most(name, found[name], bound, seconds)
      for name, bound in zip(
        found, (at_most, lost, on_lists.WRONG), strict=True
      )
    ],
    'calls of a filter',
    f'{", ".join(operations)} of {n} items, {rows} lists of each for a seed, '
    f'greedy; {means[0]:.2f} calls, the other {means[1]:.2f}, the oracle '
    f'{means[2]:.2f}; the filter above {means[3]:.2f}',
    seconds,
  )


def _filter(made, params, ask, about, lists_of):
  """((heads.About, arrays) of a filter, calls of the oracle on other lists).

  Args:
    ask: of on_lists.over, (policy, lists, seed). about: (task, items, steps).
    lists_of: (lists, seed) of those other lists.
  """
  (task, n, steps), (rows, seed) = about, lists_of
  read = _reader(made.built.model, params)
  guided = functools.partial(
    filters.guided, read, at=n + 2, width=task.most, mask=task.mask
  )
  learned = np.array(ask({}, 4 * rows, on_lists.NEW + seed)[-1])
  asked = np.array(ask({}, rows, seed)[-1])
  with build.use(made.built):
    records, oracle = guided(learned)[1], guided(asked)[0].mean()
    own = filters.fit(records, steps)
    config, tokenizer = made.built.model.config, made.tokenizer.fingerprint
    return (filters.about(config, tokenizer, own, records), own), oracle


def surer(run, *, on, operations, tuned, policies, bounds, lists_of):
  """LEARN: calls one by one over those of a model tuned on its own texts.

  Args:
    on, operations: as of `filtered`. tuned: dict(texts of an operation, steps,
      rate, weight), of tuning.certainty. policies: [fields of decode.unmask]:
      of the model, and of the tuned one, the one with the fewest calls on other
      lists, of those that lose as few answers there as may be lost. bounds:
      [least ratio of calls, most of the share of right answers that may be
      lost]. lists_of: [items, lists for an operation and a seed].
  """
  (n, rows), (at_least, lost) = lists_of, bounds
  task, models, seconds = on_lists.trained(run, **on)
  ratios, losses, before, wrong, spent = [], [], [], [], []
  for seed, config, params in models:
    made = on_tasks.generator(config, lambda _, params=params: params)
    ask = functools.partial(
      on_lists.over, task=task, operations=operations, n=n
    )
    own = dict(rows=tuned['texts'], seed=on_lists.NEW + seed)
    texts = np.array(ask(made, policy={}, **own)[-1])
    began = time.process_time()
    with build.use(made.built):
      better = _certain(made.built.model, params, texts, n + 2, tuned, seed)
    spent.append(time.process_time() - began)
    ours = on_tasks.generator(config, lambda _, params=better: params)
    other = functools.partial(ask, rows=2 * rows, seed=2 * on_lists.NEW + seed)
    slow, right, calls = other(made, policy={})[0], [], []
    for model, several in ((made, [{}]), (made, policies), (ours, policies)):
      tried = [other(model, policy=p) for p in several]
      by = several[on_lists.fastest(tried, slow, lost)]
      found = ask(model, policy=by, rows=rows, seed=seed)
      right.append(found[0])
      calls.append(found[1])
    ratios.append(calls[0] / calls[2])
    losses.append(right[0] - right[2])
    wrong.append(1 - right[0])
    before.append(calls[0] / calls[1])
  seconds += max(spent)
  return ablation.outcome(
    run,
    {'fewer calls': ratios, 'right answers lost': losses,
     'fewer before it': before},
    on_lists.findings((ratios, losses, wrong), (at_least, lost), seconds),
    'calls of one by one over those of a threshold',
    f'{", ".join(operations)} of {n} items, {rows} lists of each for a seed, '
    f'greedy; {tuned["steps"]} steps on {len(texts)} texts of its own',
    seconds,
  )  # fmt: skip


def _certain(model, params, texts, start, tuned, seed):
  """Parameters after steps of tuning.certainty on texts (N, T)."""
  rng, there = np.random.default_rng(seed), np.ones(texts.shape, bool)
  width = texts.shape[1] - start

  def loss(z, ids, masked):
    value = tuning.certainty(z, ids, masked, tuned['weight'])
    return value, value

  rate = optax.cosine_decay_schedule(tuned['rate'], max(tuned['steps'], 1))
  tuner = tuning.Tuner(model, params, optax.adam(rate), loss)
  for _ in range(tuned['steps']):
    at = rng.integers(0, len(texts), 64)
    ids, begin = texts[at], np.full(64, start)
    masked, half = tuning.half_masked(ids, begin, there[at], width, rng)
    canvas = np.where(masked, model.config.mask_id, ids)
    tuner.step(canvas, there[at], ids, half)
  return tuner.params


def right_alone(run, *, changes, shape, weight, within):
  """EQ: tuning.certainty and its gradient by logits, and a loop in NumPy whose
  entropy is of masks alone whose likeliest token is the text's.

  Args:
    changes: {'section.field': value}; the model has random parameters, float64.
    shape: [rows, tokens]; half of them are masks, a third of those are right.
  """
  with jax.enable_x64(True):
    model = on_tasks.random(run, changes).built.model
    mask, rng = model.config.mask_id, np.random.default_rng(7)
    masked = rng.random(shape) < 0.5
    ids = rng.integers(0, mask, shape)
    params, there = experiment.random_parameters(model), jnp.ones(shape, bool)
    canvas = jnp.asarray(np.where(masked, mask, ids), jnp.int32)
    z = tuning.logits(model, params, canvas, there).astype(float)
    best = np.asarray(z.argmax(-1))
    ids = np.where(rng.random(shape) < 1 / 3, best, ids)
    loss, grad = jax.value_and_grad(tuning.certainty)(z, ids, masked, weight)
  z, right = np.asarray(z)[..., :mask], masked & (best == ids)
  value, want = 0.0, np.zeros(z.shape)
  for at in zip(*np.nonzero(masked), strict=True):
    p = np.exp(z[at] - np.logaddexp.reduce(z[at]))
    value -= np.log(p[ids[at]]) / masked.sum()
    want[at] = (p - np.eye(mask)[ids[at]]) / masked.sum()
    if right[at]:
      q = p**2 / (p**2).sum()  # at temperature 1/2 (section 3.2)
      entropy = -(q * np.log(q)).sum()
      value += weight * entropy / right.sum()
      slope = -2 * q * (np.log(q) + entropy)
      want[at] += weight * slope / right.sum()
  gaps = {
    'loss': experiment.gap(np.asarray(loss), np.asarray(value)),
    'gradient': experiment.gap(np.asarray(grad)[..., :mask], want),
  }
  return experiment.equal(
    gaps, within,
    f'{masked.sum()} masks, {right.sum()} of them right, float64, random '
    'parameters',
  )  # fmt: skip


def sure_of_all():
  """Knock-out: what is wrong becomes sure too."""
  made = tuning.certainty

  def certainty(z, ids, masked, weight):
    best = z.argmax(-1)
    entropy = made(z, best, masked, 1.0) - made(z, best, masked, 0.0)
    return made(z, ids, masked, 0.0) + weight * entropy

  return knockouts.patched(tuning, 'certainty', certainty)


def rewarded(run, *, on, operations, policy, learned, by, lists_of):
  """LEARN: share of right answers after learning from rewards, less before.

  A reward is the share of an answer's tokens that are right.

  Args:
    on: as of `filtered`. operations: [that of a prompt (lists.OPERATIONS), and
      copy, reverse or sort, whose answers are right]. policy: fields of
      decode.unmask, at temperature 1. learned: dict(updates, prompts, group,
      rate): texts of an update are `group` for each prompt. by: least gain.
    lists_of: [items, lists for a seed].
  """
  (asked, wanted), (n, rows) = operations, lists_of
  task, models, seconds = on_lists.trained(run, **on)
  shares, first, spent = {'before': [], 'after': []}, [], []
  for seed, config, params in models:
    made = on_tasks.generator(config, lambda _, params=params: params)
    ask = task, asked, wanted, n, policy

    def right(made=made, ask=ask, seed=seed):
      questions = on_lists.questions(task, asked, n, rows, seed)
      rewards, _ = _rewards(made, ask, questions, seed)
      return np.mean(rewards == 1)

    shares['before'].append(right())
    began = time.process_time()
    # Adam's first steps, of small noisy gradients, would be as long as others.
    tx = optax.sgd(learned['rate'], momentum=0.9)
    tuner = tuning.Tuner(made.built.model, params, tx, tuning.trajectory)
    for update in range(learned['updates']):
      off = update_rewarded(
        made, tuner, ask, learned, on_lists.NEW * (seed + 1) + update
      )
      first += [off] if not update else []
      made.replace(tuner.params)
    spent.append(time.process_time() - began)
    shares['after'].append(right())
  seconds += max(spent)
  off = max(first, default=0)
  gain = ablation.more(shares, 'after', 'before', by, seconds)
  same = ablation.at_most('first ratio from 1', first, FIRST_RATIO, seconds)
  return ablation.outcome(
    run, shares, [gain, same], 'right answers',
    f'{asked} of {n} items, right is {wanted}, {rows} lists for a seed, '
    f'{learned["updates"]} updates of {learned["prompts"]} x '
    f'{learned["group"]} texts; in the first one ratios are 1 but for '
    f'{off:.1e}',
    seconds,
  )  # fmt: skip


def _rewards(made, ask, asked, seed):
  """(rewards (N,), results of `generate`) of prompts [(ids, items)].

  Args:
    ask: (task, operation of the prompts, operation whose answers are right,
      items, policy).
  """
  task, _, wanted, n, policy = ask
  found = on_lists.answered(
    made, task, asked, n, policy, trace=True, temperature=1.0, seed=seed
  )
  rewards = [
    lists.share_right(task, wanted, x, r['tokens'])
    for (_, x), r in zip(asked, found, strict=True)
  ]
  return np.array(rewards), found


def on_policy(run, *, changes, prompts, new, policy, within):
  """EQ: log probabilities of a record, against passes over its canvases.

  Args:
    changes: {'section.field': value}; the model has random parameters, float64.
    prompts: of 5 tokens. new: tokens after each. policy: fields of
      decode.unmask. within: nats of a token; the record is float32.
  """
  with jax.enable_x64(True):
    made = on_tasks.random(run, changes)
    model = made.built.model
    mask, rng = model.config.mask_id, np.random.default_rng(5)
    ids = rng.integers(0, mask, (prompts, 5)).tolist()
    found = made.generate(
      ids, trace=True, max_new_tokens=new, method='unmask', unmask=policy,
      temperature=1.0, seed=3,
    )  # fmt: skip
    texts = tuning.Rollouts.of(ids, found, new)
    canvas, taken, text = texts.calls(mask)
    z = tuning.logits(
      model, experiment.random_parameters(model), canvas, texts.there[text]
    )
    picked = np.take_along_axis(
      np.array(jax.nn.log_softmax(z)), texts.ids[text][..., None], -1
    )[..., 0]
  off = float(abs(picked - texts.logprobs[text])[taken].max())
  once = (taken.reshape(-1, *texts.ids.shape).sum(0) == (texts.when >= 0)).all()
  return harness.Outcome(
    f'within {within:g}',
    f'{off:.1e}',
    f'{len(text)} canvases of {prompts} texts of {new} tokens; '
    f'{"each" if once else "NOT each"} token is of one call',
    off <= within and bool(once),
  )


def any_call():
  """Knock-out: the canvases of a text are taken in another order."""

  def turned(self, mask):
    canvas, taken, text = calls(self, mask)
    count = len(self.ids)
    return np.roll(canvas, count, 0), taken, text

  calls = tuning.Rollouts.calls
  return knockouts.patched(tuning.Rollouts, 'calls', turned)


def update_rewarded(made, tuner, ask, learned, seed):
  """One step of a tuning.Tuner on new texts; the largest |ratio - 1|.

  Args:
    made: loop.Generator of the tuner's parameters. ask: as of `_rewards`.
    learned: as of `rewarded`.
  """
  task, operation, _, n, _ = ask
  asked = [
    x for x in on_lists.questions(task, operation, n, learned['prompts'], seed)
    for _ in range(learned['group'])
  ]  # fmt: skip
  rewards, found = _rewards(made, ask, asked, seed)
  texts = tuning.Rollouts.of([ids for ids, _ in asked], found, n)
  canvas, taken, text = texts.calls(task.mask)
  gains = tuning.advantages(rewards, learned['group'])
  with build.use(made.built):
    return tuner.step(
      canvas, texts.there[text], texts.ids[text], taken, texts.logprobs[text],
      gains[text], text,
    )  # fmt: skip


def of_others():
  """Knock-out: a text is rewarded for another text of its prompt."""

  def turned(rewards, group):
    each = np.asarray(rewards).reshape(-1, group)
    return advantages(np.roll(each, 1, 1).reshape(-1), group)

  advantages = tuning.advantages
  return knockouts.patched(tuning, 'advantages', turned)
