"""Contexts that are read alone, against one pass under a dense mask."""

import decode_cases
import numpy as np
import pytest
import support

from paraxis.decode import cache as cache_lib
from paraxis.decode import parallel_contexts

pytestmark = pytest.mark.usefixtures('float64')

R, ids, near = decode_cases.R, decode_cases.ids, decode_cases.near
PREFIX, SIZES, QUERY = 4, (7, 3), (1, 3)  # tokens; two lanes of the query


def joined(pattern, order=(0, 2), count=2, **how):
  """(session whose row 3 reads contexts in `order`, tokens of all parts).

  Row 1 holds the prefix, rows 0 and 2 the contexts.
  """
  session = decode_cases.Session(pattern, 1)
  model = decode_cases.made(pattern)[0]
  sizes = [PREFIX, *SIZES[:count], sum(QUERY)]
  parts = [ids(n, i) for i, n in enumerate(sizes)]
  wide = lambda row, tokens: session.step(
    decode_cases.MIXED, [None] * R + [(row, tokens), None, None]
  )
  wide(1, parts[0])
  session.cache = cache_lib.fork(model, session.cache, 1, [0, 2])
  for row, tokens in zip((0, 2)[:count], parts[1:-1], strict=True):
    session.texts[row] = list(parts[0])
    session.texts[2 - row] = list(session.texts[2 - row] or parts[0])
    wide(row, tokens)
  session.cache = cache_lib.sharing(session.cache, 2)
  session.cache = parallel_contexts.join(
    model, session.cache, list(order[:count]), 3, **how
  )
  session.texts[3] = [0] * (PREFIX + max(SIZES[:count]))
  return session, parts


def asked(session, parts):
  """Logits of the query: one token, then three."""
  first = [None] * 3 + [(3, parts[-1][:1])] + [None] * 3
  rest = [None] * (R + 2) + [(3, parts[-1][1:])]
  found = [session.step(decode_cases.MIXED, lanes) for lanes in (first, rest)]
  return np.concatenate([found[0][3][:1], found[1][-1][:3]])


def wanted(pattern, parts, monkeypatch, apart=True, after=False, how=(1, 1)):
  """after: the second context is placed behind the first."""
  begins = [0, *[PREFIX] * (len(parts) - 2), PREFIX + max(SIZES)]
  begins[-2] += after * SIZES[0]
  sees = np.tril(np.ones((len(parts), len(parts)), bool))
  sees[2, 1] = not apart
  return decode_cases.one_pass(
    pattern, parts, begins, sees, monkeypatch, ((1, 2), *how)
  )


@pytest.mark.sampled(9)
@pytest.mark.parametrize('how', ((1, 1), (0.75, 1.5)))
@pytest.mark.parametrize('pattern', ('F', 'WFN', 'FKF'))
def test_a_query_is_one_pass_under_a_mask(pattern, how, monkeypatch):
  session, parts = joined(pattern, temperature=how[0], weight=how[1])
  found = asked(session, parts)
  assert near(found, wanted(pattern, parts, monkeypatch, how=how))
  others = [
    dict(apart=False, how=how), dict(after=True, how=how),
    dict(how=(how[0] * 0.9, how[1])), dict(how=(how[0], how[1] * 0.9)),
  ]  # fmt: skip
  for other in others:
    assert not near(found, wanted(pattern, parts, monkeypatch, **other)), other


def test_one_context_is_a_text():
  session, parts = joined('F', count=1, temperature=1.0, weight=1.0)
  text = sum(parts, [])
  assert near(asked(session, parts), decode_cases.alone('F')(text)[-4:])
  session, parts = joined('F', count=1)
  assert not near(asked(session, parts), decode_cases.alone('F')(text)[-4:])


def test_contexts_have_no_order():
  found = [asked(*joined('F', order)) for order in ((0, 2), (2, 0))]
  np.testing.assert_array_equal(*found)


def test_a_row_forgets_that_it_read_contexts():
  session, _ = joined('F')
  model = decode_cases.made('F')[0]
  with support.refused('request 3', 'apart'):
    cache_lib.fork(model, session.cache, 3, [1])
  gone = np.arange(R) == 3
  cache = cache_lib.evict(model, session.cache, gone)
  assert cache_lib.sharing(cache, 1).reads.apart is None
  cache = cache_lib.fork(model, cache, 1, [3])
  assert not np.asarray(cache.reads.apart.which).any()


@pytest.mark.parametrize(
  'pattern, how, words',
  [
    ('GF', {}, ('layer 0', 'kind G')),
    ('A', {}, ('layer 0', 'kind A')),
    ('F', dict(temperature=0.0), ('temperature 0.0', 'above 0')),
  ],
)
def test_what_cannot_be_read_apart_is_refused(pattern, how, words):
  model = decode_cases.made(pattern)[0]
  cache = cache_lib.sharing(model.init_cache(R, 8), 2)
  with support.refused(*words):
    parallel_contexts.join(model, cache, [0, 1], 2, **how)
