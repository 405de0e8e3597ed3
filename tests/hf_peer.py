"""What the tests against `transformers` share; without it they are skipped.

Import this file first: it skips the importing file where a peer is missing.

Legend: B rows, T tokens, D model, H head width, V vocabulary.
"""

import contextlib

import jax
import numpy as np
import pytest

from paraxis.models import batch
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.train import loss

torch = pytest.importorskip('torch', reason='the peer needs torch')
transformers = pytest.importorskip(
  'transformers', reason='the peer needs transformers'
)

TOLERANCE = 1e-9  # of the largest value
# Our path -> HF's name, of most models.
ENDS = {
  'embedding': 'model.embed_tokens.weight',
  'norm/scale': 'model.norm.weight',
  'head': 'lm_head.weight',
}


class Wide(torch.overrides.TorchFunctionMode):
  """Within it torch's float32 means float64.

  HF computes norms, angles, decays, routers and soft-max in float32 in models
  of any dtype.
  """

  def __torch_function__(self, function, types, args=(), kwargs=None):
    swap = lambda x: torch.float64 if x is torch.float32 else x
    if function is torch.Tensor.float:
      function = torch.Tensor.double
    args = tuple(map(swap, args))
    kwargs = {k: swap(v) for k, v in (kwargs or {}).items()}
    return function(*args, **kwargs)


@contextlib.contextmanager
def float64():
  """Within it models of torch are made, and compute, in float64."""
  before = torch.get_default_dtype()
  torch.set_default_dtype(torch.float64)
  try:
    with Wide():
      yield
  finally:
    torch.set_default_dtype(before)


def randomised(make, spread):
  """The model that `make` gives, in float64, all its weights normal.

  Scales and biases too, or they hide mistakes.
  """
  with float64(), torch.no_grad():
    torch.manual_seed(0)
    model = make().double().eval()
    for p in model.parameters():
      p.normal_(0, spread)
  return model


def rows(vocab, shape):
  """A batch of one document a row; shape: (B, T)."""
  ids = np.random.default_rng(1).integers(0, vocab, (shape[0], shape[1] + 1))
  ids, ones = ids.astype(np.int32), np.ones(shape, np.int32)
  positions = np.arange(shape[1], dtype=np.int32) * ones
  return batch.Batch(
    ids[:, :-1], ids[:, 1:], ones, positions, ones * 1.0, ones.sum() * 1.0
  )


def logits_of(model, data):
  """HF's z_BTV, a tensor."""
  with float64():
    tokens = torch.tensor(data.tokens).long()
    return model(input_ids=tokens, use_cache=False).logits


def weights_of(model):
  """{name: array} of HF's model."""
  return {k: v.detach().numpy() for k, v in model.named_parameters()}


def gradients_of(model, data):
  """(z_BTV, {name: weight}, {name: gradient of the loss}) of HF's model."""
  logits = logits_of(model, data)
  with float64():
    torch.nn.functional.cross_entropy(
      logits.flatten(0, 1), torch.tensor(data.targets).long().flatten()
    ).backward()
  grads = {k: v.grad.numpy() for k, v in model.named_parameters()}
  return logits.detach().numpy(), weights_of(model), grads


def translate(tensors, config, ends, layer):
  """HF's {name: array} (weights or gradients) by our paths; all are used.

  Args:
    tensors: torch's matrices are (out, in). config: schema.Model.
    ends: {our path: HF's name} of what is in no layer.
    layer: function of (hf, i): {our path in layer i: array}; hf(name) reads.
  """
  unused = set(tensors)

  def hf(name):
    unused.remove(name)
    return tensors[name]

  out = {path: hf(name) for path, name in ends.items()}
  stacks = {}
  for i in range(config.num_layers):
    for path, value in layer(hf, i).items():
      stacks.setdefault(f'layers/{path}', []).append(value)
  assert not unused, unused
  return out | {path: np.stack(values) for path, values in stacks.items()}


def within(prefix, values):
  """{prefix/name: value}."""
  return {f'{prefix}/{name}': value for name, value in values.items()}


def attention_of(hf, name, config):
  """Llama's attention by our names."""
  d, h, out = config.d_model, config.head_width, {}
  for ours in ('query', 'key', 'value'):
    theirs = f'{name}.{ours[0]}'
    out[ours] = hf(f'{theirs}_proj.weight').T.reshape(d, -1, h)
    if config.attention_bias:
      out[f'{ours}_bias'] = hf(f'{theirs}_proj.bias').reshape(-1, h)
    if config.qk_norm != 'none' and ours != 'value':
      shape = (-1, h) if config.qk_norm == 'all' else (h,)
      out[f'{ours}_norm'] = hf(f'{theirs}_norm.weight').reshape(shape)
  out['output'] = hf(f'{name}.o_proj.weight').T.reshape(-1, h, d)
  return out


def mlp_of(hf, name):
  """Llama's mlp by our names."""
  return {x: hf(f'{name}.{x}_proj.weight').T for x in ('gate', 'up', 'down')}


def ours(config, params, data):
  """(z_BTV, {path: gradient of the loss}) of a schema.Model."""
  model_checks.check_model(config)
  model = decoder.Decoder(config)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  assert {p: v.shape for p, v in params.items()} == {
    p: v.shape for p, v in shapes.items()
  }

  def mean(params):
    z = model.logits(params, model(params, data)[0])
    return loss.negative_log_likelihood(z, data.targets).mean(), z

  grads, logits = jax.jit(jax.grad(mean, has_aux=True))(params)
  return logits, grads


def far(found, wanted, scale=None):
  """{path: distance} of the gradients that are not within TOLERANCE."""
  assert set(found) == set(wanted)
  scale = scale or wanted
  every = {p: distance(g, wanted[p], scale[p]) for p, g in found.items()}
  return {p: d for p, d in every.items() if not d < TOLERANCE}


def distance(a, b, scale=None):
  """Largest difference, relative to the largest value of `scale` or b."""
  a, b = np.asarray(a), np.asarray(b)
  assert a.dtype == b.dtype == np.float64 and a.shape == b.shape
  largest = np.abs(b if scale is None else scale).max()
  assert np.isfinite(a).all() and largest > 0
  return np.abs(a - b).max() / largest
