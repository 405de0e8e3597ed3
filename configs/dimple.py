"""Dimple: masks are predicted at the token before and taken where they are sure

paper: arXiv:2505.16990
mechanism: train/data/objectives.py, decode/unmask/canvas.py,
  decode/unmask/policies.py
test: tests/train/data/test_objectives.py, tests/decode/unmask/test_unmask.py,
  tests/train/claims/decode/test_canvases.py
run: paraxis reproduce dimple
cost: 1,000 CPU-seconds
expect: EQ loss, gradients, update and layouts of the shifted step equal one
  device within 1e-9, float64, on data=2,fsdp=2,tensor=2, context=4,data=2 and
  stage=2,data=4. LEARN, 3 seeds: copies and sorted lists of 8 in an eighth of
  the calls, 7.97 (7.92 to 8.00), with no right answer lost.
differs: lists of 8 items to copy and to sort, and masked models of 0.6M
  parameters that begin from nothing, where the paper has a vision-language
  model that was autoregressive first. Their answers are sure at once, which
  those to questions in words are not: the paper needs a third of the calls. One
  call for all would pass the claim too (parallelbench: such answers are as
  often right at once): it shows that a threshold wastes no call where masks are
  sure, not that it knows where they are not. Where no mask is above the
  threshold one is taken, the likeliest (the paper takes what a schedule says).
  Prompts are not cached, which the paper says is approximate; structure priors
  (text that is in the canvas from the beginning) are not here.
"""

from paraxis.configs import presets

MESHES = ('data=2,fsdp=2,tensor=2', 'context=4,data=2', 'stage=2,data=4')
TWO = dict(operations=('copy', 'sort'), whole_rows=True)
# Rows of the table for two tensor shards, of a batch for 4 x 2.
EVEN = {'model.vocab_size': 22, 'train.batch_size': 8}
FIELDS = presets.LISTS['fields'] | {'train.steps': 1500}


def get_config():
  """A small masked model on lists, its masks predicted one token before."""
  return presets.masked_lists(mask_shift=True)


def claims():
  """What `paraxis reproduce dimple` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.decode import canvases

  sure = presets.LISTS | dict(
    check=canvases.calls, policies=[{}, dict(count='threshold')],
    task=presets.LISTS['task'] | TWO,
    fields=FIELDS, operations=['copy', 'sort'], bounds=[3.0, 0.02],
    lists_of=[8, 100],
  )  # fmt: skip
  step = experiment.on_layouts(*(EVEN | dict(mesh=m) for m in MESHES))
  return [
    ('the shifted step on layouts', 'EQ', step, None),
    ('a third of the calls', 'LEARN', sure, 'R / 3'),
  ]


def knockouts():
  """Nothing is above the threshold."""
  none = {'policies': [{}, {}]}
  return [('no_threshold', 'a third of the calls', none)]
