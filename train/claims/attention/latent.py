"""Claims about latent attention whose latents are sharded for decoding (TPLA).

Equalities are between steps of decoding, one token a row from an empty cache
on, and whole rows; bytes are those of a cache's arrays. The held-out loss
(bits per byte) of one trained model is reported for latent shards that each
have a softmax of their own (arXiv:2508.15881, section 3); every variant reads
the same rows token by token.

Legend: B rows, T tokens, R width of a latent, P of the rotated key.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.decode import step
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models.mixers import latent as latent_attention
from paraxis.models.mixers import latent_rotation
from paraxis.train import program as job_lib
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts

VOCABULARY = 64
TINY = {
  'model.vocab_size': VOCABULARY, 'model.d_model': 32, 'model.num_heads': 4,
  'model.d_ff': 32, 'model.num_layers': 2, 'model.attention_block': 16,
  'model.dtype': 'float64', 'model.param_dtype': 'float64',
  'model.pattern': 'A', 'model.latent.rank': 16, 'model.latent.nope_dim': 8,
  'model.latent.rope_dim': 4, 'model.latent.value_dim': 8,
}  # fmt: skip


def _rotated(model, params, text, **latent):
  """(Decoder, parameters) with such latents; text: rows to measure them on."""
  own = dataclasses.replace(model.config.latent, **latent)
  config = dataclasses.replace(model.config, latent=own)
  loose, cache = jax.jit(model.unstack)(params), None
  if text is not None:
    lengths, slots = (text.segments > 0).sum(1), text.tokens.shape[1]
    cache = jax.jit(
      lambda p: step.prefill(model, p, text.tokens, lengths, slots)[1]
    )(loose)
  return decoder.Decoder(config), latent_rotation.rotated(loose, config, cache)


def decoding_is_exact(run, *, cases, length, within):
  """EQ: steps of decoding equal whole rows, latents rotated and sharded.

  Args:
    cases: list of fields of mixer_schema.Latent; scores are summed.
  """
  found = {}
  with jax.enable_x64(True):
    model = decoder.Decoder(experiment.fields(schema.Config(), TINY).model)
    params = experiment.random_parameters(model)
    rows = experiment.documents(2, length, VOCABULARY)
    want = jax.jit(lambda p: model.features(p, rows)[0])(params)
    for case in cases:
      changed, rotated = _rotated(model, params, rows, **case)
      steps = functools.partial(experiment.stepped, changed)
      name = f'{case.get("rotation", "none")} in {case.get("groups", 1)}:'
      found[name] = experiment.gap(jax.jit(steps)(rotated, rows), want)
  return experiment.equal(
    found,
    within,
    f'features after {length} steps of one token, float64, random weights, '
    f'scores summed: {experiment.listed(found)}',
  )


def cache_bytes(run, *, model, parts, numbers):
  """HLO: numbers of a token that a device holds in a layer, of real arrays.

  Args:
    model: fields of schema.Model, `latent` those of mixer_schema.Latent.
    parts: [1, ...]: latents in as many parts, on as many tensor shards.
    numbers: expected, for each; the whole latent is measured on two shards.
  """
  own = experiment.under('model', model) | {
    'model.pattern': 'A',
    'mesh.sequence': False,
  }
  found, slots, copies = [], 8, True
  for g in parts:
    config, devices = experiment.on(
      schema.Config(), f'tensor={max(g, 2)}', own | {'model.latent.groups': g}
    )
    built = build.build(config, devices=devices)
    with build.use(built):
      (x,) = jax.jit(lambda b=built: b.model.init_cache(1, slots))().states[0]
    held = experiment.bytes_by_device(x)
    copies &= len(set(held)) == 1
    found.append(max(held) / x.dtype.itemsize / slots)
  heads, latent = config.model.num_heads, config.model.latent
  whole = latent.rank + latent.rope_dim
  return claims.Outcome(
    experiment.numbers(numbers, 'g'),
    experiment.numbers(found, 'g'),
    f'{experiment.numbers(parts)} parts, the same on every device; a latent of '
    f'{latent.rank} and a rotated key of {latent.rope_dim}. Whole latents are '
    f'repeated on every shard, {whole} numbers; keys and values of '
    f'{heads} heads would be {2 * heads * latent.value_dim:,} over all shards',
    found == list(numbers) and copies,
  )


def _text(config, rows):
  """(rows of training text, of held-out text, bytes of the latter).

  Held-out rows: as many of every domain, evenly spaced.
  """
  one = {'train.microbatches': 1, 'train.eval_batches': 1}
  config = experiment.fields(config, one | {'train.batch_size': rows})
  job = job_lib.make(config, '', jax.devices()[:1], say=lambda line: None)
  held = [h.batch_at(0) for h in job.held_out]
  joined = jax.tree.map(
    lambda *x: np.concatenate(x) if np.ndim(x[0]) else np.float32(1), *held
  )
  size = sum(h.n_bytes for h in job.held_out)
  return job.batches.batch_at(0), joined, size


def _bits(model, params, held, size, first):
  """Bits per byte of held-out rows, read in steps after `first` tokens.

  Of those tokens alone, which are as many bytes as tokens have on average.
  """

  def run(params, rows):
    x = experiment.stepped(model, params, rows, first)
    z = model.logits(params, x)
    nll = -jnp.take_along_axis(
      jax.nn.log_softmax(z), held.targets[..., None], -1
    )[..., 0]
    return (nll * held.weights)[:, first:].sum()

  rows = experiment.rows_of(held.tokens, held.segments, held.positions)
  nats = float(jax.jit(run)(params, rows))
  share = held.weights[:, first:].sum() / held.weights.sum()
  return nats / math.log(2) / (size * share)


def _bits_of_variants(training, rows, variants, prompt):
  """({name: [bits read one by one, after an exact prefill]}, rows that is of).

  Of an ablation.Training, with whole latents ('exact') and as variants say.
  """
  trained, params = training.opened
  text, held, size = _text(training.config, rows)
  model = decoder.Decoder(trained.model.config)
  params = {p: np.asarray(x) for p, x in params.items()}
  text = experiment.rows_of(text.tokens, text.segments, text.positions)
  made = {'exact': (model, model.unstack(params))}
  for name, fields in variants.items():
    fields = dict(fields)
    given = text if fields.pop('measured') else None
    made[name] = _rotated(model, params, given, scores='own', **fields)
  bits = {
    name: [_bits(*pair, held, size, first) for first in (0, prompt)]
    for name, pair in made.items()
  }
  return bits, len(held.tokens)


def parts_of_their_own(run, *, seeds, rows, variants, prompt, order, at_most):
  """LEARN: held-out bits per byte, each latent shard with its own softmax.

  Args:
    seeds: of the trainings.
    rows: of training text to measure latents on, and of each domain to read.
    variants: {name: {'rotation', 'groups', 'measured': are shares}}.
    prompt: tokens that a prefill reads, in the second comparison.
    order: names from the fewest to the most bits, no two alike; 'exact' are
      whole latents.
    at_most: bits that the second of them may lose.
  """
  trainings = ablation.trained(run, {'whole': run.config}, seeds)
  seconds = ablation.cpu_seconds(trainings)
  made = [
    _bits_of_variants(t, rows, variants, prompt) for t in trainings['whole']
  ]
  read, after = (
    {name: [bits[name][i] for bits, _ in made] for name in made[0][0]}
    for i in (0, 1)
  )
  lost = np.subtract(read[order[1]], read['exact'])
  pairs = itertools.pairwise(order)
  return ablation.outcome(
    run,
    read,
    [ablation.less(read, a, b, seconds=seconds) for a, b in pairs]
    + [ablation.at_most(f'{order[1]} over exact', lost, at_most, seconds)],
    'bits per byte',
    f'{run.config.train.steps} steps; {made[0][1]} rows of '
    f'{run.config.data.sequence_length} held-out tokens, read one by one. '
    f'After an exact prefill of {prompt}, the rest: {ablation.spread(after)}',
    seconds,
  )


def keys_unrotated():
  """Knock-out: latents change their basis, what makes keys of them does not."""
  real = latent_rotation.rotate
  some = lambda values, u: real(values, u) | {'key': values['key']}
  return knockouts.patched(latent_rotation, 'rotate', some)


def whole_latents():
  """Knock-out: every device holds all latent shards."""
  everywhere = lambda self: ('batch', None, None, None)
  mixer = latent_attention.LatentAttention
  return knockouts.patched(mixer, '_parts', everywhere)
