"""Claims about rules that read whole matrices: a mesh shares them out."""

import functools

import jax
import jax.numpy as jnp

from paraxis.sharding import annotate
from paraxis.sharding.meter import flops
from paraxis.train import program as program_lib
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.updates import matrices


def _of_update(config, mesh):
  """flops.Flops of one update of a schema.Config on a mesh; nothing runs."""
  config, devices = experiment.on(config, mesh)
  program = program_lib.on_devices(config, devices=devices)
  state = program.state
  with program.context():
    update = functools.partial(program.optimizer.update, step=jnp.int32(0))
    return flops.count(update, state.params, state.optimizer, state.params)


def shared_out(run, *, rules, meshes, fields, at_most):
  """SIM: a device's products in an update, over those of one device alone.

  Args:
    rules: names of optimizer.name. fields: {'section.field': value} of the
    config. at_most: times 1 / devices; above 1 for
      matrices that the devices do not divide.
  """
  found = {}
  for name in rules:
    config = experiment.fields(run.config, fields, {'optimizer.name': name})
    alone = _of_update(config, 'data=1').per_device
    for mesh in meshes:
      n = len(experiment.on(config, mesh)[1])
      share = _of_update(config, mesh).per_device / alone
      found[f'{name}, {mesh}'] = share * n
  each = ', '.join(f'{name} {x:.2f}' for name, x in found.items())
  return claims.Outcome(
    f'<= {at_most:.2f} of an equal share',
    f'{max(found.values()):.2f}',
    f'{each}; products counted in the traced update, eigenvectors and QR are '
    'in none of them but in the same region',
    max(found.values()) <= at_most,
  )


def on_shards():
  """Knock-out: every device takes its shard of a matrix for the matrix.

  By rules that keep nothing of another shape, as Muon.
  """
  right = matrices.run

  def run(rule, dims, arrays, like, whole=()):
    # Statistics of SOAP and Kron are of other shapes for a shard.
    shapes = {p: x.shape for p, x in arrays['gradient'].items()}
    alike = all(
      x.shape == shapes[p] for t in like.values() for p, x in t.items()
    )
    if annotate.mode() != 'explicit' or not annotate.sizes() or not alike:
      return right(rule, dims, arrays, like, whole)
    spec = lambda x: jax.typeof(x).sharding.spec
    specs = jax.tree.map(spec, (arrays, whole))
    back = {
      n: {p: spec(x) for p, x in tree.items()} for n, tree in like.items()
    }
    here = lambda name, found: found.get(name, found['gradient'])

    def local(arrays, whole):
      own = {name: here(name, arrays) for name in like}
      return right(rule, dims, arrays, own, whole)

    return jax.shard_map(
      local, in_specs=specs, out_specs=back, check_vma=False
    )(arrays, whole)

  return knockouts.patched(matrices, 'run', run)


def repeated():
  """Knock-out: every device does the work of all."""
  return knockouts.patched(matrices, 'devices', lambda: ())
