"""Gated linear attention: a matrix state, trained in chunks

paper: arXiv:2312.06635
mechanism: models/mixers/gated_linear.py, pallas_kernels/scans/gated.py,
  sharding/sequence/scan.py
test: tests/models/mixers/test_gated_linear.py,
  tests/train/claims/scans/test_sharded.py,
  tests/train/claims/scans/test_decays.py
run: paraxis reproduce gated_linear_attention
cost: 110 CPU-seconds
expect: EQ 2e-15 what the gates leave of a state; 6e-15 chunks of 16, 64, 256
  and a passed-on state against the loop, with all gradients; 3e-14 layouts; HLO
  each of 8 devices receives 4,224 bytes to pass on states of 2 x 8 x 16, 7,616
  by all_gather, at any length; CPU our loop over tokens takes 3.4 times as much
  at 4,096 and 16,384 tokens, with gradients, a scan that jax differentiates 9.6
  and 8.9 times; forward alone the loop takes 0.35 and 0.72.
differs: no two-level chunks: within a chunk every pair of halves meets at its
  border, so no exponent is positive and no sub-chunk size is chosen. The 1.3B
  models on 100B tokens are not trained: `paraxis reproduce mamba_hybrid` trains
  a small one beside others. No claim of speed on an accelerator: BENCHMARKS.md
  has times of an H200; the kernel for TPU is compiled and interpreted, not run.
"""

from paraxis.configs import presets


def get_config():
  """The quickstart's size and data, gated linear attention in every layer."""
  return presets.small_text(pattern='G', position='none')


def claims():
  """What `paraxis reproduce gated_linear_attention` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.scans import decays
  from paraxis.train.claims.scans import sharded

  shape = [4, 64, 64]  # heads, key width, value width
  equal = dict(
    check=sharded.chunks_equal_the_loop,
    length=200, shape=[2, 8, 16], chunks=[16, 64, 256], within=1e-12,
  )  # fmt: skip
  gated = dict(
    check=decays.left_by_formula,
    kind='G', gates=dict(normaliser=16), length=12, within=1e-9,
  )  # fmt: skip
  cost = dict(
    check=sharded.chunks_cost,
    lengths=[4096, 16384],
    shape=shape,
    rounds=5,
    at_least=3,
  )
  crosses = dict(
    check=sharded.state_crosses,
    devices=8,
    lengths=[512, 1024],
    shape=[2, 8, 16],
  )
  layouts = experiment.on_layouts(
    'context=8', 'context=2,tensor=2,fsdp=2', 'stage=2,context=2'
  )
  return [
    ('gates say what a state keeps', 'EQ', gated, None),
    ('chunks equal the loop', 'EQ', equal, None),
    ('layouts equal one device', 'EQ', layouts, None),
    ('states cross devices, bytes', 'HLO', crosses, None),
    ('loop over chunks, with gradients', 'CPU', cost, None),
  ]


def knockouts():
  """No gate: a state keeps all that is written, as in linear attention; no
  chunks, or none that knows what came before; all states to all devices."""
  from paraxis.train.claims.scans import sharded

  none = {'model.gated_linear.gate_normaliser': 1e12}
  cost, short = (
    'loop over chunks, with gradients',
    dict(lengths=[4096], rounds=3),
  )
  return [
    ('no_gate', 'gates say what a state keeps', none),
    ('states_between_chunks', 'chunks equal the loop', sharded.chunks_apart),
    ('doubling', 'states cross devices, bytes', sharded.gathered_maps),
    ('chunks', cost, sharded.no_chunks, short),
  ]
