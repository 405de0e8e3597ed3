"""MoE Parallel Folding: experts over whatever devices attention leaves

paper: arXiv:2504.14960
mechanism: sharding/expert.py, models/moe.py, sharding/rules.py
test: tests/train/test_claims_experts.py
run: paraxis reproduce moe_parallel_folding
expect: tbd
differs: tbd
"""

from paraxis.configs import schema


def get_config():
  """A small model on data=2,context=2,tensor=2, its 8 experts on all."""
  config = schema.default()
  config.mesh.data = config.mesh.context = config.mesh.tensor = 2

  model = config.model
  model.vocab_size = 264
  model.d_model, model.d_ff = 64, 128
  model.num_layers, model.num_heads = 2, 4
  model.experts.count, model.experts.top_k = 8, 2
  model.experts.region = 'data+context+tensor'

  config.data.tokenizer = 'bytes'
  config.data.sequence_length = 64
  config.train.batch_size = 8
  return config
