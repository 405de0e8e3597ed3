"""Requests of one cache in float64, and each of them alone without one."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import module_cases
import numpy as np

from paraxis.configs import schema
from paraxis.decode import cache as cache_lib
from paraxis.decode import methods
from paraxis.decode import program as program_lib
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models.mixers import packed
from paraxis.pallas_kernels.attention import op as attention_op

V, R, SLOTS = 32, 4, 32
BOUND = 1e-11
SLOTTED = ('F', 'WFN', 'K', 'A')
STATES = ('G', 'M', 'S', 'R', 'L', 'V', 'U', 'D', 'C')
ALL = (*SLOTTED, *STATES, 'H', 'GF')
Group = packed.Group


def made(pattern, **more):
  """(Decoder in float64, its parameters, one array a layer).

  Made anew for the mesh in force: arrays of one mesh are not for others.

  pattern: 'A:1': of so many latent shards.
  """
  return _made(pattern, _mesh(), **more)


def _mesh():
  return str(jax.sharding.get_abstract_mesh())


@functools.cache
def _made(pattern, mesh, **more):
  del mesh
  pattern, _, shards = pattern.partition(':')
  plain, shards = schema.Model(), int(shards or 2)
  small = dict(
    gated_linear=dict(gate_rank=3, conv_width=3),
    mamba=dict(head_dim=4, state=4, dt_rank=2, groups=2),
    hybrid=dict(attention_rank=3, mlp_rank=2),
    recurrent=dict(tolerance=1e-13),
    tcn=dict(kernel=3, depth=2, chunk=5),
    gated_delta=dict(value_heads=4, key_dim=4, value_dim=3),
    latent=dict(rank=6, nope_dim=4, rope_dim=4, value_dim=6, groups=shards),
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


@functools.cache
def alone(pattern):
  """f(tokens of one request) -> z_TV without a cache."""
  model, _ = made(pattern)
  params = module_cases.parameters(model, 0.5)
  see = module_cases.see_of([(SLOTS,)], SLOTS)

  @jax.jit
  def logits(params, row):
    data = batch_lib.Batch(row, None, *see[:2], None, None)
    return model.logits(params, model.features(params, data)[0])

  def run(ids):
    row = np.zeros((1, SLOTS), np.int32)
    row[0, : len(ids)] = ids
    return np.asarray(logits(params, row))[0, : len(ids)]

  return run


def program(pattern, form):
  """step(cache, packed) -> (logits of all tokens, flight); commit.

  Compiled anew for the mesh in force: what was traced on one is not for others.
  """
  return _program(pattern, form, _mesh())


def forget():
  """Programs are compiled anew, of what was patched since."""
  _program.cache_clear()


@functools.cache
def _program(pattern, form, mesh):
  del mesh
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
  """A cache of R rows, and what each of its requests has been fed.

  reads: ranges of other rows that a request may read.
  """

  def __init__(self, pattern, reads=0):
    self.pattern, self.texts = pattern, [[] for _ in range(R)]
    self.cache = made(pattern)[0].init_cache(R, SLOTS)
    if reads:
      self.cache = cache_lib.sharing(self.cache, reads)

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


def one_pass(pattern, parts, begins, sees, monkeypatch, cooled=None):
  """Logits of the last part: all tokens in one pass, under a dense mask.

  Args:
    parts: token ids of each. begins: position of its first token.
    sees: (parts, parts) bool; of its own part a token sees those before it.
    cooled: None, or (which parts, T, S): the last part reads those parts apart
      (decode/parallel_contexts.py).
  """
  sizes = [len(part) for part in parts]
  part = np.repeat(np.arange(len(parts)), sizes)
  position = np.concatenate(
    [b + np.arange(n) for b, n in zip(begins, sizes, strict=True)]
  )
  order = np.arange(len(part))
  ok = sees[part[:, None], part] & (order <= order[:, None])
  which, temperature, weight = cooled or ((), 1.0, 1.0)
  far = np.isin(part, which) & (part[:, None] == len(parts) - 1)

  def softmax(z, ok, v):
    z = jnp.where(ok[:, None], z, -jnp.inf)
    lse = jax.nn.logsumexp(z, -1)
    p = jnp.where(jnp.isfinite(lse)[..., None], jnp.exp(z - lse[..., None]), 0)
    return jnp.einsum('bnts,bsnh->bnth', p, v), lse

  def dense(q, k, v, mask, segments, order=None, impl=None):
    del order, impl
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    z = mask.scale * jnp.einsum('btnh,bsnh->bnts', q, k)
    z = jnp.where(far, z / temperature, z)
    if mask.softcap:
      z = mask.softcap * jnp.tanh(z / mask.softcap)
    seen = ok & (segments[0][:, :, None] == segments[1][:, None])
    if mask.window:
      seen &= position[:, None] - position < mask.window
    (o, lse), (o_c, lse_c) = (
      softmax(z, seen & ~far, v),
      softmax(z, seen & far, v),
    )
    lse_c = temperature * weight * lse_c
    both = jnp.logaddexp(lse, lse_c)
    o = sum(
      x * jnp.exp(y - both)[..., None] for x, y in ((o, lse), (o_c, lse_c))
    )
    return o.swapaxes(1, 2), both.swapaxes(1, 2)

  model, _ = made(pattern)
  params = module_cases.parameters(model, 0.5)
  row = lambda x: np.asarray(x, np.int32)[None]
  batch = batch_lib.Batch(
    row(np.concatenate(parts)), None, row(part >= 0), row(position), None, None
  )
  with monkeypatch.context() as patched:
    patched.setattr(attention_op, 'attention', dense)
    x, _ = model.features(params, batch)
  return np.asarray(model.logits(params, x))[0, -sizes[-1] :]


def copies(generator, decode, vocab, slots=96):
  """Elements of each copy in the compiled loop's body, for a row of `slots`.

  Not of the entry computation: what it copies, it copies once.
  """
  form, values = sampling.check(decode, vocab)
  with build.use(generator.built):
    mesh = generator.built.mesh
    number = step.put(np.zeros(1, np.uint32), mesh)
    prompts = *step.place([[1, 2]], 64, mesh), number
    how = (
      generator._method(methods.Choice.of(decode)),
      program_lib.Static(form, 'replay'),
    )
    params = proposal.Params(generator._params)
    room = slots, slots - 64
    state, _ = generator._start(
      params, prompts, values, np.int32(9), *how, room
    )
    ended = step.put(np.zeros(1, bool), mesh)
    until = program_lib.Until(np.int32(9), ended, np.bool_(False), np.int32(9))
    args = params, state, values, until, *how
    text = generator._run.lower(*args).compile().as_text()
  body = text[: text.index('ENTRY')]
  found = re.findall(r'%copy[\w.]* = \w+\[([\d,]+)\]', body)
  return [math.prod(map(int, dims.split(','))) for dims in found]


LAYER = 2 * 2 * 2048 * 32 * 4  # bytes of what `temporaries` keeps of a layer


def temporaries(form, sound=True, shared=0, layers=3):
  """Bytes of a compiled step over two rows that are neither arguments nor
  results, in float32.

  form: or tokens of each row. sound: what is kept depends on the step. shared:
  ranges of other rows that a request may read. layers: of the model.
  """
  rows, form = 2, ((Group(2, form),) if isinstance(form, int) else form)
  with jax.enable_x64(False):
    config = schema.Model(
      vocab_size=V, d_model=32, num_heads=2, num_layers=layers, d_ff=32
    )
    model = decoder.Decoder(config)
    params = jax.eval_shape(
      lambda: model.unstack(model.init(jax.random.key(0)))
    )

    def empty():
      cache = model.init_cache(rows, 2048)
      return cache_lib.sharing(cache, shared) if shared else cache

    def run(params, cache, tokens):
      x, flight = model.step(params, cache, tokens, form)
      z = model.logits(params, x)
      keep = jnp.isfinite(z).all(-1) if sound else jnp.ones(z.shape[:2], bool)
      return z, model.commit(cache, flight, form, keep)

    tokens = step.pack(form, rows, [None] * sum(g.count for g in form))
    cache = jax.eval_shape(empty)
    made = jax.jit(run, donate_argnums=1).lower(params, cache, tokens)
    return made.compile().memory_analysis().temp_size_in_bytes
