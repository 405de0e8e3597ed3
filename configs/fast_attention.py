"""FastAttention: tiles of two levels, a mask of a few rows, keys on the host

paper: arXiv:2410.16663
mechanism: pallas_kernels/attention/blocks.py,
  pallas_kernels/decode_attention/schedule.py,
  pallas_kernels/decode_attention/host.py, sharding/tensor/rings.py
test: tests/pallas_kernels/decode_attention/test_host.py,
  tests/train/claims/attention/test_kernels.py,
  tests/train/claims/layouts/test_tensor.py
run: paraxis reproduce fast_attention
cost: 55 CPU-seconds
expect: EQ 8e-16 for tiles of three sizes in XLA, 3e-7 in the TPU kernel under
  the interpreter (float32), 0 of 249 tiles of the mask differ, 2e-15 for keys
  on the host, 4e-16 for projections in pieces, 3e-15 for layouts; HLO 7 + 14 +
  7 + 7 permutes on 8 shards; AOT no T x T numbers in programs for two TPUs,
  peak memory 1.9 times that of arguments and results (bound 2, ours), which
  needs libtpu.
partial: attention on the host is in claims only.
differs: the paper's kernels are for Ascend NPUs and Volta GPUs and its results
  are times (10.7 times for an operator, 1.46 end to end): none is measured.
  Tiles of the mask are computed, not read from a matrix of 2M x 2M, whose
  slices they are shown to be; the two levels are the block in on-chip memory
  and the compiler's own tiles. The all-reduce of the projection is a ring of
  pieces, cut by tokens. Attention on the host is NumPy over keys that it keeps,
  beside nothing of the device's work; no cache is kept there yet.
"""

from paraxis.configs import presets


def get_config():
  """A small decoder on tensor=8, its output projections rings."""
  config = presets.tiny(vocab_size=256, num_heads=8)
  config.mesh.update(tensor=8, collective_matmul='all')
  return config


def claims():
  """What `paraxis reproduce fast_attention` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.attention import kernels
  from paraxis.train.claims.attention import parts
  from paraxis.train.claims.layouts import tensor

  tiles = lambda impl, within, blocks: dict(
    check=kernels.equals_dense,
    impl=impl, shape=[4, 2, 16], within=within,
    cases=[dict(length=130, block=b, packed=True) for b in blocks],
  )  # fmt: skip
  sizes = [[16, 64], [64, 16], [64, 64]]
  mask = dict(
    check=parts.mask_is_a_slice,
    length=192, blocks=[[16, 16], *sizes, [48, 32]],
  )  # fmt: skip
  machines = dict(
    check=kernels.compiled_is_linear,
    topologies=['v5e:1x1', 'tpu7x:1x1x1'],
    lengths=[4096, 8192], shape=[8, 2, 128], window=1000, at_most=2,
  )  # fmt: skip
  host = dict(
    check=parts.host_part,
    slots=1000, on_host=[1, 500, 999], rows=4, shape=[8, 2, 64], within=1e-12,
  )  # fmt: skip
  rings = dict(check=tensor.rings_equal_products, shards=8, within=1e-12)
  sent = dict(check=tensor.ring_messages, shards=8)
  layouts = experiment.on_layouts('tensor=8', 'context=2,tensor=4')
  return [
    ('tiles of any size, XLA', 'EQ', tiles('xla', 1e-12, [16, 40, 64]), None),
    ('tiles of any size, TPU', 'EQ', tiles('pallas_tpu', 1e-5, sizes), None),
    ('tiles of the mask', 'EQ', mask, None),
    ('no T x T in a TPU program', 'AOT', machines, None),
    ('keys on the host, merged by lse', 'EQ', host, None),
    ('projection in pieces equals whole', 'EQ', rings, None),
    ('messages of the pieces', 'HLO', sent, None),
    ('layouts equal one device', 'EQ', layouts, None),
  ]


def knockouts():
  """Tiles apart or without a mask, parts without their lse, no pieces."""
  from paraxis.train.claims.attention import kernels
  from paraxis.train.claims.attention import parts
  from paraxis.train.claims.layouts import tensor

  one = {'topologies': ['v5e:1x1'], 'lengths': [4096]}
  return [
    ('merged_tiles', 'tiles of any size, XLA', kernels.blocks_apart),
    ('no_mask_tpu', 'tiles of any size, TPU', parts.no_mask),
    ('no_mask', 'tiles of the mask', parts.no_mask),
    ('dense_on_tpu', 'no T x T in a TPU program', kernels.dense, one),
    ('no_lse', 'keys on the host, merged by lse', parts.mean_of_parts),
    ('ring_order', 'projection in pieces equals whole', tensor.wrong_way),
    ('pieces', 'messages of the pieces', tensor.collectives_apart),
  ]
