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
from paraxis.train.claims import knockouts
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


def one_scale_a_column():
  """Knock-out: a scale for a whole column, written down for each group."""

  def quantize(w_DF, dtype=jnp.float32):
    scale_F = jnp.abs(w_DF).max(0) / quantized_matmul.MOST
    q = jnp.round(w_DF / scale_F).astype(jnp.int4)
    groups = len(w_DF) // quantized_matmul.GROUP
    return q, jnp.tile(scale_F, (groups, 1)).astype(dtype)

  return knockouts.patched(quantized_matmul, 'quantize', quantize)


def one_group():
  """Knock-out: all groups of a column take the scale of its first."""
  real = quantized_matmul.dequantize
  first = lambda q, scale, *dtype: real(
    q, jnp.broadcast_to(scale[:1], scale.shape), *dtype
  )
  return knockouts.patched(quantized_matmul, 'dequantize', first)


def unpacked():
  """Knock-out: an integer takes a byte."""
  byte = lambda q: q.astype(jnp.int8)
  return knockouts.patched(quantized_matmul, 'pack', byte)


def no_kernel():
  """Knock-out: XLA's form, whatever the machine."""
  real = quantized_matmul.quantized_matmul
  plain = lambda x, q, scale, impl='': real(x, q, scale, impl='xla')
  return knockouts.patched(quantized_matmul, 'quantized_matmul', plain)


def two_bits():
  """Knock-out: integers in -1 .. 1, as two bits hold."""
  return knockouts.patched(quantized_matmul, 'MOST', 1)


def _off(w_DF, group):
  """|s q - w| of every weight, in steps: max |w| / 7 of a group of a column."""
  w = np.asarray(w_DF)
  parts = np.abs(w).reshape(-1, group, w.shape[1])
  steps = np.repeat(parts.max(1) / 7, group, 0)
  return np.abs(np.asarray(_round(w_DF)) - w) / np.where(steps == 0, 1, steps)


def rounding(run, *, group, within):
  """EQ: error of every weight of the model over its step: half at most.

  Args:
    group: inputs of an output that share a step.
    within: what the arithmetic of float32 may add.
  """
  job = job_lib.of_shapes(run.config, '', jax.devices()[:1])
  with job.context():
    params = job.initial_state().params
    off = [_off(w, group) for _, w_LDF in _matrices(params) for w in w_LDF]
  most, count = max(np.max(x) for x in off), sum(x.size for x in off)
  mean = sum(x.sum() for x in off) / count
  deep = sum(len(x) > group for x in off)
  return claims.Outcome(
    '<= 0.5 steps',
    f'{most:.3f} steps',
    f'{count} weights of the model as it starts; {mean:.3f} on average (0.25 '
    f'if evenly spread); a step is a seventh of the largest of {group}; {deep} '
    f'of {len(off)} matrices have several groups in a column',
    bool(0.4 < most <= 0.5 + within) and deep > 0,
  )


def _bytes(inputs, outputs):
  """Bytes that a product reads: (of a 4-bit matrix with its scales, in
  bfloat16)."""
  w = jax.ShapeDtypeStruct((inputs, outputs), jnp.bfloat16)
  q, scale = jax.eval_shape(lambda w: quantized_matmul.quantize(w, w.dtype), w)
  kept = jax.eval_shape(quantized_matmul.pack, q), scale
  return sum(x.size * x.dtype.itemsize for x in kept), 2 * inputs * outputs


def read_bytes(run, *, tokens, inputs, outputs, expected, within):
  """SIM: bytes of a product in bfloat16 over those with 4-bit weights.

  Tokens in and out and scales are bfloat16.

  Args:
    tokens: list of T. expected: for the first of them.
  """
  ratios, (small, plain) = [], _bytes(inputs, outputs)
  for t in tokens:
    ends = 2 * t * (inputs + outputs)
    ratios.append((plain + ends) / (small + ends))
  bits = 8 * small / (inputs * outputs)
  return claims.Outcome(
    f'{expected:g} x +-{within:g}',
    f'{ratios[0]:.2f} x',
    f'{inputs} x {outputs}, {bits:g} bits a weight, by tokens: '
    + ', '.join(f'{t} {r:.2f}' for t, r in zip(tokens, ratios, strict=True))
    + '; no time is measured',
    abs(ratios[0] - expected) <= within,
  )


def model_bytes(run, *, model, bits):
  """SIM: bytes of a model's weights that a token reads, bfloat16 over 4 bits.

    16 (P + V D) / (b P + 16 V D),  P = L (4 D^2 + 3 D F)

  Args:
    model: {'d_model', 'd_ff', 'num_layers', 'vocab_size'}: D, F, L and V; three
      matrices in the mlp, four of D x D in attention, a head in bfloat16.
    bits: b of a weight, with its part of a scale.
  """
  d, f, layers = model['d_model'], model['d_ff'], model['num_layers']
  each = [(d, d)] * 4 + [(d, f)] * 2 + [(f, d)]
  head = 2 * d * model['vocab_size']
  sizes = zip(*(_bytes(*size) for size in each), strict=True)
  small, plain = (layers * sum(part) + head for part in sizes)
  weights = layers * (4 * d**2 + 3 * d * f)
  formula = 8 * plain / (bits * weights + 8 * head)
  return claims.Outcome(
    f'{formula:.2f} x, at {bits:g} bits',
    f'{plain / small:.2f} x',
    f'{plain / 1e9:.2f} GB -> {small / 1e9:.2f} GB a token of one sequence '
    f'(without the cache); the head, {head / 1e9:.2f} GB, stays bfloat16',
    math.isclose(plain / small, formula) and plain == 2 * weights + head,
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


def perplexity(run, *, seeds, at_most):
  """LEARN: perplexity with 4-bit weights over that with the trained ones.

  Args:
    seeds: of the trainings.
    at_most: the ratio; it must also be above 1, or nothing was rounded.
  """
  config = dataclasses.replace(run.config, mesh=schema.Mesh())
  trainings = ablation.trained(run, {'float': config}, seeds)
  seconds = ablation.cpu_seconds(trainings)
  made = [_perplexities(training) for training in trainings['float']]
  ratios = [after / before for before, after, _ in made]
  count, whole = made[0][2]
  found = ablation.outcome(
    run,
    {'4 bits over float': ratios},
    [ablation.at_most('4 bits over float', ratios, at_most, seconds)],
    'ratio of perplexities',
    'per token, float -> 4 bits: '
    + ', '.join(f'{a:.2f} -> {b:.2f}' for a, b, _ in made)
    + f'; {count:,} of {whole:,} parameters in 4 bits, round to nearest; '
    f'{run.config.train.steps} steps',
    seconds,
  )
  rounded_any = min(ratios) > 1
  return found if rounded_any else found._replace(passed=False, verdict='')


def _perplexities(training):
  """(perplexity as trained, in 4 bits, (parameters in 4 bits, of all))."""
  job, params = training.opened
  step = step_lib.make(job.built, job.optimizer, 0.0)
  measure = evaluate.Evaluator(job, step.evaluate)
  tokens = sum(held.n_pairs for held in job.held_out)
  with job.context():
    small, count = rounded(params)
    before, after = measure(params), measure(small)
  each = lambda r: math.exp(r.bits_per_byte * math.log(2) * r.n_bytes / tokens)
  whole = sum(x.size for x in params.values())
  return each(before), each(after), (count, whole)
