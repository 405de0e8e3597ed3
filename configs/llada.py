"""LLaDA: a masked model, whose loss is a bound of likelihood

paper: arXiv:2502.09992
mechanism: train/data/objectives.py, models/mixers/attention.py
test: tests/train/data/test_objectives.py, tests/models/test_visibility.py,
  tests/train/claims/decode/test_masks.py
run: paraxis reproduce llada
cost: 400 CPU-seconds
expect: EQ loss, gradients, update and layouts of the masked step equal one
  device within 1e-9, float64, on data=2,fsdp=2,tensor=2, context=4,data=2 and
  stage=2,data=4, with full and with block visibility; the loss is the mean over
  all orders of 4 tokens, walked one by one, within 4 standard errors. LEARN, 3
  seeds: after 1,600 steps the bound of held-out bytes, 3.64 bits (3.636 to
  3.647), is below what a model from left to right has after 100 steps, 4.04
  (4.01 to 4.07); with 100 steps it is not.
differs: rows of a step have their shares of masks in equal distances, the paper
  draws each alone; documents are packed into rows and see their own, where the
  paper has rows of one document and 1% of random length; the first token of a
  document is neither masked nor seen. Models of text have 0.25M parameters and
  begin to learn; 16 times the steps are what masked models are said to need
  (arXiv:2410.18514, of 1.1B), fewer were not tried. The masked model's bits are
  an upper bound, of one draw of masks.
"""

from paraxis.configs import presets

BLOCKS = {'model.visibility': 'block', 'model.block': 5}
STEPS = 100
TEXT = {
  'model.d_model': 96, 'model.d_ff': 256, 'data.sequence_length': 128,
  'train.batch_size': 8, 'train.eval_batches': 16, 'optimizer.name': 'muon',
  'optimizer.warmup_steps': 20, 'checkpoint.every': 800,
}  # fmt: skip
AS_MANY = {'train.steps': STEPS}
LEFT_TO_RIGHT = AS_MANY | {
  'model.visibility': 'causal', 'model.mask_id': -1,
  'train.objective': 'next_token',
}  # fmt: skip
MESHES = ('data=2,fsdp=2,tensor=2', 'context=4,data=2', 'stage=2,data=4')
ROWS = {'train.batch_size': 8}  # a microbatch of four rows a stage


def get_config():
  """A small bidirectional decoder on bytes and a mask."""
  config = presets.tiny(num_layers=2, visibility='full', mask_id=263)
  config.train.objective = 'masked'
  return config


def claims():
  """What `paraxis reproduce llada` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims import families
  from paraxis.train.claims.decode import masks

  text = dict(
    check=families.learn, fields=TEXT, seeds=[0, 1, 2],
    families={
      'masked': {'train.steps': 16 * STEPS}, 'left to right': LEFT_TO_RIGHT,
    },
    better=[['masked', 'left to right', 0.0]],
  )  # fmt: skip
  small = {'model.vocab_size': 6, 'model.mask_id': 5, 'model.d_model': 16}
  orders = dict(
    check=masks.any_order, changes=small, length=4, steps=600, at_most=4.0
  )
  cases = [ROWS | dict(mesh=m) for m in MESHES]
  full = experiment.on_layouts(*cases)
  blocks = experiment.on_layouts(*(BLOCKS | case for case in cases))
  return [
    ('the masked step on layouts', 'EQ', full, None),
    ('the same with blocks', 'EQ', blocks, None),
    ('the loss is the mean over orders', 'EQ', orders, None),
    ('the bound of text in 16 times the steps', 'LEARN', text, None),
  ]


def knockouts():
  """Masks count alike however rare they were; a shard passes over what its last
  block has in the next one; a masked model has as many steps as the other."""
  from paraxis.train.claims.decode import masks

  as_many = {'families': {'masked': AS_MANY, 'left to right': LEFT_TO_RIGHT}}
  return [
    ('unweighted', 'the loss is the mean over orders', masks.unweighted),
    ('nothing_ahead', 'the same with blocks', masks.nothing_ahead),
    ('as_many_steps', 'the bound of text in 16 times the steps', as_many),
  ]
