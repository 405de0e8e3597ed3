"""Claims about the layouts of a step: messages counted, numbers equal.

Messages are those of the compiled gradient and update (sharding/meter/hlo.py),
in bytes that one device receives. ZeRO's volumes (arXiv:1910.02054, section 7)
are in units of w Psi (N - 1) / N: Psi parameters of w bytes on N devices, each
sent once to the device that needs it. Tensor parallel messages are counted per
layer, as the difference of two depths, with the forward and the backward pass
as separate programs: in one, XLA would merge equal messages.

Legend: B rows, T tokens, D model, V vocabulary.
"""

import collections
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.sharding import annotate
from paraxis.sharding.tensor import product_layouts as layouts
from paraxis.sharding.tensor import worlds
from paraxis.train import loss as loss_lib
from paraxis.train import program as job_lib
from paraxis.train.certify import target_compile
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.steps import gradients

EXPLICIT = {'mesh.collectives': 'explicit'}


def gathered_logits():
  """Knock-out: every device gets the logits of the whole vocabulary."""

  def nll(z_BTV, targets_BT):
    names = 'batch', 'length', 'vocab'
    z = annotate.move(z_BTV, names, (*names[:2], None))
    picked = jnp.take_along_axis(z, targets_BT[..., None], -1)[..., 0]
    return jax.nn.logsumexp(z, -1) - picked

  return knockouts.patched(loss_lib, 'negative_log_likelihood', nll)


def own_gradients():
  """Knock-out: where ZeRO scatters a gradient, no sum over data is made: a
  device keeps its part of what it has itself."""

  def scatter(gradient, before, after):
    n, at = jax.lax.axis_size('data'), jax.lax.axis_index('data')
    for dim, (old, new) in enumerate(zip(before, after, strict=True)):
      size = gradient.shape[dim] // n
      if new != old:
        gradient = jax.lax.dynamic_slice_in_dim(gradient, at * size, size, dim)
    return gradient

  return knockouts.patched(gradients, '_scatter', scatter)


def reduced_then_cut():
  """Knock-out: no reduce-scatter; the whole sum is made, and cut."""

  def reduce(self, y, split, axes, summed=(), what=''):
    del self, summed, what
    for i, extra in layouts.extra(axes, split):
      n, at = jax.lax.axis_size(extra), jax.lax.axis_index(extra)
      size = y.shape[i] // n
      y = jax.lax.psum(y, extra)
      y = jax.lax.dynamic_slice_in_dim(y, at * size, size, i)
    return y

  return knockouts.patched(worlds.Manual, 'reduce', reduce)


def zero_volume(run, *, mesh, volumes, within):
  """HLO: bytes of a step at ZeRO stages 0 to 3, each in the unit above."""
  found = {1: [], 2: []}
  for microbatches, stage in itertools.product(found, range(len(volumes))):
    config, devices = experiment.on(
      run.config,
      mesh,
      EXPLICIT | {'mesh.zero': stage, 'train.microbatches': microbatches},
    )
    params = experiment.step_program(config, devices)[1].state.params
    received = sum(
      c.total
      for name in target_compile.PROGRAMS
      for c in experiment.step_collectives(config, devices, name)
    )
    n = len(devices)
    size = sum(math.prod(p.shape) * p.dtype.itemsize for p in params.values())
    found[microbatches].append(received / size * n / (n - 1))
  whole = [p for p, x in params.items() if not any(x.sharding.spec)]
  return experiment.near(
    found[1],
    volumes,
    within,
    f'{mesh}, gradient and update, in parameters; at stage 3 the tables, which '
    'no loop gathers again, and what stays whole ('
    f'{", ".join(whole)}) move 2. With two microbatches '
    f'{experiment.numbers(found[2], ".2f")}: stage 2 scatters, stage 3 gathers '
    'and scatters, for each',
  )


def zero_trajectories(run, *, mesh, stages, steps, within):
  """EQ: parameters after some steps of ZeRO equal those of one device.

  Args:
    stages: of ZeRO.
    steps: updates, each from own gradients of the stage, in 2 microbatches.
    within: of what the steps changed, relative to the largest change of a leaf.
  """
  config, devices = experiment.shrunk(
    run.config, mesh, EXPLICIT | {'train.microbatches': 2}
  )
  worst = {}
  seeds = range(math.ceil(steps / trial.STEPS))
  batches = [b for seed in seeds for b in trial.batches(config, True, seed)]
  with jax.enable_x64(True):
    one = dataclasses.replace(config, mesh=schema.Mesh())
    start = trial.reference(config, True, devices[0]).params

    def moved(side):
      after = jax.device_get(side.steps(start, batches[:steps]).params)
      return {path: x - start[path] for path, x in after.items()}

    wanted = moved(trial.Runner(one, devices[:1]))
    for stage in stages:
      zero = experiment.fields(config, {'mesh.zero': stage})
      found = moved(trial.Runner(zero, devices))
      worst[f'stage {stage}:'] = trial.worst(found, wanted)[0]
  least = min(float(np.abs(x).max()) for x in wanted.values())
  return experiment.equal(
    worst,
    within,
    f'{mesh}, float64, shrunk: how far {steps} steps of '
    f'{config.optimizer.name} moved parameters (every leaf by {least:.0e} or '
    f'more), {experiment.listed(worst)}',
  )


def _passes(built, batch):
  """Two functions: (params, batch) -> (loss, saved); (saved, g) -> gradients.

  Of all parameters but the embedding table: jax cannot yet differentiate its
  lookup in one program and transpose it in another.
  """

  def forward(params, batch):
    others = {p: x for p, x in params.items() if p != 'embedding'}
    of = lambda others: loss_lib.next_token(built.model, params | others, batch)
    return jax.vjp(of, others)

  backward = lambda saved, g: saved(g)[0]
  if built.choices.collectives != 'explicit':
    return forward, backward
  # What is saved differs from device to device: it travels as rows.
  rows = jax.P(built.mesh.axis_names)
  own = {p: x.sharding.spec for p, x in built.params.items()}
  laid_out = jax.tree.map(lambda x: x.sharding.spec, batch)

  def forward_rows(params, batch):
    loss, saved = forward(params, batch)
    return loss, jax.tree.map(lambda x: x[None], saved)

  def backward_rows(saved, g):
    return backward(jax.tree.map(lambda x: x[0], saved), g)

  region = functools.partial(jax.shard_map, check_vma=False)
  others = {p: s for p, s in own.items() if p != 'embedding'}
  return (
    region(forward_rows, in_specs=(own, laid_out), out_specs=(jax.P(), rows)),
    region(backward_rows, in_specs=(rows, jax.P()), out_specs=others),
  )


def _pass_messages(config, devices):
  """[[hlo.Collective] of the forward pass, of the backward pass]."""
  side = trial.Runner(config, devices)
  job = side.job
  with job.context():
    batch = side.put(trial.batches(config, False)[0])
    forward, backward = _passes(job.built, batch)
    first = jax.jit(forward).trace(job.built.params, batch)
    loss, saved = job_lib.with_layouts(job.mesh, first.out_info)
    second = jax.jit(backward).trace(saved, loss)
    return [experiment.collectives(t, job.mesh) for t in (first, second)]


@functools.lru_cache(maxsize=4)
def _per_layer(config, devices):
  """Of the forward and the backward pass: {(kind, operand bytes): count}."""
  tally = []
  for layers in (3, 2):  # loops: XLA would unroll one layer
    row = []
    deep = experiment.fields(config, {'model.num_layers': layers})
    for sent in _pass_messages(deep, devices):
      count = collections.Counter()
      for c in sent:
        count[c.kind, c.operand_bytes, c.bytes] += c.count
      row.append(count)
    tally.append(row)
  return [more - fewer for more, fewer in zip(*tally, strict=True)]


def _tensor_parallel(config, mesh, sequence):
  """(config, devices): all-reduces, or our gathers and scatters."""
  how = 'explicit' if sequence else 'annotated'
  return experiment.on(config, mesh, _layout(sequence, how))


def _layout(sequence, collectives):
  return {'mesh.sequence': sequence, 'mesh.collectives': collectives}


def _activation(config):
  """Bytes of one whole activation (B, T, D)."""
  rows = config.train.batch_size // config.train.microbatches
  wide = np.dtype(config.model.dtype).itemsize
  return rows * config.data.sequence_length * config.model.d_model * wide


def messages_per_layer(run, *, mesh, sequence, forward, backward):
  """HLO: collectives of a layer in each pass, and nothing besides.

  Args:
    sequence: whether residuals are sharded over `tensor` (mesh.sequence).
    forward, backward: {kind: count}; each moves one activation (B, T, D).
  """
  config, devices = _tensor_parallel(run.config, mesh, sequence)
  found, expected = _per_layer(config, devices), (forward, backward)
  whole, right, tallies = _activation(config), True, []
  for count, wanted in zip(found, expected, strict=True):
    kinds = collections.Counter()
    for (kind, held, _), times in count.items():
      # Before a gather each device holds its share.
      right &= held * (len(devices) if kind == 'all-gather' else 1) == whole
      kinds[kind] += times
    right &= dict(kinds) == wanted
    tallies.append(kinds)
  say = lambda rows: ' | '.join(
    ', '.join(f'{n} {kind}' for kind, n in sorted(row.items())) for row in rows
  )
  moved = [_received(row) / whole for row in found]
  n = len(devices)
  return claims.Outcome(
    say(expected),
    say(tallies),
    f'{mesh}, forward | backward, each of {whole:,} bytes (B T D); received '
    f'per device {moved[0]:.3g} + {moved[1]:.3g} of that; 8 (t - 1) / t is '
    f'{8 * (n - 1) / n:.3g}',
    right,
  )


def _received(count):
  return sum(size * times for (*_, size), times in count.items())


def sequence_volume(run, *, mesh, forward, backward):
  """HLO: bytes of a layer, residuals sharded by the sequence over whole."""
  scattered, reduced = (
    [_received(c) for c in _per_layer(*_tensor_parallel(run.config, mesh, s))]
    for s in (True, False)
  )
  ratios = [a / b for a, b in zip(scattered, reduced, strict=True)]
  return claims.Outcome(
    experiment.numbers((forward, backward), 'g'),
    experiment.numbers(ratios, 'g'),
    f'{mesh}, forward and backward; inputs of both sublayers are kept as '
    'shards and gathered again in the backward pass, two gathers more (the '
    'paper overlaps them with a product). Gradients of norms, 2 D numbers a '
    'layer, are summed at the end of the step and not in here',
    ratios == [forward, backward],
  )


def logits_stay(run, *, mesh):
  """HLO: collectives of the gradient are smaller than a shard of the logits."""
  config, devices = experiment.on(run.config, mesh)
  whole = _activation(config) * config.model.vocab_size // config.model.d_model
  shard, most = whole // config.mesh.tensor, {}
  ways = (False, 'annotated'), (True, 'annotated'), (True, 'explicit')
  for sequence, how in ways:
    layout = experiment.fields(config, _layout(sequence, how))
    sent = experiment.step_collectives(layout, devices)
    largest = max(c.result_bytes for c in sent)
    most[f'{how}{", sequence" * sequence}'] = largest
  return claims.Outcome(
    f'< {shard:,} bytes',
    f'{max(most.values()):,} bytes',
    f'{mesh}; all logits are {whole:,} bytes, one activation (B T D) '
    f'{_activation(config):,}; largest message of '
    + '; '.join(f'{name}: {size:,}' for name, size in most.items()),
    max(most.values()) < shard,
  )
