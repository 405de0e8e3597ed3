"""Builds mesh, model, optimizer and data from a config, and checks them first.

    config -> Program: mesh, rules, model, optimizer; shapes and layouts of the
              state and of a batch; the compiled halves of a step
           -> Job: a Program and the text that it trains on

Bad input ends here, before anything is compiled and before the workdir is
written; what does not fit a device's memory ends in train/run/memory.py.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.models import depth
from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.meter import compiling
from paraxis.sharding.pipeline import schedules
from paraxis.sharding.sequence import order as context_order
from paraxis.train import expert_counts
from paraxis.train import state as state_lib
from paraxis.train.data import batch_ramp
from paraxis.train.data import batches as data
from paraxis.train.data import chat
from paraxis.train.data import corpus as corpus_lib
from paraxis.train.data import objectives
from paraxis.train.data import shape_cycle
from paraxis.train.data import token_cache
from paraxis.train.run import metrics
from paraxis.train.steps import gradients
from paraxis.train.steps import outer
from paraxis.train.steps import zeroth_order
from paraxis.train.updates import optimizers

ROWS = ('batch', 'length')
IDLE = 0.05  # share of unread rows of an embedding that is worth a word


@dataclasses.dataclass(frozen=True)
class Program:
  """A configuration built on a mesh: enough to trace and compile its step.

  Attributes:
    config: schema.Config, its mesh the one in use. built: models.build.Built.
    optimizer: train.updates.optimizers.Optimizer, or zeroth_order.Descent.
  """

  config: schema.Config
  built: build.Built
  optimizer: optimizers.Optimizer | zeroth_order.Descent

  @functools.cached_property
  def state(self) -> state_lib.State:
    """State of jax.ShapeDtypeStruct, each with its NamedSharding."""
    with self.context():
      shapes = jax.eval_shape(lambda: self._init())
      return with_layouts(self.mesh, shapes)

  @functools.cached_property
  def leaves(self) -> dict[str, state_lib.Leaf]:
    """{canonical path: state.Leaf} of the state."""
    state = self.state
    own = self.optimizer.axes(state.params)
    return state_lib.leaves(state, self.model, own)

  @property
  def model(self) -> decoder.Decoder:
    """The decoder."""
    return self.built.model

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The mesh; without devices a jax.sharding.AbstractMesh."""
    return self.built.mesh

  def context(self) -> contextlib.AbstractContextManager:
    """The rules and the mesh, in force within a `with` statement."""
    return build.use(self.built)

  def batch_sharding(self, ndim: int) -> jax.NamedSharding:
    """NamedSharding of a batch array (..., rows, tokens)."""
    names = (None,) * (ndim - 2) + ROWS
    spec = rules_lib.spec(names, None, self.built.rules, dict(self.mesh.shape))
    return jax.NamedSharding(self.mesh, spec)

  def batch_shapes(self, length=0) -> batch_lib.Batch:
    """The batch of a step as jax.ShapeDtypeStructs with their layouts.

    length: tokens of a row; 0: those of the config."""
    config = self.config
    shape = config.microbatch_rows, length or config.data.sequence_length
    if config.microbatches > 1:
      shape = (config.microbatches, *shape)
    rows = self.batch_sharding(len(shape))
    whole = jax.NamedSharding(self.mesh, jax.P())
    ids = jax.ShapeDtypeStruct(shape, np.int32, sharding=rows)
    weights = jax.ShapeDtypeStruct(shape, np.float32, sharding=rows)
    one = jax.ShapeDtypeStruct((), np.float32, sharding=whole)
    drawn = objectives.drawn(config) is not None
    number = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
    draw = number if drawn else None
    valid = None if config.data.loss_on == 'all' else one
    given = ids, ids, ids, ids, weights, one
    return batch_lib.Batch(*given, draw=draw, valid=valid)

  def local_rows(self, rows: int) -> tuple[int, int]:
    """(lo, hi): the rows of a batch axis that this process's devices hold."""
    sharding = self.batch_sharding(2)
    shape = (rows, self.config.data.sequence_length)
    held = [
      index[0].indices(rows)[:2]
      for index in sharding.addressable_devices_indices_map(shape).values()
      if index is not None
    ]
    return min(lo for lo, _ in held), max(hi for _, hi in held)

  def token_order(self, length=0) -> np.ndarray | None:
    """(T,): tokens of a row in the order of the context axis; None: as is.

    length: T; 0: that of the config."""
    plan = self.model.layout.context
    if plan is None:
      return None
    length = length or self.config.data.sequence_length
    return context_order.permutation(plan.layout, plan.n, length)

  def put(self, batch, lo=0, rows=None):
    """A batch of NumPy arrays on the mesh.

    lo: its first row, of `rows` in a microbatch; default those of the config.
    """
    rows = rows or self.config.microbatch_rows
    order = self.token_order(batch.tokens.shape[-1])

    def place(x):
      if np.ndim(x) == 0:
        scalar = jax.NamedSharding(self.mesh, jax.P())
        return jax.make_array_from_callback((), scalar, lambda _: x)
      axis = x.ndim - 2
      x = x if order is None else x[..., order]
      if lo + x.shape[axis] > rows:
        raise ValueError(
          f'rows {lo} to {lo + x.shape[axis]} of a batch, of {rows} rows'
        )
      shape = (*x.shape[:axis], rows, x.shape[-1])

      def part(index):
        first, last, _ = index[axis].indices(rows)
        cut = (*index[:axis], slice(first - lo, last - lo), index[-1])
        return x[cut]

      return jax.make_array_from_callback(
        shape, self.batch_sharding(x.ndim), part
      )

    return jax.tree.map(place, batch)

  def on_mesh(self, params, like):
    """Parameters or gradients on the mesh.

    params: {path: NumPy array}, layers and experts in order. like: {path:
    array, or jax.ShapeDtypeStruct with its layout}.
    """
    held = lambda path: self.model.held.get(path, depth.IN_ORDER)
    return {
      path: jax.device_put(
        depth.from_order(params[path], *held(path)), leaf.sharding
      )
      for path, leaf in like.items()
    }

  def in_order(self, params):
    """{path: NumPy array} of parameters or gradients, all in order."""
    held = lambda path: self.model.held.get(path, depth.IN_ORDER)
    found = jax.device_get(params)
    return {p: depth.to_order(x, *held(p)) for p, x in found.items()}

  def _init(self):
    key = jax.random.key(self.config.train.seed)
    state = state_lib.init(self.model, self.optimizer, key)
    return outer.begun(state, self.config, self.model)

  def initial_state(self) -> state_lib.State:
    """The state before the first step, on the mesh."""
    return jax.jit(self._init, compiler_options=compiling.options())()

  def initial_leaves(self, paths) -> dict[str, jax.Array]:
    """{canonical path: array} of that state; no other leaf of it is made."""

    def make():
      flat = state_lib.flatten(self._init())
      return {path: flat[path] for path in paths}

    return jax.jit(make, compiler_options=compiling.options())()

  def compile_update(self, update, gradient, say=None):
    """The second half of a step, compiled; it donates the state.

    Args:
      update: step.Step.update.
      gradient: the compiled first half (compiling.compile_step), whose results
        it takes.
      say: as for compile_step.
    """
    results = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      gradient.out_info,
      gradient.output_shardings,
    )
    return compiling.compile_step(
      'update', update, self.state, *results, donate=(0,), say=say
    )


@dataclasses.dataclass(frozen=True)
class Job(Program):
  """A `Program` and its data: a run, ready to compile.

  Attributes:
    tokenizer, corpus, batches: the data (see their files).
    held_out: list of data.HeldOut.
  """

  tokenizer: tokenizer_lib.Bytes | tokenizer_lib.Tokenizer
  corpus: token_cache.Corpus
  batches: data.Batches
  held_out: list


def with_layouts(mesh, tree):
  """Abstract leaves of a trace under `mesh` -> the same with NamedShardings."""

  def leaf(x):
    spec = x.sharding.spec if x.sharding is not None else jax.P()
    return jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)
    )

  return jax.tree.map(leaf, tree)


def on_devices(
  config: schema.Config, mesh_text='', devices=None, abstract=False
) -> Program:
  """`Program` of a schema.Config, its batch unchecked; arguments as of `make`.

  abstract: on a mesh of no devices.
  """
  train = config.train
  sizes = build.mesh_sizes(config, mesh_text)
  built = build.build(
    config, mesh_text, train.remat, devices, abstract,
    zeroth_order.layout(config, sizes),
  )  # fmt: skip
  outer.check(config, built)
  optimizers.check(config, dict(built.mesh.shape))
  zeroth_order.check(config, built)
  sizes = dataclasses.replace(config.mesh, **built.mesh.shape)
  optimizer: Any = None
  if train.estimator == zeroth_order.NAME:
    share = optimizers.schedule(config.optimizer, train.steps)
    optimizer = zeroth_order.Descent(config, share, built.model)
  else:
    own, alone = config.optimizer, config.outer.active
    tokens = train.batch_size * config.data.sequence_length
    tokens //= built.mesh.shape['replica'] if alone else 1
    optimizer = optimizers.Optimizer(own, train.steps, built.model, tokens)
  return Program(dataclasses.replace(config, mesh=sizes), built, optimizer)


def of_shapes(
  config: schema.Config, mesh_text='', devices=None, abstract=False
) -> Program:
  """`Program` of a schema.Config, its shapes known and checked.

  Args:
    config, mesh_text, devices: as for `make`.
    abstract: on a mesh of no devices.

  Raises:
    UserError: the model, the mesh and the sizes of a batch do not fit.
  """
  train, length = config.train, config.data.sequence_length
  program = on_devices(config, mesh_text, devices, abstract)
  config, built = program.config, program.built
  what = f'train.batch_size={train.batch_size}'
  if config.microbatches > 1:
    what += f' in {config.microbatches} microbatches'
  build.check_rows(config.microbatch_rows, built, what)
  ramp: Any = batch_ramp.of(config)
  for size in ramp.sizes(train.steps) if ramp else ():
    step = f'train.batch_ramp={train.batch_ramp!r}: {size} rows a step'
    parts, rows = ramp.split(size)
    build.check_rows(rows, built, step)
    if built.schedule is not None:
      schedules.check_size(built.schedule, parts, step)
  _check_cycle(config, built)
  build.check_tokens(length, built, f'data.sequence_length={length}')
  model_checks.check_length(config.model, length, 'data.sequence_length')
  objectives.check(config)
  _ = program.state  # traced here: what does not fit ends here
  return program


def _check_cycle(config, built):
  """UserError: a shape of train.shape_cycle does not fit the mesh."""
  cycle = shape_cycle.of(config)
  if cycle is shape_cycle.WHOLE:
    return
  for pieces in cycle.all(config.train.steps):
    length = config.data.sequence_length // pieces
    what = f'train.shape_cycle={config.train.shape_cycle!r}: {length} tokens'
    build.check_tokens(length, built, what)
    if config.mesh.context > 1:
      short = schema.with_value(config, 'data.sequence_length', length)
      try:
        build.build(short, '', abstract=True)
      except errors.UserError as e:
        raise errors.UserError(f'{what} a row: {e}') from None


def make(config: schema.Config, mesh_text='', devices=None, say=print) -> Job:
  """`Job` for a schema.Config.

  Args:
    config: schema.Config.
    mesh_text: --mesh=; replaces config.mesh.
    devices: jax devices; default all.
    say: called with one line per finding (token cache rebuilt, documents cut).

  Raises:
    UserError: anything that does not fit or does not exist.
  """
  metrics.check_loggers(config.train)
  program = of_shapes(config, mesh_text, devices)
  config = program.config
  config = corpus_lib.with_places(config)
  steps, warmup = config.train.steps, config.optimizer.warmup_steps
  if warmup >= steps:
    say(
      f'optimizer.warmup_steps={warmup} of train.steps={steps}: the learning '
      'rate never reaches its peak.'
    )
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  objectives.check_mask(config, tokenizer)
  if config.microbatches > 1 and expert_counts.whole_step(program.model):
    say(
      "experts: model.experts.balance_scope='step' counts loads in one more "
      f'forward pass of the {config.microbatches} microbatches of a step.'
    )
  gradients.say_repeated_sums(config, dict(program.mesh.shape), say)
  corpus = token_cache.tokens(config, tokenizer, say)
  idle = config.model.vocab_size - corpus.vocab_size
  if idle > IDLE * config.model.vocab_size:
    say(
      f'model.vocab_size={config.model.vocab_size:,}: tokenizer '
      f'{tokenizer.name} has {corpus.vocab_size:,} ids, {idle:,} rows of '
      'the embedding are never read.'
    )
  batches = data.Batches(config, corpus)
  if batches.plan.cut:
    say(chat.said_cut(batches, corpus, config.data))
  job = Job(
    config, program.built, program.optimizer, tokenizer, corpus, batches,
    data.evaluation(config, corpus),
  )  # fmt: skip
  vars(job)['state'] = program.state  # a cached property: traced once
  return job
