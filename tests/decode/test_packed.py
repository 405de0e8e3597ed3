"""One step of tokens of many requests: each is what it is alone.

The reference is the model without a cache, on the tokens of a path alone.
Legend: R rows, V vocabulary.
"""

import functools

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
SLOTTED, STATES = decode_cases.SLOTTED, decode_cases.STATES
ALL, MIXED, TREE = decode_cases.ALL, decode_cases.MIXED, decode_cases.TREE
Group, Session = packed.Group, decode_cases.Session
made, alone, program = (
  decode_cases.made,
  decode_cases.alone,
  decode_cases.program,
)
near, ids, fed = decode_cases.near, decode_cases.ids, decode_cases.fed
branches = decode_cases.branches


@pytest.mark.sampled(9)
@pytest.mark.parametrize('pattern', ALL)
def test_mixed_requests_are_what_they_are_alone(pattern):
  """Chunks, parts of chunks and single tokens of four requests in a step."""
  session = fed(Session(pattern))
  lanes = [
    (0, ids(1, 5)), None, (2, ids(1, 6)), None, (1, ids(10, 7)), None,
    (3, ids(3, 8)),
  ]  # fmt: skip
  found = session.step(MIXED, lanes)
  for z, lane in zip(found, lanes, strict=True):
    if lane:
      n, text = len(lane[1]), session.texts[lane[0]]
      assert near(z[:n], alone(pattern)(text)[-n:]), lane[0]


@pytest.mark.parametrize('pattern', ('F', 'A', 'G'))
def test_a_neighbour_that_is_seen_shows(pattern, monkeypatch):
  """Rows read in another order: the comparison notices."""
  real = packed.plan

  def turned(*args):
    found = real(*args)
    ids = found.ids._replace(row=(found.ids.row + 1) % R)
    return found._replace(ids=ids)

  form = (Group(1, 12, own=False),)
  session = Session(pattern)
  session.step(form, [(1, ids(7, 0))])
  session.step(form, [(2, ids(7, 1))])
  want = alone(pattern)(session.texts[1] + ids(5, 2))[-5:]
  tokens = step.pack(form, R, [(1, ids(5, 2), 7)])
  decode_cases.forget()
  right, _ = program(pattern, form)[0](session.cache, tokens)
  monkeypatch.setattr(packed, 'plan', turned)
  decode_cases.forget()
  wrong, _ = program(pattern, form)[0](session.cache, tokens)
  monkeypatch.undo()
  decode_cases.forget()
  assert near(right[0, :5], want) and not near(wrong[0, :5], want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize('pattern', SLOTTED)
def test_a_tree_is_every_path_alone(pattern):
  session, (more, paths, depth) = fed(Session(pattern)), branches()
  nodes, lanes = {1: ids(8, 20), 2: ids(8, 21)}, [None] * R
  before = {r: list(session.texts[r]) for r in nodes}
  for r, tokens in nodes.items():
    position = [len(before[r]) + d for d in depth]
    lanes[r] = (r, tokens, more | dict(position=position))
  path = paths[7]  # a path is kept, of row 1 alone
  marks = [i in path for i in range(8)]
  found = session.step(TREE, lanes, {1: marks, 2: [False] * 8})
  for r, tokens in nodes.items():
    for node, way in enumerate(paths):
      text = before[r] + [tokens[i] for i in way]
      assert near(found[r][node], alone(pattern)(text)[-1]), (r, node)
  z = session.step(MIXED, [None, (1, ids(1, 22)), (2, ids(1, 23)), *[None] * 4])
  for r in nodes:
    assert near(z[r][0], alone(pattern)(session.texts[r])[-1])


def test_a_tree_without_its_ancestors_is_another():
  session, (more, paths, depth) = fed(Session('F')), branches()
  text, tokens = list(session.texts[2]), ids(8, 20)
  more |= dict(
    ancestors=[0xFFFFFFFF] * 8, position=[len(text) + d for d in depth]
  )
  lanes = [None, None, (2, tokens, more), None]
  z = session.step(TREE, lanes, {2: [False] * 8})[2]
  same = [
    near(z[i], alone('F')(text + [tokens[j] for j in way])[-1])
    for i, way in enumerate(paths)
  ]
  assert same[0] and not any(same[1:])


@pytest.mark.parametrize('pattern', ('F', 'A'))
def test_groups_of_a_lane_are_apart(pattern):
  """Of two groups behind tokens of none, each sees these and itself; all have
  node 0, so their ancestors say nothing."""
  session, depth = fed(Session(pattern)), [0, 1, 2, 3, 4, 2, 3, 4]
  text, tokens = list(session.texts[2]), ids(8, 20)
  more = dict(
    order=depth, position=[len(text) + d for d in depth],
    group=[0, 0, 1, 1, 1, 2, 2, 2],
  )  # fmt: skip
  paths = [[0], [0, 1], *([0, 1, *range(2, i + 1)] for i in (2, 3, 4))]
  paths += [[0, 1, *range(5, i + 1)] for i in (5, 6, 7)]
  kept = [i in paths[7] for i in range(8)]  # the second group
  lanes = [None, None, (2, tokens, more), None]
  z = session.step(TREE, lanes, {2: kept})[2]
  for node, way in enumerate(paths):
    want = alone(pattern)(text + [tokens[i] for i in way])[-1]
    assert near(z[node], want), node
  z = session.step(MIXED, [None, None, (2, ids(1, 23)), *[None] * 4])[2]
  assert near(z[0], alone(pattern)(session.texts[2])[-1])


def test_nodes_are_bits_of_several_words(monkeypatch):
  """70 of them, each of which sees its own path; the first word alone says
  nothing of nodes from 32 on."""
  form, rng = (Group(R, 70, tree=True),), np.random.default_rng(5)
  paths = [[0]]
  for node in range(1, 70):
    paths.append([*paths[rng.integers(0, node)], node])
  depth, text = [len(path) - 1 for path in paths], ids(4, 30)
  bits = [1 + sum(2 << i for i in path) for path in paths]
  more = dict(
    order=depth, node=list(range(1, 71)), ancestors=bits,
    position=[len(text) + d for d in depth],
  )  # fmt: skip
  tokens = ids(70, 31)

  def found():
    session = Session('F')
    session.step(MIXED, [None] * R + [(2, text), None, None])
    decode_cases.forget()
    lanes = [None, None, (2, tokens, more), None]
    z = session.step(form, lanes, {2: [False] * 70})[2]
    decode_cases.forget()
    return z

  z, real = found(), packed.on_path
  monkeypatch.setattr(
    packed, 'on_path',
    lambda x: real(x._replace(ancestors=x.ancestors[..., 0])),
  )  # fmt: skip
  other = found()
  some = [0, 30, 31, 32, 40, 62, 63, 64, 69]
  for node in some:
    way = text + [tokens[i] for i in paths[node]]
    assert near(z[node], alone('F')(way)[-1]), node
  assert any(not near(other[i], z[i]) for i in some[3:])


EACH = (Group(R, 3, each=True),)


@pytest.mark.sampled(12)
@pytest.mark.parametrize('pattern', ALL)
def test_any_part_of_a_chain_is_kept(pattern):
  """States after each of three tokens; 2, 0, 3 and 1 of them are kept."""
  session = fed(Session(pattern))
  session.step(MIXED, [*[None] * 4, (1, ids(5, 9)), None, None])
  before = [list(t) for t in session.texts]
  chains = [ids(3, 30 + r) for r in range(R)]
  keep = [[i < n for i in range(3)] for n in (2, 0, 3, 1)]
  found = session.step(EACH, list(enumerate(chains)), keep)
  for r, z in enumerate(found):
    assert near(z, alone(pattern)(before[r] + chains[r])[-3:])
  z = session.step(MIXED, [(r, ids(1, r)) for r in range(R)] + [None] * 3)
  for r in range(R):
    assert near(z[r], alone(pattern)(session.texts[r])[-1:]), r


@pytest.mark.parametrize('pattern', ('F', 'WFN', 'A', 'GF', 'H'))
def test_what_was_rolled_back_leaves_no_trace(pattern):
  model, _ = made(pattern)
  session = fed(Session(pattern))
  before, texts = session.cache, [list(t) for t in session.texts]
  session.step(MIXED, [*[None] * 4, (0, ids(6, 40)), (3, ids(4, 41)), None])
  slots = pattern in SLOTTED
  if not slots:
    with support.refused('keeps one state', 'layer 0'):
      cache_lib.rollback(model, session.cache, before.length)
  session.cache = cache_lib.rollback(
    model, session.cache, before.length, None if slots else before
  )
  session.texts = texts
  z = session.step(
    MIXED, [(0, ids(1, 42)), None, None, (3, ids(1, 43)), *[None] * 3]
  )
  for r in (0, 3):
    assert near(z[r], alone(pattern)(session.texts[r])[-1:])


@pytest.mark.parametrize('pattern', ('M', 'GF', 'H'))
def test_rows_that_do_not_go_back_keep_their_states(pattern):
  model, _ = made(pattern)
  session = fed(Session(pattern))
  before, text = session.cache, list(session.texts[0])
  session.step(MIXED, [*[None] * 4, (0, ids(6, 40)), (3, ids(4, 41)), None])
  back = lambda n: cache_lib.rollback(
    model, session.cache, session.cache.length.at[0].set(n), before
  )
  session.cache, session.texts[0] = back(len(text)), list(text)
  z = session.step(
    MIXED, [(0, ids(1, 42)), None, None, (3, ids(1, 43)), *[None] * 3]
  )
  for r in (0, 3):
    assert near(z[r], alone(pattern)(session.texts[r])[-1:])
  with support.refused('row 0', f'{len(text) - 1} tokens', f'has {len(text)}'):
    back(len(text) - 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize('pattern', ALL)
def test_a_new_tenant_sees_nothing_of_the_old_one(pattern):
  """Nor of NaN that a failed request leaves in its state."""
  session = fed(Session(pattern))
  broken = np.arange(R) == 2
  if pattern in STATES:
    spoil = lambda x: jnp.where(
      broken.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x
    )
    states = jax.tree.map(spoil, session.cache.states)
    session.cache = session.cache._replace(states=states)
  session.cache = cache_lib.evict(
    made(session.pattern)[0], session.cache, broken
  )
  session.texts[2] = []
  one = [None, None, (2, ids(1, 50)), (3, ids(1, 51)), *[None] * 3]
  for _ in range(2):
    z = session.step(MIXED, one)
    for r in (2, 3):
      assert near(z[r], alone(pattern)(session.texts[r])[-1:]), r


def test_keys_that_are_not_finite_are_never_kept():
  """A failed request's token: its neighbours and the next tenant are sound."""
  model, params = made('F')
  session = fed(Session('F'))
  run, commit = program('F', MIXED)
  bad = dict(params, embedding=params['embedding'].at[7].set(jnp.nan))
  tokens = step.pack(MIXED, R, [None, None, (2, [7], 21), *[None] * 4])
  x, flight = model.step(bad, session.cache, tokens, MIXED)
  assert np.isnan(x[2]).all()
  session.cache = commit(session.cache, flight, np.ones((31, 1), bool))
  assert all(np.isfinite(s).all() for s in session.cache.states[0])
  session.cache = cache_lib.evict(
    made(session.pattern)[0], session.cache, np.arange(R) == 2
  )
  session.texts[2] = []
  z = session.step(MIXED, [None, None, (2, ids(1, 60)), None, *[None] * 3])
  assert near(z[2], alone('F')(session.texts[2])[-1:])


@pytest.mark.sampled(6)
@pytest.mark.parametrize('pattern', ('F', 'A', 'H', 'KG'))
def test_lanes_on_tensor_shards_equal_one_device(pattern):
  want = fed(Session(pattern))
  lanes = [(0, ids(1, 5)), *[None] * 3, (1, ids(10, 7)), None, None]
  plain = want.step(MIXED, lanes)
  built = build.build(
    schema.Config(
      mesh=schema.Mesh(tensor=2, sequence=False), model=made(pattern)[0].config
    ),
    devices=jax.devices()[:2],
  )
  model = built.model
  with build.use(built):
    params = module_cases.placed(built, module_cases.parameters(model, 0.5))
    params = jax.jit(model.unstack)(params)
    cache = jax.jit(lambda: model.init_cache(R, SLOTS))()

    @jax.jit
    def run(cache, tokens, form):
      x, flight = model.step(params, cache, tokens, MIXED)
      z = model.logits(params, x)
      keep = jnp.isfinite(z).all(-1)
      return z, model.commit(cache, flight, MIXED, keep)

    texts = [[] for _ in range(R)]
    steps = (
      [None] * R + [(2, ids(12, 0)), (0, ids(7, 1)), None],
      [(0, ids(1, 2)), *[None] * 3, (2, ids(9, 3)), None, (3, ids(2, 4))],
      lanes,
    )
    for rows in steps:
      given = [
        lane and (lane[0], lane[1], len(texts[lane[0]])) for lane in rows
      ]
      z, cache = run(cache, step.pack(MIXED, R, given), None)
      for lane in filter(None, rows):
        texts[lane[0]] += lane[1]
  z = np.asarray(z).reshape(-1, V)
  assert near(z[0], plain[0][0]) and near(z[4:14], plain[4][:10])


@pytest.mark.parametrize('pattern', ('F', 'G'))
def test_a_request_is_bitwise_the_same_in_any_place(pattern):
  """One program: rows and lanes permuted, neighbours there or not."""
  with jax.enable_x64(False):
    model, params = made(pattern, dtype='float32', param_dtype='float32')

    @jax.jit
    def run(cache, tokens):
      x, flight = model.step(params, cache, tokens, MIXED)
      z = model.logits(params, x)
      keep = jnp.isfinite(z).all(-1)
      return z[:, 0], model.commit(cache, flight, MIXED, keep)

    texts = {r: ids(12, 70 + r) for r in range(3)}

    def logits(place, lane, among):
      """Of every text's last prompt token and two more; place: its row."""
      cache, out = model.init_cache(R, SLOTS), {r: [] for r in among}
      for r in among:
        lanes = [None] * 7
        lanes[R + lane[r]] = (place[r], texts[r], 0)
        z, cache = run(cache, step.pack(MIXED, R, lanes))
        out[r].append(np.asarray(z)[R + 12 * lane[r] + 11])
      for t in range(2):
        lanes = [None] * 7
        for r in among:
          lanes[place[r]] = (place[r], [texts[r][t]], 12 + t)
        z, cache = run(cache, step.pack(MIXED, R, lanes))
        for r in among:
          out[r].append(np.asarray(z)[place[r]])
      return {r: np.stack(rows) for r, rows in out.items()}

    want = logits({0: 0, 1: 1, 2: 2}, {0: 0, 1: 1, 2: 0}, (0, 1, 2))
    found = [
      logits({0: 3, 1: 0, 2: 1}, {0: 1, 1: 1, 2: 0}, (2, 0, 1)),
      logits({1: 2}, {1: 0}, (1,)),
    ]
  for rows in found:
    for r, z in rows.items():
      np.testing.assert_array_equal(z, want[r])


@pytest.mark.parametrize('width', (1, 4))
def test_no_step_copies_the_cache(width):
  """Temporaries are less than one layer's cache, if what is kept depends on
  the step; else XLA copies it."""
  temporaries = functools.partial(decode_cases.temporaries, width)
  assert temporaries() < decode_cases.LAYER < temporaries(sound=False)


# Layers' caches that a step may take, which are copies of one layer's.
WIDE = {
  '9': (9, 2), '32': (32, 2), 'tree of 12': ((Group(2, 12, tree=True),), 2),
  'scheduler': ((Group(2, 1), Group(1, 64, own=False)), 1),
  'copied row': ((Group(1, 3, own=False),), 0.6),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize('name', WIDE)
def test_a_wide_step_copies_one_layer_at_a_time(name):
  """Of three more layers it takes what their tokens in flight are."""
  form, bound = WIDE[name]
  few, more = (decode_cases.temporaries(form, layers=n) for n in (3, 6))
  assert few < bound * decode_cases.LAYER
  assert more - few < decode_cases.LAYER / 4


REFUSED = {
  'rows': (lambda: packed.plan(
    (Group(3, 1),), step.pack((Group(3, 1),), R, [None] * 3),
    np.zeros(R, np.int32),
  ), ('3 lanes', 'one a row')),
  'shape': (lambda: packed.plan(
    (Group(R, 2),), step.pack((Group(R, 1),), R, [None] * R),
    np.zeros(R, np.int32),
  ), ('expected arrays (4, 2)', 'token (4, 1)')),
  'trees': (lambda: packed.plan(
    TREE, step.pack((Group(R, 8),), R, [None] * R), np.zeros(R, np.int32)
  ), ('and order, group, node, ancestors',)),
  'twice': (lambda: step.pack(
    MIXED, R, [(0, [1], 0), *[None] * 3, (0, [2], 1), None, None]
  ), ('requests [0, 0]', 'one at most')),
  'lanes': (lambda: step.pack(MIXED, R, [None]), ('1 lanes', 'has 7')),
  'long': (lambda: step.pack((Group(R, 1),), R, [(0, [1, 2], 0), *[None] * 3]),
           ('lane 0: 2 tokens', 'has 1 tokens')),
  'row': (lambda: step.pack((Group(R, 1),), R, [(1, [1], 0), *[None] * 3]),
          ('lane 0', 'request 1', 'is row 0')),
}  # fmt: skip


@pytest.mark.parametrize('name', REFUSED)
def test_forms_that_cannot_be_run(name):
  call, words = REFUSED[name]
  with support.refused(*words):
    call()


def test_mixed_lanes_need_one_shard_of_rows():
  with (
    support.laid_out('data=2', sequence=False),
    support.refused('2 shards of rows', 'data=1'),
  ):
    packed.plan(MIXED, step.pack(MIXED, R, [None] * 7), np.zeros(R, np.int32))


def test_lanes_longer_than_a_row_are_refused():
  model, params = made('F')
  form = (Group(R, SLOTS + 1),)
  tokens = step.pack(form, R, [None] * R)
  cache = model.init_cache(R, SLOTS)
  _, flight = model.step(params, cache, tokens, form)
  with support.refused(f'{SLOTS + 1} tokens', f'{SLOTS} slots'):
    model.commit(cache, flight, form, np.ones((R, SLOTS + 1), bool))
