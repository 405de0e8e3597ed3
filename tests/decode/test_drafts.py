"""Drafts are what the papers say: calls of each method, against plain loops.

The loops below have no cache: before every call they read the whole text again,
draft, and keep what the model's own greedy tokens are. As many tokens must come
of every call, and chains must hold the same drafts.
"""

import functools

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import decode as decode_fields
from paraxis.decode import judges
from paraxis.decode import loop
from paraxis.decode import methods
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.decode import trees
from paraxis.decode.drafts import distill
from paraxis.decode.drafts import drafters
from paraxis.decode.drafts import eagle
from paraxis.decode.drafts import falcon
from paraxis.decode.drafts import heads
from paraxis.decode.drafts import prompt_tokens
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models.mixers import packed
from paraxis.models.mixers import slots

pytestmark = pytest.mark.usefixtures('float64')

V, D, NEW, ROOM = 12, 16, 20, 48
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5] * 6, [7, 8, 9, 10, 11, 0]]


class Plain:
  """The model, and a draft, without a cache."""

  def __init__(self, made, own=None):
    self.made, self.model, self.own = made, made.built.model, own
    self.run = jax.jit(self._run, static_argnames='layers')
    self.continued = jax.jit(self._continued)
    self.paired = jax.jit(self._paired)
    self.prompted = jax.jit(self._prompted)

  def _run(self, params, tokens, length, layers=0):
    model = drafters.first_layers(self.model, layers)
    x, _ = step.prefill(model, params, tokens[None], length[None], ROOM)
    return x[0], model.logits(params, x)[0]

  def _continued(self, params, own, tokens, length, x):
    layer = eagle.layer_of(self.model)
    x, _ = step.prefill(
      layer, params | own, tokens[None], length[None], ROOM,
      eagle.begin(own, x[None]),
    )  # fmt: skip
    return x[0], layer.logits(params, x)[0]

  def _paired(self, params, own, tokens, length, x):
    """As `_continued`, behind an LSTM of two layers, where the last two tokens
    see each other; those before have a causal mask."""
    layer, ones = eagle.layer_of(self.model), jnp.ones((1, ROOM), jnp.int32)
    e = layer.embed(
      params, batch_lib.Batch(tokens[None], None, ones, ones, None, None)
    )[0]
    h, c, g = jnp.zeros((2, D)), jnp.zeros((2, D)), []
    for t in range(ROOM):
      u = jnp.concatenate([e[t], x[t]])
      for i in range(2):
        w, r, b = (own[f'lstm/{i}/{n}'] for n in ('input', 'state', 'bias'))
        enter, keep, out, new = jnp.split(u @ w + h[i] @ r + b, 4)
        keep = jax.nn.sigmoid(keep + 1) * c[i]
        c = c.at[i].set(keep + jax.nn.sigmoid(enter) * jnp.tanh(new))
        u = jax.nn.sigmoid(out) * jnp.tanh(c[i])
        h = h.at[i].set(u)
      g.append(x[t] + u)
    place, zeros = jnp.arange(ROOM)[None], 0 * ones
    given = packed.Packed(
      tokens[None], jnp.where(place < length, 0, 1),
      jnp.where(place < length, place, 0), place + (place == length - 2), zeros,
      zeros, ones.astype(jnp.uint32),
    )  # fmt: skip
    made, _ = layer.step(
      params | own, layer.init_cache(1, ROOM), given,
      (packed.Group(1, ROOM, fresh=True, tree=True),),
      lambda _: jnp.stack(g)[None],
    )  # fmt: skip
    return made[0], layer.logits(params, made)[0]

  def _prompted(self, params, own, tokens, length):
    """Logits (m, V) of prompt tokens behind so many tokens, all one text."""
    place = jnp.arange(ROOM) - length
    count = len(own['prompts'])

    def begin(e):
      found = own['prompts'][jnp.clip(place, 0, count - 1)]
      return jnp.where((place >= 0)[:, None], found, e)

    x, _ = step.prefill(
      self.model, params, tokens[None], length[None] + count, ROOM, begin
    )
    return self.model.logits(params, x)[0][length + jnp.arange(count)]

  def read(self, text, layers=0):
    """(features, logits) of every token."""
    tokens = jnp.asarray([*text, *[0] * (ROOM - len(text))], jnp.int32)
    with build.use(self.made.built):
      return self.run(
        self.made._params, tokens, jnp.int32(len(text)), layers=layers
      )

  def greedy(self, text, layers=0):
    return int(np.argmax(self.read(text, layers)[1][len(text) - 1]))


def small_model(plain, text, window, count):
  """The first layer's greedy tokens."""
  out = []
  for _ in range(count):
    out.append(plain.greedy([*text, *out], 1))
  return [out]


def jacobi_window(plain, text, window, count):
  """The greedy tokens of the call before; new places repeat the last one."""
  if not window:
    window[:] = [text[-1]] * count
  return [list(window)]


def next_window(plain, text, window, kept, count):
  z = plain.read([*text, *window])[1]
  drawn = np.argmax(z[len(text) - 1 : len(text) + count], -1).tolist()
  rest = drawn[kept:]
  window[:] = [*rest, *[drawn[-1]] * count][:count]


def grown(tree, z_KV):
  """Every path of a tree whose tokens k deep are the likeliest of z_KV[k]."""
  order, paths = np.argsort(-np.asarray(z_KV), -1, kind='stable'), []
  for parent, rank in zip(tree.parents, tree.ranks, strict=True):
    before = paths[parent] if parent >= 0 else []
    paths.append([*before, int(order[len(before)][rank])])
  return paths


def heads_tree(tree):
  def drafts(plain, text, window, count):
    """Every path of the tree, by the heads on the features of the last call."""
    x = plain.read(text[:-1])[0][len(text) - 2]
    z = []
    for w, b in zip(plain.own['weight'], plain.own['bias'], strict=True):
      h = np.asarray(x)
      for i in range(len(w)):
        y = h @ w[i] + b[i]
        h = h + y / (1 + np.exp(-y))
      with build.use(plain.made.built):
        head = plain.model.logits(
          plain.made._params, jnp.asarray(h)[None, None]
        )
      z.append(np.asarray(head)[0, 0])
    return grown(tree, z)

  return drafts


def prompts_tree(tree):
  def drafts(plain, text, window, count):
    """By prompt tokens behind all but the last token; the first call, before
    which there were none, has no drafts."""
    if not window:
      window[:] = [True]
      return [[]]
    tokens = jnp.asarray([*text[:-1], *[0] * (ROOM + 1 - len(text))], jnp.int32)
    with build.use(plain.made.built):
      z = plain.prompted(
        plain.made._params, plain.own, tokens, jnp.int32(len(text) - 1)
      )
    return grown(tree, z)

  return drafts


def own_features(plain, text, window, count):
  """A layer that reads the model's features, then its own."""
  x = np.zeros((ROOM, D))
  x[1 : len(text)] = plain.read(text[:-1])[0][: len(text) - 1]
  out = []
  for _ in range(count):
    now = [*text, *out]
    tokens = jnp.asarray([*now, *[0] * (ROOM - len(now))], jnp.int32)
    with build.use(plain.made.built):
      made, z = plain.continued(
        plain.made._params, plain.own, tokens, jnp.int32(len(now)),
        jnp.asarray(x),
      )  # fmt: skip
    out.append(int(np.argmax(z[len(now) - 1])))
    x[len(now)] = made[len(now) - 1]
  return [out]


def pairs_of_features(plain, text, window, count):
  """A layer that makes two features a pass, of the model's, then of its own."""
  x, now = np.zeros((ROOM, D)), list(text)
  x[1 : len(text)] = plain.read(text[:-1])[0][: len(text) - 1]
  while len(now) < len(text) + count:
    tokens = jnp.asarray([*now, *[0] * (ROOM - len(now))], jnp.int32)
    with build.use(plain.made.built):
      made, z = plain.paired(
        plain.made._params, plain.own, tokens, jnp.int32(len(now)),
        jnp.asarray(x),
      )  # fmt: skip
    last = slice(len(now) - 2, len(now))
    x[len(now) : len(now) + 2] = made[last]
    now += np.argmax(z[last], -1).tolist()
  return [now[len(text) :][:count]]


def calls(plain, prompt, drafts, count, after=None):
  """(text, [tokens that each call made], [a path of its drafts])."""
  text, made, window = [*prompt, plain.greedy(prompt)], [], []
  tried = []
  while len(text) - len(prompt) < NEW:
    wanted, best = [], 0
    paths = drafts(plain, text, window, count)
    for _ in range(max(map(len, paths)) + 1):
      wanted.append(plain.greedy([*text, *wanted]))
    for path in paths:
      n = 0
      while n < len(path) and path[n] == wanted[n]:
        n += 1
      best = max(best, n)
    new = min(best + 1, NEW - (len(text) - len(prompt)))
    if after:
      after(plain, text, window, new, count)
    text += wanted[:new]
    made.append(new)
    tried.append(paths[0])
  return text[len(prompt) :], made, tried


@functools.cache
def draft_of(kind):
  """(options, arrays) of a draft that nobody trained."""
  made = module_cases.generator('F')
  rng = np.random.default_rng(3)
  own = heads.initial(2, D, 2)
  if kind == 'ppd':
    own = {prompt_tokens.PROMPTS: np.zeros((2, D))}
  if kind in ('eagle', 'falcon'):
    begun = dict(eagle=eagle.initial, falcon=falcon.initial)[kind]
    own = begun(made.built.model, made._params)
  spread = 0.02 if kind == 'eagle' else 0.2
  own = {
    n: np.asarray(x) + rng.normal(0, spread, x.shape) for n, x in own.items()
  }
  if kind == 'eagle':  # of the token, and a little of the features
    own['mix'] = np.roll(own['mix'], D, 0) + 0.1 * own['mix']
  accuracy = ((0.4, 0.3, 0.2, 0.1),) * 2
  return heads.About(kind, 0, (V, D, 2), 'numbers', accuracy), own


TREE = trees.grown(((0.4, 0.3, 0.2, 0.1),) * 2, 12)
CASES = {
  'speculative': (small_model, None, dict(drafts=3, draft_layers=1)),
  'jacobi': (jacobi_window, next_window, dict(drafts=4)),
  'medusa': (heads_tree(TREE), None, dict(drafts=12)),
  'ppd': (prompts_tree(TREE), None, dict(drafts=12)),
  'eagle': (own_features, None, dict(drafts=3)),
  'falcon': (pairs_of_features, None, dict(drafts=3)),
}  # fmt: skip


@pytest.mark.parametrize('method', CASES)
def test_calls_are_those_of_a_plain_loop(method, tmp_path):
  drafts, after, options = CASES[method]
  made, own = module_cases.generator('F'), None
  if method in heads.KINDS and method != 'speculative':
    about, own = draft_of(method)
    path = str(tmp_path / 'draft.npz')
    heads.save(path, about, own)
    options = options | dict(draft=path)
  found = made.generate(
    PROMPTS, max_new_tokens=NEW, temperature=0.0, method=method, trace=True,
    **options,
  )  # fmt: skip
  plain, several = Plain(made, own), 0
  for prompt, row in zip(PROMPTS, found, strict=True):
    text, made_by, tried = calls(
      plain, prompt, drafts, options['drafts'], after
    )
    assert row['tokens'] == text
    if method not in (
      'medusa',
      'ppd',
    ):  # of a tree the trace has the path that was taken
      assert row['trace'].canvas[:, :-1].tolist() == tried
    wanted = np.bincount(np.array(made_by), minlength=len(row['lengths']))
    # The first token comes with the prompt.
    assert sum(made_by) == NEW - 1
    assert row['lengths'] == wanted.tolist()
    several += sum(n > 1 for n in made_by)
  assert several  # else nothing was compared


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
  'method', [m for m in methods.METHODS if m not in methods.CHANGING]
)
def test_forwards_of_drafts_are_counted(method, tmp_path, monkeypatch):
  """Steps of other models than the one that judges, as the device runs them."""
  made, ran = module_cases.generator.__wrapped__('FFF'), []
  options, real = dict(method=method, drafts=3), decoder.Decoder.step
  if method in methods.OF_LAYERS:
    options |= dict(draft_layers=1, draft_group=1)
  if method in methods.NEEDED:
    given = made.built.model, made.params, method, 'numbers'
    heads.save(tmp_path / 'draft.npz', *distill.untrained(*given))
    options |= dict(draft=str(tmp_path / 'draft.npz'))

  def counted(model, *given, **how):
    if model.config.num_layers < 3:
      jax.debug.callback(lambda: ran.append(model))
    return real(model, *given, **how)

  monkeypatch.setattr(decoder.Decoder, 'step', counted)
  rows = made.generate([[1, 2, 3]], max_new_tokens=9, temperature=0, **options)
  jax.effects_barrier()
  prompts = method in (*methods.OF_LAYERS, 'eagle', 'falcon')  # one reading
  assert rows[0]['forwards'] == len(ran) - prompts
  assert bool(rows[0]['forwards']) == prompts


def test_a_draft_that_is_trained_anew_is_read_anew(tmp_path):
  """In the same place, by a generator that has read the one before."""
  made, (about, own) = module_cases.generator('F'), draft_of('medusa')
  other = {name: np.roll(x, 1, -1) for name, x in own.items()}
  path, found = str(tmp_path / 'draft.npz'), []
  for arrays in (own, other, own):
    heads.save(path, about, arrays)
    rows = made.generate(
      PROMPTS, max_new_tokens=NEW, temperature=0.0, method='medusa', drafts=12,
      draft=path,
    )  # fmt: skip
    found.append([row['lengths'] for row in rows])
  assert found[0] != found[1] and found[0] == found[2]


def test_no_slots_are_read_behind_those_of_a_row(monkeypatch):
  """Where drafts are fed one by one past the end of a full row."""
  ragged, read = slots.decode_attention.ragged, []

  def told(q, k, v, mask, lengths_B, begins_B, **how):
    jax.debug.callback(read.append, (begins_B + lengths_B).max())
    assert k.shape[2] == 32
    return ragged(q, k, v, mask, lengths_B, begins_B=begins_B, **how)

  monkeypatch.setattr(slots.decode_attention, 'ragged', told)
  made, prompts = module_cases.generator('F'), [[1, 2, 3, 4] * 4]
  given = dict(method='speculative', drafts=4, draft_layers=1)
  made.generate(prompts, max_new_tokens=16, temperature=0.0, **given)
  jax.effects_barrier()
  assert max(read) == 32  # the last slot, and none behind it


@pytest.fixture
def twins(monkeypatch):
  """A model whose second layer changes nothing: the first one is the same."""
  made = module_cases.generator('F')
  idle = {
    p: 0 * x if p.startswith('layers/1/') and ('output' in p or 'down' in p)
    else x
    for p, x in made._params.items()
  }  # fmt: skip
  monkeypatch.setattr(made, '_params', idle)
  return made


@pytest.mark.parametrize('how', (dict(temperature=0.0), dict(temperature=1.0)))
@pytest.mark.parametrize('method', ('speculative', 'pearl'))
def test_drafts_of_the_model_itself_are_all_kept(twins, method, how):
  found = twins.generate(
    PROMPTS, max_new_tokens=21, method=method, drafts=3, draft_layers=1, **how
  )
  for row in found:
    if method == 'speculative':
      assert row['lengths'] == [0, 0, 0, 0, 5]
    else:  # the first call has no drafts yet, 19 = 4 x 4 + 3
      assert row['lengths'] == [0, 1, 0, 1, 4]


@pytest.mark.parametrize(
  'kind, differs',
  [('eagle', 'mix absent, here (32, 16)'), ('falcon', 'layers/0/')],
)
def test_a_layer_of_another_model_of_the_same_size_is_refused(
  tmp_path, kind, differs
):
  """Its last layer is of another kind, or the draft is no such draft."""
  model = module_cases.generator('FF').built.model
  params = model.unstack(module_cases.parameters(model, 0.4))
  about, own = distill.untrained(model, params, kind, 'numbers')
  path = str(tmp_path / 'draft.npz')
  given = dict(method=kind, draft=path, max_new_tokens=2)
  pattern = 'FA'
  if kind == 'eagle':
    del own[eagle.MIX]
    pattern = 'FF'
  heads.save(path, about, own)
  made = module_cases.generator(pattern)
  with support.refused(f'decode.draft={path} was trained', differs):
    made.generate(PROMPTS, **given)


@pytest.mark.parametrize(
  'model, kind',
  [
    (dict(experts=dict(pattern='DE')), 'FE'),
    (dict(experts=dict(pattern='EP')), 'FP'),
    (dict(experts=dict(pattern='ED')), 'F'),
    (dict(pattern='F-F'), 'F.'),
    (dict(pattern='F-F', experts=dict(pattern='E')), 'F.'),
    (dict(wiring='groups', groups=2, num_layers=4), 'F'),
  ],
)
def test_a_draft_layer_is_of_the_kind_of_the_last_one(model, kind):
  """What follows its mixer, too: all that it begins with is read."""
  count = 4 if 'experts' in model else 0
  experts = model.get('experts', {}) | dict(count=count)
  model = dict(d_model=16, num_layers=2, d_ff=16) | model
  built = build.build(
    schema.view(dict(model=model | dict(experts=experts))), 'data=1',
    devices=jax.devices()[:1],
  ).model  # fmt: skip
  layer = eagle.layer_of(built)
  assert (*layer.pattern, built.pattern[-1]) == (kind, kind)
  assert layer.config.group_layers == 1
  params = built.unstack(module_cases.parameters(built, 0.1))
  own = {*eagle.initial(built, params)} - {eagle.MIX}
  read = {p.removeprefix('layers/') for p in layer.stack.leaves}
  assert own == {f'layers/0/{p}' for p in read}


def test_a_draft_of_whole_groups():
  """Of four layers in two groups; the second one changes nothing."""
  model = dict(
    vocab_size=V, d_model=D, num_layers=4, d_ff=D, wiring='groups', groups=2,
    dtype='float64', param_dtype='float64', tied_embedding=False,
  )  # fmt: skip
  config = schema.view(dict(model=model, mesh=dict(sequence=False)))
  built = build.build(config, 'data=1', devices=jax.devices()[:1])
  params = module_cases.parameters(built.model, 0.4)
  for path in ('attention/output', 'mlp/down'):
    params[f'layers/{path}'][2:] = 0
  made = loop.Generator(
    built, {p: jnp.asarray(x) for p, x in params.items()},
    module_cases.Numbers(V, -1), config.decode, lambda line: None,
  )  # fmt: skip
  given = dict(max_new_tokens=21, temperature=0.0, method='speculative')
  for row in made.generate(PROMPTS, drafts=3, draft_layers=2, **given):
    assert row['lengths'] == [0, 0, 0, 0, 5]
  for layers in (1, 3):
    with support.refused(f'draft_layers={layers}', 'group of 2', 'groups=2'):
      made.generate(PROMPTS, drafts=3, draft_layers=layers, **given)


@pytest.mark.parametrize('kind', ('eagle', 'falcon'))
def test_copies_of_a_row_have_no_layer_that_goes_on(kind, tmp_path):
  """Refused where it is trained, and where it is used."""
  copies = dict(wiring='streams', streams=3, stream_prefix=2)
  made = module_cases.generator('FF', **copies)
  model = made.built.model
  refused = functools.partial(
    support.refused, f'decode.method={kind}', 'model.streams=3'
  )
  with refused():
    methods.check_training(model, kind, 0)
  params = model.unstack(module_cases.parameters(model, 0.4))
  path = str(tmp_path / 'draft.npz')
  heads.save(path, *distill.untrained(model, params, kind, 'numbers'))
  with refused():
    made.generate(PROMPTS, method=kind, draft=path, max_new_tokens=2)


def test_features_before_a_token():
  x = jnp.arange(6.0).reshape(1, 3, 2) + 1
  assert eagle.before(x).tolist() == [[[0, 0], [1, 2], [3, 4]]]


def test_what_is_held_true_of_a_method_is_true_of_each_judge():
  """pearl alone takes one of them."""
  keeps = [name for name, x in judges.JUDGES.items() if x.lossless]
  others = [name for name, x in judges.JUDGES.items() if not x.lossless]
  held = f'with judge={" or ".join(keeps)}; {" or ".join(others)} is not'
  drafting = {*methods.READ_BY['drafts']} - {'pearl'}
  for name, (_, claim) in decode_fields.METHODS.items():
    assert (claim == f'lossless {held}') == (name in drafting), name


@pytest.mark.parametrize('length', (1, 2, 7))
def test_the_first_draft_of_falcon_has_read_the_last_token(length):
  """Two rows of one text, of whose last call, each, one token is another; the
  first time it follows the prompt."""
  made = module_cases.generator('F')
  with build.use(made.built):
    _reads_the_last_token(made, length)


def _reads_the_last_token(made, length):
  model, (_, own) = made.built.model, draft_of('falcon')
  params = proposal.Params(made._params, own)
  method = falcon.Falcon(model, 4, coupled=True)
  form, values = sampling.check(schema.Decode(temperature=0.0), V)
  row, live = jnp.arange(2, dtype=jnp.uint32), jnp.ones(2, bool)
  draws = judges.Draws(form, values, row, row)
  x = np.random.default_rng(2).normal(size=(1, ROOM, D)).repeat(2, 0)
  tokens = jnp.asarray([[*PROMPTS[0], 0]] * 2, jnp.int32)

  def seen(ids):
    one, at = jnp.ones(2, jnp.int32), jnp.zeros((2, 5), jnp.int32)
    new = at.at[:, 0].set(jnp.asarray(ids, jnp.int32))
    return proposal.Seen(new, one, at, jnp.asarray(x[:, 9:14]), None, draws)

  def drafted(own):
    drafts, held = method.propose(params, own, None, live, draws)
    return drafts.logits, held

  lengths = jnp.full(2, length, jnp.int32)
  x_BTD = jnp.asarray(x[:, : tokens.shape[1]])
  begun = method.start(params, tokens, lengths, ROOM, x_BTD)
  z, _ = drafted(method.first(begun, seen([3, 4])))
  assert (np.abs(z[0] - z[1]).max(-1) > 1e-6).all(), z
  z, held = drafted(method.first(begun, seen([3, 3])))
  assert (z[0] == z[1]).all()
  z, _ = drafted(method.settle(held, seen([3, 4])))
  assert (np.abs(z[0] - z[1]).max(-1) > 1e-6).all(), z


def test_a_row_has_room_for_what_falcon_reads_again(tmp_path):
  """8 tokens a call, of 7 that the cache may hold."""
  made, path = module_cases.generator('F'), str(tmp_path / 'draft.npz')
  heads.save(path, *draft_of('falcon'))
  given = dict(max_new_tokens=4, temperature=0.0, cache_length=7)
  want, found = (
    made.generate([[1, 2, 3]], **given, **how)
    for how in ({}, dict(method='falcon', drafts=6, draft=path))
  )
  assert found[0]['tokens'] == want[0]['tokens']
