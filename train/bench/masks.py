"""Bench of masked models: a training step, and a call over cached blocks.

Beside a causal model of the same sizes and the same tokens: a step whose rows
have masks (train.objective=masked) sees all of a row, twice the pairs of
attention; block diffusion (block) reads each row with masks and without, twice
the tokens, and has no target. A call reads the tokens of a canvas over a cache
(decode/unmask/canvas.py), as a causal one reads as many drafts; what these
cost beside one token is measured too.

Legend: B rows, T tokens, C tokens of a call.
"""

import functools

import jax
import jax.numpy as jnp

from paraxis.configs import schema
from paraxis.decode import step as step_lib
from paraxis.models import build
from paraxis.models.mixers import packed
from paraxis.train.bench import measure
from paraxis.train.bench import train as bench_train

CAUSAL = 'causal'
STEPS = {  # name -> (fields, most seconds over those of a causal step)
  'masks': ({'model.visibility': 'full', 'train.objective': 'masked'}, 1.1),
  'masks, seen by blocks': (
    {
      'model.visibility': 'block', 'model.block': 32,
      'train.objective': 'masked',
    },
    1.1,
  ),
  'pairs of rows': (
    {
      'model.visibility': 'block',
      'model.block': 32,
      'train.objective': 'block',
    },
    None,
  ),
}  # fmt: skip
CALLS = 8, 32  # C
CALL_BOUND = 1.15
DRAFTED, DRAFTED_BOUND = 8, 2.5  # tokens in flight of one row, over one
ROWS, CACHED, SLOTS = 8, 256, 512  # of a call: rows, tokens and slots of each
REPEATS = 8


def masks(rounds, quick, say):
  """Steps and calls, each over those of a causal model."""
  c = bench_train.config(quick)
  now, report = bench_train.begin(
    'masks',
    f'{bench_train.describe(c)}; calls of {", ".join(map(str, CALLS))} tokens '
    f'in {ROWS} rows over {CACHED} cached ones, blocks of a call',
    quick,
  )
  if report.lacks('steps'):
    every = {CAUSAL: {}} | {name: fields for name, (fields, _) in STEPS.items()}
    made = {n: bench_train.Ours(_with(c, f), 'data=1', now)
            for n, f in every.items()}  # fmt: skip
    run = lambda ours: {'': ours.run()['']}
    times = measure.interleave(
      {n: functools.partial(run, m) for n, m in made.items()}, rounds, now, say
    )
    _judge(report, times, 'step', {n: bound for n, (_, bound) in STEPS.items()})
    report.finish('steps')
  for count in CALLS:
    part = f'call of {count}'
    if report.lacks(part):
      blocks = {'model.visibility': 'block', 'model.block': count}
      made = {
        CAUSAL: _call(c, count),
        'a block': _call(_with(c, blocks), count),
      }
      times = measure.interleave(made, rounds, now, say)
      _judge(report, times, part, {'a block': CALL_BOUND})
      report.finish(part)
  part = 'one row'
  if report.lacks(part):
    names = {n: f'{part}, a causal call of {n}' for n in (1, DRAFTED)}
    made = {name: _call(c, n, 1) for n, name in names.items()}
    times = measure.interleave(made, rounds, now, say)
    report.add(times)
    report.check(
      f'{part}: time of a causal call of {DRAFTED} tokens / of 1',
      measure.ratios(times[names[DRAFTED]], times[names[1]]),
      DRAFTED_BOUND,
      least=False,
    )
    report.finish(part)
  return report


def _with(c, fields):
  """The config with other fields, and a mask if it has none of its own."""
  for name, value in fields.items():
    c = schema.with_value(c, name, value)
  if not fields:
    return c
  return schema.with_value(c, 'model.mask_id', c.model.vocab_size - 1)


def _judge(report, times, part, bounds):
  """Adds times, and their ratios to the causal one."""
  report.add({f'{part}, {name}': ts for name, ts in times.items()})
  for name, bound in bounds.items():
    ratio = measure.ratios(times[name], times[CAUSAL])
    what = f'{part}: time of {name} / causal'
    if bound:
      report.check(what, ratio, bound, least=False)
    else:
      shown = ' '.join(f'{x:.2f}' for x in measure.spread(ratio))
      report.notes.append(f'{what}: {shown}')


def _call(c, count, many=ROWS):
  """-> () that reads `count` tokens a row over a cache, REPEATS times."""
  built = build.build(c, 'data=1', devices=jax.devices()[:1])
  model, form = built.model, (packed.Group(many, count),)

  @jax.jit
  def run(params, cache, tokens):
    rows = step_lib.rows(tokens, jnp.full(many, count), cache.length)
    x, _ = model.step(params, cache, rows, form)
    return model.logits(params, x)

  with build.use(built):
    params = jax.jit(lambda key: model.unstack(model.init(key)))(
      jax.random.key(0)
    )
    cache = jax.jit(lambda: model.init_cache(many, SLOTS))()
    cache = cache._replace(length=jnp.full(many, CACHED, jnp.int32))
  tokens = jnp.ones((many, count), jnp.int32)

  def repeated():
    with build.use(built):
      for _ in range(REPEATS):
        jax.block_until_ready(run(params, cache, tokens))

  return repeated
