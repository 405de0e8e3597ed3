"""Drafts change how many calls a text takes, and nothing of the text.

Legend: B rows, C drafts, V vocabulary.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import decode as decode_fields
from paraxis.decode import __main__ as command
from paraxis.decode import judges
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.decode import trees
from paraxis.decode.drafts import copying
from paraxis.decode.drafts import distill
from paraxis.decode.drafts import drafters
from paraxis.decode.drafts import eagle as eagle_lib
from paraxis.decode.drafts import heads
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.models.mixers import packed
from paraxis.train.claims.decode import lossless

pytestmark = pytest.mark.usefixtures('float64')

V = 12
LOOKUP = dict(method='prompt_lookup', drafts=3)
DRAFT = dict(method='speculative', drafts=3, draft_layers=1)
AGGRESSIVE = dict(method='aggressive', drafts=5)
JACOBI = dict(method='jacobi', drafts=5)
PEARL = dict(method='pearl', drafts=3, draft_layers=1)
EASYSPEC = dict(method='easyspec', drafts=3, draft_layers=2, draft_group=2)
PATTERNS = ('F', 'WFN', 'A', 'G', 'M', 'R', 'C', 'H', 'GF')
SLOTS = ('F', 'WFN', 'A')
SAMPLED = dict(temperature=0.8, top_k=6, seed=3)
GREEDY = dict(temperature=0.0)
TYPICAL = dict(judge='typical')
generator = module_cases.generator


PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5] * 6, [7, 8, 9, 10, 11, 0]]


def texts(results):
  return [r['tokens'] for r in results]


@pytest.fixture(scope='module')
def medusa(tmp_path_factory):
  """Options of heads that nobody trained, with a tree of 11 drafts."""
  path = str(tmp_path_factory.mktemp('draft') / 'heads.npz')
  accuracy = ((0.4, 0.3, 0.2, 0.1), (0.5, 0.3, 0.2, 0.0), (0.6, 0.2, 0.1, 0.1))
  about = heads.About('medusa', 0, (V, 16, 3), 'numbers', accuracy)
  keys = np.random.default_rng(4)
  own = {n: keys.normal(size=x.shape) for n, x in heads.initial(3, 16).items()}
  options = dict(method='medusa', draft=path, drafts=11)

  def of(pattern):
    layers = max(2, len(pattern))
    heads.save(path, dataclasses.replace(about, model=(V, 16, layers)), own)
    return options

  return of


@pytest.fixture(scope='module')
def eagle(tmp_path_factory):
  """Options of a draft layer that nobody trained."""
  path = str(tmp_path_factory.mktemp('draft') / 'eagle.npz')

  def of(pattern):
    made = generator(pattern).built.model
    about = heads.About('eagle', 0, (V, 16, made.config.num_layers), 'numbers')
    params = made.unstack(module_cases.parameters(made, 0.4))
    own = eagle_lib.initial(made, params)
    noise = np.random.default_rng(5)
    own = {n: x + noise.normal(0, 0.1, x.shape) for n, x in own.items()}
    heads.save(path, about, own)
    return dict(method='eagle', draft=path, drafts=3)

  return of


@pytest.fixture
def untrained(tmp_path):
  """Options of a draft of a kind that nobody trained, of some words."""

  def of(pattern, kind, words=(), made=None):
    made = (made or generator(pattern)).built.model
    params = made.unstack(module_cases.parameters(made, 0.4))
    given = made, params, kind, 'numbers'
    path = str(tmp_path / f'{kind}.npz')
    heads.save(path, *distill.untrained(*given, words=words))
    return dict(method=kind, draft=path, drafts=4)

  return of


CASES = [
  *itertools.product(PATTERNS, (LOOKUP, DRAFT, AGGRESSIVE, JACOBI)),
  *itertools.product(SLOTS, (PEARL, 'medusa', 'eagle', 'falcon', 'ppd')),
  *((pattern, EASYSPEC) for pattern in ('FFF', 'WFN', 'AAA')),
]


@pytest.mark.sampled(96)
@pytest.mark.parametrize('options', (GREEDY, SAMPLED), ids=('greedy', 'drawn'))
@pytest.mark.parametrize(
  'pattern, method',
  CASES,
  ids=[f'{p}-{m if isinstance(m, str) else m["method"]}' for p, m in CASES],
)
def test_replayed_drafts_give_the_text_of_one_by_one(
  pattern, method, options, medusa, eagle, untrained
):
  made = generator(pattern)
  if isinstance(method, str):
    made._draft.cache_clear()
    of = {k: functools.partial(untrained, kind=k) for k in ('falcon', 'ppd')}
    method = (of | dict(medusa=medusa, eagle=eagle))[method](pattern)
  want = made.generate(PROMPTS, **options)
  found = made.generate(PROMPTS, **options, **method)
  assert texts(found) == texts(want)
  for a, b in zip(found, want, strict=True):
    np.testing.assert_allclose(a['logprobs'], b['logprobs'], atol=1e-5)
    assert sum(n * c for n, c in enumerate(a['lengths'])) == 23
    assert sum(a['lengths']) == a['calls'] and not a['lengths'][0]
  calls = sum(r['calls'] for r in found)
  assert sum(r['calls'] for r in want) == 3 * 23 and calls <= 3 * 23
  if method in (DRAFT, JACOBI):
    assert calls < 3 * 23  # some drafts are kept


@pytest.mark.parametrize('options', (GREEDY, SAMPLED), ids=('greedy', 'drawn'))
def test_a_tree_of_two_words_of_nodes(medusa, options):
  """60 drafts: the same text, in no more calls than 11 of them take."""
  made, method = generator('F'), medusa('F')
  made._draft.cache_clear()
  want, few = made.generate(PROMPTS, **options), {}
  for drafts in (11, 60):
    found = made.generate(PROMPTS, **options, **method | dict(drafts=drafts))
    assert texts(found) == texts(want)
    few[drafts] = [r['calls'] for r in found]
  assert all(b <= a for a, b in zip(few[11], few[60], strict=True)), few


@pytest.mark.sampled(6)
@pytest.mark.parametrize('mesh', ('', 'data=2,fsdp=2,tensor=2'))
@pytest.mark.parametrize('kind', ('medusa', 'eagle', 'falcon'))
def test_a_draft_of_few_words_changes_no_text(kind, mesh, untrained):
  """On a mesh too, whose shards hold parts of the head."""
  words = (1, 3, 4, 7, 8)
  one = generator('F')
  method = untrained('F', kind, words)
  many = generator('F', mesh=mesh, devices=8) if mesh else one
  for made in {one, many}:
    made._draft.cache_clear()
  want = one.generate(PROMPTS, **SAMPLED)
  found = many.generate(PROMPTS, **SAMPLED, **method)
  assert texts(found) == texts(want)
  every = one.generate(PROMPTS, **SAMPLED, **untrained('F', kind))
  assert texts(every) == texts(want)


@pytest.mark.parametrize('group', (1, 2, 3))
def test_keys_of_a_group_of_layers_are_replaced_by_exact_ones(group):
  """The draft model's cache, bitwise that of reading the same calls exactly;
  without that it would not be (arXiv:2502.02493: bonus calibration)."""
  made = generator('FFF')
  with build.use(made.built):
    _exact_keys(made, group)


def _exact_keys(made, group):
  params, model = proposal.Params(made.params), made.built.model
  draft = drafters.Draft(model)
  easy = drafters.EasySpec(draft, 2, group, coupled=True)
  tokens = jnp.asarray(PROMPTS[:2][0][:6])[None].repeat(2, 0)
  lengths, live = jnp.full(2, 6, jnp.int32), jnp.ones(2, bool)
  form, values = sampling.check(schema.Decode(temperature=0.0), V)
  draws = judges.Draws(form, values, jnp.arange(2, dtype=jnp.uint32), lengths)
  own = easy.start(params, tokens, lengths, 24, None)
  prefill = jax.jit(step.prefill, static_argnums=(0, 4))
  propose = jax.jit(
    lambda own: easy.propose(params, own, first[:, 0], live, draws)
  )
  first = jnp.array([[3], [4]], jnp.int32)
  seen = lambda tokens, n: proposal.Seen(
    tokens, jnp.asarray(n, jnp.int32), None, None, None, None
  )
  own = easy.first(own, seen(first, [1, 1]))
  drafts, held = propose(own)
  fuzzy = held[1]
  new = jnp.concatenate([drafts.tokens, first], 1)
  own = easy.settle(held, seen(new, [3, 2]))
  _, (_, _, length) = propose(own)
  assert length.tolist() == [6 + 1 + 3, 6 + 1 + 2]
  exact = propose(own)[1][1]
  # Plainly: the text's own tokens, one after the other.
  for row, n in ((0, 3), (1, 2)):
    text = [*tokens[row].tolist(), int(first[row, 0]), *new[row, :n].tolist()]
    ids = jnp.asarray([text] * 2, jnp.int32)
    whole = jnp.full(2, len(text), jnp.int32)
    _, want = prefill(model, params.model, ids, whole, 24)
    cut = np.s_[row, :, : len(text)]
    pairs = zip(jax.tree.leaves(exact.states), jax.tree.leaves(want.states),
                strict=True)  # fmt: skip
    for a, b in pairs:
      np.testing.assert_allclose(a[cut], b[cut], atol=1e-12)
    far = [
      np.abs(np.asarray(a)[row, :, 7:9] - np.asarray(b)[row, :, 7:9]).max()
      for a, b in zip(
        jax.tree.leaves(fuzzy.states), jax.tree.leaves(want.states),
        strict=True)
    ]  # fmt: skip
    assert (max(far) > 1e-6) == (group > 1)


def test_layers_that_read_the_same_features_are_a_plain_loop():
  """x + mixer_i(x of the group's first layer), then x + mlp_i(x)."""
  made = generator('FFF')
  model, params = made.built.model, made.params
  ids = jnp.asarray([[1, 2, 3, 4]], jnp.int32).repeat(2, 0)
  form = (packed.Group(2, 4, fresh=True),)
  rows = step.rows(ids, jnp.full(2, 4, jnp.int32))
  cache = model.init_cache(2, 8)
  run = lambda n: model.step(params, cache, rows, form, together=n)[0]
  assert (run(1) == model.step(params, cache, rows, form)[0]).all()
  assert np.abs(run(2) - run(1)).max() > 1e-6
  # One group of all: the mixers read the embedded tokens alone.
  plan = packed.plan(form, rows, cache.length)
  batch = batch_lib.Batch(ids, None, jnp.ones_like(ids), rows.position, None,
                          None)  # fmt: skip
  x, see = model._begun(params, batch)
  see, first, i = see._replace(plan=plan), x, 0
  for kind in model.pattern:
    at = f'layers/{i}/'
    own = {p.removeprefix(at): v for p, v in params.items() if at in p}
    layer = model.stack._kinds[kind].module(own)
    y, _, _ = layer.mixer.decode(
      layer._before(layer.mixer.name, first), see, cache.states[i]
    )
    x = x + y
    x = x + layer.mlp(layer._before('mlp', x))
    i += 1
  x = model.normalise(params, x)
  np.testing.assert_allclose(run(len(model.pattern)), x, atol=1e-12)


def test_a_tree_that_holds_every_token_makes_as_many_as_it_is_deep():
  """Each branch holds one token of the vocabulary: one is always kept."""
  made = generator('F', 3)
  want = made.generate([[1, 2]], **SAMPLED | dict(top_k=0))
  tree = trees.of_paths(itertools.product(range(3), repeat=2))

  class Every(proposal.Autoregressive):
    def propose(self, params, own, token_B, live_B, draws):
      tokens = jnp.asarray([tree.ranks] * len(token_B), jnp.int32)
      return judges.Drafts(tokens, tokens >= 0), own

  Every.tree = tree
  every = Every()
  made._method = lambda *_: every
  found = made.generate([[1, 2]], **SAMPLED | dict(top_k=0))
  generator.cache_clear()
  assert texts(found) == texts(want)
  assert found[0]['lengths'] == [0, 0, 1, 7]  # 23 = 7 x 3 + 2 at the limit


def test_a_judge_that_keeps_too_much_is_seen(monkeypatch):
  made = generator('F')
  want = texts(made.generate(PROMPTS, **GREEDY))

  def one_more(z, drafts, draws, tree):
    tokens, n, at = judges.replay(z, drafts, draws, tree)
    more = jnp.minimum(n + 1, drafts.valid.sum(1, dtype=jnp.int32))
    kept = jnp.concatenate([drafts.tokens, tokens[:, -1:]], 1)
    place = jnp.arange(tokens.shape[1])
    tokens = jnp.where(place < more[:, None], kept, tokens)
    return judges.Judged(tokens, more, at)

  liar = judges.Judge(True, True, one_more)
  monkeypatch.setitem(judges.JUDGES, 'replay', liar)
  generator.cache_clear()
  assert texts(generator('F').generate(PROMPTS, **GREEDY, **DRAFT)) != want
  generator.cache_clear()


def test_ends_stops_and_streams_are_those_of_one_by_one():
  plain = texts(generator('F').generate(PROMPTS, **SAMPLED))
  end = plain[0][9]
  made = generator('F', end_id=end)
  whole = [
    r['text']
    for r in made.generate(PROMPTS, **SAMPLED)
    if r['finish'] == 'length'
  ]
  stop = whole[0][7:9]
  for method in ({}, LOOKUP, DRAFT):
    pieces = [''] * 3

    def show(row, piece, pieces=pieces):
      pieces[row] += piece

    found = made.generate(
      PROMPTS, stop=[stop], on_text=show, **SAMPLED, **method
    )
    assert pieces == [r['text'] for r in found]
    shown = [(r['tokens'], r['finish']) for r in found]
    if not method:
      want = shown
    assert shown == want
  assert {finish for _, finish in want} >= {'end', 'stop'}
  # Tokens behind an end, which the same call made, are none of the text.
  assert all(end not in tokens for tokens, _ in want)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
  'method', (LOOKUP, DRAFT, AGGRESSIVE, JACOBI, JACOBI | TYPICAL), ids=str
)
def test_a_mesh_drafts_as_one_device(method):
  want = generator('GF').generate(PROMPTS, **SAMPLED, **method)
  many = generator('GF', mesh='data=2,fsdp=2,tensor=2', devices=8)
  found = many.generate(PROMPTS, **SAMPLED, **method)
  assert texts(found) == texts(want)
  assert [r['calls'] for r in found] == [r['calls'] for r in want]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
  'kind', ('pearl', 'medusa', 'typical', 'eagle', 'falcon', 'ppd', 'easyspec')
)
def test_a_mesh_drafts_by_slots_as_one_device(kind, medusa, eagle, untrained):
  easy = EASYSPEC | dict(draft_layers=1, draft_group=1)
  of = dict(
    pearl=lambda _: PEARL, medusa=medusa, eagle=eagle, easyspec=lambda _: easy,
    ppd=functools.partial(untrained, kind='ppd'),
    falcon=functools.partial(untrained, kind='falcon'),
    typical=lambda pattern: medusa(pattern) | TYPICAL,
  )[kind]  # fmt: skip
  rows = []
  for how in ({}, dict(mesh='data=2,fsdp=2,tensor=2', devices=8)):
    made = generator('F', **how)
    made._draft.cache_clear()
    found = made.generate(PROMPTS, **SAMPLED, **of('F'))
    rows.append([(r['tokens'], r['lengths']) for r in found])
  assert rows[0] == rows[1]


@pytest.mark.parametrize('pattern', ('F', 'A', 'GF'))
def test_a_poisoned_draft_breaks_nothing(pattern, monkeypatch):
  """Its own logits are NaN, and those behind it; it is not kept."""
  made, short = generator(pattern), dict(max_new_tokens=6, **GREEDY)
  prompts = [[5] * 6, [5, 1]]
  want = made.generate(prompts, **short)
  used = {t for row in [*texts(want), *prompts] for t in row}
  bad = next(t for t in range(1, V) if t not in used)  # 0 pads
  name = 'embedding'
  poisoned = made._params[name].at[bad].set(jnp.nan)
  monkeypatch.setattr(made, '_params', made._params | {name: poisoned})

  def propose(self, params, own, token_B, live_B, draws):
    drafts = jnp.full((len(token_B), self.tree.width), bad, jnp.int32)
    return judges.Drafts(drafts, drafts == bad), own

  monkeypatch.setattr(copying.Lookup, 'propose', propose)
  found = made.generate(prompts, **short, method='prompt_lookup', drafts=2)
  assert texts(found) == texts(want)


# ------------------------------------------------------------- distributions


LETTERS, LONG, SAMPLES = 4, 4, 40_000


def joint():
  """p of every text of four tokens after [1], by the model without a cache."""
  made = generator('F', LETTERS, spread=0.7)
  every = list(itertools.product(range(LETTERS), repeat=LONG))
  ids = np.array([[1, *text] for text in every], np.int32)
  params = module_cases.parameters(made.built.model, 0.7)
  z = module_cases.logits(made.built.model, params, ids)[:, :-1]
  log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
  chosen = np.take_along_axis(log_p, ids[:, 1:, None], 2)[..., 0]
  return np.exp(chosen.sum(1))


def chi_square(method, rows=2000):
  """(statistic, degrees of freedom) of the joint of 40,000 texts."""
  made, p = generator('F', LETTERS, spread=0.7), joint()
  counts = np.zeros(len(p))
  for seed in range(SAMPLES // rows):
    found = made.generate(
      [[1]] * rows, max_new_tokens=LONG, temperature=1.0, seed=seed, **method
    )
    codes = np.array(texts(found)) @ LETTERS ** np.arange(LONG)[::-1]
    counts += np.bincount(codes, minlength=len(p))
  cells = lossless.joined(p, SAMPLES)
  group = lambda x: np.array([x[cell].sum() for cell in cells])
  seen, expected = group(counts), group(p) * SAMPLES
  return ((seen - expected) ** 2 / expected).sum(), len(seen) - 1


def beyond(statistic, freedom):
  """Standard deviations above the mean, by Wilson and Hilferty."""
  x, v = (statistic / freedom) ** (1 / 3), 2 / (9 * freedom)
  return (x - (1 - v)) / v**0.5


REJECTION = DRAFT | dict(judge='rejection')


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
  'method',
  ({}, *(m | dict(judge='rejection') for m in
                           (LOOKUP, JACOBI, AGGRESSIVE))),
  ids=('one by one', 'lookup', 'jacobi', 'aggressive'),
)  # fmt: skip
def test_texts_have_the_distribution_of_the_model(method):
  assert beyond(*chi_square(method)) < 3.1  # p > .001


@pytest.mark.sampled(8)
@pytest.mark.parametrize('kind', ['eagle', 'falcon'])
def test_texts_of_a_draft_layer_have_it_too(kind, untrained):
  method = untrained('F', kind, made=generator('F', LETTERS, spread=0.7))
  assert beyond(*chi_square(method | dict(judge='rejection'))) < 3.1


def _inverse(z, drafts, draws, tree):
  """Where a draft is dropped: the inverse distribution function of p - q as it
  stands, which does not add up to 1."""
  tokens, n, at = judges.rejection(z, drafts, draws, tree)
  if drafts.logits is None:  # the first token
    return judges.Judged(tokens, n, at)
  left = jax.nn.softmax(z[:, :-1]) - jax.nn.softmax(drafts.logits)
  edges = jnp.maximum(left, 0).cumsum(-1)
  for c in range(left.shape[1]):
    key = sampling.keys(draws.values.seed, *draws.at(c), 9)
    u = jax.vmap(jax.random.uniform)(key)
    wrong = jnp.argmax(edges[:, c] > u[:, None], -1).astype(jnp.int32)
    tokens = tokens.at[:, c].set(jnp.where(n == c, wrong, tokens[:, c]))
  return judges.Judged(tokens, n, at)


@pytest.mark.parametrize('name', judges.JUDGES)
def test_judges_are_what_they_declare(name):
  found = beyond(*chi_square(DRAFT | dict(judge=name)))
  if judges.JUDGES[name].lossless:
    assert found < 3.1  # p > .001
  else:
    assert found > 5  # p < 1e-6


BROKEN = {
  'p in place of the residual': functools.partial(
    judges.rejection, rest=lambda p, q: p
  ),
  'a residual that is no distribution': _inverse,
}


@pytest.mark.parametrize('name', BROKEN)
def test_a_broken_judge_has_another_distribution(name, monkeypatch):
  broken = judges.Judge(True, False, BROKEN[name])
  monkeypatch.setitem(judges.JUDGES, 'rejection', broken)
  generator.cache_clear()
  assert beyond(*chi_square(REJECTION)) > 5  # p < 1e-6
  generator.cache_clear()


def test_rejection_keeps_more_than_independent_draws_that_agree():
  made = generator('F')
  calls = lambda **how: sum(
    r['calls'] for r in made.generate(PROMPTS * 20, **SAMPLED, **how)
  )
  rejected, replayed = calls(**REJECTION), calls(**DRAFT)
  assert rejected < replayed < 60 * 23


def test_rejection_of_a_tree_is_that_of_one_choice_after_the_other():
  """A choice is kept with p over what is left of p; a round, and its child."""
  rows, form, values = 20_000, *sampling.check(schema.Decode(temperature=1), 8)
  tree = trees.of_paths([(0,), (1,), (2,), (1, 0)])
  first, second = np.random.default_rng(0).normal(0, 1, (2, 8))
  choices = np.array([3, 1, 6, 2])  # the last one behind the second
  z = np.stack([first, *[second] * 4])
  wide = lambda x: jnp.asarray(np.broadcast_to(x, (rows, *np.shape(x))))
  drafts = judges.Drafts(wide(choices).astype(jnp.int32), wide([True] * 4))
  order = jnp.arange(rows, dtype=jnp.uint32)
  draws = judges.Draws(form, values, order, jnp.zeros_like(order))
  found = jax.jit(lambda z: judges.rejection(z, drafts, draws, tree))(
    wide(z).astype(jnp.float32)
  )
  p, want, left = jax.nn.softmax(first), {}, 1.0
  for x in choices[:3]:
    share = p[x] / (1 - sum(want.values()))
    want[x], left = left * share, left * (1 - share)
  tokens, n = np.asarray(found.tokens), np.asarray(found.n)
  error = lambda q: 4 * (q * (1 - q) / rows) ** 0.5
  assert abs((n == 0).mean() - left) < error(left)
  for x, q in want.items():
    assert abs(((n > 0) & (tokens[:, 0] == x)).mean() - q) < error(q)
  both = want[1] * jax.nn.softmax(second)[2]
  assert abs((n == 2).mean() - both) < error(both)
  counts = np.bincount(tokens[:, 0], minlength=8)
  statistic = ((counts - rows * p) ** 2 / (rows * p)).sum()
  assert beyond(statistic, 7) < 3.1


# ------------------------------------------------------------------- drafts


def found_by_loop(width, text, length):
  """The drafts of a lookup: the longest agreement, the latest place."""
  for n in (3, 2, 1):
    tail = text[length - n : length]
    for end in range(length - 1, n - 1, -1):
      if length >= n and text[end - n : end] == tail:
        return text[end : min(end + width, length)]
  return []


def test_a_lookup_is_a_plain_loop():
  rng = np.random.default_rng(0)
  find = jax.jit(functools.partial(copying._found, 4))
  seen = set()
  for _ in range(200):
    length = int(rng.integers(1, 20))
    text = rng.integers(0, 4, 24)
    tokens, count = find(jnp.asarray(text, jnp.int32), jnp.int32(length))
    want = found_by_loop(4, text.tolist(), length)
    count = np.asarray(count)
    assert (count == (np.arange(4) < len(want))).all()
    assert np.asarray(tokens)[count].tolist() == want
    seen.add(len(want))
  assert seen == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
  'options, words',
  [
    (dict(method='speculative'), ('draft_layers=0 of 2', 'take 1 to 1')),
    (dict(method='speculative', draft_layers=2), ('draft_layers=2 of 2',)),
    (dict(method='eager'), ('decode.method', 'prompt_lookup')),
    (dict(judge='none'), ('decode.judge', 'rejection')),
    (dict(method='medusa'), ('needs a trained draft', 'paraxis draft')),
    (dict(PEARL, judge='rejection'), ('pearl', 'judge=replay')),
    (dict(EASYSPEC, draft_layers=1), ('draft_group=2', 'take 1 to 1')),
    (dict(method='ppd'), ('needs a trained draft', 'paraxis draft')),
    (dict(LOOKUP, draft='nowhere'), ('nowhere', 'no trained draft')),
    (dict(method='prompt_lookup', drafts=0), ('decode.drafts',)),
  ],
)
def test_methods_that_cannot_be_run(options, words):
  with support.refused(*words):
    generator('F').generate(PROMPTS, **options)


@pytest.mark.parametrize('method', (PEARL, EASYSPEC), ids=str)
def test_a_draft_model_that_cannot_forget_is_refused(method):
  with support.refused('forgets drafts', 'kind G', 'method=speculative'):
    generator('GFF').generate(PROMPTS, **GREEDY, **method)


def test_a_tree_needs_branches(medusa):
  """A recurrence has none: the chain is named."""
  options = medusa('GF')
  with support.refused('kind G', 'one state a request', 'speculative'):
    generator('GF').generate(PROMPTS, **GREEDY, **options)
  generator('F')._draft.cache_clear()
  options = medusa('F') | dict(judge='rejection')
  want = texts(generator('F').generate(PROMPTS, **GREEDY))
  assert texts(generator('F').generate(PROMPTS, **GREEDY, **options)) == want
  found = generator('F').generate(PROMPTS, **SAMPLED, **options)
  assert sum(r['calls'] for r in found) < sum(len(r['tokens']) for r in found)


def test_the_command_lists_the_methods(capsys):
  assert command.main(['--methods']) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in lines] == [*decode_fields.METHODS]
