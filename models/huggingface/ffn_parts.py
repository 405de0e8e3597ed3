"""Parameters of mlps and of experts, as parts.py has those of mixers.

Legend: D model, F hidden width, E experts.
"""

from paraxis.models.ffn import mlp as mlp_lib
from paraxis.models.ffn import moe
from paraxis.models.ffn import router
from paraxis.models.huggingface import parameter_row
from paraxis.models.huggingface import transforms

Row, row = parameter_row.Row, parameter_row.row
linear, within = parameter_row.linear, parameter_row.within
_ALL = slice(None)


def mlp(model, at, names, width=0, bias=None):
  """Gate, up and down; width: other than model.d_ff."""
  d, f = model.d_model, width or model.d_ff
  bias = model.mlp_bias if bias is None else bias
  gated = model.mlp not in mlp_lib.PLAIN
  out = []
  if model.mlp == 'xielu':
    slopes = tuple(f'{at}.act_fn.alpha_{x}' for x in 'pn')
    out.append(Row('slopes', slopes, transforms.kept((), (1,)), stack=0))
  for what in ('gate', 'up', 'down') if gated else ('up', 'down'):
    shape = (f, d) if what == 'down' else (d, f)
    cuts, name = (None, None), f'{at}.{names.get(what, "")}'
    if 'gate_up' in names and what != 'down':
      name = f'{at}.{names["gate_up"]}'
      half = names.get('gate_up_order', ('gate', 'up')).index(what)
      cuts = (
        transforms.Cut((2 * f, d), (2, f, d), (half,)),
        transforms.Cut((2 * f,), (2, f), (half,)),
      )
    out.append(row(what, f'{name}.weight', linear(names, shape), cuts[0]))
    if bias:
      keep = transforms.kept(shape[1:])
      out.append(row(f'{what}_bias', f'{name}.bias', keep, cuts[1]))
  return out


def experts(model, at, names, wide=False):
  """Router, stacked experts, and what stands beside them."""
  own, d, f = model.experts, model.d_model, moe.width(model)
  e = own.count * (2 if wide else 1)
  out = [
    row('router', f'{at}.{names["router"]}.weight', transforms.matrix((d, e))),
    Row('load', (), shape=(e + router.EXTRA,)),
  ]
  out += (_stacked_experts if 'expert_gate_up' in names else _each_expert)(
    model, at, names, e
  )
  if own.router_bias:
    name = f'{at}.{names["router"]}.bias'
    out.append(row('router_bias', name, transforms.kept((e,))))
  if own.bias_rate:
    keep = transforms.kept((e,), names.get('router_bias_shape'))
    out.append(row('bias', f'{at}.{names["router_bias"]}', keep))
  if own.shared:
    outside = names.get('shared_outside', False)  # of the layer, not of `at`
    name = f'{at.rpartition(".")[0] if outside else at}.{names["shared"]}'
    beside = mlp(model, name, names, own.shared * f, bias=False)
    out += within('beside', beside)
  if own.shared_gate:
    name = f'{at}.{names["shared_gate"]}.weight'
    out.append(row('shared_gate', name, transforms.matrix((d, 1))))
  return out


def _each_expert(model, at, names, e):
  """Three matrices, or two, of every expert."""
  d, f, out = model.d_model, moe.width(model), []
  gated = model.mlp not in mlp_lib.PLAIN
  for what in ('gate', 'up', 'down') if gated else ('up', 'down'):
    shape = (f, d) if what == 'down' else (d, f)
    each = f'{at}.{names["expert"]}.{names[f"expert_{what}"]}'
    every = tuple(each.format(i) for i in range(e))
    of = lambda kind, every=every: tuple(f'{name}.{kind}' for name in every)
    out.append(Row(what, of('weight'), transforms.matrix(shape), stack=0))
    if model.experts.mlp_bias:
      bias = transforms.kept(shape[1:])
      out.append(Row(f'{what}_bias', of('bias'), bias, stack=0))
  return out


def _stacked_experts(model, at, names, e):
  """Tensors of all experts; gate and up in one.

  Outputs before inputs, gate before up. expert_gate_up_order: 'inputs first',
  and gate before up, or 'by turns'.
  """
  d, f, out = model.d_model, moe.width(model), []
  order = names.get('expert_gate_up_order', '')
  for i, what in enumerate(('gate', 'up', 'down')):
    shape, cuts = ((e, f, d) if what == 'down' else (e, d, f)), (None, None)
    name, behind = (
      f'{at}.{names["expert_down"]}',
      names.get('expert_suffix', ''),
    )
    if what != 'down':
      name = f'{at}.{names["expert_gate_up"]}'
      cut = transforms.Cut
      cuts = (
        cut((e, 2 * f, d), (e, 2, f, d), (_ALL, i)), cut(
          (e, 2 * f), (e, 2, f), (_ALL, i)),
      )  # fmt: skip
      if order == 'by turns':
        cuts = (
          cut((e, d, 2 * f), (e, d, f, 2), (..., i)),
          cut((e, 2 * f), (e, f, 2), (..., i)),
        )
      if order == 'inputs first':
        halves = (_ALL, _ALL, i)
        cuts = cut((e, d, 2 * f), (e, d, 2, f), halves), cuts[1]
    keep = transforms.kept(shape)
    change = keep if order else transforms.turned
    out.append(row(what, f'{name}{behind}', change, cuts[0]))
    if model.experts.mlp_bias:
      bias = transforms.kept((e, shape[-1]))
      out.append(row(f'{what}_bias', f'{name}_bias', bias, cuts[1]))
  return out
