"""What a step learns to predict: the next token, or the masked ones.

    next_token  token i + 1 at token i
    masked      every token of a row is replaced by model.mask_id with
                probability p, and is predicted where it is: (LLaDA,
                arXiv:2502.09992, section 2.2; MDLM, arXiv:2406.07524)

                  p = (1 - LEAST) u + LEAST,  u uniform in [0, 1)
                  loss = sum over masked of nll / p / tokens

                whose expectation is an upper bound of the nats a token.

    block       likewise, but every block of model.block tokens has a p of its
                own, and sees earlier blocks without masks (block diffusion,
                arXiv:2503.09573; models/mixers/pairs.py): ids in place of which
                a mask stands are - 1 - id

Sequences are those of the targets: of a document all tokens but the first,
which next_token never predicts either. With model.mask_shift a mask is
predicted at the token before it (Dream, Dimple, arXiv:2505.16990), and the
first token stands before them, never masked.

The noise of row i of step t is a function of (seed, t, i): every layout, number
of processes and microbatches, and a resumed run see the same. Rows of a step
have u in equal distances (MDLM, appendix; LLaDA draws each alone), so that a
step has little and much noise alike. With train.complementary rows 2i and
2i + 1 hold one text and one noise: what is masked in the first, with
probability p, is shown in the second, which masks the rest, with 1 - p (Fast-
dLLM v2, arXiv:2509.26328, section 3.2): every token is predicted once.

Legend: B rows of a step, T slots of a row.
"""

import numpy as np

from paraxis.configs.base import errors

LEAST = 1e-3  # of the probability of a mask
HELD_OUT = 2**31  # in place of a seed: the noise of held-out rows is one


def check(config):
  """UserError if a schema.Config's objective and its model do not fit."""
  model, says = config.model, f'train.objective={config.train.objective}'
  if model.features:
    raise errors.UserError(
      f'model.features={model.features}: training reads text, which has no '
      'frames (models/frames.py); set it to 0.'
    )
  if config.train.complementary:
    _check_views(config.train)
  if config.train.objective == 'next_token':
    if model.visibility != 'causal':
      raise errors.UserError(
        f'{says}: with model.visibility={model.visibility} a token sees the '
        'one that it predicts; take train.objective=masked, or causal.'
      )
    return
  if model.visibility == 'causal':
    raise errors.UserError(
      f'{says} predicts a mask from both sides, and model.visibility=causal '
      'shows one; take full or block.'
    )
  if config.train.objective == 'block' and not model.block:
    raise errors.UserError(
      f'{says} wants model.visibility=block and model.block tokens; the model '
      f'has model.visibility={model.visibility}.'
    )
  length = config.data.sequence_length
  if config.train.objective == 'block' and model.block > length:
    raise errors.UserError(
      f'{says}: model.block={model.block} is more than data.sequence_length='
      f'{length} tokens of a row, so no block would stand behind another one: '
      f'take at most {length}, or longer rows.'
    )
  if not 0 <= model.mask_id < model.vocab_size:
    raise errors.UserError(
      f'{says}: model.mask_id={model.mask_id} is no id of model.vocab_size='
      f'{model.vocab_size}: name one that no text has.'
    )


def check_mask(config, tokenizer):
  """UserError: text of the tokenizer may have the id that stands for a mask."""
  model, mask = config.model, config.model.mask_id
  if config.train.objective == 'next_token' or not tokenizer.is_ordinary(mask):
    return
  free = tokenizer.vocab_size  # the first id that no text has
  rows = max(model.vocab_size, -(-(free + 1) // 8) * 8)
  raise errors.UserError(
    f'train.objective={config.train.objective}: model.mask_id={mask} is an '
    f'ordinary token of data.tokenizer={tokenizer.name}, which text has: take '
    f'--config.model.vocab_size={rows} --config.model.mask_id={free}.'
  )


def _check_views(train):
  says = 'train.complementary=true'
  if train.objective == 'next_token':
    raise errors.UserError(
      f'{says}: train.objective=next_token masks nothing; take masked or block.'
    )
  if train.batch_size % 2 or train.batch_ramp:
    raise errors.UserError(
      f'{says} has two rows for a text: train.batch_size={train.batch_size} '
      f'must be even, and train.batch_ramp={train.batch_ramp!r} empty.'
    )


def views(config):
  """Rows of a step that hold one text."""
  return 2 if config.train.complementary else 1


def _stream(seed, t, i):
  """Random numbers of row i of step t."""
  counter = [0, 0, 0, i]
  return np.random.Generator(np.random.Philox(key=[seed, t], counter=counter))


def drawn(config, t=0, seed=None):
  """() int32: the key of step t, where something draws from one; or None.

  A recurrent depth, and directions (train/steps/zeroth_order.py).

  Args:
    config: schema.Config. seed: None: train.seed.
  """
  own = config.model.recurrence
  draws = own.core and own.spread or config.train.estimator != 'backprop'
  if not draws or seed == HELD_OUT:
    return None
  rng = np.random.default_rng([config.train.seed if seed is None else seed, t])
  return np.int32(rng.integers(2**31))


def batch(config, made, t, rows, count, seed=None):
  """A batch as the objective of a schema.Config has it.

  Args:
    made: models.batch.Batch of NumPy arrays (rows, T), for the next token; its
      denominator is kept.
    t: step. rows: of each row its number in the step, 0 .. count - 1.
    seed: None: train.seed.

  Returns:
    Batch; weights are 0 where nothing was masked. With `drawn`.
  """
  made = made._replace(draw=drawn(config, t, seed))
  if config.train.objective == 'next_token':
    return made
  model = config.model
  seed = config.train.seed if seed is None else seed
  length = made.tokens.shape[1]
  rows, each = np.asarray(rows), 1 if seed == HELD_OUT else views(config)
  other = (rows % each == 1)[:, None]
  rows, count = rows // each, count // each
  noise, u = np.moveaxis(
    np.stack([_stream(seed, t, i).random((2, length)) for i in rows]), 1, 0
  )
  if config.train.objective == 'block':  # that of a block's first target
    # A block is of slots, and with a shift targets stand a slot before theirs.
    inside = (made.positions + int(model.mask_shift)) % model.block
    first = np.arange(length) - np.minimum(inside, made.positions)
    u = np.take_along_axis(u, first, 1)
  else:
    same = _stream(seed, t, count).random()
    u = ((same + rows / count) % 1)[:, None]
  # Of two views neither masks nothing: weights stay below 1 / LEAST.
  p = (1 - each * LEAST) * u + LEAST
  masked = ((noise < p) != other) & (made.weights > 0)
  p = np.where(other, 1 - p, p)
  hidden, ids = masked, made.targets
  if model.mask_shift:
    # Slot i + 1 holds the target of slot i, where a document goes on.
    hidden, ids = np.roll(masked, 1, 1) & (made.positions > 0), made.tokens
  mask = -1 - ids if config.train.objective == 'block' else model.mask_id
  tokens = np.where(hidden, mask, ids)
  weights = made.weights * masked / np.where(masked, p, 1)
  return made._replace(
    tokens=tokens.astype(np.int32), weights=weights.astype(np.float32)
  )
