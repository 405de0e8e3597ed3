"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    c_t = rms(x_t W_dkv)              the latent: R numbers a token
    k_t = [c_t W_uk, rope(x_t W_kr)]  per head, and rotated: one for all heads
    v_t = c_t W_uv                    q_t = [q_nope, rope(q_rope)], of x_t or of
                                      rms(x_t W_dq) (query_rank)

Training, prompts and other lanes of many tokens make keys and values and attend
as models/mixers/attention.py does (explicit form). The cache holds c and the
rotated key alone, R + P numbers a token whatever the heads, and lanes of a few
tokens attend to them (absorbed form):

    s = q_nope W_uk^T . c + q_rope . k_rope      o = (softmax(s) c) W_uv

2 N (2 R + P) flops a token seen instead of recomputing its keys and values.
YaRN's factor enters squared, on all scores, as in DeepSeek-V3.

groups > 1: decoding shards the latent over the shards of heads, each latent
shard with its own copy of the rotated key (TPLA, arXiv:2508.15881). A device
has all heads of its latent shards and reads (R / groups + P) numbers a token.

    scores=summed  scores are summed over latent shards before the softmax:
                   exact; one more sum over devices, of a score for each head
                   and token
    scores=own     o = sum_i softmax(q_i . c_i + q_rope . k_rope) c_i W_uv_i,
                   and a latent shard is normalised by alpha_i |c_i|^2 / R
                   instead of |c|^2 / R: the paper's form, not exact, except in
                   the prefill of a whole prompt, or of its first chunk.
                   Behind them lanes of many tokens are absorbed too: drafts
                   are judged by the model that decodes one by one

models/mixers/latent_rotation.py changes the basis of the latent, exactly, so
that its shards suit `own`, and measures `shares`: a latent shard with the share
f of the latent's square has alpha = 1 / f. The paper's factors on scores (mu)
are 1 here. Not supported: sharding heads and latents at once (more devices than
latent shards).

Legend: B rows, T tokens, S cache slots, D model, N heads, H width of a key
without position, P of the rotated key, V of a value, R of the latent, G latent
shards, E = R / G + P.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import aux as aux_lib
from paraxis.models import norm
from paraxis.models import parameter
from paraxis.models.mixers import latent_slots
from paraxis.models.mixers import packed
from paraxis.models.mixers import protocol as mixer
from paraxis.models.mixers import rope
from paraxis.models.mixers import slot_writes
from paraxis.models.mixers import slots as slots_lib
from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.sharding import annotate
from paraxis.sharding.sequence import attention as context

LOW = mixer.LOW
SHARED = ('batch', 'length', None, None)  # the rotated key
HEADS, READERS = mixer.HEADS, mixer.READERS
# Latents, or keys and values of each head, of slots.
SLOTS = ('batch', 'slots', None)
EXPANDED = ('batch', 'slots', *READERS[2:])
# Matrices that read a latent are sharded by its width, as those that read the
# residual stream are by d_model.
UP = ('embed', 'heads', 'head_dim')
DOWN = ('embed', None)


class LatentAttention(mixer.Mixer):
  """x_BTD -> y_BTD; state: (latents and rotated keys _BGSE,)."""

  name = 'latent_attention'
  capabilities = mixer.SLOTS

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    super().__init__(config, rngs, kind, layout)
    own, d, n = config.latent, config.d_model, config.num_heads
    if _apart(own):
      self.capabilities = mixer.SLOTS._replace(exact=False)
      # Measured, not trained: models/mixers/latent_rotation.py.
      fill = 1 / own.groups
      self.shares = parameter.vector((own.groups,), ('norm',), fill)
    make = functools.partial(parameter.matrix, rngs, std=config.init_std)
    wide = d
    if own.query_rank:
      wide = own.query_rank
      self.query_down = make((d, wide), DOWN)
      self.query_norm = parameter.vector((wide,), ('norm',), 1.0)
    self.query = make((wide, n, own.nope_dim + own.rope_dim), UP)
    self.down = make((d, own.rank), DOWN)
    self.latent_norm = parameter.vector((own.rank,), ('norm',), 1.0)
    self.shared_key = make((d, own.rope_dim), DOWN)
    self.key = make((own.rank, n, own.nope_dim), UP)
    self.value = make((own.rank, n, own.value_dim), UP)
    self.output = make(
      (n, own.value_dim, d), ('heads', 'head_dim', 'embed'), inputs=2,
      gain=(2 * config.num_layers) ** -0.5,
    )  # fmt: skip

  def __call__(self, x_BTD, see, state=None):
    low, k_rope, q = self._inputs(x_BTD, see)
    latent = self._norm(low, self.latent_norm)
    if state is None:
      o = self._attend_all(q, latent, k_rope, see)
      return self._output(o, HEADS, 'BTNP,NPD->BTD'), None, aux_lib.NOTHING
    new, (slots,) = self._cached(low, latent, k_rope), state
    outs, (form, ids), apart = [], see.plan, _apart(self.config.latent)
    each = packed.lanes(form, q, latent, k_rope, new.astype(q.dtype), ids)
    for group, q_g, latent_g, k_g, new_g, mine in each:
      many = group.width > packed.FEW
      if group.fresh or (many and not apart):
        o = self._attend_explicit(group, q_g, latent_g, k_g, slots, mine)
      else:
        o = self._attend_absorbed(group, q_g, k_g, new_g, slots, mine)
      if many and apart and not group.fresh:
        # The first tokens of a prompt are exact, as a whole prompt is.
        alone = group._replace(fresh=True)
        first = self._attend_explicit(alone, q_g, latent_g, k_g, slots, mine)
        o = mixer.rows_where(mine.length[:, 0] > 0, o, first)
      outs.append(o)
    y = self._output(packed.join(form, outs), HEADS, 'BTNP,NPD->BTD')
    return y, (new,), aux_lib.NOTHING

  def decode(self, x, see, state, *more):
    return self(x, see, state, *more)

  def commit(self, state, flight, plan, keep):
    """Latents of the tokens that are kept, in their slots."""
    write = functools.partial(slot_writes.write, plan.form, 1)
    names = self._parts(), self._tokens(), mixer.ROWS, packed.IDS
    run = annotate.region(write, names, (self._parts(),))
    return run(*state, *flight, keep, plan.ids)

  def _norm(self, x, scale):
    return norm.rms(x, scale[...], _epsilon(self.config))

  def _inputs(self, x, see):
    """(latent_BTR before its norm, k_rope_BT1P, q_BTNH with P behind H)."""
    config, own = self.config, self.config.latent
    names = ['down', 'shared_key', 'query_down'][: 3 if own.query_rank else 2]
    low, k, *of_query = self._project(
      x, mixer.RESIDUAL, 'BTD,DR->BTR', names, LOW
    )
    source, source_names = x, mixer.RESIDUAL
    if of_query:
      source_names = LOW
      source = self._norm(of_query[0], self.query_norm)
    (q,) = self._project(
      source, source_names, 'BTD,DNH->BTNH', ['query'], HEADS, 'qkv'
    )
    q = checkpoint_name(q, 'query')
    k = annotate.move(k, LOW, SHARED[:3])[:, :, None]
    if config.position == 'rope':
      cos, sin = see.rotations[self.kind]
      k = rope.rotate(k, cos, sin)
      nope, rotated = q[..., : own.nope_dim], q[..., own.nope_dim :]
      q = jnp.concatenate([nope, rope.rotate(rotated, cos, sin)], -1)
    return low, k, q

  def _expand(self, latent_BSR, k_rope_BS1P, names=LOW, out=HEADS):
    """The explicit form's keys and values, per head, laid out by `out`."""
    k, v = self._project(
      latent_BSR, names, 'BTR,RNH->BTNH', ['key', 'value'], out, 'qkv'
    )
    k, v = checkpoint_name(k, 'key'), checkpoint_name(v, 'value')
    # In a region a shard sums the gradients of its heads before shards do.
    shared = (*out[:2], None, None)
    join = annotate.region(_join, (out, shared), (out,), single=True)
    return join(k, k_rope_BS1P), v

  def _attend_all(self, q, latent, k_rope, see):
    """Whole rows; the context axis may share their length."""
    k, v = self._expand(latent, k_rope)
    mask, impl = mask_of(self.config), self.config.attention
    plan = self.layout.context if annotate.carriers('length') else None

    def local(q, k, v, positions, segments):
      if plan is None:
        return attention_op.attention(q, k, v, mask, (segments,) * 2, impl=impl)
      return context.attention(q, k, v, positions, segments, mask, plan)

    # In a region, where arrays are local: kernels take no others.
    names = (HEADS,) * 3 + (mixer.ROWS, mixer.ROWS)
    run = annotate.region(local, names, (HEADS, HEADS[:3]))
    return run(q, k, v, see.positions, see.segments)[0]

  def _attend_explicit(self, group, q, latent, k_rope, slots, ids):
    """Lanes of many tokens: keys and values of every token and slot."""
    keys = [annotate.put(x, READERS) for x in self._expand(latent, k_rope)]
    held = [
      self._expand(*self._uncached(mine.astype(q.dtype)), SLOTS, EXPANDED)
      for mine in self._of_lanes(group, slots, ids, k_rope)
    ]
    length = slots.shape[2]
    how = slots_lib.How(mask_of(self.config), self.config.attention)

    def local(q, k, v, old, ids):
      part = slots_lib.within(group, how, q, k, v, ids, length)
      old = jax.tree.map(lambda x: x.swapaxes(1, 2), old)
      part = slots_lib.joined(group, how, q, old, ids, part)
      return part[0].astype(v.dtype)

    names = *(READERS,) * 3, EXPANDED, packed.IDS
    run = annotate.region(local, names, (READERS,), single=True)
    return annotate.put(run(annotate.put(q, READERS), *keys, held, ids), HEADS)

  def _parts(self):
    """Logical names of a cache (B, G, S, E)."""
    over = READERS[2] if self.config.latent.groups > 1 else None
    return ('batch', over, 'slots', None)

  def _tokens(self):
    """Logical names of as many latents in flight, (B, T, G, E)."""
    batch, over, _, width = self._parts()
    return (batch, None, over, width)

  def _of_lanes(self, group, slots, ids, x):
    """[slots_BGSE of each of slots.ranges], as slots.of_lanes."""
    ranges = slots_lib.ranges(group, ids)
    if not ranges:
      return []

    def local(slots, ids, x):
      found = slots_lib.of_lanes(group, (slots,), ids, x)
      return tuple(y for (y,) in found)

    parts = self._parts()
    run = annotate.region(
      local, (parts, packed.IDS, SHARED), (parts,) * len(ranges)
    )
    return run(slots, ids, x)

  def _cached(self, low, latent, k_rope):
    """The cached form of a token, in latent shards: _BTGE."""
    own = self.config.latent
    cut = lambda x: x.reshape(*x.shape[:-1], own.groups, -1)
    parts = cut(latent)
    if _apart(own):  # alpha is 1 / share, and the mean is over R / G
      scale = cut(self.latent_norm[...])
      scale = scale * jnp.sqrt(own.groups * self.shares[...])[:, None]
      parts = norm.rms(cut(low), scale, _epsilon(self.config))
    return annotate.put(_join(parts, k_rope), self._tokens())

  def _uncached(self, slots_BGSE):
    """(latent_BSR, k_rope_BS1P) of a cache."""
    own = self.config.latent
    slots = annotate.put(slots_BGSE, ('batch', None, 'slots', None))
    slots = slots.swapaxes(1, 2)
    each = own.rank // own.groups
    latent = slots[..., :each].reshape(*slots.shape[:2], own.rank)
    return latent, slots[:, :, :1, each:]

  def _attend_absorbed(self, group, q, k_rope, new_BTGE, slots_BGSE, ids):
    """Lanes of a few tokens, and the latents themselves."""
    own = self.config.latent
    g, each = own.groups, own.rank // own.groups
    q_rope = q[..., own.nope_dim :]
    names = ('batch', 'length', 'heads', None)
    (q,) = self._project(
      q[..., : own.nope_dim], HEADS, 'BTNH,RNH->BTNR', ['key'], names
    )
    queries = ('batch', 'length', None, READERS[2], None)
    summed = g > 1 and not _apart(own)
    if summed:  # every latent shard has a copy of the rotated key
      q_rope = q_rope / g
    if g > 1:
      queries = ('batch', 'length', READERS[2], None, None)
    names_of_all = *names[:2], READERS[2], None
    q, q_rope = (annotate.put(x, names_of_all) for x in (q, q_rope))
    q = q.reshape(*q.shape[:3], g, each).swapaxes(2, 3)
    q_rope = jnp.broadcast_to(q_rope[:, :, None], (*q.shape[:4], own.rope_dim))
    q = annotate.put(jnp.concatenate([q, q_rope], -1), queries)
    # The mesh axes of `slot_heads` now shard the latent instead.
    slots = slots_BGSE.astype(q.dtype)
    slots = self._of_lanes(group, slots, ids, k_rope)
    how = slots_lib.How(mask_of(self.config), self.config.attention)
    attend = functools.partial(latent_slots.attend, summed, group, how)
    names_in = queries, self._tokens(), self._parts(), packed.IDS
    run = annotate.region(attend, names_in, (queries,), single=True)
    o = run(q, new_BTGE, slots, ids)[..., :each]
    # Sharded over heads again, with one whole latent for each head.
    o = annotate.put(o, (*names[:2], None, READERS[2], None)).swapaxes(2, 3)
    o = annotate.put(o.reshape(*o.shape[:3], own.rank), names)
    return self._project(o, names, 'BTNR,RNV->BTNV', ['value'], HEADS)[0]

  def init_state(self, batch, slots, dtype):
    """Empty slots (B, G, S, E); UserError if devices do not divide G."""
    own = self.config.latent
    shards = annotate.shards(READERS[2])
    if own.groups > 1 and own.groups % shards:
      raise errors.UserError(
        f'model.latent.groups={own.groups} latent shards do not divide over '
        f'{shards} shards of heads (mesh.tensor); take a multiple of {shards}, '
        'or 1: every device holds the whole latent.'
      )
    shape = batch, own.groups, slots, own.rank // own.groups + own.rope_dim
    return (mixer.state(self._parts(), *shape, dtype=dtype),)

  @staticmethod
  def check(config):
    """UserError if the fields of a schema.Model contradict each other."""
    own = config.latent
    if config.position == 'rope' and own.rope_dim % 2:
      raise errors.UserError(
        f'model.latent.rope_dim={own.rope_dim} is odd: rotary positions rotate '
        'pairs.'
      )
    if own.rank % own.groups:
      raise errors.UserError(
        f'model.latent.rank={own.rank} is not divisible by '
        f'model.latent.groups={own.groups}.'
      )
    if own.rotation == 'hadamard' and own.rank & (own.rank - 1):
      raise errors.UserError(
        f"model.latent.rotation='hadamard' needs a power of two, and "
        f'model.latent.rank={own.rank}; take pca, or '
        f'{1 << own.rank.bit_length()}.'
      )

  @staticmethod
  def mixing_flops(config, kind, length):
    """Scores and weighted values of a causal row, in the explicit form."""
    own, seen = config.latent, length * (length + 1) // 2
    widths = own.nope_dim + own.rope_dim + own.value_dim
    return 2 * seen * config.num_heads * widths


def mask_of(config) -> attention_op.Mask:
  """The mask; its scale has the square of YaRN's factor, which is of whole
  scores here (`scales_scores`); another one is in the rotations already."""
  own = config.latent
  scale = config.attention_scale or (own.nope_dim + own.rope_dim) ** -0.5
  if config.position == 'rope' and config.rope_scaling == 'yarn':
    scale *= rope.frequencies(config, own.rope_dim)[1] ** 2
  return attention_op.Mask(
    causal=True,
    softcap=config.attention_softcap,
    scale=scale,
    block=config.attention_block,
  )


def _epsilon(config):
  """Of the norms of latents."""
  return config.latent.norm_epsilon or config.norm_epsilon


def _apart(own):
  """Does each latent shard of a mixers.Latent have its own softmax?"""
  return own.groups > 1 and own.scores == 'own'


def _join(x_BSNH, shared_BS1P):
  """Every head, or latent shard, and the rotated key: (B, S, N, H + P).

  The gradient of the key is summed over heads in at least float32.
  """
  shape = (*x_BSNH.shape[:3], shared_BS1P.shape[-1])
  wide = jnp.promote_types(shared_BS1P.dtype, jnp.float32)
  shared = jnp.broadcast_to(shared_BS1P.astype(wide), shape)
  shared = shared.astype(x_BSNH.dtype)
  return jnp.concatenate([x_BSNH, shared], -1)
