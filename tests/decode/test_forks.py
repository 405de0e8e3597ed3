"""Requests that share tokens: each is what it is alone.

The reference of a fork is the model without a cache, on the tokens of its path
alone; of a merge, one pass over all tokens under a mask that is written here.
Legend: R rows, T tokens.
"""

import dataclasses

import decode_cases
import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.decode import cache as cache_lib
from paraxis.decode import step
from paraxis.models import build
from paraxis.models.mixers import packed

pytestmark = pytest.mark.usefixtures('float64')

V, R, SLOTS = decode_cases.V, decode_cases.R, decode_cases.SLOTS
ALL = (*decode_cases.ALL, 'A:1')
SLOTTED = (*decode_cases.SLOTTED, 'A:1')
MIXED, Group = decode_cases.MIXED, packed.Group
near, ids, made = decode_cases.near, decode_cases.ids, decode_cases.made


class Session(decode_cases.Session):
  """Requests that are forked, merged, rolled back and evicted."""

  def __init__(self, pattern, reads=3):
    super().__init__(pattern, reads)
    self.model = made(pattern)[0]

  def fork(self, src, *dst):
    self.cache = cache_lib.fork(self.model, self.cache, src, list(dst))
    for row in dst:
      self.texts[row] = list(self.texts[src])

  def evict(self, *rows):
    marks = np.isin(np.arange(R), rows)
    self.cache = cache_lib.evict(self.model, self.cache, marks)
    for row in rows:
      self.texts[row] = []

  def rollback(self, row, length):
    lengths = self.cache.length.at[row].set(length)
    self.cache = cache_lib.rollback(self.model, self.cache, lengths)
    self.texts[row] = self.texts[row][:length]

  def feed(self, form=MIXED, **lanes):
    """Logits of the new tokens of each request, in order of its row.

    lanes: r0=..: tokens of the request in row 0; one in its own lane, as far as
      3 in the last one, else in a lane of 12.
    """
    given, wide = [None] * (R + 3), [R, R + 1]
    for name, tokens in lanes.items():
      row = int(name[1:])
      at = row if len(tokens) == 1 else R + 2 if len(tokens) < 4 else wide.pop()
      given[at] = (row, tokens)
    found = self.step(form, given)
    return {
      lane[0]: z[: len(lane[1])]
      for lane, z in zip(given, found, strict=True)
      if lane
    }

  def right(self, found):
    """{row: whether its logits are those of its text alone}."""
    return {
      row: near(z, decode_cases.alone(self.pattern)(self.texts[row])[-len(z) :])
      for row, z in found.items()
    }

  def check(self, **lanes):
    found = self.right(self.feed(**lanes))
    assert all(found.values()), found


def forked(pattern, reads=3):
  """Row 1 goes on from 8 tokens of row 0; rows 2, 3 hold others."""
  session = decode_cases.fed(Session(pattern, reads))
  session.fork(0, 1)
  return session


@pytest.mark.sampled(12)
@pytest.mark.parametrize('pattern', ALL)
def test_forks_are_what_they_are_alone(pattern):
  """All go on, the parent too; a fork of a fork; a row that is used again."""
  session = forked(pattern)
  session.check(r1=ids(7, 10), r0=ids(1, 11), r2=ids(1, 12))
  session.evict(3)
  session.fork(1, 3)
  session.check(r3=ids(3, 13), r1=ids(1, 14), r0=ids(1, 15))
  session.evict(1, 3)
  session.fork(2, 1, 3)
  session.check(r1=ids(1, 16), r3=ids(5, 17), r2=ids(1, 18))
  session.check(r0=ids(1, 19), r1=ids(1, 20), r2=ids(1, 21), r3=ids(1, 22))


BROKEN = {
  'not read': lambda r: r._replace(ends=0 * r.ends),
  'a token less': lambda r: r._replace(ends=jnp.maximum(r.ends - 1, 0)),
  'another row': lambda r: r._replace(rows=r.rows + 1),
  'its own slots': lambda r: r._replace(first=0 * r.first),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize('break_', BROKEN)
@pytest.mark.parametrize('pattern', ('F', 'A', 'A:1'))
def test_a_fork_that_reads_something_else_shows(pattern, break_):
  session = forked(pattern)
  reads = BROKEN[break_](session.cache.reads)
  session.cache = session.cache._replace(reads=reads)
  for n in (1, 3, 12):
    found = session.right(session.feed(r1=ids(n, n), r2=ids(1, n)))
    assert found == {1: False, 2: True}


def test_a_fork_without_the_state_of_its_parent_shows():
  session = forked('G')
  old = session.cache.states
  states = jax.tree.map(lambda x: x.at[1].set(x[2]), old)
  session.cache = session.cache._replace(states=states)
  assert session.right(session.feed(r1=ids(1, 1), r0=ids(1, 1))) == {
    0: True, 1: False,
  }  # fmt: skip


def test_states_of_one_size_are_forked_without_ranges():
  session = decode_cases.fed(Session('G', 0))
  session.fork(0, 1)
  session.evict(0)  # nobody reads it
  session.check(r1=ids(7, 1), r0=ids(1, 2))


@pytest.mark.sampled(5)
@pytest.mark.parametrize('pattern', SLOTTED)
def test_a_tree_on_a_fork_is_every_path_alone(pattern):
  session, (more, paths, depth) = forked(pattern), decode_cases.branches()
  session.feed(r1=ids(2, 1))
  before, tokens = list(session.texts[1]), ids(8, 2)
  lanes = [None] * R
  lanes[1] = 1, tokens, more | dict(position=[len(before) + d for d in depth])
  marks = [i in paths[7] for i in range(8)]
  z = session.step(decode_cases.TREE, lanes, {1: marks})[1]
  for node, way in enumerate(paths):
    text = before + [tokens[i] for i in way]
    assert near(z[node], decode_cases.alone(pattern)(text)[-1]), node
  session.check(r1=ids(1, 3), r0=ids(1, 4))


@pytest.mark.sampled(2)
@pytest.mark.parametrize('pattern', SLOTTED)
def test_a_fork_may_go_back_behind_the_fork(pattern):
  session = forked(pattern)
  session.check(r1=ids(3, 1))
  session.rollback(1, 5)
  session.check(r1=ids(7, 2), r0=ids(1, 3))
  session.check(r1=ids(1, 6))
  session.evict(1)
  session.rollback(0, 4)  # nobody reads it any more
  session.check(r1=ids(5, 4), r0=ids(1, 5))


def test_a_fork_that_keeps_what_it_forgot_shows():
  session = forked('F')
  length = session.cache.length.at[1].set(5)
  session.cache = session.cache._replace(length=length)
  session.texts[1] = session.texts[1][:5]
  assert session.right(session.feed(r1=ids(7, 2)))[1] is np.False_


def test_who_is_read_keeps_what_is_read():
  session = forked('F')
  session.feed(r0=ids(1, 0), r1=ids(3, 1))
  session.rollback(0, 8)
  with support.refused('row 0', '7 tokens', 'request 1', '0 .. 7', 'keep 8'):
    session.rollback(0, 7)
  with support.refused('row 0', '0 tokens', 'request 1 reads'):
    session.evict(0)
  session.evict(3)
  session.fork(1, 3)
  with support.refused('row 1', '10 tokens', 'request 3', '8 .. 10'):
    session.rollback(1, 10)
  session.evict(0, 1, 3)
  session.check(r0=ids(1, 0), r1=ids(5, 1), r2=ids(1, 2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize('pattern', SLOTTED)
def test_nan_outside_of_what_is_read_does_not_reach_a_fork(pattern):
  session = forked(pattern)
  at = jnp.arange(SLOTS)
  read = jnp.stack([at < 8, at >= 0, at < 0, at < 0])[:, None, :, None]
  spoil = lambda x: jnp.where(read, x, jnp.nan)
  states = jax.tree.map(spoil, session.cache.states)
  session.cache = session.cache._replace(states=states)
  for n in (1, 3, 12):
    found = session.feed(r1=ids(n, n))
    assert session.right(found)[1], n


# Children of a fork: two of the parent at 8 tokens, one of them 3 long, the
# other 5; the merged request goes on at 13.
PARENT, CHILDREN, AFTER = 8, (3, 5), 4


def merged(pattern, order=(1, 3)):
  """(session whose row 2 reads both children, tokens of all parts)."""
  session = Session(pattern)
  parts = [ids(PARENT, 1), *(ids(n, 2 + n) for n in CHILDREN), ids(AFTER, 9)]
  session.feed(r0=parts[0])
  session.fork(0, 1, 3)
  session.feed(r1=parts[1], r3=parts[2])
  session.cache = cache_lib.merge(session.model, session.cache, order, 2)
  session.texts[2] = [0] * (PARENT + max(CHILDREN))
  return session, parts


def one_pass(pattern, parts, apart, monkeypatch):
  """Logits of the last part, in one pass in which the second child does (not)
  see the first."""
  sees = np.tril(np.ones((4, 4), bool))
  sees[2, 1] = not apart
  begins = 0, PARENT, PARENT, PARENT + max(CHILDREN)
  return decode_cases.one_pass(pattern, parts, begins, sees, monkeypatch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize('pattern', SLOTTED)
def test_a_merge_is_one_pass_in_which_children_are_apart(pattern, monkeypatch):
  session, parts = merged(pattern)
  tokens, found = parts[-1], []
  for part in (tokens[:1], tokens[1:]):  # one token, and a lane of three
    found.append(session.feed(r2=part)[2])
  found = np.concatenate(found)
  assert near(found, one_pass(pattern, parts, True, monkeypatch))
  assert not near(found, one_pass(pattern, parts, False, monkeypatch))


def test_a_merge_does_not_depend_on_the_order_of_children():
  found = []
  for order in ((1, 3), (3, 1)):
    session, parts = merged('F', order)
    found.append(session.feed(r2=parts[-1])[2])
    assert cache_lib.ranges(session.cache, 2) == [
      (0, 0, 8), (1, 8, 11), (3, 8, 13), (2, 13, 17),
    ]  # fmt: skip
  np.testing.assert_array_equal(*found)
  with support.refused('row 3', '12 tokens', 'request 2'):
    session.rollback(3, 12)


def test_a_merge_of_one_is_its_fork():
  session = forked('WFN')
  session.evict(3)
  session.check(r1=ids(3, 1))
  session.cache = cache_lib.merge(session.model, session.cache, [1], 3)
  session.texts[3] = list(session.texts[1])
  session.check(r3=ids(5, 2), r1=ids(1, 3))


REFUSED = {
  'taken': ('F', lambda s: s.fork(0, 2), ('row 2', '21 tokens', 'evict')),
  'ranges': (
    'F',
    lambda s: (s.evict(3), s.feed(r1=[1]), s.fork(1, 3)),
    ('[3]', '2 ranges', 'room for 1', 'sharing'),
  ),
  'recurrent': (
    'GF',
    lambda s: cache_lib.merge(s.model, s.cache, [0, 1], 3),
    ('layer 0', 'kind G', '2 requests'),
  ),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_cannot_be_shared_is_refused(name):
  pattern, call, words = REFUSED[name]
  session = forked(pattern, reads=1)
  with support.refused(*words):
    call(session)


def test_rows_that_are_shared_are_on_one_device():
  with (
    support.laid_out('data=2', sequence=False),
    support.refused('2 shards of cache rows', 'data=1'),
  ):
    cache_lib.sharing(made('F')[0].init_cache(R, SLOTS), 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize('pattern', ('F', 'A'))
def test_forks_on_tensor_shards_equal_one_device(pattern):
  want = forked(pattern)
  want = [want.feed(r1=ids(n, n))[1] for n in (1, 3, 7)]
  config = dataclasses.replace(
    schema.Config(),
    mesh=schema.Mesh(tensor=2, sequence=False),
    model=made(pattern)[0].config,
  )
  built = build.build(config, devices=jax.devices()[:2])
  model = built.model
  with build.use(built):
    params = module_cases.placed(built, module_cases.parameters(model, 0.5))
    params = jax.jit(model.unstack)(params)
    cache = cache_lib.sharing(jax.jit(lambda: model.init_cache(R, SLOTS))(), 3)

    @jax.jit
    def run(cache, tokens):
      x, flight = model.step(params, cache, tokens, MIXED)
      z = model.logits(params, x)
      return z, model.commit(cache, flight, MIXED, jnp.isfinite(z).all(-1))

    def feed(cache, row, tokens, at, lane):
      lanes = [None] * (R + 3)
      lanes[lane] = row, tokens, at
      z, cache = run(cache, step.pack(MIXED, R, lanes))
      start = [*range(R), R, R + 12, R + 24][lane]
      return np.asarray(z)[start : start + len(tokens), 0], cache

    _, cache = feed(cache, 0, ids(7, 1), 0, R)
    _, cache = feed(cache, 0, ids(1, 2), 7, 0)
    cache = cache_lib.fork(model, cache, 0, [1])
    for lane, n, at, z in zip(
      (1, R + 2, R), (1, 3, 7), (8, 9, 12), want, strict=True
    ):
      found, cache = feed(cache, 1, ids(n, n), at, lane)
      assert near(found, z)


@pytest.mark.parametrize('width', (1, 4))
def test_no_step_of_forks_copies_the_cache(width):
  """The rows that one layer shares are copied, not those of all layers."""
  layer = decode_cases.LAYER
  assert layer <= decode_cases.temporaries(width, shared=1) < 1.5 * layer
