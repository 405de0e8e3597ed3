"""Nothing large of a state is held whole by every chip, unless a rule says so.

Shapes of a model of 70 billion parameters on meshes of 1,024 chips, without
devices: no such array is ever made.
"""

import math

import jax.numpy as jnp
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import optimizer as optimizer_fields
from paraxis.sharding import rules as rules_lib
from paraxis.train import program as program_lib
from paraxis.train import state as state_lib
from paraxis.train.updates import optimizers

MESHES = {
  'data=16,fsdp=8,tensor=8': {'mesh.zero': 1},
  'fsdp=128,tensor=8': {},
  'stage=8,data=16,tensor=8': {'mesh.zero': 2, 'train.microbatches': 4},
}
SMALL = 2**20  # bytes on a chip
UP = 'layers/mlp/up'
LEFT = f'optimizer/left/{UP}'


def _program(mesh, **changes):
  changes = {f'optimizer.{name}': x for name, x in changes.items()}
  config = schema.view(command_line.load('llama_70b'))
  config = schema.with_values(config, MESHES[mesh] | changes)
  return program_lib.on_devices(config, mesh, abstract=True)


def _unlike(program):
  """{path: bytes on a chip} of leaves not laid out as the rules say.

  Also of those above SMALL whose axes nobody named.
  """
  rules, sizes, found = program.built.rules, dict(program.mesh.shape), {}
  for path, leaf in state_lib.flatten(program.state).items():
    stage = math.inf if path.startswith('params/') else rules_lib.OPTIMIZER
    names = program.leaves[path].axes
    spec = rules_lib.stored(names, leaf.shape, rules, sizes, stage)
    shard = leaf.sharding.shard_shape(leaf.shape)
    held = math.prod(shard) * leaf.dtype.itemsize
    own = leaf.sharding.spec
    own = (*own, *[None] * (leaf.ndim - len(own)))
    if own != tuple(spec) or (held > SMALL and not any(names)):
      found[path] = held
  return found


@pytest.mark.parametrize('name', optimizer_fields.NAMES)
@pytest.mark.parametrize('mesh', MESHES)
def test_a_state_is_laid_out_as_the_rules_say(mesh, name):
  schedule = {}
  if name == 'schedule_free':  # ZeRO is refused
    mesh, schedule = 'fsdp=128,tensor=8', {'schedule': 'constant'}
  program = _program(mesh, name=name, ema_decay=0.999, **schedule)
  flat = state_lib.flatten(program.state)
  assert f'ema/{UP}' in flat and not _unlike(program)
  x = flat[f'ema/{UP}']
  assert x.size == 1024 * math.prod(x.sharding.shard_shape(x.shape))


def test_a_state_without_zero_is_seen(monkeypatch):
  monkeypatch.setattr(optimizers.Optimizer, '_stored', lambda self, tree: tree)
  found = _unlike(_program('data=16,fsdp=8,tensor=8', ema_decay=0.9))
  assert {f'ema/{UP}', f'optimizer/adamw/mu/{UP}'} < set(found)
  assert found[f'ema/{UP}'] > 16 * SMALL


@pytest.mark.parametrize(
  'axes', [('layers', 'embed', None), (None, None, None), None]
)
def test_a_preconditioner_on_every_chip_is_seen(monkeypatch, axes):
  """(layers, in, in) made without a layout: with axes, without, or unsaid."""
  right = optimizers.Optimizer.init

  def init(self, params):
    layers, width, _ = params[UP].shape
    square = jnp.zeros((layers, width, width))
    return right(self, params) | {'left': {UP: square}}

  monkeypatch.setattr(optimizers.Optimizer, 'init', init)
  program = _program('data=16,fsdp=8,tensor=8')
  if axes is not None:
    own = lambda params: {LEFT: axes}
    monkeypatch.setattr(program.optimizer, 'axes', own)
  else:
    with pytest.raises(ValueError, match=f'{LEFT} .* mirrors no parameter'):
      _unlike(program)
    return
  assert _unlike(program) == {LEFT: 80 * 8192**2 * 4}
