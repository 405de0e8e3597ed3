"""Rows of text: where they come from, blocks of them, what each may say."""

import hashlib
import importlib
import pathlib
from typing import Any, NamedTuple

from paraxis.configs.base import errors

BLOCK = 4 << 20  # bytes or characters of a block, about


class Row(NamedTuple):
  """One text; split is 'train', 'held' or None: the rule decides.

  turns: chat.Turns of a conversation. own: the id is the row's, which it keeps
  wherever it stands; else that of its place in the file.
  """

  domain: str
  id: str
  split: str | None
  text: str
  turns: Any = None
  own: bool = True

  @property
  def key(self):
    """What the split of a row without an id of its own hashes; '': the id."""
    return '' if self.own else content_key(self.text.encode())


def content_key(data) -> str:
  """Stands for an id: of the bytes, so that equal ones have equal keys."""
  return f'sha256:{hashlib.sha256(data).hexdigest()}'


class Source(NamedTuple):
  """A file or datasets folder; what its rows take that name none themselves.

  group: the part of data.sources that it belongs to; '' without.
  """

  file: pathlib.Path
  domain: str
  split: str | None = None
  group: str = ''


class Options(NamedTuple):
  """What decides how a row is read.

  text_key: config.data.text_key. end_id: of the tokenizer; -1: it has none.
  Of conversations: template, text of the chat template; loss_on, as
  config.data.loss_on; specials, bos and end: texts of special tokens.
  """

  text_key: str = 'text'
  end_id: int = -1
  template: str = ''
  loss_on: str = 'all'
  specials: tuple = ()
  bos: str = ''
  end: str = ''


PLAIN = Options()


class Block(NamedTuple):
  """Consecutive rows of a source, read but not parsed.

  source: Source. first: number of its first row or line, from 1 (text: 0).
  kind: 'lines', data is .jsonl; 'ids', data is uint16 tokens; or 'rows'.
  data: bytes, empty if rows.
  rows: [[id, split, text, domain]]; of ids [id, split, [start, stop], domain].
    An id of the row's place, not its own, is [id]: JSON carries it.
  done: bytes of the file read so far.
  """

  source: Source
  first: int
  kind: str
  data: bytes
  rows: list
  done: int = 0


def needed(package, extra, file):
  """The package, or a UserError that names the extra that brings it."""
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise errors.UserError(
      f'{file}: reading it takes the package {package.split(".")[0]}: '
      f"pip install 'paraxis[{extra}]'."
    ) from error


def checked(row, where, number, text_key):
  """[id, split, text, domain] of a row that has text; null: it has none."""
  part = row.get('split')
  if part not in (None, 'train', 'held'):
    raise errors.UserError(
      f'{where}: "split" is {part!r}, must be "train" or "held".'
    )
  text, id_, domain = (row.get(key) for key in (text_key, 'id', 'domain'))
  id_, domain = (x if x is None else str(x) for x in (id_, domain))
  for key, value in ((text_key, text), ('id', id_), ('domain', domain)):
    try:
      (value or '').encode()
    except UnicodeEncodeError as error:
      raise errors.UserError(
        f'{where}: "{key}" is not Unicode: {error}.'
      ) from error
  return [[str(number)] if id_ is None else id_, part, text, domain]


def row(given, source) -> Row:
  """A Row of [id, split, text, domain, turns] that a source has read."""
  id_, part, text, domain, *turns = given
  domain = source.domain if domain is None else domain
  own = isinstance(id_, str)
  found = Row(domain, id_ if own else id_[0], part or source.split, text)
  return found._replace(own=own, turns=turns[0] if turns else None)
