"""PPD: prompt tokens behind every draft say what comes next

paper: arXiv:2405.18628
mechanism: decode/drafts/prompt_tokens.py, decode/trees.py,
  decode/drafts/distill.py
test: tests/decode/test_methods.py, tests/decode/test_distill.py,
  tests/train/claims/decode/test_lossless.py
run: paraxis reproduce ppd
cost: 1200 CPU-seconds
expect: EQ greedy and drawn texts of 20 prompts are those of decoding one by one
  with the judge replay, float64, two patterns, whatever the prompt tokens'
  embeddings; so is the joint of 4 tokens, chi-square p .003 (the texts are the
  same, so it is that of one by one). LEARN, SmolLM2-135M, one seed: 1.57 tokens
  a call, greedy, 12 held-out prompts of 48 tokens (asked: 1.3; the paper: up to
  2.49 times faster), with 1,728 trained numbers, .0013% of the model; 1.41 with
  embeddings as they begin, so most of it is the tree's and the model's own.
differs: every draft has all three prompt tokens behind it (the paper's dynamic
  tree gives unlikely drafts fewer, and adapts to what was guessed), so a call
  of 7 drafts has 32 tokens in flight; one embedding each, no ensemble. Trained
  for 150 steps of 64 places, the model's own continuations of pieces of text;
  cross entropy of its choices among 4,096 words, not the distance of
  distributions. First choices are right for .24, .18 and .16 of held-out
  tokens, and the loss still falls (5.0 to 4.7). Training goes through the whole
  model. No time of decoding is measured.
"""

from paraxis.configs import presets

METHOD = dict(method='ppd', drafts=5)
DRAFT = dict(
  layers=0, heads=3, steps=150, batch=64, length=64, rate=5e-3, words=4096,
  tokens=20_000, own=32, choices=4,
)  # fmt: skip


def get_config():
  """A small decoder on bytes."""
  return presets.tiny(num_layers=2, window=16)


def claims():
  """What `paraxis reproduce ppd` checks."""
  from paraxis.train.claims.decode import lossless
  from paraxis.train.claims.decode import tokens_a_call

  text = lossless.texts(
    METHOD,
    [
      {'model.vocab_size': 12},
      {'model.vocab_size': 12, 'model.pattern': 'WFN'},
    ],
    'ppd',
  )
  joint = lossless.joint(METHOD, 'ppd')
  real = dict(
    check=tokens_a_call.by_few_numbers, method=dict(method='ppd', drafts=7),
    draft=DRAFT, prompts=[12, 48, 48], domains=[], at_least=1.3,
    share_at_most=2e-5,
  )  # fmt: skip
  return [
    ('texts of one by one', 'EQ', text, None),
    ('joint of 4 tokens, a tree', 'EQ', joint, None),
    ('tokens a call of SmolLM2', 'LEARN', real, '2.49 x, in time'),
  ]


def knockouts():
  """The first child is kept whatever was drawn; prompt tokens stay as they
  begin."""
  from paraxis.train.claims.decode import lossless

  return [
    ('first_child', 'texts of one by one', lossless.first_child),
    ('first_child_drawn', 'joint of 4 tokens, a tree', lossless.first_child,
     lossless.TENTH),
    ('untrained', 'tokens a call of SmolLM2',
     {'draft': DRAFT | dict(rate=0.0)}),
  ]  # fmt: skip
