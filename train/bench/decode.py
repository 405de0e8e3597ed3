"""Bench of decoding: tokens one after the other, batch 1, greedy.

    limit (tokens/s) = read bandwidth / bytes of parameters read per token

Every token reads all matrices once; of the embedding only a row. The bandwidth
is that of the fastest of three jitted reductions over an array of that size, in
the same rounds and by the same clock. The limit is a wall-clock quantity: with
one busy thread CPU-seconds and wall seconds agree on an idle machine, and on a
shared one only CPU-seconds mean something.
"""

import time

import jax
import jax.numpy as jnp

from paraxis.configs import schema
from paraxis.decode import loop
from paraxis.models import build
from paraxis.train.bench import measure
from paraxis.train.bench import reference
from paraxis.train.bench import train as bench_train

PROMPT = 16  # tokens; a bucket of decode/loop.py
READS = 8  # of the array, for one bandwidth figure


class _Numbers:
  """A tokenizer of the model's whole vocabulary; a token's text is a digit."""

  end_id = -1
  name = 'numbers'

  def __init__(self, vocab_size):
    self.vocab_size = vocab_size

  def decode_bytes(self, tokens):
    return b''.join(b'%d' % (t % 10) for t in tokens)


def bytes_per_token(params):
  """Bytes of {path: array} that one token reads: all but the embedding."""
  return sum(v.nbytes for p, v in params.items() if p != 'embedding')


def plain(m, new):
  """-> () that makes `new` greedy tokens in one jitted loop of plain JAX."""
  params = jax.jit(lambda k: reference.init(m, k, False))(jax.random.key(0))
  h = m.d_model // m.num_heads

  @jax.jit
  def run(params):
    slot = jnp.zeros((PROMPT + new, m.num_heads, h))
    caches = [(slot, slot)] * m.num_layers

    def one(i, carry):
      token, caches, out = carry
      logits, caches = reference.decode_step(m, params, caches, token, i)
      token = jnp.argmax(logits).astype(jnp.int32)
      return token, caches, out.at[i].set(token)

    out = jnp.zeros(PROMPT + new, jnp.int32)
    start = jnp.int32(1), caches, out
    return jax.lax.fori_loop(0, new, one, start)[2]

  return lambda: jax.block_until_ready(run(params))


def ours(c, new):
  """-> (() that makes `new` greedy tokens, bytes read per token)."""
  built = build.build(c, 'data=1', devices=jax.devices()[:1])
  with build.use(built):
    params = jax.jit(built.model.init)(jax.random.key(0))
  maker = loop.Generator(
    built, params, _Numbers(c.model.vocab_size), c.decode, say=lambda _: None
  )
  prompt = [list(range(1, PROMPT + 1))]

  def run():
    made = maker.generate(prompt, max_new_tokens=new, temperature=0.0)
    if len(made[0]['tokens']) != new:
      raise RuntimeError(f'{len(made[0]["tokens"])} tokens, not {new}')

  return run, bytes_per_token(params)


def readers(size):
  """{name: () that reads `size` bytes READS times}."""
  x = jnp.ones((-(-size // 4096), 1024))
  row, column = jnp.ones(1024), jnp.ones(x.shape[0])
  forms = {
    'sum': jax.jit(jnp.sum),
    'matrix @ vector': jax.jit(lambda x: x @ row),
    'vector @ matrix': jax.jit(lambda x: column @ x),
  }

  def reader(f):
    return lambda: [jax.block_until_ready(f(x)) for _ in range(READS)]

  return {name: reader(f) for name, f in forms.items()}


def _twice(function, now):
  """function, timed by two clocks at once."""

  def run():
    before, wall = now(), time.perf_counter()
    function()
    return {'': now() - before, ' (wall)': time.perf_counter() - wall}

  return run


def decode(rounds, quick, say):
  """Tokens per second, batch 1, one device, against reading the parameters."""
  c = bench_train.config(quick)
  c = schema.view(
    dict(model=schema.to_dict(c)['model'], decode=dict(cache_length=512))
  )
  new = 16 if quick else 256
  say('compiling')
  m = c.model
  run, size = ours(c, new)
  now, report = bench_train.begin(
    'decode',
    f'V{m.vocab_size} D{m.d_model} N{m.num_heads} L{m.num_layers} '
    f'F{m.d_ff}, float32, greedy, batch 1, {new} tokens after {PROMPT}, '
    f'{size / 1e6:.1f} MB read per token',
    quick,
  )
  reads = readers(size)
  made = {'plain JAX': plain(m, new), 'ours': run, **reads}
  made = {k: _twice(f, now) for k, f in made.items()}
  times = measure.interleave(made, rounds, now, say)
  for suffix in ('', ' (wall)'):
    speeds = {
      f'{k}{suffix}': [new / t for t in times[f'{k}{suffix}']]
      for k in ('plain JAX', 'ours')
    }
    read = [times[f'{k}{suffix}'] for k in reads]
    limit = [READS / min(ts) for ts in zip(*read, strict=True)]
    report.add(speeds, 'tokens/s')
    report.add({f'byte limit{suffix}': limit}, 'tokens/s')
    report.add(
      {
        f'reading, {k}{suffix}': [READS * size / t / 1e9 for t in ts]
        for k, ts in zip(reads, read, strict=True)
      },
      'GB/s',
    )
    report.check(
      f'speed of ours / byte limit{suffix}',
      measure.ratios(speeds[f'ours{suffix}'], limit),
      0.8,
    )
    share = measure.spread(measure.ratios(speeds[f'plain JAX{suffix}'], limit))
    shown = ' '.join(f'{x:.2f}' for x in share)
    report.notes.append(f'plain JAX / byte limit{suffix}: {shown}')
  return report
