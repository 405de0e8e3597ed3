"""What wrote tests/golden/checkpoints: a state of each kind, as a run saves it.

    PYTHONPATH=tests python tests/golden_checkpoints.py

They are committed, read for ever by tests/sharding/checkpoint/test_golden.py,
and never written again: whatever changes in the format, raise manifest.VERSION,
which names the folder, and run this.
"""

import json
import pathlib
import shutil
import tempfile
import types

FOLDER = pathlib.Path(__file__).resolve().parent / 'golden' / 'checkpoints'
LOSSES = 'losses.json'
STEP = 2
SMALL = {
  'mesh.data': 1, 'mesh.fsdp': 1, 'mesh.tensor': 1, 'model.d_model': 4,
  'model.d_ff': 8, 'model.num_layers': 2, 'model.num_heads': 2,
  'model.vocab_size': 16, 'data.sequence_length': 8, 'train.steps': 4,
}  # fmt: skip
KINDS = {  # what is not as in SMALL
  'dense': {},
  'experts': {
    'model.experts.count': 2, 'model.experts.top_k': 1,
    'model.experts.bias_rate': 0.01,
  },
  'recurrent': {'model.pattern': 'R'},
  'muon': {'optimizer.name': 'muon'},
}  # fmt: skip


def config_of(kind):
  """schema.Config of a kind."""
  from paraxis.configs import schema

  config = schema.default()
  config.update_from_flattened_dict(SMALL | KINDS[kind])
  return schema.view(config)


def built_of(config):
  """(models.build.Built, optimizers.Optimizer) of a config on one device."""
  import jax

  from paraxis.models import build
  from paraxis.train.updates import optimizers

  built = build.build(config, '', devices=jax.devices()[:1])
  steps = config.train.steps
  return built, optimizers.Optimizer(config.optimizer, steps, built.model)


def batch_of():
  """The batch.Batch of all steps: two rows, one of two documents."""
  import numpy as np

  from paraxis.models import batch

  tokens = np.random.default_rng(0).integers(0, 16, (2, 9)).astype(np.int32)
  segments = np.array([[1] * 8, [1] * 3 + [2] * 5], np.int32)
  positions = np.array([[*range(8)], [*range(3), *range(5)]], np.int32)
  weights = np.ones((2, 8), np.float32)
  return batch.Batch(
    tokens[:, :8], tokens[:, 1:], segments, positions, weights, np.float32(16)
  )


def loss_of(built, variables) -> float:
  """The loss of `batch_of` at {path: array} that the model reads."""
  import jax

  from paraxis.models import build
  from paraxis.train import loss

  with build.use(built):
    one = jax.jit(lambda v: loss.next_token(built.model, v, batch_of()))
    return float(one(variables))


def trained(config):
  """({canonical path: array}, its axes, built) after STEP steps."""
  import jax

  from paraxis.models import build
  from paraxis.train import state as state_lib
  from paraxis.train import step as step_lib

  built, optimizer = built_of(config)
  made = step_lib.make(built, optimizer, config.optimizer.clip_norm)
  with build.use(built):
    state = state_lib.init(built.model, optimizer, jax.random.key(1))
    for _ in range(STEP):
      found = jax.jit(made.grads)(state.variables, batch_of())
      state, _ = jax.jit(made.update)(state, *found)
    leaves = state_lib.leaves(state, built.model, optimizer.axes(state.params))
    tree = state_lib.in_order(state_lib.flatten(state), leaves)
    return tree, state_lib.axes(leaves), built


def meta_of(config):
  """Metadata as of a run of the config."""
  from paraxis.train import start

  kept = types.SimpleNamespace(fingerprint='0' * 64)
  job = types.SimpleNamespace(config=config, tokenizer=kept, corpus=kept)
  return start.meta(job, STEP)


def write(kind, folder: pathlib.Path) -> float:
  """Writes a run of one step into `folder` -> the loss of its parameters."""
  import jax

  from paraxis.sharding.checkpoint import store

  config = config_of(kind)
  tree, axes, built = trained(config)
  variables = {
    p.removeprefix('params/'): x
    for p, x in tree.items()
    if p.startswith('params/')
  }
  loss = loss_of(built, variables)
  if kind == 'dense':  # two chunks a leaf, where its last dimension allows
    mesh = jax.make_mesh((2,), ('fsdp',), devices=jax.devices()[:2])
    for path, x in tree.items():
      even = x.ndim and x.shape[-1] % 2 == 0
      spec = jax.P(*(None,) * (x.ndim - 1), 'fsdp') if even else jax.P()
      layout = jax.NamedSharding(mesh, spec)
      tree[path] = jax.device_put(jax.device_get(x), layout)
  else:
    tree = jax.device_put(jax.device_get(tree), jax.devices()[0])
  with store.Store(folder / 'checkpoints') as saved:
    saved.save(STEP, tree, axes, meta_of(config))
  return loss


def main():
  from paraxis.configs.base import command_line
  from paraxis.sharding.checkpoint import manifest

  command_line.prepare_devices(2)
  at = FOLDER / f'format_{manifest.VERSION}'
  if at.exists():
    raise SystemExit(f'{at} is there: goldens are not written again.')
  with tempfile.TemporaryDirectory() as made:
    losses = {kind: write(kind, pathlib.Path(made, kind)) for kind in KINDS}
    shutil.copytree(made, at)
  (at / LOSSES).write_text(json.dumps(losses, indent=2) + '\n')


if __name__ == '__main__':
  main()
