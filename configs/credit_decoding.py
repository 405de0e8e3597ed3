"""CreditDecoding: a token that was the likeliest before is believed sooner

paper: arXiv:2510.06133
mechanism: decode/unmask/policies.py, decode/unmask/canvas.py
test: tests/decode/unmask/test_policies.py, tests/decode/unmask/test_unmask.py,
  tests/train/claims/decode/test_credit.py
run: paraxis reproduce credit_decoding
cost: 1,800 CPU-seconds
expect: EQ every call takes the tokens that a loop in NumPy takes, with log
  probabilities within 1e-5 nats. LEARN, NOT REPRODUCED: 3 seeds, replacements
  in lists of 8: 1.02 (.82 to 1.31) times fewer calls than the best threshold,
  1.0% (0 to 2%) of the right answers lost (asked: 1.5 times, 2%); 4.99 calls,
  4.91 with the threshold alone, 8 one by one.
differs: lists of 8 items and masked models of 0.6M parameters, where the paper
  has LLaDA-8B and questions in words. Copies and sorted lists are sure at once
  and shuffles never: neither leaves anything to a credit. Where replacements
  are, a credit goes to the likeliest token of a place that is as unsure in
  every call: the same calls for the same answers lost as of a lower threshold.
  Of 24 pairs of threshold and weight and of 8 thresholds those are compared
  that have the fewest calls on 200 other lists. The paper's 5.48 is over one
  token a call, where ours is 1.6.
"""

from paraxis.configs import presets

# With m places open, an item is kept with probability 1 - 1/m.
THRESHOLDS = [0.84, 0.86, 0.87, 0.88, 0.89, 0.9, 0.92, 0.95]
WEIGHTS = [0.2, 0.4, 0.7]
CREDIT = dict(credit_decay=0.8, credit_power=0.2)


def get_config():
  """A small masked model on lists."""
  return presets.masked_lists()


def claims():
  """What `paraxis reproduce credit_decoding` checks."""
  from paraxis.train.claims.decode import credit

  above = [dict(count='threshold', threshold=t) for t in THRESHOLDS]
  exact = dict(
    check=credit.exact, changes=presets.SMALL_MASKED, prompts=6, new=13,
    policy=CREDIT
    | dict(count='threshold', threshold=0.4, block=8, credit_weight=0.7),
    within=1e-5,
  )  # fmt: skip
  fewer = dict(
    check=credit.fewer, on=presets.LISTS, operations=['replace'],
    ours=[x | CREDIT | dict(credit_weight=w) for w in WEIGHTS for x in above],
    against=above, bounds=[1.5, 0.02],
    lists_of=[8, 100], admits='not reproduced',
  )  # fmt: skip
  return [
    ('credits are a sum over calls', 'EQ', exact, None),
    ('fewer calls than the best threshold', 'LEARN', fewer, '5.48 times'),
  ]


def knockouts():
  """Credits are not less from call to call."""
  from paraxis.train.claims.decode import credit

  return [
    ('never_forgets', 'credits are a sum over calls', credit.never_forgets)
  ]
