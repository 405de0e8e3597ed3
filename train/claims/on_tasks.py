"""Trainings on rows of train/claims/tasks.py, and decoding, for claims.

Legend: B rows, T tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from paraxis.configs import schema
from paraxis.decode import loop
from paraxis.models import build
from paraxis.models import trained as trained_lib
from paraxis.sharding.meter import compiling
from paraxis.train import program as job_lib
from paraxis.train import state as state_lib
from paraxis.train import step as step_lib
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import tasks
from paraxis.train.data import objectives
from paraxis.train.run import workdir as workdir_lib


class Numbers:
  """A tokenizer without an end: token t is a letter."""

  name = fingerprint = 'numbers'
  end_id = -1

  def __init__(self, vocab_size):
    self.vocab_size = vocab_size

  def decode_bytes(self, tokens):
    """A byte a token."""
    return bytes(97 + t % 26 for t in tokens)


def generator(config, params_of):
  """loop.Generator of a schema.Config on one device; prompts are ids.

  Args:
    params_of: decoder.Decoder -> {path: array}.
  """
  config = dataclasses.replace(config, mesh=schema.Mesh(sequence=False))
  built = build.build(config, 'data=1', devices=jax.devices()[:1])
  with build.use(built):
    params = params_of(built.model)
  tokenizer = Numbers(config.model.vocab_size)
  return loop.Generator(
    built, params, tokenizer, config.decode, lambda line: None
  )


def random(run, changes):
  """loop.Generator of the config with random parameters, in float64."""
  own = {'model.dtype': 'float64', 'model.param_dtype': 'float64'}
  return generator(
    experiment.fields(run.config, own, changes), experiment.random_parameters
  )


def right(model, task, params, batch):
  """(n,) shares of the answers that are the most likely tokens; of a masked
  model, with all of them masked."""
  config = model.config
  if config.mask_id >= 0:
    hidden, ids = batch.weights > 0, batch.targets
    if config.mask_shift:  # as objectives.batch has it
      hidden, ids = jnp.roll(hidden, 1, 1).at[:, 0].set(False), batch.tokens
    mask = -1 - ids if model.pairs else config.mask_id
    batch = batch._replace(tokens=jnp.where(hidden, mask, ids))
  x_BTD, _ = model.features(params, batch)
  hit_BT = model.logits(params, x_BTD).argmax(-1) == batch.targets
  return task.right(hit_BT, batch)


def train(config, task, every, folder, say, begin=None):
  """[[step, shares of answers right on new rows], ...] of a training.

  Args:
    config: schema.Config; its vocabulary and length are those of the task.
    task: as in train/claims/tasks.py. every: steps between measurements.
    folder: pathlib.Path; a training resumes from the last measurement there.
    begin: {path: array} in place of the first parameters; those that a run adds
      to its model (models/trained.py) are its own.
  """
  # Orbax starts slowly.
  from paraxis.sharding.checkpoint import store as store_lib

  rows = config.train.batch_size
  job = job_lib.of_shapes(config, '', jax.devices()[:1])
  made = step_lib.make(job.built, job.optimizer, config.optimizer.clip_norm)
  jit = functools.partial(jax.jit, compiler_options=compiling.options())
  grads, update = jit(made.grads), jit(made.update, donate_argnums=0)
  measure = jit(functools.partial(right, job.model, task))
  path = folder / workdir_lib.CHECKPOINTS
  with (
    job.context(),
    store_lib.Store(path, store_lib.Options(1, False), say=say) as store,
  ):
    state, curve = _resumed(job, store, say, begin)
    held = [job.put(tasks.draw(task, rows, seed, True)) for seed in range(4)]
    for t in range(curve[-1][0] if curve else 0, config.train.steps):
      batch = job.put(trained_on(config, task, t))
      state, numbers = update(state, *grads(state.variables, batch))
      if (t + 1) % every == 0 or t + 1 == config.train.steps:
        found = jnp.stack([measure(state.variables, b) for b in held]).mean(0)
        curve.append([t + 1, *map(float, found)])
        axes = state_lib.axes(job.leaves)
        store.save(t + 1, state_lib.flatten(state), axes, dict(curve=curve))
        say(f'step {t + 1}: loss {float(numbers["loss"]):.3f}, {found[0]:.1%}')
  return curve


def trained_on(config, task, t):
  """batch.Batch of step t; no two seeds train on the same one."""
  seed = 1_000_000 * config.train.seed + 1000 + t
  rows, views = config.train.batch_size, objectives.views(config)
  batch = tasks.draw(task, rows // views, seed)
  batch = jax.tree.map(lambda x: x.repeat(views, 0) if x.ndim else x, batch)
  return objectives.batch(config, batch, t, range(rows), rows)


def trained(run, task, fields, seeds, name='model', begin=None):
  """[(schema.Config, {path: array}, share of its answers' tokens right) of a
  seed], and the CPU-seconds of a training; arguments as of `models`.

  Args:
    name: of the trainings' folders. begin: ({seed: {path: array}}, the fields
      of their training), in place of the first parameters; or None.
  """
  given = {
    'model.vocab_size': task.vocabulary,
    'data.sequence_length': task.length,
    'data.tokenizer': 'bytes',
  }
  config = experiment.fields(run.config, given, fields)
  every = max(config.train.steps // 5, 1)

  first, own = begin or ({}, {})

  def learn(config, folder, say):
    params = first.get(config.train.seed)
    curve = train(config, task, every, folder, say, params)
    return {'right': curve[-1][1]}

  about = vars(task) | ({'begun from': own} if own else {})
  configs = {name: config}
  rows = ablation.trained(run, configs, seeds, learn, about, [type(task)])
  found = []
  for one in rows[name]:
    job = job_lib.of_shapes(config, '', jax.devices()[:1])
    with job.context():
      params = experiment.restored(job, one.folder)
    found.append((config, params, one.record['numbers']['right']))
  return found, ablation.cpu_seconds(rows)


def models(run, task, fields, seeds):
  """[(loop.Generator of a seed, share of its answers' tokens right)], and the
  CPU-seconds of a training.

  Args:
    run: harness.Run. task: as in train/claims/tasks.py. fields:
      {'section.field': value} of the training.
  """
  found, seconds = trained(run, task, fields, seeds)
  made = [
    (generator(config, lambda _, params=params: params), share)
    for config, params, share in found
  ]
  return made, seconds


def _resumed(job, store, say, begin=None):
  """(state, curve) of the newest checkpoint, or of the start."""
  found = store.restore_latest_good(state_lib.flatten(job.state))
  if found is None:
    state = job.initial_state()
    if begin is not None:  # a copy: a step donates its state
      begin = begin | {
        p: x for p, x in state.params.items() if trained_lib.is_added(p)
      }
      assert begin.keys() == state.params.keys()
      state = state._replace(params=jax.tree.map(jnp.copy, begin))
    return state, []
  step, tree, meta = found
  say(f'resumed from step {step}')
  return state_lib.unflatten(job.state, tree), meta['curve']
