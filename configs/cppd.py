"""CPPD: counts and place-holders read all characters of a picture in one pass

paper: arXiv:2307.12270
mechanism: models/frames.py, train/claims/decode/one_pass.py
test: tests/models/test_frames.py, tests/train/claims/decode/test_one_pass.py
run: paraxis reproduce cppd
cost: 1,700 CPU-seconds
expect: LEARN, 3 seeds: one pass has 5.5% edits a digit (5.1 to 5.7), a causal
  decoder behind the same encoder, a pass for every digit, 5.9% (5.3 to 6.9; in
  another run 7.0%, of one seed 10.1%); at most 2 points more, and 12% of it,
  were asked. After 600 steps both know less: 11.0% and 21.5%. Counting, NOT
  REPRODUCED: 5.5% edits where counts of classes are learned, 5.3% (4.9 to 5.7)
  where they are not, .12 +-.40 points more, 3 seeds.
partial: training reads text, which has no frames; claims train by a loop of
  their own (train/claims/on_frames.py), on one device.
differs: drawn digits, column by column, in place of photographs of words, in
  encoders and decoders of 2 layers. Queries of classes (how often each is
  there) and place-holders (whether it exists, and its class) stand behind the
  encoded columns in one row that all read from both sides, where the paper has
  a module for each and attends to the picture across. Without counts the
  queries of classes are read all the same. Lengths are nearly always right
  here (99%), which leaves counts little to tell. The causal decoder has the
  rate and the steps of the other; none was chosen for it.
"""

from paraxis.configs import presets

FIELDS = presets.FRAMES['fields'] | {'train.steps': 1500}
ON = presets.FRAMES | dict(task='digits', fields=FIELDS)
SHORT = ON | dict(fields=FIELDS | {'train.steps': 100})


def get_config():
  """A small decoder; claims give it frames."""
  return presets.tiny()


def claims():
  """What `paraxis reproduce cppd` checks."""
  from paraxis.train.claims.decode import one_pass

  beside = dict(
    check=one_pass.beside, on=ON, model='counted', by=0.02, at_most=0.12
  )
  counts = dict(
    check=one_pass.fewer_edits, on=ON, models=['counted', 'uncounted'],
    admits='not reproduced',
  )  # fmt: skip
  return [
    ('one pass beside one for every digit', 'LEARN', beside, None),
    ('fewer edits with counts learned', 'LEARN', counts, None),
  ]


def knockouts():
  """Which place-holders exist is not learned; neither model has learned
  much."""
  from paraxis.train.claims.decode import one_pass

  claim = 'one pass beside one for every digit'
  return [
    ('no_order', claim, one_pass.no_order),
    ('hardly_trained', claim, {'on': SHORT}),
  ]
