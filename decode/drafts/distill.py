"""Trains drafts (heads.py, eagle.py, prompt_tokens.py) to say what the model
would say.

The model stays as it is. Its features of some text are computed once, and what
it finds most likely after every token; a head learns that (self-distillation:
the text's own tokens are not targets), by cross entropy through the model's own
head (losses.py).

A draft of few words (heads.py) has the most frequent ones of the text and of
the model's choices; where the model chooses another, it learns nothing, and is
wrong.

What is measured on held-out text: how often the r-th choice of head k is the
model's, which grows the tree (trees.py) and says how many tokens a call may
make.

Legend: N rows, T tokens, K heads, D model width, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paraxis.configs.base import errors
from paraxis.decode import step
from paraxis.decode.drafts import drafters
from paraxis.decode.drafts import eagle
from paraxis.decode.drafts import falcon
from paraxis.decode.drafts import heads
from paraxis.decode.drafts import losses as losses_lib
from paraxis.decode.drafts import prompt_tokens


class Recipe(NamedTuple):
  """heads: of medusa; prompt tokens of ppd. blocks: of each head. length, rows:
  of a forward pass. steps, batch: of training, tokens of a step. words: that
  the draft says, 0: all. choices: of a head, that are counted and may stand in
  a tree (10: arXiv:2401.10774's own code). group: layers whose mixers read the
  same features, in `grouped`, from which it learns beside the exact ones; 1:
  from these alone."""

  heads: int = 3
  blocks: int = 1
  length: int = 512
  rows: int = 4
  steps: int = 200
  batch: int = 256
  rate: float = 1e-3
  held: float = 0.1
  seed: int = 0
  words: int = 0
  choices: int = 10
  group: int = 1


class Features(NamedTuple):
  """x: (N, T, D). choice: (N, T) int32, the model's most likely next token.
  tokens: (N, T) int32, of the text."""

  x: Any
  choice: Any
  tokens: Any


def features(model, params, rows_NT, layers, size):
  """Features of the first `layers` layers, and choices of the whole model.

  Args:
    model: decoder.Decoder. params: as its `unstack` gives them.
    rows_NT: int32 text. layers: 0: all. size: rows of a pass.
  """
  small = drafters.first_layers(model, layers)

  @jax.jit
  def run(params, tokens):
    length = tokens.shape[1]
    whole = jnp.full(len(tokens), length, jnp.int32)
    x, _ = step.prefill(model, params, tokens, whole, length)
    pick = lambda x_TD: jnp.argmax(model.logits(params, x_TD[None])[0], -1)
    choice = jax.lax.map(pick, x)  # logits of one row at a time
    if layers:
      x, _ = step.prefill(small, params, tokens, whole, length)
    return x, choice.astype(jnp.int32)

  found = []
  for at in range(0, len(rows_NT) - size + 1, size):
    part = run(params, jnp.asarray(rows_NT[at : at + size], jnp.int32))
    found.append((*jax.device_get(part), rows_NT[at : at + size]))
  return Features(*(np.concatenate(x) for x in zip(*found, strict=True)))


def grouped(model, params, rows_NT, layers, group, size=64):
  """(N, T, D) features of the first layers in groups (drafters.EasySpec), where
  the keys of all tokens before are exact, as for the first draft that is fed.

  Args:
    model, params, rows_NT, layers: as for `features`. group: layers whose
      mixers read the same features. size: rows of a pass.
  """
  small = drafters.first_layers(model, layers)
  same = lambda x: x

  @jax.jit
  def run(params, tokens_BT):
    live = jnp.ones(len(tokens_BT), bool)

    def one(cache, token_B):
      given = small, params, cache, token_B, live, same
      x_BD, _ = step.advance(*given, group)
      return step.advance(*given)[1], x_BD

    cache = small.init_cache(*tokens_BT.shape)
    return jnp.moveaxis(jax.lax.scan(one, cache, tokens_BT.T)[1], 0, 1)

  parts = np.array_split(rows_NT, range(size, len(rows_NT), size))
  return np.concatenate([jax.device_get(run(params, x)) for x in parts])


def targets(choice_NT, kind, count):
  """(N, T - count, K): what head k is to say at each token.

  The heads of medusa begin behind the token that the model itself draws.
  """
  first = 1 if kind == 'medusa' else 0
  length = choice_NT.shape[1] - count
  each = [choice_NT[:, first + k :][:, :length] for k in range(count)]
  return np.stack(each, 2)


def words_of(choice, count):
  """(V',) int32, sorted: at most `count` ids, the most frequent ones."""
  ids, often = np.unique(choice, return_counts=True)
  most = np.argsort(-often, kind='stable')[:count]
  return np.sort(ids[most]).astype(np.int32)


def places(words, choice):
  """Of each id, its place among sorted words; -1: it is none of them."""
  at = np.minimum(np.searchsorted(words, choice), len(words) - 1)
  return np.where(words[at] == choice, at, -1).astype(np.int32)


def _flat(found, kind, count):
  """(x (M, D), targets (M, K)) of all tokens."""
  y = targets(found.choice, kind, count)
  x = found.x[:, : y.shape[1]]
  return x.reshape(-1, x.shape[2]), y.reshape(-1, count)


def fit(model, params, found, kind, recipe, words=None, say=print):
  """{name: array} of a draft, trained on Features.

  Args:
    model, params: as for `features`.
    found: with choices that are places among the words, or -1.
    kind: of heads.KINDS. recipe: Recipe. words: ids, or None: all.
    say: prints one line.
  """
  tokens = recipe.batch  # of a step; of rows, whole ones
  if kind in losses_lib.ROWS:
    length = found.x.shape[1]
    size, data = max(1, recipe.batch // length), found
    tokens = size * length
    own = _begun(model, params, found.tokens, kind, recipe)
  else:
    count = recipe.heads if kind == 'medusa' else 1
    size, data = recipe.batch, _flat(found, kind, count)
    own = heads.initial(count, found.x.shape[2], recipe.blocks)
  loss = losses_lib.of(model, kind, words)
  rate = optax.cosine_decay_schedule(recipe.rate, recipe.steps)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def update(own, state, params, *batch):
    value, grads = jax.value_and_grad(loss)(own, params, *batch)
    change, state = tx.update(grads, state)
    return optax.apply_updates(own, change), state, value

  own = jax.tree.map(lambda x: jnp.array(x, jnp.float32), own)
  state, losses = tx.init(own), []
  order = np.random.default_rng(recipe.seed).permutation(len(data[0]))
  for i in range(recipe.steps):
    at = np.take(order, range(i * size, (i + 1) * size), mode='wrap')
    key = jax.random.fold_in(jax.random.key(recipe.seed), i)
    more = losses_lib.drawn(kind, key, i / recipe.steps)
    batch = (*(x[at] for x in data), *more)
    own, state, value = update(own, state, params, *batch)
    losses.append(float(value))
  if not np.isfinite(losses).all():
    raise errors.IntegrityError(
      f'training of the draft diverged: its loss is not finite at step '
      f'{int(np.argmin(np.isfinite(losses)))} of {recipe.steps}; take a '
      f'smaller rate than {recipe.rate:g}.'
    )
  tail = max(1, recipe.steps // 10)
  say(
    f'{kind}: {recipe.steps} steps of {tokens} tokens, loss '
    f'{np.mean(losses[:tail]):.3f} -> {np.mean(losses[-tail:]):.3f}'
  )
  return jax.tree.map(np.asarray, own)


def _begun(model, params, tokens_NT, kind, recipe):
  """Initial parameters of a draft that is trained on rows."""
  if kind == 'ppd':
    return prompt_tokens.initial(model, params, tokens_NT, recipe.heads)
  return (eagle if kind == 'eagle' else falcon).initial(model, params)


def accuracy(model, params, own, found, kind, words=None, choices=10, size=256):
  """((how often choice r of head k is the model's, r < choices), ...).

  Of eagle: of each draft, where those before it are right; of falcon: of each
  draft of its first pass, then of a second one likewise, but for blocks behind
  wrong ones; of ppd: of prompt token k. found, words: as for `fit`. A draft of
  fewer words has as many choices as words.
  """
  few = model.config.vocab_size if words is None else len(words)
  choices = min(choices, few)
  top = lambda z, y: jax.lax.top_k(z, choices)[1] == y[..., None]
  data, most = found, 1
  hits = losses_lib.hits(model, kind, words, top)
  if kind not in losses_lib.ROWS:
    data, most = _flat(found, kind, own['bias'].shape[0]), size
  run, total = jax.jit(hits), np.zeros(1)
  size = min(most, len(data[0]))
  n = len(data[0]) // size * size
  for i in range(0, n, size):
    total = total + np.asarray(
      run(own, params, *(x[i : i + size] for x in data))
    )
  count: Any = n
  if kind in losses_lib.ROWS:
    count = n * found.x.shape[1]
  if kind == 'falcon':  # of every pass
    length = found.x.shape[1]
    each = [len(range(length)[s]) for s in losses_lib.falcon_places(length)]
    count = n * np.tile(each, losses_lib.COUNTED)[:, None]
  if kind == 'eagle':  # drafts behind the tokens of a row
    count = count - n * np.arange(len(total))[:, None]
  if kind == 'ppd':  # the last tokens of a row have no targets
    count = count - n * (1 + np.arange(len(total))[:, None])
  return tuple(map(tuple, (total / count).tolist()))


def untrained(model, params, kind, fingerprint, spread=0.1, words=()):
  """(heads.About, {name: array}) of a draft with random parameters: what is
  lossless must not depend on how good it is.

  Args:
    model, params: as for `features`. kind: of heads.KINDS, not speculative.
    fingerprint: of the tokenizer. spread: deviation of its parameters.
    words: ids that it says; (): all.
  """
  config, rng = model.config, np.random.default_rng(7)
  if kind == 'eagle':
    own = eagle.initial(model, params)
  elif kind == 'falcon':
    own = falcon.initial(model, params)
  elif kind == 'ppd':
    own = {prompt_tokens.PROMPTS: np.zeros((3, config.d_model))}
  else:
    own = heads.initial(3, config.d_model)
  own = {n: x + rng.normal(0, spread, x.shape) for n, x in own.items()}
  if len(words):
    own[heads.WORDS] = np.sort(words).astype(np.int32)
  accuracy = ((0.4, 0.3, 0.2),) * 3
  shape = config.vocab_size, config.d_model, config.num_layers
  return heads.About(kind, 0, shape, fingerprint, accuracy), own


def rows_of(ids, length):
  """(N, length) int32 of a list of documents' ids, one after the other.

  Raises:
    UserError: there are none.
  """
  if not ids:
    raise errors.UserError(
      f'there is no text for rows of {length} tokens: no document is long '
      'enough, or the model ended every text before; take a smaller --length, '
      'or other --data.'
    )
  flat = np.concatenate([np.asarray(x, np.int32) for x in ids])
  n = len(flat) // length
  return flat[: n * length].reshape(n, length)


def train(built_model, params, tokenizer, rows_NT, kind, layers, recipe, say):
  """(heads.About, {name: array}) of a draft for a model.

  Args:
    built_model, params: as for `features`.
    tokenizer: models.text.tokenizer, of the model.
    rows_NT: text; the last part, `recipe.held`, is held out.

  Raises:
    UserError: too little text for a batch of rows on each side.
  """
  least = recipe.rows
  n = len(rows_NT) // least * least  # whole passes
  held = max(least, int(n * recipe.held) // least * least)
  if n - held < least:
    few = 2 * least
    raise errors.UserError(
      f'{len(rows_NT)} rows of {recipe.length} tokens of text: a draft needs '
      f'at least {few}, {few * recipe.length:,} tokens; give more text.'
    )
  say(
    f'{n - held} rows of {recipe.length} tokens to learn from, {held} held '
    f'out, {len(rows_NT) - n} left over'
  )
  given = built_model, params
  found = features(*given, rows_NT, layers, recipe.rows)
  words, split = None, n - held
  if recipe.words:
    both = np.concatenate([found.choice[:split], found.tokens[:split]])
    words = words_of(both, recipe.words)
    found = found._replace(choice=places(words, found.choice))
    missed = np.mean(found.choice[split:] < 0)
    say(f'{len(words)} words; {missed:.1%} of held-out choices are others')
  seen, kept = (Features(*(x[s] for x in found))
                for s in (slice(split), slice(split, None)))  # fmt: skip
  if recipe.group > 1:
    x = grouped(*given, rows_NT[:split], layers, recipe.group)
    both = zip(seen, seen._replace(x=x), strict=True)
    seen = Features(*map(np.concatenate, both))
  own = fit(*given, seen, kind, recipe, words, say)
  now = accuracy(*given, own, kept, kind, words, recipe.choices)
  own |= {} if words is None else {heads.WORDS: words}
  first = ', '.join(f'{a[0]:.3f}' for a in now)
  say(f"held-out, the first choice is the model's: {first}")
  config = built_model.config
  shape = config.vocab_size, config.d_model, config.num_layers
  about = heads.About(kind, layers, shape, tokenizer.fingerprint, now)
  return about, own
