"""Benches of methods of decoding, and of masked models.

methods: SmolLM2-135M (paraxis[smollm2]) in float32 continues held-out prompts,
one row at a time, greedily, with each method in turn. A method that makes
several tokens a call gains where calls cost their reading of the parameters, as
on accelerators; on a CPU a call of several tokens costs more than one of one,
so some lose: their rows stay. Trained drafts come from --draft=FILE (`paraxis
draft`); methods that need one and have none are notes. Our one by one is
compared with the limit of bytes (train/bench/decode.py), and with transformers
and llama.cpp where a --peer= names their Python.

masks: beside a causal model of the same sizes and the same tokens, a step whose
rows have masks (train.objective=masked) sees all of a row, twice the pairs of
attention; block diffusion (block) reads each row with masks and without, twice
the tokens, and has no target. A call reads the tokens of a canvas over a cache,
draws, ranks and commits them (decode/unmask/canvas.py), as a causal one reads,
judges and commits as many drafts; what these cost beside one token is measured
too.

Legend: B rows, T tokens, C tokens of a call.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import decode as decode_fields
from paraxis.configs.base.decode import METHODS
from paraxis.decode import judges
from paraxis.decode import load
from paraxis.decode import methods as methods_lib
from paraxis.decode import program
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode import trees
from paraxis.decode.drafts import heads
from paraxis.decode.unmask import canvas
from paraxis.models import build
from paraxis.models.huggingface import source
from paraxis.sharding import annotate
from paraxis.train import draft
from paraxis.train.bench import decode as bench_decode
from paraxis.train.bench import measure
from paraxis.train.bench import peers
from paraxis.train.bench import train as bench_train

PROMPTS, LENGTH, NEW = 2, 64, 64
QUICK = 1, 16, 8
PLAIN = 'autoregressive'
DRAFTS = dict(prompt_lookup=8, aggressive=8, jacobi=8, medusa=24, ppd=7)

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


def methods(rounds, quick, say):
  """Tokens a second of every method over those of one by one."""
  count, length, new = QUICK if quick else (PROMPTS, LENGTH, NEW)
  made, ids, file = (_small if quick else _real)(count, length)
  config = made.built.model.config
  now, report = bench_train.begin(
    'methods',
    f'{"a small model" if quick else "SmolLM2-135M"}, float32, {count} prompts '
    f'of {length} tokens, one row at a time, {new} greedy tokens each',
    quick,
  )
  files, candidates, calls = _files(made), {}, {}
  for name in METHODS:
    if name in methods_lib.CHANGING:
      report.notes.append(
        f'{name}: its text is not that of one by one, not measured'
      )
      continue
    kind = methods_lib.FILES.get(name)
    given = dict(method=name, drafts=DRAFTS.get(name, 4))
    if kind in files:
      given['draft'] = files[kind]
    elif name in methods_lib.NEEDED:
      report.notes.append(f'{name}: no --draft={kind}, not measured')
      continue
    elif kind:  # the first layers as they are
      given['draft_layers'] = max(config.num_layers // 4, 1)
    given['draft_group'] = 4 if config.num_layers >= 16 else 1
    run = functools.partial(_run, made, ids, new, given, calls)
    candidates[name] = run
  tokens, size = count * new, bench_decode.bytes_per_token(made.params)
  reads = bench_decode.readers(size)
  sizes = dict(file=file, prompts=ids, new=new)
  with peers.beside(report, sizes, say) as others:
    every = candidates | others.candidates | reads
    times = measure.interleave(every, rounds, now, say)
    others.judge(times, PLAIN, 'SmolLM2: ')
  read = [times.pop(name) for name in reads]
  limit = [bench_decode.READS / min(ts) for ts in zip(*read, strict=True)]
  speed = [tokens / t for t in times[PLAIN]]
  share = measure.ratios(speed, limit)
  report.check(f'{PLAIN}: speed / byte limit', share, 0.6, most=1.0)
  report.add(
    {n: [tokens / t for t in ts] for n, ts in times.items()}, 'tokens/s'
  )
  for name, ts in times.items():
    if name not in candidates or name == PLAIN:
      continue
    speed = measure.ratios(times[PLAIN], ts)
    report.check(f'{name}: speed / one by one', speed, 1.0)
    each = (tokens - count) / calls[name]
    report.notes.append(f'{name}: {each:.2f} tokens a call')
  return report


def _run(made, ids, new, given, calls):
  """Continues every prompt alone; notes the calls of the model."""
  results = [
    made.generate([x], max_new_tokens=new, temperature=0.0, **given)[0]
    for x in ids
  ]
  calls[given['method']] = sum(r['calls'] for r in results)


def _real(count, length):
  """(loop.Generator, prompts, file of its weights)."""
  with load.Weights(source.SMOLLM2, lambda line: None) as opened:
    made = opened.generator(draft.alone(opened))
  file = str(source.open_(source.SMOLLM2).path)
  texts = draft.documents('fixture', True)
  return made, draft.beginnings(made.tokenizer, texts, count, length), file


def _small(count, length):
  """The same of random parameters, which no file has."""
  c = bench_decode.config(True)
  made = bench_decode.Ours(c).generator(c)
  return made, [list(range(1, length + 1))] * count, ''


def _files(made):
  """{kind: path} of the session's drafts; UserError: of another model."""
  out = {}
  for path in measure.current().drafts:
    fingerprint = getattr(made.tokenizer, 'fingerprint', '')
    about, _ = heads.load(path, made.built.model.config, fingerprint)
    out[about.kind] = path
  return out


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
      report.add({what: ratio}, 'no target')


class _Dropped(proposal.Autoregressive):
  """Drafts of which none is kept: a call makes one token."""

  def __init__(self, width):
    self.tree = trees.chain(width)

  def propose(self, params, own, token_B, live_B, draws):
    del params, own, live_B, draws
    tokens = jnp.zeros((len(token_B), self.tree.width), jnp.int32)
    tokens = annotate.put(tokens, proposal.ROWS)
    return judges.Drafts(tokens, tokens < 0), ()


def _call(c, count, many=ROWS):
  """-> () that makes REPEATS calls of `count` tokens a row over a cache ->
  calls of each row (many,).

  Of a masked model calls of one block, which they fill.
  """
  built = build.build(c, 'data=1', devices=jax.devices()[:1])
  model, new = built.model, 2 * max(CALLS)
  if model.config.visibility == 'block':
    method = canvas.Unmask(model, decode_fields.Unmask(tokens=count // REPEATS))
    until = 1
  else:
    method, until = _Dropped(count - 1), 1 + REPEATS
  form, values = sampling.check(
    decode_fields.Decode(temperature=0.0), c.model.vocab_size
  )
  made, static = program.Program(model, ()), program.Static(form, 'replay')
  names = 'method', 'static'
  begin = jax.jit(made.begin, static_argnames=(*names, 'room'))
  loop = jax.jit(made.loop, static_argnames=names)
  with build.use(built):
    params = jax.jit(lambda key: model.unstack(model.init(key)))(
      jax.random.key(0)
    )
    params = proposal.Params(params, ())
    ids = jnp.ones((many, CACHED), jnp.int32)
    prompt = ids, ids.sum(1), jnp.arange(many, dtype=jnp.uint32)
    room = SLOTS, new
    state, _ = begin(
      params, prompt, values, np.int32(new), method, static, room
    )
    stopped = jnp.zeros(many, bool)
    until = program.Until(
      np.int32(until), stopped, np.bool_(False), np.int32(new)
    )

  def repeated():
    with build.use(built):
      after, _ = loop(params, state, values, until, method, static)
      return jax.block_until_ready(after.lengths).sum(1)

  return repeated
