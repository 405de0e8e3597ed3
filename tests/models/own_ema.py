"""A user's own config file: a mixer and a hyperparameter; tests copy it.

y_t = decay y_(t-1) + (1 - decay) h_t, forgotten where a document begins, as a
truncated sum: a causal convolution with the taps (1 - decay) decay^i.
"""

import dataclasses

import jax.numpy as jnp

from paraxis.configs import schema
from paraxis.configs.base.field import field
from paraxis.models import aux
from paraxis.models import parameter
from paraxis.models import register
from paraxis.models.mixers import protocol
from paraxis.models.mixers import recurrence
from paraxis.sharding import annotate

TAIL = ('batch', None, 'mlp')


@dataclasses.dataclass(frozen=True)
class EmaFields:
  taps: int = field(9, 'tokens that the average sees', low=1)


@dataclasses.dataclass(frozen=True)
class Extra:
  decay: float = field(0.5, 'what a step keeps', low=0.0, high=1.0)


class Ema(protocol.Mixer):
  """x_BTD -> y_BTD; state: the last inputs of the average."""

  name = 'ema'
  capabilities = protocol.RECURRENT

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    super().__init__(config, rngs, kind, layout)
    d = config.d_model
    self.input = parameter.matrix(rngs, (d, d), ('embed', 'mlp'))
    self.output = parameter.matrix(rngs, (d, d), ('mlp', 'embed'))

  def __call__(self, x_BTD, see, state=None):
    (h_BTF,) = self._project(
      x_BTD, protocol.RESIDUAL, 'BTD,DF->BTF', ['input'], protocol.WIDE
    )
    decay, taps = self.config.extra.decay, self.config.extra.ema.taps
    back = jnp.arange(taps - 1, -1, -1, dtype=h_BTF.dtype)
    weights = (1 - decay) * decay**back
    kernel = jnp.broadcast_to(weights[:, None], (taps, self.config.d_model))
    kernel = annotate.take(kernel, (None, 'mlp'), 1)
    h_BTF, tail = recurrence.conv(
      h_BTF, kernel, protocol.WIDE, see, self.layout, state
    )
    y_BTD = self._output(h_BTF, protocol.WIDE, 'BTF,FD->BTD')
    return y_BTD, None if state is None else tail, aux.NOTHING

  def init_state(self, batch, slots, dtype):
    keep = self.config.extra.ema.taps - 1
    return protocol.state(TAIL, batch, keep, self.config.d_model, dtype=dtype)

  @staticmethod
  def mixing_flops(config, kind, length):
    return 2 * length * config.extra.ema.taps * config.d_model


def small(model, few):
  """The section in `paraxis verify`."""
  return dict(taps=min(model.extra.ema.taps, 3))


register.mixer('Q', Ema, section=EmaFields, shrink=small)


def get_config():
  config = schema.declare_extra(schema.default(), Extra())
  config.model.update(d_model=16, num_layers=2, num_heads=4, d_ff=16)
  config.model.update(pattern='Q-F', vocab_size=320)
  config.data.update(tokenizer='bytes', sequence_length=32)
  config.train.update(steps=2, batch_size=4, eval_batches=1)
  config.checkpoint.every = 1
  config.optimizer.warmup_steps = 1
  return config
