"""Multi-head attention of a layer: full, sliding window or within chunks.

    o = softmax(scale q k^T + mask) v,  q, k rotated by position

A sink is one more logit of a head, without a value (config.sinks): o is then
scaled by sigmoid(lse - sink), lse the log-sum-exp of the scores. A gate
(config.attention_gate) multiplies o by sigmoid(x W_g), number by number
(arXiv:2505.06708, section 2.2).

Within chunks (kind K; the local layers of Llama 4) a token sees those of its
document whose position // chunk is its own: to the op a chunk is a document.

Training runs the blockwise op (pallas_kernels/attention/op.py). A step of
decoding attends to the slots of its requests and to the tokens in flight
(slots.py), and returns its keys and values, which a commit writes into slots.
Legend: B rows, T query tokens, S cache slots, D model, N heads, K kv heads,
H head width.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.configs.base import mixers
from paraxis.models import aux as aux_lib
from paraxis.models import norm
from paraxis.models import parameter
from paraxis.models.mixers import packed
from paraxis.models.mixers import pairs
from paraxis.models.mixers import prefix
from paraxis.models.mixers import protocol as mixer
from paraxis.models.mixers import rope
from paraxis.models.mixers import slot_writes
from paraxis.models.mixers import slots as slots_lib
from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.sharding import annotate
from paraxis.sharding.sequence import attention as context

ROWS, RESIDUAL, QUERIES = mixer.ROWS, mixer.RESIDUAL, mixer.HEADS
READERS = mixer.READERS
KEYS = ('batch', 'length', 'kv_heads', 'head_dim')
CACHE = ('batch', 'kv_heads', 'slots', 'head_dim')  # of keys and values


class Visibility(NamedTuple):
  """Who may see whom.

  segments, positions: (B, T); segment 0 is padding.
  plan: packed.Plan of a step of decoding, or None.
  rotations: layer kind -> (cos, sin) of the positions, (B, T, 1, H / 2).
  valid: (B, T) bool, a token and no padding, sharded as residuals are.
  denominator: () tokens of the whole step, of all rows that are read.
  embedded: x_BTD before the first layer, where layers read it again.
  pairs: () where rows are pairs, of masks and without (pairs.py), or None.
  """

  segments: Any
  positions: Any
  plan: Any = None
  rotations: Any = None
  valid: Any = None
  denominator: Any = None
  embedded: Any = None
  pairs: Any = None


class Attention(mixer.Mixer):
  """x_BTD -> y_BTD for one kind of layer ('F', 'W', 'K' or 'N')."""

  name = 'attention'
  capabilities = mixer.SLOTS
  times = 1  # its input, of the width of the model

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    super().__init__(config, rngs, kind, layout)
    d, n = self.times * config.d_model, config.num_heads
    k, h = num_kv_heads(config), config.head_width
    heads, kv_heads = QUERIES[2:], KEYS[2:]
    make = functools.partial(parameter.matrix, rngs, std=config.init_std)
    self.query = make((d, n, h), ('embed', *heads))
    self.key = make((d, k, h), ('embed', *kv_heads))
    self.value = make((d, k, h), ('embed', *kv_heads))
    if config.attention_gate:
      self.gate = make((d, n, h), ('embed', *heads))
    gain, d = (2 * config.num_layers) ** -0.5, config.d_model
    self.output = make((n, h, d), (*heads, 'embed'), inputs=2, gain=gain)
    if config.attention_bias:
      self.query_bias = parameter.vector((n, h), heads)
      self.key_bias = parameter.vector((k, h), kv_heads)
      self.value_bias = parameter.vector((k, h), kv_heads)
      if config.attention_gate:
        self.gate_bias = parameter.vector((n, h), heads)
    if config.attention_output_bias:
      self.output_bias = parameter.vector((d,), ('norm',))
    if config.sinks:
      self.sinks = parameter.vector((n,), heads[:1])
    if config.stream_copies:
      self.prefix_key, self.prefix_value = prefix.parameters(config, rngs, k)
    if has_scaled_norms(config):
      fill = 0.0 if config.norm_zero_centered else 1.0
      whole = config.qk_norm == 'all'
      q_shape, k_shape = ((n, h), (k, h)) if whole else ((h,), (h,))
      q_axes = heads if whole else ('norm',)
      k_axes = kv_heads if whole else ('norm',)
      self.query_norm = parameter.vector(q_shape, q_axes, fill)
      self.key_norm = parameter.vector(k_shape, k_axes, fill)

  def _normalised(self, q, k):
    """Queries and keys after their norms, if they have some."""
    return (
      self._normalise(q, getattr(self, 'query_norm', None), QUERIES),
      self._normalise(k, getattr(self, 'key_norm', None), KEYS),
    )

  def _normalise(self, x_BTNH, scale, names):
    config = self.config
    if config.qk_norm == 'none':
      return x_BTNH
    whole = config.qk_norm == 'all'
    return norm.rms(
      x_BTNH,
      1.0 if scale is None else scale[...],
      config.norm_epsilon,
      config.norm_zero_centered and scale is not None,
      (-2, -1) if whole else -1,
      names[2] if whole else None,
    )

  def __call__(self, x_BTD, see, state=None):
    """-> (y_BTD, (k_BTKH, v_BTKH) in flight, no aux).

    state: (k_RKSH, v_RKSH) slots, with see.plan; or None, as the second then.
    """
    config = self.config
    names = ('query', 'key', 'value', 'gate')[: 3 + config.attention_gate]
    outs = parameter.multiply(
      self,
      x_BTD,
      RESIDUAL,
      [
        (name, 'BTD,DNH->BTNH', QUERIES if name in ('query', 'gate') else KEYS)
        for name in names
      ],
      'qkv',
      biased=True,
    )
    q, k, v, *gates = map(checkpoint_name, outs, names)
    if most := config.qkv_clip:
      q, k, v = (jnp.clip(x, -most, most) for x in (q, k, v))
    rotates = config.position == 'rope' and mixers.TABLE[self.kind].rotary
    late = config.qk_norm in ('rotated', 'rotated_bare')
    q, k = (q, k) if late else self._normalised(q, k)
    if rotates:
      cos, sin = see.rotations[self.kind]
      q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
    if late and (rotates or config.qk_norm == 'rotated'):
      q, k = self._normalised(q, k)
    if config.query_growth_kinds == 'all' or not rotates:
      q = self._grown(q, see.positions)
    o, state = self._attend(q, k, v, see, state)
    for gate in gates:
      o = o * jax.nn.sigmoid(gate)
    # P is the head width: sorted after N, XLA need not copy the matrix.
    y = self._output(o, QUERIES, 'BTNP,NPD->BTD')
    if config.attention_output_bias:
      y = (y + self.output_bias[...]).astype(y.dtype)
    return y, state, aux_lib.NOTHING

  def _grown(self, q_BTNH, positions_BT):
    """Queries of later positions are longer (Llama 4's scaling)."""
    config, wide = self.config, jnp.promote_types(q_BTNH.dtype, jnp.float32)
    if not config.query_growth:
      return q_BTNH
    first = int(config.query_growth_kinds == 'unrotated')
    p = (positions_BT.astype(wide) + first) // config.rope_original_length
    grown = 1 + config.query_growth * jnp.log1p(p)
    return (q_BTNH * grown[..., None, None]).astype(q_BTNH.dtype)

  def _attend(self, q, k, v, see, state):
    config, mask = self.config, mask_of(self.config, self.kind)
    if state is None:
      k, v = _on_heads(k, KEYS), _on_heads(v, KEYS)
      return self._attend_all(q, k, v, see, mask), None
    read = READERS[2]
    new = [_on_heads(x, KEYS, read) for x in (k, v)]
    slots = [_on_heads(x.astype(q.dtype), CACHE, read) for x in state]
    chunk = chunk_of(config, self.kind)
    how = slots_lib.How(mask, config.attention, chunk, config.block)
    local = functools.partial(slots_lib.attend, see.plan.form, how)
    many = [_of_heads(KEYS, read)] * 2 + [_of_heads(CACHE, read)] * 2
    names = READERS, *many, packed.IDS
    run = annotate.region(local, names, (READERS, READERS[:3]))
    o, lse = run(annotate.put(q, READERS), *new, *slots, see.plan.ids)
    o, lse = annotate.put(o, QUERIES), annotate.put(lse, QUERIES[:3])
    return self._sunk(*self._prefixed(see, mask, q, o, lse)), (k, v)

  def decode(self, x, see, state, *more):
    return self(x, see, state, *more)

  def commit(self, state, flight, plan, keep):
    """Keys and values of the tokens that are kept, in their slots."""
    write = functools.partial(slot_writes.write, plan.form, 2)
    names = (CACHE, CACHE, KEYS, KEYS, mixer.ROWS, packed.IDS)
    run = annotate.region(write, names, (CACHE, CACHE))
    return run(*state, *flight, keep, plan.ids)

  def _prefixed(self, see, mask, *found):
    """(o, lse) over the prefix of each row's stream, too; found: q, o, lse."""
    if not self.config.stream_copies:
      return found[1:]
    both = self.prefix_key[...], self.prefix_value[...]
    own = [_on_heads(x, prefix.PREFIX) for x in both]
    if see.plan is None:
      return prefix.merged(found, own, mask)
    form = see.plan.form
    parts = [
      prefix.merged(each, own, mask) for _, *each in packed.lanes(form, *found)
    ]
    return tuple(packed.join(form, x) for x in zip(*parts, strict=True))

  def _sunk(self, o_BTNH, lse_BTN):
    """o of a softmax that has the sinks too."""
    if not self.config.sinks:
      return o_BTNH
    weight = jax.nn.sigmoid(lse_BTN - self.sinks[...].astype(lse_BTN.dtype))
    return (o_BTNH * weight[..., None]).astype(o_BTNH.dtype)

  def _attend_all(self, q, k, v, see, mask):
    """Whole rows, without a cache; the context axis may share their length."""
    plan = self.layout.context if annotate.carriers('length') else None
    chunk, impl = chunk_of(self.config, self.kind), self.config.attention

    def local(q, k, v, positions, segments):
      if see.pairs is not None:
        how = slots_lib.How(mask, impl, block=self.config.block)
        return pairs.attend(how, q, k, v, positions, segments, plan)
      length = q.shape[1] * (plan.n if plan else 1)
      segments = slots_lib.chunks(segments, positions, chunk, length)
      order = positions // (self.config.block or 1)
      if plan is None:
        both = (segments,) * 2, (order,) * 2 if self.config.block else None
        return attention_op.attention(q, k, v, mask, *both, impl)
      return context.attention(q, k, v, order, segments, mask, plan)

    # In a region, where arrays are local: kernels take no others.
    names = (QUERIES,) * 3 + (ROWS, ROWS)
    run = annotate.region(local, names, (QUERIES, QUERIES[:3]))
    o, lse = run(q, k, v, see.positions, see.segments)
    return self._sunk(*self._prefixed(see, mask, q, o, lse))

  def init_state(self, batch, slots, dtype):
    """Empty slots: (k_BKSH, v_BKSH)."""
    shape = batch, num_kv_heads(self.config), slots, self.config.head_width
    return tuple(mixer.state(CACHE, *shape, dtype=dtype) for _ in range(2))

  @staticmethod
  def check(config):
    """UserError if the fields of a schema.Model contradict each other."""
    if config.position == 'rope':
      if (width := mixers.rotated(config)) % 2 or not width:
        shown = f'model.head_dim={config.head_width}'
        if (part := config.rope_fraction) < 1:
          shown += f' x model.rope_fraction={part:g} gives {width}, which'
        raise errors.UserError(
          f'{shown} is odd or 0: rotary positions rotate pairs of columns.'
        )

  @staticmethod
  def mixing_flops(config, kind, length):
    """Scores and weighted values of the keys that each token sees.

    With streams those of a prefix are seen by all.
    """
    chunk = chunk_of(config, kind) or length
    window = mask_of(config, kind).window or length
    block = config.block or (1 if config.visibility == 'causal' else length)
    ends = (-(-(t % chunk + 1) // block) * block for t in range(length))
    seen = sum(min(end, window, length) for end in ends)
    seen += length * config.stream_prefix if config.stream_copies else 0
    return 4 * seen * config.num_heads * config.head_width


def has_scaled_norms(config) -> bool:
  """Whether norms of queries and keys have a scale."""
  bare = config.norm == 'rmsnorm_bare' or config.qk_norm == 'rotated_bare'
  return config.qk_norm != 'none' and not bare


def chunk_of(config, kind) -> int:
  """Positions of a chunk that a layer of that kind sees; 0: all."""
  return config.attention_chunk if mixers.TABLE[kind].chunked else 0


def mask_of(config, kind) -> attention_op.Mask:
  """The mask of a layer of that kind."""
  window = config.window if mixers.TABLE[kind].windowed else 0
  return attention_op.Mask(
    causal=config.visibility != 'full',
    ahead=max(config.block - 1, 0),
    window=window or chunk_of(config, kind),  # which a ring ends early by
    softcap=config.attention_softcap,
    scale=config.attention_scale or config.head_width**-0.5,
    block=config.attention_block,
  )


def _of_heads(names, queries='heads'):
  """KEYS or CACHE, of an array that has as many heads as queries have."""
  return tuple(queries if name == 'kv_heads' else name for name in names)


def _on_heads(x, names, queries='heads'):
  """k or v sharded as the query heads are, so a shard holds what it reads.

  names: KEYS or CACHE. queries: the logical name of their heads.

  Where kv heads are fewer than the shards of query heads, every shard has
  computed all of them; they are repeated to the least multiple of the shards.
  In a region each shard then sums its gradients into the kv heads before
  shards are summed, instead of gathering the gradients of every copy.
  """
  shards = annotate.shards(queries)
  if annotate.shards('kv_heads') == shards:
    return x
  many = _of_heads(names, queries)
  heads = math.lcm(x.shape[many.index(queries)], shards)
  run = functools.partial(mixer.repeat_heads, heads=heads, names=many)
  return annotate.region(run, (names,), (many,), single=True)(x)


def num_kv_heads(config) -> int:
  """Key/value heads of a schema.Model."""
  return config.num_kv_heads or config.num_heads
