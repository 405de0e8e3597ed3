"""Claims about tokens a call of the model, on real weights and real text.

The model is SmolLM2-135M (paraxis[smollm2]), in float32. Drafts are trained on
the training part of the shipped text, prompts are of its held-out part. Tokens
a call are counted, the first token of a prompt, which its reading makes, apart;
no time is: what a call costs with its drafts is `paraxis bench decode`.
"""

import json
import pathlib

import numpy as np

from paraxis.decode import distill
from paraxis.decode import heads
from paraxis.train import draft as draft_lib
from paraxis.train.claims import harness as claims
from paraxis.train.claims import real_model
from paraxis.train.plot import figures
from paraxis.train.run import workdir as workdir_lib


def trained(run, kind, draft):
  """(path of the draft's file, heads.About, its numbers), once a recipe.

  draft: fields of distill.Recipe, 'layers', and 'tokens' of text to learn from.
  """
  recipe = dict(draft)
  layers, tokens = recipe.pop('layers'), recipe.pop('tokens')
  recipe = distill.Recipe(**recipe)
  folder = workdir_lib.prepare(run.results)
  what = dict(kind=kind, layers=layers, tokens=tokens) | recipe._asdict()
  path = folder / f'{kind}.npz'
  note = path.with_suffix('.json')
  if not (path.exists() and note.exists() and _same(note, what)):
    about, own = draft_lib.trained(
      real_model.opened(), 'fixture', tokens, kind, layers, recipe, run.say
    )
    heads.save(path, about, own)
    note.write_text(json.dumps(what), encoding='utf-8')
  made = real_model.model()
  about, own = heads.load(
    path, made.built.model.config, made.tokenizer.fingerprint
  )
  return str(path), about, sum(x.size for x in own.values())


def _same(note, what):
  return json.loads(note.read_text(encoding='utf-8')) == what


def _counted(given, ids, new, how):
  """(tokens a call, [calls that made 0, 1, .. tokens], texts)."""
  found = real_model.model().generate(ids, max_new_tokens=new, **how, **given)
  width = max(len(r['lengths']) for r in found)
  lengths = np.sum([np.pad(r['lengths'], (0, width - len(r['lengths'])))
                    for r in found], 0)  # fmt: skip
  made = (lengths * np.arange(width)).sum()
  return made / lengths.sum(), lengths, [r['tokens'] for r in found]


def on_real_text(run, *, method, draft, prompts, domains, at_least):
  """LEARN: tokens a call of a method, greedy and drawn, on held-out prompts.

  Args:
    method: fields of schema.Decode. draft: of `trained`; {}: none.
    prompts: [how many, tokens of each, new tokens]. domains: of the prompts;
      []: all.
    at_least: tokens a call, greedy.
  """
  (rows, length, new), given, about = prompts, dict(method), None
  if draft:
    given['draft'], about, size = trained(run, method['method'], draft)
  ids = real_model.beginnings(
    real_model.model().tokenizer, rows, length, domains
  )
  greedy, drawn = dict(temperature=0.0), dict(temperature=1.0, seed=1)
  wanted = real_model.model().generate(ids, max_new_tokens=new, **greedy)
  mean, lengths, texts = _counted(given, ids, new, greedy)
  same = sum(a['tokens'] == b for a, b in zip(wanted, texts, strict=True))
  sampled, more, _ = _counted(given, ids, new, drawn)
  run.say(table(dict(greedy=lengths, drawn=more)))
  name = '-'.join([method['method'], *domains])
  run.say(f'wrote {_draw(dict(greedy=lengths, drawn=more), run, name)}')
  text = f'{len(ids)} held-out prompts of {length} tokens, {new} new ones each'
  text += f'; drawn at temperature 1: {sampled:.2f}; greedy texts of '
  text += f'{same} of {len(ids)} are those of one by one in float32'
  if about:
    text += f'; {size:,} trained parameters, first choices right: '
    text += ' '.join(f'{a[0]:.2f}' for a in about.accuracy)
  return claims.Outcome(
    f'>= {at_least:.2f} tokens a call', f'{mean:.2f}', text,
    bool(mean >= at_least),
  )  # fmt: skip


def more_than(run, *, methods, drafts, prompts, parameters_within):
  """LEARN: the first method makes more tokens a call than the second.

  Args:
    methods: two dicts of fields of schema.Decode. drafts: of each. prompts: as
      for `on_real_text`. parameters_within: how far the numbers of trained
      parameters may be apart, as a ratio.
  """
  (rows, length, new), found, sizes = prompts, [], []
  ids = real_model.beginnings(real_model.model().tokenizer, rows, length)
  for method, draft in zip(methods, drafts, strict=True):
    path, _, size = trained(run, method['method'], draft)
    mean, _, _ = _counted(
      dict(method, draft=path), ids, new, dict(temperature=0.0)
    )
    found.append(mean)
    sizes.append(size)
  names = [m['method'] for m in methods]
  near = max(sizes) / min(sizes) <= parameters_within
  return claims.Outcome(
    f'{names[0]} > {names[1]}',
    f'{found[0]:.2f} {found[1]:.2f}',
    f'tokens a call, greedy, {len(ids)} held-out prompts, {new} tokens; '
    f'trained parameters {sizes[0]:,} and {sizes[1]:,}'
    + ('' if near else f', which are NOT within {parameters_within:g}'),
    bool(found[0] > found[1] and near),
  )


def table(found):
  """Share of calls by the tokens that they made, as lines of text."""
  width = max(map(len, found.values()))
  head = 'tokens of a call ' + ''.join(f'{n:7}' for n in range(1, width))
  lines = [head]
  for name, counts in found.items():
    share = 100 * counts[1:] / max(counts.sum(), 1)
    lines.append(f'{name:17}' + ''.join(f'{x:6.1f}%' for x in share))
  return '\n'.join(lines)


def _draw(found, run, stem):
  """Share of calls that made at least so many tokens -> path of the PNG."""
  curves = {}
  for name, counts in found.items():
    least = counts[::-1].cumsum()[::-1][1:] / max(counts.sum(), 1)
    curves[name] = np.array([np.arange(1, len(counts)), 100 * least])
  fig, ax = figures.lines(
    curves, 'tokens', 'calls with at least so many (%)', loc='upper right'
  )
  ax.set_ylim(0, 104)
  path = pathlib.Path(workdir_lib.prepare(run.results)) / f'{stem}.png'
  return figures.save(fig, path)
