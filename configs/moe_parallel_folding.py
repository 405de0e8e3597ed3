"""MoE Parallel Folding: experts sharded independently of attention

paper: arXiv:2504.14960
mechanism: sharding/experts/dispatch.py, models/ffn/moe.py, sharding/rules.py
test: tests/train/claims/experts/test_layer.py
run: paraxis reproduce moe_parallel_folding
cost: 900 CPU-seconds
expect: EQ 2e-15; HLO 2 + 2 exchanges a layer in every folding; bytes by
  formula, 0.50, 0.32, 0.19, 0.11 of them with E = 8 to 64 experts sharded over
  all 8 devices instead of over data alone; SIM 64 -> 8 and up to 1,024 -> 64
  devices; AOT 57.4B parameters of 64 experts on v5p:8x8x8: 71.4 -> 14.8 GiB a
  chip, 120 -> 60 GB received, experts on 8 -> 64 chips. Most of the time is for
  AOT, which needs libtpu.
differs: bytes and memory, no throughput. The unfolded baseline shards experts
  over data (or fsdp) alone, each whole on the devices of tensor and context;
  the paper also splits the width of an expert over tensor, which is not built.
  Bytes are fewer because gradients of experts are summed over fewer devices;
  exchanges alone cost more (1.75 times on 8 ranks for 2), and with experts over
  context and tensor alone more crosses data. With many tokens a device the gain
  is smaller. The exchange is padded on CPU, where bytes count every slot as
  sent, and ragged on TPU, where they are those of evenly spread tokens.
"""

from paraxis.configs import presets

# The shape of Qwen2-57B-A14B.
QWEN = {
  'model.vocab_size': 151936, 'model.d_model': 3584, 'model.num_layers': 28,
  'model.num_heads': 28, 'model.num_kv_heads': 4, 'model.head_dim': 128,
  'model.attention_bias': True, 'model.tied_embedding': False,
  'model.dtype': 'bfloat16', 'model.attention_block': 512,
  'model.experts.count': 64, 'model.experts.top_k': 8,
  'model.experts.d_ff': 2560, 'model.experts.shared': 8,
  'model.experts.shared_gate': True, 'model.experts.normalise': False,
  'data.sequence_length': 4096, 'train.batch_size': 256,
  'train.remat': 'full', 'mesh.zero': 1,
}  # fmt: skip


def get_config():
  """A small model on data=2,context=2,tensor=2, its 8 experts on all."""
  config = presets.tiny()
  config.mesh.update(data=2, context=2, tensor=2)
  config.model.experts.update(count=8, top_k=2, region='data+context+tensor')
  config.train.batch_size = 8
  return config


def claims():
  """What `paraxis reproduce moe_parallel_folding` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.experts import messages

  mesh = 'data=2,context=2,tensor=2'
  regions = ['data', 'context+tensor', 'data+context+tensor']
  on = lambda mesh, region: {'mesh': mesh, 'model.experts.region': region}
  equal = experiment.on_layouts(
    *(on(mesh, region) for region in (*regions, 'tensor')),
    on('data=2,fsdp=2,tensor=2', 'fsdp+tensor'),
    on('stage=2,data=2,tensor=2', 'data+tensor'),
  )
  calls = dict(
    check=messages.exchanges_per_layer,
    mesh=mesh, regions=regions, forward=2, backward=2,
  )  # fmt: skip
  sent = dict(
    check=messages.folded_bytes,
    mesh=mesh, regions=regions, counts=[8, 16, 32, 64],
  )  # fmt: skip
  least = dict(
    check=messages.least_devices,
    unfolded='data',
    folded=[
      'tensor', 'context', 'context+tensor', 'data+tensor', 'data+context',
      'data+context+tensor',
    ],
    cases=[[4, 2, 8], [4, 2, 64], [8, 1, 8], [2, 4, 8], [2, 8, 64]],
    devices=[[64, 8], [512, 64], [64, 8], [64, 8], [1024, 64]],
  )  # fmt: skip
  machine = dict(
    check=messages.compiled, fields=QWEN, topology='v5p:8x8x8',
    mesh='data=8,fsdp=8,context=2,tensor=4',
    regions=['fsdp', 'fsdp+context+tensor'],  # on 8 chips, or on 64
  )  # fmt: skip
  return [
    ('experts over any axes equal one device', 'EQ', equal, None),
    ('exchanges of a layer', 'HLO', calls, '2 + 2'),
    ('bytes, folded over unfolded', 'HLO', sent, 'fewer'),
    ('fewest devices', 'SIM', least, '64 -> 8'),
    ('64 experts on 512 chips', 'AOT', machine, None),
  ]


def knockouts():
  """Experts on the devices of data alone, as they are without folding."""
  from paraxis.train.claims.experts import messages

  return [
    ('unfolded', 'exchanges of a layer', messages.unfolded),
    ('unfolded_bytes', 'bytes, folded over unfolded', messages.unfolded),
    ('unfolded_devices', 'fewest devices', {'folded': ['data']}),
    ('unfolded_chips', '64 experts on 512 chips', messages.unfolded),
  ]
