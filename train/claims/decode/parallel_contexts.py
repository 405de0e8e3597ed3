"""Claims about contexts that are read apart from each other (APE).

What is exact is compared in float64 with one pass over a text, without a cache.
What is not is the perplexity of the continuation of a text, of SmolLM2-135M in
float32: the text before it is cut into contexts of equal length, which are read
one after the other as usual (sequential), or each alone behind a shared prefix
(decode/parallel_contexts.py), or not at all.

Legend: B contexts, T tokens, V vocabulary.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.decode import cache as cache_lib
from paraxis.decode import parallel_contexts
from paraxis.decode import step as decode_step
from paraxis.models import build
from paraxis.models.mixers import packed as packed_lib
from paraxis.train import draft as draft_lib
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.claims import real_model
from paraxis.train.data import corpus

KEPT = 1e-9  # float64


class Reader:
  """Reads texts with one model; a program for each number of tokens.

  Methods return float logits (T, V) of the last part.

  Attributes:
    read: tokens that the model was given so far.
  """

  def __init__(self, built, params, slots):
    """built: build.Built. params: {path: array}. slots: of a cache row."""
    self.built, self.model, self.slots = built, built.model, slots
    self.read = 0
    with build.use(built):
      self.params = jax.jit(self.model.unstack)(params)
    self._run = jax.jit(self._step, static_argnames=('form', 'last'))

  def _step(self, params, cache, tokens, form, last):
    x, flight = self.model.step(params, cache, tokens, form)
    keep = jnp.isfinite(x).all(-1)
    x = x[:, -last:]
    return self.model.logits(params, x), self.model.commit(
      cache, flight, form, keep
    )

  def feed(self, cache, rows, texts, first, last=1):
    """(logits of the `last` tokens of each text, the cache with all)."""
    group = packed_lib.Group(len(rows), len(texts[0]), own=False)
    lanes = [(r, t, first) for r, t in zip(rows, texts, strict=True)]
    return self._given(cache, group, lanes, last)

  def _given(self, cache, group, lanes, last):
    tokens = decode_step.pack((group,), len(cache.length), lanes)
    self.read += tokens.token.size
    return self._run(self.params, cache, tokens, (group,), last)

  def sequential(self, parts):
    """Of texts that are one."""
    text = list(itertools.chain(*parts))
    cache = self.model.init_cache(1, len(text))
    group = packed_lib.Group(1, len(text), fresh=True)
    return self._given(cache, group, [(0, text, 0)], len(parts[-1]))[0][0]

  def contexts(self, prefix, texts):
    """The cache after the prefix (row 0) and contexts (1 .. B) of one length;
    the row behind them is free."""
    rows = list(range(1, 1 + len(texts)))
    cache = self.model.init_cache(len(texts) + 2, self.slots)
    _, cache = self.feed(cache, [0], [prefix], 0)
    cache = cache_lib.sharing(cache, 1)
    cache = cache_lib.fork(self.model, cache, 0, rows)
    _, cache = self.feed(cache, rows, texts, len(prefix))
    return cache_lib.sharing(cache, len(texts))

  def ask(self, cache, order, query, how):
    """Of a query that reads the contexts of these rows; (T, V), the cache."""
    row = len(cache.length) - 1
    cache = parallel_contexts.join(self.model, cache, order, row, *how)
    end = int(cache.length[row])
    z, cache = self.feed(cache, [row], [query], end, len(query))
    return z[0], cache

  def parallel(self, prefix, texts, query, how):
    """`ask` after all contexts."""
    order = list(range(1, 1 + len(texts)))
    return self.queries(prefix, texts, [(order, query)], how)[0]

  def queries(self, prefix, texts, asked, how):
    """[`ask` of each (rows of contexts, query)] after the same contexts."""
    cache = self.contexts(prefix, texts)
    return [self.ask(cache, order, query, how)[0] for order, query in asked]


def _random(run):
  """(Reader of the config in float64, random texts of these lengths)."""
  own = {'model.dtype': 'float64', 'model.param_dtype': 'float64'}
  config = experiment.fields(run.config, own)
  config = dataclasses.replace(config, mesh=schema.Mesh())
  built = build.build(config, 'data=1', devices=jax.devices()[:1])
  with build.use(built):
    params = experiment.random_parameters(built.model)
  rng = np.random.default_rng(3)
  text = lambda n: rng.integers(0, config.model.vocab_size, n).tolist()
  return Reader(built, params, 64), lambda *sizes: [text(n) for n in sizes]


def one_context(run, *, sizes, how):
  """EQ: one context is a text, float64.

  Args:
    sizes: tokens of the prefix, the context and the query. how: T, S.
  """
  with jax.enable_x64(True):
    reader, texts = _random(run)
    prefix, context, query = texts(*sizes)
    with build.use(reader.built):
      found = reader.parallel(prefix, [context], query, how)
      wanted = reader.sequential([prefix, context, query])
    gap = experiment.gap(found, wanted)
  return experiment.equal(
    [gap],
    KEPT,
    f'logits of {sizes[2]} tokens after {sizes[0]} + {sizes[1]}, T = {how[0]}, '
    f'S = {how[1]}, against one pass, float64, random weights',
  )


def any_order(run, *, count, sizes, how):
  """EQ: the logits of a query after its contexts in several orders, float64.

  Args:
    count: contexts. sizes, how: as for `one_context`.
  """
  with jax.enable_x64(True):
    reader, texts = _random(run)
    prefix, query = texts(sizes[0], sizes[2])
    contexts = texts(*[sizes[1]] * count)
    orders = [contexts, contexts[::-1], contexts[1:] + contexts[:1]]
    with build.use(reader.built):
      first, *rest = [
        reader.parallel(prefix, each, query, how) for each in orders
      ]
    gaps = [experiment.gap(z, first) for z in rest]
  return experiment.equal(
    gaps, KEPT, f'{count} contexts of {sizes[1]} tokens in three orders'
  )


def keys_stored(run, *, count, sizes):
  """EQ: tokens whose keys the rows hold: the prefix once, each context once.

  Args:
    count: contexts. sizes: as for `one_context`; no query is read.
  """
  with jax.enable_x64(True):
    reader, texts = _random(run)
    with build.use(reader.built):
      cache = reader.contexts(texts(sizes[0])[0], texts(*[sizes[1]] * count))
  first, length = np.asarray(cache.reads.first), np.asarray(cache.length)
  held, wanted = int((length - first).sum()), sizes[0] + count * sizes[1]
  return claims.Outcome(
    str(wanted),
    str(held),
    f'tokens of {count} contexts of {sizes[1]} and a prefix of {sizes[0]}; '
    f'{count * sum(sizes[:2])} if each had its own',
    held == wanted,
  )


def windows(tokenizer, held, count, size):
  """[ids], `size` tokens each, a text of each domain in turn."""
  domains: dict = {}
  for document in corpus.documents('fixture'):
    # About 2.5 letters a token at least: nothing is encoded in vain.
    if document.held == held and len(document.text) > 2.5 * size:
      ids = tokenizer.encode(document.text[: 8 * size])[:size]
      if len(ids) == size:
        domains.setdefault(document.domain, []).append(ids)
  turns = itertools.zip_longest(*[domains[name] for name in sorted(domains)])
  return [ids for ids in itertools.chain(*turns) if ids][:count]


def _nll(z_TV, query):
  """Nats of all tokens of a query but its first."""
  logp = jax.nn.log_softmax(z_TV[:-1])
  return -jnp.take_along_axis(logp, jnp.asarray(query)[1:, None], 1).sum()


@functools.cache
def _smollm2(slots):
  """(Reader of SmolLM2 in float32, its tokenizer)."""
  opened = real_model.opened()
  built, params, tokenizer, _ = opened.parts(draft_lib.alone(opened))
  return Reader(built, params, slots), tokenizer


def _measured(reader, bos, text, count, sizes, hows):
  """{name: nats of the continuation} of one text."""
  cut = np.cumsum([sizes[0] - 1, *[sizes[1]] * count])
  prefix, *contexts, query = np.split(np.asarray(text), cut)
  prefix = [bos, *prefix.tolist()]
  contexts = [x.tolist() for x in contexts]
  query, order = query.tolist(), list(range(1, 1 + count))
  plain = dict(sequential=[prefix, *contexts, query], none=[prefix, query])
  with build.use(reader.built):
    cache = reader.contexts(prefix, contexts)
    found = {how: reader.ask(cache, order, query, how)[0] for how in hows}
    found |= {name: reader.sequential(parts) for name, parts in plain.items()}
    return {name: float(_nll(z, query)) for name, z in found.items()}


def perplexity(run, *, count, sizes, texts, others, grid, share):
  """LEARN: perplexity of continuations, with the contexts read in four ways.

  Args:
    count: contexts of a text. sizes: tokens of the prefix, of a context, and of
      the continuation, the first of which is not counted.
    texts: held-out texts. others: texts of the training part, by which one of
      the pairs (T, S) of `grid` is chosen.
    share: of what naive reading (T = S = 1) loses against sequential in nats,
      so much must APE gain back.
  """
  reader, tokenizer = _smollm2(sizes[0] + sizes[1] + sizes[2])
  size = sizes[0] - 1 + count * sizes[1] + sizes[2]
  bos, naive, paper = tokenizer.bos_id(None), (1.0, 1.0), (0.9, 0.9)
  grid = [tuple(pair) for pair in grid]
  mean = lambda rows: {
    name: sum(r[name] for r in rows) / (len(rows) * (sizes[2] - 1))
    for name in rows[0]
  }
  measure = functools.partial(_measured, reader, bos, count=count, sizes=sizes)
  tried = mean([
    measure(text=text, hows=grid)
    for text in windows(tokenizer, False, others, size)
  ])  # fmt: skip
  best = min(grid, key=tried.__getitem__)
  held = windows(tokenizer, True, texts, size)
  nats = mean([
    measure(text=text, hows=list({naive, paper, best})) for text in held
  ])  # fmt: skip
  run.say(
    f'{others} other texts: '
    + ', '.join(f'T {t} S {s}: {math.exp(tried[t, s]):.2f}' for t, s in grid)
  )
  lost = nats[naive] - nats['sequential']
  back = (nats[naive] - nats[best]) / lost
  show = lambda name: f'{math.exp(nats[name]):.2f}'
  return claims.Outcome(
    f'>= {share:.2f} of the loss',
    f'{back:.2f}',
    f'perplexity of {sizes[2] - 1} tokens after {count} contexts of {sizes[1]} '
    f'and a prefix of {sizes[0]}, {len(held)} held-out texts: sequential '
    f'{show("sequential")}, naive {show(naive)}, T = S = 0.9 {show(paper)}, '
    f'T = {best[0]} S = {best[1]} (of {others} other texts) {show(best)}, no '
    f'contexts {show("none")}',
    bool(lost > 0 and back >= share),
  )


def _formula(count, sizes, queries):
  """(tokens read for queries that are texts, and over shared contexts)."""
  contexts = sizes[0] + count * sizes[1]
  return queries * (contexts + sizes[2]), contexts + queries * sizes[2]


# The paper's number is asked for of the same run (papers.Claim.published).
@functools.lru_cache(maxsize=1)
def _counted(run, count, sizes, queries):
  """`_formula`, of what a model of random weights is given; sizes: a tuple."""
  with jax.enable_x64(True):
    reader, texts = _random(run)
    [prefix], contexts = texts(sizes[0]), texts(*[sizes[1]] * count)
    orders = [np.roll(range(count), i).tolist() for i in range(queries)]
    asked = list(zip(orders, texts(*[sizes[2]] * queries), strict=True))
    with build.use(reader.built):
      for order, query in asked:
        reader.sequential([prefix, *(contexts[i] for i in order), query])
      plain = reader.read
      rows = [([i + 1 for i in order], query) for order, query in asked]
      reader.queries(prefix, contexts, rows, (0.9, 0.9))
  return plain, reader.read - plain


def prefill(run, *, count, small, sizes, queries, above):
  """SIM: tokens read for queries over the same contexts in other orders.

  The formula is that of tokens that a model is given at small sizes.

  Args:
    count: contexts. small, sizes: as for `one_context`.
    queries: each has an order of its own.
    above: so many times fewer.
  """
  found = _counted(run, count, tuple(small), queries)
  wanted = _formula(count, small, queries)
  plain, ours = _formula(count, sizes, queries)
  contexts = sizes[0] + count * sizes[1]
  pairs = lambda n, before=0: n * before + n * (n + 1) // 2
  whole = pairs(contexts)
  apart = pairs(sizes[0]) + count * pairs(sizes[1], sizes[0])
  return claims.Outcome(
    f'> {above:g} x fewer tokens',
    f'{plain / ours:.1f} x fewer tokens'
    f'{"" if found == wanted else ", NOT as counted"}',
    f'{queries} queries of {sizes[2]} tokens, each with {count} contexts of '
    f'{sizes[1]} in an order of its own: {plain} tokens against {ours}; of the '
    f'first, {whole} scores of the contexts against {apart}; contexts of '
    f'{small[1]}: {found[0]} and {found[1]} counted, {wanted[0]} and '
    f'{wanted[1]} by formula',
    found == wanted and plain > above * ours and apart < whole,
  )


def see_each_other():
  """Knock-out: a context is read behind the one before it, not alone."""

  def contexts(self, prefix, texts):
    cache = cache_lib.sharing(
      self.model.init_cache(len(texts) + 2, self.slots), len(texts) + 1
    )
    _, cache = self.feed(cache, [0], [prefix], 0)
    first = len(prefix)
    for i, text in enumerate(texts):
      cache = cache_lib.fork(self.model, cache, i, [i + 1])
      _, cache = self.feed(cache, [i + 1], [text], first)
      first += len(text)
    return cache

  return knockouts.patched(Reader, 'contexts', contexts)


def prefix_each():
  """Knock-out: every context has a prefix of its own."""

  def contexts(self, prefix, texts):
    cache = cache_lib.sharing(
      self.model.init_cache(len(texts) + 2, self.slots), len(texts) + 1
    )
    rows = list(range(1, 1 + len(texts)))
    _, cache = self.feed(cache, rows, [[*prefix, *x] for x in texts], 0)
    return cache

  return knockouts.patched(Reader, 'contexts', contexts)


def read_anew():
  """Knock-out: every query reads the contexts for itself."""

  def queries(self, prefix, texts, asked, how):
    return [
      self.ask(self.contexts(prefix, texts), order, query, how)[0]
      for order, query in asked
    ]

  return knockouts.patched(Reader, 'queries', queries)


def shifted():
  """Knock-out: a query begins a position too late."""
  real = Reader.feed

  def feed(self, cache, rows, texts, first, last=1):
    late = int(last > 1)
    return real(self, cache, rows, texts, first + late, last)

  return knockouts.patched(Reader, 'feed', feed)
