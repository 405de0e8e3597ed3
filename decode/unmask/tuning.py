"""A masked model learns from what it decoded: fewer calls, or better answers.

    certainty   on the model's own texts, with one block half masked and what is
                behind it whole (dParallel, arXiv:2509.26488, section 3.2):

                  cross entropy + weight x entropy(softmax(z / 1/2)),

                the entropy of masks whose likeliest token is the text's alone:
                what is right becomes sure, so that a threshold takes it sooner

    trajectory  of every call the canvas as it was, and the tokens that it made
                final (CJ-GRPO, arXiv:2509.23924, section 5):

                  - mean over texts, over calls of each, over tokens of
                    min(r A, clip(r, 1 - CLIP, 1 + CLIP) A),
                  r = p(token | canvas) / p when it was drawn

                A is a text's reward less the mean of texts of the same prompt,
                over their deviation. The order of decoding is kept, as the
                loop's record (trace.py) has it; drawn at temperature 1

For model.visibility=full, whose calls read the whole row.

Legend: N rows, S tokens of a row, K calls, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paraxis.models import batch as batch_lib

SHARP = 0.5  # temperature of the probabilities whose entropy falls
CLIP = 0.2
PROMPT, NEVER = -1, 2**30  # in place of a call


class Rollouts(NamedTuple):
  """Texts, and the order in which they were decoded; (N, S) NumPy arrays.

  ids: int32. there: bool, places of a row. when: int32, the call that made a
  token; PROMPT: none had to; NEVER: none did, the text had ended. logprobs:
  float32, when it was drawn.
  """

  ids: Any
  there: Any
  when: Any
  logprobs: Any

  @classmethod
  def of(cls, prompts, results, new):
    """Of what `Generator.generate` gave with a trace.

    Args:
      prompts: lists of ids. results: one each. new: its max_new_tokens.

    Raises:
      ValueError: canvases that do not follow each other behind the prompt, as
        those of model.visibility=block.
    """
    size = max(map(len, prompts)) + new
    shape = len(prompts), size
    made = cls(
      np.zeros(shape, np.int32), np.zeros(shape, bool),
      np.full(shape, PROMPT, np.int32), np.zeros(shape, np.float32),
    )  # fmt: skip
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
      at, end = len(prompt), len(prompt) + new
      made.ids[i, :at], made.there[i, :end] = prompt, True
      made.when[i, at:end] = NEVER
      trace, begins = result['trace'], True
      for call in range(trace.calls):
        masks = trace.canvas[call] < 0
        if begins and not masks[: end - at].all():
          raise ValueError(f'call {call} is not of a canvas of masks at {at}')
        taken = np.flatnonzero(trace.final[call])
        made.ids[i, at + taken] = trace.tokens[call, taken]
        made.when[i, at + taken] = call
        made.logprobs[i, at + taken] = trace.logprobs[call, taken]
        begins = not (masks & ~trace.final[call]).any()
        at += trace.canvas.shape[1] if begins else 0
    return made

  def calls(self, mask):
    """(canvases, taken, text): of every call of every text, as rows.

    canvases: (K N, S) int32, ids before the call. taken: (K N, S) bool, what it
    made final. text: (K N,) the number of the text.
    """
    calls = range(self.when[self.when < NEVER].max() + 1)
    before = [np.where(self.when >= k, mask, self.ids) for k in calls]
    taken = [self.when == k for k in calls]
    texts = np.tile(np.arange(len(self.ids)), len(calls))
    return np.concatenate(before), np.concatenate(taken), texts


def logits(model, params, ids, there):
  """z (N, S, V) float32 of rows; no mask is drawn.

  Args:
    model: decoder.Decoder of model.visibility=full. params: {path: array}, as
      it is trained.
  """
  ones = there.astype(jnp.int32)
  places = jnp.broadcast_to(
    jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape
  )
  batch = batch_lib.Batch(ids, None, ones, places, None, None)
  z = model.logits(params, model.features(params, batch)[0])
  if model.config.mask_shift:
    z = jnp.roll(z, 1, 1)
  mask = jnp.arange(z.shape[-1]) == model.config.mask_id
  return jnp.where(mask, -jnp.inf, z.astype(jnp.float32))


def certainty(z, ids, masked, weight):
  """() nats: of the tokens, and `weight` of the entropy of right ones.

  Args:
    z: (N, S, V). ids: (N, S) int32. masked: (N, S) bool.
  """
  picked = jnp.take_along_axis(jax.nn.log_softmax(z), ids[..., None], -1)
  nll = _mean(-picked[..., 0], masked)
  log_p = jax.nn.log_softmax(z / SHARP)
  p = jnp.exp(log_p)
  entropy = -jnp.where(p > 0, p * jnp.where(p > 0, log_p, 0), 0).sum(-1)
  right = masked & (jnp.argmax(z, -1) == ids)
  return nll + weight * _mean(entropy, right)


def trajectory(z, ids, taken, old, advantage, text):
  """(loss, largest |r - 1|) of rows that are canvases before a call.

  Args:
    z: (N, S, V). ids: (N, S) int32. taken: (N, S) bool, tokens that the call
      made final; a row without any is of a text that has ended. old: (N, S),
      their log probabilities when they were drawn. advantage: (N,). text: (N,)
    int32, which of at most N texts a row is of: all weigh alike, however many
    calls they took.
  """
  picked = jnp.take_along_axis(jax.nn.log_softmax(z), ids[..., None], -1)
  ratio = jnp.exp(jnp.where(taken, picked[..., 0] - old, 0))
  a = advantage[:, None]
  gain = jnp.minimum(ratio * a, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * a)
  each = jnp.where(taken, gain, 0).sum(1) / jnp.maximum(taken.sum(1), 1)
  live = taken.any(1)
  calls = jnp.zeros(len(live)).at[text].add(live)
  mean = jnp.where(live, each / jnp.maximum(calls[text], 1), 0).sum()
  loss = -mean / jnp.maximum((calls > 0).sum(), 1)
  return loss, jnp.where(taken, abs(ratio - 1), 0).max()


def _mean(x, part):
  return jnp.where(part, x, 0).sum() / jnp.maximum(part.sum(), 1)


def advantages(rewards, group):
  """(N,) of rewards (N,), `group` texts of each prompt after each other."""
  each = np.asarray(rewards, np.float32).reshape(-1, group)
  out = (each - each.mean(1, keepdims=True)) / (
    each.std(1, keepdims=True) + 1e-4
  )
  return out.reshape(-1)


def half_masked(ids, start, there, width, rng):
  """(masks, those that the loss is of), (N, S) bool: half of one block of each
  row; behind it all tokens are masks, and have no loss.

  Args:
    start: (N,) where answers begin. there: (N, S) bool. width: of a block.
    rng: numpy Generator.
  """
  place = np.arange(ids.shape[1])
  end = there.sum(1)
  blocks = -(-(end - start) // width)
  first = start + width * rng.integers(0, np.maximum(blocks, 1))
  inside = (place >= first[:, None]) & (place < first[:, None] + width)
  behind = place >= first[:, None] + width
  half = there & inside & (rng.random(ids.shape) < 0.5)
  return half | (there & behind), half


class Tuner:
  """Steps on losses of logits.

  params: {path: array}, as they are trained; those of the last step.
  """

  def __init__(self, model, params, tx, loss):
    """tx: of optax, of clipped gradients. loss: (z, *arrays) -> (value, number
    that is reported)."""
    self._tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    self.params = jax.tree.map(jnp.array, params)
    self._state = self._tx.init(self.params)

    def total(params, canvas, there, given):
      return loss(logits(model, params, canvas, there), *given)

    @jax.jit
    def update(params, state, *rest):
      (_, found), grads = jax.value_and_grad(total, has_aux=True)(params, *rest)
      change, state = self._tx.update(grads, state, params)
      return optax.apply_updates(params, change), state, found

    self._update = update

  def step(self, canvas, there, *given) -> float:
    """One update on canvases (N, S); the loss's number."""
    arrays = jax.tree.map(jnp.asarray, (canvas, there, given))
    self.params, self._state, found = self._update(
      self.params, self._state, *arrays
    )
    return float(found)
