"""EAGLE: one layer continues the model's features, and drafts from them

paper: arXiv:2401.15077
mechanism: decode/drafts/eagle.py, decode/drafts/losses.py
test: tests/decode/test_methods.py, tests/decode/test_distill.py,
  tests/train/claims/decode/test_lossless.py
run: paraxis reproduce eagle
cost: 2400 CPU-seconds
expect: EQ greedy and drawn texts of 20 prompts are those of decoding one by one
  with the judge replay, float64, two patterns, whatever the layer's parameters;
  the joint of 4 tokens over 4 letters, 40,000 texts, is the model's with
  rejection. LEARN, SmolLM2-135M, NOT REPRODUCED, one seed: 1.47 tokens a call,
  greedy, 12 held-out prompts, of 4.2M parameters, where Medusa's heads of 4.0M
  give 1.69.
differs: trained for 600 steps of 512 tokens, mostly the model's own
  (medusa.py), where the paper's layer sees some 70,000 dialogues: its first
  draft is the model's choice for .29 of held-out tokens, the second and third
  for .24 and .23 where those before are right, and its loss still falls (7.7 to
  3.8), so nothing is said about layers that are trained to the end. A chain of
  4 drafts, no tree, against a tree of 24. The layer begins as the model's last
  one, which reads features after the final norm. It learns by the training-time
  test of EAGLE-3 (arXiv:2503.01840, section 3.2): the model's features for the
  text, its own for the drafts behind every token, three passes (the paper's
  code: seven), weighted by .8^j. Not of EAGLE-3: features of three layers, a
  head of its own. It learns the model's distribution by cross entropy, and
  features at a tenth of it (EAGLE: the other way round; EAGLE-3: no features);
  EAGLE's noise of +-.1 on features, against errors of its own, is not needed
  then. Trained without that test, but from its own features before all tokens,
  it gave 1.44. No time is measured.
"""

from paraxis.configs import presets

METHOD = dict(method='eagle', drafts=3)
MODELS = [{'model.vocab_size': 12},
          {'model.vocab_size': 12, 'model.pattern': 'WFN'}]  # fmt: skip
OWN = dict(layers=0, tokens=90_000, own=96, length=128, words=4096, choices=4)
EAGLE = OWN | dict(steps=600, batch=512)
MEDUSA = OWN | dict(heads=3, blocks=4, steps=1000, rate=2e-3)


def get_config():
  """A small decoder on bytes."""
  return presets.tiny(num_layers=2, window=16)


def claims():
  """What `paraxis reproduce eagle` checks."""
  from paraxis.train.claims.decode import lossless
  from paraxis.train.claims.decode import tokens_a_call

  text = lossless.texts(METHOD, MODELS, 'eagle')
  joint = lossless.joint(METHOD | dict(judge='rejection'), 'eagle')
  more = dict(
    check=tokens_a_call.more_than,
    pair=[dict(method='eagle', drafts=4), dict(method='medusa', drafts=24)],
    drafts=[EAGLE, MEDUSA], prompts=[12, 48, 48], parameters_within=1.1,
    admits='not reproduced',
  )  # fmt: skip
  return [
    ('texts of one by one', 'EQ', text, None),
    ('joint of 4 tokens', 'EQ', joint, None),
    ('tokens a call above those of Medusa', 'LEARN', more, None),
  ]


def knockouts():
  """A draft is kept that is not the draw; what is dropped is drawn from p."""
  from paraxis.train.claims.decode import lossless

  return [
    ('keeps_one_more', 'texts of one by one', lossless.keeps_one_more),
    ('from_p', 'joint of 4 tokens', lossless.from_p,
     lossless.TENTH),
  ]  # fmt: skip
