"""Ladder-Residual: a sum over tensor shards travels under the next part

paper: arXiv:2501.06589
mechanism: models/wiring.py, models/layer.py, sharding/meter/hlo.py
test: tests/models/test_wiring.py, tests/train/claims/layouts/test_wirings.py
run: paraxis reproduce ladder
cost: 750 CPU-seconds
expect: EQ 1e-15; HLO each of 12 sums has products that wait for none, in a
  standard row none has; AOT 4 of 6 sums travel under products on v5p:2x2x1, in
  a standard row none does; LEARN .9% below a standard row (2.961 bits per byte;
  2.988), as a parallel one is (2.957). AOT needs libtpu.
differs: 180 thousand parameters in 6 layers, 500 steps, from scratch: the paper
  also converts half of a trained Llama, and measures latency of 70B parameters
  on 8 GPUs. HLO and AOT are of another program than this config trains with: a
  forward pass, its layers unrolled, mesh.sequence=False; of layers in a scan at
  most the first sum of each has a part to travel under, and with
  mesh.sequence=True sums are scattered and gathered, which is not judged. Sums
  are asynchronous by three flags of the compiler
  (train/claims/layouts/wirings.py); without them it joins both sums of a layer,
  and products wait. The carry has two arrays, not the three of the paper's
  code: what attention gave is added where its layer ends (models/wiring.py).
"""

from paraxis.configs import presets

WIRINGS = {
  name: {'model.wiring': name} for name in ('standard', 'ladder', 'parallel')
}
# Of a chip's share of a layer; a sum of 4 MB takes its time.
LARGE = {
  'model.d_model': 1024, 'model.d_ff': 4096, 'model.num_heads': 8,
  'model.num_layers': 3, 'model.dtype': 'bfloat16', 'model.vocab_size': 2048,
  'data.tokenizer': 'bpe2048', 'data.sequence_length': 1024,
  'train.batch_size': 2,
}  # fmt: skip


def get_config():
  """Six layers of width 48 on bytes, joined as a ladder."""
  return presets.deep_bytes(wiring='ladder')


def claims():
  """What `paraxis reproduce ladder` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims import families
  from paraxis.train.claims.layouts import wirings

  layouts = experiment.on_layouts(
    'data=2,tensor=4', 'stage=2,fsdp=2,tensor=2', 'data=2,context=2,tensor=2'
  )
  free = dict(check=wirings.independent, mesh='data=2,tensor=4')
  overlap = dict(
    check=wirings.overlapped, topology='v5p:2x2x1', mesh='tensor=4',
    changes=LARGE,
  )  # fmt: skip
  learned = dict(
    check=families.near, families=WIRINGS, fields={}, seeds=[0, 1, 2],
    within=[['ladder', 'standard', 0.01]],
  )  # fmt: skip
  return [
    ('tensor shards equal one device', 'EQ', layouts, None),
    ('the next part waits for no sum', 'HLO', free, 'by its wiring'),
    ('sums travel under products', 'AOT', overlap, None),
    ('learns as a standard row', 'LEARN', learned, 'comparable at 1B and 3B'),
  ]


def knockouts():
  """A standard row; what a part gave is lost when the next one gives."""
  from paraxis.train.claims.layouts import wirings

  _, free, overlap, learned = (name for name, *_ in claims())
  two = {name: WIRINGS[name] for name in ('standard', 'ladder')}
  return [
    ('wiring', free, {'model.wiring': 'standard'}),
    ('wiring_of_a_chip', overlap, {'model.wiring': 'standard'}),
    ('forgets', learned, wirings.forgets, {'families': two}),
  ]
