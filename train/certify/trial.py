"""Runs the step of a config on given devices, on synthetic batches.

`Runner` compiles the functions of the step in one layout; `reference` is what
they give on one device with nothing sharded, kept for all layouts that share
it; `worst` compares two trees:

    difference of a leaf = max |a - b| / max |b|        (b: one device)

Arrays made under one mesh cannot be used under another: numbers travel between
two layouts through NumPy. Needs neither text nor tokenizer.

Legend: B rows, T tokens, A microbatches.
"""

import collections
import dataclasses
import functools
import math

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import mixers
from paraxis.models import batch as batch_lib
from paraxis.train import program as job_lib
from paraxis.train import state as state_lib
from paraxis.train import step as step_lib
from paraxis.train.certify import inputs
from paraxis.train.data import batches as data
from paraxis.train.run import evaluate
from paraxis.train.steps import outer

STEPS = 2  # batches and independent updates
ROUNDING = 2.0**-9  # of a number to the 8 bits of bfloat16
FLOOR = 1e-2  # of the largest leaf, as which every leaf counts at least


@functools.cache
def quick_options():
  """XLA options under which a program compiles in a third of the time.

  For programs that run once: they leave out what makes code fast, nothing that
  decides on layouts or collectives. Releases of XLA differ in what they know.
  """
  if jax.default_backend() != 'cpu':
    return None
  known = {'xla_backend_optimization_level': 0}
  for name, value in (
    ('xla_llvm_disable_expensive_passes', True),
    ('xla_cpu_use_fusion_emitters', False),
  ):
    try:
      jax.jit(abs, compiler_options={name: value})(1.0)
      known[name] = value
    except jax.errors.JaxRuntimeError:
      pass
  return known


class Runner:
  """Runs one config on given devices; its functions compile once, on demand.

  Attributes:
    job: program.Program. config, devices: of it.
    first: the step that its states are before, the first at the full learning
      rate: of an earlier one an update would hardly show.
  """

  def __init__(self, config, devices):
    """config: schema.Config, its mesh of as many devices as given."""
    self.config, self.devices = config, devices
    self.first = max(config.optimizer.warmup_steps - 1, 0)
    self.job = job_lib.on_devices(config, devices=devices)
    step = step_lib.make(
      self.job.built, self.job.optimizer, config.optimizer.clip_norm
    )
    jit = functools.partial(jax.jit, compiler_options=quick_options())
    self._grads, self._update = jit(step.grads), jit(step.update)
    self._evaluate = jit(step.evaluate)
    self._init = jit(self.job.optimizer.init)

  def put(self, batch, parts=0):
    """A batch of NumPy arrays (B, T) on the mesh, in microbatches.

    parts: their number; 0: that of the config.
    """
    A = parts or self.config.microbatches
    if A > 1:
      fold = lambda x: x.reshape(A, -1, x.shape[-1]) if np.ndim(x) else x
      batch = type(batch)(*map(fold, batch))
    return self.job.put(batch, rows=batch.tokens.shape[-2])

  def start(self, params):
    """The State before step `first`, with these NumPy parameters."""
    with self.job.context():
      params = self.job.on_mesh(params, self.job.built.params)
      everywhere = jax.NamedSharding(self.job.mesh, jax.P())
      counters = [
        jax.device_put(np.int32(n), everywhere) for n in (self.first, 0, 0)
      ]
      state = state_lib.begun(self.job.model, self._init, params, counters)
      if not self.config.outer.active:
        return state
      return outer.begun(state, self.job.config, self.job.model)

  def gradients(self, state, batch, parts=0):
    """(loss, {path: gradient}, aux.Aux) on the mesh; arguments as of `put`."""
    with self.job.context():
      return self._grads(state.inner, self.put(batch, parts))

  def traced(self, state, batch):
    """(jaxpr of `gradients`, indexes of the gradients among its outputs)."""
    with self.job.context():
      program = self._grads.trace(state.inner, self.put(batch))
    outputs = jax.tree.leaves_with_path(program.out_info)
    of_gradients = [
      i for i, (path, _) in enumerate(outputs) if path[0].idx == 1
    ]
    return program.jaxpr.jaxpr, of_gradients

  def update(self, state, loss, gradients, aux):
    """The State after one update."""
    with self.job.context():
      return self._update(state, loss, gradients, aux)[0]

  def evaluate(self, state, batch):
    """Nats per target: float."""
    with self.job.context():
      total = self._evaluate(state.variables, self.job.put(batch))
    return float(total) / float(batch.denominator)

  def evaluated(self, state):
    """(Counter of the rows of held-out text read, evaluate.Evaluation of it).

    A row is its sorted slots: (document, position, token, target).
    """
    seen = collections.Counter()

    def run(params, batch):
      ids, weights = jax.device_get((batch[:4], batch.weights))
      tokens, targets, segments, positions = ids
      slots = np.stack([segments, positions, tokens, targets], -1)
      for row, weight in zip(slots, weights, strict=True):
        seen[tuple(sorted(map(tuple, row[weight > 0].tolist())))] += 1
      return self._evaluate(params, batch)

    held_out = data.evaluation(self.config, inputs.corpus(self.config))
    measure = evaluate.Evaluator(self.job, None, held_out, run)
    with self.job.context():
      found = measure(state.variables)
    seen.pop((), None)  # rows without text, which fill the last batch
    return seen, found

  def steps(self, params, batches):
    """The State after one independent step on each batch."""
    state = self.start(params)
    for batch in batches:
      state = self.update(state, *self.gradients(state, batch))
    return state


def batches(config, packed, seed=0):
  """STEPS batches (B, T) of random tokens, in NumPy.

  Packed: two or more documents a row, then padding; but one document fills the
  first row, so that states cross every border of shards, the last row is empty
  and the one before holds 5 tokens, so that with the length sharded some
  devices see only padding. Not packed: one document fills each row.
  """
  rng = np.random.default_rng(seed)
  B, T = config.train.batch_size, config.data.sequence_length
  made = []
  for t in range(STEPS):
    segments, positions = np.zeros((2, B, T), np.int32)
    for row in range(B):
      lengths = [T]
      if packed and row:  # two of at most half always fit, a third may not
        lengths = rng.integers(3, T // 2 + 1, 3)
        lengths = [[5], []][row - B + 2] if row >= B - 2 else lengths
      end = 0
      for n, length in enumerate(lengths, 1):
        if end + length <= T:
          segments[row, end : end + length] = n
          positions[row, end : end + length] = np.arange(length)
          end += length
    tokens, last = rng.integers(0, config.model.vocab_size, (2, B, T), np.int32)
    targets = np.roll(tokens, -1, 1)
    ends = np.append(positions[:, 1:] == 0, np.ones((B, 1), bool), 1)
    targets[ends] = last[ends]
    weights = (segments > 0).astype(np.float32)
    batch = batch_lib.Batch(
      tokens, targets, segments, positions, weights, weights.sum()
    )
    made.append(inputs.objective(config, batch, t, seed))
  return made


def change_one_document(batch, vocabulary):
  """Batches that differ in one document a row, which no weight counts.

  Returns:
    (before, after, all): `after` has another first token in document
    1 + row % 2 of each row, and other tokens in all padding; `all` is `after`
    with the weights of `batch`.
  """
  chosen = 1 + np.arange(len(batch.tokens))[:, None] % 2
  mine = batch.segments == chosen
  hit = mine & (batch.positions == 0) | (batch.segments == 0)
  tokens = np.where(hit, (batch.tokens + 1) % vocabulary, batch.tokens)
  tokens = tokens.astype(np.int32)
  before = batch._replace(weights=np.where(mine, 0, batch.weights))
  return before, before._replace(tokens=tokens), batch._replace(tokens=tokens)


class Reference:
  """What one device gives, in NumPy; each part is made when it is asked for.

  Attributes:
    params: {path: array}. batches: STEPS of them. Both are drawn from the seed.
    loss, gradients, aux: of batch 0.
  """

  def __init__(self, config, packed, device, seed=0):
    self._runner = _one_device(config, device, _code())
    # Neither depends on the optimizer: those that differ in it share them.
    plain = dataclasses.replace(config, optimizer=schema.Optimizer())
    found = _gradients(plain, packed, device, seed, _code())
    self.params, self.batches, self.loss, self.gradients, self.aux = found

  @functools.cached_property
  def exact(self):
    """(loss, gradients, aux.Aux) of the same parameters in float32."""
    config = schema.with_value(self._runner.config, 'model.dtype', 'float32')
    runner = _one_device(config, self._runner.devices[0], _code())
    loss, *found = runner.gradients(runner.start(self.params), self.batches[0])
    return float(loss), *jax.device_get(found)

  @functools.cached_property
  def updated(self):
    """{path: leaf} of the state after one update from `gradients`."""
    state = self._runner.start(self.params)
    state = self._runner.update(state, self.loss, self.gradients, self.aux)
    return jax.device_get(state_lib.flatten(state))

  @functools.cached_property
  def evaluated(self):
    """`Runner.evaluated` of these parameters."""
    return self._runner.evaluated(self._runner.start(self.params))

  @functools.cached_property
  def stepped(self):
    """Parameters after a step on each batch."""
    return jax.device_get(self._runner.steps(self.params, self.batches).params)


def _code():
  """Where a user's own mixers are from: a letter may mean another class now."""
  return tuple(sorted(mixers.OWN.items()))


@functools.lru_cache(maxsize=64)
def _one_device(config, device, code):
  del code  # of the key alone
  return Runner(config, [device])


@functools.lru_cache(maxsize=256)
def _gradients(config, packed, device, seed, code):
  runner = _one_device(config, device, code)
  params, made = inputs.parameters(runner, seed), batches(config, packed, seed)
  loss, *found = runner.gradients(runner.start(params), made[0])
  return params, made, float(loss), *jax.device_get(found)


@functools.lru_cache(maxsize=256)
def _reference(config, packed, device, seed, code):
  del code
  return Reference(config, packed, device, seed)


# One device has no use for these, and the plainest value of each: a whole batch
# at once, nothing recomputed, no expert served apart, token after token.
PLAIN = {
  'mesh': schema.Mesh(),
  'pipeline': schema.Pipeline(),
  'train.remat': 'none',
  'train.memory': '',
  'train.microbatches': 1,
  'train.batch_ramp': '',
  'train.shape_cycle': '',
  'model.unroll': 1,
  'model.loss': 'logits',
  'model.experts.hot': 0,
  'model.experts.region': '',
  'model.experts.hierarchical': False,
  'model.recurrent.solver': 'sequential',
}


def plain(config):
  """A schema.Config on one device, without any shortcut."""
  return schema.with_values(config, PLAIN)


def reference(config, packed, device, seed=0):
  """`Reference` of a schema.Config whatever its layout; kept and shared.

  Args:
    config: see `plain`.
    packed: see `batches`.
    device: the one to use.
    seed: of parameters and batches.
  """
  return _reference(plain(config), packed, device, seed, _code())


def _rms(x):
  return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def excess(found, own, exact, rounding=ROUNDING):
  """(error / one device's own error, path) of the leaf where that is largest.

    error of a leaf = rms(x - exact), of one device at least
                      rounding * max(rms(exact), FLOOR * that of the largest)

  So a leaf of rounding alone, or one that happens to round well, may be a
  rounding off.

  Args:
    found: {path: array} in bfloat16 of a layout. own: the same of one device.
    exact: the same in float32. rounding: relative, of every value.
  """
  if not set(found) == set(own) == set(exact):
    return math.inf, ', '.join(sorted(set(found) ^ set(exact)))
  sizes = {path: _rms(x) for path, x in exact.items()}
  least = FLOOR * max(sizes.values())
  out = {}
  for path, x in exact.items():
    error, mine = (_rms(np.asarray(y[path]) - x) for y in (found, own))
    mine = max(mine, rounding * max(sizes[path], least))
    value = error / mine if mine else error and math.inf
    out[path] = value if math.isfinite(value) else math.inf
  path = max(out, key=lambda path: out[path])
  return out[path], path


def worst(found, wanted, floor=0.0):
  """(difference, path) of the leaf that differs most.

  Args:
    found, wanted: {path: NumPy array}, the same paths and shapes.
    floor: a leaf counts as at least this share of the largest value of all.
  """
  if set(found) != set(wanted):
    return math.inf, ', '.join(sorted(set(found) ^ set(wanted)))
  top = {path: float(np.abs(b).max(initial=0)) for path, b in wanted.items()}
  least = floor * max(top.values())
  out = {}
  for path, b in wanted.items():
    gap = float(np.abs(np.asarray(found[path], np.float64) - b).max(initial=0))
    scale = max(top[path], least)
    value = gap / scale if scale else gap and math.inf
    out[path] = value if math.isfinite(value) else math.inf
  path = max(out, key=lambda path: out[path])
  return out[path], path
