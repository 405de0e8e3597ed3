"""A block of rows -> its tokens: the unit of work, and of resumption.

A document is stored as [bos(domain)] + encode(text) + [end]; conversations as
train/data/chat.py says, ids of a .bin file as they are. A piece on disk is
NUMBER.tokens, perhaps NUMBER.loss, and NUMBER.json, which is written last and
holds the checksums.
"""

import hashlib
import json
import os
from typing import NamedTuple

import numpy as np

from paraxis.train.data import ids as ids_lib
from paraxis.train.data import readers
from paraxis.train.data import rows as rows_lib

_DOCUMENTS, _CHARACTERS = 256, 1 << 20  # encoded at once, at most about


class Piece(NamedTuple):
  """Documents of one block.

  tokens: (N,) uint16 or uint32. lengths, n_bytes: of each document.
  names: [[domain, id, split or None, rows.Row.key]] of each.
  loss: (N,) uint8, whether each is predicted with loss; None: all are.
  """

  tokens: np.ndarray
  lengths: list
  n_bytes: list
  names: list
  loss: np.ndarray | None = None


def dtype(tokenizer):
  """The type that holds the tokenizer's ids."""
  return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32


def encode(block, tokenizer, options) -> Piece:
  """The tokens of a block. UserError: file, line and what is wrong."""
  if block.kind == 'ids':
    return _of_ids(block, tokenizer, options)
  tokens, lengths, n_bytes, names, loss = [], [], [], [], []
  kind = dtype(tokenizer)
  for rows in _chunks(readers.parse(block, options)):
    for row, ids, mask, size in _encoded(rows, tokenizer):
      tokens.append(np.asarray(ids, kind))
      loss.append(np.ones(len(ids), np.uint8) if mask is None else mask)
      lengths.append(len(ids))
      n_bytes.append(size)
      names.append([row.domain, row.id, row.split, row.key])
  joined = np.concatenate(tokens) if tokens else np.zeros(0, kind)
  masks = None
  if options.loss_on != 'all':
    masks = np.concatenate([np.zeros(0, np.uint8), *loss])
  return Piece(joined, lengths, n_bytes, names, masks)


def _encoded(rows, tokenizer):
  """(row, ids, mask of loss or None, bytes of text with loss) of each."""
  if rows[0].turns is None:
    encoded = tokenizer.encode_batch([row.text for row in rows])
    for row, ids in zip(rows, encoded, strict=True):
      ids = [*tokenizer.opening(row.domain), *ids, tokenizer.end_id]
      yield row, ids, None, len(row.text.encode())
    return
  for row in rows:
    yield row, *_conversation(row, tokenizer)


def _conversation(row, tokenizer):
  """(ids, mask, bytes with loss) of a text with chat.Turns."""
  spans, begin, end, ends = row.turns
  ids, offsets = tokenizer.encode_offsets(row.text)
  first, last = np.asarray(offsets, np.int64).reshape(-1, 2).T
  mask = np.zeros(len(ids), np.uint8)
  for start, stop in spans:
    inside = np.minimum(last, stop) > np.maximum(first, start)
    empty = (first == last) & (first >= start) & (first < stop)
    mask[inside | empty] = 1
  if begin:
    first = tokenizer.opening(row.domain)
    ids = [*first, *ids]
    mask = np.pad(mask, (len(first), 0))
  if end:
    ids, mask = [*ids, tokenizer.end_id], np.append(mask, np.uint8(ends))
  return ids, mask, sum(len(row.text[a:b].encode()) for a, b in spans)


def _chunks(rows):
  chunk, size = [], 0
  for row in rows:
    full = len(chunk) == _DOCUMENTS or size > _CHARACTERS
    if chunk and (full or (row.turns is None) != (chunk[0].turns is None)):
      yield chunk
      chunk, size = [], 0
    chunk.append(row)
    size += len(row.text)
  if chunk:
    yield chunk


def _of_ids(block, tokenizer, options):
  ids = np.frombuffer(block.data, '<u2')
  ids_lib.check(ids, tokenizer, block.source.file)
  sizes = ids_lib.sizes(tokenizer)[ids]
  ends = np.concatenate([[0], np.cumsum(sizes)])
  spans = [span for _, _, span, _ in block.rows]
  source = block.source
  tokens = np.concatenate([ids[a:b] for a, b in spans])
  return Piece(
    tokens.astype(dtype(tokenizer)),
    [b - a for a, b in spans],
    [int(ends[b] - ends[a + 1]) for a, b in spans],
    [
      [source.domain, id_, source.split, rows_lib.content_key(ids[a:b])]
      for ([id_], *_), (a, b) in zip(block.rows, spans, strict=True)
    ],
    None if options.loss_on == 'all' else np.ones(len(tokens), np.uint8),
  )


def key(block):
  """What a piece was made from, beside what the whole folder is named for."""
  source = [str(block.source.file.name), block.source.domain]
  size = [block.first, len(block.rows), len(block.data)]
  return [*source, *size, 'keys']  # since `names` has them


def write(folder, number, block, piece):
  """Writes piece `number` of the blocks."""
  body = piece.tokens.tobytes()
  (folder / f'{number:06d}.tokens').write_bytes(body)
  loss = b'' if piece.loss is None else piece.loss.tobytes()
  if loss:
    (folder / f'{number:06d}.loss').write_bytes(loss)
  index = dict(
    key=key(block),
    loss=hashlib.sha256(loss).hexdigest() if loss else '',
    sha256=hashlib.sha256(body).hexdigest(),
    lengths=piece.lengths,
    n_bytes=piece.n_bytes,
    names=piece.names,
    group=block.source.group,
  )
  text = json.dumps(index)
  seal = hashlib.sha256(text.encode()).hexdigest()
  temporary = folder / f'{number:06d}.writing'
  temporary.write_text(f'{seal}\n{text}', encoding='utf-8')
  os.replace(temporary, folder / f'{number:06d}.json')


def index(folder, number) -> dict:
  """What `write` kept beside the tokens. ValueError, OSError: not a piece."""
  text = (folder / f'{number:06d}.json').read_text(encoding='utf-8')
  seal, _, text = text.partition('\n')
  if hashlib.sha256(text.encode()).hexdigest() != seal:
    raise ValueError('does not match its checksum')
  return json.loads(text)


def is_done(folder, number, block) -> bool:
  """Whether piece `number` is there, whole, and of this block."""
  try:
    found = index(folder, number)
    if found['key'] != key(block):
      return False
    names = [('tokens', 'sha256')] + [('loss', 'loss')] * bool(found['loss'])
    each = [
      hashlib.sha256((folder / f'{number:06d}.{end}').read_bytes()).hexdigest()
      == found[key_]
      for end, key_ in names
    ]
  except (OSError, ValueError, KeyError):
    return False
  return all(each)
