"""Parameters of recurrent mixers, as parts.py has those of others.

Legend: D model, N heads (of values), G heads of queries and keys, H head width,
K and V widths of keys and values, W taps.
"""

from paraxis.models.huggingface import parameter_row
from paraxis.models.huggingface import transforms
from paraxis.models.mixers import gated_delta as gated_delta_lib
from paraxis.models.mixers import rg_lru as rg_lru_lib

row = parameter_row.row
_ALL = slice(None)


def rg_lru(model, at, names):
  """RecurrentGemma's recurrent block."""
  d, w = model.d_model, model.rg_lru.conv_width
  n, h = rg_lru_lib.sizes(model)
  matrix, keep = transforms.matrix, transforms.kept
  flat, block = keep((n, h), (n * h,)), keep((n, h, h))
  return [
    row('value', f'{at}.linear_x.weight', matrix((d, n, h))),
    row('value_bias', f'{at}.linear_x.bias', flat),
    row('output_gate', f'{at}.linear_y.weight', matrix((d, n, h))),
    row('output_gate_bias', f'{at}.linear_y.bias', flat),
    row('taps', f'{at}.conv_1d.weight', transforms.taps((w, n, h))),
    row('taps_bias', f'{at}.conv_1d.bias', flat),
    row('input_gate', f'{at}.rg_lru.input_gate_weight', block),
    row('input_gate_bias', f'{at}.rg_lru.input_gate_bias', keep((n, h))),
    row('recurrent_gate', f'{at}.rg_lru.recurrent_gate_weight', block),
    row('recurrent_gate_bias', f'{at}.rg_lru.recurrent_gate_bias',
        keep((n, h))),
    row('rate', f'{at}.rg_lru.recurrent_param', flat),
    row('output', f'{at}.linear_out.weight', matrix((n, h, d), 2)),
    row('output_bias', f'{at}.linear_out.bias', keep((d,))),
  ]  # fmt: skip


def _grouped(d, sizes):
  """{parameter: (tensor, its cut)}, for every head of keys what belongs to it:
  its query, its key, values, gates; shares, steps."""
  g, n, k, v = sizes
  each, out, at = n // g, {}, 0
  rows = 2 * (k + each * v)
  for what, size in (
    ('query', k), ('key', k), ('value', each * v), ('output_gate', each * v)
  ):  # fmt: skip
    index = _ALL, slice(at, at + size)
    out[what] = (
      'in_proj_qkvz', transforms.Cut((g * rows, d), (g, rows, d), index)
    )  # fmt: skip
    at += size
  for i, what in enumerate(('share', 'step')):
    cut = transforms.Cut((2 * n, d), (g, 2, each, d), (_ALL, i))
    out[what] = 'in_proj_ba', cut
  return out


def _runs(sizes):
  """{input of a convolution: its rows, one after the other}, and all rows."""
  g, n, k, v = sizes
  ends = 0, g * k, 2 * g * k, 2 * g * k + n * v
  names = gated_delta_lib.INPUTS
  return {
    what: slice(*ends[i : i + 2]) for i, what in enumerate(names)
  }, ends[-1]  # fmt: skip


def _apart(d, sizes):
  """As `_grouped`, of four matrices."""
  runs, rows = _runs(sizes)
  out: dict = {
    what: ('in_proj_qkv', transforms.Cut((rows, d), (rows, d), (run,)))
    for what, run in runs.items()
  }
  names = dict(output_gate='in_proj_z', share='in_proj_b', step='in_proj_a')
  return out | {what: (name, None) for what, name in names.items()}


def gated_delta(model, at, names):
  """Gated DeltaNet of Qwen3-Next, and of Qwen3.5, which has more matrices."""
  d, w = model.d_model, model.gated_delta.conv_width
  sizes = g, n, k, v = gated_delta_lib.sizes(model)
  shapes = dict(query=(g, k), key=(g, k), value=(n, v))
  keep, out = transforms.kept, []
  where = (_apart if names.get('delta_apart') else _grouped)(d, sizes)
  for what, (name, cut) in where.items():
    shape = (shapes | dict(output_gate=(n, v))).get(what, (n,))
    change = transforms.matrix((d, *shape))
    out.append(row(what, f'{at}.{name}.weight', change, cut))
  runs, rows = _runs(sizes)
  for what, shape in shapes.items():
    cut = transforms.Cut((rows, 1, w), (rows, 1, w), (runs[what],))
    taps = transforms.taps((w, *shape))
    out.append(row(f'{what}_conv', f'{at}.conv1d.weight', taps, cut))
  return [
    *out,
    row('step_bias', f'{at}.dt_bias', keep((n,))),
    row('a_log', f'{at}.A_log', keep((n,))),
    row('output_norm', f'{at}.norm.weight', keep((v,))),
    row('output', f'{at}.out_proj.weight', transforms.matrix((n, v, d), 2)),
  ]
