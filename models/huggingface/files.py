"""Weights that other programs wrote: a folder of safetensors, or one GGUF file.

Both are opened as `Files`: config.json's dict, names and shapes of tensors, and
one tensor at a time, read when it is asked for. Nothing in them is executed: a
folder that holds only pickles is refused.

Source: the format of safetensors (huggingface.co/docs/safetensors), of GGUF:
models/huggingface/gguf_file.py.
"""

import collections
from collections.abc import Mapping
import hashlib
import json
import math
import pathlib
import re
from typing import Any

import numpy as np

from paraxis.configs.base import errors
from paraxis.models.text import chat
from paraxis.models.text import tokenizer as tokenizer_lib

INDEX = 'model.safetensors.index.json'
CONFIG = 'config.json'
GENERATION = 'generation_config.json'
TOKENIZER = 'tokenizer.json'
TOKENIZER_CONFIG = tokenizer_lib.STATED
TEMPLATE = 'chat_template.jinja'
# Tokenizers of older folders: byte-level BPE, WordPiece, SentencePiece.
OTHER_TOKENIZERS = (
  'vocab.json', 'merges.txt', 'vocab.txt', 'tokenizer.model', 'spiece.model',
)  # fmt: skip
PICKLES = ('.bin', '.pt', '.pth', '.ckpt', '.pkl')
# What safetensors and GGUF call types of 16 bits.
_HALVES = {'BF16': 'bfloat16', 'F16': 'float16'}
_BLOCK, _BLOCKS = 2**16, 16  # bytes of a file that are hashed, and how often
_COMPARED = 2**26  # numbers of a tensor that are compared at once


class Files:
  """Weights on disk.

  Attributes:
    path: of the folder or file.
    config: dict, as config.json has it.
    generation: dict, as generation_config.json has it; {}: there is none.
    shapes: {name: shape} of every tensor.
    licence: what the files say of it; '': nothing.
    template: the chat template; '': none.
    bos_token, eos_token: text of what their tokenizer calls so; '': nothing.
    adds_bos: whether they say that a text begins with it; None: they do not.
    quantized: {type of less than 8 bits a number: how many tensors are stored
      in it}, as the file calls it.
    half: 'bfloat16' or 'float16', if most numbers are stored in it; '': they
      are not.
  """

  path: pathlib.Path
  config: dict
  generation: Mapping[str, Any] = {}
  shapes: dict[str, tuple[int, ...]]
  licence = ''
  template = ''
  bos_token = ''
  eos_token = ''
  adds_bos: bool | None = None
  quantized: Mapping[str, int] = {}
  half = ''

  def read(self, name: str) -> np.ndarray:
    """The tensor of a name."""
    raise NotImplementedError

  def equal(self, name: str, other: str) -> bool:
    """Whether two tensors are the same numbers."""
    return np.array_equal(self.read(name), self.read(other))

  def tokenizer(self) -> str:
    """Text of a tokenizer.json; '': there is none."""
    raise NotImplementedError

  def fingerprint(self, sampled=True) -> str:
    """sha256 of the names and sizes of all files, of the config and a sample.

    Weights of one architecture have the same sizes: a few blocks of every file
    tell them apart, and all of it would be read twice. Folders within are left
    out: their size is the file system's.

    sampled: False: as runs have it that began before there were samples.
    """
    found = [self.path] if self.path.is_file() else self.path.iterdir()
    found = [p for p in found if p.is_file()]
    text = [f'{p.name} {p.stat().st_size}' for p in sorted(found)]
    text.append(json.dumps(self.config, sort_keys=True, default=str))
    made = hashlib.sha256('\n'.join(text).encode())
    for path in sorted(found) if sampled else ():
      _sample(path, made)
    return made.hexdigest()


def _sample(path, digest):
  """Hashes blocks of a file: the first, the last, and some between them."""
  last = max(path.stat().st_size - _BLOCK, 0)
  try:
    with path.open('rb') as file:
      for at in sorted({last * i // (_BLOCKS - 1) for i in range(_BLOCKS)}):
        file.seek(at)
        digest.update(file.read(_BLOCK))
  except OSError as e:
    raise errors.UserError(f'{path} does not read: {e}.') from e


class Folder(Files):
  """A folder of Hugging Face: config.json, safetensors whole or in shards.

  One shard is mapped at a time: what was read of the others is not kept.
  """

  def __init__(self, path):
    self.path, self._open = path, {}
    if not path.is_dir():
      raise errors.UserError(f'{path}: no such folder.')
    self.config = _json(path / CONFIG)
    if (path / GENERATION).is_file():
      self.generation = _json(path / GENERATION)
    self._file_of = self._files()
    shapes, numbers = {}, collections.Counter()
    for name in sorted(self._file_of, key=self._file_of.__getitem__):
      found = self._slice(name)
      shapes[name] = tuple(found.get_shape())
      numbers[found.get_dtype()] += math.prod(shapes[name])
    self.half = half(numbers)
    self.shapes = {name: shapes[name] for name in self._file_of}
    self.licence = _licence(path)
    self.template = _template(path)
    said = tokenizer_lib.stated(path)
    self.bos_token = tokenizer_lib.stated_token(said, 'bos_token')
    self.eos_token = tokenizer_lib.stated_token(said, 'eos_token')
    adds = said.get('add_bos_token')
    self.adds_bos = adds if isinstance(adds, bool) else None

  def _files(self):
    """{tensor: its file}."""
    if (self.path / INDEX).is_file():
      table = _json(self.path / INDEX).get('weight_map')
      if not isinstance(table, dict):
        raise errors.UserError(f'{self.path / INDEX} has no weight_map.')
      listed = {n: self._inside(file) for n, file in table.items()}
      for file in sorted(set(listed.values())):
        missing = [n for n, f in listed.items() if f == file]
        missing = sorted(set(missing) - set(self._shard(file).keys()))
        if missing:
          raise errors.UserError(
            f'{file} lacks {len(missing)} of the tensors that {INDEX} lists '
            f'for it, {grouped(missing)}: copy the folder again.'
          )
      return listed
    found = sorted(self.path.glob('*.safetensors'))
    if not found:
      pickles = [p.name for p in self.path.iterdir() if p.suffix in PICKLES]
      why = (
        f'only {sorted(pickles)[0]}, a pickle, which runs code when it is '
        'read; save it with save_pretrained(safe_serialization=True)'
        if pickles
        else 'no safetensors'
      )
      raise errors.UserError(f'{self.path} has {why}.')
    if len(found) > 1:
      raise errors.UserError(
        f'{self.path} has {len(found)} safetensors files and no {INDEX}: '
        'which belong together is not known.'
      )
    return dict.fromkeys(self._shard(found[0]).keys(), found[0])

  def _inside(self, name):
    """The path of a shard, which must lie in the folder."""
    text = name if isinstance(name, str) else ''
    if pathlib.PurePath(text).name != text or text in ('', '.', '..'):
      raise errors.UserError(
        f'{self.path / INDEX} names {name!r}, which is no file beside it: copy '
        'the folder again.'
      )
    return self.path / name

  def _shard(self, file) -> Any:
    import safetensors  # numpy's view of a mapped file

    if file not in self._open:
      self._open.clear()
      try:
        self._open[file] = safetensors.safe_open(str(file), 'numpy')
      except (OSError, safetensors.SafetensorError) as e:
        raise errors.UserError(f'{file} does not read: {e}.') from e
    return self._open[file]

  def _slice(self, name):
    return self._shard(self._file_of[name]).get_slice(name)

  def read(self, name):
    return self._shard(self._file_of[name]).get_tensor(name)

  def equal(self, name, other):
    rows, *rest = self.shapes[name]
    if self.shapes[other] != (rows, *rest):
      return False
    step = max(_COMPARED // max(math.prod(rest), 1), 1)
    read = lambda of, i: self._slice(of)[i : min(i + step, rows)]
    return all(
      np.array_equal(read(name, i), read(other, i))
      for i in range(0, rows, step)
    )

  def tokenizer(self):
    file = self.path / TOKENIZER
    try:
      return file.read_text(encoding='utf-8') if file.is_file() else ''
    except (OSError, ValueError) as e:
      raise errors.UserError(f'{file} does not read: {e}.') from e


def _json(path) -> dict:
  try:
    found = json.loads(path.read_text(encoding='utf-8'))
  except FileNotFoundError:
    raise errors.UserError(f'{path} does not exist.') from None
  except (OSError, ValueError) as e:
    raise errors.UserError(f'{path} does not read: {e}.') from e
  if not isinstance(found, dict):
    raise errors.UserError(f'{path} is no JSON object.')
  return found


def _licence(path):
  """Of the head of README.md, else the name of a licence file, else ''."""
  readme = path / 'README.md'
  if readme.is_file():
    head = readme.read_text(encoding='utf-8', errors='replace')[:20_000]
    found = re.match(r'---\n(?:.*\n)*?licen[cs]e: *(\S+)', head)
    if found:
      return found[1]
  named = [p.name for p in sorted(path.glob('LICEN[CS]E*'))]
  return f'see {named[0]}' if named else ''


def _template(path):
  """The chat template of a folder; '': it has none."""
  for name in (TEMPLATE, TOKENIZER_CONFIG):
    if (path / name).is_file():
      return chat.read(path / name)
  return ''


def half(numbers: collections.Counter) -> str:
  """`Files.half` of {type, as the files call it: how many numbers}."""
  return _HALVES.get(max(numbers, key=numbers.__getitem__, default=''), '')


def grouped(names) -> str:
  """Names of tensors, each of several layers once: blk.{0,2}.attn_q.weight."""
  layers: dict[str, list[str]] = {}
  for name in names:
    found = re.fullmatch(r'(.*?\.)(\d+)(\..*)', name)
    rest = f'{found[1]}{{}}{found[3]}' if found else name
    layers.setdefault(rest, []).append(found[2] if found else '')
  return ', '.join(
    name.replace('{}', of[0] if len(of) == 1 else f'{{{",".join(of)}}}', 1)
    for name, of in layers.items()
  )
