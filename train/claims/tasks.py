"""Tasks of synthetic rows, drawn from a seed without text, for claims to train.

    recall   multi-query associative recall (arXiv:2312.04927, section 3) binds
             keys to values, then asks for each key once, in another order; a
             phone book (arXiv:2406.07887, section 4) has names of two words and
             numbers of two digits, some names kept from training:
                 k1 v1 k2 v2 ... kN vN  |  k5 v5 k2 v2 ...
    parity   bits; each asks whether the ones so far are odd in number. One bit
             of state is enough, if it can be flipped (arXiv:2411.12537)
    hops     the k-hop induction heads of arXiv:2402.09268, section 4: each
             token asks for the token that follows its last occurrence, whose
             last occurrence is followed by ..., k times

    words    a text of words, some of which are misspelled, then the text with
             all words right (as error correction has it, arXiv:2205.10350)
    lists    a list, then the list copied, sorted, shuffled, .. (lists.py)
    addition two numbers, then their sum (sums.py)
    picture  pixels row by row: rectangles of one colour each, in front of each
             other, with some pixels of any colour

Only answers count in the loss. Training may mix documents of several lengths,
each for as many rows and several of the short ones packed into a row; a
held-out row is one document.

A task is a frozen dataclass with

    length, vocabulary      T, and the tokens that may occur
    mix, whole              sizes of documents in training, and of a held-out
                            one
    document(size, count, rng, held_out) -> (tokens, targets, weights), each
                            (count, tokens of a document)
    right(hit_BT, batch)    (n,) shares of answers that are right; the first one
                            is what is compared, `also` names the others
    guess, about            a share that needs no memory, texts for a report

Legend: B rows, T tokens, N bindings of a row, W words of a name, V of a value.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from paraxis.models import batch as batch_lib
from paraxis.train.claims import labels
from paraxis.train.claims import lists
from paraxis.train.claims import sums
from paraxis.train.claims import task as task_lib


@dataclasses.dataclass(frozen=True)
class Recall(task_lib.Task):
  """`pairs` bindings, each asked for once.

  words: of a name; word i is one of `choices` tokens of its own. digits: of a
  value, likewise. unseen: one name in so many is kept from training; 0: none.
  mix: bindings of a document in training. Without short documents attention
  takes thousands of steps to begin.
  """

  pairs: int
  words: int
  digits: int
  choices: int
  values: int
  unseen: int = 0
  mix: tuple = ()

  @property
  def length(self):
    """T."""
    return 2 * self.pairs * (self.words + self.digits)

  @property
  def vocabulary(self):
    """Tokens that may occur."""
    return self.words * self.choices + self.digits * self.values

  @property
  def whole(self):
    """Bindings of a held-out row."""
    return self.pairs

  @property
  def guess(self):
    """(share of answers right, who has it)."""
    return 1 / self.pairs, 'one of the values of the row'

  @property
  def about(self):
    """What is asked, as a text."""
    return (
      f'on new rows of {self.pairs} bindings, chance '
      f'{self.values**-self.digits:.1%}'
    )

  def names(self, held_out):
    """(names, W) tokens, of training or kept from it."""
    grid = np.indices((self.choices,) * self.words).reshape(self.words, -1).T
    if self.unseen:
      grid = grid[(grid.sum(1) % self.unseen == 0) == held_out]
    return grid + self.choices * np.arange(self.words)

  def document(self, n, count, rng, held_out):
    """(tokens, targets, weights) of n bindings."""
    names, wide = self.names(held_out), self.words + self.digits
    order = np.argsort(rng.random((count, len(names))), 1)[:, :n]
    first = self.words * self.choices + self.values * np.arange(self.digits)
    values = first + rng.integers(0, self.values, (count, n, self.digits))
    bound = np.concatenate([names[order], values], 2)
    again = np.argsort(rng.random((count, n)), 1)
    asked = np.take_along_axis(bound, again[..., None], 1)
    tokens = np.concatenate([bound, asked], 1).reshape(count, -1)
    weights = np.zeros((count, 2, n, wide))
    weights[:, 1, :, self.words - 1 : -1] = 1  # an answer is the next token
    return tokens, np.roll(tokens, -1, 1), weights.reshape(count, -1)

  def right(self, hit_BT, batch):
    """(1,) share of the answers whose every digit is right."""
    n, wide = self.pairs, self.words + self.digits
    asked = hit_BT.reshape(-1, 2, n, wide)[:, 1, :, self.words - 1 : -1]
    return asked.all(-1).mean()[None]


@dataclasses.dataclass(frozen=True)
class Parity(task_lib.Task):
  """Tokens 0 and 1; answers 2: even so far, 3: odd.

  length: bits of a held-out row, more than those of `mix`, in training.
  """

  length: int
  mix: tuple
  vocabulary: ClassVar[int] = 4
  guess: ClassVar[tuple] = (0.5, 'chance')

  @property
  def also(self):
    """Names of further shares."""
    return (f'up to {max(self.mix)} bits, the longest in training',)

  @property
  def about(self):
    """What is asked, as a text."""
    return f'after {max(self.mix) + 1} to {self.length} bits, chance 50%'

  def document(self, n, count, rng, held_out):
    """(tokens, targets, weights) of n bits."""
    del held_out
    bits = rng.integers(0, 2, (count, n))
    return bits, 2 + bits.cumsum(1) % 2, np.ones((count, n))

  def right(self, hit_BT, batch):
    """(2,) shares: after more bits than in training, and up to those."""
    far = batch.positions >= max(self.mix)
    return jnp.stack([task_lib.share(hit_BT, part) for part in (far, ~far)])


@dataclasses.dataclass(frozen=True)
class Hops(task_lib.Task):
  """`symbols` tokens; the answer s is the token symbols + s.

  A token without so many earlier occurrences is not asked. mix: tokens of a
  document in training.
  """

  length: int
  symbols: int
  hops: int
  mix: tuple = ()

  @property
  def vocabulary(self):
    """Tokens that may occur, and answers."""
    return 2 * self.symbols

  @property
  def guess(self):
    """(share of answers right, who has it)."""
    return 1 / self.symbols, 'chance'

  @property
  def about(self):
    """What is asked, as a text."""
    return (
      f'{self.hops} hops back in new rows of {self.length} tokens, chance '
      f'{self.guess[0]:.1%}'
    )

  def document(self, n, count, rng, held_out):
    """(tokens, targets, weights) of n tokens."""
    del held_out
    tokens = rng.integers(0, self.symbols, (count, n))
    row = np.arange(count)
    # after[b, s]: where the token after the last occurrence of s is; -1: none.
    after = np.full((count, self.symbols), -1)
    once, at = np.full((count, n), -1), np.tile(np.arange(n), (count, 1))
    for t in range(n):
      if t:
        after[row, tokens[:, t - 1]] = t
      once[:, t] = after[row, tokens[:, t]]
    for _ in range(self.hops):
      at = np.where(at < 0, -1, np.take_along_axis(once, at, 1))
    found = np.take_along_axis(tokens, at, 1)  # of -1: any, it is not asked
    return tokens, self.symbols + found, at >= 0


@dataclasses.dataclass(frozen=True)
class Words(task_lib.Task):
  """`count` words: word w, misspelled `words` + w; then BEGIN and END of the
  source. A document is BEGIN, source, END, the words as they should be.

  noise: share of words that are misspelled; in training it is drawn for every
  document, of [0, 1]. mix: words of a document in training.
  """

  count: int
  words: int
  noise: float
  mix: tuple = ()
  guess: ClassVar[tuple] = (0.0, 'none')

  @property
  def length(self):
    """T."""
    return 2 * self.count + 2

  @property
  def vocabulary(self):
    """Words, misspelled ones, BEGIN, END."""
    return 2 * self.words + 2

  @property
  def about(self):
    """What is asked, as a text."""
    return f'words of new texts of {self.count}'

  def document(self, n, count, rng, held_out):
    """(tokens, targets, weights) of n tokens."""
    right = rng.integers(0, self.words, (count, (n - 2) // 2))
    share = self.noise if held_out else rng.random((count, 1))
    source = right + self.words * (rng.random(right.shape) < share)
    begin = np.full((count, 1), 2 * self.words)
    tokens = np.concatenate([begin, source, begin + 1, right], 1)
    weights = np.arange(n) > right.shape[1]
    weights = np.tile(weights & (np.arange(n) < n - 1), (count, 1))
    return tokens, np.roll(tokens, -1, 1), weights


@dataclasses.dataclass(frozen=True)
class Picture(task_lib.Task):
  """`side` x `side` pixels of `colours`, after the token `colours`: BEGIN.

  shapes: rectangles, at most. noise: share of pixels of any colour.
  """

  side: int
  colours: int
  shapes: int
  noise: float
  mix: tuple = ()
  guess: ClassVar[tuple] = (0.25, 'chance')

  @property
  def length(self):
    """T."""
    return self.side**2

  @property
  def vocabulary(self):
    """Colours, BEGIN."""
    return self.colours + 1

  @property
  def about(self):
    """What is asked, as a text."""
    return f'pixels of new pictures of {self.side} x {self.side}'

  def document(self, n, count, rng, held_out):
    """(tokens, targets, weights) of n tokens."""
    del held_out
    at = np.arange(self.side)
    pixels = rng.integers(0, self.colours, (count, 1, 1))
    pixels = pixels + np.zeros((self.side, self.side), int)
    for _ in range(self.shapes):
      edges = np.sort(rng.integers(0, self.side + 1, (count, 2, 2)), 2)
      inside = (at >= edges[..., :1]) & (at < edges[..., 1:])
      inside = inside[:, 0, :, None] & inside[:, 1, None, :]
      colour = rng.integers(0, self.colours, (count, 1, 1))
      pixels = np.where(inside, colour, pixels)
    other = rng.integers(0, self.colours, pixels.shape)
    pixels = np.where(rng.random(pixels.shape) < self.noise, other, pixels)
    pixels = pixels.reshape(count, n)
    begin = np.full((count, 1), self.colours)
    tokens = np.concatenate([begin, pixels[:, :-1]], 1)
    return tokens, pixels, np.ones((count, n))


KINDS = {
  'recall': Recall, 'parity': Parity, 'hops': Hops, 'words': Words,
  'picture': Picture, 'lists': lists.Lists, 'addition': sums.Addition,
  'labels': labels.Labels,
}  # fmt: skip


def make(kind: str = 'recall', **fields) -> Any:
  """A task; fields: of its class."""
  return KINDS[kind](**fields)


def draw(task, rows, seed, held_out=False):
  """batch.Batch (B, T) of new rows, in NumPy, a pure function of the seed."""
  rng = np.random.default_rng([seed, held_out])
  sizes = (task.whole,) if held_out else task.mix or (task.whole,)
  parts = [_packed(task, rows // len(sizes), n, rng, held_out) for n in sizes]
  tokens, targets, segments, positions, weights = map(
    np.concatenate, zip(*parts, strict=True)
  )
  return batch_lib.Batch(
    tokens, targets, segments, positions, weights, np.float32(weights.sum())
  )


def _packed(task, rows, size, rng, held_out):
  """(tokens, targets, segments, positions, weights) of rows of documents."""
  each = task.whole // size
  tokens, targets, weights = task.document(size, rows * each, rng, held_out)
  length, at = tokens.shape[1], np.arange(task.length)
  ints = lambda x: np.reshape(x, (rows, -1)).astype(np.int32)
  segments = np.tile(at // length + 1, (rows, 1))
  if hasattr(task, 'padding'):
    ids = tokens if task.whole_rows else targets
    segments = np.where(ints(ids) == task.padding, 0, segments)
  return (
    ints(tokens),
    ints(targets),
    ints(segments),
    ints(np.tile(at % length, rows)),
    weights.reshape(rows, -1).astype(np.float32),
  )
