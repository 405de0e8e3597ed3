"""Paraformer: integrate-and-fire makes token embeddings of a sound at once

paper: arXiv:2206.08317
mechanism: models/frames.py
test: tests/models/test_frames.py, tests/train/claims/decode/test_one_pass.py
run: paraxis reproduce paraformer
cost: 10 CPU-seconds
expect: EQ integrate-and-fire as one product equals the loop over frames within
  1e-13, float64, tokens and their number.
partial: training reads text, which has no frames, and no model of one pass is
  trained here: neither the paper's error rates nor its speed are compared.
differs: only the encoder's end is here: frames in a batch (model.features), the
  weights of frames, integrate-and-fire and its quantity loss, and the choice of
  target embeddings to show where a first pass was wrong. There is no decoder of
  its own: model.visibility=full reads [frames; tokens] as one row, where the
  paper's attends to frames across. No training for the error rate (MWER).
"""

from paraxis.configs import presets


def get_config():
  """A small bidirectional decoder; the claim gives frames of its own."""
  return presets.tiny(visibility='full', mask_id=263)


def claims():
  """What `paraxis reproduce paraformer` checks."""
  from paraxis.train.claims.decode import one_pass

  loop = dict(check=one_pass.as_a_loop, rows=16, length=40, within=1e-13)
  return [('one product is the loop', 'EQ', loop, None)]


def knockouts():
  """A frame is not split between tokens."""
  from paraxis.train.claims.decode import one_pass

  return [('not_split', 'one product is the loop', one_pass.not_split)]
