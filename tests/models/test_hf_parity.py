"""Published shapes are configs of one file: logits and gradients equal HF's.

Random tiny models of `transformers` in float64 against models/decoder.py with
the same weights: logits, and the gradient of the loss by every parameter, both
within 1e-9 of the largest. HF computes norms, angles and soft-max in float32
whatever the dtype; `Wide` makes those float64 too.

Legend: B rows, T tokens, D model, N heads, K kv heads, H head width, F mlp,
V vocabulary, L layers.
"""

import functools

import hf_peer
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models import batch
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.models.mixers import attention
from paraxis.train import loss

pytestmark = [pytest.mark.hf, pytest.mark.usefixtures('float64')]
torch, transformers = hf_peer.torch, hf_peer.transformers

B, T, V = 2, 24, 48
D, N, K, H, F = 16, 4, 2, 8, 24
TOLERANCE = 1e-9


SHAPE = dict(
  vocab_size=V, hidden_size=D, intermediate_size=F, num_attention_heads=N,
  num_key_value_heads=K, head_dim=H, max_position_embeddings=64,
  rms_norm_eps=1e-6, pad_token_id=None, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FIELDS = dict(
  vocab_size=V, d_model=D, num_heads=N, num_kv_heads=K, head_dim=H, d_ff=F,
  num_layers=2, dtype='float64', param_dtype='float64', attention_block=8,
)  # fmt: skip
YARN = dict(
  rope_type='yarn', rope_theta=50.0, factor=4.0, beta_fast=8.0, beta_slow=1.0,
  original_max_position_embeddings=512,
)  # fmt: skip
LLAMA3 = dict(
  rope_type='llama3', rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
  high_freq_factor=4.0, original_max_position_embeddings=16,
)  # fmt: skip
SCALED = dict(rope_original_length=16, tied_embedding=False)
GEMMA = dict(
  norm_placement='sandwich', norm_zero_centered=True, mlp='geglu', window=5,
  embedding_scale=D**0.5,
)  # fmt: skip
LLAMA = dict(num_hidden_layers=2, tie_word_embeddings=False)

# name -> (HF family, its config beyond SHAPE, our fields beyond FIELDS)
SHAPES = {
  'llama': ('Llama', LLAMA, dict(tied_embedding=False)),
  'llama_linear': (
    'Llama',
    LLAMA
    | dict(
      rope_parameters=dict(rope_type='linear', rope_theta=500.0, factor=2.0)
    ),
    SCALED | dict(rope_scaling='linear', rope_factor=2.0, rope_theta=500.0),
  ),
  'llama_llama3': (
    'Llama',
    LLAMA | dict(rope_parameters=LLAMA3),
    SCALED | dict(rope_scaling='llama3', rope_factor=8.0),
  ),
  'llama_yarn': (
    'Llama',
    LLAMA | dict(rope_parameters=YARN),
    SCALED
    | dict(
      rope_scaling='yarn', rope_factor=4.0, rope_high_frequency=8.0,
      rope_theta=50.0, rope_original_length=512,
    ),
  ),
  'qwen2': ('Qwen2', LLAMA, dict(tied_embedding=False, attention_bias=True)),
  'qwen3': ('Qwen3', LLAMA, dict(tied_embedding=False, qk_norm='head')),
  # Layers 0, 2 see a window, 1, 3 everything.
  'gemma2': (
    'Gemma2',
    dict(
      num_hidden_layers=3, sliding_window=5, query_pre_attn_scalar=12,
      attn_logit_softcapping=2.0, final_logit_softcapping=1.5,
    ),
    GEMMA
    | dict(
      num_layers=3, pattern='WF', attention_scale=12**-0.5,
      attention_softcap=2.0, logit_softcap=1.5,
    ),
  ),
  'gemma3': (
    'Gemma3Text',
    dict(
      num_hidden_layers=7, sliding_window=5, query_pre_attn_scalar=12,
      rope_parameters=dict(
        full_attention=dict(rope_type='linear', rope_theta=1e6, factor=8.0),
        sliding_attention=dict(rope_type='default', rope_theta=1e4),
      ),
    ),
    GEMMA
    | dict(
      num_layers=7, pattern='WWWWWF', attention_scale=12**-0.5,
      qk_norm='head', rope_theta=1e6, rope_local_theta=1e4,
      rope_scaling='linear', rope_factor=8.0,
    ),
  ),
  'smollm3': (
    'SmolLM3',
    dict(num_hidden_layers=5, rope_parameters=dict(
      rope_type='default', rope_theta=2e6)),
    dict(num_layers=5, pattern='FFFN', rope_theta=2e6),
  ),
  'olmo2': (
    'Olmo2',
    LLAMA,
    dict(tied_embedding=False, norm_placement='post', qk_norm='all'),
  ),
  'gpt2': (
    'GPT2',
    dict(
      n_embd=D, n_head=N, n_layer=2, n_inner=F, n_positions=32,
      resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    dict(
      num_kv_heads=0, head_dim=0, position='learned', max_positions=32,
      norm='layernorm', norm_epsilon=1e-5, mlp='gelu', mlp_bias=True,
      attention_bias=True, attention_output_bias=True,
    ),
  ),
}  # fmt: skip

NORMS = {
  'pre': dict(
    input_layernorm='attention_norm', post_attention_layernorm='mlp_norm'
  ),
  'post': dict(
    post_attention_layernorm='attention_post_norm',
    post_feedforward_layernorm='mlp_post_norm',
  ),
  'sandwich': dict(
    input_layernorm='attention_norm',
    post_attention_layernorm='attention_post_norm',
    pre_feedforward_layernorm='mlp_norm',
    post_feedforward_layernorm='mlp_post_norm',
  ),
}


def layer_of_llama(hf, prefix, config):
  """One layer's tensors (torch: (out, in)) by our paths and layouts."""
  out = {}
  for ours, theirs in (('query', 'q'), ('key', 'k'), ('value', 'v')):
    w = hf(f'{prefix}.self_attn.{theirs}_proj.weight')
    out[f'attention/{ours}'] = w.T.reshape(D, -1, H)
    if config.attention_bias:
      b = hf(f'{prefix}.self_attn.{theirs}_proj.bias')
      out[f'attention/{ours}_bias'] = b.reshape(-1, H)
  w = hf(f'{prefix}.self_attn.o_proj.weight')
  out['attention/output'] = w.T.reshape(N, H, D)
  if config.qk_norm != 'none':
    shape = (-1, H) if config.qk_norm == 'all' else (H,)
    for ours, theirs in (('query', 'q'), ('key', 'k')):
      w = hf(f'{prefix}.self_attn.{theirs}_norm.weight')
      out[f'attention/{ours}_norm'] = w.reshape(shape)
  for name in ('gate', 'up', 'down'):
    out[f'mlp/{name}'] = hf(f'{prefix}.mlp.{name}_proj.weight').T
  for theirs, ours in NORMS[config.norm_placement].items():
    out[f'{ours}/scale'] = hf(f'{prefix}.{theirs}.weight')
  return out


def layer_of_gpt2(hf, prefix):
  """GPT-2 keeps (in, out), and q, k, v in one matrix."""
  out, h = {}, D // N
  w = hf(f'{prefix}.attn.c_attn.weight').reshape(D, 3, N, h)
  b = hf(f'{prefix}.attn.c_attn.bias').reshape(3, N, h)
  for i, name in enumerate(('query', 'key', 'value')):
    out[f'attention/{name}'] = w[:, i]
    out[f'attention/{name}_bias'] = b[i]
  out['attention/output'] = hf(f'{prefix}.attn.c_proj.weight').reshape(N, h, D)
  out['attention/output_bias'] = hf(f'{prefix}.attn.c_proj.bias')
  for ours, theirs in (('up', 'c_fc'), ('down', 'c_proj')):
    out[f'mlp/{ours}'] = hf(f'{prefix}.mlp.{theirs}.weight')
    out[f'mlp/{ours}_bias'] = hf(f'{prefix}.mlp.{theirs}.bias')
  for ours, theirs in (('attention_norm', 'ln_1'), ('mlp_norm', 'ln_2')):
    out[f'{ours}/scale'] = hf(f'{prefix}.{theirs}.weight')
    out[f'{ours}/bias'] = hf(f'{prefix}.{theirs}.bias')
  return out


def translate(tensors, config):
  """HF's {name: array} (weights or gradients) -> ours; every one is used."""
  unused = set(tensors)

  def hf(name):
    unused.remove(name)
    return tensors[name]

  if config.position == 'learned':
    out = {
      'embedding': hf('transformer.wte.weight'),
      'positions': hf('transformer.wpe.weight'),
      'norm/scale': hf('transformer.ln_f.weight'),
      'norm/bias': hf('transformer.ln_f.bias'),
    }
    layer = lambda i: layer_of_gpt2(hf, f'transformer.h.{i}')
  else:
    out = {
      'embedding': hf('model.embed_tokens.weight'),
      'norm/scale': hf('model.norm.weight'),
    }
    if not config.tied_embedding:
      out['head'] = hf('lm_head.weight')
    layer = lambda i: layer_of_llama(hf, f'model.layers.{i}', config)
  layers = [layer(i) for i in range(config.num_layers)]
  for path in layers[0]:
    out[f'layers/{path}'] = np.stack([x[path] for x in layers])
  assert not unused
  return out


def rows():
  """A batch of one document a row."""
  ids = np.random.default_rng(1).integers(0, V, (B, T + 1)).astype(np.int32)
  ones = np.ones((B, T), np.int32)
  positions = np.arange(T, dtype=np.int32) * ones
  return batch.Batch(
    ids[:, :-1], ids[:, 1:], ones, positions, ones * 1.0, ones.sum() * 1.0
  )


@functools.cache
def peer(name):
  """(logits, {name: weight}, {name: gradient}) of HF's model, float64."""
  family, extra, _ = SHAPES[name]
  shape = {} if family == 'GPT2' else SHAPE
  settings = dict(vocab_size=V, attn_implementation='eager') | shape | extra
  if family == 'GPT2':
    settings |= dict(bos_token_id=1, eos_token_id=2)
  config = getattr(transformers, f'{family}Config')(**settings)
  head = 'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'
  make = getattr(transformers, family.removesuffix('Text') + head)
  before = torch.get_default_dtype()
  torch.set_default_dtype(torch.float64)
  try:
    with hf_peer.Wide():
      torch.manual_seed(0)
      model = make(config).double().eval()
      with torch.no_grad():  # also scales and biases, or they hide mistakes
        for p in model.parameters():
          p.normal_(0, 0.3)
      data = rows()
      tokens, targets = (torch.tensor(x).long() for x in data[:2])
      logits = model(input_ids=tokens, use_cache=False).logits
      torch.nn.functional.cross_entropy(
        logits.reshape(-1, V), targets.reshape(-1)
      ).backward()
  finally:
    torch.set_default_dtype(before)
  values = dict(model.named_parameters())
  weights = {k: v.detach().numpy() for k, v in values.items()}
  grads = {k: v.grad.numpy() for k, v in values.items()}
  return logits.detach().numpy(), weights, grads


def ours(name, **changes):
  """(logits, gradients, HF's gradients by our paths)."""
  config = schema.Model(**FIELDS | SHAPES[name][2] | changes)
  model_checks.check_model(config)
  _, weights, grads = peer(name)
  model, data = decoder.Decoder(config), rows()
  params = translate(weights, config)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  assert {p: v.shape for p, v in params.items()} == {
    p: v.shape for p, v in shapes.items()
  }

  def mean(params):
    z = model.logits(params, model(params, data)[0])
    return loss.negative_log_likelihood(z, data.targets).mean(), z

  found, logits = jax.jit(jax.grad(mean, has_aux=True))(params)
  return logits, found, translate(grads, config)


def distance(a, b, scale=None):
  """Largest difference, relative to the largest value of `scale` or b."""
  a, b = np.asarray(a), np.asarray(b)
  assert a.dtype == b.dtype == np.float64 and a.shape == b.shape
  largest = np.abs(b if scale is None else scale).max()
  assert np.isfinite(a).all() and largest > 0
  return np.abs(a - b).max() / largest


@pytest.mark.parametrize('name', SHAPES)
def test_logits_and_gradients_equal(name):
  logits, grads, expected = ours(name)
  assert distance(logits, peer(name)[0]) < TOLERANCE
  assert set(grads) == set(expected)
  # Without rotation a key bias shifts all scores of a query alike: its gradient
  # is rounding around 0, so it is measured by the query bias's.
  scale = {p: expected[p.replace('key_bias', 'query_bias')] for p in expected}
  far = {p: distance(g, expected[p], scale[p]) for p, g in grads.items()}
  assert not {p: d for p, d in far.items() if not d < TOLERANCE}


def interleaved(x_BTNH, cos, sin):
  """Rotates neighbours instead of halves."""
  y = jnp.stack(
    [
      x_BTNH[..., 0::2] * cos - x_BTNH[..., 1::2] * sin,
      x_BTNH[..., 1::2] * cos + x_BTNH[..., 0::2] * sin,
    ],
    -1,
  )
  return y.reshape(x_BTNH.shape)


def test_another_rotation_is_seen(monkeypatch):
  monkeypatch.setattr(attention.rope, 'rotate', interleaved)
  logits, grads, expected = ours('llama')
  assert distance(logits, peer('llama')[0]) > 1e-3
  path = 'layers/attention/query'
  assert distance(grads[path], expected[path]) > 1e-3


@pytest.mark.parametrize(
  'name, change',
  [
    ('gemma2', dict(pattern='FW')),
    ('gemma2', dict(window=6)),
    ('gemma3', dict(rope_local_theta=0.0)),
    ('smollm3', dict(pattern='NFFF')),
    ('llama_yarn', dict(rope_high_frequency=4.0)),
    ('gpt2', dict(norm_epsilon=1e-6)),
  ],
)
def test_a_wrong_field_is_seen(name, change):
  config = schema.Model(**FIELDS | SHAPES[name][2] | change)
  model, data = decoder.Decoder(config), rows()
  params = translate(peer(name)[1], config)

  @jax.jit
  def run(params):
    return model.logits(params, model(params, data)[0])

  assert distance(run(params), peer(name)[0]) > 100 * TOLERANCE
