"""A GGUF file, written by the package `gguf`, against arithmetic by hand."""

import gguf
import numpy as np
import pytest
import support

from paraxis.models.huggingface import source

HEADS, KV_HEADS, HEAD, D, F, V = 4, 2, 8, 32, 64, 259
WIDTH = HEADS * HEAD
LETTERS = [chr(i) for i in range(256)]


def _swapped(rows, heads):
  """llama.cpp's order of the rows of a head: 0, d/2, 1, d/2 + 1, ..."""
  out = np.empty_like(rows)
  for h in range(heads):
    for i in range(HEAD // 2):
      out[h * HEAD + 2 * i] = rows[h * HEAD + i]
      out[h * HEAD + 2 * i + 1] = rows[h * HEAD + HEAD // 2 + i]
  return out


def _q8(x):
  """(what Q8_0 keeps of x, its bytes): 32 values share a float16 scale."""
  blocks = x.reshape(-1, 32)
  scale = (np.abs(blocks).max(1) / 127).astype('f2')
  codes = np.round(blocks / scale.astype('f4')[:, None]).astype('i1')
  raw = np.concatenate([scale[:, None].view('u1'), codes.view('u1')], 1)
  kept = codes * scale.astype('f4')[:, None]
  return kept.reshape(x.shape), raw.reshape(x.shape[0], -1)


def _q4(x):
  """As `_q8` of Q4_1: a scale and a least value; two codes in a byte."""
  blocks = x.reshape(-1, 32)
  least = blocks.min(1).astype('f2')
  scale = ((blocks.max(1) - blocks.min(1)) / 15).astype('f2')
  wide = [a.astype('f4')[:, None] for a in (scale, least)]
  codes = np.clip(np.round((blocks - wide[1]) / wide[0]), 0, 15).astype('u1')
  packed = codes[:, :16] | codes[:, 16:] << 4
  raw = [scale[:, None].view('u1'), least[:, None].view('u1'), packed]
  kept = codes * wide[0] + wide[1]
  return kept.reshape(x.shape), np.concatenate(raw, 1).reshape(len(x), -1)


def write(path, kind='llama', swap=True, more=(), **fields):
  """A model of one layer -> {name in Hugging Face: what its tensor is}."""
  draw = np.random.default_rng(0).normal
  writer = gguf.GGUFWriter(str(path), kind)
  for add, value in (
    (writer.add_embedding_length, D), (writer.add_feed_forward_length, F),
    (writer.add_block_count, 1), (writer.add_head_count, HEADS),
    (writer.add_head_count_kv, KV_HEADS), (writer.add_context_length, 64),
    (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 5e5),
    (writer.add_license, 'mit'), (writer.add_chat_template, 'a template'),
    (writer.add_tokenizer_model, 'gpt2'), (writer.add_tokenizer_pre, 'gpt-2'),
    (writer.add_token_list, [*LETTERS, '<|bos|>', '<|end|>', 'ab']),
    (writer.add_token_types, [1] * 256 + [3, 3, 1]),
    (writer.add_token_merges, ['a b']), (writer.add_bos_token_id, 256),
    (writer.add_eos_token_id, 257),
  ):  # fmt: skip
    add(value)
  for name, value in fields.items():
    writer.add_string(name.replace('__', '.'), value)
  out = {}

  def put(name, hf, shape, form='F32'):
    x = draw(0, 1, shape).astype('f4')
    pack = {'F32': lambda x: (x, x), 'Q8_0': _q8, 'Q4_1': _q4}[form]
    heads = {'attn_q': HEADS, 'attn_k': KV_HEADS}.get(name.split('.')[-2])
    kept, raw = pack(_swapped(x, heads) if heads and swap else x)
    if heads and swap:  # back: the inverse by sorting what `_swapped` does
      order = _swapped(np.arange(len(x))[:, None], heads)[:, 0]
      kept = kept[np.argsort(order)]
    kinds = gguf.GGMLQuantizationType
    dtype = None if form == 'F32' else kinds[form]
    writer.add_tensor(name, raw, raw_dtype=dtype)
    out[hf] = kept

  put('token_embd.weight', 'model.embed_tokens.weight', (V, D), 'Q8_0')
  put('output_norm.weight', 'model.norm.weight', (D,))
  at = 'model.layers.0'
  for name, hf, shape, form in (
    ('attn_norm', 'input_layernorm', (D,), 'F32'),
    ('ffn_norm', 'post_attention_layernorm', (D,), 'F32'),
    ('attn_q', 'self_attn.q_proj', (WIDTH, D), 'Q4_1'),
    ('attn_k', 'self_attn.k_proj', (KV_HEADS * HEAD, D), 'Q8_0'),
    ('attn_v', 'self_attn.v_proj', (KV_HEADS * HEAD, D), 'Q4_1'),
    ('attn_output', 'self_attn.o_proj', (D, WIDTH), 'Q4_1'),
    ('ffn_gate', 'mlp.gate_proj', (F, D), 'Q4_1'),
    ('ffn_up', 'mlp.up_proj', (F, D), 'Q8_0'),
    ('ffn_down', 'mlp.down_proj', (D, F), 'Q4_1'),
  ):
    put(f'blk.0.{name}.weight', f'{at}.{hf}.weight', shape, form)
  for name in more:
    put(name, name, (4,))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return out


def test_every_tensor_and_field(tmp_path):
  wanted = write(tmp_path / 'a.gguf')
  found = source.Source(tmp_path / 'a.gguf')
  files, model = found.files, found.model
  assert set(files.shapes) == set(wanted)
  for name, x in wanted.items():
    assert files.shapes[name] == x.shape
    np.testing.assert_allclose(files.read(name), x, rtol=0, atol=1e-6)
  assert (model.num_heads, model.num_kv_heads) == (HEADS, KV_HEADS)
  assert (model.d_model, model.d_ff, model.vocab_size) == (D, F, V)
  assert (model.rope_theta, model.norm_epsilon) == (5e5, 1e-5)
  assert model.tied_embedding and model.num_layers == 1
  about = found.about
  assert about['licence'] == 'mit' and about['template'] == 'a template'
  assert about['ends'] == [257] and len(about['sha256']) == 64
  assert about['bos'] == 256 and files.adds_bos is None


def test_rows_that_are_not_put_back_are_others(tmp_path):
  """The comparison sees the order of rotary rows."""
  wanted = write(tmp_path / 'a.gguf', swap=False)
  files = source.Source(tmp_path / 'a.gguf').files
  for part in ('q', 'k'):
    name = f'model.layers.0.self_attn.{part}_proj.weight'
    assert not np.allclose(files.read(name), wanted[name], atol=1e-2)


def test_its_tokenizer(tmp_path):
  from paraxis.models.text import tokenizer

  write(tmp_path / 'a.gguf')
  text = source.Source(tmp_path / 'a.gguf').files.tokenizer()
  (tmp_path / 'tokenizer.json').write_text(text)
  made = tokenizer.load(str(tmp_path / 'tokenizer.json'))
  assert (made.bos_id(None), made.end_id) == (256, 257)
  assert made.encode('cab') == [ord('c'), 258]
  assert made.decode([ord('c'), 258]) == 'cab'


@pytest.mark.parametrize(
  'fields, words',
  [
    (dict(kind='falcon'), "'falcon'"),
    (dict(llama__rope__scaling__type='yarn'), 'yarn'),
    (dict(more=['blk.0.attn_qkv.weight']), 'attn_qkv'),
  ],
)
def test_what_is_not_read(tmp_path, fields, words):
  if fields.get('kind') == 'falcon':
    fields['general__name'] = 'x'
  write(tmp_path / 'a.gguf', **fields)
  with support.refused(str(tmp_path), words):
    source.Source(tmp_path / 'a.gguf')


def test_no_gguf_file(tmp_path):
  (tmp_path / 'a.gguf').write_bytes(b'GGML' + bytes(64))
  with support.refused('a.gguf', 'not a GGUF file'):
    source.Source(tmp_path / 'a.gguf')
