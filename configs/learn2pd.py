"""Learn2PD: a filter that knows from confidences which tokens are right

paper: arXiv:2509.25188
mechanism: decode/unmask/filters.py
test: tests/decode/unmask/test_filters.py, tests/decode/unmask/test_unmask.py,
  tests/train/claims/decode/test_traces.py
run: paraxis reproduce learn2pd
cost: 2,400 CPU-seconds
expect: LEARN, 3 seeds, lists of 8, greedy: copies and sorted lists take as many
  calls as a decoder that knows the end, 1.00, an eighth of one by one, and lose
  no answer (asked: within 10%). NOT REPRODUCED: replacements take .91 (.76 to
  1.06) of the calls of the best threshold, .7% of the answers lost (asked: .9
  by two standard errors); .84 (.75 to 1.01) on models trained another time;
  both beside the threshold that is best on the lists asked, where it is chosen
  on others now.
differs: two operations of parallelbench whose answers are sure at once: the
  oracle is near for whoever is as sure, and a filter that is sure of everything
  would pass that claim too. Where answers are not (replacements) it is not: it
  knows which place is left to the last, and confidences do not show it. Filters
  have a hidden layer of the canvas's width; thresholds, theirs and those of the
  confidence, are the fastest that lose no answer of the lists that the filters
  learned from. Masked models of 0.6M parameters, trained on lists, where the
  paper has LLaDA-8B. A text that has ended stops here anyway (the paper's
  second part).
"""

from paraxis.configs import presets

CHOSEN = [0.6, 0.8, 0.85, 0.9, 0.93, 0.96]
ASKED = dict(chosen=CHOSEN, lists_of=[8, 50], steps=1000)


def get_config():
  """A small masked model on lists."""
  return presets.masked_lists()


def claims():
  """What `paraxis reproduce learn2pd` checks."""
  from paraxis.train.claims.decode import traces

  shared = ASKED | dict(check=traces.filtered, on=presets.LISTS)
  sure = shared | dict(
    operations=['copy', 'sort'], against=[], bounds=[1.1, 0.02]
  )
  beside = shared | dict(
    operations=['replace'],
    against=CHOSEN,
    bounds=[0.9, 0.02],
    admits='not reproduced',
  )
  return [
    ('as few calls as who knows the end', 'LEARN', sure, None),
    ('fewer calls than any threshold', 'LEARN', beside, None),
  ]


def knockouts():
  """The filter has learned nothing."""
  none = {'steps': 0}
  return [('untrained', 'as few calls as who knows the end', none)]
