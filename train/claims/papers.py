"""The index of papers: what each config reproduces, read from its header.

A config's docstring is its title and then one 'field: text' per field; indented
lines continue a text. Headers are read as text (ast): no config is run and jax
is never imported, so the index takes well under a second. This file also says
what makes a claim well formed; train/claims/harness.py runs them.

    claims() -> [(name, kind, expected, paper's number), ...]
    expected = {'check': a function, parameter: value, ...}

A paper's claim that does not hold here stays, with what the header admits of
it: expected['admits'] is then the verdict, 'not reproduced' or 'opposite'.

A check is a public function of a module in train/claims/ whose first argument
is `run` and whose other arguments, keyword-only, are the parameters: plain
data. What must make a claim fail stands beside the claims:

    knockouts() -> [(name, claim's name, change), ...]

A config imports checks in the bodies of both, so that reading a header or
get_config() never starts jax. A new check is one more function there; nothing
lists them by hand.
"""

import ast
from collections.abc import Callable
import contextlib
import importlib
import inspect
import numbers
import pathlib
import re
import textwrap
from typing import Any, NamedTuple

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.configs.base import moved

FIELDS = (
  'paper', 'mechanism', 'test', 'run', 'cost', 'expect', 'partial', 'differs',
)  # fmt: skip
# cost: configs that ship have it (tests/configs/test_configs.py). partial: what
# of the paper is in claims only, for no training or decoding uses it.
OPTIONAL = ('cost', 'partial')
FILES = ('mechanism', 'test')  # fields that name files of the repository
KINDS = {
  'EQ': 'equal to a reference',
  'HLO': 'collectives and bytes counted in the compiled program',
  'AOT': 'memory and collectives compiled for a real machine',
  'SIM': 'deterministic simulator; operations counted in a traced program',
  'LEARN': 'trained, seeded',
  'CPU': 'CPU-seconds of the process, in turn, as a ratio',
  'TIME': 'device clock, on an accelerator',
}
VERDICTS = ('reproduced', 'direction only', 'not reproduced', 'opposite')
ADMITTED = VERDICTS[2:]  # of a claim that fails
_CLAIMS = 'paraxis.train.claims.'
_ROWS = [False], [True], [True, False]  # whether a row's changes are functions


class Knockout(NamedTuple):
  """What switches a mechanism off, and the claim that must then fail.

  Attributes:
    name: for --knockout=. claim: a claim's name.
    change: {'section.field' of the config, or a parameter of the claim's check:
      value}.
    off: a function without arguments: the context manager to check in.
  """

  name: str
  claim: str
  change: dict
  off: Callable = contextlib.nullcontext


class Paper(NamedTuple):
  """A config's header. name: its file's stem; fields: {field: text}."""

  name: str
  title: str
  fields: dict


class Claim(NamedTuple):
  """One claim, taken apart.

  Attributes:
    parameters: keyword arguments of the check.
    paper: its number. admits: the verdict, one of ADMITTED, that the header
      tells; '': the claim holds.
    published: parameters with which the check asks for the paper's number; {}:
      it does so as it is, or the paper has none.
  """

  name: str
  kind: str
  check: Callable
  parameters: dict
  paper: Any
  admits: str = ''
  published: dict = {}


def header(path):
  """`Paper` of a config file; UserError if its header lacks a field."""
  path = pathlib.Path(path)
  try:
    text = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8')))
  except SyntaxError as e:
    raise errors.UserError(f'{path}:{e.lineno}: {e.msg}') from e
  title, _, rest = (text or '').partition('\n')
  found, field = {}, None
  for line in rest.splitlines():
    match = re.match(r'(\w+):\s*(.*)', line)
    if match:
      field = match[1]
      if field in found or field not in FIELDS:
        what = 'is there twice' if field in found else 'is not a field'
        raise errors.UserError(
          f'{path}: {field!r} {what} of a header ({", ".join(FIELDS)}).'
          + schema.suggest(field, FIELDS)
        )
      found[field] = match[2].strip()
    elif line.strip() and field:
      found[field] += ' ' + line.strip()
  missing = [f for f in FIELDS if not found.get(f) and f not in OPTIONAL]
  if missing or not title.strip():
    raise errors.UserError(
      f'{path}: the docstring lacks {", ".join(missing) or "a title"}; it is a '
      f'title and then a line for each of {", ".join(FIELDS)}.'
    )
  paper = Paper(path.stem, title.strip().rstrip('.'), found)
  if 'cost' in found:
    cost(paper)
  return paper


def cost(paper) -> int:
  """CPU-seconds that the claims of a header take on a small machine.

  Raises:
    UserError: the header does not say, or not as '1,900 CPU-seconds'.
  """
  text = paper.fields.get('cost', '')
  match = re.fullmatch(r'(\d[\d,]*) CPU-seconds', text)
  if not match:
    raise errors.UserError(
      f'{paper.name}: cost: {text or "is missing"}: a number of CPU-seconds, '
      'as in cost: 390 CPU-seconds'
    )
  return int(match[1].replace(',', ''))


def index(word='', paths=None):
  """[Paper] of all configs, or of those in whose header a word begins so."""
  paths = command_line.papers() if paths is None else paths
  found = [header(p) for p in paths]
  # 'ring' is in 'ring_self_attention' and 'a ring of', not in 'during'.
  whole = re.compile(rf'(?<![a-z0-9]){re.escape(word)}', re.I)
  fits = lambda p: (
    not word or whole.search('\n'.join([p.name, p.title, *p.fields.values()]))
  )
  return [p for p in found if fits(p)]


def files(paper):
  """The repository files that a header names, in order."""
  names = ','.join(paper.fields[f] for f in FILES).split(',')
  return [n.strip() for n in names]


def mechanism(path) -> tuple:
  """Files and folders that a config's header names as its mechanism.

  (): it has no header, as a config of one's own may.
  """
  try:
    names = header(path).fields['mechanism']
  except errors.UserError:
    return ()
  return tuple(name.strip() for name in names.split(','))


def source(paper) -> str:
  """The paper's number, and whether a part of it is in claims only."""
  number = paper.fields['paper']
  return f'{number}, partial' if 'partial' in paper.fields else number


def table(papers, full):
  """The papers as text: a line for each, or with `full` all their fields."""
  if not full:
    width = max(len(p.name) for p in papers)
    lines = [f'{p.name:{width}}  {p.title} [{source(p)}]' for p in papers]
    return '\n'.join(
      [*lines, '', 'paraxis papers WORD shows what mentions WORD.']
    )
  blocks = []
  for p in papers:
    lines = [f'{p.name}: {p.title}']
    for field, text in p.fields.items():
      lines += textwrap.wrap(
        text,
        initial_indent=f'  {field:10} ',
        subsequent_indent=' ' * 13,
        width=80,
        break_long_words=False,
        break_on_hyphens=False,
      )
    blocks.append('\n'.join(lines))
  return '\n\n'.join(blocks)


def _named(name: str, given: dict) -> tuple[Any, dict]:
  """(the function that 'claims_<file>.<function>' names, its parameters).

  Checks were named so until 0.1: configs of users that still do keep working
  for one release. None in the place of the function: there is none.
  """
  file, _, function = name.partition('.')
  module = moved.table().get(f'train.{file}', '')
  if not f'paraxis.{module}'.startswith(_CLAIMS):
    return None, given
  if function == 'equals_one_device':  # three functions until 0.1, one now
    module = 'train.claims.experiment'
    if 'mesh' in given:
      given = {**given, 'cases': [dict(mesh=given['mesh'])]}
      del given['mesh']
  if function.startswith('held_out_'):
    module = 'train.claims.held_out'
    function = function.removeprefix('held_out_')
  found = importlib.import_module(f'paraxis.{module}')
  return getattr(found, function, None), given


def parameters(check: Any) -> list[str] | None:
  """[names] of a check's parameters; None: it is no check."""
  where = getattr(check, '__module__', '')
  if not (inspect.isfunction(check) and where.startswith(_CLAIMS)):
    return None
  arguments = list(inspect.signature(check).parameters.values())
  if check.__name__.startswith('_') or not arguments:
    return None
  first, *rest = arguments
  by_name = all(a.kind is a.KEYWORD_ONLY for a in rest)
  return [a.name for a in rest] if first.name == 'run' and by_name else None


def _plain(value):
  """Whether a value is pure data: what JSON can hold."""
  if isinstance(value, dict):
    return all(isinstance(k, str) and _plain(v) for k, v in value.items())
  if isinstance(value, list | tuple):
    return all(_plain(v) for v in value)
  return value is None or isinstance(value, str | bool | numbers.Real)


def claims(module, where):
  """[Claim] of a loaded config module; UserError says what is malformed."""
  if not hasattr(module, 'claims'):
    raise errors.UserError(f'{where}: defines no claims(): nothing to run.')
  out = []
  for number, row in enumerate(module.claims()):
    at = f'{where}: claim {number}'
    if not (isinstance(row, tuple) and len(row) == 4):
      raise errors.UserError(
        f"{at} is not a tuple (name, kind, expected, paper's number)."
      )
    name, kind, expected, paper = row
    if kind not in KINDS:
      raise errors.UserError(
        f'{at}: kind {kind!r} is not one of {", ".join(KINDS)}.'
        + schema.suggest(str(kind), KINDS)
      )
    if not (isinstance(expected, dict) and 'check' in expected):
      raise errors.UserError(
        f"{at}: expected must be a dict with 'check' and its parameters."
      )
    check, given = expected['check'], {**expected}
    del given['check']
    admits = given.pop('admits', '')
    published = given.pop('published', {})
    if admits not in ('', *ADMITTED):
      raise errors.UserError(
        f'{at} admits {admits!r}, not one of {", ".join(ADMITTED)}.'
      )
    if isinstance(check, str):
      check, given = _named(check, given)
    known = parameters(check)
    if known is None:
      raise errors.UserError(
        f'{at}: {expected["check"]!r} is no check: a public function of a '
        'module in train/claims/, (run, *, parameters).'
      )
    if set(given) != set(known):
      raise errors.UserError(
        f'{at}: {check.__name__} takes {known}, not {sorted(given)}.'
      )
    if not set(published) <= set(known) or (published and paper is None):
      raise errors.UserError(
        f"{at}: published={published!r} asks for {paper!r}, the paper's, by "
        f'parameters of {check.__name__}: {known}.'
      )
    if not (isinstance(name, str) and _plain([given, paper, published])):
      raise errors.UserError(f'{at} holds more than names and plain data.')
    out.append(Claim(name, kind, check, given, paper, admits, published))
  if not out:
    raise errors.UserError(f'{where}: claims() is empty: nothing to run.')
  return out


def knockouts(module, where):
  """[Knockout] of a loaded config module; UserError says what is malformed."""
  if not hasattr(module, 'knockouts'):
    raise errors.UserError(f'{where}: defines no knockouts().')
  known = {claim.name: claim for claim in claims(module, where)}
  found = []
  for number, row in enumerate(module.knockouts()):
    at = f'{where}: knock-out {number}'
    if not (isinstance(row, tuple) and list(map(callable, row[2:])) in _ROWS):
      raise errors.UserError(
        f"{at} is not a tuple (name, claim's name, change): plain data, a "
        'function, or a function and then plain data.'
      )
    name, claim, *changes = row
    if not (isinstance(name, str) and re.fullmatch(r'[a-z][a-z0-9_]*', name)):
      raise errors.UserError(f'{at}: {name!r} is no name: a-z, 0-9 and _ only.')
    if name in (knockout.name for knockout in found):
      raise errors.UserError(f'{at}: {name!r} is there twice.')
    if claim not in known:
      raise errors.UserError(
        f'{at}: no claim is named {claim!r}; there are {", ".join(known)}.'
        + schema.suggest(str(claim), known)
      )
    if known[claim].admits:
      raise errors.UserError(
        f'{at}: {claim!r} is {known[claim].admits} as it is: it cannot fall.'
      )
    given: dict = dict(change={}, off=contextlib.nullcontext)
    for change in changes:
      _check_change(at, change, known[claim])
      given['off' if callable(change) else 'change'] = change
    found.append(Knockout(name, claim, **given))
  if not found:
    raise errors.UserError(f'{where}: knockouts() is empty.')
  return found


def _check_change(at, change, claim):
  if callable(change):
    if inspect.signature(change).parameters:
      raise errors.UserError(f'{at}: {change.__name__} takes arguments.')
    return
  if not (isinstance(change, dict) and change and _plain(change)):
    raise errors.UserError(
      f'{at}: the change is neither a function nor plain data by name.'
    )
  names = [n for n, _ in schema.fields()]
  for name, value in change.items():
    known = names if '.' in name else list(claim.parameters)
    if name not in known:
      raise errors.UserError(
        f'{at}: {name!r} is neither a config field nor one of the parameters '
        f'{list(claim.parameters)}.' + schema.suggest(name, known)
      )
    if '.' not in name and value == claim.parameters[name]:
      raise errors.UserError(f'{at}: {name}={value!r} changes nothing.')


def mentioning(word):
  """`index` of a word; UserError if no header has it."""
  found = index(word)
  if not found:
    names = [p.name for p in index()]
    raise errors.UserError(
      f'no paper mentions {word!r}; there are {", ".join(names)}.'
      + schema.suggest(word, names)
    )
  return found


def run(word):
  """Prints the index; UserError if no header has the word."""
  print(table(mentioning(word), full=bool(word)))
