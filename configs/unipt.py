"""UniPT: a network beside frozen layers, which no gradient enters

paper: arXiv:2308.14316
mechanism: models/side.py
test: tests/models/test_side.py, tests/train/claims/layouts/test_side.py
run: paraxis reproduce unipt
cost: 1,400 CPU-seconds
expect: EQ the frozen model before the first step, bitwise; shards 1e-15; AOT a
  gradient keeps 4.25 and 2.31 arrays of 64 numbers a token of a layer, at
  widths 512 and 1,024 (LoRA 32 at 1,024); LEARN, 3 seeds, share of pieces of 32
  bytes whose domain of six is wrong: the head alone .461, a side network .280,
  LoRA .210 (.181 +-.024 and .070 +-.010 apart), in 21, 36 and 77 CPU-seconds.
differs: pieces of text for images with text, 198 thousand parameters and 800
  steps of pretraining for CLIP and T5. The output is added to the features of
  the frozen model, and begins at 0, where the paper's takes their place. A
  token reads those before it: the paper reads whole rows, which are what the
  last token, asked for the domain, sees. Rates were chosen on a fourth seed of
  .005 and .015 for each way (LoRA .002, too, without a head); as the head alone
  and the side network took the upper one, .03 is beside them on the three, with
  .459 and .300. All ways learn the head: six of its rows are of bytes that no
  text has. It is not decoded with: it has no cache.
"""

from paraxis.configs import presets

# Of the claim on memory.
LARGE = {
  'model.d_ff': 4096, 'model.num_heads': 8, 'model.vocab_size': 1024,
  'model.dtype': 'float32',
  'model.attention_block': 512,
  'data.sequence_length': 1024, 'train.batch_size': 8, 'train.remat': 'full',
  'train.side': 64,
}  # fmt: skip
WIDTHS = [{'model.d_model': 512}, {'model.d_model': 1024}]
LORA = {'train.side': 0, 'train.lora.rank': 4}
HEAD = {'train.learn': 'head'}
FAST = {'optimizer.learning_rate': 1.5e-2}
WAYS = {
  'head only': FAST
  | {'train.side': 0, 'train.freeze': 'embedding,layers/*,norm/*'},
  'side': FAST | HEAD | {'train.side': 16},
  'lora': HEAD | LORA,
}
# Beyond what was tried when rates were chosen, whose upper end two ways took.
FASTER = {'optimizer.learning_rate': 3e-2}
BEYOND = {f'{n}, .03': WAYS[n] | FASTER for n in ('head only', 'side')}
TEXT = {
  'train.steps': 800, 'train.batch_size': 16, 'data.sequence_length': 128,
  'optimizer.learning_rate': 5e-3,
}  # fmt: skip
TASK = {'path': 'fixture', 'size': 32, 'classes': 6}
TUNED = {
  'train.steps': 400, 'train.batch_size': 64, 'optimizer.learning_rate': 5e-3,
}  # fmt: skip


def get_config():
  """Four layers of width 64 on bytes, and a side network of width 16."""
  config = presets.deep_bytes(num_layers=4, d_model=64, tied_embedding=False)
  config.data.path = 'fixture'
  config.train.side = 16
  return config


def claims():
  """What `paraxis reproduce unipt` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.layouts import side

  first = dict(check=side.begins, mesh='data=2,tensor=2')
  equal = experiment.on_layouts(
    'data=2,fsdp=2,tensor=2',
    {'mesh': 'fsdp=2,context=2,tensor=2', 'mesh.collectives': 'explicit',
     'train.remat': 'full'},
  )  # fmt: skip
  held = dict(
    check=side.memory, topology='v5p:2x2x1', mesh='data=4', changes=LARGE,
    widths=WIDTHS, depths=[4, 12], at_most=5.0, rival=LORA,
  )  # fmt: skip
  learn = dict(
    check=side.learns, task=TASK, base=TEXT, fields=TUNED,
    families=WAYS | BEYOND, seeds=[0, 1, 2],
    better=[
      ['side', 'head only', 0.0], ['lora', 'side', 0.0],
      ['side', 'head only, .03', 0.0], ['lora', 'side, .03', 0.0],
    ],
  )  # fmt: skip
  return [
    ('begins as the frozen model', 'EQ', first, None),
    ('shards equal one device', 'EQ', equal, None),
    ('memory free of the width', 'AOT', held, None),
    ('between the head alone and LoRA', 'LEARN', learn, None),
  ]


def knockouts():
  """A side network with a say at first; states kept; a deaf one."""
  from paraxis.train.claims.layouts import side

  first, _, held, learn = (name for name, *_ in claims())
  two = {
    'families': {n: WAYS[n] for n in ('head only', 'side')},
    'better': [['side', 'head only', 0.0]],
  }
  kept = {'changes': LARGE | {'train.remat': 'none'}}
  return [
    ('loud', first, side.loud),
    ('kept_states', held, kept),
    ('deaf', learn, side.deaf, two),
  ]
