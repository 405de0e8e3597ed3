"""Files of tokens, as nanoGPT writes them: .bin, uint16, without a header.

With a tokenizer named in `data.tokenizer` a document ends with its end token,
or after 65,536 ids; with 'ids' they are used as they are, in documents of 4,096
ids. Neighbouring documents share one id, so that each pair of an id and the
next one is trained on once.
"""

import struct

import numpy as np

from paraxis.configs.base import errors
from paraxis.train.data import rows

DOCUMENT = 4096  # ids of a document where no token ends one
LONGEST = 1 << 16  # ids of a document without its end token
_MAGIC = (20240520, 20240801)  # first word of such files with a header


def blocks(source, options, say):
  """Yields blocks of one kind of document each; the file is mapped."""
  del say
  file = source.file
  size = file.stat().st_size
  with open(file, 'rb') as opened:
    head = opened.read(4)
  if len(head) == 4 and struct.unpack('<i', head)[0] in _MAGIC:
    raise errors.UserError(
      f'{file}: begins with a header of 1,024 bytes: write uint16 tokens alone.'
    )
  if size % 2:
    raise errors.UserError(
      f'{file}: {size} bytes are not whole uint16 tokens (2 bytes each).'
    )
  if size < 4:
    return
  ids = np.memmap(file, '<u2', 'r')
  first, at = 1, 0
  while at < len(ids) - 1:
    chunk = ids[at : at + rows.BLOCK // 2]
    last = at + len(chunk) == len(ids)
    stops = _stops(chunk, options.end_id, last)
    found, start = [], 0
    for number, stop in enumerate(stops, first):
      found.append([[str(number)], None, [start, stop], None])
      start = stop - 1
    data = chunk[: stops[-1]].tobytes()
    at += stops[-1] - 1
    yield rows.Block(source, first, 'ids', data, found, 2 * at)
    first += len(found)


def _stops(chunk, end, last) -> list[int]:
  """Where the documents of a chunk stop; the last one is whole, or the file's.

  A document [start, stop) is followed by one from stop - 1 on.
  """
  ends = 1 + np.flatnonzero(chunk[1:] == end) if end >= 0 else np.zeros(0, int)
  step = DOCUMENT if end < 0 else LONGEST
  stops, start = [], 0
  for stop in [*(ends + 1).tolist(), len(chunk)]:
    while stop - start > step + 1:
      stops.append(start + step + 1)
      start = stops[-1] - 1
    if stop - start > 1 and (stop < len(chunk) or last or not stops):
      stops.append(stop)
      start = stop - 1
  return stops


def check(ids, tokenizer, file):
  """UserError: an id is not the tokenizer's."""
  largest = int(ids.max())
  if largest >= tokenizer.vocab_size:
    raise errors.UserError(
      f'{file} holds ids up to {largest}, tokenizer {tokenizer.name} has '
      f"{tokenizer.vocab_size}: name theirs, or data.tokenizer='ids' to use "
      'them as they are.'
    )


def sizes(tokenizer) -> np.ndarray:
  """(vocabulary,) bytes of text of each id; without text 2, as in the file."""
  if tokenizer.name == 'ids':
    return np.full(tokenizer.vocab_size, 2)
  every = range(tokenizer.vocab_size)
  return np.asarray([len(tokenizer.decode_bytes([i])) for i in every])
