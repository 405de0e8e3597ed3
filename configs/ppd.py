"""PPD: prompt tokens behind every draft say what comes next

paper: arXiv:2405.18628
mechanism: decode/drafts/prompt_tokens.py, decode/trees.py,
  decode/drafts/distill.py
test: tests/decode/test_methods.py, tests/decode/test_distill.py,
  tests/train/claims/decode/test_lossless.py
run: paraxis reproduce ppd
cost: 0 CPU-seconds
expect: x
differs: x
"""

from paraxis.configs import presets

METHOD = dict(method='ppd', drafts=5)
DRAFT = dict(layers=0, heads=3, steps=100, batch=64, length=64, tokens=20_000)


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
    check=tokens_a_call.on_real_text, method=dict(method='ppd', drafts=7),
    draft=DRAFT, prompts=[12, 48, 48], domains=[], at_least=1.3,
  )  # fmt: skip
  return [
    ('texts of one by one', 'EQ', text, None),
    ('joint of 4 tokens, a tree', 'EQ', joint, None),
    ('tokens a call of SmolLM2', 'LEARN', real, '2.49 x, in time'),
  ]


def knockouts():
  """The first child is kept whatever was drawn."""
  from paraxis.train.claims.decode import lossless

  return [
    ('first_child', 'texts of one by one', lossless.first_child),
    ('first_child_drawn', 'joint of 4 tokens, a tree', lossless.first_child),
  ]
