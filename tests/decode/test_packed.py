"""One step of tokens of many requests: each is what it is alone.

The reference is the model without a cache, on the tokens of a path alone.
Legend: R rows, V vocabulary.
"""

import functools

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
from paraxis.models import decoder
from paraxis.models.mixers import packed

V, R, SLOTS = 32, 4, 32
BOUND = 1e-11
SLOTTED = ('F', 'WFN', 'K', 'A')
STATES = ('G', 'M', 'S', 'R', 'L', 'V', 'U', 'D', 'C')
ALL = (*SLOTTED, *STATES, 'H', 'GF')
Group = packed.Group


@functools.cache
def made(pattern, **more):
  """(Decoder in float64, its parameters, one array a layer)."""
  plain = schema.Model()
  small = dict(
    gated_linear=dict(gate_rank=3, conv_width=3),
    mamba=dict(head_dim=4, state=4, dt_rank=2, groups=2),
    hybrid=dict(attention_rank=3, mlp_rank=2),
    recurrent=dict(tolerance=1e-13),
    tcn=dict(kernel=3, depth=2, chunk=5),
    gated_delta=dict(value_heads=4, key_dim=4, value_dim=3),
    latent=dict(rank=6, nope_dim=4, rope_dim=4, value_dim=6, groups=2),
  )
  sections = {k: type(getattr(plain, k))(**v) for k, v in small.items()}
  own = dict(
    vocab_size=V, d_model=16, num_heads=4, num_kv_heads=2, d_ff=16, window=6,
    attention_chunk=5, pattern=pattern, num_layers=max(2, len(pattern)),
    attention_block=8, attention_softcap=5.0, sinks='A' not in pattern,
    dtype='float64', param_dtype='float64',
  )  # fmt: skip
  config = schema.Model(**own | sections | more)
  model = decoder.Decoder(config)
  params = module_cases.parameters(model, 0.5)
  return model, model.unstack(jax.tree.map(jnp.asarray, params))


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


@functools.cache
def alone(pattern):
  """f(tokens of one request) -> z_TV without a cache."""
  model, _ = made(pattern)
  params = module_cases.parameters(model, 0.5)

  def run(ids):
    row = np.zeros((1, SLOTS), np.int32)
    row[0, : len(ids)] = ids
    return module_cases.logits(model, params, row)[0, : len(ids)]

  return run


@functools.cache
def program(pattern, form):
  """step(cache, packed) -> (logits of all tokens, flight); commit."""
  model, params = made(pattern)

  @jax.jit
  def run(cache, tokens):
    x, flight = model.step(params, cache, tokens, form)
    return model.logits(params, x), flight

  @jax.jit
  def commit(cache, flight, keep):
    return model.commit(cache, flight, form, keep)

  return run, commit


class Session:
  """A cache of R rows, and what each of its requests has been fed."""

  def __init__(self, pattern):
    self.pattern, self.texts = pattern, [[] for _ in range(R)]
    self.cache = made(pattern)[0].init_cache(R, SLOTS)

  def step(self, form, lanes, keep=None, first=None):
    """Logits (one array a lane); keeps `keep` tokens of each lane, or all.

    lanes: None, or (request, tokens, more of step.pack).
    """
    run, commit = program(self.pattern, form)
    given = [
      lane and (lane[0], lane[1], len(self.texts[lane[0]]), *lane[2:])
      for lane in lanes
    ]
    tokens = step.pack(form, R, given)
    z, flight = run(self.cache, tokens)
    widths = [g.width for g in form for _ in range(g.count)]
    starts = np.cumsum([0, *widths])
    kept = np.zeros(starts[-1], bool)
    for i, lane in enumerate(lanes):
      if lane:
        request, ids = lane[:2]
        marks = [True] * len(ids) if keep is None else keep[i]
        kept[starts[i] : starts[i] + len(ids)] = marks
        self.texts[request] += [
          t for t, ok in zip(ids, marks, strict=True) if ok
        ]
    self.cache = commit(self.cache, flight, kept.reshape(tokens.token.shape))
    z = np.asarray(z).reshape(-1, V)
    assert self.cache.length.tolist() == [len(t) for t in self.texts]
    return [z[a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)]


def near(found, want):
  return np.abs(found - want).max() <= BOUND * np.abs(want).max()


def ids(n, seed):
  return np.random.default_rng(seed).integers(0, V, n).tolist()


MIXED = (Group(R, 1), Group(2, 12, own=False), Group(1, 3, own=False))


def fed(session, form=MIXED):
  """Requests of several lengths, admitted and advanced together."""
  session.step(form, [None] * R + [(2, ids(12, 0)), (0, ids(7, 1)), None])
  session.step(
    form,
    [(0, ids(1, 2)), None, None, None, (2, ids(9, 3)), None, (3, ids(2, 4))],
  )
  return session


@pytest.mark.sampled(3)
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

  def turned(form, tokens, length):
    found = real(form, tokens, length)
    ids = found.ids._replace(row=(found.ids.row + 1) % R)
    return found._replace(ids=ids)

  form = (Group(1, 12, own=False),)
  session = Session(pattern)
  session.step(form, [(1, ids(7, 0))])
  session.step(form, [(2, ids(7, 1))])
  want = alone(pattern)(session.texts[1] + ids(5, 2))[-5:]
  tokens = step.pack(form, R, [(1, ids(5, 2), 7)])
  program.cache_clear()
  right, _ = program(pattern, form)[0](session.cache, tokens)
  monkeypatch.setattr(packed, 'plan', turned)
  program.cache_clear()
  wrong, _ = program(pattern, form)[0](session.cache, tokens)
  monkeypatch.undo()
  program.cache_clear()
  assert near(right[0, :5], want) and not near(wrong[0, :5], want)


# Two branches of three below a root, in one lane of 8.
TREE = (Group(R, 8, tree=True),)
PARENT = (0, 0, 1, 1, 2, 2, 3)  # of nodes 1 .. 7; node 0 is the root


def branches(n=8):
  """Fields of a tree of 8 nodes, and the path to each."""
  paths = [[0]]
  for node in range(1, n):
    paths.append([*paths[PARENT[node - 1]], node])
  depth = [len(path) - 1 for path in paths]
  bits = [sum(1 << (i + 1) for i in path) for path in paths]
  more = dict(
    order=depth, node=list(range(1, n + 1)), ancestors=[b | 1 for b in bits]
  )
  return more, paths, depth


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


EACH = (Group(R, 3, each=True),)


@pytest.mark.sampled(4)
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


@pytest.mark.sampled(3)
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
    params = {
      p: jax.device_put(x, built.params[p].sharding)
      for p, x in module_cases.parameters(model, 0.5).items()
    }
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
  rows, slots = 2, 2048
  with jax.enable_x64(False):
    config = schema.Model(
      vocab_size=V, d_model=32, num_heads=2, num_layers=3, d_ff=32
    )
    model = decoder.Decoder(config)
    params = jax.eval_shape(
      lambda: model.unstack(model.init(jax.random.key(0)))
    )
    form = (Group(rows, width),)
    cache = jax.eval_shape(lambda: model.init_cache(rows, slots))
    tokens = step.pack(form, rows, [(r, [0] * width, 9) for r in range(rows)])

    def temporaries(sound):
      def run(params, cache, tokens):
        x, flight = model.step(params, cache, tokens, form)
        z = model.logits(params, x)
        keep = jnp.isfinite(z).all(-1) if sound else jnp.ones(z.shape[:2], bool)
        return z, model.commit(cache, flight, form, keep)

      made = jax.jit(run, donate_argnums=1).lower(params, cache, tokens)
      return made.compile().memory_analysis().temp_size_in_bytes

    layer = 2 * rows * slots * 32 * 4
    assert temporaries(True) < layer < temporaries(False)


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
