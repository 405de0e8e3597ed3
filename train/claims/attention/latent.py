"""Claims about latent attention whose latents are parted for decoding (TPLA).

Equalities are those of steps of decoding, one token a row from an empty cache
on, with whole rows; bytes are those of a cache's arrays. What parts with scores
of their own cost (arXiv:2508.15881, section 3) is told in held-out bits per
byte of one trained model, every variant reading the same rows token by token.

Legend: B rows, T tokens, R width of a latent, P of the rotated key.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models.mixers import latent_rotation
from paraxis.train import program as job_lib
from paraxis.train.claims import harness as claims
from paraxis.train.claims.experts import training as claims_expert_training
from paraxis.train.claims.layouts import step as claims_layouts

TINY = dict(
  vocab_size=64, d_model=32, num_heads=4, d_ff=32, num_layers=2,
  attention_block=16, dtype='float64', param_dtype='float64',
)  # fmt: skip
LATENT = dict(rank=16, nope_dim=8, rope_dim=4, value_dim=8)


def _parted(model, **latent):
  """schema.Model with fields of its latents replaced."""
  own = dataclasses.replace(model.latent, **latent)
  return dataclasses.replace(model, latent=own)


def rows_of(tokens_BT, segments_BT, positions_BT):
  """models.batch.Batch without targets."""
  cast = lambda x: jnp.asarray(x, jnp.int32)
  return batch_lib.Batch(
    cast(tokens_BT), None, cast(segments_BT), cast(positions_BT), None, None
  )


def stepped(model, params, rows, first=0):
  """x_BTD of rows: `first` tokens at once, then one after the other."""
  count, length = rows.tokens.shape
  part = lambda at, n: jax.tree.map(
    lambda x: jax.lax.dynamic_slice_in_dim(x, at, n, 1), rows
  )
  start, cache = None, model.init_cache(count, length)
  if first:
    cache = model.init_cache(count, first)
    start, cache = model(params, part(0, first), cache)
    cache = model.grow_cache(cache, length)

  def step(cache, at):
    x, cache = model(params, part(at, 1), cache)
    return cache, x[:, 0]

  _, x = jax.lax.scan(step, cache, jnp.arange(first, length))
  x = x.swapaxes(0, 1)
  return x if start is None else jnp.concatenate([start, x], 1)


def _turned(model, params, text, **latent):
  """(Decoder, parameters) with such latents; text: rows to measure them on."""
  config = _parted(model.config, **latent)
  loose, cache = jax.jit(model.unstack)(params), None
  if text is not None:
    empty = model.init_cache(*text.tokens.shape)
    cache = jax.jit(lambda p: model(p, text, empty)[1])(loose)
  return decoder.Decoder(config), latent_rotation.rotated(loose, config, cache)


def decoding_is_exact(run, *, cases, length, within):
  """EQ: steps of decoding equal whole rows, latents turned and parted.

  Args:
    cases: list of fields of mixer_schema.Latent; scores are summed.
    length: tokens of a row. within: largest difference allowed.
  """
  del run
  found, rng = {}, np.random.default_rng(0)
  with jax.enable_x64(True):
    config = schema.Model(
      **TINY, pattern='A', latent=mixer_schema.Latent(**LATENT)
    )
    model = decoder.Decoder(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    draw = lambda p, s: rng.normal(model.kinds[p] == 'vector', 0.3, s)
    params = {p: jnp.asarray(draw(p, x.shape)) for p, x in shapes.items()}
    ones = np.ones((2, length), np.int32)
    order = np.cumsum(ones, 1) - 1
    rows = rows_of(rng.integers(0, TINY['vocab_size'], ones.shape), ones, order)
    want = jax.jit(lambda p: model(p, rows)[0])(params)
    for case in cases:
      changed, turned = _turned(model, params, rows, **case)
      got = jax.jit(functools.partial(stepped, changed))(turned, rows)
      found[case.get('rotation', 'none'), case.get('groups', 1)] = float(
        jnp.abs(got - want).max() / jnp.abs(want).max()
      )
  return claims.Outcome(
    f'<= {within:.0e}',
    f'{max(found.values()):.1e}',
    f'features after {length} steps of one token, float64, random weights, '
    'scores summed: '
    + ', '.join(f'{name} in {g}: {x:.0e}' for (name, g), x in found.items()),
    max(found.values()) <= within,
  )


def cache_bytes(run, *, model, parts, numbers):
  """HLO: numbers of a token that a device holds in a layer, of real arrays.

  Args:
    model: fields of schema.Model, `latent` those of mixer_schema.Latent.
    parts: [1, ...]: latents in as many parts, on as many tensor shards.
    numbers: expected, for each; the whole latent is measured on two shards.
  """
  latent = mixer_schema.Latent(**model['latent'])
  base = schema.Model(**model | dict(latent=latent, pattern='A'))
  found, slots, copies = [], 8, True
  for g in parts:
    shards = max(g, 2)
    config = dataclasses.replace(
      run.config,
      model=_parted(base, groups=g),
      mesh=schema.Mesh(tensor=shards, sequence=False),
    )
    built = build.build(config, devices=jax.devices()[:shards])
    with build.layout(built):
      (x,) = jax.jit(lambda b=built: b.model.init_cache(1, slots))().states[0]
    held = {s.data.nbytes for s in x.addressable_shards}
    copies &= len(held) == 1
    found.append(max(held) / x.dtype.itemsize / slots)
  whole = latent.rank + latent.rope_dim
  heads = 2 * base.num_heads * latent.value_dim
  text = lambda row: ' '.join(f'{n:g}' for n in row)
  return claims.Outcome(
    text(numbers),
    text(found),
    f'{text(parts)} parts, the same on every device; a latent of '
    f'{latent.rank} and a rotated key of {latent.rope_dim}. Whole latents are '
    f'repeated on every shard, {whole} numbers; keys and values of '
    f'{base.num_heads} heads would be {heads:,} over all shards',
    found == list(numbers) and copies,
  )


def _text(config, rows):
  """(job.Job, rows of training text, of held-out text, bytes of the latter).

  Held-out rows: as many of every domain, evenly spaced.
  """
  config = claims_layouts.changed(
    config, batch_size=rows, microbatches=1, eval_batches=1
  )
  job = job_lib.make(config, '', jax.devices()[:1], say=lambda line: None)
  held = [h.batch_at(0) for h in job.held_out]
  joined = jax.tree.map(
    lambda *x: np.concatenate(x) if np.ndim(x[0]) else np.float32(1), *held
  )
  size = sum(h.n_bytes for h in job.held_out)
  return job, job.batches.batch_at(0), joined, size


def _bits(model, params, held, size, first):
  """Bits per byte of held-out rows, read in steps after `first` tokens.

  Of those tokens alone, which are as many bytes as tokens have on average.
  """

  def run(params, rows):
    x = stepped(model, params, rows, first)
    z = model.logits(params, x)
    nll = -jnp.take_along_axis(
      jax.nn.log_softmax(z), held.targets[..., None], -1
    )[..., 0]
    return (nll * held.weights)[:, first:].sum()

  rows = rows_of(held.tokens, held.segments, held.positions)
  nats = float(jax.jit(run)(params, rows))
  share = held.weights[:, first:].sum() / held.weights.sum()
  return nats / math.log(2) / (size * share)


def parts_of_their_own(run, *, rows, variants, prompt, order, at_most):
  """LEARN: held-out bits per byte, latents in parts with scores of their own.

  Args:
    rows: of training text to measure latents on, and of each domain to read.
    variants: {name: {'rotation', 'groups', 'measured': are shares}}.
    prompt: tokens that a prefill reads, in the second comparison.
    order: names from the fewest to the most bits; 'exact' are whole latents.
    at_most: bits that the second of them may lose.
  """
  _, trained, params = claims_expert_training.train(run, 'whole', run.config)
  job, text, held, size = _text(run.config, rows)
  model = decoder.Decoder(trained.model.config)
  params = {p: np.asarray(x) for p, x in params.items()}
  text = rows_of(text.tokens, text.segments, text.positions)
  made = {'exact': (model, model.unstack(params))}
  for name, fields in variants.items():
    fields = dict(fields)
    given = text if fields.pop('measured') else None
    made[name] = _turned(model, params, given, scores='own', **fields)
  bits = {
    name: [_bits(*pair, held, size, first) for first in (0, prompt)]
    for name, pair in made.items()
  }
  of = lambda i: ', '.join(f'{n} {b[i]:.3f}' for n, b in bits.items())
  lost = bits[order[1]][0] - bits['exact'][0]
  row = [bits[name][0] for name in order]
  return claims.Outcome(
    ' < '.join(order),
    ' '.join(f'{b:.3f}' for b in row),
    f'{job.config.train.steps} steps, one seed; {len(held.tokens)} rows of '
    f'{job.config.data.sequence_length} held-out tokens, read one by one: '
    f'{of(0)}. After an exact prefill of {prompt}, the rest: {of(1)}. '
    f'{order[1]} loses {lost:.3f} (at most {at_most:g})',
    row == sorted(row) and lost <= at_most,
  )
