"""MARLIN: weights of 4 bits, multiplied from memory

paper: arXiv:2408.11743
mechanism: pallas_kernels/matmul/quantized.py,
  pallas_kernels/matmul/quantized_tpu.py,
  pallas_kernels/matmul/quantized_gpu.py
test: tests/pallas_kernels/matmul/test_quantized.py,
  tests/train/claims/decode/test_quantized.py
run: paraxis reproduce marlin
cost: 430 CPU-seconds
expect: EQ 6e-16 against a loop over groups, no weight error above half the step
  of its group of 128; SIM 3.87 x fewer bytes at 16 tokens (the paper: 3.87 x,
  measured), 3.67 x for 7B with a bfloat16 head; AOT no temporaries on four TPUs
  where XLA needs 336 MiB; LEARN perplexity 1.007 of the float model's, 1.006 to
  1.010 in 3 seeds (140.8 -> 142.2). AOT needs libtpu.
differs: decode.weights=int4 keeps the matrices of layers so while decoding,
  which on CPU saves memory, not time; plain rounding, not GPTQ; kernels are for
  TPU and GPU, on a CPU XLA unpacks the weights first; here bytes are counted
  (BENCHMARKS.md has times of an H200: 1.65 x bfloat16's speed at 16 tokens of
  8192 x 8192, the paper 3.87 x). Scales are float32 in the kernel's tests and 2
  bytes in the counts. No 2:4 sparsity. The model has 1.1M parameters after 0.4M
  tokens; larger and longer trained ones lose more or less. That perplexity is
  held to 1.03 of the float model's is our bound.
"""

from paraxis.configs import presets


def get_config():
  """A small decoder whose matrices have whole groups of 128 inputs."""
  config = presets.small_text(d_model=128, d_ff=384, qk_norm='head')
  config.train.steps = 200
  return config


def claims():
  """What `paraxis reproduce marlin` checks."""
  from paraxis.train.claims.decode import quantized

  forms = dict(
    check=quantized.forms_agree,
    tokens=16,
    inputs=512,
    outputs=384,
    within=1e-12,
  )
  rounding = dict(check=quantized.rounding, group=128, within=1e-4)
  read = dict(
    check=quantized.read_bytes, tokens=[16, 1, 64, 128],
    inputs=18432, outputs=73728, expected=3.87, within=0.01,
  )  # fmt: skip
  llama = dict(d_model=4096, d_ff=11008, num_layers=32, vocab_size=32000)
  # 4 bits, and 16 of a scale for 128 weights.
  whole = dict(check=quantized.model_bytes, model=llama, bits=4 + 16 / 128)
  machines = dict(
    check=quantized.compiled,
    topologies=['v5e:1x1', 'v5p:1x1x1', 'v6e:1x1', 'tpu7x:1x1x1'],
    tokens=16, inputs=4096, outputs=14336,
  )  # fmt: skip
  learned = dict(check=quantized.perplexity, seeds=[0, 1, 2], at_most=1.03)
  return [
    ('both forms against a loop', 'EQ', forms, None),
    ('error of a weight', 'EQ', rounding, None),
    ('bytes of a product, 16 tokens', 'SIM', read, '3.87, measured in time'),
    ('bytes of 7B a token', 'SIM', whole, None),
    ('temporaries on TPUs', 'AOT', machines, None),
    ('perplexity, 4 bits over float', 'LEARN', learned, None),
  ]


def knockouts():
  """One scale for a column of any length; fewer bits, or a byte; no kernel."""
  from paraxis.train.claims.decode import quantized

  column, coarse = quantized.one_scale_a_column, quantized.two_bits
  learned, one = 'perplexity, 4 bits over float', {'topologies': ['v5e:1x1']}
  return [
    ('groups', 'both forms against a loop', quantized.one_group),
    ('one_scale_a_column', 'error of a weight', column),
    ('packing', 'bytes of a product, 16 tokens', quantized.unpacked),
    ('packing_7b', 'bytes of 7B a token', quantized.unpacked),
    ('kernel', 'temporaries on TPUs', quantized.no_kernel, one),
    ('two_bits', learned, coarse, {'seeds': [0]}),
  ]
