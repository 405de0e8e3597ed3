"""Gated short convolutions (LFM2, arXiv:2511.23404, section 2).

    y = (c * conv(b * x)) W_o,    (b, c, x) = u (W_b, W_c, W_x)

conv is causal, channel by channel, over `width` tokens of a document. Decoding
keeps the last inputs of the convolution, at any length.

Legend: B rows, T tokens, D model, F channels (= D), W taps.
"""

import functools

from jax.ad_checkpoint import checkpoint_name

from paraxis.models import aux as aux_lib
from paraxis.models import parameter
from paraxis.models.mixers import protocol as mixer
from paraxis.models.mixers import recurrence

INPUTS = ('gate', 'output_gate', 'value')  # b, c, x


class ShortConv(mixer.Mixer):
  """x_BTD -> y_BTD; state: the tail of the convolution, (B, W - 1, F)."""

  name = 'short_conv'
  capabilities = mixer.RECURRENT

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    super().__init__(config, rngs, kind, layout)
    d, width = config.d_model, config.short_conv.width
    make = functools.partial(parameter.matrix, rngs, std=config.init_std)
    for name in INPUTS:
      setattr(self, name, make((d, d), ('embed', 'mlp')))
    self.conv = parameter.taps(rngs, width, (d,), ('mlp',))
    gain = (2 * config.num_layers) ** -0.5
    self.output = make((d, d), ('mlp', 'embed'), gain=gain)

  def __call__(self, x_BTD, see, state=None):
    outs = self._project(
      x_BTD, mixer.RESIDUAL, 'BTD,DF->BTF', INPUTS, mixer.WIDE, 'qkv'
    )
    b, c, x = map(checkpoint_name, outs, ('gate', 'query', 'value'))
    y, tail = recurrence.conv(
      b * x, self.conv[...], mixer.WIDE, see, self.layout, state
    )
    y = self._output((c * y).astype(c.dtype), mixer.WIDE, 'BTF,FD->BTD')
    return y, None if state is None else tail, aux_lib.NOTHING

  def init_state(self, batch, slots, dtype):
    """The last inputs of the convolution."""
    del slots
    shape = batch, self.config.short_conv.width - 1, self.config.d_model
    return mixer.state(('batch', None, 'mlp'), *shape, dtype=dtype)

  @staticmethod
  def mixing_flops(config, kind, length):
    """Taps of every channel, and two gates."""
    return 2 * length * config.d_model * (config.short_conv.width + 1)
