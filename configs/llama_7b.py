"""Llama 2 7B: the shape of a 6.74B-parameter decoder

paper: none
mechanism: train/certify/check.py, sharding/meter/predict.py
test: tests/train/certify/test_check.py, tests/sharding/meter/test_predict.py
run: paraxis reproduce llama_7b
cost: 2 CPU-seconds
expect: EQ 6,738,415,616 parameters, as published. Without a device: paraxis
  check --config=llama_7b --mesh=data=16,fsdp=8,tensor=4
differs: a shape, not a recipe (arXiv:2307.09288 has one): check and compile
  read no text. To train it, name text, and a tokenizer of at most 32,000
  tokens.
"""

from paraxis.configs import presets


def get_config():
  """Batch 1,024 x 4,096 on data=16,fsdp=8,tensor=4: 512 devices."""
  config = presets.llama(vocab_size=32000)
  config.model.update(d_model=4096, d_ff=11008, num_layers=32, num_heads=32)
  config.mesh.update(data=16, fsdp=8, tensor=4)
  config.optimizer.learning_rate = 3e-4
  return config


def claims():
  """What `paraxis reproduce llama_7b` checks."""
  from paraxis.train.claims.layouts import check

  count = dict(check=check.parameters, expected=6_738_415_616)
  return [('parameters as published', 'EQ', count, 6_738_415_616)]


def knockouts():
  """A layer fewer than was published."""
  fewer = {'model.num_layers': 31}
  return [('a_layer_less', 'parameters as published', fewer)]
