"""Bench of the methods of decoding: tokens a second beside one by one.

SmolLM2-135M (paraxis[smollm2]) in float32 continues held-out prompts, one row
at a time, greedily, with each method in turn. A method that makes several
tokens a call gains where calls cost their reading of the parameters, as on
accelerators; on a CPU a call of several tokens costs more than one of one, so
some lose: their rows stay. Trained drafts come from --draft=FILE (`paraxis
draft`); methods that need one and have none are notes. Our one by one is
compared with the limit of bytes (train/bench/decode.py), and with transformers
and llama.cpp where a --peer= names their Python.
"""

import functools

from paraxis.configs.base.decode import METHODS
from paraxis.decode import load
from paraxis.decode import methods as methods_lib
from paraxis.decode.drafts import heads
from paraxis.models.huggingface import source
from paraxis.train import draft
from paraxis.train.bench import decode as bench_decode
from paraxis.train.bench import measure
from paraxis.train.bench import peers

PROMPTS, LENGTH, NEW = 2, 64, 64
QUICK = 1, 16, 8
PLAIN = 'autoregressive'
DRAFTS = dict(prompt_lookup=8, aggressive=8, jacobi=8, medusa=24, ppd=7)


def methods(rounds, quick, say):
  """Tokens a CPU-second of every method over those of one by one."""
  count, length, new = QUICK if quick else (PROMPTS, LENGTH, NEW)
  made, ids, file = (_small if quick else _real)(count, length)
  config = made.built.model.config
  report = measure.begin(
    'methods',
    f'{"a small model" if quick else "SmolLM2-135M"}, float32, {count} prompts '
    f'of {length} tokens, one row at a time, {new} greedy tokens each',
    measure.CPU,
    not quick,
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
    times = measure.interleave(every, rounds, measure.settled, say)
    others.judge(times, PLAIN, 'SmolLM2: ')
  read = [times.pop(name) for name in reads]
  limit = [bench_decode.READS / min(ts) for ts in zip(*read, strict=True)]
  speed = [tokens / t for t in times[PLAIN]]
  report.check(
    f'{PLAIN}: speed / byte limit', measure.ratios(speed, limit), 0.6
  )
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
