"""Files of text -> blocks of rows, as a stream: one format a function.

  .txt .md            cut at blank lines into documents of about 8 kB
  .jsonl              a line is {"text": ..., "id": ..., "split": "train" |
                      "held", "domain": ...}, all but the text optional; or
                      has "messages" (train/data/chat.py)
  .parquet            columns of the same names (extra parquet)
  .bin                tokens of nanoGPT (train/data/ids.py)
  a datasets folder   what Hugging Face's `save_to_disk` wrote: Arrow streams in
                      the order of its state.json (extra parquet)

A file without a suffix (text8) is text if it is named itself and is UTF-8; in a
folder it is passed over. The first two may end in .gz or .zst (extra zstd).
`data.text_key` names the key or column of the text. Rows of tables and .jsonl
whose text is empty or null are left out, counted, said.

A line of text longer than 65,536 characters (text8 is one line) is cut after
the last space of every 8,192 characters, or there if they hold none; so its
documents have about 16 kB.

Cost: a block of about 4 MB in memory, and one line of .jsonl.
"""

import codecs
import contextlib
import gzip
import io
import json
import logging
import pathlib
import re
from typing import Any
import zlib

from paraxis.configs.base import errors
from paraxis.train.data import chat
from paraxis.train.data import ids as ids_lib
from paraxis.train.data import rows
from paraxis.train.data import tables

LONG_LINE = 1 << 16  # characters; a longer line of text is cut
PACKED = ('.gz', '.zst')
_TEXT_DOCUMENT = 8192  # characters; text is cut at the next blank line
_SNIFFED = 1 << 16  # bytes
# The end of a name, of a shard; older ones of Hugging Face have a hash behind.
_SHARD = r'[-_.]\d{5}-of-\d{5}(-[0-9a-f]{16})?$'
_PIECE = 8192  # characters of a piece of a long line
log = logging.getLogger(__name__)


def kind(path) -> str:
  """The format of a file by its name, 'text', 'jsonl', ...; '': not read."""
  name = pathlib.Path(path).name.lower()
  for end in PACKED:
    name = name.removesuffix(end)
  suffix = pathlib.Path(name).suffix
  packed = pathlib.Path(path).suffix.lower() in PACKED
  if packed and suffix not in ('.txt', '.md', '.jsonl'):
    return ''
  return {
    '.txt': 'text', '.md': 'text', '.jsonl': 'jsonl', '.parquet': 'parquet',
    '.bin': 'bin',
  }.get(suffix, '')  # fmt: skip


def is_plain(file) -> bool:
  """Whether a file, or what .gz or .zst packs in it, has no suffix."""
  packed = file.suffix.lower() in PACKED
  return not pathlib.Path(file.stem if packed else file.name).suffix


def is_utf8(file) -> bool:
  """Whether a file begins as UTF-8 text, in its first 64 KiB: without NUL."""
  unpacked, raw = open_bytes(file)
  with raw:
    try:
      head = unpacked.read(_SNIFFED)
      codecs.getincrementaldecoder('utf-8')().decode(head)
    except (UnicodeDecodeError, EOFError, OSError, zlib.error):
      return False
  return bool(head.strip()) and b'\0' not in head


def stem(path) -> str:
  """Name of a file without what says its format or its shard."""
  name = pathlib.Path(path).name
  for end in PACKED:
    name = name.removesuffix(end)
  return re.sub(_SHARD, '', pathlib.Path(name).stem)


def read(source, options=rows.PLAIN, say=log.warning):
  """Yields every Row of a Source, in order. UserError: file, line and what."""
  for block in blocks(source, options, say):
    yield from parse(block, options)


def blocks(source, options=rows.PLAIN, say=log.warning):
  """Yields the Blocks of a Source; say: called with a line on what is cut."""
  file = source.file
  make = tables.dataset_blocks if file.is_dir() else _BLOCKS[kind(file)]
  if not kind(file) and file.is_file():
    say(f'{file} has no suffix: it is read as text, which its beginning is.')
  try:
    yield from make(source, options, say)
  except (EOFError, zlib.error, gzip.BadGzipFile) as error:
    raise errors.UserError(f'{file}: damaged or cut off: {error}.') from error
  except OSError as error:
    why = error.strerror or str(error).splitlines()[0]
    raise errors.UserError(f'{file}: cannot be read: {why}.') from error


def parse(block, options=rows.PLAIN) -> list[rows.Row]:
  """The rows of a block. UserError: file, line and what; or it holds ids."""
  source = block.source
  if block.kind == 'ids':
    raise errors.UserError(f'{source.file} holds ids of tokens, not text.')
  if block.kind == 'rows':
    return [rows.row(each, source) for each in block.rows]
  found = []
  for number, line in enumerate(io.BytesIO(block.data), block.first):
    where = f'{source.file}:{number}'
    if line.strip() and (given := _of_line(line, where, number, options)):
      found.append(rows.row(given, source))
  return found


def open_bytes(file) -> Any:
  """(file that gives what is in it unpacked, the file itself), both open."""
  packed = file.suffix.lower()
  library = rows.needed('zstandard', 'zstd', file) if packed == '.zst' else None
  raw = open(file, 'rb')
  if packed == '.gz':
    return gzip.GzipFile(fileobj=raw), raw
  if library:
    return io.BufferedReader(_Zstandard(library, raw), 1 << 16), raw
  return raw, raw


class _Zstandard(io.RawIOBase):
  """Frames of Zstandard one after the other; EOFError where one is cut off."""

  def __init__(self, library, raw):
    self._library, self._file = library, raw
    self._frame: Any = None
    self._rest = self._out = b''

  def readable(self):
    return True

  def readinto(self, buffer):
    while not self._out:
      raw = self._rest or self._file.read(1 << 14)
      if not raw:
        if self._frame is not None and not self._frame.eof:
          raise EOFError('the last frame is not complete')
        return 0
      if self._frame is None or self._frame.eof:
        self._frame = self._library.ZstdDecompressor().decompressobj()
      try:
        self._out = self._frame.decompress(raw)
      except self._library.ZstdError as error:
        raise EOFError(str(error)) from error
      self._rest = self._frame.unused_data if self._frame.eof else b''
    size = min(len(buffer), len(self._out))
    buffer[:size] = self._out[:size]
    self._out = self._out[size:]
    return size


def _jsonl_blocks(source, options, say):
  first, number, empty = 1, 0, 0
  both = (json.dumps(options.text_key, ensure_ascii=x) for x in (True, False))
  key = b'|'.join(re.escape(name.encode()) for name in both)
  # Only these lines are parsed here, all of them where they are tokenized.
  perhaps = re.compile(rb'(%s)\s*:\s*(null|"")' % key)
  file, raw = open_bytes(source.file)
  with raw:
    while lines := file.readlines(rows.BLOCK):
      yield rows.Block(source, first, 'lines', b''.join(lines), [], raw.tell())
      first += len(lines)
      number += sum(not line.isspace() for line in lines)
      for line in filter(perhaps.search, lines):
        with contextlib.suppress(ValueError, RecursionError):  # refused there
          empty += _is_empty(json.loads(line), options.text_key)
  if empty:
    say(f'{source.file}: {empty} of {number} rows have no text: left out.')


def is_chat(source, text_key) -> bool:
  """Whether the first line of a .jsonl that is not blank is a conversation:
  has messages and no text."""
  if source.file.is_dir() or kind(source.file) != 'jsonl':
    return False
  file, raw = open_bytes(source.file)
  with raw:
    try:
      row = json.loads(next(line for line in file if line.strip()))
    except (
      ValueError, StopIteration, EOFError, OSError, zlib.error, RecursionError,
    ):  # fmt: skip
      return False  # reading it says what is wrong
    return _is_talk(row, text_key)


def _is_talk(row, text_key):
  return isinstance(row, dict) and 'messages' in row and text_key not in row


def _is_empty(row, text_key):
  return isinstance(row, dict) and row.get(text_key, row) in (None, '')


def _of_line(line, where, number, options):
  """As rows.checked; None: its text is empty or null."""
  text_key = options.text_key
  try:
    row = json.loads(line)
  except ValueError as error:
    raise errors.UserError(f'{where}: not JSON: {error}.') from error
  except RecursionError as error:
    raise errors.UserError(f'{where}: nested too deeply.') from error
  if _is_talk(row, text_key):
    if not options.template:
      raise errors.UserError(
        f'{where}: has "messages", the first line of the file has not: keep '
        'conversations and texts in files of their own.'
      )
    text, turns = chat.render(row, options, where)
    return [
      *rows.checked(row | {text_key: text}, where, number, text_key),
      turns,
    ]
  if _is_empty(row, text_key):
    return None
  if not isinstance(row, dict) or text_key not in row:
    keys = ''
    if isinstance(row, dict):
      keys = f' (it has {", ".join(map(repr, list(row)[:8])) or "no key"})'
    raise errors.UserError(
      f'{where}: needs an object with a string "{text_key}"{keys}; '
      'data.text_key names the key of the text.'
    )
  if not isinstance(row[text_key], str):
    raise errors.UserError(
      f'{where}: "{text_key}" is of type {type(row[text_key]).__name__}, not a '
      'string; data.text_key names the key of the text.'
    )
  return rows.checked(row, where, number, text_key)


def _text_blocks(source, options, say):
  del options
  name, found, size, first = stem(source.file), [], 0, 0
  file, raw = open_bytes(source.file)
  with raw:
    for number, text in enumerate(_documents(file, source.file, say)):
      found.append([[f'{name}/{number:05d}'], None, text, None])
      size += len(text)
      if size >= rows.BLOCK:
        yield rows.Block(source, first, 'rows', b'', found, raw.tell())
        found, size, first = [], 0, number + 1
    if found:
      yield rows.Block(source, first, 'rows', b'', found, raw.tell())


def _documents(file, name, say):
  """Texts of a file: lines up to a blank one after 8 kB, or up to 16 kB."""
  lines, size = [], 0
  for line in _lines(file, name, say):
    lines.append(line)
    size += len(line)
    blank = not line.strip()
    if size >= _TEXT_DOCUMENT and (blank or size >= 2 * _TEXT_DOCUMENT):
      yield ''.join(lines)
      lines, size = [], 0
  if lines:
    yield ''.join(lines)


def _lines(file, name, say):
  """Lines as str.splitlines has them, with their ends; long ones in pieces."""
  decoder = codecs.getincrementaldecoder('utf-8')()
  rest, ends, long, said = '', 0, False, False
  while chunk := file.read(1 << 20):
    rest += _decoded(decoder, chunk, ends, name)
    ends += chunk.count(b'\n')
    *lines, rest = [*_split(rest)]
    cut = False
    for line in lines:
      cut = cut or _is_long(line, long)
      yield from _pieces(line) if _is_long(line, long) else [line]
      long = False
    long = _is_long(rest, long)
    if long:
      *pieces, rest = _pieces(rest)
      yield from pieces
    if (cut or long) and not said:
      said = True
      say(
        f'{name}: lines longer than {LONG_LINE:,} characters are cut after a '
        f'space into documents of about {2 * _TEXT_DOCUMENT:,}.'
      )
  rest += _decoded(decoder, b'', ends, name)
  if rest:
    yield from _pieces(rest) if _is_long(rest, long) else [rest]


def _decoded(decoder: Any, chunk, ends, file):
  try:
    return decoder.decode(chunk, not chunk)
  except UnicodeDecodeError as error:
    line = 1 + ends + error.object[: error.start].count(b'\n')
    raise errors.UserError(f'{file}:{line}: not UTF-8: {error}.') from error


def _split(text):
  """Lines, the last of which may go on: '' if none does."""
  lines = text.splitlines(keepends=True)
  # A '\r' at the end may be the first half of a '\r\n'.
  if lines and (
    lines[-1].endswith('\r') or lines[-1].splitlines() == [lines[-1]]
  ):
    return lines
  return [*lines, '']


def _is_long(line, begun):
  return begun or len(line) > LONG_LINE


def _pieces(line):
  """A line in pieces of up to 8,192 characters, each up to its last space."""
  at = 0
  while len(line) - at > _PIECE:
    end = 1 + line.rfind(' ', at, at + _PIECE)
    end = end if end > at else at + _PIECE
    yield line[at:end]
    at = end
  yield line[at:]


_BLOCKS = {
  'text': _text_blocks,
  '': _text_blocks,  # train/data/corpus.py has looked into the file
  'jsonl': _jsonl_blocks,
  'parquet': tables.parquet_blocks,
  'bin': ids_lib.blocks,
}
