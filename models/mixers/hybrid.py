"""Mamba-2 behind a transformer block that layers share (Zamba2).

With e the embeddings, and block b = i mod n for the i-th layer of this kind
(arXiv:2411.15242, section 2):

    u = attention_b(norm_b [x, e])     a head attends to [x, e], twice as wide
    t = mlp_b(norm_b' u) W_i           no residual within
    y = mamba2_i(norm_i (x + t))       the layer adds y to x, not to x + t

The n blocks are parameters once, whatever the depth (parameter.share): their
gradient is the sum over their uses. Every layer has its W, and adds products of
low rank to the queries, keys and values (each x A B) and to the gate and up of
the mlp (with one A) of its block: q = h W_q + h A_i B_i. It has keys, values
and a state of its own.

Legend: B rows, T tokens, D model.
"""

import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import norm
from paraxis.models import parameter
from paraxis.models.ffn import mlp
from paraxis.models.mixers import attention
from paraxis.models.mixers import mamba
from paraxis.models.mixers import protocol as mixer


class WideAttention(attention.Attention):
  """Attention whose input is two residuals side by side."""

  times = 2


class Block(nnx.Module):
  """[x, e], of width 2 D -> (t_BTD, keys and values)."""

  def __init__(self, config, rngs, kind, layout):
    own = config.hybrid
    made = dataclasses.replace(
      config, mlp=own.mlp, d_ff=own.d_ff or config.d_ff
    )
    self.attention_norm = norm.Norm(config, 2 * config.d_model)
    self.attention = WideAttention(config, rngs, kind, layout)
    self.mlp_norm = norm.Norm(config)
    self.mlp = mlp.Mlp(made, rngs, layout)

  def __call__(self, x, see, state):
    with jax.named_scope('attention'):
      x, state, _ = self.attention(self.attention_norm(x), see, state)
    with jax.named_scope('mlp'):
      return self.mlp(self.mlp_norm(x)), state


class Hybrid(mamba.Mamba2):
  """x_BTD -> y_BTD; state: (that of Mamba-2, (k_BKSH, v_BKSH) slots)."""

  capabilities = mixer.Capabilities(slots=True, recurs=True)
  norms = True

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    super().__init__(config, rngs, kind, layout)
    own, d = config.hybrid, config.d_model
    self.block = block = Block(config, rngs, kind, layout)
    parameter.share(block, own.blocks)
    add = functools.partial(parameter.own_adapters, rngs)
    for name in ('query', 'key', 'value') if own.attention_rank else ():
      add(block.attention, (name,), own.attention_rank)
    if own.mlp_rank:
      gated = own.mlp not in mlp.PLAIN
      names = ('gate', 'up') if gated else ('up',)
      add(block.mlp, names, own.mlp_rank)
    # Of tokens as they lie between layers, so that none is gathered.
    self.join = parameter.matrix(
      rngs, (d, d), ('embed', None), std=config.init_std
    )

  def __call__(self, x_BTD, see, state=None, before: Any = lambda x: x):
    """before: the norm that is before Mamba-2."""
    x_BTD, _ = self._joined(x_BTD, see, None)
    y, _, aux = super().__call__(before(x_BTD), see)
    return y, None, aux

  def decode(self, x, see, state, before: Any = lambda x: x):
    memory, slots = state
    x, new = self._joined(x, see, slots)
    y, states, aux = mixer.lanes(super().__call__, before(x), see, memory)
    return y, (states, new), aux

  def commit(self, state, flight, plan, keep):
    """The states of Mamba-2, and slots."""
    attention_part = self.block.attention
    return (
      mixer.commit_states(state[0], flight[0], plan, keep),
      attention_part.commit(state[1], flight[1], plan, keep),
    )

  def _joined(self, x_BTD, see, slots):
    """(x + t, what attention has in flight)."""
    if see.embedded is None:
      raise ValueError('layers of kind H read see.embedded, and it is None.')
    both = jnp.concatenate([x_BTD, see.embedded], -1)
    with jax.named_scope('block'):
      t_BTD, slots = self.block(both, see, slots)
      (t_BTD,) = self._project(
        t_BTD, mixer.RESIDUAL, 'BTD,DE->BTE', ['join'], mixer.RESIDUAL
      )
    return x_BTD + t_BTD, slots

  def init_state(self, batch, slots, dtype):
    """(that of Mamba-2, empty slots)."""
    memory = super().init_state(batch, slots, dtype)
    return memory, self.block.attention.init_state(batch, slots, dtype)

  @staticmethod
  def check(config):
    """UserError as of both, or if the norm of the layer is for its mlp, too."""
    mamba.Mamba2.check(config)
    attention.Attention.check(config)
    if config.residual == 'shared':
      raise errors.UserError(
        f'model.pattern={config.pattern!r}: layers of kind H have a norm '
        "before Mamba-2 alone, and model.residual='shared' has one norm for "
        'mixer and mlp: take another.'
      )

  @staticmethod
  def mixing_flops(config, kind, length):
    """Those of Mamba-2 and of attention."""
    recurrent = mamba.Mamba2.mixing_flops(config, kind, length)
    return recurrent + attention.Attention.mixing_flops(config, kind, length)
