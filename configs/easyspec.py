"""EasySpec: layers of the draft model side by side, exact keys afterwards

paper: arXiv:2502.02493
mechanism: decode/drafts/drafters.py
test: tests/decode/test_methods.py,
  tests/train/claims/decode/test_layer_groups.py
run: paraxis reproduce easyspec
cost: 0 CPU-seconds
expect: x
differs: x
"""

from paraxis.configs import presets

METHOD = dict(method='easyspec', drafts=3, draft_layers=2, draft_group=2)
MODEL = {'model.num_layers': 4}
DRAFT = dict(layers=8, blocks=2, steps=250, tokens=60_000)


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
    at=1.0, send=0.1, at_least=1.5,
  )  # fmt: skip
  kept = dict(
    check=layer_groups.keeps, method=dict(method='easyspec', drafts=4), group=4,
    draft=DRAFT, prompts=[12, 48, 48], loss=0.15,
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
    ('from_p', 'joint of 4 tokens', lossless.from_p),
    ('no_calibration', 'keys of kept tokens are exact',
     layer_groups.no_calibration),
    ('one_by_one', 'makespan of drafting', layer_groups.one_by_one),
  ]  # fmt: skip
