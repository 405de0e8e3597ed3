"""Lines of `paraxis compile` on stages: idle work, repeated forward passes.

pipeline: one_f_one_b, 4 stages, 16 microbatches: idle stages add 18.8% ...
"""

import math

import jax.numpy as jnp

from paraxis.sharding import annotate
from paraxis.sharding.pipeline import tables as schedule_tables
from paraxis.sharding.planner import simulate


def lines(built, config):
  """Lines for people, [] without stages; under the job's mesh and rules.

  Args:
    built: build.Built. config: schema.Config.
  """
  schedule = built.schedule
  if schedule is None:
    return []
  again = config.pipeline.activations == 'recompute'
  # In forward passes: gradients of activations and, in one, of parameters.
  backward = 1 + (schedule.weight is None) + again
  result = simulate.run(schedule, 'lock_step', forward=1, backward=backward)
  chunks = f' in {schedule.chunks} chunks' * (schedule.chunks > 1)
  found = [
    f'pipeline: {schedule.name}, {schedule.stages} stages{chunks}, '
    f'{schedule.microbatches} microbatches: idle stages add '
    f'{result.bubble:.1%} to the layers'
  ]
  train = config.train
  if schedule.weight is not None and (train.remat != 'none' or train.memory):
    name = 'memory' if train.memory else 'remat'
    return [
      *found,
      f'  train.{name}={getattr(train, name)} has no effect: {schedule.name} '
      'keeps all that B and W read',
    ]
  layers = len(built.model.depth.kinds)
  if not (again and layers > 1 and train.remat == 'full' and not train.memory):
    return found  # with one layer, the compiler drops the first forward
  size = layers * _inputs(config, schedule)
  return [
    *found,
    '  train.remat=full runs layers forward again where B has just done so; '
    'pipeline.activations=store keeps',
    f'  their inputs, {size / 2**30:.3f} GiB on a device, and runs them once',
  ]


def copies(config):
  """Rows that go through layers, and through them alone, for each row."""
  if config.train.objective == 'block':
    return 2
  return max(config.model.stream_copies, 1)


def _inputs(config, schedule):
  """Bytes of an input of all chunks in flight on a device."""
  shards = math.prod(map(annotate.shards, ('batch', 'residual_length')))
  tokens = config.microbatch_rows * config.data.sequence_length // shards
  arrays = 2 if config.model.wiring == 'ladder' else 1  # of wiring.py's carry
  tokens *= copies(config) * arrays
  size = tokens * config.model.d_model * jnp.dtype(config.model.dtype).itemsize
  return (schedule_tables.tables(schedule).inputs + 1) * size
