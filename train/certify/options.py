"""Every option of a layout, its values, and which of them may stand together.

The invariance test runs an array of them in which every two values meet
(tests/train/certify/test_invariance.py), `paraxis verify --random` draws some.
"""

import math
from typing import Any

from paraxis.configs import schema
from paraxis.configs.base import lora
from paraxis.sharding.pipeline import schedules

AXES = ('replica', 'stage', 'data', 'fsdp', 'context', 'tensor')
# A little of everything that a layer may have, in three models.
MODELS = {
  'llama': dict(pattern='F', qk_norm='head'),
  'gpt': dict(
    pattern='WK', window=12, attention_chunk=12, norm='layernorm', mlp='gelu',
    position='learned', max_positions=32, tied_embedding=False,
    attention_bias=True, attention_output_bias=True, mlp_bias=True, sinks=True,
  ),
  'gemma': dict(
    pattern='W', window=12, norm_placement='sandwich', norm_zero_centered=True,
    qk_norm='all', mlp='geglu', attention_softcap=20.0, logit_softcap=30.0,
    embedding_scale=32**0.5, attention_gate=True,
  ),
}  # fmt: skip
REMAT: dict[str, Any] = {
  name: dict(remat=name) for name in ('none', 'attention', 'dots', 'full')
}
REMAT['offload'] = dict(
  remat='full', memory='residual=offload,attention=offload'
)
# Layers on pipelines of 1 to 4 chunks (1: no pipeline), and of 6 to 12: evenly
# shared and not. Two depths, so that few runs on one device serve all cases.
DEPTH = {'llama': (5, 13), 'gpt': (10, 26), 'gemma': (4, 12)}
FACTORS = dict(
  replica=(1, 2),
  stage=(1, 2, 4),
  data=(1, 2),
  fsdp=(1, 2),
  context=(1, 2, 4),
  tensor=(1, 2, 4),
  zero=(0, 1, 2, 3),
  sequence=(True, False),
  collectives=('annotated', 'explicit'),
  collective_matmul=('', 'all', 'qkv,down'),
  form=(
    'none', 'ring', 'all_gather', 'ulysses', 'usp', 'token_ring', 'rsa',
  ),
  order=('none', 'zigzag', 'contiguous', 'striped'),
  schedule=(
    'none', 'gpipe', 'one_f_one_b', 'interleaved', 'zero_bubble', 'v_half',
  ),
  chunks=(1, 2, 3),
  activations=('recompute', 'store'),
  kv_heads=(8, 4, 2),
  model=tuple(MODELS),
  packed=(True, False),
  microbatches=(1, 2),
  remat=tuple(REMAT),
  optimizer=('adamw', 'muon', 'soap'),
  lora=(0, 3),
)  # fmt: skip
APART = ('zero_bubble', 'v_half')  # weight gradients are


def chunks_of(schedule):
  """Chunks that a schedule takes, of those in FACTORS."""
  fewest, most = schedules.CHUNKS.get(schedule, (1, 1))
  return range(fewest, (most or 3) + 1)


# (factors, holds(*their values)): true in every case.
RULES = (
  (AXES, lambda *n: math.prod(n) == 8),
  # What says how an axis is used needs that axis.
  (('context', 'form'), lambda n, form: (n > 1) == (form != 'none')),
  (('context', 'order'), lambda n, order: (n > 1) == (order != 'none')),
  (('data', 'zero'), lambda n, zero: n > 1 or not zero),
  (('tensor', 'sequence'), lambda n, sequence: n > 1 or sequence),
  (('tensor', 'collective_matmul'), lambda n, rings: n > 1 or not rings),
  (('stage', 'schedule'), lambda n, name: (n > 1) == (name != 'none')),
  (('stage', 'activations'), lambda n, how: n > 1 or how == 'recompute'),
  (('schedule', 'chunks'), lambda name, v: v in chunks_of(name)),
  # A pipeline's collectives are its own, whatever that says.
  (('stage', 'collectives'), lambda n, how: n == 1 or how == 'annotated'),
  # What is refused, with a message of its own: tests/models/test_build.py.
  (('sequence', 'collective_matmul'), lambda s, rings: s or not rings),
  (('sequence', 'collectives'), lambda s, how: s or how == 'annotated'),
  (('stage', 'sequence'), lambda n, sequence: n == 1 or sequence),
  # What is stored from F to B stays on the device.
  (
    ('activations', 'remat'),
    lambda how, remat: how != 'store' or remat != 'offload',
  ),
  (
    ('schedule', 'collective_matmul'),
    lambda name, rings: name not in APART or not rings,
  ),
)


def config_of(case):
  """schema.Config of a case: 8 heads, 16 rows of 32 tokens."""
  crossing = case['context'] > 1
  deep = case['stage'] * case['chunks'] > 4
  pipeline = schema.Pipeline()
  if case['stage'] > 1:
    pipeline = schema.Pipeline(
      schedule=case['schedule'],
      chunks=case['chunks'],
      activations=case['activations'],
    )
  return schema.Config(
    mesh=schema.Mesh(
      **{axis: case[axis] for axis in AXES},
      zero=case['zero'],
      sequence=case['sequence'],
      collectives=case['collectives'],
      collective_matmul=case['collective_matmul'],
      context_form=case['form'] if crossing else 'ring',
      context_order=case['order'] if crossing else 'auto',
    ),
    pipeline=pipeline,
    model=schema.Model(
      vocab_size=64, d_model=32, num_heads=8, head_dim=4, d_ff=64,
      num_layers=DEPTH[case['model']][deep],
      num_kv_heads=case['kv_heads'], attention_block=8,
      dtype='float64', param_dtype='float64',
      **MODELS[case['model']],
    ),
    data=schema.Data(sequence_length=32),
    optimizer=schema.Optimizer(
      name=case['optimizer'], warmup_steps=0, ema_decay=0.9
    ),
    train=schema.Train(
      batch_size=16, microbatches=case['microbatches'],
      lora=lora.Lora(case['lora']), **REMAT[case['remat']],
    ),
  )  # fmt: skip
