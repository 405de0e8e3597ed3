"""Prompt lookup: drafts are copied from the text so far

paper: arXiv:2304.04487
mechanism: decode/copying.py
test: tests/decode/test_methods.py, tests/train/claims/decode/test_lossless.py
run: paraxis reproduce prompt_lookup
cost: 200 CPU-seconds
expect: TODO
differs: TODO
"""

from paraxis.configs import presets

METHOD = dict(method='prompt_lookup', drafts=4)
MODELS = [{}, {'model.pattern': 'WFN'}, {'model.pattern': 'GF'}]


def get_config():
  """A small decoder on bytes."""
  return presets.tiny(num_layers=2, window=16)


def claims():
  """What `paraxis reproduce prompt_lookup` checks."""
  from paraxis.train.claims.decode import lossless
  from paraxis.train.claims.decode import tokens_a_call

  text = dict(
    check=lossless.same_text, method=METHOD, changes=MODELS, prompts=20, new=24,
    random_draft='',
  )  # fmt: skip
  joint = dict(
    check=lossless.same_distribution,
    method=METHOD | dict(judge='rejection'), changes={}, letters=4, length=4,
    samples=40_000, random_draft='',
  )  # fmt: skip
  real = lambda name: dict(
    check=tokens_a_call.on_real_text, method=METHOD | dict(drafts=8), draft={},
    prompts=[8, 160, 64], domains=[name], at_least=1.1,
  )  # fmt: skip
  return [
    ('texts of one by one', 'EQ', text, None),
    ('joint of 4 tokens', 'EQ', joint, None),
    ('tokens a call, code', 'LEARN', real('code'), None),
    ('tokens a call, translation', 'LEARN', real('translation'), None),
  ]


def knockouts():
  """A draft is kept that is not the draw; what is dropped is drawn from p; the
  copy begins at any place."""
  from paraxis.train.claims.decode import lossless

  return [
    ('keeps_one_more', 'texts of one by one', lossless.keeps_one_more),
    ('from_p', 'joint of 4 tokens', lossless.from_p),
    ('any_place', 'tokens a call, code', lossless.any_place),
    ('any_place_2', 'tokens a call, translation', lossless.any_place),
  ]
