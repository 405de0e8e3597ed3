"""Published models: their weights by our paths, and golden numbers of them.

Weights, logits and gradients of `transformers` come from hf_peer.py where torch
is installed. Elsewhere tests/golden/peers has them: tests/golden/make_peers.py
wrote there what `transformers` computed, and weights follow from their names.

Legend: B rows, T tokens, D model, H head width, V vocabulary.
"""

import json
import math
import pathlib
from typing import Any, NamedTuple
import zlib

import jax
import numpy as np

from paraxis.models import batch
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.train import expert_counts
from paraxis.train import loss

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'peers'
TOLERANCE = 1e-9  # of the largest value
# Our path -> HF's name, of most models.
ENDS = {
  'embedding': 'model.embed_tokens.weight',
  'norm/scale': 'model.norm.weight',
  'head': 'lm_head.weight',
}


class Family(NamedTuple):
  """Models of `transformers` that one file compares with ours.

  names: of the models. spread: standard deviation of their weights. peer: name
  -> (z_BTV, {HF's name: weight}, {HF's name: gradient}). config: name -> our
  schema.Model. translate: (tensors, name) -> {our path: array}. data: Batch.
  """

  names: Any
  spread: float
  peer: Any
  config: Any
  translate: Any
  data: batch.Batch


def weight(name, shape, spread):
  """float64 of that standard deviation, evenly distributed, from its name.

  Only raw integers of a generator are the same in every NumPy.
  """
  bits = np.random.PCG64(zlib.crc32(name.encode()))
  words = bits.random_raw(math.prod(shape)).reshape(shape)
  return (words / 2.0**64 - 0.5) * 12**0.5 * spread


def rows(vocab, shape):
  """A batch of one document a row; shape: (B, T)."""
  words = np.random.PCG64(1).random_raw(shape[0] * (shape[1] + 1))
  ids = (words % vocab).astype(np.int32).reshape(shape[0], -1)
  ones = np.ones(shape, np.int32)
  positions = np.arange(shape[1], dtype=np.int32) * ones
  return batch.Batch(
    ids[:, :-1], ids[:, 1:], ones, positions, ones * 1.0, ones.sum() * 1.0
  )


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
  learned = expert_counts.without(model, shapes)
  counts = {p: np.zeros(s.shape) for p, s in shapes.items() if p not in learned}
  params = params | counts
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


# --------------------------------------------------------------------- golden


def numbers(logits, grads):
  """What a golden file keeps: some logits, and of every gradient its norm and
  its product with the `weight` of its path."""
  length = logits.shape[1]
  seen = np.asarray(logits)[:, [length // 2, length - 1]]
  along = lambda p, g: (np.asarray(g) * weight(p, g.shape, 1.0)).sum()
  return seen, {
    p: np.array([np.linalg.norm(g), along(p, g)]) for p, g in grads.items()
  }


def write_golden(family, name, made_by):
  """Writes the golden file of a model of `transformers`."""
  logits, weights, grads = family.peer(name)
  counts = family.config(name).num_layers
  seen, of_grads = numbers(logits, family.translate(grads, name))
  short = lambda x: [float(f'{v:.13g}') for v in np.ravel(x)]
  record = dict(
    made_by=made_by,
    weights=_folded({k: list(v.shape) for k, v in weights.items()}, counts),
    shape=list(seen.shape),
    logits=short(seen),
    gradients={p: short(v) for p, v in of_grads.items()},
  )
  lines = json.dumps(record).replace(', "', ',\n"')
  (GOLDEN / f'{name}.json').write_text(lines + '\n', 'utf-8')


def golden(family, name):
  """({HF's name: weight}, logits, {our path: numbers of its gradient})."""
  record = json.loads((GOLDEN / f'{name}.json').read_text('utf-8'))
  shapes = _unfolded(record['weights'], family.config(name).num_layers)
  weights = {k: weight(k, v, family.spread) for k, v in shapes.items()}
  logits = np.reshape(record['logits'], record['shape'])
  grads = {p: np.array(v) for p, v in record['gradients'].items()}
  return weights, logits, grads


def _folded(shapes, layers):
  """{name: shape}, those of every layer once, with * for its number."""
  out = dict(shapes)
  for name, shape in shapes.items():
    each = [name.replace('.0.', f'.{i}.') for i in range(layers)]
    if '.0.' in name and all(shapes.get(k) == shape for k in each):
      for k in each:
        del out[k]
      out[name.replace('.0.', '.*.')] = shape
  return out


def _unfolded(shapes, layers):
  out = {}
  for name, shape in shapes.items():
    every = range(layers) if '*' in name else [0]
    out |= {name.replace('*', str(i)): shape for i in every}
  return out


def against_golden(family, name, config=None):
  """(distance of logits, {path: distance} of gradients that are too far).

  config: schema.Model, if another one than the family's.
  """
  weights, logits, grads = golden(family, name)
  params = family.translate(weights, name)
  found = ours(config or family.config(name), params, family.data)
  seen, of_grads = numbers(*found)
  # A gradient that is rounding around 0 is measured by the largest.
  largest = max(v[0] for v in grads.values())
  far = {
    p: np.abs(of_grads[p] - v).max() / largest
    for p, v in grads.items()
    if not np.abs(of_grads[p] - v).max()
    <= TOLERANCE * max(v[0], 1e-3 * largest)
  }
  return distance(seen, logits), far
