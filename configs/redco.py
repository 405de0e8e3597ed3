"""Redco: tensor parallelism from parameter names and shapes

paper: arXiv:2310.16355
mechanism: sharding/planner/auto_rules.py
test: tests/sharding/planner/test_auto_rules.py,
  tests/train/claims/layouts/test_auto_rules.py
run: paraxis reproduce redco
cost: 40 CPU-seconds
expect: EQ 2e-15 in float64 (bound 1e-9); specs equal the hand-written ones
  except for GPT-2's learned positions; 2 all-reduces forward and 4 a step in a
  layer, as in the hand-written layout; of the 16 rules that split every matrix
  on one side it moves the fewest bytes, the worst 2.17 times as many.
partial: the rules are in claims only; training takes the preset 'tensor', which
  is the layout that they give.
differs: the paper has no such counts (it reports up to 66B parameters without a
  config). A side of two dimensions is split by whole heads; within heads, as
  the letter of the rule says, 1.5 times the bytes. A dimension that does not
  divide is an error, not replicated. Only layers vary among the 16; one layer
  is counted. Small shapes, random tokens. Redco's trainer interface is not
  here.
"""

from paraxis.configs import presets


def get_config():
  """A small llama shape; its layout is the table that Redco's rules give."""
  config = presets.tiny(d_ff=192, num_heads=8, tied_embedding=False)
  config.mesh.update(rules='tensor', tensor=8)
  return config


def claims():
  """What `paraxis reproduce redco` checks."""
  from paraxis.train.claims.layouts import auto_rules

  gemma = dict(
    norm_placement='sandwich', norm_zero_centered=True, mlp='geglu', window=8,
    tied_embedding=True,
  )  # fmt: skip
  families = dict(
    llama={},
    qwen2=dict(attention_bias=True),
    qwen3=dict(qk_norm='head', num_kv_heads=4),
    gemma2=gemma | dict(pattern='WF'),
    gemma3=gemma | dict(pattern='WWWWWF', num_layers=7, qk_norm='head'),
    smollm3=dict(pattern='FFFN', num_layers=5, num_kv_heads=4),
    olmo2=dict(norm_placement='post', qk_norm='all'),
    gpt2=dict(
      position='learned', max_positions=64, norm='layernorm', mlp='gelu',
      mlp_bias=True, attention_bias=True, attention_output_bias=True,
    ),
  )  # fmt: skip
  megatron = dict(
    check=auto_rules.specs_are_megatrons, size=4, families=families
  )
  equal = dict(
    check=auto_rules.specs_equal_one_device, mesh='data=2,tensor=4', within=1e-9
  )
  layers = dict(
    check=auto_rules.reductions_per_layer, size=8, forward=2, step=4
  )
  fewest = dict(check=auto_rules.fewest_bytes, size=8, worst_at_least=1.5)
  return [
    ("specs are Megatron's", 'EQ', megatron, None),
    ('loss, gradients: one device', 'EQ', equal, None),
    ('all-reduces: forward, step', 'HLO', layers, None),
    ('bytes: rank of 16, worst', 'HLO', fewest, None),
  ]


def knockouts():
  """Every matrix split by its outputs: no pair of column and row."""
  from paraxis.train.claims.layouts import auto_rules

  return [
    ('pairs', "specs are Megatron's", auto_rules.columns),
    ('rows', 'all-reduces: forward, step', auto_rules.columns),
    ('column_row', 'bytes: rank of 16, worst', auto_rules.columns),
  ]
