"""What `paraxis decode` continues, and how it prints what came of it.

Results go to stdout, everything else to stderr.
"""

import json
import pathlib
import sys
import time
from typing import Any, NamedTuple

from paraxis.configs.base import errors

KEYS = 'prompt', 'text', 'tokens', 'finish', 'calls', 'lengths', 'forwards'


def say(line):
  print(f'paraxis: {line}', file=sys.stderr)


def text_of(flag, path):
  """The text of a file; UserError: it cannot be read."""
  try:
    return pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as e:
    raise errors.UserError(f'--{flag}={path}: {e}') from None


class Prompts(NamedTuple):
  """texts: without blanks at their ends. places: of each, its file and line, or
  ''. bad: {i: why} of those that cannot be continued. numbers: of each, which
  of all that were given it is."""

  texts: tuple
  places: tuple
  bad: dict
  numbers: tuple = ()


def check_utf8(where, texts):
  """UserError: bytes of the command line, or of stdin, that are no text."""
  for text in texts:
    try:
      text.encode()
    except UnicodeEncodeError as e:
      raise errors.UserError(
        f'{where}{ascii(text)[1:-1]}: character {e.start} is no UTF-8: give '
        'text in UTF-8.'
      ) from None


def read(options):
  """Prompts of --prompt= and --prompts_file=; of --chat there may be none.

  Raises:
    UserError: no prompt; one, the system's message or a stop string that is no
      UTF-8; a file that cannot be read.
  """
  check_utf8('--prompt=', options.prompt)
  check_utf8('--system=', [options.system])
  check_utf8('--stop=', options.stop)
  found = [(text, '') for text in options.prompt]
  bad = {}
  if options.prompts_file is not None:
    path = pathlib.Path(options.prompts_file)
    try:
      lines = path.read_bytes().splitlines()
    except OSError as e:
      raise errors.UserError(f'--prompts_file={path}: {e}') from None
    kept = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if len(kept) < len(lines):
      say(f'{path}: {len(lines) - len(kept)} empty lines are dropped')
    if not kept:
      raise errors.UserError(f'--prompts_file={path} holds no prompt.')
    for i, line in kept:
      try:
        text = line.decode('utf-8')
      except UnicodeDecodeError as e:
        text, bad[len(found)] = '', f'byte {e.start} is not UTF-8'
      found.append((text, f'{path}, line {i}'))
  if not found:
    if options.chat:
      return Prompts((), (), {})
    raise errors.UserError(
      "nothing to continue: give --prompt='Some text' or --prompts_file=."
    )
  texts, places = zip(*found, strict=True)
  short = tuple(text.rstrip() for text in texts)
  changed = sum(a != b for a, b in zip(texts, short, strict=True))
  if changed:
    say(
      f'blanks at the end of {changed} of {len(found)} prompts are dropped: '
      'a word begins with its space'
    )
  return Prompts(short, places, bad, tuple(range(len(short))))


def without_bad(prompts, *more):
  """(Prompts that can be continued, of lists as long those entries); says which
  lines of a file are left out, and why.

  Raises:
    UserError: none is left.
  """
  for i, why in sorted(prompts.bad.items()):
    say(f'{prompts.places[i]} is left out: {why}')
  if len(prompts.bad) == len(prompts.places):
    raise errors.UserError(
      f'no prompt is left of {len(prompts.places)}: each line above says why.'
    )
  keep = lambda xs: [x for i, x in enumerate(xs) if i not in prompts.bad]
  names = 'texts', 'places', 'numbers'
  left = prompts._replace(
    **{n: tuple(keep(getattr(prompts, n))) for n in names}
  )
  return left, *map(keep, more)


def domains(given, count, made):
  """One domain, or None, per prompt; made: loop.Generator."""
  for domain in given:
    made.require_domain(domain)
  if len(given) in (0, 1):
    return (given or [None]) * count
  if len(given) != count:
    raise errors.UserError(
      f'{len(given)} --domain flags for {count} prompts: give one for all, or '
      'one each.'
    )
  return given


class Output:
  """Prints results: the text as it comes, each result as it ends, or all.

  Args:
    options: flags. prompts: Prompts. domains: of each. step: of the checkpoint.
  """

  def __init__(self, options, prompts, domains, step):
    self._options, self._prompts, self._domains = options, prompts, domains
    self._step, self._started, self._done = step, time.monotonic(), 0
    one = sys.stdout.isatty() and len(prompts.texts) == 1
    self._live = one and not (options.json or options.stream)
    if self._live and not options.chat:
      print(prompts.texts[0], end='', flush=True)

  @property
  def hooks(self) -> dict[str, Any]:
    """on_text, on_end and trace of `Generator.generate`."""
    many = len(self._prompts.texts) > 1
    wanted = self._options.stream or (many and sys.stderr.isatty())
    return dict(
      on_text=self._show if self._live else None,
      on_end=self._end if wanted else None,
      trace=self._options.trace,
    )

  def _show(self, _, piece):
    print(piece, end='', flush=True)

  def _end(self, i, result):
    self._done += 1
    if self._options.stream:
      number = dict(index=self._prompts.numbers[i])
      print(json.dumps(number | self._json(i, result), ensure_ascii=False),
            flush=True)  # fmt: skip
    if sys.stderr.isatty():
      count = f'{self._done} of {len(self._prompts.texts)} prompts'
      print(f'\rparaxis: {count}', end='', file=sys.stderr, flush=True)

  def _json(self, i, result):
    own = dict(prompt=self._prompts.texts[i])  # of a chat: not its ids
    if 'trace' in result:
      own['trace'] = result['trace'].listed()
    return dict(domain=self._domains[i]) | {k: result[k] for k in KEYS} | own

  def close(self):
    """After the last text, or in its middle."""
    if self._live:
      print()
    if self._done and sys.stderr.isatty():
      print(file=sys.stderr)

  def print(self, results):
    """What has not been printed yet."""
    if self._options.json:
      every = [self._json(i, r) for i, r in enumerate(results)]
      found = dict(step=self._step, samples=every)
      print(json.dumps(found, ensure_ascii=False))
    elif not self._live and not self._options.stream:
      for i, result in enumerate(results):
        prompt = self._prompts.texts[i]
        if len(results) > 1:
          chat = prompt if self._options.chat else 'prompt'
          print(f'=== {self._domains[i] or chat}')
        print(('' if self._options.chat else prompt) + result['text'])

  def counts(self, results, fills):
    """Says how many tokens calls of the model made.

    Args:
      fills: the method has all tokens by calls; else reading the prompt makes
        the first one.
    """
    if fills:
      made = sum(n * c for r in results for n, c in enumerate(r['lengths']))
      which = 'tokens'
    else:
      made = sum(max(len(r['tokens']) - 1, 0) for r in results)
      which = 'tokens after the first'
    calls = sum(r['calls'] for r in results)
    drafted = sum(r['forwards'] for r in results)
    also = f', and {drafted} forwards of the draft' if drafted else ''
    seconds = time.monotonic() - self._started
    say(
      f'{len(results)} texts: {made} {which} in {calls} calls of the model, '
      f'{made / max(calls, 1):.2f} a call{also}; {seconds:.1f} s with compiling'
    )
