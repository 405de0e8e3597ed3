"""The host's side of one row: tokens become text, and text can end the row.

A stop string is looked for in the decoded text, as it may begin and end inside
tokens. Text that may still change is held back while streaming: an unfinished
UTF-8 character, and an ending that a stop string could begin with. Cost: a
token's bytes are made once, between two steps of the device; bytes become text,
and are searched, as a whole, within one call each of the interpreter.
"""

from typing import Any, NamedTuple

from paraxis.configs.base import errors

UNFINISHED = '\ufffd'  # what decoding leaves of an incomplete character


class Hooks(NamedTuple):
  """What the host does with new tokens. on_text: called as on_text(row, piece).
  ended: called as ended(row, calls that made 0, 1, .. tokens, trace.Trace or
  None). often: look for both every few tokens, not once."""

  on_text: Any
  ended: Any
  often: bool


class Transcript:
  """Attributes: tokens, logprobs (lists), text, finish ('' while it runs);
  stops, strings that end it."""

  def __init__(self, tokenizer, ends, limit, stop=()):
    """ends: ids of tokens that end a row. limit: most new tokens."""
    self.tokens, self.logprobs, self.text, self.finish = [], [], '', ''
    self._tokenizer, self._ends, self._limit = tokenizer, ends, limit
    self.stops, self._shown, self._raw = tuple(stop), 0, b''

  def extend(self, tokens, logprobs):
    """Takes the row's next tokens; sets `finish` when they end it.

    The end token and tokens after a stop string are not kept.
    """
    before, held = len(self.tokens), self._raw
    for token, logprob in zip(tokens, logprobs, strict=True):
      if token in self._ends:
        self.finish = 'end'
        break
      self.tokens.append(int(token))
      self.logprobs.append(float(logprob))
    self._read(self.tokens[before:])
    if self.stops and self._find() >= 0:
      self._cut(before, held)
    elif not self.finish and len(self.tokens) >= self._limit:
      self.finish = 'length'

  def _read(self, tokens):
    # By bytes: as a text of its own it could lose the space it begins with.
    self._raw += self._tokenizer.decode_bytes(tokens)
    self.text = self._raw.decode('utf-8', 'replace')

  def _find(self):
    """Where the first stop string begins in the text, or -1."""
    found = [self.text.find(s) for s in self.stops]
    return min((i for i in found if i >= 0), default=-1)

  def _cut(self, before, held):
    """Keeps the fewest tokens that hold a stop string, and the text before.

    held: bytes of the first `before` tokens, which hold none.
    """
    self._raw, n = held, before
    while True:
      self._read(self.tokens[n : n + 1])
      n += 1
      if (at := self._find()) >= 0:
        break
    self.text, self.finish = self.text[:at], 'stop'
    self.tokens, self.logprobs = self.tokens[:n], self.logprobs[:n]

  def fresh(self):
    """Text not returned before that can no longer change."""
    end = len(self.text)
    if not self.finish:
      end = len(self.text.rstrip(UNFINISHED))
      end -= max((_overlap(self.text[:end], s) for s in self.stops), default=0)
    piece = self.text[self._shown : end]
    self._shown = max(self._shown, end)
    return piece


def _overlap(text, stop):
  """Length of the longest end of `text` that `stop` properly begins with."""
  for n in range(min(len(stop) - 1, len(text)), 0, -1):
    if text.endswith(stop[:n]):
      return n
  return 0


def read(seen, rows, before, hooks):
  """Gives rows their tokens from number before[row] on.

  Args:
    seen: program.Shown, on the host. rows: [Transcript, or None: nobody's].
    hooks: Hooks.

  Returns:
    ([tokens made], [(number of the token, row)] of rows whose logits were not
    finite before they ended).
  """
  bad = []
  for i, row in enumerate(rows):
    if row and not row.finish:
      end = seen.made[i]
      new = slice(before[i], end)
      if end > before[i]:
        row.extend(seen.tokens[i, new], seen.logprobs[i, new])
      if seen.broken[i] >= 0 and not row.finish:
        row.finish = 'broken'
        bad.append((int(end), i))
      if hooks.on_text and (piece := row.fresh()):
        hooks.on_text(i, piece)
      if row.finish not in ('', 'broken'):
        trace = seen.trace and seen.trace.of(i)
        hooks.ended(i, seen.lengths[i].tolist(), trace)
  return seen.made[: len(rows)].tolist(), bad


def check_sound(bad, count, what):
  """IntegrityError if `bad`, as of `read`, names any of the `count` rows."""
  if bad:
    at, number = min(bad)
    raise errors.IntegrityError(
      f'decoding: the logits of {what} {number} at step {at} are not finite '
      f'({what}s and new tokens count from 0; {len(bad)} of {count} {what}s): '
      'the parameters are damaged, or numbers overflow in model.dtype.'
    )
