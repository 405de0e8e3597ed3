"""The container GGUF: fields, and where every tensor lies.

    'GGUF', version, number of tensors, number of fields
    fields    key, kind, value
    tensors   name, sides (the last one first), type, offset in the data
    data      from the next multiple of general.alignment on

The file is mapped, not read. Every length in it is compared with what is left
before anything is made of it: a file that is cut short, or says what cannot
be, is one line.

Source: the specification in github.com/ggml-org/ggml, docs/gguf.md; versions 2
and 3, little-endian.
"""

import math
import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np

from paraxis.configs.base import errors
from paraxis.models.huggingface import gguf_types

MAGIC = b'GGUF'
VERSIONS = (2, 3)
ALIGNMENT = 32  # of a file that does not say
_DIMENSIONS = 4
_LONGEST = 256  # characters of a name
# Kinds of values, by their numbers: what struct and numpy call them.
_NUMBERS = {
  0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?',
  10: 'Q', 11: 'q', 12: 'd',
}  # fmt: skip
_TEXT, _ARRAY = 8, 9


class Tensor(NamedTuple):
  """shape: rows first, as numpy has it. at: byte of the file."""

  name: str
  shape: tuple[int, ...]
  form: gguf_types.Form
  at: int

  @property
  def size(self) -> int:
    """Bytes in the file."""
    return math.prod(self.shape) // self.form.values * self.form.size


class Container:
  """A GGUF file.

  Attributes:
    fields: {key: number, bool, str or list of such}.
    tensors: {name: Tensor}.

  Raises:
    errors.UserError: no such file, no GGUF file, one that is cut short, or a
      tensor of a type that is not read.
  """

  def __init__(self, path: pathlib.Path):
    self.path, self._at = path, 0
    try:
      self._raw = np.memmap(path, np.uint8, 'r').view(np.ndarray)
    except (OSError, ValueError) as e:
      raise errors.UserError(f'{path} is not a GGUF file: {e}.') from e
    if bytes(self._raw[:4]) != MAGIC:
      raise errors.UserError(f'{path} is not a GGUF file: it begins otherwise.')
    self._take(4, 'its first word')
    version = self._number('I', 'its version')
    if version not in VERSIONS:
      raise errors.UserError(
        f'{path} is GGUF of version {version}; read are 2 and 3, little-endian.'
      )
    tensors = self._number('Q', 'the number of tensors')
    fields = self._number('Q', 'the number of fields')
    self.fields: dict[str, Any] = {}
    for i in range(fields):
      key = self._name(f'the name of field {i} of {fields}')
      self._once(key, self.fields, 'field')
      self.fields[key] = self._value(self._number('I', key), key)
    self.tensors = self._tensors(tensors)
    self._check_end()

  def read(self, tensor: Tensor) -> np.ndarray:
    """Its values in float32."""
    raw = self._raw[tensor.at : tensor.at + tensor.size]
    return tensor.form.dequantize(raw).reshape(tensor.shape)

  def _take(self, count, what):
    """The next `count` bytes."""
    end = self._at + count
    if end > len(self._raw):
      raise errors.UserError(
        f'{self.path} is cut short: {what} would end at byte {end:,}, and the '
        f'file has {len(self._raw):,}. Copy it again.'
      )
    found = self._raw[self._at : end]
    self._at = end
    return found

  def _number(self, kind, what):
    raw = self._take(struct.calcsize(f'<{kind}'), what)
    return struct.unpack(f'<{kind}', bytes(raw))[0]

  def _text(self, what):
    raw = self._take(self._number('Q', what), what)
    try:
      return bytes(raw).decode()
    except UnicodeDecodeError:
      raise errors.UserError(
        f'{self.path} is damaged: {what} is no text.'
      ) from None

  def _name(self, what):
    found = self._text(what)
    if not found.isprintable() or len(found) > _LONGEST:
      raise errors.UserError(
        f'{self.path} is damaged: {what} is {found[:20]!r}.'
      )
    return found

  def _value(self, kind, key):
    if kind in _NUMBERS:
      return self._number(_NUMBERS[kind], key)
    if kind == _TEXT:
      return self._text(key)
    if kind != _ARRAY:
      raise errors.UserError(
        f'{self.path} is damaged: field {key} is of kind {kind}.'
      )
    inner, count = self._number('I', key), self._number('Q', key)
    if inner in _NUMBERS:
      dtype = np.dtype(_NUMBERS[inner]).newbyteorder('<')
      return self._take(count * dtype.itemsize, key).view(dtype).tolist()
    if inner == _ARRAY:
      raise errors.UserError(
        f'{self.path}: field {key} is a list of lists, which is not read.'
      )
    return [self._value(inner, key) for _ in range(count)]

  def _tensors(self, count):
    """{name: Tensor}, their places counted from the beginning of the file."""
    heads, names = [], set()
    for i in range(count):
      name = self._name(f'the name of tensor {i} of {count}')
      self._once(name, names, 'tensor')
      names.add(name)
      sides = self._number('I', name)
      if not 1 <= sides <= _DIMENSIONS:
        raise errors.UserError(
          f'{self.path} is damaged: tensor {name} has {sides} dimensions.'
        )
      shape = [self._number('Q', name) for _ in range(sides)]
      kind, offset = self._number('I', name), self._number('Q', name)
      heads.append((name, tuple(reversed(shape)), kind, offset))
    step = self.fields.get('general.alignment', ALIGNMENT)
    if type(step) is not int or step < 1:
      raise errors.UserError(
        f'{self.path} is damaged: general.alignment is {step!r}.'
      )
    data = -(-self._at // step) * step
    self._check_types(heads)
    return {
      name: Tensor(name, shape, gguf_types.FORMS[kind], data + offset)
      for name, shape, kind, offset in heads
    }

  def _once(self, name, seen, what):
    if name in seen:
      raise errors.UserError(
        f'{self.path} is damaged: it has {what} {name} twice.'
      )

  def _check_types(self, heads):
    """UserError: types that are not read, or rows that are no whole blocks."""
    forms = gguf_types.FORMS
    other = [head for head in heads if head[2] not in forms]
    if other:
      name, _, kind, _ = other[0]
      word = gguf_types.UNREAD.get(kind, 'unknown')
      raise errors.UserError(
        f'{self.path}: {name} is of type {word} ({kind}), and of {len(heads)} '
        f'tensors {len(other)} are of types that are not read; read are '
        f'{", ".join(form.name for form in forms.values())}.'
      )
    for name, shape, kind, _ in heads:
      if shape[-1] % forms[kind].values:
        raise errors.UserError(
          f'{self.path} is damaged: {name} has rows of {shape[-1]}, no '
          f'multiple of the {forms[kind].values} of a block of '
          f'{forms[kind].name}.'
        )

  def _check_end(self):
    """UserError: tensors beyond the end of the file."""
    short = [t for t in self.tensors.values() if t.at + t.size > len(self._raw)]
    if short:
      end = max(t.at + t.size for t in short)
      raise errors.UserError(
        f'{self.path} is cut short: its tensors end at byte {end:,}, and the '
        f'file has {len(self._raw):,}; {len(short)} of {len(self.tensors)} are '
        f'not whole, {min(short, key=lambda t: t.at).name} first. Copy it '
        'again.'
      )
