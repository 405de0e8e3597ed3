"""Speculative decoding: a smaller model drafts, the model judges

paper: arXiv:2211.17192
mechanism: decode/drafts/drafters.py, decode/judges.py, decode/program.py,
  decode/drafts/distill.py
test: tests/decode/test_methods.py, tests/train/claims/decode/test_lossless.py
run: paraxis reproduce speculative_decoding
cost: 800 CPU-seconds
expect: EQ greedy and drawn texts of 20 prompts are those of decoding one by one
  with the judge replay, float64, three patterns; the joint of 4 tokens over 4
  letters, 40,000 texts, is the model's, with rejection (also at temperature .7
  and top-k 3, of what these leave) and with replay. LEARN, SmolLM2-135M, NOT
  REPRODUCED, one seed: 1.52 tokens a call on held-out prompts, greedy (asked:
  2; the paper: 2 to 3 times faster, with draft models of 1% to 10% of the
  target).
differs: no smaller model shares SmolLM2's vocabulary, so its first 8 of 30
  layers draft, with 2 residual blocks (664,704 parameters) that are trained for
  600 steps, its head frozen, on 34,000 tokens that are mostly the model's own
  (medusa.py), among 3,774 words: their first choice is the model's for .39 of
  held-out tokens (of text alone, all words: .23, and 1.48 tokens a call). They
  overfit: the loss ends at .5. Such a draft costs 8/30 of a call, so on a CPU
  it loses time. Targets are the model's most likely tokens, not its
  distribution. The judge replay is ours: drafts and tokens are drawn by the
  same noise. No time is measured.
"""

from paraxis.configs import presets

METHOD = dict(method='speculative', drafts=3, draft_layers=1)
MODELS = [{}, {'model.pattern': 'WFN'}, {'model.pattern': 'GF'}]
FILTERS = dict(temperature=0.7, top_k=3)
DRAFT = dict(
  layers=8, blocks=2, steps=600, rate=2e-3, words=4096, tokens=40_000, own=96,
  length=128,
)  # fmt: skip


def get_config():
  """A small decoder on bytes."""
  return presets.tiny(num_layers=2, window=16)


def claims():
  """What `paraxis reproduce speculative_decoding` checks."""
  from paraxis.train.claims.decode import lossless
  from paraxis.train.claims.decode import tokens_a_call

  text = lossless.texts(METHOD, MODELS)
  joint = lossless.joint(METHOD | dict(judge='rejection'))
  coupled = joint | dict(method=METHOD)
  filtered = joint | dict(method=joint['method'] | FILTERS)
  real = dict(
    check=tokens_a_call.on_real_text,
    method=dict(method='speculative', drafts=4), draft=DRAFT,
    prompts=[12, 48, 48], domains=[], at_least=2.0, admits='not reproduced',
  )  # fmt: skip
  return [
    ('texts of one by one', 'EQ', text, None),
    ('joint of 4 tokens, rejection', 'EQ', joint, None),
    ('joint of 4 tokens, rejection, filtered', 'EQ', filtered, None),
    ('joint of 4 tokens, replay', 'EQ', coupled, None),
    ('tokens a call of SmolLM2', 'LEARN', real, None),
  ]


def knockouts():
  """A draft is kept that is not the draw; what is dropped is drawn from p, or
  from a residual that is no distribution, or of another temperature."""
  from paraxis.train.claims.decode import lossless

  joint = 'joint of 4 tokens, rejection'
  return [
    ('keeps_one_more', 'texts of one by one', lossless.keeps_one_more),
    ('from_p', joint, lossless.from_p,
     lossless.TENTH),
    ('raw_residual', joint, lossless.raw_residual,
     lossless.TENTH),
    ('q_of_temperature_1', 'joint of 4 tokens, rejection, filtered',
     lossless.q_of_temperature_1, lossless.TENTH),
    ('keeps_too_much', 'joint of 4 tokens, replay', lossless.keeps_one_more,
     lossless.TENTH),
  ]  # fmt: skip
