"""Experts that answer together: their probabilities, mixed as Bayes has it.

    p(y | x) = sum_e p(e | x) p_e(y | x),    p(e | x) ~ w_e p_e(x)

x is the text before y, w the prior over experts. Each expert is believed as far
as it has predicted the text so far (Branch-Train-Merge, arXiv:2208.03306,
section 2.3, a posterior over domains). So the probability of a whole text is

    p(x) = sum_e w_e p_e(x)

Everything is in logarithms and at least float32. An expert is added by naming
it, removed by leaving it out: no other one changes.

Cost: of E experts E forward passes, parameters and caches, and one more product
with the vocabulary to see which token is the likeliest.

Legend: E experts, B rows, T tokens, C of a chunk, D model, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.decode import loop
from paraxis.decode import step
from paraxis.decode import transcript
from paraxis.decode import weights
from paraxis.decode.evaluate import score
from paraxis.models import build
from paraxis.sharding import annotate


def total(prior_E, nats_EN):
  """(N,) log p of whole texts, from those of each expert.

  Args:
    prior_E: log w. nats_EN: log p_e of a text.
  """
  return jax.nn.logsumexp(prior_E[:, None] + nats_EN, 0)


def believed(prior_E, nats_EBT):
  """(E, B, T) log p(e | x) before each token.

  Args:
    prior_E: log w. nats_EBT: log p_e of each token after those before it.
  """
  # A difference of experts is all that counts, and it is a smaller number.
  nats_EBT = nats_EBT - nats_EBT.max(0)
  seen = jnp.cumsum(nats_EBT, -1) - nats_EBT
  return jax.nn.log_softmax(prior_E[:, None, None] + seen, 0)


def mixed(believed_E, z_EV):
  """(..., V) log-probabilities of the mixture.

  Args:
    believed_E: (E, ...) log p(e | x). z_EV: (E, ..., V) logits of each.
  """
  wide = jnp.promote_types(z_EV.dtype, jnp.float32)
  each = jax.nn.log_softmax(z_EV.astype(wide), -1)
  return jax.nn.logsumexp(believed_E[..., None] + each, 0)


class Scorer(score.Scorer):
  """Experts of one model on one mesh, as one score.Scorer.

  A row that was cut, or the window of a long document, begins with the prior.
  """

  def __init__(self, parts, prior, config, length, batch_size=8, say=print):
    """Args:

    parts: as of score.Scorer, of each expert; of one model and tokenizer.
    prior: w, one each, at least 0, of sum 1; experts of 0 are left out.
    config, length, batch_size, say: as of score.Scorer.
    """
    weighed = [(part, w) for part, w in zip(parts, prior, strict=True) if w]
    parts, prior = zip(*weighed, strict=True)
    super().__init__(parts[0], config, length, batch_size, say)
    self._members = [params for _, params, *_ in parts]
    self._prior = np.log(np.asarray(prior, np.float32))
    with build.use(self._built):
      self._read = list(map(self._rounded, self._members))
    model = self._built.model
    self._begin = jax.jit(
      functools.partial(_begin, model), static_argnames='slots'
    )
    self._advance = jax.jit(functools.partial(step.advance, model))

  def _forward(self, params, tokens_BT, targets_BT, lengths_B):
    given = tokens_BT, targets_BT, lengths_B
    of_one = super()._forward
    nats_EBT = jnp.stack([of_one(p, *given)[0] for p in params])
    prior_E = jnp.asarray(self._prior, nats_EBT.dtype)
    believed_EBT = believed(prior_E, nats_EBT)
    nats_BT = jax.nn.logsumexp(believed_EBT + nats_EBT, 0)

    def likeliest(targets_BC, believed_BCE, *x):
      z = [self._logits(p, x_BCD) for p, x_BCD in zip(params, x, strict=True)]
      mix_BCV = mixed(jnp.moveaxis(believed_BCE, -1, 0), jnp.stack(z))
      return jnp.argmax(mix_BCV, -1) == targets_BC

    x = [self._features(p, *given) for p in params]
    by_row = jnp.moveaxis(believed_EBT, 0, -1)
    return nats_BT, score.by_chunks(likeliest, targets_BT, by_row, *x)

  def _continued(self, rows, new, stop):
    """[text] of the likeliest tokens after rows of ids."""
    rows, count = self._padded(rows), len(rows)
    length = loop.bucket(max(map(len, rows)))
    ends = (*loop.end_ids(self.tokenizer), *self._ends)
    made = [
      transcript.Transcript(self.tokenizer, ends, new, stop) for _ in rows
    ][:count]
    with build.use(self._built):
      placed = step.place(rows, length, self._built.mesh)
      slots = step.slots(length + new)
      found = [self._begin(p, *placed, slots=slots) for p in self._laid]
      z, caches, nats = map(list, zip(*found, strict=True))
      live_B = step.put(np.ones(len(rows), bool), self._built.mesh)
      log_EB = self._prior[:, None] + np.asarray(nats, np.float64)
      for at in range(new):
        z_EBV = np.asarray(jax.nn.log_softmax(jnp.stack(z), -1))
        sound = np.all(np.isfinite(z_EBV), axis=(0, 2))[:count]
        bad = [(at, i) for i in np.flatnonzero(~sound) if not made[i].finish]
        transcript.check_sound(bad, count, 'row')
        log_EB = np.asarray(jax.nn.log_softmax(log_EB, 0))
        chosen = np.asarray(mixed(log_EB, z_EBV)).argmax(-1)
        log_EB = log_EB + z_EBV[:, np.arange(len(rows)), chosen]
        for text, token in zip(made, chosen, strict=False):
          if not text.finish:
            text.extend([int(token)], [0.0])
        if all(text.finish for text in made):
          break
        token_B = step.put(chosen.astype(np.int32), self._built.mesh)
        for e, params in enumerate(self._laid):
          z[e], caches[e] = self._advance(params, caches[e], token_B, live_B)
    return [text.text for text in made]

  @functools.cached_property
  def _laid(self):
    """Parameters of each expert as steps read them."""
    prepare = lambda p: weights.prepare(self._built.model, p, self._config)
    return list(map(jax.jit(prepare), self._members))


def _begin(model, params, tokens_BT, lengths_B, slots):
  """(logits (B, V) after each prompt, its cache, (B,) its log p)."""
  x_BTD, cache = step.prefill(model, params, tokens_BT, lengths_B, slots)
  z_BV = model.logits(params, step.last(x_BTD, lengths_B))[:, 0]

  def nats(x_BCD, targets_BC):
    z_BCV = model.logits(params, x_BCD)
    z_BCV = annotate.put(z_BCV, ('batch', None, None))
    return score.chosen(z_BCV, targets_BC) - jax.nn.logsumexp(z_BCV, -1)

  next_BT = jnp.roll(tokens_BT, -1, 1)
  here = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None] - 1
  nats_BT = score.by_chunks(nats, x_BTD, next_BT)
  return z_BV, cache, jnp.where(here, nats_BT, 0).sum(-1)
