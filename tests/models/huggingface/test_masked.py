"""Folders of LLaDA and Dream: a plain pass in NumPy, and masks that are filled.

`plain` is written from the papers and the names of the tensors alone.

Legend: T tokens, D model, N heads, H head width, V vocabulary.
"""

import json
import math
import types
from typing import NamedTuple

import hf_families
import hf_masked
import jax
import numpy as np
import peers
import pytest
from safetensors import numpy as safetensors
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.decode import __main__ as command
from paraxis.decode import load
from paraxis.models.huggingface import config as config_lib
from paraxis.models.huggingface import leaves as leaves_lib
from paraxis.models.huggingface import source
from paraxis.train import exchange

SIZE, MASK = 264, 263  # bytes of text, its ends, and masks
FOLDERS = {
  'llada': dict(vocab_size=SIZE, embedding_size=SIZE, mask_token_id=MASK),
  'Dream': dict(vocab_size=SIZE, mask_token_id=MASK),
}


# ------------------------------------------------------------ a pass in NumPy


def rms(x_TD, scale_D, epsilon):
  return x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + epsilon) * scale_D


def attention(q_TNH, k_TNH, v_TNH, theta, causal):
  """(T, N H): every token sees all of them, or with `causal` none behind it."""
  size, half = len(q_TNH), q_TNH.shape[-1] // 2
  angle = np.arange(size)[:, None] * theta ** (-np.arange(half) / half)
  cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

  def turned(x):
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  scores = np.einsum('tnh,snh->nts', turned(q_TNH), turned(k_TNH))
  scores /= math.sqrt(2 * half)
  if causal:
    scores = np.where(np.tri(size, dtype=bool), scores, -np.inf)
  p = np.exp(scores - scores.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  return np.einsum('nts,snh->tnh', p, v_TNH).reshape(size, -1)


class Names(NamedTuple):
  """Of tensors, without '.weight', and of fields of config.json.

  block: of a layer, with its number. parts: of its norms and matrices in the
  order of a pass.
  """

  table: str
  block: str
  norm: str
  head: str
  parts: str
  heads: str
  kv_heads: str
  depth: str


NAMES = {
  'llada': Names(
    'model.transformer.wte', 'model.transformer.blocks.{}',
    'model.transformer.ln_f', 'model.transformer.ff_out',
    'attn_norm q_proj k_proj v_proj attn_out ff_norm ff_proj up_proj ff_out',
    'n_heads', 'n_kv_heads', 'n_layers',
  ),
  'Dream': Names(
    'model.embed_tokens', 'model.layers.{}', 'model.norm', 'lm_head',
    'input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj '
    'self_attn.o_proj post_attention_layernorm mlp.gate_proj mlp.up_proj '
    'mlp.down_proj',
    'num_attention_heads', 'num_key_value_heads', 'num_hidden_layers',
  ),
}  # fmt: skip


def plain(config, tensors, ids, causal=False):
  """z_TV of a row of ids."""
  names, epsilon = NAMES[config['model_type']], config['rms_norm_eps']
  table_VD = tensors[f'{names.table}.weight']
  x_TD = table_VD[ids]
  for i in range(config[names.depth]):
    at = [f'{names.block.format(i)}.{part}' for part in names.parts.split()]
    x_TD = layer(config, tensors, at, x_TD, causal)
  x_TD = rms(x_TD, tensors[f'{names.norm}.weight'], epsilon)
  return x_TD @ tensors.get(f'{names.head}.weight', table_VD).T


def layer(config, tensors, at, x_TD, causal):
  """at: names of its parts."""
  names, epsilon = NAMES[config['model_type']], config['rms_norm_eps']
  heads = config[names.heads]
  kv_heads = config[names.kv_heads] or 1  # one, where the row says null

  def product(y, part):
    bias = tensors.get(f'{at[part]}.bias', 0.0)
    return y @ tensors[f'{at[part]}.weight'].T + bias

  y_TD = rms(x_TD, tensors[f'{at[0]}.weight'], epsilon)
  q, k, v = (
    product(y_TD, part).reshape(len(x_TD), n, -1)
    for part, n in ((1, heads), (2, kv_heads), (3, kv_heads))
  )
  k, v = (np.repeat(a, heads // kv_heads, 1) for a in (k, v))
  mixed = attention(q, k, v, config['rope_theta'], causal)
  x_TD = x_TD + product(mixed, 4)
  y_TD = rms(x_TD, tensors[f'{at[5]}.weight'], epsilon)
  gate = product(y_TD, 6)
  hidden = gate / (1 + np.exp(-gate)) * product(y_TD, 7)
  return x_TD + product(hidden, 8)


@pytest.mark.parametrize('name', hf_masked.MASKED)
def test_a_plain_pass_is_equal(name):
  config = hf_masked.MASKED[name]
  model = hf_families.model_of(config)
  leaves = leaves_lib.table(model, config['model_type'])
  tensors = hf_families.weights_of(model, leaves, 0.3)
  with jax.enable_x64(True):
    params = hf_families.tree_of(leaves, tensors)
    logits = np.asarray(hf_families.ours(model, params)[0])
  rows = hf_families.DATA.tokens
  wanted = np.stack([plain(config, tensors, row) for row in rows])
  assert peers.distance(logits, wanted) < peers.TOLERANCE
  hidden = np.stack([plain(config, tensors, row, True) for row in rows])
  assert peers.distance(logits, hidden) > 0.1


# --------------------------------------------------------------- with the peer


@pytest.mark.hf
@pytest.mark.parametrize('name', hf_masked.MASKED)
def test_a_causal_peer_is_far(name):
  """What is compared in test_families.py, with the peer's own mask."""
  found = hf_families.theirs(name)
  made = hf_masked.computed(
    found.config, hf_families.spread_of(name), hf_families.DATA, hides=True
  )
  assert peers.distance(made[2], found.logits) > 0.1


# ------------------------------------------------------------------ the folder


@pytest.fixture(scope='module', params=FOLDERS)
def folder(request, tmp_path_factory):
  """Its path, config.json and tensors."""
  config = hf_masked.MASKED[request.param] | FOLDERS[request.param]
  path = tmp_path_factory.mktemp(request.param)
  model = config_lib.to_model(config)
  leaves = leaves_lib.table(model, config['model_type'])
  tensors = hf_families.weights_of(model, leaves, 0.3)
  tensors = {name: x.astype('f4') for name, x in tensors.items()}
  (path / 'config.json').write_text(json.dumps(config), 'utf-8')
  # Code beside the weights is not run.
  (path / 'modeling.py').write_text('raise SystemExit(3)\n', 'utf-8')
  safetensors.save_file(tensors, str(path / 'model.safetensors'))
  return types.SimpleNamespace(path=path, config=config, tensors=tensors)


def test_the_model_is_one_of_masks(folder):
  found = source.Source(folder.path).model
  assert (found.visibility, found.mask_id) == ('full', MASK)
  assert found.mask_shift == (folder.config['model_type'] == 'Dream')
  with load.Weights(folder.path, lambda line: None) as opened:
    assert opened.config().data.sequence_length == 64


def test_the_first_token_is_that_of_a_plain_pass(folder):
  """And with mask_shift it is from the token before the mask."""
  with load.Weights(folder.path, lambda line: None) as opened:
    config = schema.with_value(
      schema.view(opened.config()), 'data.tokenizer', 'bytes'
    )
    config = schema.with_value(config, 'decode.method', 'unmask')
    made = opened.generator(config)
    (sample,) = made.generate(['masks'], max_new_tokens=1, temperature=0)
  ids = [made.tokenizer.bos_id(None), *made.tokenizer.encode('masks'), MASK]
  z = plain(folder.config, folder.tensors, ids)
  z[:, MASK] = -np.inf
  shift = folder.config['model_type'] == 'Dream'
  best = z.argmax(-1)
  assert sample['tokens'] == [best[-2 if shift else -1]]
  assert best[-1] != best[-2]


@pytest.mark.parametrize(
  'method, code', [('unmask', 0), ('autoregressive', 2)]
)  # fmt: skip
def test_decode(folder, method, code, capsys):
  """Masks are filled; from left to right there is one line."""
  argv = [
    f'--weights={folder.path}', '--config.data.tokenizer=bytes',
    '--prompt=masks', f'--method={method}', '--max_new_tokens=6', '--json',
  ]  # fmt: skip
  argv += ['--config.decode.unmask.block=4'] * (method == 'unmask')
  assert command_line.run(command.main, argv) == code
  out, err = capsys.readouterr()
  if code:
    line = err.splitlines()[-1]
    assert 'model.visibility=full' in line and 'unmask' in line and not out
    return
  (sample,) = json.loads(out)['samples']
  assert 0 < len(sample['tokens']) <= 6 and MASK not in sample['tokens']


def test_there_and_back(folder, tmp_path):
  """Brought as a run and sent as a folder it has the same tensors."""
  quiet = lambda line: None
  run, out = tmp_path / 'run', tmp_path / 'out'
  exchange.bring(str(folder.path), run, quiet, 'bytes')
  exchange.send(str(run), out, say=quiet)
  config = json.loads((out / 'config.json').read_text('utf-8'))
  assert config['model_type'] == folder.config['model_type']
  same = lambda table: config_lib.canonical(config_lib.to_model(table))
  assert same(config) == same(folder.config)
  back = safetensors.load_file(next(out.glob('*.safetensors')))
  assert back.keys() == folder.tensors.keys()
  for name, x in folder.tensors.items():
    np.testing.assert_array_equal(back[name], x, err_msg=name)


def test_a_folder_that_lacks_a_tensor(folder, tmp_path):
  config = json.dumps(folder.config)
  (tmp_path / 'config.json').write_text(config, 'utf-8')
  least = dict(list(folder.tensors.items())[1:])
  safetensors.save_file(least, str(tmp_path / 'model.safetensors'))
  with support.refused('lacks 1 of', folder.config['model_type']):
    source.Source(tmp_path)
