"""Attention of new queries to keys that stay in the host's memory, by NumPy.

FastAttention (arXiv:2410.16663) keeps the first slots of a long row on the host
and lets it attend to them: q goes there, (o, lse) comes back, keys and values
never move. The device attends to the other slots (`op.ragged`), and both parts
join by their lse (`schedule.merge`). Cost: B S K H (k and v) read once, in the
dtype they have; memory B T N S scores.

Legend: B rows, T queries, S slots on the host, N query heads, K kv heads, G =
N / K, H head width.
"""

import numpy as np


def attend(q_BTNH, k_BKSH, v_BKSH, scale):
  """Attention of every query to all of the slots -> (o_BTNH, lse_BTN).

  Args:
    q_BTNH: NumPy queries; head n reads kv head n // (N // K).
    k_BKSH, v_BKSH: NumPy keys and values of the slots, one at least, all of
      them before the queries.
    scale: of scores.

  Returns:
    NumPy arrays of the dtype that q, k and v promote to.
  """
  b, t, n, h = q_BTNH.shape
  kv = k_BKSH.shape[1]
  q_BTKGH = q_BTNH.reshape(b, t, kv, n // kv, h)
  score = scale * np.einsum('btkgh,bksh->btkgs', q_BTKGH, k_BKSH)
  top = score.max(-1, keepdims=True)
  weight = np.exp(score - top)
  total = weight.sum(-1, keepdims=True)
  o = np.einsum('btkgs,bksh->btkgh', weight / total, v_BKSH)
  return o.reshape(b, t, n, -1), (top + np.log(total)).reshape(b, t, n)
