"""Filters against their definitions, draws against exact probabilities."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import judges
from paraxis.decode import sampling
from paraxis.decode import trees

V = 40


def setting(**options):
  config = dataclasses.replace(
    schema.Decode(), **{'temperature': 1.0, **options}
  )
  return sampling.check(config, V)


def logits(rows=6, ties=False):
  z = np.random.default_rng(0).normal(0, 2, (rows, V)).astype(np.float32)
  return np.round(z) if ties else z


def definition(z, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """Probabilities of one row, by sorting: plain loops, float64."""
  z = z.astype(np.float64) / temperature
  p = np.exp(z - z.max())
  if top_k:
    least = sorted(p)[-top_k]
    p = np.where(p >= least, p, 0)
  p /= p.sum()
  if top_p < 1:
    mass, least = 0.0, 0.0
    for value in sorted(p)[::-1]:
      mass, least = mass + value, value
      if mass >= top_p:
        break
    p = np.where(p >= least, p, 0)
  p = np.where(p >= min_p * p.max(), p, 0)
  return p / p.sum()


CASES = [
  {},
  dict(temperature=0.3),
  dict(top_k=1),
  dict(top_k=7),
  dict(top_k=V),
  dict(top_p=0.5),
  dict(top_p=0.97, temperature=2.0),
  dict(min_p=0.1),
  dict(temperature=1.7, top_k=9, top_p=0.8, min_p=0.15),
]


@pytest.mark.parametrize('ties', [False, True])
@pytest.mark.parametrize('options', CASES, ids=str)
def test_filters_are_their_definitions(options, ties):
  z = logits(ties=ties)
  form, values = setting(**options)
  got = jax.nn.softmax(
    jax.jit(sampling.filtered, static_argnums=1)(jnp.asarray(z), form, values)
  )
  want = np.stack([definition(row, **options) for row in z])
  np.testing.assert_array_equal(np.asarray(got) > 0, want > 0)
  np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize('p', (1e-40, 1e-300))
def test_the_best_token_is_kept_however_little_is_asked(p):
  """Of float32, the one is flushed to 0, and the other is 0."""
  z = logits()
  form, values = setting(top_p=p)
  got = np.asarray(sampling.filtered(jnp.asarray(z), form, values)) > -np.inf
  np.testing.assert_array_equal(got, z == z.max(-1, keepdims=True))


def test_a_filter_is_not_another():
  """The comparison above sees a filter that is off by one token."""
  z = logits()
  form, values = setting(top_k=6)
  got = np.asarray(sampling.filtered(jnp.asarray(z), form, values)) > -np.inf
  want = np.stack([definition(row, top_k=7) for row in z]) > 0
  assert (got != want).sum() == len(z)


def _chi_square(tokens, p):
  """Pearson's statistic over the tokens that can occur, and its freedom."""
  seen = np.bincount(tokens, minlength=V)
  assert not seen[p == 0].any()
  can = p > 0
  expected = p[can] * len(tokens)
  return ((seen[can] - expected) ** 2 / expected).sum(), can.sum() - 1


@pytest.mark.parametrize(
  'options', [{}, dict(temperature=0.6, top_k=12, top_p=0.9)], ids=str
)
def test_draws_have_the_exact_probabilities(options):
  """Chi-square over rows and over indices; seeded, so it never flickers."""
  z = logits(1) / 2
  n = 8192
  form, values = setting(**options)
  draw = jax.jit(sampling.sample, static_argnums=1)
  many, each = jnp.arange(n, dtype=jnp.uint32), jnp.zeros(n, jnp.uint32)
  rows, _ = draw(jnp.tile(z, (n, 1)), form, values, many, each)
  walk, _ = draw(jnp.tile(z, (n, 1)), form, values, each, many)
  p = definition(z[0], **options)
  for tokens in (np.asarray(rows), np.asarray(walk)):
    statistic, freedom = _chi_square(tokens, p)
    # Mean `freedom`, variance 2 freedom: five standard deviations.
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
  other = dict(options, temperature=options.get('temperature', 1.0) * 1.3)
  wrong = definition(z[0], **other)
  if (wrong > 0).sum() == (p > 0).sum():
    statistic, freedom = _chi_square(np.asarray(rows), wrong)
    assert statistic > freedom + 5 * np.sqrt(2 * freedom)


def test_a_request_draws_the_same_in_any_batch():
  form, values = setting()
  z = jnp.asarray(np.tile(logits(1) / 4, (16, 1)))

  def sample(requests, index):
    requests = np.asarray(requests, np.uint32)
    index = np.full_like(requests, index)
    given = z[: len(requests)], form, values, requests, index
    return np.asarray(sampling.sample(*given)[0])

  whole, order = sample(range(16), 3), [9, 2, 15, 0, 4]
  np.testing.assert_array_equal(sample(order, 3), whole[order])
  assert len(set(whole.tolist())) > 4  # requests differ
  assert (sample(range(16), 4) != whole).any()  # so do indices
  form, values = setting(seed=1)
  assert (sample(range(16), 3) != whole).any()  # and seeds


def test_greedy_takes_the_lowest_of_a_tie():
  z = np.zeros((2, V), np.float32)
  z[0, [7, 31]] = 2
  form, values = setting(temperature=0.0, top_k=3)
  first = np.zeros(2, np.uint32)
  token, logprob = sampling.sample(jnp.asarray(z), form, values, first, first)
  assert token.tolist() == [7, 0] and token.dtype == jnp.int32
  want = 2 - np.log(2 * np.exp(2) + V - 2), -np.log(V)
  np.testing.assert_allclose(logprob, want, rtol=1e-6)


@pytest.mark.parametrize(
  'options',
  [
    dict(temperature=-0.1),
    dict(temperature=float('nan')),
    dict(temperature=float('inf')),
    dict(top_k=-1),
    dict(top_k=V + 1),
    dict(top_p=0.0),
    dict(top_p=1.5),
    dict(top_p=float('nan')),
    dict(min_p=-0.1),
    dict(min_p=1.1),
    dict(seed=-1),
    dict(seed=2**32),
  ],
  ids=str,
)
def test_out_of_range(options):
  (name,) = options
  with pytest.raises(errors.UserError, match=f'^{name}=.*out of range'):
    setting(**options)


def test_a_judge_that_must_draw():
  config = schema.Decode(judge='typical', temperature=0.0)
  with pytest.raises(errors.UserError, match='typical .*temperature=0 nothing'):
    sampling.check(config, 12)
  sampling.check(dataclasses.replace(config, temperature=0.5), 12)


# ------------------------------------------------------------------ rejection


@pytest.mark.parametrize('bad', (np.nan, np.inf))
def test_a_draft_of_logits_that_are_not_finite_is_redrawn(bad):
  """By what the model says: the text stays its own. The draft behind it, which
  is good, is not kept."""
  n = 8192
  z = np.tile(logits(1)[:, None] / 2, (n, 3, 1))
  q = np.zeros((n, 2, V), np.float32)
  q[:, 0, 3] = bad
  tokens = jnp.zeros((n, 2), jnp.int32)
  drafts = judges.Drafts(tokens, tokens == 0, jnp.asarray(q))
  form, values = setting()
  numbers = jnp.arange(n, dtype=jnp.uint32)
  draws = judges.Draws(form, values, numbers, 0 * numbers)
  run = jax.jit(lambda z: judges.rejection(z, drafts, draws, trees.chain(2)))
  found = run(jnp.asarray(z))
  assert not found.n.any()
  statistic, freedom = _chi_square(
    np.asarray(found.tokens[:, 0]), definition(z[0, 0])
  )
  assert statistic < freedom + 5 * np.sqrt(2 * freedom)


# ---------------------------------------------------------- typical acceptance

OPEN = (
  # (other tokens, p of the draft, whether it is kept). Of two others the
  # entropy is below 1: .3 exp(-entropy) is above .09.
  (2, 0.10, True),
  (2, 0.08, False),
  # Of 198 others it is about 5.2: .3 exp(-5.2) is .0016.
  (198, 0.004, True),
  (198, 0.0005, False),
)


def test_typical_acceptance_asks_less_where_more_is_open():
  """p > min(.09, .3 exp(-entropy)), as Medusa's own code has it."""
  draft, none = jnp.zeros((1, 1), jnp.int32), jnp.zeros((2, 1), jnp.uint32)
  drafts = judges.Drafts(draft, draft == 0)
  for others, p, kept in OPEN:
    every = np.array([p, *np.full(others, (1 - p) / others)])
    entropy = -np.sum(every * np.log(every))
    assert (p > min(0.09, 0.3 * np.exp(-entropy))) == kept
    form, values = sampling.check(
      schema.Decode(temperature=1.0, judge='typical'), len(every)
    )
    z = jnp.tile(jnp.log(jnp.asarray(every, jnp.float32)), (1, 2, 1))
    draws = judges.Draws(form, values, *none)
    found = judges.typical(z, drafts, draws, trees.chain(1))
    assert found.n.tolist() == [int(kept)], (others, p)
