"""Benches of decoding: tokens one after the other, greedy, and of a prompt.

`decode` makes new tokens at batch 1, 8 and 64, and after a long prompt, beside
plain JAX: one jitted loop, a head-major cache; in bfloat16 too, but for the
long prompt; before all, what it takes from parameters to a first token with
nothing compiled. At batch 1 there is a limit:

    limit (tokens/s) = read bandwidth / bytes of parameters read per token

Every token reads all matrices once; of the embedding only a row. The bandwidth
is that of the fastest of three jitted reductions over an array of that size, in
the same rounds and by the same clock. The limit is a wall-clock quantity: with
one busy thread CPU-seconds and wall seconds agree on an idle machine, and on a
shared one only CPU-seconds mean something.

`prefill` runs a prompt of 4,080 tokens into a cache, with full attention and
with a window, which must cost less; then one of 8,000.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from paraxis.configs import schema
from paraxis.decode import loop
from paraxis.decode import step
from paraxis.models import build
from paraxis.train.bench import measure
from paraxis.train.bench import peers
from paraxis.train.bench import reference
from paraxis.train.bench import train as bench_train

PROMPT = 16  # tokens; a bucket of decode/loop.py
FIRST = 'first token'
NARROW = 'ours, bfloat16'
READS = 8  # of the array, for one bandwidth figure
# rows -> new tokens of each; quick
BATCHES = {1: 256, 8: 128, 64: 64}
QUICK = {1: 16, 4: 16}
BESIDE = {8: 1.5}  # rows -> least speed beside transformers, else peers' own
LONG, WINDOW = 4080, 256  # tokens of the long prompt
QUICK_LONG, QUICK_WINDOW = 64, 16
LENGTHS, QUICK_LENGTHS = (LONG, 8000), (QUICK_LONG, 128)  # of prefill


class _Numbers:
  """A tokenizer of the model's whole vocabulary; a token's text is a digit."""

  end_id = -1
  name = 'numbers'

  def __init__(self, vocab_size):
    self.vocab_size = vocab_size

  def decode_bytes(self, tokens):
    return b''.join(b'%d' % (t % 10) for t in tokens)


def config(quick, **model):
  """schema.Config of the bench's model, with some fields of it replaced."""
  model = schema.to_dict(bench_train.config(quick))['model'] | model
  return schema.view(dict(model=model, decode=dict(cache_length=8192)))


def bytes_per_token(params):
  """Bytes of {path: array} that one token reads: all but the embedding, unless
  it is the head, too."""
  kept = {p: v for p, v in params.items() if p != 'embedding'}
  return sum(v.nbytes for v in (kept if 'head' in params else params).values())


def plain(m, batch, new, zeros=0):
  """-> () that makes `new` greedy tokens a row in one jitted loop of plain JAX.

  zeros: tokens that are in the cache of every row, as zeros; 0: a prompt of
    PROMPT tokens is computed first, as ours does, and gives the first one.
  """
  params = jax.jit(lambda k: reference.init(m, k, False))(jax.random.key(0))
  shape = batch, m.num_heads, zeros + new, m.d_model // m.num_heads
  made = 0 if zeros else 1

  @jax.jit
  def run(params):
    tokens = jnp.ones(batch, jnp.int32)
    caches = [(jnp.zeros(shape),) * 2] * m.num_layers
    if made:
      prompt = jnp.ones((batch, PROMPT), jnp.int32)
      tokens, caches = reference.prompted(m, params, prompt, new)

    def one(i, carry):
      tokens, caches, out = carry
      at = (zeros or PROMPT) + i - made
      logits, caches = reference.decode_step(m, params, caches, tokens, at)
      tokens = jnp.argmax(logits, -1).astype(jnp.int32)
      return tokens, caches, out.at[:, i].set(tokens)

    out = jnp.zeros((batch, new), jnp.int32).at[:, 0].set(tokens)
    return jax.lax.fori_loop(made, new, one, (tokens, caches, out))[2]

  return lambda: jax.block_until_ready(run(params))


class Ours:
  """What `paraxis decode` runs, with random parameters."""

  def __init__(self, c):
    self.built = build.build(c, 'data=1', devices=jax.devices()[:1])
    with build.use(self.built):
      self.params = jax.jit(self.built.model.init)(jax.random.key(0))
    self.maker = self.generator(c)

  def generator(self, c):
    """A loop.Generator that has compiled nothing for any prompt."""
    return loop.Generator(
      self.built, self.params, _Numbers(c.model.vocab_size), c.decode,
      say=lambda _: None,
    )  # fmt: skip

  def run(self, batch, new, prompt=PROMPT, **options):
    """Makes `new` tokens a row after `prompt`."""
    prompts = [list(range(1, prompt + 1))] * batch
    made = self.maker.generate(
      prompts, max_new_tokens=new, temperature=0.0, **options
    )
    lengths = {len(row['tokens']) for row in made}
    if lengths != {new}:
      raise RuntimeError(f'{lengths} tokens, not {new}')

  def run_long(self, new, prompt, now):
    """-> {part: seconds} of the prompt and of the tokens after the first."""
    seen, before = [], now()
    self.run(1, new, prompt, on_text=lambda row, piece: seen.append(now()))
    return {', prompt': seen[0] - before, '': now() - seen[0]}


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


def _against_limit(report, times, reads, new, size):
  """Adds the byte limit of batch 1, by both clocks, and what reading gave."""
  for suffix in ('', ' (wall)'):
    read = [times[f'{k}{suffix}'] for k in reads]
    limit = [READS / min(ts) for ts in zip(*read, strict=True)]
    report.add({f'byte limit, batch 1{suffix}': limit}, 'tokens/s')
    report.add(
      {
        f'reading, {k}{suffix}': [READS * size / t / 1e9 for t in ts]
        for k, ts in zip(reads, read, strict=True)
      },
      'GB/s',
    )
    ours, other = (
      measure.ratios([new / t for t in times[f'{k}{suffix}']], limit)
      for k in ('ours', 'plain JAX')
    )
    what = f'batch 1: speed of ours / byte limit{suffix}'
    report.check(what, ours, 0.8, most=1.0)
    shown = ' '.join(f'{x:.2f}' for x in measure.spread(other))
    report.notes.append(f'plain JAX / byte limit{suffix}: {shown}')


def _speeds(report, part, times, tokens):
  """Adds tokens/s, and targets: as fast as plain JAX, in bfloat16 as ours."""
  speeds = {k: [tokens / t for t in ts] for k, ts in times.items()}
  report.add({f'{part}: {k}': v for k, v in speeds.items()}, 'tokens/s')
  for one, other in (('ours', 'plain JAX'), (NARROW, 'ours')):
    if one in speeds:
      found = measure.ratios(speeds[one], speeds[other])
      report.check(f'{part}: speed of {one} / {other}', found, 1.0)


def _our_first(ours, c, now):
  """-> {part: seconds} from parameters to two tokens; the first: ', first'."""
  jax.clear_caches()
  seen, before = [], now()
  maker = ours.generator(c)
  prompts = [list(range(1, PROMPT + 1))]
  stamp = lambda row, piece: seen.append(now())
  maker.generate(prompts, max_new_tokens=2, temperature=0.0, on_text=stamp)
  return {'': seen[-1] - before, ', first': seen[0] - before}


def _plain_first(m, params, now):
  """The same of plain JAX: a program for the prompt, one for a token."""
  prompt = jax.jit(functools.partial(reference.prompted, m, room=16))

  @jax.jit
  def token(params, cache, tokens):
    logits, cache = reference.decode_step(
      m, params, cache, tokens, jnp.int32(PROMPT)
    )
    return jnp.argmax(logits, -1), cache

  jax.clear_caches()
  before = now()
  found, cache = prompt(params, jnp.arange(1, PROMPT + 1)[None])
  jax.block_until_ready(found)
  first = now()
  jax.block_until_ready(token(params, cache, found))
  return {'': now() - before, ', first': first - before}


def _first_token(report, ours, c, rounds, now, say):
  """Compiling and running until there are tokens, nothing cached."""
  init = jax.jit(lambda key: reference.init(c.model, key, False))
  params = jax.block_until_ready(init(jax.random.key(0)))
  plain, mine = f'{FIRST} and next, plain JAX', f'{FIRST} and next, ours'
  made = {
    plain: functools.partial(_plain_first, c.model, params, now),
    mine: functools.partial(_our_first, ours, c, now),
  }
  times = measure.interleave(made, rounds, now, say)
  report.add(times)
  for what, part in ((f'{FIRST} and next', ''), (FIRST, ', first')):
    found = measure.ratios(times[f'{mine}{part}'], times[f'{plain}{part}'])
    title = f'{what}: time of ours / plain JAX'
    report.check(title, found, 1.5, least=False)


def _batch(report, makers, m, batch, new, rounds, now, say):
  """One batch size; of 1 beside the byte limit, too. makers: {name: Ours}."""
  made: dict[str, Any] = {'plain JAX': plain(m, batch, new)}
  made |= {k: functools.partial(x.run, batch, new) for k, x in makers.items()}
  reads, size = {}, bytes_per_token(makers['ours'].params)
  if batch == 1:
    reads = readers(size)
    made = {k: _twice(f, now) for k, f in (made | reads).items()}
  sizes = _peer_sizes(m, batch, PROMPT, new)
  with peers.beside(report, sizes, say) as others:
    times = measure.interleave(made | others.candidates, rounds, now, say)
    others.judge(times, 'ours', f'batch {batch}: ', BESIDE.get(batch))
  kept = [k for k in ('plain JAX', *makers, *others.candidates) if k in times]
  _speeds(report, f'batch {batch}', {k: times[k] for k in kept}, batch * new)
  if reads:
    _against_limit(report, times, reads, new, size)


def _peer_sizes(m, batch, before, new, after=False):
  sizes = dict(rows=batch, before=before, new=new, after=after)
  return peers.sizes_of(m) | sizes | dict(length=before + new)


def decode(rounds, quick, say):
  """Tokens per second on one device, beside plain JAX and reading."""
  c, batches = config(quick), QUICK if quick else BATCHES
  m, long = c.model, QUICK_LONG if quick else LONG
  now, report = bench_train.begin(
    'decode',
    f'V{m.vocab_size} D{m.d_model} N{m.num_heads} L{m.num_layers} F{m.d_ff}, '
    f'float32, greedy, {PROMPT} tokens and then, a row: '
    + ', '.join(f'{n} at batch {b}' for b, n in batches.items())
    + f'; 64 after {long}',
    quick,
  )
  ours = Ours(c)
  makers = {'ours': ours, NARROW: Ours(config(quick, dtype='bfloat16'))}
  if report.lacks(FIRST):
    say(FIRST)
    _first_token(report, ours, c, rounds, now, say)
    report.finish(FIRST)
  for batch, new in batches.items():
    part = f'batch {batch}'
    if report.lacks(part):
      say(part)
      _batch(report, makers, m, batch, new, rounds, now, say)
      report.finish(part)
  part, new = f'after {long} tokens', 64
  if report.lacks(part):
    say(part)
    made = {
      'plain JAX': plain(m, 1, new - 1, loop.bucket(long)),
      'ours': functools.partial(ours.run_long, new, long, now),
    }
    with peers.beside(
      report, _peer_sizes(m, 1, long, new, True), say
    ) as others:
      times = measure.interleave(made | others.candidates, rounds, now, say)
      others.judge(times, 'ours', f'{part}: ')
    report.add({f'{part}: the prompt itself': times.pop('ours, prompt')})
    _speeds(report, part, times, new - 1)
    report.finish(part)
  return report


def our_prefill(c, length):
  """-> (compiled program of a prompt into a cache, its arguments)."""
  built = build.build(c, 'data=1', devices=jax.devices()[:1])
  model, slots = built.model, loop.bucket(length)

  def program(params, tokens_BT, lengths_B):
    x, cache = step.prefill(model, params, tokens_BT, lengths_B, slots)
    return model.logits(params, step.last(x, lengths_B)), cache

  with build.use(built):
    start = lambda key: model.unstack(model.init(key))
    params = jax.jit(start)(jax.random.key(0))
    ids = [t % c.model.vocab_size for t in range(length)]
    arguments = params, *step.place([ids], slots, built.mesh)
    return jax.jit(program).lower(*arguments).compile(), arguments


def plain_prefill(m, length):
  """The same of plain JAX."""
  params = jax.jit(lambda k: reference.init(m, k, False))(jax.random.key(0))
  arguments = params, jnp.arange(length)[None] % m.vocab_size
  program = jax.jit(functools.partial(reference.prefill, m))
  return program.lower(*arguments).compile(), arguments


def prefill(rounds, quick, say):
  """A prompt into a cache: full attention, a window, plain JAX."""
  lengths = QUICK_LENGTHS if quick else LENGTHS
  m = config(quick).model
  now, report = bench_train.begin(
    'prefill',
    f'V{m.vocab_size} D{m.d_model} N{m.num_heads} L{m.num_layers} F{m.d_ff}, '
    f'float32, batch 1, {" and ".join(map(str, lengths))} tokens',
    quick,
  )
  for length in lengths:
    part = f'{length} tokens'
    if report.lacks(part):
      say(f'compiling {part}')
      window = QUICK_WINDOW if quick else WINDOW
      window = window if length == lengths[0] else 0
      _prefill(report, quick, length, window, rounds, now, say)
      report.finish(part)
  return report


def _prefill(report, quick, length, window, rounds, now, say):
  """One length; window: also with one of so many tokens, 0: without."""
  c, part = config(quick), f'{length} tokens'
  programs = {
    'plain JAX': plain_prefill(c.model, length),
    'ours': our_prefill(c, length),
  }
  windowed = f'ours, window {window}'
  if window:
    narrow = config(quick, pattern='W-', window=window)
    programs[windowed] = our_prefill(narrow, length)

  def run(name):
    call, arguments = programs[name]
    jax.block_until_ready(call(*arguments))

  made = {name: functools.partial(run, name) for name in programs}
  sizes = peers.sizes_of(c.model) | dict(length=length)
  with peers.beside(report, sizes, say) as others:
    times = measure.interleave(made | others.candidates, rounds, now, say)
    others.judge(times, 'ours', f'{part}: ')
  report.add(
    {
      f'{part}: temporaries, {name}': measure.temporary(call)
      for name, (call, _) in programs.items()
    },
    'MiB',
  )
  _speeds(report, part, times, length)
  if window:
    report.check(
      f'{part}: time of {windowed} / ours',
      measure.ratios(times[windowed], times['ours']),
      0.4,
      least=False,
    )
