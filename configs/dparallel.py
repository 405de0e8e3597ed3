"""dParallel: a masked model that is sure of what it would say

paper: arXiv:2509.26488
mechanism: decode/unmask/tuning.py
test: tests/decode/test_tuning.py, tests/train/claims/decode/test_traces.py
run: paraxis reproduce dparallel
cost: 2,600 CPU-seconds
expect: LEARN, NOT REPRODUCED, 3 seeds, shuffles and replacements of 8, greedy:
  1.6 times fewer calls than one by one (1.04 before), and 20% of the right
  answers are lost, after 200 steps on 400 texts of the model itself (asked: 4
  times, 2%).
differs: the texts, one by one, of lists whose answers are as likely as each
  other follow from small differences that 400 texts do not teach; copies and
  sorted lists are sure without any tuning. One view of each text, without the
  complementary masks, all parameters where the paper has LoRA, thousands of
  texts and LLaDA-8B. One rate and number of steps were tried. The figures were
  taken by the functions of the claim on the models of parallelbench, not yet
  through reproduce.
partial: decode/unmask/tuning.py tunes the models of claims; no command does.
"""

from paraxis.configs import presets


def get_config():
  """A small masked model on lists."""
  return presets.masked_lists()


def claims():
  """What `paraxis reproduce dparallel` checks."""
  from paraxis.train.claims.decode import traces

  surer = dict(
    check=traces.surer, on=presets.LISTS, operations=['shuffle', 'replace'],
    tuned=dict(steps=200, rate=1e-3, weight=2.0),
    policy=dict(count='threshold'), bounds=[4.0, 0.02], lists_of=[8, 50],
    admits='not reproduced',
  )  # fmt: skip
  return [('a quarter of the calls', 'LEARN', surer, '30 of 256 steps')]
