"""CPPD: counts and place-holders read all characters of a picture in one pass

paper: arXiv:2307.12270
mechanism: models/frames.py, train/claims/decode/one_pass.py
test: tests/models/test_frames.py, tests/train/claims/decode/test_one_pass.py
run: paraxis reproduce cppd
cost: 1,200 CPU-seconds
expect: LEARN, 3 seeds: one pass has 5.5% edits a digit (5.5 to 5.6), a causal
  decoder behind the same encoder, a pass for every digit, 7.0% (5.1 to 10.1,
  one seed had not learned as much); at most 2 points more were asked. After 600
  steps both know less: 11.0% and 21.5%.
partial: training reads text, which has no frames; claims train by a loop of
  their own (train/claims/on_frames.py), on one device.
differs: drawn digits, column by column, in place of photographs of words, in
  encoders and decoders of 2 layers. Queries of classes (how often each is
  there) and place-holders (whether it exists, and its class) stand behind the
  encoded columns in one row that all read from both sides, where the paper has
  a module for each and attends to the picture across. The knock-out is of the
  order alone: whether counts help a decoder of one pass is not measured.
"""

from paraxis.configs import presets

FIELDS = presets.FRAMES['fields'] | {'train.steps': 1500}
ON = presets.FRAMES | dict(task='digits', fields=FIELDS)


def get_config():
  """A small decoder; claims give it frames."""
  return presets.tiny()


def claims():
  """What `paraxis reproduce cppd` checks."""
  from paraxis.train.claims.decode import one_pass

  beside = dict(check=one_pass.beside, on=ON, model='counted', by=0.02)
  return [('one pass beside one for every digit', 'LEARN', beside, None)]


def knockouts():
  """Which place-holders exist is not learned."""
  from paraxis.train.claims.decode import one_pass

  claim = 'one pass beside one for every digit'
  return [('no_order', claim, one_pass.no_order)]
