"""dParallel: a masked model learns to be sure of its own texts

paper: arXiv:2509.26488
mechanism: decode/unmask/tuning.py
test: tests/decode/unmask/test_tuning.py,
  tests/train/claims/decode/test_traces.py
run: paraxis reproduce dparallel
cost: 2,800 CPU-seconds
expect: EQ the loss and its gradient are those of a loop in which tokens that
  are wrong have no entropy, 1e-9. LEARN, NOT REPRODUCED: 3 seeds, replacements
  in lists of 8, after 3,000 steps on 16,000 texts of its own: 2.81 (2.09 to
  3.65) times fewer calls than one by one, 1.0% (0 to 2%) of the right answers
  lost (asked: 4 times, 2%); the best threshold before it: 1.68 (1.37 to 2.12).
differs: lists of 8 items and masked models of 0.6M parameters, all of whose
  parameters are tuned, where the paper tunes LoRA of LLaDA-8B and Dream-7B on
  questions in words; one view of a text, no complementary masks. Copies and
  sorted lists are sure before it. What is learned is which place a text, one by
  one, leaves to the last: 2,000 texts were learned by heart (of one seed one by
  one fell to 87% right after 3,000 steps, 94% after 1,000). Thresholds are
  those with the fewest calls on 200 other lists. The learning rate falls along
  a cosine. Nearly all of its CPU-seconds are of one claim, 23 minutes of two
  cores: texts of its own are written one token a call.
partial: decode/unmask/tuning.py tunes the models of claims; no command does.
"""

from paraxis.configs import presets

TUNED = dict(texts=16000, steps=3000, rate=1e-3, weight=2.0)
THRESHOLDS = [0.5, 0.7, 0.8, 0.86, 0.88, 0.9, 0.93, 0.96, 0.98, 0.99]


def get_config():
  """A small masked model on lists."""
  return presets.masked_lists()


def claims():
  """What `paraxis reproduce dparallel` checks."""
  from paraxis.train.claims.decode import traces

  alone = dict(
    check=traces.right_alone, changes=presets.SMALL_MASKED, shape=[4, 12],
    weight=2.0, within=1e-9,
  )  # fmt: skip
  surer = dict(
    check=traces.surer, on=presets.LISTS, operations=['replace'],
    tuned=TUNED,
    policies=[dict(count='threshold', threshold=t) for t in THRESHOLDS],
    bounds=[4.0, 0.02], lists_of=[8, 100], admits='not reproduced',
  )  # fmt: skip
  return [
    ('what is right alone becomes sure', 'EQ', alone, None),
    ('a quarter of the calls', 'LEARN', surer, '8.5 times'),
  ]


def knockouts():
  """What is wrong becomes sure too."""
  from paraxis.train.claims.decode import traces

  return [
    ('sure_of_all', 'what is right alone becomes sure', traces.sure_of_all)
  ]
