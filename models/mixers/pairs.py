"""Rows in pairs: one with masks, and behind it the same one without.

Block diffusion trains every block of a row at once, with the blocks before it
as they are (arXiv:2503.09573; Fast-dLLM v2, arXiv:2509.26328): a token of the
row with masks sees its own block there, and earlier blocks in the row without.

    without masks   over itself, by blocks: order b
    with masks      over the other row, where b - 1 >= b of the key, and over
                    its own block alone (a segment each), joined by lse

b: block of a token in its document. That equals one attention over both rows
with a dense mask, and no kernel knows of it. Token ids of such rows are ids, or
- 1 - id where a mask stands for one.

Legend: B rows, 2B with their pairs, T tokens.
"""

import dataclasses

import jax.numpy as jnp

from paraxis.models.mixers import slots
from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.pallas_kernels.decode_attention import schedule
from paraxis.sharding import annotate
from paraxis.sharding.sequence import attention as context

ROWS = ('batch', 'length')


def of(batch, mask_id):
  """models.batch.Batch of 2B rows, from ids as they are encoded here; targets
  and weights stay those of B rows."""

  def both(tokens, segments, positions):
    clean = jnp.where(tokens < 0, -1 - tokens, tokens)
    masked = jnp.where(tokens < 0, mask_id, tokens)
    return together(masked, clean), *(
      together(x, x) for x in (segments, positions)
    )

  run = annotate.region(both, (ROWS,) * 3, (ROWS,) * 3)
  tokens, segments, positions = run(
    batch.tokens, batch.segments, batch.positions
  )
  return batch._replace(tokens=tokens, segments=segments, positions=positions)


def together(one, other):
  """(B, ..) twice -> (2B, ..), one behind the other."""
  both = jnp.stack([one, other], 1)
  return both.reshape(2 * len(one), *one.shape[1:])


def apart(x):
  """(2B, ..) -> (B, ..) twice: with masks, without."""
  x = x.reshape(len(x) // 2, 2, *x.shape[1:])
  return x[:, 0], x[:, 1]


def predicting(x_BTD, names, positions_BT, config):
  """Features of 2B rows -> of B, from which targets are predicted: of the rows
  with masks; with mask_shift, where the target is the first token of the next
  block, of those without, as decoding has them.

  names: logical, of x; its length may be sharded otherwise than positions'.
  """

  def local(x, last):
    masked, clean = apart(x)
    return jnp.where(last[..., None], clean, masked) if shift else masked

  shift = config.mask_shift
  last = (positions_BT + 1) % config.block == 0
  last = annotate.part(last, ROWS, names[:2])
  run = annotate.region(local, (names, names[:2]), (names,), single=True)
  return run(x_BTD, last)


def attend(how, q, k, v, positions, segments, plan):
  """(o, lse) of local rows in pairs.

  Args:
    how: slots.How, its block that of the model. q, k, v: (2B, T, .., H).
    positions, segments: (2B, T). plan: context.ContextPlan or None.
  """
  (q_masked, q_clean), (k_masked, k_clean), (v_masked, v_clean) = map(
    apart, (q, k, v)
  )
  positions, segments = apart(positions)[0], apart(segments)[0]
  length = positions.shape[1] * (plan.n if plan else 1)
  order = how.order(positions)
  own = slots.chunks(segments, positions, how.block, length, 'model.block')

  def run(mask, q, k, v, segments, before=0):
    if plan:
      return context.attention(
        q, k, v, order, segments, mask, plan, order - before
      )
    orders = (order - before, order) if mask.causal else None
    return attention_op.attention(
      q, k, v, mask, (segments, segments), orders, how.impl
    )

  clean = run(how.mask, q_clean, k_clean, v_clean, segments)
  far = run(how.mask, q_masked, k_clean, v_clean, segments, 1)
  whole = dataclasses.replace(how.mask, causal=False)
  near = run(whole, q_masked, k_masked, v_masked, own)
  o, lse = schedule.merge(far, near)
  masked = o.astype(v.dtype), lse
  return tuple(together(*x) for x in zip(masked, clean, strict=True))
