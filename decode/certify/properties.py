"""The properties that `paraxis decode --certify` proves, row by row.

A property is a function of a `Proof` that yields rows; table.py says what
each is, and prints them. `judged` is of no model: judges see logits alone.
"""

import itertools
import pathlib
import tempfile
from typing import NamedTuple

import jax
import numpy as np

from paraxis.configs.base import errors
from paraxis.configs.base.decode import METHODS
from paraxis.decode import cache as cache_lib
from paraxis.decode import judges
from paraxis.decode import methods as methods_lib
from paraxis.decode.certify import cases
from paraxis.decode.drafts import distill
from paraxis.decode.drafts import heads
from paraxis.models import build

BOUND = 1e-9
MESHES = ('tensor=4', 'data=2,tensor=2', 'context=4')
DRAFTS = dict(drafts=3, draft_layers=1, draft_group=1)
CHANGES, REFUSED = 'CHANGES THE NUMBERS', 'REFUSED'
# Of a judge's joint distribution: letters, tokens, texts; standard deviations
# of chi-square that a right judge may be off.
LETTERS, LONG, ROWS, SEEDS, FAR = 4, 3, 2000, 2, 5.0


class Row(NamedTuple):
  """The verdict on a property of a case. bound, measured: floats; worst: where
  it is furthest off. word: PASS, FAIL or, with a reason why, CHANGES THE
  NUMBERS, or REFUSED, if the engine says that it does not do this."""

  case: str
  name: str
  bound: float
  measured: float
  worst: str = ''
  word: str = 'PASS'
  why: str = ''

  @property
  def passed(self):
    return self.word in ('PASS', REFUSED)


class Proof:
  """A cases.Case, on one device and on `meshes`.

  mesh_text: --mesh=, in place of MESHES; UserError if it does not fit.
  """

  def __init__(self, case, mesh_text=''):
    self.case, self.engine = case, cases.Engine(case)
    self.meshes, self.asked = MESHES, None
    if mesh_text:  # what does not fit ends here
      self.meshes, self.asked = (mesh_text,), cases.Engine(case, mesh_text)

  def row(self, name, measured, worst='', bound=BOUND):
    """`Row` of a number that a cache may not make larger than the bound."""
    word, why, engine = 'PASS', '', self.engine
    if not measured <= bound:
      word = 'FAIL'
      if engine.inexact is not None:
        word, why = CHANGES, f'{engine.says(engine.inexact)} exact=False'
    return Row(self.case.name, name, bound, measured, worst, word, why)

  def strict(self, name, measured, worst='', bound=0.0):
    """`Row` of what holds whatever a mixer declares."""
    word = 'PASS' if measured <= bound else 'FAIL'
    return Row(self.case.name, name, bound, measured, worst, word)

  def refused(self, name, error):
    return Row(self.case.name, name, 0.0, 0.0, '', REFUSED, str(error))


def cached(proof):
  """Prompts in whole and in pieces, and tokens of others beside them."""
  session = cases.begun(proof.engine)
  session.step(cases.MIXED, {0: (0, 1), 4: (3, 9), 5: (1, 5)})
  session.step(cases.MIXED, {0: (0, 1), 1: (1, 1), 2: (2, 1), 4: (3, 3)})
  for _ in range(2):
    session.step(cases.MIXED, {r: (r, 1) for r in range(cases.R)})
  name = 'cached = uncached, whole, in pieces, by token'
  yield proof.row(name, *session.difference())


def tree(proof):
  """Branches of two requests in a step = every path alone."""
  engine, session = proof.engine, cases.begun(proof.engine)
  if engine.recurrent is not None:
    _in_part(session)
    kind = engine.model.stack.cached[engine.recurrent][0]
    name = f'chain = uncached; no tree: {kind} has one state'
    yield proof.row(name, *session.difference())
    return
  branches = cases.Tree()
  kept = {r: [i in branches.paths[7 - r] for i in range(8)] for r in (0, 1)}
  session.step(cases.TREE, {r: (r, 8) for r in (0, 1)}, kept, branches)
  session.step(cases.MIXED, {r: (r, 1) for r in range(cases.R)})
  yield proof.row(
    'tree = path by path, and a path that is kept', *session.difference()
  )


def _in_part(session):
  """Chains of three tokens, of which 2, 0, 3 and 1 are kept; then one more."""
  kept = {r: [i < n for i in range(3)] for r, n in enumerate((2, 0, 3, 1))}
  session.step(cases.CHAIN, {r: (r, 3) for r in range(cases.R)}, kept)
  session.step(cases.MIXED, {r: (r, 1) for r in range(cases.R)})


def rolled_back(proof):
  """Some of a chain's tokens are kept; then some of a row are forgotten."""
  engine, session = proof.engine, cases.begun(proof.engine)
  _in_part(session)
  before, texts = session.cache, [list(text) for text in session.texts]
  session.step(cases.MIXED, {1: (1, 1), 4: (0, 6), 5: (3, 4)})
  held = None if engine.recurrent is None else before
  with build.use(engine.built):
    session.cache = cache_lib.rollback(
      engine.model, session.cache, before.length, held
    )
  session.texts = texts
  for _ in range(2):
    session.step(cases.MIXED, {r: (r, 1) for r in range(cases.R)})
  name = 'kept in part, rolled back = uncached'
  yield proof.row(name, *session.difference())


def forked(proof):
  """A fork of a request, and a fork of that, beside it = every text alone."""
  engine, session = proof.engine, cases.begun(proof.engine)
  gone = np.arange(cases.R) == 1
  name = 'a fork, a fork of it, the parent = uncached'
  try:
    for step, (old, new) in enumerate([(0, 3), (3, 1)]):
      with build.use(engine.built):
        if step == 0:
          session.cache = cache_lib.sharing(session.cache, 2)
        else:
          session.cache = cache_lib.evict(engine.model, session.cache, gone)
        session.cache = cache_lib.fork(engine.model, session.cache, old, [new])
      session.texts[new] = list(session.texts[old])
      session.step(cases.MIXED, {r: (r, 1) for r in range(cases.R)})
  except errors.UserError as e:
    yield proof.refused(name, e)
    return
  yield proof.row(name, *session.difference())


def given_away(proof):
  """A row's next request sees nothing of one that failed."""
  engine = proof.engine
  session, gone = cases.begun(engine), np.arange(cases.R) == 0
  with build.use(engine.built):
    spoiled = engine.spoiled(session.cache, gone)
    session.cache = cache_lib.evict(engine.model, spoiled, gone)
  session.texts[0] = []
  session.step(cases.MIXED, {1: (1, 1), 4: (0, 5)})
  session.step(cases.MIXED, {r: (r, 1) for r in range(cases.R)})
  name = 'a row given away: its next request = uncached'
  yield proof.row(name, *session.difference())


def declared(proof):
  """What a state holds grows with the tokens, where slots are declared."""
  engine, wrong = proof.engine, []
  for i, kind in enumerate(engine.model.stack.cached):
    own = engine.model.stack.mixer(kind)
    few, many = (
      jax.eval_shape(lambda n=n, own=own: own.init_state(1, n, 'float64'))
      for n in (32, 64)
    )
    says = own.capabilities
    parts = [(says.slots, few, many)]
    if says.recurs:
      parts = [(False, few[0], many[0]), (True, few[1], many[1])]
    for grows, *pair in parts:
      a, b = ([x.size for x in jax.tree.leaves(tree)] for tree in pair)
      if any((x < y) != grows for x, y in zip(a, b, strict=True)):
        wrong.append(engine.says(i) + f' slots={grows}')
  yield proof.strict(
    'state: of slots, or of one size, as declared', len(wrong), '; '.join(wrong)
  )


def sharded(proof):
  """Prompts and tokens on every mesh, against one device without a cache; with
  its own cache, where steps are declared not to be the whole pass."""
  for mesh in proof.meshes:
    name = f'{mesh} = one device'
    try:
      session = _short(proof.asked or cases.Engine(proof.case, mesh))
    except errors.UserError as e:
      if proof.asked:
        raise
      yield proof.refused(name, e)
      continue
    if proof.engine.inexact is None:
      yield proof.row(name, *session.difference(proof.engine))
    else:
      yield proof.strict(name, *session.apart(_short(proof.engine)), BOUND)


def _short(engine):
  """A Session of prompts, of more tokens of theirs, then of tokens one by one
  until a row is full: every shard of its slots is read."""
  session = cases.begun(engine)
  session.step(cases.FURTHER, {0: (0, 9), 2: (2, 12)})
  while len(session.texts[0]) < cases.SLOTS:
    session.step(cases.TOKENS, {r: (r, 1) for r in range(cases.R)})
  return session


def methods(proof):
  """Greedy texts of every method, token for token."""
  engine = proof.engine
  made, top = engine.generator(), engine.model.config.vocab_size
  prompts = [[1, 2, 3, 4, 1, 2, 3], [5] * 6, [7, 8, 9, 10, 11, 0]]
  prompts = [[t % top for t in prompt] for prompt in prompts]
  want = [r['tokens'] for r in made.generate(prompts)]
  texts = [(*p, *w) for p, w in zip(prompts, want, strict=True)]
  best = engine.uncached(texts)
  plain = [
    best[text][1][len(p) - 1 : -1].argmax(-1).tolist()
    for p, text in zip(prompts, texts, strict=True)
  ]
  yield proof.row(
    'greedy autoregressive = likeliest, uncached',
    *_differ(plain, want),
    bound=0.0,
  )
  for method in METHODS:
    if method in ('autoregressive', *methods_lib.CHANGING):
      continue  # the reference, and what is lossless of nothing
    name = f'greedy {method} = one by one'
    try:
      with tempfile.TemporaryDirectory() as folder:
        found = made.generate(
          prompts, method=method, judge='replay',
          **_drafts(engine, method), draft=_draft(engine, method, folder),
        )  # fmt: skip
    except errors.UserError as e:
      yield proof.refused(name, e)
      continue
    other, where = _differ([r['tokens'] for r in found], want)
    each = cases.NEW * len(found) / sum(1 + r['calls'] for r in found)
    kept = f'{each:.1f} a call' if each > 1 else 'no draft kept'
    yield proof.strict(name, other, where or kept)


def _drafts(engine, method):
  """DRAFTS; of easyspec two layers side by side, else its drafts are exact,
  if the first two of the model forget drafts, and are not all of it."""
  config, first = engine.model.config, engine.recurrent
  slots = first is None or first > 1
  fits = config.num_layers > 2 and 2 % config.group_layers == 0
  if method == 'easyspec' and slots and fits:
    return DRAFTS | dict(draft_layers=2, draft_group=2)
  return DRAFTS


def _draft(engine, method, folder):
  """A file of a draft with random parameters; '': the method has none."""
  if method not in methods_lib.NEEDED:
    return ''
  with build.use(engine.built):
    draft = distill.untrained(engine.model, engine.params, method, 'ids')
  path = pathlib.Path(folder, 'draft.npz')
  heads.save(path, *draft)
  return str(path)


def _differ(found, want):
  """(how many tokens differ, where the first does)."""
  places = [
    (row, i)
    for row, (a, b) in enumerate(zip(found, want, strict=True))
    for i in range(max(len(a), len(b)))
    if list(a[i : i + 1]) != list(b[i : i + 1])
  ]
  where = 'row {}, {}'.format(*places[0]) if places else ''
  return len(places), where


# A property is a function of a Proof that yields rows.
PROPERTIES = (
  cached, tree, rolled_back, forked, given_away, declared, sharded, methods
)  # fmt: skip


def judged():
  """Rows of the judges that declare that they are lossless."""
  case = cases.small('F', {'model.vocab_size': LETTERS})
  proof = Proof(case._replace(name='judges'))
  made = proof.engine.generator()
  every = list(itertools.product(range(LETTERS), repeat=LONG))
  z = proof.engine.uncached([(1, *text) for text in every])
  p = np.array([_probability(z[1, *text][1], text) for text in every])
  for name, judge in judges.JUDGES.items():
    if not judge.lossless:
      continue
    seen = np.zeros(len(every))
    for seed in range(SEEDS):
      found = made.generate(
        [[1]] * ROWS, max_new_tokens=LONG, temperature=1.0, seed=seed,
        method='speculative', judge=name, **DRAFTS
      )  # fmt: skip
      texts = np.array([r['tokens'] for r in found])
      codes = texts @ LETTERS ** np.arange(LONG)[::-1]
      seen += np.bincount(codes, minlength=len(every))
    far = _chi_square(seen, p)
    text = f'judge {name}: the distribution, in sigmas'
    yield proof.strict(text, max(far, 0.0), bound=FAR)


def _probability(z, text):
  """Of a text after one token, by the logits of that and of the text."""
  z = z[:-1] - z[:-1].max(-1, keepdims=True)
  p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
  return p[np.arange(len(text)), list(text)].prod()


def _chi_square(seen, p):
  """Standard deviations that the chi-square of counts is above its mean, by
  Wilson and Hilferty (1931); cells that expect less than 10 are one."""
  total, order = seen.sum(), np.argsort(p)
  few = p[order].cumsum() * total < 10
  group = lambda x: np.append(x[order][~few], x[order][few].sum())
  found, expected = group(seen), group(p) * total
  ok = expected > 0
  statistic = float(((found - expected)[ok] ** 2 / expected[ok]).sum())
  freedom = int(ok.sum()) - 1
  x, v = (statistic / freedom) ** (1 / 3), 2 / (9 * freedom)
  return (x - (1 - v)) / v**0.5
