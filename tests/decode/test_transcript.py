"""Stop strings, streaming and unfinished characters of one row."""

import pytest

from paraxis.decode import transcript
from paraxis.models.text import tokenizer

TEXT = 'a né–b. STOP here'


def run(chunks, stop=(), limit=99):
  """Feeds chunks of ids; -> (row, pieces that were streamed)."""
  row = transcript.Transcript(tokenizer.Bytes(), (257,), limit, stop)
  pieces = []
  for chunk in chunks:
    if not row.finish:
      row.extend(chunk, [-1.0] * len(chunk))
      pieces.append(row.fresh())
  return row, pieces


@pytest.mark.parametrize('size', [1, 2, 5, 100])
@pytest.mark.parametrize(
  'stop, kept, finish',
  [
    ((), TEXT, 'end'),
    (('STOP',), 'a né–b. ', 'stop'),
    (('zzz', '.', 'b'), 'a né–', 'stop'),
    (('STOP it',), TEXT, 'end'),
  ],
)
def test_any_chunks_give_the_same_text(size, stop, kept, finish):
  ids = [*TEXT.encode(), 257, 65]
  chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
  row, pieces = run(chunks, stop)
  assert (row.text, row.finish, ''.join(pieces)) == (kept, finish, kept)
  assert len(row.tokens) == len(row.logprobs)
  # The fewest tokens that hold the stop string, or all before the end token.
  decoded = tokenizer.Bytes().decode(row.tokens)
  if finish == 'stop':
    assert any(decoded.endswith(s) for s in stop)
  else:
    assert decoded == kept


@pytest.mark.parametrize('stop', [(), ('zzz',), ('STOP',)])
def test_a_token_is_decoded_once(monkeypatch, stop):
  read = []
  whole = tokenizer.Bytes.decode_bytes
  monkeypatch.setattr(
    tokenizer.Bytes, 'decode_bytes',
    lambda self, ids: read.extend(ids) or whole(self, ids),
  )  # fmt: skip
  ids = [*TEXT.encode(), 257]
  run([[i] for i in ids], stop)
  end = TEXT.encode().find(b'STOP') + 4 if stop == ('STOP',) else len(ids) - 1
  # The token that completes a stop string is cut off and read again.
  assert read == ids[:end] + ids[end - 1 : end] * (stop == ('STOP',))


def test_what_may_change_is_held_back():
  row, pieces = run([b'ab\xc3', b'\xa9S', b'TO', b'x'], ('STOP',))
  assert pieces == ['ab', 'é', '', 'STOx'] and not row.finish


def test_limit():
  row, pieces = run([b'ab\xc3'], limit=3)
  assert row.finish == 'length' and pieces == ['ab\ufffd']
