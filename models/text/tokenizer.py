"""Text <-> token ids: bytes, the shipped 2048-entry BPE, any tokenizer.json.

Of files of ids without their tokenizer, `Ids` takes them as they are.

A document is trained on as opening(domain) + encode(text) + [end]; a prompt as
opening(domain) + encode(text), if the model ever reads the first
(decode/loop.py: `Generator`). The opening is nearly always one token. Special
tokens are only ever added by id: a document that contains the characters
'<|end|>' gets their ordinary encoding.

Which tokens these are: special.py.

Source: byte-level BPE, Radford et al. 2019, section 2.2. Cost: the `tokenizers`
library encodes a few MB per CPU-second.
"""

import functools
import hashlib
import json
import os
import pathlib
import re
import secrets

import tokenizers

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import plain_files
from paraxis.models.text import special

STATED = 'tokenizer_config.json'  # of Hugging Face, beside a tokenizer.json
# Beside what it has there, in a folder of weights or of a run of them: text of
# the token that a document ends with, whatever others are called.
END_TOKEN = 'end_token'
BEGINS_WITH = 'begins_with'  # texts of the tokens of a beginning of several
IDS_BELOW = 'ids_below'  # rows of the embedding: special ids above are left out
SHIPPED = {'bpe2048': 'bpe2048.json'}
_BYTE_TOKEN = re.compile(r'<0x([0-9A-F]{2})>')


def load(name):
  """The tokenizer called `name`.

  Args:
    name: 'bpe2048' (shipped), 'bytes', 'ids', or a tokenizer.json's path.

  Returns:
    A `Tokenizer`, `Bytes` or `Ids`, which have the same methods.

  Raises:
    UserError: no such file, or not a tokenizer.json.
  """
  if name in _PLAIN:
    return _PLAIN[name]()
  if name in SHIPPED:
    path = pathlib.Path(__file__).resolve().parent / SHIPPED[name]
  else:
    path = pathlib.Path(os.path.expanduser(name))
  if not os.path.isfile(path):
    known = (*_PLAIN, *SHIPPED)
    raise errors.UserError(
      f'tokenizer {name!r} is neither one of {", ".join(known)} nor a '
      'tokenizer.json file.' + schema.suggest(name, known)
    )
  return Tokenizer(path, name)


def in_place(config, folder, fingerprint):
  """The schema.Config of a run, its tokenizer the one in the run's folder where
  the file that it names is gone, as when the folder was renamed or copied.

  fingerprint: of the run's tokenizer; another one's file is not taken.
  """
  name, file = config.data.tokenizer, pathlib.Path(folder, 'tokenizer.json')
  if os.path.isabs(name) and not os.path.exists(name) and os.path.isfile(file):
    if hashlib.sha256(file.read_bytes()).hexdigest() == fingerprint:
      config = schema.with_value(config, 'data.tokenizer', str(file))
  return config


def stated(folder) -> dict:
  """tokenizer_config.json of a folder; {}: there is none.

  Raises:
    UserError: it does not read.
  """
  path = pathlib.Path(folder) / STATED
  try:
    found = json.loads(plain_files.read_text(path))
  except FileNotFoundError:
    return {}
  except (OSError, ValueError) as error:
    raise errors.UserError(f'{path} does not read: {error}.') from error
  if not isinstance(found, dict):
    raise errors.UserError(f'{path} is no JSON object.')
  return found


def stated_token(config: dict, name: str) -> str:
  """Text of a token that a tokenizer_config names; '': it names none."""
  found = config.get(name)
  found = found.get('content') if isinstance(found, dict) else found
  return found if isinstance(found, str) else ''


def keep(text, file, bos=(), adds=None, eos=(), rows=None) -> tuple[str, ...]:
  """Writes a tokenizer.json, and beside it how a document begins and ends ->
  special tokens that the embedding has no row for.

  Args:
    text: of the tokenizer.json. file: its path, a pathlib.Path.
    bos: ids or texts that the files of its weights call so; the first that is
      a special token is it.
    adds: whether they say that a text begins with it; None: as `text` does.
    eos: as bos.
    rows: of the embedding; None: not known.
  """
  put(file, text)
  made, beside = Tokenizer(file, config={}), file.with_name(STATED)
  words: dict[str, str | bool | int | list[str]] = {}
  begin = [made.name_of(i) for i in made.begins_with(bos, adds)]
  if len(begin) == 1:
    words = dict(bos_token=begin[0], add_bos_token=True)
  elif begin:
    words = {BEGINS_WITH: begin}
  if (found := made.ends_with(eos)) is not None:
    words['eos_token'] = made.name_of(found)
  elif (found := made.first_special(eos)) not in (None, made.known_end):
    # Of gpt-oss `<|end|>` ends a message, and `<|return|>` what it says.
    words[END_TOKEN] = made.name_of(found)
  left = ()
  if rows is not None and made.vocab_size > rows:
    less = Tokenizer(file, config=words | {IDS_BELOW: rows})
    ends = _ends_of(Tokenizer(file, config=words))
    if less.vocab_size <= rows and ends == _ends_of(less):
      words[IDS_BELOW], left = rows, less.left_out
  if not words:
    beside.unlink(missing_ok=True)
  else:
    put(beside, json.dumps(words) + '\n')
  return left


def _ends_of(made):
  """Ids that a document begins and ends with; None: it has none."""
  out = []
  for find in (made.opening, lambda: made.end_id):
    try:
      out.append(find())
    except errors.UserError:
      out.append(None)
  return out


def put(file, text):
  """Writes a file whole or not at all: several processes may write the same."""
  temporary = file.with_suffix(f'.{secrets.token_hex(8)}.tmp')
  temporary.write_text(text, encoding='utf-8')
  os.replace(temporary, file)


class Bytes(special.Special):
  """256 bytes, then `<|pad|>` 256, `<|end|>` 257, `<|bos|>` 258."""

  def __init__(self):
    self.name = 'bytes'
    self._special = {'<|pad|>': 256, '<|end|>': 257, '<|bos|>': 258}
    self.vocab_size = 259
    self.fingerprint = hashlib.sha256(b'paraxis bytes 1').hexdigest()
    self.text = ''  # of a tokenizer.json: none says this

  def encode(self, text):
    """UTF-8 bytes of `text`, list of int in [0, 256)."""
    return list(text.encode())

  def is_ordinary(self, token):
    return 0 <= token < 256

  def encode_batch(self, texts):
    return [self.encode(text) for text in texts]

  def encode_offsets(self, text):
    """As of `Tokenizer`."""
    ids, offsets, at = [], [], 0
    special = '|'.join(map(re.escape, self._special))
    for part in re.split(f'({special})', text):
      if part in self._special:
        ids.append(self._special[part])
        offsets.append((at, at + len(part)))
      else:
        for n, character in enumerate(part, at):
          ids += character.encode()
          offsets += [(n, n + 1)] * len(character.encode())
      at += len(part)
    return ids, offsets

  def decode_bytes(self, ids):
    return bytes(i for i in map(int, ids) if i < 256)

  def decode(self, ids):
    return self.decode_bytes(ids).decode('utf-8', 'replace')


class Ids(special.Special):
  """Ids of uint16 as they are, of an unknown tokenizer: without any text."""

  def __init__(self):
    self.name, self.text = 'ids', ''
    self._special = {}
    self.vocab_size = 1 << 16
    self.fingerprint = hashlib.sha256(b'paraxis ids 1').hexdigest()

  @property
  def pad_id(self):
    return 0

  def encode(self, text):
    del text
    raise errors.UserError(
      "data.tokenizer='ids' knows no text: it is for .bin files of tokens; "
      'name the tokenizer.json that made them.'
    )

  def encode_batch(self, texts):
    return [self.encode(text) for text in texts]

  def bos_id(self, domain=None):
    return self.encode(domain)

  def decode(self, ids):
    """The numbers, with spaces between them."""
    return ' '.join(str(int(i)) for i in ids)

  def decode_bytes(self, ids):
    return (self.decode(ids) + ' ').encode()


_PLAIN = {'bytes': Bytes, 'ids': Ids}


class Tokenizer(special.Special):
  """A tokenizer.json, read by the `tokenizers` library (data, never code).

  Attributes:
    left_out: texts of special tokens that the weights have no row for, as of an
      image in a model of text alone. No text has their ids.
  """

  def __init__(self, path, name=None, config=None):
    """config: of tokenizer_config.json; None: the one beside it."""
    content = pathlib.Path(path).read_bytes()
    self.name = name or str(path)
    self.fingerprint = hashlib.sha256(content).hexdigest()
    try:
      self.text = content.decode()
      self._spec = json.loads(content)
      self._tokenizer = tokenizers.Tokenizer.from_str(self.text)
    except Exception as error:  # the library raises bare Exception
      raise errors.UserError(
        f'{path} is not a tokenizer.json: {str(error).splitlines()[0]}'
      ) from error
    # Characters that spell a special token are text, not the token.
    self._tokenizer.encode_special_tokens = True
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    if config is None:
      config = stated(pathlib.Path(path).parent)
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    added = self._tokenizer.get_added_tokens_decoder()
    if type(below := config.get(IDS_BELOW)) is int:
      above = {i: t for i, t in added.items() if t.special and i >= below}
      self.left_out = tuple(t.content for t in above.values())
      added = {i: t for i, t in added.items() if i not in above}
      vocabulary = {t: i for t, i in vocabulary.items() if i not in above}
    self.vocab_size = 1 + max(vocabulary.values(), default=-1)
    self._added = {i: token.content for i, token in added.items()}
    self._special = {t.content: i for i, t in added.items() if t.special}
    self._special_ids = frozenset(self._special.values())
    self._pieces = {i: text for text, i in vocabulary.items()}
    self._bytes = {}  # of ids that have been decoded
    self._byte_level = '"ByteLevel"' in json.dumps(self._spec.get('decoder'))
    if config.get('add_bos_token') is True:
      self.first = self._special.get(stated_token(config, 'bos_token'))
    begin = config.get(BEGINS_WITH)
    named = [*self._special]  # a list: what it is compared with may be anything
    if isinstance(begin, list) and all(text in named for text in begin):
      self.prefix = tuple(self._special[text] for text in begin)
    self.last = self.first_special([stated_token(config, END_TOKEN)])
    if self.last is None:
      self.last = self.ends_with([stated_token(config, 'eos_token')])

  def begins_with(self, bos=(), adds=None) -> list[int]:
    """Ids that documents begin with, if files say so. Arguments as of `keep`.

    What the tokenizer.json itself puts in front of a text is that, but for one
    token where another file names it. Not every model that names a beginning
    was trained with it: where no file says so, a token that is called as
    beginnings are goes first.
    """
    bos, front = self.first_special(bos), self._in_front()
    named = adds and bos is not None and not front[1:]
    if front and adds is not False and not named:
      return front
    return [] if bos is None or (self._begins and not adds) else [bos]

  def _in_front(self) -> list[int]:
    """Special tokens that the file puts in front of every text."""
    encode = self._tokenizer.encode
    text = encode('a', add_special_tokens=False).ids
    ids = encode('a').ids
    starts = (i for i in range(len(ids)) if ids[i : i + len(text)] == text)
    front = ids[: next(starts, 0)]
    return front if all(i in self.special_ids for i in front) else []

  def ends_with(self, eos) -> int | None:
    """The id of eos, if documents end with it: no known name is there."""
    return self.first_special(eos) if self.known_end is None else None

  def first_special(self, given) -> int | None:
    """The first of ids and texts that is a special token; None: none is."""
    ids = (self._special.get(x, x) for x in given)
    return next((i for i in ids if i in self.special_ids), None)

  def is_ordinary(self, token):
    return token in self._pieces and token not in self._added

  def encode(self, text):
    """Ids of `text`, list of int in [0, vocab_size); no special tokens."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def encode_offsets(self, text):
    """(ids, [(start, stop) characters of each]); special tokens recognised.

    For text of templates, which write them: chat.py.
    """
    self._tokenizer.encode_special_tokens = False
    try:
      found = self._tokenizer.encode(text, add_special_tokens=False)
    finally:
      self._tokenizer.encode_special_tokens = True
    return found.ids, found.offsets

  def encode_batch(self, texts):
    """`encode` of every text, on all cores."""
    run = self._tokenizer.encode_batch_fast
    return [found.ids for found in run(list(texts), add_special_tokens=False)]

  def decode_bytes(self, ids):
    """Bytes of `ids`, special tokens skipped; concatenation is exact.

    decode_bytes(a + b) == decode_bytes(a) + decode_bytes(b), so a stream can
    be fed to an incremental UTF-8 decoder token by token. Vocabularies that
    mark a space before a word keep it before the first word too.
    """
    ids, known = [int(i) for i in ids], self._bytes
    for i in ids:
      if i not in known:
        known[i] = self._piece(i)
    return b''.join([known[i] for i in ids])

  def decode(self, ids):
    """Text of `ids`, special tokens skipped, invalid UTF-8 replaced."""
    ids = [int(i) for i in ids]
    if self._byte_level:
      return self.decode_bytes(ids).decode('utf-8', 'replace')
    return self._tokenizer.decode(ids, skip_special_tokens=True)

  def _piece(self, i):
    if i in self._special_ids or i not in self._pieces:
      return b''
    if i in self._added:
      return self._added[i].encode()
    piece = self._pieces[i]
    if self._byte_level:
      return bytes(_byte_of_character()[c] for c in piece)
    as_byte = _BYTE_TOKEN.fullmatch(piece)
    if as_byte:
      return bytes([int(as_byte[1], 16)])
    return piece.replace('\u2581', ' ').encode()


@functools.cache
def _byte_of_character():
  """The printable character that stands for each byte (GPT-2), inverted.

  Printable Latin-1 stands for itself; the other 68 bytes take the characters
  from 256 on, in order.
  """
  itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
  rest = [b for b in range(256) if b not in set(itself)]
  table = {chr(b): b for b in itself}
  table.update({chr(256 + i): b for i, b in enumerate(rest)})
  return table
