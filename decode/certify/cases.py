"""Models that `paraxis decode --certify` proves, and sessions with them.

A case is a model in float64: a small one of a pattern, with random parameters,
or that of a checkpoint, with its own. A session feeds requests to a cache and
compares every token with the model without a cache, on the text of its path
alone:

    difference = max |a - b| / max |b|     (b: features without a cache)

Legend: R rows of the cache, n tokens, D model.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers
from paraxis.decode import load
from paraxis.decode import loop
from paraxis.decode import step
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.models import checks as model_checks
from paraxis.models import layer
from paraxis.models import side
from paraxis.models.mixers import packed
from paraxis.models.mixers import protocol as mixer
from paraxis.sharding import annotate
from paraxis.sharding.meter import compiling

R, SLOTS = 4, 24  # of every cache; no text is longer
TOGETHER, NEW = 8, 12  # texts of a call without a cache; tokens of greedy ones
SPREAD = 0.5  # of random parameters; norms too, or they hide mistakes
Group = packed.Group
WHOLE = (Group(R, 12, fresh=True),)
FURTHER = (Group(R, 12),)  # as WHOLE, behind what is committed
TOKENS = (Group(R, 1),)
MIXED = (*TOKENS, Group(2, 12, own=False))
CHAIN = (Group(R, 3, each=True),)
TREE = (Group(R, 8, tree=True),)

SMALL: dict[str, Any] = dict(
  vocab_size=32, d_model=16, num_heads=4, num_kv_heads=2, d_ff=16, window=6,
  attention_chunk=5, attention_block=8, attention_softcap=5.0,
)  # fmt: skip
# Within the texts that are fed: what the mask hides is to show. No parameter
# depends on them.
SHORT = {
  'model.window': 6,
  'model.attention_chunk': 5,
  'model.attention_block': 8,
  'model.tcn.chunk': 5,
}
EXACT = {
  'model.dtype': 'float64',
  'model.param_dtype': 'float64',
  'model.recurrent.tolerance': 1e-13,
  'model.experts.capacity_factor': 0.0,  # decoding drops no token
  'decode.weights': 'loaded',
}


class Case(NamedTuple):
  """name: for the table. config: schema.Config. values: {path: NumPy float64},
  as `Decoder.init` gives them. notes: what was changed, in words."""

  name: str
  config: Any
  values: dict
  notes: tuple = ()


def patterns():
  """Models of two layers that hold every mixer, a user's own too.

  Those whose state is all slots stand together, so that they have trees; and
  one pattern has both.
  """
  own = {letter: m.capabilities for letter, m in layer.MIXERS.items()}
  slots = [k for k, says in own.items() if says.slots and not says.recurs]
  others = [k for k in own if k not in slots]
  pairs = [
    ''.join(group[i : i + 2])
    for group in (slots, others)
    for i in range(0, len(group), 2)
  ]
  return (*pairs, 'GF')


def small(pattern, changes=()) -> Case:
  """A small model with random parameters.

  Args:
    pattern: model.pattern. changes: {dotted field: value} of the configuration.

  Raises:
    UserError: a letter that is no mixer; changes that no model has.
  """
  letters, _ = mixers.of_pattern(pattern)
  given = SMALL | dict(
    pattern=pattern, num_layers=max(2, len(letters)), sinks='A' not in letters
  )
  config = schema.view(dict(model=given, mesh=dict(sequence=False)))
  few = lambda n, most: n and -(-min(n, most) // R) * R
  for letter in mixers.inside(letters):
    kind = mixers.TABLE[letter]
    if kind.shrink:
      for name, value in kind.shrink(config.model, few).items():
        field = f'{kind.section}.{name}'
        config = schema.with_value(config, f'model.{field}', value)
  nested = schema.to_dict(config)
  for name, value in dict(changes).items():
    *sections, last = name.split('.')
    functools.reduce(dict.__getitem__, sections, nested)[last] = value
  config, _ = _exact(schema.view(nested))
  with jax.enable_x64(True):
    built = build.build(config, 'data=1', devices=jax.devices()[:1])
  rng, values = np.random.default_rng(0), {}
  for path in sorted(built.params):
    x = rng.normal(0, SPREAD, built.params[path].shape)
    values[path] = abs(x) if path.endswith('/shares') else x  # of a variance
  return Case(pattern, config, values)


def of_checkpoint(checkpoint, changes=(), texts=()) -> Case:
  """The model of a load.Checkpoint, with its parameters in float64.

  Args:
    changes: as of `small`.
    texts: as of `load.Checkpoint.parts`, whose errors this has.
  """
  config = checkpoint.config()
  config.update_from_flattened_dict(dict(changes))
  config = schema.view(config)
  built, params, *_ = checkpoint.parts(config, '', 1, texts)
  side.check_decoding(built.model)
  values = {p: np.asarray(x).astype(np.float64) for p, x in params.items()}
  config = dataclasses.replace(
    config,
    model=built.model.config,
    mesh=load.for_decoding(config.mesh),
    train=schema.Train(),
  )
  config, notes = _exact(config)
  return Case(config.model.pattern, config, values, notes)


def _exact(config):
  """(schema.Config in float64, what was changed)."""
  model_checks.need_causal(config.model, '--certify')
  changed = schema.with_values(config, EXACT)
  for name, most in SHORT.items():
    value = min(schema.value(changed, name), most)
    changed = schema.with_value(changed, name, value)
  letters = mixers.inside(mixers.of_pattern(config.model.pattern)[0])
  used = {mixers.TABLE[letter].section for letter in letters}
  idle = {kind.section for kind in mixers.TABLE.values()} - used
  pairs = [
    (name, schema.value(config, name), schema.value(changed, name))
    for name in (*EXACT, *SHORT)
    if name.split('.')[1] not in idle
  ]
  return changed, tuple(f'{n} {a} -> {b}' for n, a, b in pairs if a != b)


class Ids:
  """A tokenizer without texts, for prompts of ids."""

  name, fingerprint, end_id = 'ids', 'ids', -1

  def __init__(self, vocab_size):
    self.vocab_size = vocab_size

  def decode_bytes(self, tokens):
    del tokens
    return b''


class Engine:
  """A case on a mesh; its programs are compiled once a form.

  Attributes: case; built: build.Built; model; declared: protocol.Capabilities
  of every layer; inexact: a layer whose mixer declares that steps are not its
  whole pass, or None; recurrent: one that keeps a state of one size, or None.
  """

  def __init__(self, case, mesh_text='data=1'):
    """UserError: a mesh that does not fit the devices, or decoding."""
    sizes = build.mesh_sizes(case.config, mesh_text)
    load.check_mesh(mesh_text, sizes, case.config.model.pattern)
    devices = jax.devices()
    if -1 not in sizes.values():
      devices = devices[: math.prod(sizes.values())]
    self.case = case
    self.built = load.built_for(case.config, mesh_text, devices)
    self.model = model = self.built.model
    own = [model.stack.mixer(kind).capabilities for kind in model.stack.cached]
    self.declared = own
    self.inexact = next((i for i, c in enumerate(own) if not c.exact), None)
    alone = (i for i, c in enumerate(own) if c.recurs or not c.slots)
    self.recurrent = next(alone, None)
    with compiling.quickly():
      jit = functools.partial(jax.jit, compiler_options=compiling.options())
    with build.use(self.built):
      self.stacked = {
        p: jax.device_put(x, self.built.params[p].sharding)
        for p, x in case.values.items()
      }
      self.params = jit(model.unstack)(self.stacked)
    self._run = jit(self._step, static_argnames='form')
    self._uncached = jit(self._features)
    self._empty = jit(lambda: model.init_cache(R, SLOTS))

  def says(self, i):
    """'layer 0 (kind G) declares', of a layer's mixer."""
    return f'layer {i} (kind {self.model.stack.cached[i][0]}) declares'

  def _step(self, params, cache, tokens, keep, form):
    """(features of the tokens, the cache with those that are kept)."""
    rows = lambda x: annotate.put(x, ('batch', None))
    tokens, keep = jax.tree.map(rows, (tokens, keep))
    x, flight = self.model.step(params, cache, tokens, form)
    sound = rows(jnp.isfinite(x).all(-1))
    return x, self.model.commit(cache, flight, form, keep & sound)

  def _features(self, stacked, tokens_BT, lengths_B):
    """(features, logits) of a document a row."""
    places = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    places = jnp.broadcast_to(places, tokens_BT.shape)
    segments = (places < lengths_B[:, None]).astype(jnp.int32)
    data = batch_lib.Batch(tokens_BT, None, segments, places, None, None)
    x, _ = self.model.features(stacked, data)
    return x, self.model.logits(stacked, x)

  def cache(self):
    """An empty one of R rows."""
    with build.use(self.built):
      return self._empty()

  def spoiled(self, cache, rows_R):
    """`cache` with NaN in the states of one size of some rows (bool)."""
    nan = lambda x: mixer.rows_where(rows_R, jnp.full_like(x, jnp.nan), x)
    states = []
    for says, state in zip(self.declared, cache.states, strict=True):
      if says.recurs:
        state = (jax.tree.map(nan, state[0]), *state[1:])
      states.append(state if says.slots else jax.tree.map(nan, state))
    return cache._replace(states=tuple(states))

  def run(self, cache, form, lanes, keep):
    """(features (n, D) of every lane, the cache).

    Args:
      lanes: as of step.pack. keep: tokens that are kept, a bool each, of every
        lane that is not None.
    """
    tokens = step.pack(form, R, lanes)
    starts = np.cumsum([0, *(g.width for g in form for _ in range(g.count))])
    kept = np.zeros(starts[-1], bool)
    for at, lane, marks in zip(starts, lanes, keep, strict=False):
      if lane:
        kept[at : at + len(marks)] = marks
    kept = kept.reshape(tokens.token.shape)
    with build.use(self.built):
      x, cache = self._run(self.params, cache, tokens, kept, form=form)
    x = np.asarray(x).reshape(starts[-1], -1)
    each = zip(starts, lanes, strict=False)
    return [x[a : a + len(n[1])] if n else None for a, n in each], cache

  def uncached(self, texts):
    """{text: (features (n, D), logits (n, V))} of texts, tuples of tokens.

    IntegrityError: they are not finite.
    """
    out, texts = {}, sorted(set(texts))
    for i in range(0, len(texts), TOGETHER):
      some = texts[i : i + TOGETHER]
      rows, lengths = np.zeros((TOGETHER, SLOTS), np.int32), np.zeros(TOGETHER)
      for j, text in enumerate(some):
        rows[j, : len(text)], lengths[j] = text, len(text)
      with build.use(self.built):
        both = self._uncached(self.stacked, rows, lengths.astype(np.int32))
      for text, *found in zip(some, *map(np.asarray, both), strict=False):
        out[text] = tuple(y[: len(text)] for y in found)
        if not np.isfinite(out[text][0]).all():
          raise errors.IntegrityError(
            f'{self.case.name}: without a cache the model gives numbers that '
            'are not finite: its parameters are damaged, or may not be random '
            '(--checkpoint= names a run).'
          )
    return out

  def generator(self):
    """loop.Generator of greedy texts; prompts are lists of ids."""
    given = self.built, self.stacked, Ids(self.model.config.vocab_size)
    fields = schema.Decode(max_new_tokens=NEW, temperature=0.0)
    with build.use(self.built), compiling.quickly():
      return loop.Generator(*given, fields, lambda line: None)


class Session:
  """Requests of one cache, and what was found of their tokens.

  texts: tokens of every row that are committed. cache: packed.Cache.
  """

  def __init__(self, engine, seed=0):
    self.engine, self.cache = engine, engine.cache()
    self.texts, self._seen = [[] for _ in range(R)], []
    self._rng = np.random.default_rng(seed)

  def ids(self, n):
    """n random tokens."""
    return self._rng.integers(
      0, self.engine.model.config.vocab_size, n
    ).tolist()

  def step(self, form, lengths, keep=None, tree=None):
    """Feeds random tokens and notes what is found of each.

    Args:
      lengths: {lane: (row, tokens)}. keep: {row: marks of the tokens that are
        kept}; else all. tree: Tree of all lanes.
    """
    lanes: list = [None] * sum(g.count for g in form)
    marks: list = [None] * len(lanes)
    for i, (row, n) in lengths.items():
      before, new = self.texts[row], self.ids(n)
      more = (tree.fields(len(before)),) if tree else ()
      lanes[i] = row, new, len(before), *more
      marks[i] = [True] * n if keep is None else keep[row]
    found, self.cache = self.engine.run(self.cache, form, lanes, marks)
    for x, lane, kept in zip(found, lanes, marks, strict=True):
      if lane:
        self._note(lane[0], x, lane[1], tree)
        taken = [t for t, ok in zip(lane[1], kept, strict=True) if ok]
        self.texts[lane[0]] += taken

  def _note(self, row, x, new, tree):
    before = self.texts[row]
    for i, one in enumerate(x):
      path = range(i + 1) if tree is None else tree.paths[i]
      text = (*before, *(new[j] for j in path))
      self._seen.append((f'row {row}, {len(text) - 1}', one, text))

  def difference(self, engine=None):
    """(largest difference from the model without a cache, 'row R, position').

    engine: the Engine without a cache; None: the session's own.
    """
    texts = [text for *_, text in self._seen]
    want = (engine or self.engine).uncached(texts)
    return self._furthest([want[text][0][-1] for text in texts])

  def apart(self, other):
    """The same, from another Session that was fed the same."""
    return self._furthest([x for _, x, _ in other._seen])

  def _furthest(self, want):
    top = max(float(np.abs(b).max()) for b in want)
    gaps = []
    for (where, x, _), b in zip(self._seen, want, strict=True):
      gap = float(np.abs(x - b).max() / top)
      gaps.append((gap if math.isfinite(gap) else math.inf, where))
    return max(gaps, key=lambda gap: gap[0])


class Tree:
  """A root and two branches, in lanes of 8: paths: nodes on the way to each."""

  parents = (0, 0, 1, 1, 2, 2, 3)  # of nodes 1 .. 7

  def __init__(self):
    self.paths = [[0]]
    for node, parent in enumerate(self.parents, 1):
      self.paths.append([*self.paths[parent], node])

  def fields(self, first):
    """Of packed.TREE, and positions, behind `first` tokens."""
    depth = [len(path) - 1 for path in self.paths]
    bits = [1 + sum(2 << node for node in path) for path in self.paths]
    return dict(
      order=depth, group=[0] * len(depth), ancestors=bits,
      node=list(range(1, len(depth) + 1)), position=[first + d for d in depth],
    )  # fmt: skip


def begun(engine):
  """A Session with three prompts, each read in whole."""
  session = Session(engine)
  session.step(WHOLE, {0: (0, 7), 1: (1, 3), 2: (2, 1)})
  return session
