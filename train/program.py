"""Everything that a configuration means, built once and checked first.

config -> mesh, rules, model, optimizer, tokenizer, documents, batches and the
shapes and layouts of the state. Bad input of any kind ends here, before
anything is compiled and before the workdir is written.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.models import checks as model_checks
from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.pipeline import schedules
from paraxis.sharding.sequence import order as context_order
from paraxis.train import optimizers
from paraxis.train import state as state_lib
from paraxis.train.data import batch_ramp
from paraxis.train.data import batches as data
from paraxis.train.data import token_cache
from paraxis.train.run import compiling
from paraxis.train.run import metrics

ROWS = ('batch', 'length')


@dataclasses.dataclass(frozen=True)
class Job:
  """A run, ready to compile.

  Attributes:
    config: schema.Config, its mesh the one in use. built: models.build.Built.
    optimizer: train.optimizers.Optimizer.
    tokenizer, corpus, batches: the data (see their files).
    held_out: list of data.HeldOut.
    state: State of jax.ShapeDtypeStruct, each with its NamedSharding.
  """

  config: Any
  built: Any
  optimizer: Any
  tokenizer: Any
  corpus: Any
  batches: Any
  held_out: Any
  state: Any

  @property
  def model(self):
    """models.decoder.Decoder."""
    return self.built.model

  @property
  def mesh(self):
    """jax Mesh."""
    return self.built.mesh

  def context(self):
    """The rules and the mesh, in force within a `with` statement."""
    return build.layout(self.built)

  def batch_sharding(self, ndim):
    """NamedSharding of a batch array (..., rows, tokens)."""
    names = (None,) * (ndim - 2) + ROWS
    spec = rules_lib.spec(names, None, self.built.rules, dict(self.mesh.shape))
    return jax.NamedSharding(self.mesh, spec)

  def batch_shapes(self):
    """The batch of a step as jax.ShapeDtypeStructs with their layouts."""
    config = self.config
    shape = config.microbatch_rows, config.data.sequence_length
    if config.microbatches > 1:
      shape = (config.microbatches, *shape)
    rows = self.batch_sharding(len(shape))
    whole = jax.NamedSharding(self.mesh, jax.P())
    ids = jax.ShapeDtypeStruct(shape, np.int32, sharding=rows)
    weights = jax.ShapeDtypeStruct(shape, np.float32, sharding=rows)
    one = jax.ShapeDtypeStruct((), np.float32, sharding=whole)
    return batch_lib.Batch(ids, ids, ids, ids, weights, one)

  def local_rows(self, rows):
    """(lo, hi): the rows of a batch axis that this process's devices hold."""
    sharding = self.batch_sharding(2)
    shape = (rows, self.config.data.sequence_length)
    held = [
      index[0].indices(rows)[:2]
      for index in sharding.addressable_devices_indices_map(shape).values()
    ]
    return min(lo for lo, _ in held), max(hi for _, hi in held)

  def token_order(self):
    """Where the tokens of a row lie on the context axis: (T,), or None."""
    plan = self.model.layout.context
    if plan is None:
      return None
    length = self.config.data.sequence_length
    return context_order.permutation(plan.layout, plan.n, length)

  def put(self, batch, lo=0, rows=None):
    """A batch of NumPy arrays on the mesh.

    lo: its first row, of `rows` in a microbatch; default those of the config.
    """
    rows = rows or self.config.microbatch_rows
    order = self.token_order()

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

  def initial_state(self):
    """The state before the first step, on the mesh."""
    seed = self.config.train.seed
    make = lambda: state_lib.init(
      self.model, self.optimizer, jax.random.key(seed)
    )
    return jax.jit(make, compiler_options=compiling.options())()


def with_layouts(mesh, tree):
  """Abstract leaves of a trace under `mesh` -> the same with NamedShardings."""

  def leaf(x):
    spec = x.sharding.spec if x.sharding is not None else jax.P()
    return jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)
    )

  return jax.tree.map(leaf, tree)


def of_shapes(config, mesh_text='', devices=None, abstract=False):
  """`Job` without data: enough to trace the step, or to place batches.

  Args:
    config, mesh_text, devices: as for `make`.
    abstract: on a mesh of no devices.

  Raises:
    UserError: the model, the mesh and the sizes of a batch do not fit.
  """
  train, length = config.train, config.data.sequence_length
  built = build.build(config, mesh_text, train.remat, devices, abstract)
  sizes = dataclasses.replace(config.mesh, **built.mesh.shape)
  config = dataclasses.replace(config, mesh=sizes)
  what = f'train.batch_size={train.batch_size}'
  if config.microbatches > 1:
    what += f' in {config.microbatches} microbatches'
  build.check_rows(config.microbatch_rows, built, what)
  ramp = batch_ramp.of(config)
  for size in ramp.sizes(train.steps) if ramp else ():
    step = f'train.batch_ramp={train.batch_ramp!r}: {size} rows a step'
    parts, rows = ramp.split(size)
    build.check_rows(rows, built, step)
    if built.schedule is not None:
      schedules.check_size(built.schedule, parts, step)
  what = 'data.sequence_length'
  build.check_tokens(length, built, f'{what}={length}')
  model_checks.check_length(config.model, length, what)
  optimizer = optimizers.Optimizer(config.optimizer, train.steps, built.model)
  init = lambda: state_lib.init(built.model, optimizer, jax.random.key(0))
  with build.layout(built):
    state = with_layouts(built.mesh, jax.eval_shape(init))
  return Job(config, built, optimizer, None, None, None, None, state)


def _absolute(name):
  """A name of a file or folder, so that it is found from anywhere."""
  path = pathlib.Path(name).expanduser()
  shipped = name in ('fixture', 'corpus', 'bytes', 'bpe2048')
  return name if shipped or not path.exists() else str(path.resolve())


def make(config, mesh_text='', devices=None, say=print):
  """`Job` for a schema.Config.

  Args:
    config: schema.Config.
    mesh_text: --mesh=; replaces config.mesh.
    devices: jax devices; default all.
    say: called with one line per finding (token cache rebuilt, documents cut).

  Raises:
    UserError: anything that does not fit or is not there.
  """
  metrics.check_loggers(config.train)
  job = of_shapes(config, mesh_text, devices)
  config = job.config
  places = {
    k: _absolute(getattr(config.data, k)) for k in ('path', 'tokenizer')
  }
  config = dataclasses.replace(
    config, data=dataclasses.replace(config.data, **places)
  )
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  corpus = token_cache.tokens(config, tokenizer, say)
  batches = data.Batches(config, corpus)
  if batches.plan.cut:
    say(
      f'data: {batches.plan.cut} documents are cut between rows of '
      f'{config.data.sequence_length} tokens; every token is used.'
    )
  held_out = data.evaluation(config, corpus)
  return dataclasses.replace(
    job,
    config=config,
    tokenizer=tokenizer,
    corpus=corpus,
    batches=batches,
    held_out=held_out,
  )
