"""TokenRing: queries travel round the ring, results go straight home

paper: arXiv:2412.20501
mechanism: sharding/context_forms.py, sharding/context.py
test: tests/sharding/test_context.py, tests/train/test_claims_context.py
run: paraxis reproduce token_ring
expect: tbd
differs: tbd
"""

from paraxis.configs import schema

# Of one attention: 8 ranks of 8 tokens, heads of 16 numbers.
SHAPE = dict(ranks=8, tokens=8, heads=8, width=16)


def get_config():
  """A small model on context=8."""
  config = schema.default()
  config.mesh.context = 8
  config.mesh.context_form = 'token_ring'

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
  """What `paraxis reproduce token_ring` checks."""
  equal = dict(check='claims.equals_one_device', mesh='context=8', within=1e-9)
  sent = lambda form: dict(
    check='claims_context.sends_equal_formulas',
    form=form,
    shape=dict(SHAPE, kv_heads=8),
  )
  against = dict(
    check='claims_context.bytes_against_ring',
    form='token_ring',
    shape=SHAPE,
    ratios=[[1, 0.83], [4, 3.26]],
    within=0.01,
  )
  return [
    ('loss and all gradients equal one device', 'EQ', equal, None),
    ('TokenRing by direction', 'HLO', sent('token_ring'), None),
    ('the KV ring by direction', 'HLO', sent('ring'), None),
    ('bytes against the KV ring', 'HLO', against, None),
  ]
