"""Speculative Jacobi decoding: a call judges the draws of the call before

paper: arXiv:2410.01699
mechanism: decode/drafts/jacobi.py, decode/judges.py
test: tests/decode/test_methods.py,
  tests/train/claims/decode/test_fewer_calls.py
run: paraxis reproduce speculative_jacobi
cost: 900 CPU-seconds
expect: EQ greedy and drawn texts of 20 prompts are those of decoding one by one
  with the judge replay, float64, three patterns; the joint of 4 tokens over 4
  letters, 40,000 texts, is the model's with rejection. LEARN, 3 seeds: .169
  (.168 to .170) of the calls for a picture with rejection, .172 with replay
  (asked: .5; the paper: about .5, of large images).
differs: pictures are synthetic, 16 x 16 pixels of 4 colours, a few rectangles
  and 2% of other pixels, by a model of 1M parameters after 300 steps: they are
  easier to guess than images. New places repeat the last draft, as a pixel's
  left neighbour; the paper also begins with draws and with the row above. A
  window of 16. With replay the noise of a place stays, so its drafts settle and
  the pictures are those of decoding one by one; that is ours. On text it saves
  little: 1.05 tokens a call of models with random parameters. No time is
  measured.
"""

from paraxis.configs import presets

METHOD = dict(method='jacobi', drafts=5)
MODELS = [{}, {'model.pattern': 'WFN'}, {'model.pattern': 'GF'}]
PICTURES = {
  'model.d_model': 128, 'model.d_ff': 352, 'model.num_layers': 5,
  'model.num_heads': 4, 'train.steps': 300, 'train.batch_size': 16,
  'optimizer.learning_rate': 2e-3, 'optimizer.warmup_steps': 30,
}  # fmt: skip
WINDOW = dict(method='jacobi', drafts=16)


def get_config():
  """A small decoder on bytes."""
  return presets.tiny(num_layers=2, window=16)


def claims():
  """What `paraxis reproduce speculative_jacobi` checks."""
  from paraxis.train.claims.decode import fewer_calls
  from paraxis.train.claims.decode import lossless

  text = lossless.texts(METHOD, MODELS)
  joint = lossless.joint(METHOD | dict(judge='rejection'))
  pictures = dict(
    check=fewer_calls.pictures,
    task=dict(side=16, colours=4, shapes=4, noise=0.02), fields=PICTURES,
    methods={
      'rejection': WINDOW | dict(judge='rejection'), 'replay': WINDOW,
    },
    at_most=0.5, rows=64, seeds=[0, 1, 2],
  )  # fmt: skip
  return [
    ('texts of one by one', 'EQ', text, None),
    ('joint of 4 tokens', 'EQ', joint, None),
    ('calls for a picture', 'LEARN', pictures, '0.5, of large images'),
  ]


def knockouts():
  """A draft is kept that is not the draw; what is dropped is drawn from p; a
  window of one draft."""
  from paraxis.train.claims.decode import lossless

  narrow = {'methods': {'rejection': WINDOW | dict(judge='rejection',
                                                   drafts=1)}}  # fmt: skip
  return [
    ('keeps_one_more', 'texts of one by one', lossless.keeps_one_more),
    ('from_p', 'joint of 4 tokens', lossless.from_p, lossless.TENTH),
    ('one_draft', 'calls for a picture', narrow | {'seeds': [0]}),
  ]
