"""Tasks are files; what a row holds says which kind of task it is.

    text    .txt, .md: one document; .jsonl: {"text"} a row
            bits per byte, nats a token and perplexity, over all documents
    choice  .jsonl: {"prompt" or "question", "choices", "answer": 0}
            acc: the likeliest choice is the answer; acc_norm: the likeliest a
            byte. A space stands between a prompt and its choices, unless one
            of the two has it.
    match   .jsonl: {"prompt" or "question", "answer": "text"}
            exact_match: the greedy continuation, without blanks around it, is
            the answer

Standard errors are those of a mean over examples (n - 1), and for sums of nats
over sums of bytes or tokens of a ratio: sqrt(n / (n - 1) sum (a - r b)^2) / sum
b (Cochran 1977, section 6.4); of one example there is none. Every document
begins with its bos token, which is not predicted, as it is trained; its end is
not predicted either. Reading a task starts no jax.
"""

import json
import math
import pathlib
from typing import Any, NamedTuple

from paraxis.configs.base import errors

TEXTS = ('.txt', '.md')
PROMPTS = ('prompt', 'question')


class Task(NamedTuple):
  """A file. kind: 'text', 'choice' or 'match'. rows: dicts with the keys text |
  prompt, choices, answer | prompt, answer. where: 'file:line' of each."""

  name: str
  kind: str
  rows: list[dict[str, Any]]
  where: list[str]


class Result(NamedTuple):
  """Of a task. metrics: {name: (value, standard error or None)}. cut: prompts
  that lost their first tokens. examples: what was found of each row."""

  task: Task
  metrics: dict[str, tuple[float, float | None]]
  cut: int
  examples: list[dict[str, Any]]


def read(name: str, text_key: str = 'text') -> Task:
  """The task in a file; UserError: which line is wrong, and what it has."""
  path = pathlib.Path(name).expanduser()
  if path.suffix not in (*TEXTS, '.jsonl'):
    raise errors.UserError(
      f'--tasks={name} ends in {path.suffix!r}: tasks are .jsonl, .txt and .md '
      'files.'
    )
  try:
    text = path.read_bytes().decode()
  except (OSError, UnicodeDecodeError) as e:
    raise errors.UserError(f'--tasks={name} does not read: {e}.') from None
  if path.suffix in TEXTS:
    if not text:
      raise errors.UserError(f'{name} is empty (0 characters).')
    return Task(name, 'text', [dict(text=text)], [name])
  kinds, rows, where = [], [], []
  for number, line in enumerate(text.split('\n'), 1):
    if line.strip():
      where.append(f'{name}:{number}')
      kind, row = _row(line, where[-1], text_key)
      kinds.append(kind)
      rows.append(row)
      if kind != kinds[0]:
        raise errors.UserError(
          f'{where[-1]} is a row of kind {kind}, {where[0]} of kind '
          f'{kinds[0]}: a file is one task.'
        )
  if not rows:
    raise errors.UserError(f'{name} holds no row.')
  return Task(name, kinds[0], rows, where)


def _row(line, where, text_key):
  """(kind, what is kept of the row) of a line of .jsonl."""
  try:
    row = json.loads(line)
  except (ValueError, RecursionError) as e:
    raise errors.UserError(f'{where}: not JSON: {e}.') from None
  keys = row if isinstance(row, dict) else {}
  prompt = next((key for key in PROMPTS if key in keys), '')
  if prompt and 'answer' in keys:
    found = dict(prompt=row[prompt], answer=row['answer'])
    if 'choices' not in keys:
      _need_texts(where, answer=found['answer'])
      kind = 'match'
    else:
      found['choices'] = _choices(row, where)
      kind = 'choice'
    if not isinstance(found['prompt'], str):
      raise errors.UserError(f'{where}: "{prompt}" is no string.')
  elif text_key in keys:
    found, kind = dict(text=row[text_key]), 'text'
    _need_texts(where, **{text_key: found['text']})
  else:
    raise errors.UserError(
      f'{where}: a row needs "{text_key}", or "prompt" (or "question") and '
      f'"answer", and for multiple choice "choices"; its keys are '
      f'{", ".join(map(repr, keys)) or "none"}.'
    )
  try:
    json.dumps(found, ensure_ascii=False).encode()
  except UnicodeEncodeError as e:
    raise errors.UserError(
      f'{where}: {e.object[e.start : e.end]!a} is half a pair of surrogates, '
      'no character: mend its text, or leave the row out.'
    ) from None
  return kind, found


def _choices(row, where):
  choices, answer = row['choices'], row['answer']
  if not isinstance(choices, list) or len(choices) < 2:
    raise errors.UserError(
      f'{where}: "choices" is to be a list of two texts or more.'
    )
  _need_texts(where, **{f'choices[{i}]': c for i, c in enumerate(choices)})
  if type(answer) is not int or not 0 <= answer < len(choices):
    raise errors.UserError(
      f'{where}: "answer" is {answer!r}, the number of one of '
      f'{len(choices)} choices is 0 to {len(choices) - 1}.'
    )
  return choices


def _need_texts(where, **values):
  for name, value in values.items():
    if not isinstance(value, str) or not value.strip():
      raise errors.UserError(
        f'{where}: "{name}" is {value!r}, not a text: its continuation would '
        'be empty.'
      )


def run(task: Task, scorer, domain=None, new=64, stop=('\n',)) -> Result:
  """The figures of a task.

  Args:
    scorer: score.Scorer. domain: of the tokenizer, whose bos token begins every
      document; None: unknown.
    new: the most tokens of an exact match; stop: texts that end it.
  """
  first = scorer.tokenizer.opening(domain)
  if task.kind == 'text':
    return _text(task, scorer, first)
  if task.kind == 'choice':
    return _choice(task, scorer, first)
  return _match(task, scorer, first, new, stop)


def _text(task, scorer, first):
  texts = [row['text'] for row in task.rows]
  found = scorer.rolling(texts, first)
  examples = [
    dict(nats=-nats, tokens=tokens, bytes=len(text.encode()))
    for (nats, tokens), text in zip(found, texts, strict=True)
  ]
  column = lambda key: [e[key] for e in examples]
  nats = column('nats')
  bits, bits_error = _ratio([x / math.log(2) for x in nats], column('bytes'))
  loss, error = _ratio(nats, column('tokens'))
  perplexity = _exp(loss)
  both = None if error is None else perplexity * error  # delta method
  metrics: dict[str, tuple[float, float | None]] = dict(
    bits_per_byte=(bits, bits_error),
    loss=(loss, error),
    perplexity=(perplexity, both),
  )
  return Result(task, metrics, 0, examples)


def _exp(x) -> float:
  try:
    return math.exp(x)
  except OverflowError:  # above 709.8
    return math.inf


def _choice(task, scorer, first):
  texts, names = [], []
  for row, where in zip(task.rows, task.where, strict=True):
    for i, choice in enumerate(row['choices']):
      apart = row['prompt'][-1:].strip() and choice[:1].strip()
      texts.append((row['prompt'], f' {choice}' if apart else choice))
      names.append(f'{where}: choices[{i}]')
  found = iter(scorer.continuations(texts, first, names))
  examples, cut = [], 0
  for row in task.rows:
    scores = [next(found) for _ in row['choices']]
    nats = [s.nats for s in scores]
    per_byte = [
      n / len(c.encode()) for n, c in zip(nats, row['choices'], strict=True)
    ]
    best = lambda values: values.index(max(values))
    cut += any(s.cut for s in scores)
    examples.append(
      dict(
        nats=nats,
        acc=float(best(nats) == row['answer']),
        acc_norm=float(best(per_byte) == row['answer']),
      )
    )
  metrics = {k: _mean([e[k] for e in examples]) for k in ('acc', 'acc_norm')}
  return Result(task, metrics, cut, examples)


def _match(task, scorer, first, new, stop):
  prompts = [
    [*first, *scorer.tokenizer.encode(row['prompt'].rstrip())]
    for row in task.rows
  ]
  texts, cut = scorer.texts(prompts, new, stop)
  examples = [
    dict(text=text, exact_match=float(text.strip() == row['answer'].strip()))
    for text, row in zip(texts, task.rows, strict=True)
  ]
  metrics = dict(exact_match=_mean([e['exact_match'] for e in examples]))
  return Result(task, metrics, cut, examples)


def _mean(values) -> tuple[float, float | None]:
  """(mean, its standard error)."""
  return _ratio(values, [1.0] * len(values))


def _ratio(above, below) -> tuple[float, float | None]:
  """(sum above / sum below, its standard error over examples)."""
  n, total = len(above), math.fsum(below)
  ratio = math.fsum(above) / total
  if n < 2:
    return ratio, None
  squares = math.fsum(
    (a - ratio * b) ** 2 for a, b in zip(above, below, strict=True)
  )
  return ratio, math.sqrt(n / (n - 1) * squares) / total
