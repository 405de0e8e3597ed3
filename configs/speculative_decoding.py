"""Speculative decoding: a smaller model drafts, the model judges

paper: arXiv:2211.17192
mechanism: decode/drafters.py, decode/judges.py, decode/program.py,
  decode/distill.py
test: tests/decode/test_methods.py, tests/train/claims/decode/test_lossless.py
run: paraxis reproduce speculative_decoding
cost: 900 CPU-seconds
expect: TODO
differs: TODO
"""

from paraxis.configs import presets

METHOD = dict(method='speculative', drafts=3, draft_layers=1)
MODELS = [{}, {'model.pattern': 'WFN'}, {'model.pattern': 'GF'}]
DRAFT = dict(layers=8, blocks=2, steps=250, tokens=60_000)


def get_config():
  """A small decoder on bytes."""
  return presets.tiny(num_layers=2, window=16)


def claims():
  """What `paraxis reproduce speculative_decoding` checks."""
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
  coupled = joint | dict(method=METHOD)
  real = dict(
    check=tokens_a_call.on_real_text,
    method=dict(method='speculative', drafts=4), draft=DRAFT,
    prompts=[12, 48, 48], domains=[], at_least=2.0,
  )  # fmt: skip
  return [
    ('texts of one by one', 'EQ', text, None),
    ('joint of 4 tokens, rejection', 'EQ', joint, None),
    ('joint of 4 tokens, replay', 'EQ', coupled, None),
    ('tokens a call of SmolLM2', 'LEARN', real, None),
  ]


def knockouts():
  """A draft is kept that is not the draw; what is dropped is drawn from p, or
  from a residual that is no distribution; a draft that nobody trained."""
  from paraxis.train.claims.decode import lossless

  joint = 'joint of 4 tokens, rejection'
  return [
    ('keeps_one_more', 'texts of one by one', lossless.keeps_one_more),
    ('from_p', joint, lossless.from_p),
    ('raw_residual', joint, lossless.raw_residual),
    ('keeps_too_much', 'joint of 4 tokens, replay', lossless.keeps_one_more),
    ('untrained', 'tokens a call of SmolLM2',
     {'draft': DRAFT | dict(steps=1, tokens=8192)}),
  ]  # fmt: skip
