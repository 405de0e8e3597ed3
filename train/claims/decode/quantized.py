"""Claims about weights of 4 bits (MARLIN, arXiv:2408.11743).

    w ~ s q,  q an integer in -7 .. 7, s one for 128 inputs of an output

The integers are exact or the rounding is: what a model loses is counted in
perplexity, exp(nats per token) of held-out text, by putting s q in the place of
w after training (round to nearest, nothing is calibrated). What is gained is
counted in bytes, which is what a step of decoding waits for.

Legend: T tokens, D inputs, F outputs, L layers.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.pallas_kernels.matmul import quantized as quantized_matmul
from paraxis.sharding.meter import aot
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.run import evaluate

# Matrices of a layer -> how many of their dimensions, after L, are inputs.
# Embeddings, norms and biases stay as they are.
INPUTS = {
  'attention/query': 1,
  'attention/key': 1,
  'attention/value': 1,
  'attention/output': 2,
  'mlp/gate': 1,
  'mlp/up': 1,
  'mlp/down': 1,
}


def _matrices(params):
  """Yields (path, (L, D, F) of it) of what is kept in 4 bits."""
  for path, x in params.items():
    inputs = INPUTS.get('/'.join(path.split('/')[-2:]))
    if inputs and path.startswith('layers/'):
      width = math.prod(x.shape[1 : 1 + inputs])
      yield path, x.reshape(x.shape[0], width, -1)


def _round(w_DF):
  return quantized_matmul.dequantize(*quantized_matmul.quantize(w_DF))


def rounded(params):
  """({path: parameter}, its matrices rounded to 4 bits; how many numbers).

  UserError: none of them is a matrix that is known here.
  """
  found, count = {}, 0
  for path, w_LDF in _matrices(params):
    w = jax.jit(lambda x: jax.lax.map(_round, x))(w_LDF)
    found[path] = w.astype(w_LDF.dtype).reshape(params[path].shape)
    count += w.size
  if not found:
    raise errors.UserError(
      'none of the parameters is a matrix that is kept in 4 bits: '
      f'{", ".join(params)}'
    )
  return params | found, count


def forms_agree(run, *, tokens, inputs, outputs, within):
  """EQ: both forms against a loop over groups, float64; packing is undone."""
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=(tokens, inputs)), rng.normal(size=(inputs, outputs))
  with jax.enable_x64(True):
    q, scale = quantized_matmul.quantize(jnp.asarray(w), jnp.float64)
    packed = quantized_matmul.pack(q)
    same = bool((quantized_matmul.unpack(packed) == q).all())
    wanted = 0
    for g in range(inputs // quantized_matmul.GROUP):
      at = slice(*(quantized_matmul.GROUP * np.array([g, g + 1])))
      wanted = wanted + (x[:, at] @ np.asarray(q[at], float)) * scale[g]
    gaps = [
      experiment.gap(quantized_matmul.quantized_matmul(x, form, scale), wanted)
      for form in (q, packed)
    ]
  return experiment.equal(
    gaps,
    within,
    f'{tokens} tokens, {inputs} x {outputs}, int4 and uint8 against a loop '
    f'over groups, float64; packing {"undone" if same else "NOT undone"}',
    same,
  )


def rounding(run, *, within):
  """EQ: error of every weight of the model over its step: half at most.

  Args: within: what the arithmetic of float32 may add.
  """
  job = job_lib.of_shapes(run.config, '', jax.devices()[:1])
  worst, total, count = [], 0.0, 0
  with job.context():
    params = job.initial_state().params
  for _, w_LDF in _matrices(params):
    for w in w_LDF:
      q, scale = quantized_matmul.quantize(w)
      step = jnp.repeat(scale, quantized_matmul.GROUP, 0)
      off = jnp.abs(quantized_matmul.dequantize(q, scale) - w) / step
      worst.append(float(off.max()))
      total, count = total + float(off.sum()), count + w.size
  most = np.max(worst)  # NaN if one is
  return claims.Outcome(
    '<= 0.5 steps',
    f'{most:.3f} steps',
    f'{count} weights of the model as it starts; {total / count:.3f} on '
    'average (0.25 if evenly spread); a step is a seventh of the largest of '
    '128',
    bool(0.4 < most <= 0.5 + within),
  )


def read_bytes(run, *, tokens, inputs, outputs, expected, within):
  """SIM: bytes of a product in bfloat16 over those with 4-bit weights.

  Tokens in and out are bfloat16 in both, scales 2 bytes.

  Args:
    tokens: list of T. expected: for the first of them.
  """
  of = quantized_matmul.bytes_of
  ratios = []
  for t in tokens:
    ends = 2 * t * (inputs + outputs)
    small = of(inputs, outputs, scale_bytes=2) + ends
    ratios.append((of(inputs, outputs, 'bfloat16') + ends) / small)
  bits = 8 * of(inputs, outputs, scale_bytes=2) / (inputs * outputs)
  return claims.Outcome(
    f'{expected:g} x +-{within:g}',
    f'{ratios[0]:.2f} x',
    f'{inputs} x {outputs}, {bits:g} bits a weight, by tokens: '
    + ', '.join(f'{t} {r:.2f}' for t, r in zip(tokens, ratios, strict=True))
    + '; no time is measured',
    abs(ratios[0] - expected) <= within,
  )


def model_bytes(run, *, model, at_least):
  """SIM: bytes of a model's weights that a token reads, bfloat16 over 4 bits.

  Args:
    model: {'d_model', 'd_ff', 'num_layers', 'vocab_size'}; three matrices in
      the mlp, four of d_model x d_model in attention, a head in bfloat16.
  """
  d, f, layers = model['d_model'], model['d_ff'], model['num_layers']
  sizes = [(d, d)] * 4 + [(d, f)] * 2 + [(f, d)]
  of = quantized_matmul.bytes_of
  head = 2 * d * model['vocab_size']
  plain = layers * sum(of(*s, 'bfloat16') for s in sizes) + head
  small = layers * sum(of(*s, scale_bytes=2) for s in sizes) + head
  return claims.Outcome(
    f'>= {at_least:g} x',
    f'{plain / small:.2f} x',
    f'{plain / 1e9:.2f} GB -> {small / 1e9:.2f} GB a token of one sequence '
    f'(without the cache); the head, {head / 1e9:.2f} GB, stays bfloat16',
    plain / small >= at_least,
  )


def compiled(run, *, topologies, tokens, inputs, outputs):
  """AOT: temporaries of the kernel, none, against those of XLA's form."""
  temporaries, right = [], True
  for name in topologies:
    sizes = {}
    for impl, form in (('auto', 'int4'), ('auto', 'uint8'), ('xla', 'uint8')):
      rows = inputs if form == 'int4' else inputs // 2
      multiply = functools.partial(quantized_matmul.quantized_matmul, impl=impl)
      arrays = [
        jax.ShapeDtypeStruct((tokens, inputs), 'bfloat16'),
        jax.ShapeDtypeStruct((rows, outputs), form),
        jax.ShapeDtypeStruct(
          (inputs // quantized_matmul.GROUP, outputs), 'float32'
        ),
      ]
      program = experiment.for_chip(name, '4-bit product', multiply, arrays)
      sizes[impl, form] = aot.memory(program).temporaries
      right &= impl == 'xla' or 'tpu_custom_call' in (program.as_text() or '')
    *ours, xla = sizes.values()
    right &= not any(ours) and xla > 0
    temporaries.append(f'{name} {max(ours)} against {xla / 2**20:.0f} MiB')
  return claims.Outcome(
    'none',
    'none' if right else 'some',
    f'{tokens} x {inputs} x {outputs}, int4 and uint8 on the kernel against '
    f'uint8 in XLA: {"; ".join(temporaries)}',
    right,
  )


def perplexity(run, *, at_most):
  """LEARN: perplexity with 4-bit weights over that with the trained ones.

  Args: at_most: the ratio; it must also be above 1, or nothing was rounded.
  """
  config = dataclasses.replace(run.config, mesh=schema.Mesh())
  job, params = ablation.one(run, 'float', config).opened
  step = step_lib.make(job.built, job.optimizer, 0.0)
  measure = evaluate.Evaluator(job, step.evaluate)
  tokens = sum(held.n_pairs for held in job.held_out)
  with job.context():
    small, count = rounded(params)
    before, after = measure(params), measure(small)
  nats = lambda r: r.bits_per_byte * math.log(2) * r.n_bytes / tokens
  ratio = math.exp(nats(after) - nats(before))
  whole = sum(x.size for x in params.values())
  return claims.Outcome(
    f'1 .. {at_most:.3f}',
    f'{ratio:.4f}',
    f'perplexity per token {math.exp(nats(before)):.2f} -> '
    f'{math.exp(nats(after)):.2f}, bits per byte {before.bits_per_byte:.4f} -> '
    f'{after.bits_per_byte:.4f}; {count:,} of {whole:,} parameters in 4 bits, '
    f'round to nearest; one seed ({run.config.train.seed}), '
    f'{run.config.train.steps} steps',
    1 < ratio <= at_most,
  )
