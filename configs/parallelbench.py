"""ParallelBench: what tokens that are drawn together cannot know

paper: arXiv:2510.04767
mechanism: decode/unmask/canvas.py, decode/unmask/policies.py
test: tests/decode/unmask/test_unmask.py, tests/decode/unmask/test_policies.py,
  tests/train/claims/test_lists.py, tests/train/claims/decode/test_canvases.py
run: paraxis reproduce parallelbench
cost: 2,200 CPU-seconds
expect: LEARN, 3 seeds: of 11 policies none keeps more answers possible than
  tokens drawn together allow, 1.7 standard errors above at most with lists of 4
  and 8 together (.7 in another training), below 3, as asked, of each; shuffles
  96.7% right one by one, 4.2% at once (ceiling 4.8%), replacements 97.7% and
  40.5% (40.7%), copies and sorted lists 99.3% and more either way; there a
  threshold needs an eighth of the calls and loses no answer.
differs: four of the paper's operations on lists of 4 and 8 of 12 items, in a
  masked model of 0.6M parameters that is trained on them, where the paper asks
  Dream and LLaDA in words; no texts and no puzzles. Answers are drawn at
  temperature 1 and have the length of the list. Policies that take places for
  what was drawn there (confidence, above greedy) draw from another distribution
  and are shown, not judged: with a factor they are 5.2 standard errors above on
  replacements. That they have no ceiling, nor the counts of calls that look at
  the answer so far, was seen when a first form of this claim failed. Lists of 5
  to 7 are learned from and not asked; filters, sub-blocks and confidence above
  a threshold are not among the policies. The sum of conditional total
  correlations (the paper's bound) is a column of the table, of the counts of
  tokens as they fell, and decides nothing. That a threshold loses nothing is
  asked of answers that are right at once too: a call for all tokens would pass
  that claim, which shows calls that are saved and not whose they are.
"""

from paraxis.configs import presets

SURE = dict(score='margin')
POLICIES = {
  'one by one': dict(score='entropy'),
  'two a call': dict(score='entropy', tokens=2),
  'four a call': dict(score='entropy', tokens=4),
  'all at once': dict(score='entropy', tokens=8),
  'random, two': dict(score='random', tokens=2),
  'margin, two': SURE | dict(tokens=2),
  'threshold': SURE | dict(count='threshold', threshold=0.8),
  'factor': SURE | dict(count='factor', factor=1.0),
  'hierarchy': SURE | dict(count='hierarchy', threshold=0.8),
  'ascending': dict(score='entropy', count='ascending'),
  'credit': SURE | dict(count='threshold', threshold=0.8, credit_weight=0.7),
  'confidence, two': dict(tokens=2),
  'confidence, factor': dict(count='factor', factor=1.0),
}
DRAWN = ['confidence, two', 'confidence, factor']


def get_config():
  """A small masked model on lists."""
  return presets.masked_lists()


def claims():
  """What `paraxis reproduce parallelbench` checks."""
  from paraxis.train.claims.decode import canvases

  ceilings = presets.LISTS | dict(
    check=canvases.ceilings, policies=POLICIES, shown=DRAWN,
    lists_of=[[4, 8], 100], learned=[0.85, 0.5],
  )  # fmt: skip
  sure = presets.LISTS | dict(
    check=canvases.calls, policies=[{}, dict(count='threshold')],
    operations=['copy', 'sort'], bounds=[4.0, 0.02], lists_of=[8, 100],
  )  # fmt: skip
  return [
    ('no policy is above its ceiling', 'LEARN', ceilings, None),
    ('a threshold on answers that are sure', 'LEARN', sure, None),
  ]


def knockouts():
  """Tokens that were drawn one by one are said to be drawn together; nothing is
  above the threshold."""
  from paraxis.train.claims.decode import canvases

  one = {'policies': [{}, {}]}
  return [
    ('drawn_alone', 'no policy is above its ceiling', canvases.drawn_alone),
    ('no_threshold', 'a threshold on answers that are sure', one),
  ]
