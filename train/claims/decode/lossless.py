"""Claims that a method of decoding changes no text, or no distribution.

Greedy, and with the judge `replay` drawn too, the text is token for token that
of decoding one by one. With the judge `rejection` its distribution is the same:
the joint of a few tokens over a small vocabulary is counted and compared, by
chi-square, with the model's, multiplied out without a cache. A judge that is
wrong by a little must fail by the same count (the knock-outs here). One that
changes the distribution (`typical`) is compared with the joint that its rule,
as judges.py has it, gives, followed call by call.

Models are the config's, with random parameters; random drafts have random
parameters too: what is lossless does not depend on how good a draft is.

Legend: B rows, C drafts, V vocabulary.
"""

import functools
import itertools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from paraxis.decode import judges
from paraxis.decode import sampling
from paraxis.decode import trees
from paraxis.decode.drafts import distill
from paraxis.decode.drafts import heads
from paraxis.models import build
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.claims import on_tasks

DRAWN = dict(temperature=0.8, top_k=8, seed=3)
LEAST, MOST = 1e-3, 1e-6  # p of what is right, and of what is wrong
FEW = 20  # expected texts of a cell, at least


def _random_draft(made, kind, path):
  """Writes a draft that nobody trained."""
  given = made.built.model, made._params, kind, made.tokenizer.fingerprint
  heads.save(path, *distill.untrained(*given))


def _prompts(count, vocab):
  """Lists of token ids, some of which repeat themselves."""
  rng, out = np.random.default_rng(5), []
  for i in range(count):
    text = rng.integers(1, vocab, 3 + i % 7).tolist()
    out.append(text * (1 + i % 3))
  return out


def same_text(run, *, method, changes, prompts, new, random_draft):
  """EQ: texts that differ from decoding one by one, greedy and drawn.

  Args:
    method: fields of schema.Decode. changes: list of {'section.field': value}
      of the config, a model each.
    prompts: how many. new: tokens of each.
    random_draft: '' or the kind of a draft that nobody trained.
  """
  differ, calls, alone = 0, 0, 0
  with jax.enable_x64(True), tempfile.TemporaryDirectory() as folder:
    for change in changes:
      made = on_tasks.random(run, change)
      given = dict(method)
      if random_draft:
        given['draft'] = str(pathlib.Path(folder, 'draft.npz'))
        _random_draft(made, random_draft, given['draft'])
      ids = _prompts(prompts, made.built.model.config.vocab_size)
      for how in (dict(temperature=0.0), DRAWN):
        how = how | dict(max_new_tokens=new)
        wanted = made.generate(ids, **how)
        found = made.generate(ids, **how, **given)
        for a, b in zip(wanted, found, strict=True):
          differ += a['tokens'] != b['tokens']
          alone, calls = alone + a['calls'], calls + b['calls']
  return claims.Outcome(
    '0 differ',
    f'{differ} of {2 * prompts * len(changes)} differ',
    f'{prompts} prompts, {new} tokens, greedy and drawn (temperature 0.8, '
    f'top-k 8), float64, {len(changes)} models with random parameters; calls '
    f'{calls} against {alone}',
    # A method that drafts nothing that is kept shows nothing.
    differ == 0 and calls < alone,
  )


def texts(method, changes, random_draft='') -> dict:
  """What a config's claims() expects of `same_text`, of 20 prompts."""
  return dict(
    check=same_text, method=method, changes=changes, prompts=20, new=24,
    random_draft=random_draft,
  )  # fmt: skip


# Of a knock-out of `joint`: a broken judge is 1e-6 away with a tenth of them.
TENTH = {'samples': 4_000}


def joint(method, random_draft='') -> dict:
  """The same of `same_distribution`: 4 tokens of 4 letters, 40,000 texts."""
  return dict(
    check=same_distribution, method=method, changes={}, letters=4, length=4,
    samples=40_000, random_draft=random_draft,
  )  # fmt: skip


def _read(made, length):
  """(probabilities (N, T, V), features (N, T, D)) after [1] and all texts of so
  many tokens, in order, without a cache."""
  model, vocab = made.built.model, made.built.model.config.vocab_size
  every = np.array(list(itertools.product(range(vocab), repeat=length)))
  ids = np.concatenate([np.ones((len(every), 1), int), every], 1)
  ones = np.ones_like(ids)
  batch = experiment.rows_of(ids, ones, ones.cumsum(1) - 1)

  @jax.jit
  def read(params):
    x = model.features(params, batch)[0]
    return jax.nn.softmax(model.logits(params, x).astype(float), -1), x

  with build.use(made.built):
    return jax.device_get(read(experiment.random_parameters(model)))


def _filtered(p, temperature=1.0, top_k=0):
  """p (.., V) that is drawn from; decode/sampling.py has other words for it."""
  p = p ** (1 / temperature)
  if top_k:
    p = np.where(p >= np.sort(p)[..., -top_k, None], p, 0)
  return p / p.sum(-1, keepdims=True)


def _joint(made, length, how):
  """p (V ** length,) of the texts after [1]; how: fields of schema.Decode, of
  which those of `_filtered` change it."""
  how = {n: how[n] for n in ('temperature', 'top_k') if n in how}
  p = _filtered(_read(made, length - 1)[0], **how)
  joint = np.ones(1)
  for c in range(length):
    # Of the texts of c tokens, the first row that begins with each.
    joint = (joint[:, None] * p[:: p.shape[2] ** (length - 1 - c), c]).ravel()
  return joint


def _rank_of_heads(made, path, x_NTD):
  """(tree, tokens (N, T, K, V) by their rank) of a Medusa draft's file."""
  own = made.built.model, made.tokenizer.fingerprint
  about, given = heads.load(path, own[0].config, own[1])
  h = np.einsum('ntd,kde->ntke', x_NTD, given['weight'][:, 0])
  h = h + given['bias'][:, 0]
  h = x_NTD[:, :, None] + h / (1 + np.exp(-h))
  say = jax.jit(own[0].logits)
  with build.use(made.built):
    z = [say(made._params, h[:, :, k]) for k in range(h.shape[2])]
  return about, np.argsort(-np.stack(z, 2), -1, kind='stable')


def _kept(tree, p_of, drafts):
  """The drafts that typical acceptance keeps (Medusa, arXiv:2401.10774).

  Args:
    p_of: tokens behind the text -> p (V,). drafts: (depth, rank) -> token.
  """
  paths: dict[int, tuple[tuple[int, ...], float]] = {-1: ((), 0.0)}
  depths, best = tree.depths(), paths[-1]
  for c, parent in enumerate(tree.parents):
    if parent not in paths:
      continue
    path, likely = paths[parent]
    p, token = p_of(path), drafts(depths[c + 1] - 1, tree.ranks[c])
    if p[token] > min(0.09, 0.3 * np.exp((p * np.log(p)).sum())):
      paths[c] = (*path, token), likely + np.log(p[token])
      best = max(best, paths[c], key=lambda x: (len(x[0]), x[1]))
  return best[0]


def _typical_joint(made, path, width, length):
  """As `_joint`, where calls keep what `_kept` says of a tree of `width`."""
  vocab = made.built.model.config.vocab_size
  deep = length + 1  # a draft is at most three behind the last token
  p, x = _read(made, deep)
  about, ranks = _rank_of_heads(made, path, x)
  tree, joint = trees.grown(about.accuracy, width), np.zeros((vocab,) * length)
  assert tree.depth <= 3
  places = vocab ** np.arange(deep)[::-1]
  row = lambda text: int(np.dot(text, places[: len(text)]))
  after = lambda text: p[row(text), len(text)]

  def grow(text, weight):
    if len(text) < length:
      seen = ranks[row(text), len(text) - 1]  # where the last token was drawn
      text += _kept(tree, lambda on: after(text + on), lambda *at: seen[at])
    if len(text) >= length:
      joint[text[:length]] += weight
      return
    for token, share in enumerate(after(text)):
      grow((*text, token), weight * share)

  for token, share in enumerate(after(())):
    grow((token,), share)
  return joint.ravel()


def _drawn(made, given, length, samples):
  """(how often each text of so many tokens is drawn, share of calls saved)."""
  vocab = made.built.model.config.vocab_size
  counts, rows = np.zeros(vocab**length), 2000
  for seed in range(samples // rows):
    how = dict(temperature=1.0, max_new_tokens=length, seed=seed) | given
    found = made.generate([[1]] * rows, **how)
    codes = np.array([r['tokens'] for r in found])
    codes = codes @ vocab ** np.arange(length)[::-1]
    counts += np.bincount(codes, minlength=len(counts))
  return counts, 1 - sum(r['calls'] for r in found) / (rows * (length - 1))


def joined(p, n):
  """[indices of a cell]: rare texts joined until `FEW` of n are expected."""
  cells, full = [], True
  for i in np.argsort(p):
    if full:
      cells.append([])
    cells[-1].append(i)
    full = p[cells[-1]].sum() * n >= FEW
  if not full and len(cells) > 1:
    rest = cells.pop()
    cells[-1] += rest
  return cells


def _chi_square(counts, p):
  """(p of chi-square, the statistic, degrees of freedom) of `joined` cells.
  What cannot be, and was drawn, is not by chance."""
  n = counts.sum()
  cells = joined(p, n)
  seen, expected = (
    np.array([x[cell].sum() for cell in cells]) for x in (counts, n * p)
  )
  statistic = ((seen - expected) ** 2 / expected).sum()
  value = scipy.stats.chi2.sf(statistic, len(cells) - 1)
  return value * (counts[p == 0].sum() == 0), statistic, len(cells) - 1


def same_distribution(
  run, *, method, changes, letters, length, samples, random_draft
):
  """EQ: p of chi-square of the joint of a few tokens, against the model's.

  Args:
    method: fields of schema.Decode, with a temperature of 1 if none is given.
    changes: {'section.field': value}. letters: vocabulary. length: tokens.
    samples: texts.
    random_draft: as for `same_text`.
  """
  changes = changes | {'model.vocab_size': letters}
  with jax.enable_x64(True), tempfile.TemporaryDirectory() as folder:
    made, given = on_tasks.random(run, changes), dict(method)
    if random_draft:
      given['draft'] = str(pathlib.Path(folder, 'draft.npz'))
      _random_draft(made, random_draft, given['draft'])
    p = _joint(made, length, given)
    counts, kept = _drawn(made, given, length, samples)
  value, statistic, freedom = _chi_square(counts, p)
  return claims.Outcome(
    f'p > {LEAST:g}',
    f'p = {value:.2g}',
    f'chi-square {statistic:.0f}, {freedom} degrees of freedom, of '
    f'{samples:,} texts of {length} tokens of {letters}; drafts saved '
    f'{kept:.0%} of the calls',
    bool(value > LEAST and kept > 0),
  )


def typical_distribution(run, *, method, changes, letters, length, samples):
  """EQ: the joint of typical acceptance is its rule's, and not the model's.

  Of Medusa's heads, with random parameters; the judge says it is NOT lossless.

  Args: as for `same_distribution`.
  """
  changes = changes | {'model.vocab_size': letters}
  with jax.enable_x64(True), tempfile.TemporaryDirectory() as folder:
    made, path = on_tasks.random(run, changes), f'{folder}/draft.npz'
    _random_draft(made, 'medusa', path)
    counts, kept = _drawn(made, {**method, 'draft': path}, length, samples)
    joint = _typical_joint(made, path, method['drafts'], length)
    own, statistic, freedom = _chi_square(counts, joint)
    other = _chi_square(counts, _joint(made, length, method))[0]
  declared = judges.JUDGES[method['judge']].lossless
  return claims.Outcome(
    f"p > {LEAST:g} of the rule's, < {MOST:g} of the model's",
    f'p = {own:.2g}, {other:.2g}',
    f'chi-square {statistic:.0f}, {freedom} degrees of freedom, of '
    f'{samples:,} texts of {length} tokens of {letters}; drafts saved '
    f'{kept:.0%} of the calls; {"" if declared else "not "}called lossless',
    bool(own > LEAST and other < MOST and kept > 0 and not declared),
  )


# ------------------------------------------------------------------ knock-outs


def keeps_one_more():
  """Knock-out: the judge `replay` keeps one draft that is not the draw."""

  def wrong(z, drafts, draws, tree):
    tokens, n, at = judges.replay(z, drafts, draws, tree)
    if not drafts.tokens.shape[1] or not tree.is_chain:
      return judges.Judged(tokens, n, at)
    more = jnp.minimum(n + 1, drafts.valid.sum(1, dtype=jnp.int32))
    kept = jnp.concatenate([drafts.tokens, tokens[:, -1:]], 1)
    order = jnp.arange(tokens.shape[1])
    tokens = jnp.where(order < more[:, None], kept, tokens)
    return judges.Judged(tokens, more, at)

  liar = judges.JUDGES['replay']._replace(run=wrong)
  return knockouts.patched(judges.JUDGES, 'replay', liar)


def first_child():
  """Knock-out: in a tree, the judge goes on to the first child of the path."""
  real = judges.replay

  def wrong(z, drafts, draws, tree):
    tokens, n, at = real(z, drafts, draws, tree)
    if tree.is_chain:
      return judges.Judged(tokens, n, at)
    first = tree.parents.index(-1)
    one = drafts.valid[:, first].astype(jnp.int32)
    swapped = jnp.where(one > 0, drafts.tokens[:, first], tokens[:, 0])
    return judges.Judged(tokens.at[:, 0].set(swapped), jnp.maximum(n, one), at)

  liar = judges.JUDGES['replay']._replace(run=wrong)
  return knockouts.patched(judges.JUDGES, 'replay', liar)


def from_p():
  """Knock-out: a dropped draft is replaced by a draw of p, not of (p - q)+."""
  wrong = functools.partial(judges.rejection, rest=lambda p, q: p)
  liar = judges.JUDGES['rejection']._replace(run=wrong)
  return knockouts.patched(judges.JUDGES, 'rejection', liar)


def raw_residual():
  """Knock-out: the inverse distribution function over (p - q)+ as it stands,
  which does not add up to 1."""

  def wrong(z, drafts, draws, tree):
    tokens, n, at = judges.rejection(z, drafts, draws, tree)
    p = jax.nn.softmax(z[:, :-1].astype(jnp.float32))
    if drafts.logits is None:  # certain, where there is one
      q = jax.nn.one_hot(drafts.tokens, p.shape[2]) * drafts.valid[..., None]
    else:
      q = jax.nn.softmax(drafts.logits.astype(jnp.float32))
    edges = jnp.maximum(p - q, 0).cumsum(-1)
    for c in range(edges.shape[1]):
      key = sampling.keys(draws.values.seed, *draws.at(c), purpose=9)
      u = jax.vmap(jax.random.uniform)(key)
      drawn = jnp.argmax(edges[:, c] > u[:, None], -1).astype(jnp.int32)
      tokens = tokens.at[:, c].set(jnp.where(n == c, drawn, tokens[:, c]))
    return judges.Judged(tokens, n, at)

  liar = judges.JUDGES['rejection']._replace(run=wrong)
  return knockouts.patched(judges.JUDGES, 'rejection', liar)


def q_of_temperature_1():
  """Knock-out: q is that of temperature 1, whatever drafts are drawn by."""

  def wrong(z, drafts, draws, tree):
    if drafts.logits is not None:
      warm = drafts.logits * draws.values.temperature
      drafts = drafts._replace(logits=warm)
    return judges.rejection(z, drafts, draws, tree)

  liar = judges.JUDGES['rejection']._replace(run=wrong)
  return knockouts.patched(judges.JUDGES, 'rejection', liar)


def judged_as_lossless():
  """Knock-out: the judge `typical` says that it is lossless."""
  liar = judges.JUDGES['typical']._replace(lossless=True)
  return knockouts.patched(judges.JUDGES, 'typical', liar)


def all_typical():
  """Knock-out: the judge `typical` finds every draft likely enough."""
  return knockouts.patched(judges, 'MOST', 0.0)
