"""Medusa: heads on the model's features draft a tree

paper: arXiv:2401.10774
mechanism: decode/heads.py, decode/trees.py, decode/judges.py,
  decode/distill.py
test: tests/decode/test_methods.py, tests/decode/test_trees.py,
  tests/decode/test_distill.py, tests/train/claims/decode/test_lossless.py
run: paraxis reproduce medusa
cost: 900 CPU-seconds
expect: TODO
differs: TODO
"""

from paraxis.configs import presets

METHOD = dict(method='medusa', drafts=11)
DRAFT = dict(layers=0, heads=3, steps=200, tokens=60_000)


def get_config():
  """A small decoder on bytes."""
  return presets.tiny(num_layers=2, window=16)


def claims():
  """What `paraxis reproduce medusa` checks."""
  from paraxis.train.claims.decode import lossless
  from paraxis.train.claims.decode import tokens_a_call

  text = dict(
    check=lossless.same_text, method=METHOD,
    changes=[{'model.vocab_size': 12},
             {'model.vocab_size': 12, 'model.pattern': 'WFN'}],
    prompts=20, new=24, random_draft='medusa',
  )  # fmt: skip
  joint = dict(
    check=lossless.same_distribution, method=METHOD, changes={}, letters=4,
    length=4, samples=40_000, random_draft='medusa',
  )  # fmt: skip
  typical = joint | dict(
    check=lossless.other_distribution, method=METHOD | dict(judge='typical')
  )
  real = dict(
    check=tokens_a_call.on_real_text, method=dict(method='medusa', drafts=24),
    draft=DRAFT, prompts=[12, 48, 48], domains=[], at_least=1.8,
  )  # fmt: skip
  return [
    ('texts of one by one', 'EQ', text, None),
    ('joint of 4 tokens, a tree', 'EQ', joint, None),
    ('typical acceptance is another joint', 'EQ', typical, None),
    ('tokens a call of SmolLM2', 'LEARN', real, '2.2 to 3.6 x, in time'),
  ]


def knockouts():
  """The first child is kept whatever was drawn; typical acceptance says that it
  is lossless; heads that nobody trained."""
  from paraxis.train.claims.decode import lossless

  return [
    ('first_child', 'texts of one by one', lossless.first_child),
    ('first_child_drawn', 'joint of 4 tokens, a tree', lossless.first_child),
    ('says_lossless', 'typical acceptance is another joint',
     lossless.judged_as_lossless),
    ('untrained', 'tokens a call of SmolLM2',
     {'draft': DRAFT | dict(steps=1, tokens=8192)}),
  ]  # fmt: skip
