"""EasySpec: layers of the draft model side by side, exact keys afterwards

paper: arXiv:2502.02493
mechanism: decode/drafts/drafters.py
test: tests/decode/test_methods.py,
  tests/train/claims/decode/test_layer_groups.py
run: paraxis reproduce easyspec
cost: 900 CPU-seconds
expect: EQ greedy and drawn texts of 20 prompts are those of decoding one by
  one, float64, two patterns; the joint of 4 tokens over 4 letters, 40,000
  texts, is the model's with rejection; after 5 calls the keys of groups of 2
  and 4 layers are those of none, bit by bit (10,752 numbers differed while
  drafting). SIM, direction only, 1.57 x for drafting on 4
  devices, 8 layers, a mixer as long as an mlp; 1.30 at half as long, 2.47 at
  four times (the paper: 1.62, measured). LEARN, SmolLM2-135M, NOT REPRODUCED,
  one seed: 20% of the kept drafts are lost (asked: 15%): .49 drafts a call are
  kept exactly, .40 in groups of 4, greedy, 12 held-out prompts; 26% (.52, .38)
  with a head that has not learned from groups.
differs: the draft model is the first 8 of 30 layers with a head that learns
  from exact features and from those of groups (the paper: a smaller model of
  the same family, untrained, on 8 GPUs); groups are of 4 layers all through.
  One process: that mixers of a group run side by side is simulated, with
  sending the outputs of a group for .1 of an mlp, and mlps on one device. A
  draft model with a recurrence is refused.
"""

from paraxis.configs import presets

METHOD = dict(method='easyspec', drafts=3, draft_layers=2, draft_group=2)
MODEL = {'model.num_layers': 4}
DRAFT = dict(
  layers=8, blocks=2, steps=600, rate=2e-3, words=4096, tokens=40_000, own=96,
  length=128, group=4,
)  # fmt: skip


def get_config():
  """A small decoder on bytes."""
  return presets.tiny(num_layers=2, window=16)


def claims():
  """What `paraxis reproduce easyspec` checks."""
  from paraxis.train.claims.decode import layer_groups
  from paraxis.train.claims.decode import lossless

  models = [MODEL, MODEL | {'model.pattern': 'WFN'}]
  text = lossless.texts(METHOD, models)
  joint = lossless.joint(METHOD | dict(judge='rejection'))
  keys = dict(
    check=layer_groups.exact_keys, changes=MODEL, drafts=3, groups=[1, 2, 4],
    calls=5,
  )  # fmt: skip
  faster = dict(
    check=layer_groups.drafting, layers=8, group=4, ratios=[0.5, 1.0, 2.0, 4.0],
    at=1.0, send=0.1, at_least=1.5, published=dict(at_least=1.62),
  )  # fmt: skip
  kept = dict(
    check=layer_groups.keeps, method=dict(method='easyspec', drafts=4), group=4,
    draft=DRAFT, prompts=[12, 48, 48], loss=0.15, admits='not reproduced',
  )  # fmt: skip
  return [
    ('texts of one by one', 'EQ', text, None),
    ('joint of 4 tokens', 'EQ', joint | dict(changes=MODEL), None),
    ('keys of kept tokens are exact', 'EQ', keys, None),
    ('makespan of drafting', 'SIM', faster, '1.62, measured'),
    ('drafts of SmolLM2 that are kept', 'LEARN', kept, 'below 7% lost'),
  ]


def knockouts():
  """A draft is kept that is not the draw; what is dropped is drawn from p; keys
  of drafts stay; mixers wait for each other."""
  from paraxis.train.claims.decode import layer_groups
  from paraxis.train.claims.decode import lossless

  return [
    ('keeps_one_more', 'texts of one by one', lossless.keeps_one_more),
    ('from_p', 'joint of 4 tokens', lossless.from_p,
     lossless.TENTH),
    ('no_calibration', 'keys of kept tokens are exact',
     layer_groups.no_calibration),
    ('one_by_one', 'makespan of drafting', layer_groups.one_by_one),
  ]  # fmt: skip
