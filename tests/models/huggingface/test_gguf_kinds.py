"""Architectures of GGUF: the model of the folder that they were made of."""

import gguf_writing as writing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models import batch
from paraxis.models import build
from paraxis.models.huggingface import gguf_file
from paraxis.models.huggingface import source

KINDS = tuple(writing.FAMILIES)


def opened(path, kind):
  file = path / 'a.gguf'
  writing.write(file, kind)
  return source.Source(file)


def logits(found):
  """(2, 12, V) of a Source's parameters, in float32."""
  config = schema.with_value(schema.view({}), 'model', found.model)
  config = schema.with_value(config, 'model.dtype', 'float32')
  built = build.build(config, '', devices=jax.devices()[:1])
  params = {path: found.read(path, x) for path, x in built.params.items()}
  tokens = jnp.asarray(np.arange(24).reshape(2, 12) * 7 % writing.V)
  ones = jnp.ones((2, 12), jnp.int32)
  order = ones * jnp.arange(12)
  data = batch.Batch(tokens, tokens, ones, order, ones == 1, 1)
  with build.use(built):
    score = lambda p: built.model.logits(p, built.model.features(p, data)[0])
    return np.asarray(jax.jit(score)(params))


@pytest.mark.parametrize('kind', KINDS)
def test_a_file_is_its_folder(tmp_path, kind):
  """Its model, every tensor bit by bit, and its logits."""
  writing.folder(tmp_path / 'hf', kind)
  wanted, found = source.Source(tmp_path / 'hf'), opened(tmp_path, kind)
  assert found.model == wanted.model
  assert set(found.files.shapes) == set(wanted.files.shapes)
  for name, shape in wanted.files.shapes.items():
    assert found.files.shapes[name] == shape
    np.testing.assert_array_equal(
      found.files.read(name), wanted.files.read(name), name
    )
  theirs = logits(wanted)
  assert np.isfinite(theirs).all() and theirs.std() > 1e-2
  np.testing.assert_allclose(logits(found), theirs, rtol=0, atol=1e-6)
  assert found.about['ends'] == [3]


@pytest.mark.hf
@pytest.mark.parametrize('kind', [k for k in KINDS if k != 'smollm3'])
def test_transformers_finds_the_same_tensors(tmp_path, kind):
  """Of both: the files here are what its own reader takes them for."""
  torch = pytest.importorskip('torch', reason='the peer needs torch')
  transformers = pytest.importorskip('transformers', reason='it is the peer')
  pytest.importorskip('accelerate', reason='transformers needs it for GGUF')
  writing.folder(tmp_path / 'hf', kind)
  found = opened(tmp_path, kind).files
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, gguf_file='a.gguf', dtype=torch.float32,
    config=transformers.AutoConfig.from_pretrained(tmp_path / 'hf'),
  ).state_dict()  # fmt: skip
  for name in found.shapes:
    np.testing.assert_array_equal(found.read(name), theirs[name].numpy(), name)


@pytest.mark.parametrize('kind', ['smollm3', 'gemma3'])
def test_what_an_architecture_stores_otherwise_is_seen(
  tmp_path, kind, monkeypatch
):
  """Rows that stay in pairs, norms that stay 1 too large."""
  found = opened(tmp_path, kind)
  sound = logits(found)
  if kind == 'smollm3':
    monkeypatch.setattr(gguf_file, '_half_rotary', lambda x, heads: x)
  else:
    monkeypatch.setattr(gguf_file, '_GEMMA', ())
  assert np.abs(logits(found) - sound).max() > 1e-2


@pytest.mark.parametrize(
  'kind, fields, values',
  [
    (
      'gemma3',
      dict(gemma3__rope__scaling__type='linear',
           gemma3__rope__scaling__factor=8.0),
      dict(rope_scaling='linear', rope_factor=8.0, rope_local_theta=1e4),
    ),
    (
      'llama',
      dict(llama__rope__scaling__factor=4.0),
      dict(rope_scaling='linear', rope_factor=4.0),
    ),
    (
      'llama',
      dict(llama__rope__scale_linear=2.0),
      dict(rope_scaling='linear', rope_factor=2.0),
    ),
    (
      'llama',
      dict(llama__rope__scaling__factor=4.0, llama__rope__scale_linear=2.0),
      dict(rope_scaling='linear', rope_factor=4.0),
    ),
    (
      'llama',
      dict(llama__rope__scaling__factor=0.0, llama__rope__scale_linear=2.0),
      dict(rope_scaling='none', rope_factor=1.0),
    ),
    (
      'llama',
      dict(llama__rope__scaling__type='none', llama__rope__scaling__factor=4.0),
      dict(rope_scaling='none', rope_factor=1.0),
    ),
    (
      'gemma3',
      dict(gemma3__attention__sliding_window=None),
      dict(pattern='F', rope_theta=5e5),
    ),
    (
      'gemma3',
      dict(gemma3__rope__freq_base_swa=2e4),
      dict(rope_local_theta=2e4),
    ),
    (
      'gemma2',
      dict(gemma2__attention__sliding_window=None,
           gemma2__attn_logit_softcapping=None),
      dict(window=4096, attention_softcap=50.0),
    ),
    (
      'qwen3',
      dict(tokenizer__ggml__bos_token_id=None),
      dict(qk_norm='head'),
    ),
  ],
)  # fmt: skip
def test_fields(tmp_path, kind, fields, values):
  """Those that change a model, and those that a file may lack."""
  writing.write(tmp_path / 'a.gguf', kind, **fields)
  model = source.Source(tmp_path / 'a.gguf').model
  assert {name: getattr(model, name) for name in values} == values


def test_the_largest_gemma_divides_scores_by_the_width(tmp_path, monkeypatch):
  """query_pre_attn_scalar is in no field: of the 27B it is no head_dim."""
  monkeypatch.setattr(gguf_file, '_LARGEST', {'gemma2': writing.LAYERS})
  writing.write(tmp_path / 'a.gguf', 'gemma2')
  model = source.Source(tmp_path / 'a.gguf').model
  assert model.attention_scale == (writing.D // writing.HEADS) ** -0.5


@pytest.mark.parametrize(
  'kind, changes, words',
  [
    ('llama', dict(drop=['blk.2.attn_q.weight', 'output_norm.weight']),
     ['lacks 2', 'output_norm.weight', 'blk.2.attn_q.weight']),
    ('gemma2', dict(drop=['blk.0.post_ffw_norm.weight']),
     ['lacks 1', 'blk.0.post_ffw_norm.weight']),
    ('qwen2', dict(drop=[f'blk.{i}.attn_k.bias' for i in range(7)]),
     ['lacks 7', 'blk.{0,1,2,3,4,5,6}.attn_k.bias']),
    ('llama', dict(more={f'blk.{i}.attn_q_norm.weight': np.ones(8, 'f4')
                         for i in (1, 4)} | {'own': np.ones(2, 'f4')}),
     ['unused, 3', 'blk.{1,4}.attn_q_norm.weight', 'own']),
    ('llama', dict(rename={'blk.1.attn_v.weight': 'blk.9.attn_v.weight'}),
     ['lacks 1', 'blk.1.attn_v.weight']),
    ('qwen3', dict(qwen3__block_count=9000), ['9000', 'tensors']),
    ('qwen3', dict(qwen3__attention__head_count=None), ['head_count']),
    ('qwen3', dict(qwen3__attention__head_count='4'), ["'4'", 'str']),
    ('qwen3', dict(qwen3__attention__head_count=[4] * 7), ['list']),
    ('qwen3', dict(qwen3__rope__dimension_count=4),
     ['rope.dimension_count is 4', '8']),
    ('qwen3', dict(qwen3__rope__scaling__type='yarn'), ['yarn']),
    ('qwen2', dict(tokenizer__ggml__tokens=['a'] * 39),
     ['tokens are 39', '40 rows']),
    ('qwen2', dict(tokenizer__ggml__eot_token_id=40),
     ['eot_token_id is 40', '40 ids']),
    ('llama', dict(general__architecture='rwkv7'), ['rwkv7', 'gemma3']),
  ],
)  # fmt: skip
def test_one_line_each(tmp_path, kind, changes, words):
  writing.write(tmp_path / 'a.gguf', kind, **changes)
  with support.refused(str(tmp_path), *words):
    source.Source(tmp_path / 'a.gguf')
