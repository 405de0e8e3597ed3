"""Recurrent depth: a core of layers that runs several times on one state.

    e   = prelude(embeddings)         model.recurrence.prelude layers
    s_0 = noise, N(0, 1)
    s_i = norm(core(W [s_{i-1}, e]))  i = 1 .. r; .core layers, one set of them
    out = coda(s_r)                   the layers that are left

(arXiv:2502.05171, section 3.1; the norm behind each pass is ours: it keeps
states bounded with layers of any norm.) More passes are more computation a
token, with the same parameters. In training r is drawn for every step, and
gradients flow through the last passes alone (section 3.3).

The noise of a token is a function of its id, its position and the key of the
step, the same on every layout; while decoding there is one key.

A cache holds the keys, values and states of every pass, and a token reads those
of the pass that it is in: decoding one token after the other equals the whole
row. `step` begins from given states, for samplers that stop in between
(decode/wavefront.py).

Cost: of r passes over c layers that of r c layers, and so much cache; decoding
compiles each of them.

Legend: B rows, T tokens, D model, r passes.
"""

import functools
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from paraxis.configs.base import recurrence
from paraxis.models import aux as aux_lib
from paraxis.models import layer
from paraxis.models import norm
from paraxis.models import parameter
from paraxis.models import skeleton
from paraxis.models import stack as stack_lib
from paraxis.models.mixers import packed as packed_lib
from paraxis.models.mixers import protocol
from paraxis.sharding import annotate
from paraxis.sharding.tensor import project

ROWS, RESIDUAL = protocol.ROWS, protocol.RESIDUAL
CORE = 'core/'


class Start(NamedTuple):
  """state: x_BTD before the first pass. passes: int, or () int32."""

  state: Any
  passes: Any


class Core(nnx.Module):
  """What a pass has beside layers."""

  def __init__(self, config, rngs):
    shape, std = (config.d_model,) * 2, (2 * config.d_model) ** -0.5
    names = 'embed', None
    self.from_input = parameter.matrix(rngs, shape, names, std=std)
    self.from_state = parameter.matrix(rngs, shape, names, std=std)
    self.norm = norm.Norm(config)


class Ends(layer.Ends):
  """layer.Ends and, of a model with a core, `Core`."""

  def __init__(self, config, rngs):
    super().__init__(config, rngs)
    if config.recurrence.core:
      self.core = Core(config, rngs)


def noise(batch, key, width, dtype):
  """x_BTD, normal with variance 1.

  Args:
    batch: models.batch.Batch; tokens and positions are read. key: () int32.
  """

  def one(key, position, token):
    own = jax.random.fold_in(jax.random.key(key), position)
    own = jax.random.fold_in(own, token)
    return jax.random.normal(own, (width,), jnp.float32)

  fine, over = RESIDUAL[:2], (None, 0, 0)
  run = annotate.region(
    jax.vmap(jax.vmap(one, over), over), ((), fine, fine), ((*fine, None),),
    single=True,
  )  # fmt: skip
  ids = [annotate.part(x, ROWS, fine) for x in (batch.positions, batch.tokens)]
  made = run(jnp.asarray(key, jnp.int32), *ids)
  return annotate.put(made.astype(dtype), RESIDUAL)


def passes_of(own, key):
  """() int32: 1 + Poisson(rate), log rate normal (arXiv:2502.05171, section
  3.3); own: schema.Model's recurrence. key: of jax.random."""
  one, two = jax.random.split(key)
  log = math.log(own.iterations) - own.spread**2 / 2
  rate = jnp.exp(log + own.spread * jax.random.normal(one, (), jnp.float32))
  drawn = 1 + jax.random.poisson(two, rate, dtype=jnp.int32)
  return jnp.minimum(drawn, recurrence.MOST_PASSES)


def start(config, batch, dtype):
  """`Start` of a batch's rows; config: schema.Model."""
  own, draw, passes = config.recurrence, 0, config.recurrence.iterations
  if batch.draw is not None and own.spread:
    draw, passes = batch.draw, passes_of(own, jax.random.key(batch.draw))
  return Start(noise(batch, draw, config.d_model, dtype), passes)


def stack_of(config, *args):
  """stack.Stack of a schema.Model, or, with a core, a RecurrentStack."""
  make = RecurrentStack if config.recurrence.core else stack_lib.Stack
  return make(config, *args)


class RecurrentStack(stack_lib.Stack):
  """A `Stack` whose core runs several times; `see.embedded` is a `Start`."""

  def __init__(self, config, *args):
    super().__init__(config, *args)
    own = config.recurrence
    self._core = skeleton.Skeleton(functools.partial(Core, config))
    first, last = own.prelude, own.prelude + own.core
    depth = len(self.pattern)
    self._parts = range(first), range(first, last), range(last, depth)
    self._passes, self._gradients = own.iterations, own.gradients
    before, core, after = (
      tuple(self.pattern[i] for i in part) for part in self._parts
    )
    self._last = min(own.gradients, own.iterations)
    self.cached = before + core * own.iterations + after
    self.learned = before + core * self._last + after

  def uses(self, path, learned=False) -> float:
    """As of `Stack`: on average over the rows."""
    passes = self._last if learned else self._passes
    owners = self.owners.get(path.removeprefix('layers/'))
    if owners is None:
      return passes if path.endswith('from_state') else 1
    core = sum(i in self._parts[1] for i in owners)
    return (len(owners) + core * (passes - 1)) / len(owners)

  def _part(self, part, stacks):
    """(kinds, {'layers/...': stack}) of consecutive layers."""
    kinds = tuple(self.pattern[i] for i in part)
    out = {}
    for path, owners in self.owners.items():
      rows = [n for n, i in enumerate(owners) if i in part]
      cut = slice(rows[0], rows[-1] + 1) if rows else slice(0)
      out[f'layers/{path}'] = stacks[f'layers/{path}'][cut]
    return kinds, out

  def _own(self, params):
    """{path in `Core`: array} of {path: array}."""
    return {p: params[CORE + p] for p in self._core.leaves}

  def _product(self, x_BTD, own, name):
    w, names = parameter.operand(getattr(self._core.module(own), name))
    return project.einsum('BTD,DE->BTE', x_BTD, RESIDUAL, w, names, RESIDUAL)

  def _pass(self, run, own, given, state):
    """(state after a pass over the core, what else `run` gives).

    Args:
      run: x_BTD -> (x_BTD, more), the layers. own: as of `_own`. given: product
        of the prelude's features.
    """
    x, more = run(given + self._product(state, own, 'from_state'))
    with jax.named_scope('core_norm'):
      return self._core.module(own).norm(x), more

  def run(self, kinds, stacks, x_BTD, see, on=None):
    """As `Stack.run`, of all layers; stacks: with `Core`'s parameters, too."""
    assert kinds == self.pattern and on is None
    (state, passes), see = see.embedded, see._replace(embedded=None)
    before, (inner, layers), after = (
      self._part(part, stacks) for part in self._parts
    )
    whole, own = super().run, self._own(stacks)
    e, aux = whole(*before, x_BTD, see)
    given = self._product(e, own, 'from_input')

    def once(values, state):
      own, given, layers = values
      run = lambda x: whole(inner, layers, x, see)
      return self._pass(run, own, given, state)

    values, state = (own, given, layers), state.astype(e.dtype)
    fixed, state = jax.lax.stop_gradient((values, state))
    last, drawn = self._gradients, not isinstance(passes, int)
    last = last if drawn else min(last, passes)
    free = jnp.maximum(passes - last, 0) if drawn else passes - last
    if drawn or free:
      state = jax.lax.fori_loop(0, free, lambda _, s: once(fixed, s)[0], state)

    def learned(state, i):
      new, found = once(values, state)
      on = i < passes  # fewer may be drawn than have gradients
      return jnp.where(on, new, state), aux_lib.select(on, found)

    state, found = jax.lax.scan(learned, state, jnp.arange(last))
    found = jax.tree.map(lambda x: x.sum(0), found)
    x, more = whole(*after, state, see)
    return x, aux_lib.add(aux_lib.add(aux, found), more)

  def step(self, params, x_BTD, see, states, together=1, layers=None):
    """As `Stack.step`, of all layers."""
    assert together == 1 and layers is None
    state, see = see.embedded.state, see._replace(embedded=None)
    x, _, found = self.continued(params, x_BTD, see, states, state)
    return x, found

  def continued(self, params, x_BTD, see, states, state):
    """`step` from a given state -> (x_BTD, state behind the last pass, what
    each layer has in flight)."""
    before, core, after = self._parts
    own, step = self._own(params), super().step
    e, found = step(params, x_BTD, see, states[: len(before)], layers=before)
    given = self._product(e, own, 'from_input')
    state, n = state.astype(e.dtype), len(core)
    for _ in range(self._passes):
      mine = states[len(found) : len(found) + n]
      run = lambda x, mine=mine: step(params, x, see, mine, layers=core)
      state, new = self._pass(run, own, given, state)
      found = *found, *new
    mine = states[len(found) :]
    x, new = step(params, state, see, mine, layers=after)
    return x, state, (*found, *new)


def step(model, params, cache, packed, form, state=None, mixed: Any = 0.0):
  """`Decoder.step` from given states of the tokens in flight.

  Args:
    model: models.decoder.Decoder; it makes model.recurrence.iterations passes.
    params, cache, packed, form: as of `Decoder.step`.
    state: (.., D), laid out as packed. None: noise.
    mixed: share of noise in each token's state, laid out as packed.

  Returns:
    (features, states behind the last pass, both (.., D); packed.Flight).
  """
  x, see = model.planned(params, cache, packed, form)
  first, see = see.embedded.state, see._replace(embedded=None)
  if state is not None:
    share = jnp.asarray(mixed, first.dtype)[..., None]
    first = share * first + (1 - share) * state.astype(first.dtype)
  x, state, layers = model.stack.continued(params, x, see, cache.states, first)
  flight = packed_lib.Flight(packed, layers)
  return model.normalise(params, x), state, flight
