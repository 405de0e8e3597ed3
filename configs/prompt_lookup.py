"""Prompt lookup: drafts are copied from the text so far

paper: arXiv:2304.04487
mechanism: decode/drafts/copying.py
test: tests/decode/test_methods.py, tests/train/claims/decode/test_lossless.py
run: paraxis reproduce prompt_lookup
cost: 330 CPU-seconds
expect: EQ greedy and drawn texts of 20 prompts are those of decoding one by one
  with the judge replay, float64, three patterns; the joint of 4 tokens over 4
  letters, 40,000 texts, is the model's with rejection. LEARN, SmolLM2-135M, one
  seed, greedy, tokens a call: 2.39 on held-out code, 4.13 on translations, of
  which it repeats itself much; drawn at temperature 1: 1.06 and 1.25 (the
  paper: about twice as fast).
differs: the paper copies from documents that are given as references; here the
  reference is the text so far, the last 3, 2 or 1 tokens are looked for, and
  the latest place counts. 8 drafts, prompts of 160 tokens, 64 new ones: 3 of
  code, since few held-out texts are that long, and 8 translations. The bound is
  the paper's, in calls; copies from any place give 1.14 on translations, as a
  greedy model of this size falls into loops, which a lookup drafts well: drawn
  texts are the fairer figure. No time is measured.
"""

from paraxis.configs import presets

METHOD = dict(method='prompt_lookup', drafts=4)
MODELS = [{}, {'model.pattern': 'WFN'}, {'model.pattern': 'GF'}]
PAPER = '2, in time'


def get_config():
  """A small decoder on bytes."""
  return presets.tiny(num_layers=2, window=16)


def claims():
  """What `paraxis reproduce prompt_lookup` checks."""
  from paraxis.train.claims.decode import lossless
  from paraxis.train.claims.decode import tokens_a_call

  text = lossless.texts(METHOD, MODELS)
  joint = lossless.joint(METHOD | dict(judge='rejection'))
  real = lambda name: dict(
    check=tokens_a_call.on_real_text, method=METHOD | dict(drafts=8), draft={},
    prompts=[8, 160, 64], domains=[name], at_least=2.0,
  )  # fmt: skip
  return [
    ('texts of one by one', 'EQ', text, None),
    ('joint of 4 tokens', 'EQ', joint, None),
    ('tokens a call, code', 'LEARN', real('code'), PAPER),
    ('tokens a call, translation', 'LEARN', real('translation'), PAPER),
  ]


def knockouts():
  """A draft is kept that is not the draw; what is dropped is drawn from p; the
  copy begins at any place."""
  from paraxis.train.claims.decode import lossless
  from paraxis.train.claims.decode import tokens_a_call

  return [
    ('keeps_one_more', 'texts of one by one', lossless.keeps_one_more),
    ('from_p', 'joint of 4 tokens', lossless.from_p, lossless.TENTH),
    ('any_place', 'tokens a call, code', tokens_a_call.any_place),
    ('any_place_2', 'tokens a call, translation', tokens_a_call.any_place),
  ]
