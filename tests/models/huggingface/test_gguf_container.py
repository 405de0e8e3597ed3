"""A damaged GGUF file is one line, whatever is wrong with it."""

import struct

import gguf
import gguf_writing as writing
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.models.huggingface import gguf_container
from paraxis.models.huggingface import source


@pytest.fixture(scope='module')
def sound(tmp_path_factory):
  """Bytes of a sound file."""
  path = tmp_path_factory.mktemp('gguf') / 'a.gguf'
  writing.write(path, 'qwen3')
  return path.read_bytes()


@pytest.fixture
def opened(tmp_path):
  """Opens bytes as a file."""

  def open_(raw):
    path = tmp_path / 'a.gguf'
    path.write_bytes(raw)
    return source.Source(path)

  return open_


def test_what_the_package_reads(tmp_path):
  """Every field and every tensor, as gguf.GGUFReader has them."""
  path = tmp_path / 'a.gguf'
  some = dict(
    a__number=7, a__text='früh', a__list=[1, 2, 3], a__words=['x', 'yé'],
    a__real=0.5,
  )  # fmt: skip
  writing.write(path, 'gemma3', **some)
  found, theirs = gguf_container.Container(path), gguf.GGUFReader(path)
  own = {k: f for k, f in theirs.fields.items() if not k.startswith('GGUF.')}
  assert set(found.fields) == set(own)
  for key, field in own.items():
    assert found.fields[key] == field.contents(), key
  assert list(found.tensors) == [t.name for t in theirs.tensors]
  for t in theirs.tensors:
    x = found.read(found.tensors[t.name])
    np.testing.assert_array_equal(x, np.asarray(t.data).reshape(x.shape))


def test_cut_short(sound, opened):
  """Wherever it ends: both sizes, and what would have stood there."""
  rng = np.random.default_rng(0)
  cuts = {0, 3, 4, 7, 8, 20, *range(24, 400, 7)}
  cuts |= {int(n) for n in rng.integers(400, len(sound), 40)}
  for n in sorted(cuts | {len(sound) - 1}):
    words = ['cut short', f'{n:,}'] if n > 3 else ['not a GGUF file']
    with support.refused('a.gguf', *words):
      opened(sound[:n])
  opened(sound)


def test_bytes_turned_around(sound, opened):
  """One line or a model: nothing else is raised, whatever they say."""
  rng, refused = np.random.default_rng(0), 0
  for _ in range(300):
    raw = bytearray(sound)
    for at in rng.integers(0, 3000, 1 + rng.integers(3)):
      raw[at] = rng.integers(256)
    try:
      opened(bytes(raw)).files.tokenizer()
    except errors.UserError as error:
      assert '\n' not in str(error)
      refused += 1
  assert 100 < refused < 300


def header(fields=(), tensors=(), version=3):
  """A file's head by hand. fields, tensors: their bytes."""
  head = struct.pack('<4sIQQ', b'GGUF', version, len(tensors), len(fields))
  return head + b''.join(fields) + b''.join(tensors)


def text(word):
  return struct.pack('<Q', len(word)) + word


def tensor(name, sides, kind, offset=0):
  return text(name) + struct.pack(
    f'<I{len(sides)}QIQ', len(sides), *sides, kind, offset
  )


ONE = tensor(b'a', [4], 0)
SEVEN = text(b'k') + struct.pack('<II', 4, 7)
BIG = 2**62
HEADS = {
  'version': (header(version=1), ['version 1', '2 and 3']),
  'other order of bytes': (header(version=3 << 24), ['little-endian']),
  'too many fields': (struct.pack('<4sIQQ', b'GGUF', 3, 0, BIG), ['cut short']),
  'too many tensors': (
    struct.pack('<4sIQQ', b'GGUF', 3, BIG, 0), ['cut short'],
  ),
  'long text': (
    header([struct.pack('<Q', BIG)]), ['cut short', 'the name of field 0'],
  ),
  'long list': (
    header([text(b'k') + struct.pack('<IIQ', 9, 10, BIG)]), ['cut short', 'k'],
  ),
  'list of lists': (
    header([text(b'k') + struct.pack('<IIQ', 9, 9, 1)]), ['list of lists'],
  ),
  'no kind': (header([text(b'k') + struct.pack('<I', 77)]), ['kind 77']),
  'no name': (
    header([text(b'a\nb')]), ['the name of field 0', "'a\\nb'"],
  ),
  'no text': (
    header([text(b'k') + struct.pack('<I', 8) + text(b'\xff')]), ['no text'],
  ),
  'field twice': (header([SEVEN] * 2), ['field k', 'twice']),
  'tensor twice': (header([], [ONE] * 2), ['tensor a', 'twice']),
  'dimensions': (header([], [tensor(b'a', [1] * 9, 0)]), ['9 dimensions']),
  'alignment': (
    header([text(b'general.alignment') + struct.pack('<II', 4, 0)], [ONE]),
    ['general.alignment is 0'],
  ),
  'beyond the end': (
    header([], [tensor(b'a', [4], 0, 2**50)]), ['cut short', 'a first'],
  ),
  'large': (header([], [tensor(b'a', [BIG, BIG], 0)]), ['cut short']),
  'a type that is not read': (
    header([], [ONE, tensor(b'b.weight', [256], 16)]),
    ['b.weight', 'IQ2_XXS (16)', 'of 2 tensors 1', 'Q4_K, Q5_K, Q6_K'],
  ),
  'a type that nobody knows': (
    header([], [tensor(b'b.weight', [256], 999)]), ['unknown (999)'],
  ),
  'no whole block': (
    header([], [tensor(b'b.weight', [300, 2], 12)]),
    ['b.weight', '300', '256', 'Q4_K'],
  ),
}  # fmt: skip


@pytest.mark.parametrize('what', HEADS)
def test_one_line_each(opened, what):
  raw, words = HEADS[what]
  with support.refused('a.gguf', *words):
    opened(raw)


def test_no_such_file(tmp_path):
  with support.refused('none.gguf', 'not a GGUF file'):
    source.Source(tmp_path / 'none.gguf')
