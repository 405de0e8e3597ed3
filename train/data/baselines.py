"""What general compressors make of the held-out text, in bits per byte.

bits per byte = 8 * compressed bytes / text bytes, of the held-out documents of
all domains (sorted by name) one after the other, a newline after each.
`xz_given_training` = 8 * (xz(training + held) - xz(training)) / held: the
honest, stronger baseline, since a model has seen the training text too (gzip
forgets after 32 kB). The newlines are in the text here; a model's bits per byte
divides by the text alone and pays for the end-of-document token as well.
Cost: about 2 CPU-seconds for the fixture, nearly all of it xz.
"""

import gzip
import lzma
from typing import NamedTuple

from paraxis.configs.base import errors
from paraxis.train.data import corpus
from paraxis.train.data import rows


class Baselines(NamedTuple):
  """Bits per byte; `gzip_by_domain` maps domain -> bits per byte."""

  n_bytes: int
  gzip: float
  xz: float
  xz_given_training: float
  gzip_by_domain: dict


def text_baselines(
  path='fixture', held_out_fraction=0.1, xz=True, text_key='text'
):
  """gzip -9 and xz -9e on the held-out text of `path`.

  Args:
    path: as config.data.path.
    held_out_fraction: as config.data.held_out_fraction.
    xz: also run xz (slow on large text: nan when False).
    text_key: as config.data.text_key.

  Returns:
    Baselines.

  Raises:
    UserError: as `corpus.documents`, or nothing is held out.
  """
  training, held = {}, {}
  options = rows.Options(text_key)
  for document in corpus.documents(path, held_out_fraction, options):
    if document.held or xz:
      part = held if document.held else training
      part.setdefault(document.domain, []).append(document.text + '\n')
  if not held:
    raise errors.UserError(f'data.path={path!r}: 0 held-out documents.')
  text = {domain: ''.join(parts).encode() for domain, parts in held.items()}
  whole = b''.join(text[domain] for domain in sorted(text))
  seen = ''.join(t for d in sorted(training) for t in training[d]).encode()
  extra = alone = float('nan')
  if xz:
    alone = 8 * _xz(whole) / len(whole)
    extra = 8 * (_xz(seen + whole) - _xz(seen)) / len(whole)
  return Baselines(
    n_bytes=len(whole),
    gzip=8 * _gzip(whole) / len(whole),
    xz=alone,
    xz_given_training=extra,
    gzip_by_domain={d: 8 * _gzip(text[d]) / len(text[d]) for d in sorted(text)},
  )


def _gzip(data):
  return len(gzip.compress(data, 9, mtime=0))


def _xz(data):
  return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
