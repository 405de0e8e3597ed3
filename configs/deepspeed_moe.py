"""DeepSpeed-MoE: pyramids of experts beside a residual mlp

paper: arXiv:2201.05596
mechanism: models/ffn/moe.py, models/layer.py, sharding/experts/dispatch.py
test: tests/train/claims/experts/test_layer.py
run: paraxis reproduce deepspeed_moe
cost: 1,900 CPU-seconds
expect: EQ 2e-15, the mlp beside the experts against a shared expert, and the
  same bits axis by axis; HLO bytes by formula, 7 -> 4 peers, residual half of
  top-2 (at capacity factor 1); every dropped assignment counted; SIM 13.1,
  52.5, 4.1, 31.4B parameters (the paper: 13, 52, 4, 31); LEARN, 3 seeds, NOT
  REPRODUCED: 3.018 bits per byte dense, 3.026 top-1, 3.024 top-2, 3.023
  residual, 3.023 PR-MoE, 3.026 with 16 a layer.
differs: after 200 steps of a tiny model no variant is better than another by
  two standard errors (0.007), so neither the gain of experts nor residual as
  good as top-2 nor the pyramid shows; with one seed it had looked as if top-2
  was best. Parameters are counted on shapes alone. Slots go to tokens in their
  order on a device, not at random; experts of all layers are sharded over the
  same devices. Not here: distillation into fewer layers (MoS), kernels and
  exchanges of inference, throughput.
"""

from paraxis.configs import presets

# Depth, width, heads of the paper's base models (350M and 1.3B).
SHAPES = {'350M': (24, 1024, 16), '1.3B': (24, 2048, 16)}


def get_config():
  """PR-MoE: 8 experts in 3 layers, 16 in the last, one a token, and an mlp."""
  config = presets.small_text(d_model=64, d_ff=192, qk_norm='head')
  experts = config.model.experts
  experts.update(count=8, top_k=1, d_ff=96, pattern='EEEP', residual=True)
  # With one expert a token, weights that add up to 1 would teach no router.
  experts.normalise = False
  experts.region = 'data+tensor'
  config.data.sequence_length = 128
  config.optimizer.warmup_steps = 40
  config.train.update(steps=200, batch_size=16, print_every=10)
  config.checkpoint.every = 200
  return config


# The same operations a token: 192 columns of mlp, of experts, or both.
PLAIN = {'model.experts.pattern': 'E', 'model.experts.residual': False}
VARIANTS = {
  'dense': PLAIN | {'model.experts.pattern': 'D'},
  'top-1': PLAIN | {'model.experts.d_ff': 192},
  'top-2': PLAIN | {'model.experts.top_k': 2, 'model.experts.normalise': True},
  'residual': {'model.experts.pattern': 'E'},
  'residual of 16': {'model.experts.pattern': 'P'},
  'PR-MoE': {},
}


# Models of the paper, and their parameters as published.
_GPT = dict(
  mlp='gelu', position='learned', max_positions=2048, qk_norm='none',
  vocab_size=51200,
)  # fmt: skip
_SIZES = {
  name: dict(num_layers=layers, d_model=d, d_ff=4 * d, num_heads=heads)
  for name, (layers, d, heads) in SHAPES.items()
}
_FLAT = dict(d_ff=0, count=128, pattern='DE', residual=False)
_PYRAMID = dict(d_ff=0, pattern='DE' * 10 + 'DPDP')
COUNTED = {
  f'{name}+{how}': dict(
    model=_GPT | _SIZES[name], published=published, experts=experts
  )
  for name, how, published, experts in (
    ('350M', 'MoE-128', 13e9, _FLAT),
    ('1.3B', 'MoE-128', 52e9, _FLAT),
    ('350M', 'PR-MoE-32/64', 4e9, _PYRAMID | dict(count=32)),
    ('1.3B', 'PR-MoE-64/128', 31e9, _PYRAMID | dict(count=64)),
  )
}


def claims():
  """What `paraxis reproduce deepspeed_moe` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.experts import layer
  from paraxis.train.claims.experts import messages
  from paraxis.train.claims.experts import training

  counts = dict(check=layer.parameter_counts, within=0.03, cases=COUNTED)
  mesh = 'data=2,fsdp=2,tensor=2'
  equal = experiment.on_layouts(
    mesh, {'mesh': mesh, 'model.experts.hierarchical': True}
  )
  bitwise = dict(
    check=layer.axis_by_axis_is_bitwise, tokens=16,
    meshes=['context=2,tensor=4', 'data=2,context=2,tensor=2'],
  )  # fmt: skip
  beside = dict(check=layer.mlp_beside_experts, tokens=16, within=1e-12)
  where = dict(mesh='data=2,tensor=4', region='data+tensor')
  sent = dict(check=messages.axis_by_axis, **where)
  both = {name: VARIANTS[name] for name in ('residual', 'top-2')}
  fewer = dict(check=messages.exchanged_bytes, variants=both, ratio=1 / 2)
  drops = dict(
    check=layer.drops_are_counted, tokens=16, factors=[0.5, 1, 1.25, 2], **where
  )
  learned = dict(
    check=training.learn_better, seeds=[0, 1, 2], variants=VARIANTS, by=0.0,
    admits='not reproduced',
  )  # fmt: skip
  experts = learned | dict(
    better=[['top-1', 'dense'], ['residual', 'dense']], shares=[]
  )
  # The paper has them as good; half of it is what we ask for.
  near = lambda *names: learned | dict(better=[], shares=[[*names, 0.5]])
  residual = near('residual', 'top-1', 'top-2')
  pyramid = near('PR-MoE', 'residual', 'residual of 16')
  return [
    ('residual and pyramid equal one device', 'EQ', equal, None),
    ('an mlp beside the experts', 'EQ', beside, None),
    ('axis by axis equals at once', 'EQ', bitwise, None),
    ('bytes axis by axis', 'HLO', sent, 'O(G + p/G)'),
    ('bytes of residual over top-2', 'HLO', fewer | where, 'less'),
    ('what finds no slot is counted', 'EQ', drops, None),
    ('parameters of the shapes', 'SIM', counts, '13 52 4 31 B'),
    ('experts against a dense model', 'LEARN', experts, 'lower'),
    ('residual as good as top-2', 'LEARN', residual, 'as good'),
    ('a pyramid as good as 16 a layer', 'LEARN', pyramid, 'as good'),
  ]


def knockouts():
  """No mlp beside the experts, no pyramid, no capacity, a second expert; one
  exchange over all axes, or in the wrong order."""
  from paraxis.train.claims.experts import layer
  from paraxis.train.claims.experts import messages

  alone = {'model.experts.residual': False}
  two = VARIANTS['residual'] | {'model.experts.top_k': 2}
  both = {'variants': {'residual': two, 'top-2': VARIANTS['top-2']}}
  even = {
    name: case | {'experts': case['experts'] | {'pattern': 'DE'}}
    for name, case in COUNTED.items()
  }
  return [
    ('experts_alone', 'an mlp beside the experts', alone),
    ('axis_order', 'axis by axis equals at once', layer.wrong_order),
    ('capacity', 'what finds no slot is counted', layer.no_capacity),
    ('pyramids', 'parameters of the shapes', {'cases': even}),
    ('at_once', 'bytes axis by axis', messages.at_once),
    ('second_expert', 'bytes of residual over top-2', both),
  ]
