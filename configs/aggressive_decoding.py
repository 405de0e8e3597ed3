"""Aggressive decoding: the source is the draft of its correction

paper: arXiv:2205.10350
mechanism: decode/drafts/copying.py
test: tests/decode/test_copying.py,
  tests/train/claims/decode/test_fewer_calls.py
run: paraxis reproduce aggressive_decoding
cost: 150 CPU-seconds
expect: EQ greedy and drawn texts of 20 prompts are those of decoding one by
  one, float64, three patterns; LEARN, 3 seeds, tokens a call: 11.1 where 5% of
  the words are misspelled (the paper: 7 to 9 times faster), 23.5 at none, 7.0
  at 10%, 4.5 at 20%, 2.3 at 40%, 1.4 at 70%, 1.0 at all.
differs: a decoder alone, whose prompt is the source and a token that ends it;
  words of a synthetic language, 48 a text, misspelled in one way each, never
  added or left out, and corrected without a fault, so calls are those of the
  source's own changes; 24 drafts a call. Where the text and the source part, we
  go on one word further at once, or behind the last two or three words where
  they stand in the source; the paper decodes one by one until a suffix is
  found. No time is measured.
"""

from paraxis.configs import presets

METHOD = dict(method='aggressive', drafts=5)
MODELS = [{}, {'model.pattern': 'WFN'}, {'model.pattern': 'GF'}]
TASK = dict(count=48, words=24, noise=0.05)
TRAINED = {
  'model.d_model': 64, 'model.num_layers': 2, 'train.steps': 320,
  'train.batch_size': 32, 'optimizer.learning_rate': 3e-3,
  'optimizer.warmup_steps': 30,
}  # fmt: skip
LONG = dict(method='aggressive', drafts=24)


def get_config():
  """A small decoder on bytes."""
  return presets.tiny(num_layers=2, window=16)


def claims():
  """What `paraxis reproduce aggressive_decoding` checks."""
  from paraxis.train.claims.decode import fewer_calls
  from paraxis.train.claims.decode import lossless

  text = lossless.texts(METHOD, MODELS)
  fewer = dict(
    check=fewer_calls.corrections, task=TASK, fields=TRAINED, method=LONG,
    noises=[0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0], expected=[0.05, 5.0], rows=32,
    seeds=[0, 1, 2],
  )  # fmt: skip
  return [
    ('texts of one by one', 'EQ', text, None),
    ('tokens a call, 5% misspelled', 'LEARN', fewer, '7 to 9, in time'),
  ]


def knockouts():
  """A draft is kept that is not the draw; the copy stays behind a mistake."""
  from paraxis.train.claims.decode import fewer_calls
  from paraxis.train.claims.decode import lossless

  fewer = 'tokens a call, 5% misspelled'
  return [
    ('keeps_one_more', 'texts of one by one', lossless.keeps_one_more),
    ('never_again', fewer, fewer_calls.never_again, {'seeds': [0]}),
  ]
