"""The shipped config for tuning: what its docstring and README promise."""

from paraxis.configs import schema
from paraxis.configs.base import command_line


def test_finetune_is_what_pretrained_weights_are_tuned_with():
  config = schema.view(command_line.load('finetune'))
  data, optimizer, train = config.data, config.optimizer, config.train
  assert (optimizer.name, optimizer.learning_rate) == ('adamw', 2e-5)
  assert optimizer.warmup_steps == 0.03 * train.steps
  assert optimizer.weight_decay == 0
  assert (data.sequence_length, data.packing) == (1024, 'first_fit')
  assert config.checkpoint.every == 500 < train.steps
  assert config.mesh == schema.Mesh()  # --mesh= is free
