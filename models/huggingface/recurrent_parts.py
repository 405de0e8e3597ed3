"""Parameters of recurrent mixers, as parts.py has those of others.

Legend: D model, N heads, H head width, W taps.
"""

from paraxis.models.huggingface import parameter_row
from paraxis.models.huggingface import transforms
from paraxis.models.mixers import rg_lru as rg_lru_lib

row = parameter_row.row


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
