"""Claims about models whose layers differ: a state here, attention there.

What decoding keeps of a sequence of T tokens, in bytes (arXiv:2406.07887):

    attention: 2 K H w T of a layer     Mamba-2: 4 F S + (F + 2 G S) (W - 1) w

(states are float32). Sizes are read from the cache that the model would make.
A step of decoding reads all parameters once and the cache of every row: the
ratio of both sums is the speed-up to be had where reading is what takes time.

Layers that see a band of b tokens alternate with dense ones in GPT-3 and mGPT
(arXiv:2204.07580): scores to compute fall from T (T + 1) / 2 to about T b.

Legend: T tokens, N heads, K kv heads, H head width, w bytes of a number, F
inner width, S numbers of the state, G groups, W taps.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.decode import step
from paraxis.models import batch as batch_lib
from paraxis.models import decoder
from paraxis.pallas_kernels.attention import op as attention
from paraxis.sharding.meter import flops
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims


def _drawn(model):
  """{path: float64 parameter}: at their initial 0 and 1 mistakes hide."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  place = lambda p: 0.5 if model.kinds[p] == 'vector' else 0.0
  return {
    p: jnp.asarray(rng.normal(place(p), 0.3, x.shape), x.dtype)
    for p, x in sorted(shapes.items())
  }


def _rows(documents, length):
  """batch.Batch (1, length) of documents packed end to end, then padding."""
  tokens, segments, positions = np.zeros((3, 1, length), np.int32)
  at = 0
  for n, document in enumerate(documents, 1):
    here = slice(at, at + len(document))
    tokens[0, here], segments[0, here] = document, n
    positions[0, here] = np.arange(len(document))
    at += len(document)
  return batch_lib.Batch(tokens, None, segments, positions, None, None)


def _decoded(model, params, documents, prompts):
  """Logits of every document's tokens: a prefill, then step by step."""
  lengths = np.array([len(d) for d in documents])
  most, start = lengths.max(), max(prompts)
  own = model.unstack(params)
  tokens = np.zeros((len(documents), most), np.int32)
  for row, document in zip(tokens, documents, strict=True):
    row[: len(document)] = document
  slots = int(start + (lengths - prompts).max())
  x, cache = step.prefill(
    model, own, jnp.asarray(tokens[:, :start]), jnp.asarray(prompts), slots
  )
  first = np.asarray(model.logits(own, x))
  found = [list(z[:n]) for z, n in zip(first, prompts, strict=True)]
  advance = jax.jit(lambda cache, *now: step.advance(model, own, cache, *now))
  at = np.array(prompts)
  while (live := at < lengths).any():
    token = tokens[np.arange(len(at)), np.minimum(at, most - 1)]
    z, cache = advance(cache, *map(jnp.asarray, (token, at, live)))
    for row in np.flatnonzero(live):
      found[row].append(np.asarray(z[row]))
    at = at + live
  return [np.stack(rows) for rows in found]


def _one_pass(model, params, documents):
  """Logits of every document: (of all packed into one row, of each alone)."""
  ends = np.cumsum([len(d) for d in documents])
  run = jax.jit(lambda b: model.logits(params, model(params, b)[0])[0])
  one = lambda some: np.asarray(run(_rows(some, ends[-1] + 3)))
  alone = [one([d])[: len(d)] for d in documents]
  return np.split(one(documents)[: ends[-1]], ends[:-1]), alone


def decoding_equals_one_pass(run, *, cases, lengths, prompts, within):
  """EQ: documents packed, and decoded after prompts, equal each one alone.

  Args:
    cases: {name: fields of schema.Model}. lengths: tokens of the documents.
    prompts: how many of each are prefilled; the rest goes in one by one.
    within: largest difference of logits, relative to the largest.
  """
  found = {}
  with jax.enable_x64(True):
    for name, fields in cases.items():
      config = dataclasses.replace(
        run.config.model, d_model=32, d_ff=32, vocab_size=64, num_heads=4,
        dtype='float64', param_dtype='float64', unroll=64, **fields,
      )  # fmt: skip
      mamba = dataclasses.replace(config.mamba, head_dim=16, state=8)
      model = decoder.Decoder(dataclasses.replace(config, mamba=mamba))
      params, rng = _drawn(model), np.random.default_rng(1)
      documents = [rng.integers(0, 64, n) for n in lengths]
      packed, alone = _one_pass(model, params, documents)
      steps = _decoded(model, params, documents, prompts)
      found[name] = [
        max(map(experiment.gap, rows, alone)) for rows in (packed, steps)
      ]
  worst = max(map(max, found.values()))
  return claims.Outcome(
    f'<= {within:.0e}',
    f'{worst:.1e}',
    f'logits of documents of {" ".join(map(str, lengths))} tokens alone in a '
    f'row, against packed into one and against prompts of '
    f'{" ".join(map(str, prompts))}, prefilled together, then one token a '
    'step; float64, random weights; '
    + '; '.join(
      f'{n}: packed {p:.0e}, decoded {d:.0e}' for n, (p, d) in found.items()
    ),
    worst <= within,
  )


def state_bytes(model, tokens, dtype):
  """Bytes that decoding keeps of one sequence, from the cache's shapes."""
  make = lambda: model.init_cache(1, tokens, dtype).states
  arrays = jax.tree.leaves(jax.eval_shape(make))
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def _decoder(config, fields):
  """(Decoder, parameters) of schema.Model with (nested) fields replaced."""
  fields = dict(fields)
  if 'mamba' in fields:
    fields['mamba'] = dataclasses.replace(config.mamba, **fields['mamba'])
  model = decoder.Decoder(dataclasses.replace(config, **fields))
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return model, sum(model.sizes(shapes).values())


def cache_bytes(run, *, models, lengths, rows, over, ratios, within):
  """SIM: bytes of the cache of a sequence by its length, and their ratio.

  Args:
    models: {name: fields of schema.Model}, in bfloat16. lengths: tokens.
    rows: of a batch, for the bytes that a step reads with its parameters.
    over: [name, name]: the bytes of the first over those of the second.
    ratios: of them, expected at each length. within: how far from them.
  """
  kept, read, told = {}, {}, []
  for name, fields in models.items():
    model, params = _decoder(schema.Model(), dict(fields))
    sizes = kept[name] = [state_bytes(model, t, 'bfloat16') for t in lengths]
    read[name] = [2 * params + rows * size for size in sizes]
    told.append(
      f'{name} ({params / 1e9:.2f}B) '
      + ' '.join(f'{size / 2**20:,.0f}' for size in sizes)
    )
  a, b = over
  found = [x / y for x, y in zip(kept[a], kept[b], strict=True)]
  steps = [x / y for x, y in zip(read[a], read[b], strict=True)]
  text = lambda row: ' '.join(f'{r:.2f}' for r in row)
  del run
  return claims.Outcome(
    f'{text(ratios)} +-{within:.2f}',
    text(found),
    f'{a} over {b}, at {" ".join(f"{t:,}" for t in lengths)} tokens; MiB of '
    f'one sequence: {"; ".join(told)}. With the parameters, which a step of '
    f'{rows} rows reads once, {text(steps)}: the speed-up to be had where '
    'reading is all that takes time',
    all(abs(x - y) <= within for x, y in zip(found, ratios, strict=True)),
  )


def _attended(mask, arrays):
  """(o, gradients of q, k and v) of the op."""
  attend: Any = attention.attention  # a custom_vjp
  run = lambda q, k, v: attend(q, k, v, mask)[0]
  o, back = jax.vjp(run, *arrays)
  return (o, *back(jnp.cos(o)))


def _masked(window, scale, arrays):
  """The same, dense: every score is computed, then those outside hidden."""

  def run(q, k, v):
    far = np.subtract.outer(np.arange(q.shape[1]), np.arange(k.shape[1]))
    hidden = (far < 0) | (far >= window)
    score = scale * jnp.einsum('btnh,bsnh->bnts', q, k)
    weight = jax.nn.softmax(jnp.where(hidden, -jnp.inf, score))
    return jnp.einsum('bnts,bsnh->btnh', weight, v)

  o, back = jax.vjp(run, *arrays)
  return (o, *back(jnp.cos(o)))


def banded_equals_masked(run, *, length, windows, blocks, within):
  """EQ: banded attention and its gradients, against dense with a mask.

  Args:
    length: tokens. windows: tokens a query sees. blocks: tokens of a block.
    within: largest difference, relative to each array's maximum.
  """
  del run
  rng, found = np.random.default_rng(0), {}
  with jax.enable_x64(True):
    arrays = [jnp.asarray(rng.normal(size=(1, length, 2, 8))) for _ in 'qkv']
    for window in windows:
      dense = jax.jit(lambda *x, w=window: _masked(w, 0.3, x))(*arrays)
      for block in blocks:
        mask = attention.Mask(window=window, scale=0.3, block=block)
        banded = jax.jit(lambda *x, m=mask: _attended(m, x))(*arrays)
        gaps = map(experiment.gap, banded, dense)
        found[f'window {window} in blocks of {block}:'] = max(gaps)
  return experiment.equal(
    found,
    within,
    f'{length} tokens, float64, outputs and the gradients of q, k and v; '
    f'{experiment.listed(found)}',
  )


def banded_work(run, *, lengths, window, block, head, at_most):
  """SIM: flops of attention in banded and dense layers in turn, over dense.

  Forward and backward, counted in the traced program, whole blocks as they are
  walked.

  Args:
    lengths: tokens of a row. window, block: tokens. head: [heads, width].
    at_most: the ratio at each length.
  """
  del run
  ratios, told = [], []
  for length in lengths:
    x = jax.ShapeDtypeStruct((1, length, *head), jnp.float32)
    work = {
      w: flops.count(
        lambda *x, w=w: _attended(attention.Mask(window=w, block=block), x),
        x, x, x,
      ).total
      for w in (window, 0)
    }  # fmt: skip
    ratios.append((work[window] + work[0]) / (2 * work[0]))
    seen = sum(min(t + 1, window) for t in range(length))
    least = (1 + seen / (length * (length + 1) / 2)) / 2
    told.append(f'T={length} {work[0] / 1e9:.3g} GF dense, least {least:.3f}')
  text = lambda row: ' '.join(f'{r:.3f}' for r in row)
  return claims.Outcome(
    f'<= {text(at_most)}',
    text(ratios),
    f'window {window}, blocks of {block}, {head[0]} heads of {head[1]}, half '
    f'of the layers banded: {"; ".join(told)} (least: visible pairs alone)',
    all(r <= most for r, most in zip(ratios, at_most, strict=True)),
  )
