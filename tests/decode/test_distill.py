"""Drafts are trained to say what the model would say, and kept in a file."""

import dataclasses

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.decode import step
from paraxis.decode.drafts import distill
from paraxis.decode.drafts import eagle
from paraxis.decode.drafts import falcon
from paraxis.decode.drafts import heads
from paraxis.decode.drafts import losses
from paraxis.decode.drafts import prompt_tokens
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.models.mixers import packed

V, D, LAYERS = 12, 16, 2
RECIPE = distill.Recipe(
  heads=2, length=16, rows=4, steps=60, batch=64, held=0.3
)
KINDS = ('medusa', 'speculative', 'eagle', 'falcon', 'ppd')


@pytest.fixture
def made():
  """(decoder, its parameters, rows of random text), on its mesh."""
  generator = module_cases.generator('F', dtype='float32')
  rng = np.random.default_rng(1)
  text = rng.integers(1, V, (16, RECIPE.length)).astype(np.int32)
  with build.use(generator.built):
    yield generator.built.model, generator._params, text


def given(kind):
  return kind, 1 if kind == 'speculative' else 0


def test_features_are_those_of_the_whole_pass(made):
  model, params, text = made
  found = distill.features(model, params, text, 0, RECIPE.rows)
  stacked = module_cases.parameters(model, 0.4)
  ones = np.ones_like(text)
  batch = batch_lib.Batch(text, None, ones, ones.cumsum(1) - 1, None, None)
  x, _ = model.features(stacked, batch)
  np.testing.assert_allclose(found.x, x, atol=2e-5)
  z = model.logits(stacked, x)
  assert (found.choice == np.argmax(z, -1)).mean() > 0.99
  assert (found.tokens == text).all()


@pytest.mark.parametrize('group', (1, 2))
def test_grouped_features_stand_behind_exact_keys(made, group):
  """Token by token, behind a prompt that was read as a whole."""
  model, params, text = made
  got = distill.grouped(model, params, text[:5], LAYERS, group, size=2)
  form = (packed.Group(5, 1),)
  for t in range(1, text.shape[1]):
    lengths = jnp.full(5, t, jnp.int32)
    _, cache = step.prefill(model, params, text[:5, :t], lengths, t + 1)
    one = step.rows(text[:5, t : t + 1], lengths // t, lengths)
    x, _ = model.step(params, cache, one, form, together=group)
    np.testing.assert_allclose(got[:, t], x[:, 0], atol=2e-5)
  exact = distill.features(model, params, text[:4], LAYERS, 4).x
  differ = np.abs(exact - got[:4]).max()
  assert differ > 0.01 if group > 1 else differ < 2e-5


def test_a_draft_learns_from_groups_of_layers(made, monkeypatch):
  model, params, text = made
  seen = []
  fit = distill.fit

  def watched(model, params, found, *more):
    seen.append(found)
    return fit(model, params, found, *more)

  monkeypatch.setattr(distill, 'fit', watched)
  for group in (1, 2):
    recipe = RECIPE._replace(steps=1, group=group)
    distill.train(
      model, params, module_cases.Numbers(V), text, 'speculative', LAYERS,
      recipe, lambda line: None,
    )  # fmt: skip
  alone, both = seen
  n = len(alone.x)
  assert len(both.x) == 2 * n
  for a, b in zip(alone, both, strict=True):
    np.testing.assert_array_equal(a, b[:n])
  np.testing.assert_array_equal(both.choice[n:], alone.choice)
  assert np.abs(both.x[n:] - alone.x).max() > 0.01


@pytest.mark.parametrize('kind, first', [('medusa', 1), ('speculative', 0)])
def test_targets_are_a_plain_loop(kind, first):
  choice = np.arange(20).reshape(2, 10)
  found = distill.targets(choice, kind, 2)
  for n, t, k in np.ndindex(found.shape):
    assert found[n, t, k] == choice[n, t + first + k]


@pytest.mark.parametrize('kind', KINDS)
def test_training_makes_more_choices_right(made, kind):
  model, params, text = made
  name, layers = given(kind)
  tokenizer = module_cases.Numbers(V)
  said = []
  learn = lambda recipe: distill.train(
    model, params, tokenizer, text, name, layers, recipe, said.append
  )
  about, own = learn(RECIPE._replace(rate=0.1 if kind == 'ppd' else 1e-2))
  idle, same = learn(RECIPE._replace(rate=0.0))
  assert about.model == (V, D, LAYERS) and about.kind == kind
  loss, still = (float(x.split()[-1]) for x in said if ' loss ' in x)
  assert loss < still - 0.02
  if kind != 'ppd':  # 32 numbers lower the loss of random text, not its choices
    assert sum(a[0] for a in about.accuracy) > sum(a[0] for a in idle.accuracy)
  changed = [np.abs(own[n] - same[n]).max() for n in own]
  assert min(changed) > 0
  assert all(
    0 <= r <= 1 and sum(row) <= 1 + 1e-6 for row in about.accuracy for r in row
  )


def test_accuracy_is_a_plain_loop(made):
  model, params, text = made
  found = distill.features(model, params, text, 0, RECIPE.rows)
  rng = np.random.default_rng(2)
  own = {
    n: rng.normal(0, 0.3, x.shape).astype(np.float32)
    for n, x in heads.initial(2, D).items()
  }
  got = distill.accuracy(model, params, own, found, 'medusa', choices=4, size=7)
  hits, count = np.zeros((2, 4)), 0
  length = text.shape[1] - 2
  for n in range(len(text)):
    for t in range(length):
      if count == len(text) * length // 7 * 7:
        break
      count += 1
      for k in range(2):
        x = found.x[n, t]
        x = x + jax.nn.silu(x @ own['weight'][k, 0] + own['bias'][k, 0])
        z = np.asarray(model.logits(params, jnp.asarray(x)[None, None])[0, 0])
        best = np.argsort(-z)[:4]
        hits[k] += best == found.choice[n, t + 1 + k]
  np.testing.assert_allclose(got, hits / count, atol=0.011)


@pytest.mark.parametrize('words', (None, np.arange(1, V)))
def test_a_falcon_that_is_always_right_is_told_so(made, words):
  """The last token of a row has nothing behind it to be right about. Where
  only the first drafts of blocks are right, only those are told so."""
  model, params, text = made
  found = distill.features(model, params, text, 0, RECIPE.rows)
  own = falcon.initial(model, params)
  layer = eagle.layer_of(model)
  x = eagle.before(jnp.asarray(found.x))
  after = falcon.features(layer, params, own, jnp.asarray(text), x)
  best = np.argmax(model.logits(params, after, words), -1)
  choice = np.pad(best[:, : 1 - falcon.BLOCK], ((0, 0), (1, 0)))
  found = found._replace(choice=choice.astype(np.int32))
  got = distill.accuracy(model, params, own, found, 'falcon', words, choices=1)
  assert got[:2] == ((1.0,), (1.0,))
  choice[:, choice.shape[1] - 2 :: -2] = -1  # the second ones have targets
  found = found._replace(choice=choice.astype(np.int32))
  got = distill.accuracy(model, params, own, found, 'falcon', words, choices=1)
  assert got[:2] == ((1.0,), (0.0,))


@pytest.mark.parametrize(
  'kind, batch, tokens',
  [('eagle', 40, 32), ('falcon', 3, 16), ('ppd', 40, 32), ('medusa', 40, 40)],
)
def test_tokens_of_a_step_are_those_of_its_rows(made, kind, batch, tokens):
  model, params, text = made
  found = distill.features(model, params, text, 0, RECIPE.rows)
  recipe, said = RECIPE._replace(steps=1, batch=batch), []
  distill.fit(model, params, found, kind, recipe, say=said.append)
  assert said[0].startswith(f'{kind}: 1 steps of {tokens} tokens, loss')


def test_words_are_the_most_frequent_choices():
  rng = np.random.default_rng(3)
  choice = rng.integers(0, 9, (5, 30)) ** 2
  words = distill.words_of(choice, 4)
  counts = sorted((-(choice == i).sum(), i) for i in set(choice.flat))
  assert words.tolist() == sorted(i for _, i in counts[:4])
  at = distill.places(words, choice)
  for i, place in zip(choice.flat, at.flat, strict=True):
    assert (words[place] == i) if i in words else place == -1
  assert len(distill.words_of(choice, 99)) == len(counts)


@pytest.mark.parametrize('kind', ('medusa', 'eagle'))
def test_a_draft_of_few_words_is_as_accurate_as_its_words_allow(made, kind):
  """Choices that are none of its words are wrong; of the others, the logits
  are those of all words."""
  model, params, text = made
  found = distill.features(model, params, text, 0, RECIPE.rows)
  words = distill.words_of(found.choice, 5)
  _, own = distill.untrained(model, params, kind, 'numbers', words=words)
  placed = found._replace(choice=distill.places(words, found.choice))
  few = distill.accuracy(model, params, own, placed, kind, words)
  every = distill.accuracy(model, params, own, placed, kind, np.arange(V))
  assert sum(few[0]) <= (placed.choice >= 0).mean() + 0.05
  assert few != every
  x = jnp.asarray(found.x[:, :3])
  z, all_z = heads.logits(model, params, own, x), model.logits(params, x)
  np.testing.assert_allclose(z[..., words], all_z[..., words], atol=1e-6)
  others = np.setdiff1d(np.arange(V), words)
  assert (z[..., others] == heads.NEVER).all()


def test_passes_of_eagle_are_what_a_call_makes(made):
  """Draft j behind a token, of the text up to it with the model's features and
  j drafts with the layer's own, one row for each."""
  model, params, text = made
  _, own = distill.untrained(model, params, 'eagle', 'numbers')
  layer, ids, depth = eagle.layer_of(model), text[:2, :9], 3
  x = np.random.default_rng(4).normal(size=(2, 9, D)).astype(np.float32)

  def features(tokens, before):
    size = len(before)
    made, _ = step.prefill(
      layer, params | own, jnp.asarray(tokens[None, :size]),
      jnp.full(1, size, jnp.int32), size, eagle.begin(own, before[None]),
    )  # fmt: skip
    return np.asarray(made[0])

  given = layer, params, own
  found = list(eagle.passes(*given, jnp.asarray(ids), jnp.asarray(x), depth))
  assert len(found) == depth
  far = 0
  for n, root in np.ndindex(2, 9 - depth + 1):
    before = np.pad(x[n, :root], ((1, 0), (0, 0)))
    for j in range(depth):
      made = features(ids[n], before)
      at = root + j
      np.testing.assert_allclose(found[j][n, at], made[-1], atol=2e-5)
      before = np.concatenate([before, made[-1:]])
      # The test can fail: with own features before all tokens, others come.
      if j:
        every = np.pad(np.asarray(found[j - 1])[n, :at], ((1, 0), (0, 0)))
        far = max(far, np.abs(features(ids[n], every)[-1] - made[-1]).max())
  assert far > 1e-3


def test_eagle_learns_the_distribution_of_the_model(made):
  """Of each pass, by hand: no place before its first draft counts, and none
  whose likeliest token is no word of the draft."""
  model, params, text = made
  _, own = distill.untrained(model, params, 'eagle', 'numbers')
  words = np.arange(1, V)
  found = distill.features(model, params, text[:4], 0, 4)
  choice = distill.places(words, found.choice)
  choice[:, 3] = -1
  given = jnp.asarray(found.x), jnp.asarray(choice), jnp.asarray(text[:4])
  loss = losses.of(model, 'eagle', words)(own, params, *given)
  layer, total = eagle.layer_of(model), 0.0
  logits = lambda x: np.float64(model.logits(params, x, words))
  soft = lambda z: z - np.log(np.exp(z).sum(-1, keepdims=True))
  p = np.exp(soft(logits(given[0])))
  every = eagle.passes(layer, params, own, given[2], given[0], losses.PASSES)
  for j, x in enumerate(every):
    q, sums = soft(logits(x)), []
    for n, t in np.ndindex(4, RECIPE.length):
      if t >= j:
        off = np.float64(x[n, t]) - found.x[n, t]
        near = np.where(abs(off) < 1, off**2 / 2, abs(off) - 0.5).mean()
        nll = 0 if choice[n, t] < 0 else -(p[n, t] * q[n, t]).sum()
        sums.append(nll + losses.NEAR * near)
    total += 0.8**j * np.mean(sums)
  weight = sum(0.8**j for j in range(losses.PASSES))
  assert float(loss) == pytest.approx(total / weight, rel=1e-5)


def test_prompt_tokens_see_the_text_before_them_and_nobody_sees_them(made):
  """Features of prompt tokens are those of a row that ends with them."""
  model, params, text = made
  count, text = 2, jnp.asarray(text[:2, :6])
  rng = np.random.default_rng(3)
  own = {prompt_tokens.PROMPTS: jnp.asarray(rng.normal(size=(count, D)))}
  found = prompt_tokens.features(model, params, own, text)
  for t in range(6):
    ids = jnp.pad(text[:, : t + 1], ((0, 0), (0, count)))
    which = np.concatenate([np.full(t + 1, -1), np.arange(count)])
    whole = jnp.full(2, t + 1 + count, jnp.int32)
    x, _ = step.prefill(
      model, params, ids, whole, t + 1 + count, prompt_tokens.begin(own, which)
    )
    np.testing.assert_allclose(found[:, t], x[:, t + 1 :], atol=2e-5)
  # The test can fail: other text before them, other features.
  other = prompt_tokens.features(model, params, own, text.at[:, 0].add(1))
  assert np.abs(other - found).min() > 1e-4


def test_targets_of_prompt_tokens_are_a_plain_loop():
  choice = np.arange(10).reshape(2, 5)
  found = prompt_tokens.targets(jnp.asarray(choice), 3)
  for n, t, i in np.ndindex(found.shape):
    there = t + i + 1 < 5
    assert found[n, t, i] == (choice[n, t + i + 1] if there else -1)


@pytest.mark.fault(40)
def test_a_file_holds_what_was_saved(made, tmp_path, monkeypatch):
  def full(file, **arrays):
    raise OSError('the disk is full')

  model, _, _ = made
  about = heads.About('medusa', 0, (V, D, LAYERS), 'numbers', ((0.5, 0.2),))
  own = {n: x + 1 for n, x in heads.initial(2, D).items()}
  path = tmp_path / 'draft.npz'
  heads.save(path, about, own)
  read, arrays = heads.load(path, model.config, 'numbers')
  assert read == about
  assert all((arrays[n] == own[n]).all() for n in own)
  assert [p.name for p in tmp_path.iterdir()] == ['draft.npz']
  before = path.read_bytes()
  with monkeypatch.context() as patch, pytest.raises(OSError, match='full'):
    patch.setattr(np, 'savez', full)
    heads.save(path, about, own)
  assert [p.name for p in tmp_path.iterdir()] == ['draft.npz']
  assert path.read_bytes() == before
  with support.refused('another tokenizer', 'paraxis draft'):
    heads.load(path, model.config, 'other')
  wide = dataclasses.replace(model.config, vocab_size=13)
  with support.refused('vocabulary 12, here 13'):
    heads.load(path, wide, 'numbers')
  heads.save(path, about, own | {'bias': own['bias'] * np.nan})
  with support.refused('bias are not finite'):
    heads.load(path, model.config, 'numbers')
  heads.save(path, about, own | {heads.WORDS: np.array([3, V], np.int32)})
  with support.refused('ids 3 to 12, the vocabulary has 12'):
    heads.load(path, model.config, 'numbers')
  for left in (path.read_bytes()[:-40], b''):
    path.write_bytes(left)
    with support.refused('no trained draft'):
      heads.load(path, model.config, 'numbers')


def test_a_file_stays_until_the_next_one_is_whole(tmp_path, monkeypatch):
  about = heads.About('medusa', 0, (V, D, LAYERS), 'numbers')
  path = tmp_path / 'draft.npz'
  heads.save(path, about, heads.initial(2, D))
  before = path.read_bytes()

  def full(file, **arrays):
    del arrays
    file.write(b'PK')
    raise OSError('no space left on device')

  with monkeypatch.context() as patched:
    patched.setattr(np, 'savez', full)
    with pytest.raises(OSError, match='no space'):
      heads.save(path, about, heads.initial(3, D))
  assert path.read_bytes() == before
  heads.save(path, about, heads.initial(3, D))
  assert path.read_bytes() != before
  assert [file.name for file in tmp_path.iterdir()] == ['draft.npz']


def test_too_little_text(made):
  model, params, text = made
  with support.refused('4 rows of 16 tokens', '128 tokens'):
    distill.train(
      model, params, module_cases.Numbers(V), text[:4], 'medusa', 0, RECIPE,
      print,
    )  # fmt: skip


def test_a_block_of_falcon_sees_itself_and_nothing_behind_it(made):
  """Counted from the last token, two by two; a plain mask says the same."""
  model, params, text = made
  _, own = distill.untrained(model, params, 'falcon', 'numbers')
  layer = eagle.layer_of(model)
  ids = jnp.asarray(text[:1, :7])
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 7, D)), jnp.float32)
  given = layer, params, own
  whole = falcon.features(*given, ids, x)
  for t in range(7):
    other = ids.at[:, t].set((ids[:, t] + 1) % V)
    found = falcon.features(*given, other, x)
    changed = np.abs(found - whole).max((0, 2)) > 0
    # 7 tokens: the first is alone, then 1 2, 3 4, 5 6.
    first = t if t == 0 or t % 2 else t - 1
    assert changed.tolist() == [i >= first for i in range(7)]


def test_falcon_is_shown_a_share_of_its_errors(made):
  """Tokens and features k ahead, at first places of blocks, counted from the
  row's end, as many as a share of each row's errors, others in other steps."""
  ids = jnp.arange(22).reshape(2, 11)
  x = ids[..., None] * np.ones(3) + 0.5
  wrong, k, seen = jnp.array([0, 5]), falcon.BLOCK, set()
  for i in range(8):
    key = jax.random.key(i)
    tokens, before = losses.shown(key, wrong, 0.7, ids, x)
    here = np.asarray(tokens != ids)
    assert here.sum(1).tolist() == [0, 3]
    assert (tokens[here] == ids[here] + k).all()
    assert (before == tokens[..., None] + 0.5).all()
    assert {*np.argwhere(here)[:, 1]} <= {1, 3, 5, 7}
    seen.add(tuple(np.argwhere(here)[:, 1]))
    again, _ = losses.shown(key, wrong, 0.7, ids, x)
    np.testing.assert_array_equal(again, tokens)
  assert len(seen) > 1
  every, _ = losses.shown(key, 99 * wrong, 1.0, ids, x)
  assert np.asarray(every != ids).sum(1).tolist() == [0, 4]


def test_falcon_learns_the_pass_that_was_shown_answers(made, monkeypatch):
  """By hand: errors of a first pass, which has no gradient, then cross entropy
  with the model's distribution k - 1 places later, of words alone."""
  model, params, text = made
  monkeypatch.setattr(losses, 'NOISE', 0.0)
  _, own = distill.untrained(model, params, 'falcon', 'numbers')
  words, k = np.arange(1, V), falcon.BLOCK
  found = distill.features(model, params, text[:4], 0, 4)
  choice = distill.places(words, found.choice)
  choice[:, 5] = -1
  x, ids, key = jnp.asarray(found.x), jnp.asarray(text[:4]), jax.random.key(3)
  loss = losses.of(model, 'falcon', words)
  got = loss(own, params, x, jnp.asarray(choice), ids, key, 0.6)
  layer = eagle.layer_of(model)
  run = lambda *given: falcon.features(layer, params, own, *given)
  logits = lambda x: np.float64(model.logits(params, x, words))
  first = logits(run(ids, eagle.before(x))).argmax(-1)
  wrong = np.zeros(4)
  for n, t in np.ndindex(4, RECIPE.length - k + 1):
    y = choice[n, t + k - 1]
    wrong[n] += y >= 0 and y != first[n, t]
  assert wrong.min() > 3
  given = ids, eagle.before(x)
  _, places = jax.random.split(key)
  made_of = run(*losses.shown(places, jnp.asarray(wrong), 0.6, *given))
  soft = lambda z: z - np.log(np.exp(z).sum(-1, keepdims=True))
  p, q, sums = np.exp(soft(logits(x))), soft(logits(made_of)), []
  for n, t in np.ndindex(4, RECIPE.length - k + 1):
    later = t + k - 1
    off = np.float64(made_of[n, t]) - found.x[n, later]
    near = np.where(abs(off) < 1, off**2 / 2, abs(off) - 0.5).mean()
    nll = 0 if choice[n, later] < 0 else -(p[n, later] * q[n, t]).sum()
    sums.append(nll + losses.NEAR * near)
  assert float(got) == pytest.approx(np.mean(sums), rel=1e-5)
  none = loss(own, params, x, jnp.asarray(choice), ids, key, 0.0)
  assert abs(float(none) - float(got)) > 1e-4
  assert (
    losses.drawn('falcon', key, 0.0)[1] > losses.drawn('falcon', key, 1.0)[1]
  )


def test_the_memory_of_falcon_is_that_of_a_plain_loop(made):
  model, params, _ = made
  _, own = distill.untrained(model, params, 'falcon', 'numbers')
  rng = np.random.default_rng(1)
  e, x = (rng.normal(size=(1, 4, D)).astype(np.float32) for _ in range(2))
  found, (hs, cs) = falcon.mixed(
    own, jnp.asarray(e), jnp.asarray(x), falcon.empty(1, D, jnp.float32)
  )
  sigmoid = lambda z: 1 / (1 + np.exp(-z))
  h, c = np.zeros((2, D)), np.zeros((2, D))
  for t in range(4):
    u = np.concatenate([e[0, t], x[0, t]])
    for i in range(2):
      w, r, b = (own[f'lstm/{i}/{n}'] for n in ('input', 'state', 'bias'))
      enter, keep, out, new = np.split(u @ w + h[i] @ r + b, 4)
      c[i] = sigmoid(keep + 1) * c[i] + sigmoid(enter) * np.tanh(new)
      h[i] = u = sigmoid(out) * np.tanh(c[i])
    np.testing.assert_allclose(found[0, t], x[0, t] + u, atol=2e-5)
    np.testing.assert_allclose(hs[t, 0], h, atol=2e-5)
    np.testing.assert_allclose(cs[t, 0], c, atol=2e-5)
