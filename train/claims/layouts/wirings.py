"""Claims about how layers are joined (models/wiring.py).

EQ: settings at which one wiring is another. The sums of a ladder over tensor
shards, in the program of a forward pass whose layers are unrolled: HLO: which
products no sum holds up, by data dependence; AOT: which of them a TPU's
schedule puts between the start and the end of a sum, with `FLAGS`: sums are
asynchronous, and none is joined with the next one, for which it would wait.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.models import decoder
from paraxis.models import wiring as wiring_lib
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import hlo
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts

FLAGS = {
  'xla_enable_async_all_reduce': 'true',
  'xla_tpu_enable_async_collective_fusion_fuse_all_reduce': 'true',
  'xla_jf_crs_combiner_threshold_in_bytes': '0',
}
_APART = {
  'xla_disable_hlo_passes': 'all-reduce-combiner,cpu-all-reduce-combiner'
}


def forgets():
  """Knock-out: what a part of a ladder gave is lost once the next one gives.

  Tokens then see no other token: on bytes of the shipped text 3.74 bits per
  byte are the least, the entropy of a held-out byte given the one before it.
  """
  real = wiring_lib.add

  def add(carry, y_BTD):
    if isinstance(carry, wiring_lib.Ladder):
      return wiring_lib.Ladder(carry.x, y_BTD)
    return real(carry, y_BTD)

  return knockouts.patched(wiring_lib, 'add', add)


def _forward(config, devices):
  """(jax.stages.Traced of the loss, program.Program); layers unrolled."""
  unrolled = {'model.unroll': config.model.num_layers}
  job = job_lib.of_shapes(experiment.fields(config, unrolled), '', devices)
  with job.context():
    step = step_lib.make(job.built, job.optimizer, 0.0)
    run = jax.jit(step.evaluate)
    return run.trace(job.state.variables, job.batch_shapes()), job


def _sums(found):
  """How many products are beside each sum of a part of a layer."""
  return [
    len(o.products)
    for o in found
    if o.kind == 'all-reduce' and '/layer_' in o.where
  ]


def independent(run, *, mesh):
  """HLO: every sum has products that it neither waits for nor holds up.

  In a ladder those of the next part, for the last sum of the part before; in
  the same layers as a standard row there are none.
  """
  found = []
  for wiring in (run.config.model.wiring, 'standard'):
    changes = {'model.wiring': wiring, 'mesh.sequence': False}
    traced, job = _forward(*experiment.on(run.config, mesh, changes))
    options: Any = (trial.quick_options() or {}) | _APART
    with job.context():
      text = traced.lower().compile(options).as_text()
    found.append(_sums(hlo.independent(text or '')))
  ours, plain = (sum(n > 0 for n in row) for row in found)
  sums = 2 * run.config.model.num_layers
  return claims.Outcome(
    f'{sums} of {sums} sums, standard 0',
    f'{ours} of {len(found[0])}, standard {plain}',
    f'{mesh}, forward pass, products that neither wait for a sum nor hold it '
    'up',
    [ours, plain, *map(len, found)] == [sums, 0, sums, sums],
  )


def overlapped(run, *, topology, mesh, changes):
  """AOT: in a TPU's schedule most sums have products under way, in the ladder;
  none has in the same layers as a standard row.

  Args:
    changes: {'section.field': value}: sizes of which a sum takes its time.
  """
  target, found = aot.topology(topology), []
  for wiring in (run.config.model.wiring, 'standard'):
    more = {'model.wiring': wiring, 'mesh.sequence': False}
    config = experiment.laid_out(run.config, mesh, changes, more)
    with target.context():
      traced, job = _forward(config, target.devices)
    with job.context():
      program = aot.compile_for(target, 'forward', traced, FLAGS)
    found.append(_sums(hlo.overlapped(program.as_text() or '')))
  (ours, plain), most = found, 2 * config.model.num_layers
  under_way = lambda row: sum(n > 0 for n in row)
  return claims.Outcome(
    f'more than half of {most} sums, standard 0',
    f'{under_way(ours)} of {len(ours)}, standard {under_way(plain)}',
    f'{topology}, {mesh}, width {config.model.d_model}; products between start '
    f'and end of a sum; {", ".join(FLAGS)}; the schedule, no time measured',
    2 * under_way(ours) > most >= len(ours) and not under_way(plain),
  )


def equals(run, *, one, other, within):
  """EQ: features and every gradient are equal in two cases.

  Args:
    one, other: {'section.field': value}; both are given one and the same
      parameters.
  """
  wide = {'model.dtype': 'float64', 'model.param_dtype': 'float64'}
  made = [
    decoder.Decoder(experiment.fields(run.config, wide, case).model)
    for case in (one, other)
  ]
  rows = experiment.documents(2, 16, run.config.model.vocab_size)
  with jax.enable_x64(True):
    params = {}
    for model in made:
      params |= experiment.random_parameters(model)
    found, wanted = (_gradients(model, params, rows) for model in made)
  gaps = list(map(experiment.gap, found, wanted))
  return experiment.equal(gaps, within, 'float64, features and all gradients')


def alike(run, *, streams, apart, within):
  """EQ: streams with equal prefixes are one, whatever their number and whatever
  mixes them: features, and gradients of what all streams share.

  Args:
    streams: two numbers of streams. apart: prefixes are drawn, one each.
  """
  wide = {'model.dtype': 'float64', 'model.param_dtype': 'float64'}
  rows = experiment.documents(2, 16, run.config.model.vocab_size)
  found, first = [], {}
  with jax.enable_x64(True):
    for count in streams:
      config = experiment.fields(run.config, wide, {'model.streams': count})
      made = decoder.Decoder(config.model)
      params = experiment.random_parameters(made)
      own = [p for p in params if 'prefix' in p or 'mix_' in p]
      first = first or params
      params |= {p: x for p, x in first.items() if p not in own}
      if not apart:
        for path in (p for p in own if 'prefix' in p):
          one = first[path][:, :1]
          params[path] = jnp.broadcast_to(one, params[path].shape)
      shared = sorted(params.keys() - set(own))
      found.append(_gradients(made, params, rows, shared))
  gaps = [experiment.gap(a, b) for a, b in zip(*found, strict=True)]
  text = f'float64, features and gradients, {streams[0]} and {streams[1]} '
  text += 'streams, other weights to mix them'
  return experiment.equal(gaps, within, text)


def _gradients(made, params, rows, of=None):
  """[features, gradients of parameters, None: all] of a weighted sum of
  features."""

  def loss(params):
    x_BTD, _ = made.features(params, rows)
    weight = jnp.cos(jnp.arange(x_BTD.size)).reshape(x_BTD.shape)
    return (x_BTD * weight).sum(), x_BTD

  run = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, x_BTD), gradients = run(params)
  flat = [np.ravel(gradients[p]) for p in of or sorted(gradients)]
  return [x_BTD, np.concatenate(flat)]
