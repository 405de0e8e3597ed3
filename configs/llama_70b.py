"""Llama 3 70B: the shape of a 70.6B-parameter decoder

paper: none
mechanism: train/certify/check.py, sharding/meter/predict.py
test: tests/train/certify/test_check.py, tests/sharding/meter/test_predict.py
run: paraxis reproduce llama_70b
cost: 2 CPU-seconds
expect: EQ 70,553,706,496 parameters, as published. Without a device: paraxis
  check --config=llama_70b --mesh=data=64,fsdp=8,tensor=8
differs: a shape, not a recipe (arXiv:2407.21783 has one): check and compile
  read no text. To train it, name text, and a tokenizer of at most 128,256
  tokens.
"""

from paraxis.configs import presets


def get_config():
  """Batch 1,024 x 4,096 on data=64,fsdp=8,tensor=8: 4,096 devices."""
  config = presets.llama(vocab_size=128256, rope_theta=5e5)
  config.model.update(d_model=8192, d_ff=28672, num_layers=80)
  config.model.update(num_heads=64, num_kv_heads=8)
  config.mesh.update(data=64, fsdp=8, tensor=8)
  config.optimizer.learning_rate = 1.5e-4
  return config


def claims():
  """What `paraxis reproduce llama_70b` checks."""
  from paraxis.train.claims.layouts import check

  count = dict(check=check.parameters, expected=70_553_706_496)
  return [('parameters as published', 'EQ', count, 70_553_706_496)]


def knockouts():
  """A layer fewer than was published."""
  fewer = {'model.num_layers': 79}
  return [('a_layer_less', 'parameters as published', fewer)]
