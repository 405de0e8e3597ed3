"""Claims about what a state forgets: the gates of linear recurrences.

Whatever enters a row as a state S_0 leaves it as (prod_t a_t) S_0, by the gates
alone. For gated linear attention (arXiv:2312.06635, section 4, c = 16) and
Mamba-2 (arXiv:2405.21060, section 7) they are, with x the mixer's input,

    a_t = sigmoid(W2 W1 x_t + b)^(1/c)  a key      log a_t = -e^A dt_t  a head
                                                   dt_t = softplus(W x_t + b)

So the state after a row, from S_0 and from 2 S_0, differs by that product times
S_0, and by nothing where a document begins in the row.

Legend: B rows, T tokens, D model, N heads, K key width, R rank of the gates.
"""

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.models import layer
from paraxis.models import skeleton as skeleton_lib
from paraxis.models.mixers import attention
from paraxis.models.mixers import mamba
from paraxis.train.claims import experiment
from paraxis.train.claims import knockouts

SMALL = {
  'model.d_model': 32, 'model.num_heads': 4, 'model.dtype': 'float64',
  'model.param_dtype': 'float64', 'model.mamba.head_dim': 16,
  'model.mamba.state': 8,
}  # fmt: skip


def _of_keys(w, x, normaliser):
  """sum_t log a_t (B, N, K, 1) of gated linear attention."""
  z = np.einsum('btd,dr,rnk->btnk', x, w['decay_down'], w['decay_up'])
  z = -np.logaddexp(0, -(z + w['decay_bias'])) / normaliser
  return z.sum(1)[..., None]


def _of_heads(w, x):
  """sum_t log a_t (B, N, 1, 1) of Mamba-2."""
  dt = np.logaddexp(0, np.einsum('btd,dn->btn', x, w['step']) + w['step_bias'])
  return -(np.exp(w['a_log']) * dt.sum(1))[..., None, None]


GATES = {'G': _of_keys, 'M': _of_heads}


def _left(skeleton, values, x, positions, at_once):
  """What is left (B, N, K, V) of a state after rows x."""
  own = skeleton.module(values)
  memory, tails = own.init_state(len(x), 0, x.dtype)
  # Large beside what the row writes, which the difference must lose.
  entered = np.random.default_rng(2).uniform(1e3, 2e3, memory.shape)

  def after(memory):
    state = memory, tails
    for t in range(0, x.shape[1], at_once):
      part = slice(t, t + at_once)
      ids = positions[:, part]
      see = attention.Visibility(np.ones_like(ids), ids)
      _, state, _ = own(x[:, part], see, state)
    return state[0]

  run = jax.jit(after)
  return np.asarray(run(2 * entered) - run(entered)) / entered


def left_by_formula(run, *, kind, gates, length, within):
  """EQ: what a row leaves of the state that enters it, all tokens and singly.

  Args:
    kind: of the mixer, of GATES. gates: {name: number} of their formula, as in
      the paper.
  """
  config = experiment.fields(run.config, SMALL).model
  make = lambda rngs: layer.MIXERS[kind](config, rngs, kind)
  rng, found = np.random.default_rng(0), {}
  with jax.enable_x64(True):
    skeleton = skeleton_lib.Skeleton(make)
    values = {
      path: rng.normal(0, 0.3, leaf.variable.shape)
      for path, leaf in skeleton.leaves.items()
    }
    x = rng.normal(size=(2, length, config.d_model))
    # Both rows continue a document; in the second one another begins.
    positions = np.tile(1 + np.arange(length, dtype=np.int32), (2, 1))
    positions[1, length // 2 :] -= 1 + length // 2
    wanted = np.exp(GATES[kind](values, x, **gates))
    least, most = wanted[0].min(), wanted[0].max()
    wanted[1] = 0
    for name, at_once in (('in one pass', length), ('token by token', 1)):
      left = _left(skeleton, values, jnp.asarray(x), positions, at_once)
      found[name] = experiment.gap(left, np.broadcast_to(wanted, left.shape))
  return experiment.equal(
    found,
    within,
    f'share of a state that {length} tokens leave, float64, random weights, '
    f'against the product of their gates, {least:.0e} to {most:.0e} by head '
    f'and key; nothing where a document begins; {experiment.listed(found)}',
  )


def no_decay():
  """Knock-out: the state of Mamba-2 keeps all that is written."""
  flat = lambda self, dtype: jnp.zeros_like(self.a_log[...], dtype)
  return knockouts.patched(mamba._Mamba, '_rate', flat)
