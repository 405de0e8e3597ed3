"""Ring Self-Attention: sequence parallelism that keeps whole rows of scores

paper: arXiv:2105.13120
mechanism: sharding/context_forms.py, sharding/context.py
test: tests/sharding/test_context.py, tests/train/test_claims_context.py
run: paraxis reproduce ring_self_attention
expect: tbd
differs: tbd
"""

from paraxis.configs import schema

# BERT-Base, its vocabulary padded to a multiple of 64 and of 12.
BERT = dict(
  vocab_size=30528, d_model=768, num_layers=12, num_heads=12, d_ff=3072,
  num_kv_heads=0, mlp='gelu', norm='layernorm', position='learned',
  attention_bias=True, attention_output_bias=True, mlp_bias=True,
)  # fmt: skip
CONTEXT = dict(context=64, context_order='contiguous')
RSA = dict(topology='v5e:8x8', mesh=dict(CONTEXT, context_form='rsa'))
RING = dict(topology='v5e:8x8', mesh=dict(CONTEXT, context_form='ring'))
# 12 heads: no more than 12 shards. As in 2021, residuals are not sharded.
TENSOR = dict(topology='v5e:2x6', mesh=dict(tensor=12, sequence=False))
BOTH = dict(topology='v5e:8x8', mesh=dict(data=16, tensor=4, sequence=False))


def get_config():
  """A small model on context=8."""
  config = schema.default()
  config.mesh.context = 8
  config.mesh.context_form = 'rsa'

  config.model.vocab_size = 264  # bytes, and room to divide by 8
  config.model.d_model = 64
  config.model.num_layers = 2
  config.model.num_heads = 4
  config.model.num_kv_heads = 2
  config.model.d_ff = 128

  config.data.tokenizer = 'bytes'
  config.data.sequence_length = 64
  config.train.batch_size = 4
  return config


def claims():
  """What `paraxis reproduce ring_self_attention` checks."""
  equal = dict(check='claims.equals_one_device', mesh='context=8', within=1e-9)
  sent = dict(
    check='claims_context.sends_equal_formulas',
    form='rsa',
    shape=dict(ranks=8, tokens=8, heads=8, kv_heads=8, width=16),
  )
  most = dict(check='claims_context.most_that_fits', model=BERT, close=0.02)
  batch = dict(
    most, vary='rows', given=512, start=64, at_least=2,
    layouts={'rsa': RSA, 'tensor': TENSOR, 'data x tensor': BOTH},
  )  # fmt: skip
  length = dict(
    most, vary='tokens', given=64, start=512, at_least=2,
    layouts={'rsa': RSA, 'tensor': TENSOR, 'ring': RING},
  )  # fmt: skip
  return [
    ('loss and all gradients equal one device', 'EQ', equal, None),
    ('permutes and bytes', 'HLO', sent, None),
    ('largest batch against tensor parallelism', 'AOT', batch, '13.7x'),
    ('longest rows against tensor parallelism', 'AOT', length, '3.0x'),
  ]
