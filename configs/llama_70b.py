"""Llama 3 70B: the shape of a 70.6B-parameter decoder

paper: none
mechanism: train/certify/check.py, sharding/meter/predict.py
test: tests/train/certify/test_check.py, tests/sharding/meter/test_predict.py
run: paraxis reproduce llama_70b
expect: EQ 70,553,706,496 parameters, as published; 2 CPU-seconds. Without a
  device: paraxis check --config=llama_70b --mesh=data=64,fsdp=8,tensor=8
differs: a shape, not a recipe (arXiv:2407.21783 has one): check and compile
  read no text. To train it, name text, and a tokenizer of at most 128,256
  tokens.
"""

from paraxis.configs import schema


def get_config():
  """Batch 1,024 x 4,096 on data=64,fsdp=8,tensor=8: 4,096 devices."""
  config = schema.default()
  config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 64, 8, 8

  model = config.model
  model.vocab_size = 128256
  model.d_model = 8192
  model.num_layers = 80
  model.num_heads = 64
  model.num_kv_heads = 8
  model.d_ff = 28672
  model.norm_epsilon = 1e-5
  model.rope_theta = 5e5
  model.tied_embedding = False
  model.dtype = 'bfloat16'
  model.attention_block = 512

  config.data.sequence_length = 4096
  config.optimizer.learning_rate = 1.5e-4
  config.optimizer.warmup_steps = 2000
  config.optimizer.final_fraction = 0.1
  config.train.batch_size = 1024
  config.train.steps = 500_000
  config.train.remat = 'full'
  return config


def claims():
  """What `paraxis reproduce llama_70b` checks."""
  from paraxis.train.claims.layouts import check

  count = dict(check=check.parameters, expected=70_553_706_496)
  return [('parameters as published', 'EQ', count, 70_553_706_496)]
