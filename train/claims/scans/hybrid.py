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
from paraxis.models import decoder
from paraxis.models.mixers import attention as mixer
from paraxis.models.mixers import protocol
from paraxis.pallas_kernels.attention import op as attention
from paraxis.sharding.meter import flops
from paraxis.train.certify import check
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts

SMALL = {
  'model.d_model': 32, 'model.d_ff': 32, 'model.vocab_size': 64,
  'model.num_heads': 4, 'model.dtype': 'float64',
  'model.param_dtype': 'float64', 'model.unroll': 64,
  'model.mamba.head_dim': 16, 'model.mamba.state': 8,
}  # fmt: skip


def _rows(documents, length):
  """One row of documents packed end to end, then padding."""
  tokens, segments, positions = np.zeros((3, 1, length), np.int32)
  at = 0
  for n, document in enumerate(documents, 1):
    here = slice(at, at + len(document))
    tokens[0, here], segments[0, here] = document, n
    positions[0, here] = np.arange(len(document))
    at += len(document)
  return experiment.rows_of(tokens, segments, positions)


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
    z, cache = advance(cache, *map(jnp.asarray, (token, live)))
    for row in np.flatnonzero(live):
      found[row].append(np.asarray(z[row]))
    at = at + live
  return [np.stack(rows) for rows in found]


def _one_pass(model, params, documents):
  """Logits of every document: (of all packed into one row, of each alone)."""
  ends = np.cumsum([len(d) for d in documents])
  run = jax.jit(lambda b: model.logits(params, model.features(params, b)[0])[0])
  one = lambda some: np.asarray(run(_rows(some, ends[-1] + 3)))
  alone = [one([d])[: len(d)] for d in documents]
  return np.split(one(documents)[: ends[-1]], ends[:-1]), alone


def decoding_equals_one_pass(run, *, cases, lengths, prompts, within):
  """EQ: documents packed, and decoded after prompts, equal each one alone.

  Args:
    cases: {name: fields of schema.Model}. lengths: of the documents.
    prompts: how many of each are prefilled; the rest goes in one by one.
  """
  found = {}
  with jax.enable_x64(True):
    for name, fields in cases.items():
      own = experiment.under('model', fields)
      config = experiment.fields(run.config, SMALL, own)
      model = decoder.Decoder(config.model)
      params = experiment.random_parameters(model)
      rng = np.random.default_rng(1)
      documents = [rng.integers(0, 64, n) for n in lengths]
      packed, alone = _one_pass(model, params, documents)
      steps = _decoded(model, params, documents, prompts)
      gaps = lambda rows, alone=alone: map(experiment.gap, rows, alone)
      found[f'{name}: packed'] = np.max([*gaps(packed)])
      found[f'{name}: decoded'] = np.max([*gaps(steps)])
  return experiment.equal(
    found,
    within,
    f'logits of documents of {" ".join(map(str, lengths))} tokens alone in a '
    f'row, against packed into one and against prompts of '
    f'{" ".join(map(str, prompts))}, prefilled together, then one token a '
    f'step; float64, random weights; {experiment.listed(found)}',
  )


def documents_run_on():
  """Knock-out: a state is not reset where a document begins."""
  real = protocol.resets
  never = lambda see: jnp.zeros_like(real(see))
  return knockouts.patched(protocol, 'resets', never)


def state_bytes(model, tokens, dtype):
  """Bytes that decoding keeps of one sequence, from the cache's shapes."""
  make = lambda: model.init_cache(1, tokens, dtype).states
  arrays = jax.tree.leaves(jax.eval_shape(make))
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def cache_bytes(run, *, models, lengths, rows, over, ratios, within):
  """SIM: bytes of the cache of a sequence by its length, and their ratio.

  Args:
    models: {name: fields of schema.Model}, in bfloat16.
    rows: of a batch, for the bytes that a step reads with its parameters.
    over: [name, name]: the bytes of the first over those of the second.
    ratios: of them, expected at each length.
  """
  kept, read, mib = {}, {}, []
  for name, fields in models.items():
    own = experiment.under('model', fields)
    config = experiment.fields(schema.Config(), own)
    model, params = decoder.Decoder(config.model), check.parameters(config)
    sizes = kept[name] = [state_bytes(model, t, 'bfloat16') for t in lengths]
    read[name] = [2 * params + rows * size for size in sizes]
    mib.append(
      f'{name} ({params / 1e9:.2f}B) '
      + experiment.numbers([size / 2**20 for size in sizes], ',.0f')
    )
  a, b = over
  found = [x / y for x, y in zip(kept[a], kept[b], strict=True)]
  steps = [x / y for x, y in zip(read[a], read[b], strict=True)]
  return experiment.near(
    found,
    ratios,
    within,
    f'{a} over {b}, at {experiment.numbers(lengths, ",")} tokens; MiB of '
    f'one sequence: {"; ".join(mib)}. With the parameters, which a step of '
    f'{rows} rows reads once, {experiment.numbers(steps, ".2f")}: the speed-up '
    'to be had where reading is all that takes time',
  )


def no_windows():
  """Knock-out: every layer sees all tokens before, whatever the config says."""
  real = mixer.mask_of

  def dense(config, kind):
    return dataclasses.replace(real(config, kind), window=0)

  return knockouts.patched(mixer, 'mask_of', dense)


def _seen(model, length):
  """(T, T) bool: whether features of token t depend on token s, as measured.

  Each token is changed in a row of its own.
  """
  params = experiment.random_parameters(model)
  rows = experiment.documents(1, length, model.config.vocab_size)
  tokens = jnp.repeat(rows.tokens, length + 1, 0)
  at = jnp.arange(length)
  other = (tokens[at, at] + 1) % model.config.vocab_size
  rows = jax.tree.map(lambda x: jnp.repeat(x, length + 1, 0), rows)
  rows = rows._replace(tokens=tokens.at[at, at].set(other))
  x_BTD = np.asarray(
    jax.jit(lambda p, rows: model.features(p, rows)[0])(params, rows)
  )
  return (x_BTD[:-1] != x_BTD[-1]).any(-1).T


def layers_see(run, *, length, sees):
  """EQ: each layer of the model in turn sees its band and nothing else.

  A model of that layer alone: which tokens change the features of which.

  Args:
    sees: tokens that one sees, itself included, of each layer of the pattern.
  """
  pattern, found, banded = run.config.model.pattern, [], True
  before = np.subtract.outer(np.arange(length), np.arange(length))
  for kind in pattern:
    one = {'model.pattern': kind, 'model.num_layers': 1}
    config = experiment.fields(run.config, SMALL, one)
    with jax.enable_x64(True):
      seen = _seen(decoder.Decoder(config.model), length)
    found.append(int(seen.sum(1).max()))
    banded &= bool((seen == ((before >= 0) & (before < found[-1]))).all())
  return claims.Outcome(
    experiment.numbers(sees),
    experiment.numbers(found),
    f'pattern {pattern}, {length} tokens: changed one by one, they change the '
    f'features of those after that are {"in" if banded else "NOT in"} the '
    'band, and of no other; narrow, random weights',
    banded and found == list(sees),
  )


def _attended(mask, arrays):
  """(o, gradients of q, k and v) of attention."""
  attend: Any = attention.attention  # its custom_vjp is untyped
  o, back = jax.vjp(lambda q, k, v: attend(q, k, v, mask)[0], *arrays)
  return (o, *back(jnp.cos(o)))


def banded_work(run, *, lengths, window, block, head, at_most):
  """SIM: flops of attention in the model's layers, over dense ones.

  Forward and backward, counted in the traced program, whole blocks as they are
  walked, with the masks of the model's layers.

  Args:
    window, block: of the model, in tokens. head: [heads, width].
    at_most: the ratio at each length.
  """
  sizes = {'model.window': window, 'model.attention_block': block}
  model = experiment.fields(run.config, sizes).model
  ratios, counts = [], []
  for length in lengths:
    x = jax.ShapeDtypeStruct((1, length, *head), jnp.float32)
    masks = [mixer.mask_of(model, kind) for kind in (*model.pattern, 'F')]
    *work, dense = (
      flops.count(lambda *x, m=mask: _attended(m, x), x, x, x).total
      for mask in masks
    )
    ratios.append(sum(work) / (len(work) * dense))
    seen = sum(min(t + 1, window) for t in range(length))
    least = (1 + seen / (length * (length + 1) / 2)) / 2
    counts.append(f'T={length} {dense / 1e9:.3g} GF dense, least {least:.3f}')
  text = lambda row: experiment.numbers(row, '.3f')
  return claims.Outcome(
    f'<= {text(at_most)}',
    text(ratios),
    f'layers {model.pattern} in turn, window {window}, blocks of {block}, '
    f'{head[0]} heads of {head[1]}: {"; ".join(counts)} (least: visible pairs '
    'of a dense and a banded layer alone)',
    all(r <= most for r, most in zip(ratios, at_most, strict=True)),
  )
