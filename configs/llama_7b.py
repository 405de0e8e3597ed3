"""Llama 2 7B: the shape of a 6.74B-parameter decoder

paper: none
mechanism: train/certify/check.py, sharding/meter/predict.py
test: tests/train/certify/test_check.py, tests/sharding/meter/test_predict.py
run: paraxis reproduce llama_7b
expect: EQ 6,738,415,616 parameters, as published; 2 CPU-seconds. Without a
  device: paraxis check --config=llama_7b --mesh=data=16,fsdp=8,tensor=4
differs: a shape, not a recipe (arXiv:2307.09288 has one): check and compile
  read no text. To train it, name text, and a tokenizer of at most 32,000
  tokens.
"""

from paraxis.configs import schema


def get_config():
  """Batch 1,024 x 4,096 on data=16,fsdp=8,tensor=4: 512 devices."""
  config = schema.default()
  config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 16, 8, 4

  model = config.model
  model.vocab_size = 32000
  model.d_model = 4096
  model.num_layers = 32
  model.num_heads = 32
  model.d_ff = 11008
  model.norm_epsilon = 1e-5
  model.rope_theta = 1e4
  model.tied_embedding = False
  model.dtype = 'bfloat16'
  model.attention_block = 512

  config.data.sequence_length = 4096
  config.optimizer.learning_rate = 3e-4
  config.optimizer.warmup_steps = 2000
  config.optimizer.final_fraction = 0.1
  config.train.batch_size = 1024
  config.train.steps = 500_000
  config.train.remat = 'full'
  return config


def claims():
  """What `paraxis reproduce llama_7b` checks."""
  from paraxis.train.claims.layouts import check

  count = dict(check=check.parameters, expected=6_738_415_616)
  return [('parameters as published', 'EQ', count, 6_738_415_616)]
