"""LLaDA: a masked model, whose loss is a bound of likelihood

paper: arXiv:2502.09992
mechanism: train/data/objectives.py, models/mixers/attention.py
test: tests/train/data/test_objectives.py, tests/models/test_visibility.py,
  tests/train/claims/decode/test_masks.py
run: paraxis reproduce llada
cost: 60 CPU-seconds
expect: EQ loss, gradients, update and layouts of the masked step equal one
  device within 1e-9, float64, on data=2,fsdp=2,tensor=2, context=4,data=2 and
  stage=2,data=4, with full and with block visibility; the loss is the mean over
  all orders of 4 tokens, walked one by one, within 4 standard errors.
differs: rows of a step have their shares of masks in equal distances, the paper
  draws each alone; documents are packed into rows and see their own, where the
  paper has rows of one document and 1% of random length; the first token of a
  document is neither masked nor seen. No model is trained here: no likelihood
  of text is compared with the paper's.
"""

from paraxis.configs import presets

BLOCKS = {'model.visibility': 'block', 'model.block': 5}
MESHES = ('data=2,fsdp=2,tensor=2', 'context=4,data=2', 'stage=2,data=4')


def get_config():
  """A small bidirectional decoder on bytes and a mask."""
  config = presets.tiny(num_layers=2, visibility='full', mask_id=263)
  config.train.objective = 'masked'
  return config


def claims():
  """What `paraxis reproduce llada` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.decode import masks

  small = {'model.vocab_size': 6, 'model.mask_id': 5, 'model.d_model': 16}
  orders = dict(
    check=masks.any_order, changes=small, length=4, steps=600, at_most=4.0
  )
  full = experiment.on_layouts(*MESHES)
  blocks = experiment.on_layouts(*(BLOCKS | dict(mesh=m) for m in MESHES))
  return [
    ('the masked step on layouts', 'EQ', full, None),
    ('the same with blocks', 'EQ', blocks, None),
    ('the loss is the mean over orders', 'EQ', orders, None),
  ]


def knockouts():
  """Masks count alike however rare they were; a shard passes over what its last
  block has in the next one."""
  from paraxis.train.claims.decode import masks

  return [
    ('unweighted', 'the loss is the mean over orders', masks.unweighted),
    ('nothing_ahead', 'the same with blocks', masks.nothing_ahead),
  ]
