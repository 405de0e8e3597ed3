"""CreditDecoding: a token that was likeliest before is believed sooner

paper: arXiv:2510.06133
mechanism: decode/unmask/policies.py, decode/unmask/canvas.py
test: tests/decode/test_policies.py, tests/decode/test_unmask.py,
  tests/train/claims/decode/test_canvases.py
run: paraxis reproduce credit_decoding
cost: 2,300 CPU-seconds
expect: LEARN, NOT REPRODUCED at equal accuracy, 3 seeds, lists of 8: 2.6 times
  fewer calls than one by one and 1.4 times fewer than the threshold alone, and
  7% of the right answers are lost (asked: 1.5 times, 2%).
differs: credit is for texts whose tokens are settled before the model is sure;
  of these lists two operations are sure at once and two have answers that are
  as likely as each other, where credit for the token that happens to lead is
  credit for a mistake. Masked models of 0.6M parameters, trained on such lists,
  where the paper has LLaDA-8B and questions in words. Credit is kept for every
  token of the vocabulary, and forgotten with the canvas. The figures were taken
  by the functions of the claims on the models of parallelbench, not yet through
  reproduce.
"""

from paraxis.configs import presets

ALONE = dict(count='threshold')
CREDIT = ALONE | dict(credit_weight=0.7)


def get_config():
  """A small masked model on lists."""
  return presets.masked_lists()


def claims():
  """What `paraxis reproduce credit_decoding` checks."""
  from paraxis.train.claims.decode import canvases

  fewer = presets.LISTS | dict(
    check=canvases.calls, policies=[{}, CREDIT], bounds=[1.5, 0.02],
    operations=['copy', 'sort', 'shuffle', 'replace'], lists_of=[8, 50],
    admits='not reproduced',
  )  # fmt: skip
  beside = fewer | dict(policies=[ALONE, CREDIT], bounds=[1.0, 0.02])
  return [
    ('fewer calls than one by one', 'LEARN', fewer, '5.48'),
    ('fewer calls than the threshold alone', 'LEARN', beside, None),
  ]
