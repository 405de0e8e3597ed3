"""Dilated convolutions, then attention in chunks (TCNCA, arXiv:2312.05605).

The paper: in MEGA (arXiv:2209.10655) a causal temporal convolution network
replaces the moving average; the gates and a single head of attention, confined
to chunks, stay, so the cost is linear in the length. Its abstract gives no
widths. With u the input (the layer's norm is outside) our layer is

    h = u W_in;   h <- h + silu(conv_i(h)), dilation^i, i = 0 .. depth - 1
    x' = h W_out
    z = silu(x' W_z + b)              q = a_q z + b_q     k = a_k z
    v = silu(u W_v + b)               o = softmax(q k^T / sqrt(Z)) v, in a chunk
    r = silu(x' W_r + b)              reset gate
    p = sigmoid(x' W_p + b)           update gate
    y = p (silu(x' W_h + (r o) W_u + b) - u)

From z on these are MEGA's equations. Our reading: depthwise convolutions
between two products, each with a residual (arXiv:1803.01271); no positions in
the scores (the convolutions give the order); no bias on keys, which a softmax
cancels; the layer's residual replaces MEGA's (1 - p) u.

The chunk of a token is position // chunk, counted in its document, so packing
changes nothing: to the attention op a chunk is a document. Where the length is
sharded, a chunk may be on several shards: it runs through
sharding/sequence/attention.py with a window of one chunk, which ends a ring
early.

Decoding keeps the last inputs of every convolution, and the keys and values of
the current chunk: one size at any length.
Cost of a token: 10 D^2 + 2 D Z products (value_expand = 2), depth kernel D
taps, chunk (Z + V) in attention.

Legend: B rows, T tokens, D model, Z width of a key, V of a value, W taps, C
tokens of a chunk, S keys of a step (C + T).
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import aux as aux_lib
from paraxis.models import parameter
from paraxis.models.mixers import protocol as mixer
from paraxis.models.mixers import recurrence
from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.pallas_kernels.decode_attention import op as decode_attention
from paraxis.sharding import annotate
from paraxis.sharding.sequence import attention as context

WIDE = mixer.WIDE
KEYS = ('batch', 'length', None, None)
VALUES = ('batch', 'length', None, 'mlp')  # a shard has some of each value
SLOTS = (('batch', None, None), ('batch', None, 'mlp'))


def dilations(own):
  """Dilations of the convolutions of a mixers.Tcn."""
  return [own.dilation**i for i in range(own.depth)]


def receptive_field(own) -> int:
  """Tokens that one output of the convolutions depends on, itself included."""
  return 1 + (own.kernel - 1) * sum(dilations(own))


def value_dim(config) -> int:
  """Width of a value of a schema.Model."""
  return round(config.d_model * config.tcn.value_expand)


class ConvolutionAttention(mixer.Mixer):
  """x_BTD -> y_BTD; state: tails of the convolutions, (k_BCZ, v_BCV)."""

  name = 'tcn'
  capabilities = mixer.RECURRENT

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    _check_form(layout.context)
    super().__init__(config, rngs, kind, layout)
    own, d, v = config.tcn, config.d_model, value_dim(config)
    make = functools.partial(parameter.matrix, rngs, std=config.init_std)
    down = dict(gain=(2 * config.num_layers) ** -0.5)
    self.channels = make((d, d), ('embed', 'mlp'))
    for i in range(own.depth):
      taps = parameter.taps(rngs, own.kernel, (d,), ('mlp',))
      setattr(self, f'taps_{i}', taps)
    self.mixed = make((d, d), ('mlp', 'embed'))
    self.shared = make((d, own.key_dim), ('embed', None))
    self.value = make((d, v), ('embed', 'mlp'))
    self.reset = make((d, v), ('embed', 'mlp'))
    self.update = make((d, d), ('embed', None))
    self.hidden = make((d, d), ('embed', None), **down)
    self.output = make((v, d), ('mlp', 'embed'), **down)
    for name, width, axis in (
      ('shared', own.key_dim, 'norm'), ('value', v, 'mlp'), ('reset', v, 'mlp'),
      ('update', d, 'norm'), ('hidden', d, 'norm'),
    ):  # fmt: skip
      setattr(self, f'{name}_bias', parameter.vector((width,), (axis,)))
    self.query_scale = parameter.vector((own.key_dim,), ('norm',), 1.0)
    self.query_bias = parameter.vector((own.key_dim,), ('norm',))
    self.key_scale = parameter.vector((own.key_dim,), ('norm',), 1.0)

  def __call__(self, x_BTD, see, state=None):
    tails, slots = state or (None, None)
    h, value = self._affine(
      x_BTD, mixer.RESIDUAL, ['channels', 'value'], WIDE, 'qkv'
    )
    h, tails = self._convolve(h, see, tails)
    (mixed,) = self._affine(h, WIDE, ['mixed'], mixer.RESIDUAL, 'output')
    (z,) = self._affine(mixed, mixer.RESIDUAL, ['shared'], mixer.LOW)
    (reset,) = self._affine(mixed, mixer.RESIDUAL, ['reset'], WIDE, 'qkv')
    update, hidden = self._affine(
      mixed, mixer.RESIDUAL, ['update', 'hidden'], mixer.RESIDUAL
    )
    value = jax.nn.silu(checkpoint_name(value, 'value'))
    z = annotate.move(jax.nn.silu(z), mixer.LOW, KEYS[:3])
    q = z * self.query_scale[...] + self.query_bias[...]
    q, k = (
      checkpoint_name(y.astype(z.dtype), name)[:, :, None]
      for y, name in ((q, 'query'), (z * self.key_scale[...], 'key'))
    )
    o, slots = self._attend(q, k, value, see, slots)
    o = o * jax.nn.silu(checkpoint_name(reset, 'gate'))
    (more,) = self._affine(o, WIDE, ['output'], mixer.RESIDUAL, 'output')
    hidden = jax.nn.silu(checkpoint_name(hidden + more, 'output'))
    y = jax.nn.sigmoid(update) * (hidden - x_BTD)
    state = None if state is None else (tails, slots)
    return y, state, aux_lib.NOTHING

  def _affine(self, x, x_names, names, out, ring=''):
    """Products with several matrices, and their biases."""
    return self._project(
      x, x_names, 'BTD,DE->BTE', names, out, ring, biased=True
    )

  def _convolve(self, h, see, tails):
    kept = []
    for i, dilation in enumerate(dilations(self.config.tcn)):
      y, tail = recurrence.conv(
        h, getattr(self, f'taps_{i}')[...], WIDE, see, self.layout,
        tails and tails[i], dilation,
      )  # fmt: skip
      h = h + jax.nn.silu(y)
      kept.append(tail)
    return h, tuple(kept)

  def _attend(self, q_BT1Z, k_BT1Z, v_BTV, see, slots):
    """(o_BTV, slots): a token and those before it in its chunk."""
    config, v = self.config, v_BTV[:, :, None]
    chunk = config.tcn.chunk
    scale = q_BT1Z.shape[-1] ** -0.5
    mask = attention_op.Mask(
      window=chunk, scale=scale, block=config.attention_block
    )
    whole = functools.partial(
      attention_op.attention, mask=mask, impl=config.attention
    )
    rows = KEYS, KEYS, VALUES, mixer.ROWS, mixer.ROWS
    arrays = q_BT1Z, k_BT1Z, v, see.segments, see.positions
    if slots is not None:
      step = functools.partial(_step, whole)
      if q_BT1Z.shape[1] == 1:
        step = functools.partial(_one, mask)

      def run(q, k, v, segments, positions, *kept):
        o, kept = step(q, (k, v), kept, segments, positions)
        return o, *kept

      o, *slots = annotate.region(run, (*rows, *SLOTS), (VALUES, *SLOTS))(
        *arrays, *slots
      )
      return o[:, :, 0], tuple(slots)
    plan = self.layout.context if annotate.carriers('length') else None
    attend = functools.partial(_whole, whole, chunk)
    if plan is not None:
      attend = functools.partial(_shard, mask, plan)
    o = annotate.region(attend, rows, (VALUES,), single=True)(*arrays)
    return o[:, :, 0], None

  def init_state(self, batch, slots, dtype):
    """(a tail for every convolution, (k_BCZ, v_BCV))."""
    del slots
    own, d = self.config.tcn, self.config.d_model
    tails = tuple(
      mixer.state(SLOTS[1], batch, (own.kernel - 1) * i, d, dtype=dtype)
      for i in dilations(own)
    )
    widths = own.key_dim, value_dim(self.config)
    return tails, tuple(
      mixer.state(names, batch, own.chunk, width, dtype=dtype)
      for names, width in zip(SLOTS, widths, strict=True)
    )

  @staticmethod
  def check(config):
    """UserError if a value has no width."""
    if value_dim(config) < 1:
      raise errors.UserError(
        f'model.tcn.value_expand={config.tcn.value_expand} of model.d_model='
        f'{config.d_model} leaves values of no width.'
      )

  @staticmethod
  def mixing_flops(config, kind, length):
    """Taps, and scores and weighted values of the keys seen within chunks."""
    own, whole = config.tcn, length // config.tcn.chunk
    sizes = [own.chunk] * whole + [length % own.chunk]
    seen = sum(n * (n + 1) // 2 for n in sizes)
    taps = own.depth * own.kernel * config.d_model
    return 2 * (seen * (own.key_dim + value_dim(config)) + length * taps)


def _check_form(plan):
  """UserError if the form of context parallelism exchanges heads."""
  if plan is not None and plan.form in ('ulysses', 'usp'):
    raise errors.UserError(
      f'mesh.context_form={plan.form} exchanges heads, and a C layer '
      '(model.pattern) has one; take ring, all_gather, token_ring or rsa.'
    )


def chunks(segments_BT, positions_BT, chunk, first=0):
  """(B, T) ids, equal within a chunk of a document; 0: padding.

  An id is the index where the chunk began in the row, whose first token has the
  index `first`. So ids rise along a row, and the op can leave out blocks.
  """
  began = first + jnp.arange(segments_BT.shape[1]) - positions_BT % chunk
  # A chunk may have begun before the row: with a state.
  return jnp.where(segments_BT > 0, began + chunk + 1, 0)


def _whole(attend, chunk, q, k, v, segments, positions):
  """Rows without a state."""
  ids = chunks(segments, positions, chunk)
  return attend(q, k, v, segments=(ids, ids))[0]


def _shard(mask, plan, q, k, v, segments, positions):
  """A shard of their length; the order of shards is contiguous."""
  first = jax.lax.axis_index(plan.axis) * q.shape[1]
  ids = chunks(segments, positions, mask.window, first)
  return context.attention(q, k, v, positions, ids, mask, plan)[0]


def _one(mask, q_B11Z, new, kept, segments, positions):
  """`_step` of one token a row: its chunk fills the first slots."""
  chunk = kept[0].shape[1]
  at, valid = positions % chunk, segments > 0
  here = ((jnp.arange(chunk) == at) & valid)[..., None]
  kept = [
    jnp.where(here, x[:, :, 0].astype(old.dtype), old)
    for old, x in zip(kept, new, strict=True)
  ]
  k, v = (x[:, None].astype(q_B11Z.dtype) for x in kept)
  lengths_B = jnp.where(valid, at + 1, 0)[:, 0]
  o, _ = decode_attention.ragged(q_B11Z, k, v, mask, lengths_B)
  return o, kept


def _step(attend, q_BT1Z, new, kept, segments, positions):
  """(o_BT1V, kept): slot j of the state holds the chunk's token j.

  Args:
    attend: the attention op with its mask.
    q_BT1Z: queries. new: (k_BT1Z, v_BT1V). kept: (k_BCZ, v_BCV), the state.
    segments, positions: (B, T).
  """
  chunk = kept[0].shape[1]
  slot = jnp.arange(chunk)
  ids = chunks(segments, positions, chunk)
  written = slot < positions[:, :1] % chunk  # by tokens before the first one
  before = positions[:, :1] - positions[:, :1] % chunk + slot
  ids_S = jnp.concatenate([jnp.where(written, ids[:, :1], 0), ids], 1)
  order_S = jnp.concatenate([before, positions], 1)
  every = [  # k_BSZ, v_BSV
    jnp.concatenate([old, x[:, :, 0].astype(old.dtype)], 1)
    for old, x in zip(kept, new, strict=True)
  ]
  o, _ = attend(
    q_BT1Z, *(x[:, :, None].astype(q_BT1Z.dtype) for x in every),
    segments=(ids, ids_S), order=(positions, order_S),
  )  # fmt: skip
  # The last token's chunk: its tokens in the row, and slots before them.
  count = (segments > 0).sum(1, keepdims=True)
  last = jnp.take_along_axis(positions, jnp.maximum(count - 1, 0), 1) % chunk
  source = chunk + count - 1 - last + slot
  source = jnp.where((slot <= last) & (source >= chunk), source, slot)
  return o, [jnp.take_along_axis(x, source[:, :, None], 1) for x in every]
