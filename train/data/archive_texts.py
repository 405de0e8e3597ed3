"""Texts out of source archives, which are read and never unpacked or run.

What: `members` names the plain files of a .tar.*, .zip, .whl or .deb; a reader
turns one file into (suffix of the id, text) pairs: whole, by Bible chapter, by
conversation, or with the markup of a manual page or HTML taken away.
Cost: decompression (a .deb is held in memory) and one pass over the text.
"""

import ast
import functools
import html
import io
import json
import pathlib
import re
import tarfile
import typing
import zipfile

from paraxis.configs.base import errors

_ENTRIES = 8000  # characters; dictionary entries are joined up to this size

Texts = typing.Iterator[tuple[str, str]]  # (suffix of the id, text)


def _plain(text: str) -> Texts:
  yield '', text


def _bible(text: str) -> Texts:
  """Chapters of a Python file that holds one string and {verse: offset}.

  Parsed, never run. A verse is book * 10**6 + chapter * 10**3 + number.
  """
  calls = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call))
  call = next(n for n in calls if any(isinstance(a, ast.Dict) for a in n.args))
  constants = (a.value for a in call.args if isinstance(a, ast.Constant))
  book = max((x for x in constants if isinstance(x, str)), key=len)
  verses = next(a for a in call.args if isinstance(a, ast.Dict))
  starts: dict[int, int] = {}
  for verse, offset in ast.literal_eval(verses).items():
    chapter = verse // 1000
    starts[chapter] = min(offset, starts.get(chapter, offset))
  rows = sorted((offset, chapter) for chapter, offset in starts.items())
  ends = [offset for offset, _ in rows[1:]] + [len(book)]
  for (start, chapter), end in zip(rows, ends, strict=True):
    words = re.sub(r'[\[\]]', '', book[start:end]).strip()
    yield f'#{chapter // 1000:02d}.{chapter % 1000:03d}', words + '\n'


def _dialogue(text: str) -> Texts:
  """Conversations as lines 'A: ...', 'B: ...'; no sender, time or rating."""
  for number, talk in enumerate(json.loads(text).values()):
    people: dict[str, str] = {}
    lines = []
    for message in (m for turn in talk['messages'] for m in turn):
      letter = chr(ord('A') + len(people))
      letter = people.setdefault(message['sender'], letter)
      if words := ' '.join(message['text'].split()):
        lines.append(f'{letter}: {words}\n')
    yield f'#{number:05d}', ''.join(lines)


def _man(text: str) -> Texts:
  """From the title on: before it are comments and generated macros."""
  start = re.search(r'(?m)^\.TH ', text)
  text = text[start.start() if start else 0 :]
  yield '', re.sub(r'(?m)^[.\']\\".*\n?', '', text)


def _html(text: str) -> Texts:
  text = re.sub(r'(?s)<(script|style|head|nav)\b.*?</\1>', '', text)
  text = re.sub(
    r'</(p|h\d|li|tr|dt|dd|pre|title|ul|div)>|<br\b', r'\n\g<0>', text
  )
  lines = html.unescape(re.sub(r'(?s)<[^>]+>', '', text)).split('\n')
  text = '\n'.join(line.strip(' \t') for line in lines)
  yield '', re.sub(r'\n{3,}', '\n\n', text).strip() + '\n'


def _dictionary(text: str) -> Texts:
  """Entries start at column 0; whole entries are joined to about 8 kB."""
  joined: list[str] = []
  size = number = 0
  for entry in [*re.split(r'\n(?=\S)', text), None]:
    if joined and (entry is None or size + len(entry) > _ENTRIES):
      yield f'#{number:05d}', '\n'.join(joined) + '\n'
      joined, size, number = [], 0, number + 1
    joined.append(entry or '')
    size += len(entry or '') + 1


READERS: dict[str, typing.Callable[[str], Texts]] = {
  'plain': _plain,
  'bible': _bible,
  'dialogue': _dialogue,
  'man': _man,
  'html': _html,
  'dictionary': _dictionary,
}


def deb_data(path: pathlib.Path) -> tarfile.TarFile:
  """The data archive of a .deb: an ar file, read by hand, never unpacked."""
  body = path.read_bytes()
  if body[:8] != b'!<arch>\n':
    raise errors.IntegrityError(f'{path} is not a Debian package')
  at = 8
  while at + 60 <= len(body):
    name = body[at : at + 16].decode('ascii').strip().rstrip('/')
    size = int(body[at + 48 : at + 58])
    if name.startswith('data.tar'):
      data = io.BytesIO(body[at + 60 : at + 60 + size])
      if name.endswith('.zst') and 'zst' not in tarfile.TarFile.OPEN_METH:
        raise errors.UserError(
          f'{path.name} is packed with zstd, which only Python >= 3.14 reads: '
          'run this command with it, or without --debian'
        )
      return tarfile.open(fileobj=data)
    at += 60 + size + size % 2
  raise errors.IntegrityError(f'{path} has no data archive')


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
  file = tar.extractfile(member)
  return file.read() if file else b''


def members(path: pathlib.Path) -> typing.Iterator[tuple[str, typing.Any]]:
  """(name, function that returns its bytes) of the plain files inside."""
  if path.suffix in ('.zip', '.whl'):
    with zipfile.ZipFile(path) as packed:
      for info in packed.infolist():
        if not info.is_dir():
          yield info.filename, functools.partial(packed.read, info)
    return
  with deb_data(path) if path.suffix == '.deb' else tarfile.open(path) as tar:
    for member in tar:
      if member.isfile():
        yield (
          member.name.removeprefix('./'),
          functools.partial(_read, tar, member),
        )
