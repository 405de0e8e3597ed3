"""Demons in the Detail: experts are balanced over the whole batch

paper: arXiv:2501.11873
mechanism: models/router.py, train/step.py
test: tests/train/test_claims_experts.py
run: paraxis reproduce demons_lbl
expect: tbd
differs: tbd
"""

from paraxis.configs import schema


def get_config():
  """8 experts, top-2, on one device; 8 microbatches of 2 rows, each of which
  nearly always is of one domain."""
  config = schema.default()

  model = config.model
  model.vocab_size = 2048
  model.d_model, model.d_ff = 96, 192
  model.num_layers, model.num_heads = 4, 4
  model.qk_norm = 'head'
  model.embedding_scale = 96**0.5
  model.attention_scale = 3 * 24**-0.5
  model.experts.count, model.experts.top_k = 8, 2
  model.experts.balance = 0.05

  config.data.sequence_length = 128
  config.optimizer.name = 'muon'
  config.train.steps = 300
  config.train.batch_size, config.train.microbatches = 16, 8
  return config
