"""The parameters of a model's parts, each with the tensors it is made of.

Names of tensors come from a family's dictionary (families.py); shapes from the
model, by the fields of which a part decides what parameters it has, exactly as
the modules of models/ do.

Legend: D model, N heads, K kv heads, H head width, F hidden width, E experts,
R rank, S numbers of a state, G groups, P head width of a state.
"""

from paraxis.configs.base import mixers
from paraxis.models import layer as layer_lib
from paraxis.models.huggingface import ffn_parts
from paraxis.models.huggingface import hybrid_parts
from paraxis.models.huggingface import joined
from paraxis.models.huggingface import parameter_row
from paraxis.models.huggingface import recurrent_parts
from paraxis.models.huggingface import transforms
from paraxis.models.mixers import attention as attention_lib
from paraxis.models.mixers import mamba as mamba_lib

Row, row = parameter_row.Row, parameter_row.row
linear, norm = parameter_row.linear, parameter_row.norm
within = parameter_row.within


def ends(model, names):
  """Embedding, positions, final norm and head."""
  table = transforms.kept((model.vocab_size, model.d_model))
  out = [row('embedding', f'{names["embedding"]}.weight', table)]
  if model.embedding_norm:
    out += norm('embedding_norm', names['embedding_norm'], model)
  if model.position == 'learned':
    shape = (model.max_positions, model.d_model)
    name = f'{names["positions"]}.weight'
    out.append(row('positions', name, transforms.kept(shape)))
  out += norm('norm', names['norm'], model)
  if not model.tied_embedding:
    out.append(row('head', f'{names["head"]}.weight', table))
  if model.head_bias:
    keep = transforms.kept((model.vocab_size,))
    out.append(row('head_bias', f'{names["head"]}.bias', keep))
  return out


def places(kinds, family):
  """Of every layer, the number of its mixer in names, and that of its mlp.

  Where every block counts (names: blocks), an mlp is the one after its mixer.
  """
  i, blocks = 0, family.names.get('blocks', False)
  for kind in kinds:
    own = i + (blocks and kind[1:] != '.')
    yield i, own
    i = own + 1


def layer(model, kind, at, family, users=()):
  """Rows of a layer of that kind of `layer.kinds_of`.

  at: of `places`. users: at[0] of the layers up to this that share blocks.
  """
  names = family.names
  if model.residual == 'parallel':
    names = names | names.get('parallel', {})
  at, below = (names['layer'].format(i) for i in at)
  mixer = layer_lib.MIXERS[kind[0]].name
  own = names.get(mixer, names['attention'])
  out = []
  if mixers.TABLE[kind[0]].shares:
    out += within(mixer, hybrid_parts.shared(model, at, users, names))
    at = f'{at}.{names["inner"]}'
  inside = f'{at}.{own}'.rstrip('.')  # '': of the layer itself
  out += within(mixer, MIXERS[mixer](model, inside, names))
  out += norms(mixer, 'mixer', at, model, names)
  if kind[1:] == '.':
    return out
  out += norms('mlp', 'mlp', below, model, names)
  if kind[1:] == '':
    inside = f'{below}.{names["mlp"]}'.rstrip('.')
    return out + within('mlp', ffn_parts.mlp(model, inside, names))
  which = 'moe' if kind[1:] == 'E' else 'wide_moe'
  name = f'{below}.{names.get("moe", names["mlp"])}'
  return out + within(
    which, ffn_parts.experts(model, name, names, kind[1:] == 'P')
  )


def norms(ours, theirs, at, model, names):
  """Norms before and after a part of a layer."""
  out = []
  shared = model.residual == 'shared' and theirs == 'mlp'
  if model.norm_placement != 'post' and not shared:
    out += norm(f'{ours}_norm', f'{at}.{names[f"{theirs}_norm"]}', model)
  if model.norm_placement != 'pre':
    name = f'{at}.{names[f"{theirs}_post_norm"]}'
    out += norm(f'{ours}_post_norm', name, model)
  return out


def attention(model, at, names):
  """Queries, keys, values, their norms and the output."""
  d, n, h = model.d_model, model.num_heads, model.head_width
  k = attention_lib.num_kv_heads(model)
  out = []
  parts = [('query', n), ('key', k), ('value', k)]
  parts += [('gate', n)] if model.attention_gate else []
  for what, heads in parts:
    name, cuts = f'{at}.{names.get(what, "")}', (None, None)
    if model.attention_gate and what in ('query', 'gate'):
      name, cuts = joined.gated(what, names, at, (d, n, h))
    if 'qkv' in names:
      name = f'{at}.{names["qkv"]}'
      cuts = joined.KINDS[names.get('qkv_order', 'stacked')](what, d, n, k, h)
    change = linear(names, (d, heads, h))
    bias = transforms.kept((heads, h), (heads * h,))
    if names.get('backwards') and what in ('query', 'key'):
      swapped = transforms.swapped(h // 2)
      change = transforms.chain(change, swapped)
      bias = transforms.chain(bias, swapped)
    if names.get('neighbours') and what in ('query', 'key'):
      pairs = transforms.halves(0, mixers.rotated(model))
      change = transforms.chain(change, pairs)
      bias = transforms.chain(bias, pairs)
    out.append(row(what, f'{name}.weight', change, cuts[0]))
    if model.attention_bias:
      out.append(row(f'{what}_bias', f'{name}.bias', bias, cuts[1]))
    normed = attention_lib.has_scaled_norms(model)
    if normed and what in ('query', 'key'):
      shape = (heads, h) if model.qk_norm == 'all' else (h,)
      keep = transforms.kept(shape, names.get('qk_norm_shape', (-1,)))
      name = f'{at}.{names[f"{what}_norm"]}'
      out.append(row(f'{what}_norm', f'{name}.weight', keep))
  if model.sinks:
    name = f'{at}.{names.get("sinks", "sinks")}'
    out.append(row('sinks', name, transforms.kept((n,))))
  name = f'{at}.{names["output"]}'
  out.append(row('output', f'{name}.weight', linear(names, (n, h, d), 2)))
  if model.attention_output_bias:
    keep = transforms.kept((d,))
    out.append(row('output_bias', f'{name}.bias', keep))
  return out


_ALL = slice(None)


def latent(model, at, names):
  """Latent attention of DeepSeek: it rotates neighbours, we rotate halves.

  latent_pairs=False: the tensors are for halves, too.
  """
  own, d, n = model.latent, model.d_model, model.num_heads
  r, q, p = own.rank, own.query_rank, own.rope_dim
  h, u = own.nope_dim, own.value_dim
  both = (f'{at}.{names["latent_down"]}.weight', (r + p, d))
  cut = lambda view, *index: transforms.Cut(both[1], view, index)
  norm = lambda what: f'{at}.{names[what]}.weight'
  keep, matrix, pairs = transforms.kept, transforms.matrix, transforms.halves
  if not names.get('latent_pairs', True):
    pairs = lambda first: transforms.chain()
  out = [
    row('down', both[0], matrix((d, r)), cut(both[1], slice(0, r))),
    row(
      'shared_key', both[0], transforms.chain(matrix((d, p)), pairs(0)),
      cut(both[1], slice(r, r + p)),
    ),
    row('latent_norm', norm('latent_norm'), keep((r,))),
  ]  # fmt: skip
  name, shape = f'{at}.{names["latent_up"]}.weight', (n * (h + u), r)
  for what, width, at_head in (('key', h, 0), ('value', u, h)):
    index = (_ALL, slice(at_head, at_head + width))
    part = transforms.Cut(shape, (n, h + u, r), index)
    out.append(row(what, name, matrix((r, n, width)), part))
  if q:
    name = f'{at}.{names["query_down"]}.weight'
    out.append(row('query_down', name, matrix((d, q))))
    out.append(row('query_norm', norm('query_norm'), keep((q,))))
  name = f'{at}.{names["latent_query" if q else "query"]}.weight'
  query = transforms.chain(matrix((q or d, n, h + p)), pairs(h))
  output = f'{at}.{names["output"]}.weight'
  return [
    *out, row('query', name, query), row('output', output, matrix((n, u, d), 2))
  ]  # fmt: skip


def mamba(model, at, names):
  """Mamba, and with inner norms Jamba's."""
  own, d = model.mamba, model.d_model
  f, r, s = mamba_lib.inner(model), mamba_lib.step_rank(model), own.state
  matrix, keep = transforms.matrix, transforms.kept
  name = f'{at}.in_proj.weight'
  both = lambda i: transforms.Cut((2 * f, d), (2, f, d), (i,))
  low = f'{at}.x_proj.weight'
  part = lambda *at: transforms.Cut(
    (r + 2 * s, f), (r + 2 * s, f), (slice(*at),)
  )
  out = [
    row('value', name, matrix((d, f)), both(0)),
    row('gate', name, matrix((d, f)), both(1)),
    row('value_conv', f'{at}.conv1d.weight',
        transforms.taps((own.conv_width, f))),
    row('value_bias', f'{at}.conv1d.bias', keep((f,))),
    row('step_down', low, matrix((f, r)), part(0, r)),
    row('shared', low, matrix((f, 2, s)), part(r, r + 2 * s)),
    row('step_up', f'{at}.dt_proj.weight', matrix((r, f))),
    row('step_bias', f'{at}.dt_proj.bias', keep((f,))),
    row('a_log', f'{at}.A_log', keep((f, s))),
    row('skip', f'{at}.D', keep((f,))),
    row('output', f'{at}.out_proj.weight', matrix((f, d))),
  ]  # fmt: skip
  if own.inner_norm and own.inner_norm_scale:
    both_norms = tuple(f'{at}.{x}_layernorm.weight' for x in 'bc')
    out.append(row('step_norm', f'{at}.dt_layernorm.weight', keep((r,))))
    out.append(Row('shared_norm', both_norms, keep((s,)), stack=0))
  return out


def mamba2(model, at, names):
  """Mamba-2: z, x, B, C and the steps are one matrix."""
  own, d = model.mamba, model.d_model
  n, p = mamba_lib.num_heads(model), own.head_dim
  f = n * p
  both = (2, own.groups, own.state)
  shared = 2 * own.groups * own.state
  matrix, keep, taps = transforms.matrix, transforms.kept, transforms.taps
  w, wide = own.conv_width, f + shared
  name, total = f'{at}.in_proj.weight', 2 * f + shared + n
  part = lambda *at: transforms.Cut((total, d), (total, d), (slice(*at),))
  conv = lambda *at: transforms.Cut((wide, 1, w), (wide, 1, w), (slice(*at),))
  bias = lambda *at: transforms.Cut((wide,), (wide,), (slice(*at),))
  taps_at, bias_at = f'{at}.conv1d.weight', f'{at}.conv1d.bias'
  return [
    row('gate', name, matrix((d, n, p)), part(0, f)),
    row('value', name, matrix((d, n, p)), part(f, 2 * f)),
    row('shared', name, matrix((d, *both)), part(2 * f, total - n)),
    row('step', name, matrix((d, n)), part(total - n, total)),
    row('value_conv', taps_at, taps((w, n, p)), conv(0, f)),
    row('shared_conv', taps_at, taps((w, *both)), conv(f, wide)),
    row('value_bias', bias_at, keep((n, p)), bias(0, f)),
    row('shared_bias', bias_at, keep(both), bias(f, wide)),
    row('step_bias', f'{at}.dt_bias', keep((n,))),
    row('a_log', f'{at}.A_log', keep((n,))),
    row('skip', f'{at}.D', keep((n,))),
    row('norm', f'{at}.norm.weight', keep((n, p), (f,))),
    row('output', f'{at}.out_proj.weight', matrix((n, p, d), 2)),
  ]


def short_conv(model, at, names):
  """Gated short convolution: three projections in one matrix."""
  d, w, name = model.d_model, model.short_conv.width, f'{at}.in_proj.weight'
  part = lambda i: transforms.Cut((3 * d, d), (3, d, d), (i,))
  matrix = transforms.matrix
  return [
    row('gate', name, matrix((d, d)), part(0)),
    row('output_gate', name, matrix((d, d)), part(1)),
    row('value', name, matrix((d, d)), part(2)),
    row('conv', f'{at}.conv.weight', transforms.taps((w, d))),
    row('output', f'{at}.out_proj.weight', matrix((d, d))),
  ]


MIXERS = {
  'attention': attention,
  'latent_attention': latent,
  'mamba': mamba,
  'mamba2': mamba2,
  'short_conv': short_conv,
  'rg_lru': recurrent_parts.rg_lru,
  'gated_delta': recurrent_parts.gated_delta,
}
