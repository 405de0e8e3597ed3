"""Redco: tensor parallelism without named axes

paper: arXiv:2310.16355
mechanism: sharding/planner/auto_rules.py, sharding/planner/program_axes.py
test: tests/sharding/planner/test_auto_rules.py,
  tests/sharding/planner/test_program_axes.py,
  tests/train/claims/layouts/test_auto_rules.py
run: paraxis reproduce redco
cost: 120 CPU-seconds
expect: by names, EQ 2e-15 in float64 (bound 1e-9); specs equal the hand-written
  ones except for GPT-2's learned positions; 2 all-reduces forward and 4 a step
  in a layer, as in the hand-written layout; of the 16 rules that split every
  matrix on one side it moves the fewest bytes, the worst 2.17 times as many. By
  the program, for every mixer and experts, all 215 matrices but the learned
  positions are split as by hand, so the step is the same program; EQ 2e-13 on 4
  devices, with fsdp and stages, too. By names and the alphabet 55 differ.
partial: the paper's own rules, by names and turns in the alphabet, are in
  claims only: mesh.rules=auto, which trains, reads which matrix feeds which
  from the program.
differs: the paper has no such counts (it reports up to 66B parameters without a
  config). Its rules speak of attention, mlp and embeddings, and of others by
  turns in the alphabet. Learned positions are split by rows, as Redco's
  embeddings: up to 10% more bytes in a step of two layers of width 64. A side
  of two dimensions is split by whole heads; within heads, as the letter of the
  rule says, 1.5 times the bytes. A dimension that does not divide is an error,
  not replicated (fewer heads of keys than shards are whole); so is a layout
  that no layer computes. fsdp carries rows only. Only layers vary among the 16;
  one layer is counted. Small shapes, random tokens. Redco's trainer interface
  is not here.
"""

from paraxis.configs import presets


def get_config():
  """A small llama shape; its layout is what the rules find in its program."""
  config = presets.tiny(d_ff=192, num_heads=8, tied_embedding=False)
  config.model.mamba.head_dim = 16
  config.model.recurrent.heads = 8
  config.model.window = config.model.attention_chunk = 8  # of kinds W and K
  config.mesh.update(rules='auto', tensor=8)
  return config


_EXPERTS = {
  'experts': dict(count=8, d_ff=32),
  'shared': dict(count=8, d_ff=32, shared=1, shared_gate=True),
  'residual': dict(count=8, d_ff=32, residual=True, pattern='EP'),
}


# Every mixer, and experts: {name: fields of the model}.
_KINDS = {letter: dict(pattern=letter) for letter in 'FWKNAGMSRLVUDC'}
_KINDS |= {k: dict(experts=v) for k, v in _EXPERTS.items()}


def claims():
  """What `paraxis reproduce redco` checks."""
  from paraxis.train.claims import experiment
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
  models = _KINDS | {'learned positions': families['gpt2']}
  by_hand = dict(check=auto_rules.as_by_hand, size=4, models=models)
  on = lambda mesh, **fields: {'mesh': mesh} | experiment.under('model', fields)
  layouts = experiment.on_layouts(
    *(
      on('tensor=4', pattern=pair)
      for pair in ('FA', 'WN', 'GM', 'SC', 'RL', 'KV', 'UD')
    ),
    *(on('tensor=4', experts=fields) for fields in _EXPERTS.values()),
    on('fsdp=2,tensor=2', pattern='GF'),
    on('stage=2,tensor=2', **families['gpt2']),
  )
  fewest = dict(check=auto_rules.fewest_bytes, size=8)
  return [
    ("specs are Megatron's", 'EQ', megatron, None),
    ('loss, gradients: one device', 'EQ', equal, None),
    ('all-reduces: forward, step', 'HLO', layers, None),
    ('bytes: rank of 16, worst', 'HLO', fewest, None),
    ('every mixer as by hand', 'EQ', by_hand, None),
    ('every mixer: one device', 'EQ', layouts, None),
  ]


def knockouts():
  """Nothing split; no pair of column and row; pairs by the alphabet, not by the
  program."""
  from paraxis.train.claims.layouts import auto_rules

  return [
    ('splitting', 'loss, gradients: one device', auto_rules.whole),
    ('pairs', "specs are Megatron's", auto_rules.columns),
    ('rows', 'all-reduces: forward, step', auto_rules.columns),
    ('column_row', 'bytes: rank of 16, worst', auto_rules.columns),
    ('program', 'every mixer as by hand', auto_rules.alphabetical),
  ]
