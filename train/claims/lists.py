"""Lists to copy, reverse, sort, shuffle, or change at random, and ceilings.

A document is an operation, a list of n different items, a token that ends it,
and the answer of n tokens (the waiting lines of ParallelBench,
arXiv:2510.04767, section 4):

    copy, reverse, sort     one answer is right: its tokens do not depend on
                            each other once the list is known
    shuffle                 any order of the items is right, each as likely
    replace                 the list with one item, any, replaced by a token

Tokens that are drawn in one call do not see each other. A model that knows the
probability of every token exactly is then right with probability

    shuffle   prod over calls of  m! / (m - k)! / m^k,  k of m places drawn
              (n! / n^n at once)
    replace   f(m) = (1 - 1/m)^k f(m - k) + (k / m) (1 - 1/m)^(k - 1), f(0) = 0
              ((1 - 1/n)^(n - 1) at once)

in any order of the places: by symmetry each of m open places has every item
that is left, or the replacement, with probability 1 / m. - ln of it is the sum
of the conditional total correlations of the sets of tokens that were drawn
together, the bound of the paper's section 3, for shuffles and for one call; for
replacements in several calls, whose right answers differ in probability, it is
less than that sum.

Where calls take more tokens once fewer answers are left, the counts say how an
answer went, and the product over them is no ceiling. `chance` is of one call,
given the answer so far: over all calls that begin with an answer that can still
be right, the share that stays so is not above the mean chance, but by error, as
long as no place is taken for what was drawn there. A policy that keeps likely
draws and draws the others again (confidence of the drawn token, at temperature
1) draws from another distribution, and may be above.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from paraxis.train.claims import task as task_lib

OPERATIONS = ('copy', 'reverse', 'sort', 'shuffle', 'replace')


@dataclasses.dataclass(frozen=True)
class Lists(task_lib.Task):
  """As tasks.py has it; a document of every length is padded to the longest.

  least, most: items of a list. items: that there are. operations: of
  OPERATIONS. whole_rows: the last token of an answer is in its row too,
  and may be a mask, as while decoding: for models that predict a token at the
  one before, which else are never shown that mask.
  """

  least: int
  most: int
  items: int
  operations: tuple = OPERATIONS
  whole_rows: bool = False
  mix: tuple = ()
  guess = (0.0, 'nothing')

  @property
  def length(self):
    """T."""
    return 2 * self.most + 2 + self.whole_rows

  @property
  def end(self):
    """Token that ends a list; then the replacement, the padding, a mask."""
    return self.items + len(OPERATIONS)

  @property
  def replacement(self):
    return self.end + 1

  @property
  def padding(self):
    return self.end + 2

  @property
  def mask(self):
    return self.end + 3

  @property
  def vocabulary(self):
    return self.end + 4

  @property
  def whole(self):
    return self.most

  @property
  def about(self):
    return f'lists of {self.least} to {self.most} of {self.items} items'

  def answer(self, operation, items, rng):
    """One right answer, drawn from all of them alike."""
    if operation == 'reverse':
      return items[::-1]
    if operation == 'sort':
      return np.sort(items)
    if operation == 'shuffle':
      return rng.permutation(items)
    out = items.copy()
    if operation == 'replace':
      out[rng.integers(len(items))] = self.replacement
    return out

  def prompt(self, operation, items):
    """Ids before the answer."""
    return [self.items + OPERATIONS.index(operation), *items, self.end]

  def document(self, size, count, rng, held_out):
    """(tokens, targets, weights); targets are the document, tokens those before
    them."""
    del size, held_out
    targets = np.full((count, self.length), self.padding)
    weights = np.zeros(targets.shape)
    for row in range(count):
      operation = self.operations[rng.integers(len(self.operations))]
      n = rng.integers(self.least, self.most + 1)
      items = rng.permutation(self.items)[:n]
      begin = self.prompt(operation, items)
      full = [*begin, *self.answer(operation, items, rng)]
      targets[row, : len(full)] = full
      weights[row, len(begin) : len(full)] = 1
    tokens = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    return tokens, targets, weights


def is_right(task, operation, items, answer) -> bool:
  """Whether an answer to a list is right."""
  items, answer = list(map(int, items)), list(map(int, answer))
  if operation == 'shuffle':
    return sorted(answer) == sorted(items)
  if operation == 'replace':
    changed = [
      (a, b) for a, b in zip(items, answer, strict=True) if a != b
    ]  # fmt: skip
    return len(changed) == 1 and changed[0][1] == task.replacement
  if operation == 'reverse':
    items = items[::-1]
  return answer == (sorted(items) if operation == 'sort' else items)


def share_right(task, operation, items, answer) -> float:
  """Share of places that are as in the one right answer.

  Args:
    operation: copy, reverse or sort.
  """
  wanted = task.answer(operation, np.asarray(items), None)
  return float(np.mean(wanted == np.asarray(answer)))


def chance(task, operation, items, answer, count) -> float:
  """How likely an answer can still be right after a call.

  Args:
    answer: [token or None of every place], which can be right. count: tokens
      that the call draws, in open places.
  """
  left = answer.count(None)
  if operation == 'shuffle':
    return math.perm(left, count) / left**count
  if operation != 'replace' or task.replacement in answer:
    return 1.0
  none = (1 - 1 / left) ** count if count < left else 0.0
  return none + count / left * (1 - 1 / left) ** (count - 1)


def possible(task, operation, items, answer) -> bool:
  """Whether a right answer has these tokens; None: any."""
  if None not in answer:
    return is_right(task, operation, items, answer)
  there = [(i, x) for i, x in enumerate(answer) if x is not None]
  found = [x for _, x in there]
  if operation == 'shuffle':
    return len(set(found)) == len(found) and set(found) <= set(items)
  if operation == 'replace':
    others = [(i, x) for i, x in there if x != task.replacement]
    few = found.count(task.replacement) <= 1
    return few and all(x == items[i] for i, x in others)
  wanted = {'copy': items, 'reverse': items[::-1], 'sort': sorted(items)}
  return all(wanted[operation][i] == x for i, x in there)


def chances(task, operation, items, calls):
  """[(`chance`, whether the answer can still be right)] of each call that began
  with an answer that could be; calls: [{place: token}]."""
  answer: list[Any] = [None] * len(items)
  found: list = []
  for drawn in filter(None, calls):
    likely = chance(task, operation, items, answer, len(drawn))
    for place, token in drawn.items():
      answer[place] = int(token)
    found.append((likely, possible(task, operation, items, answer)))
    if not found[-1][1]:
      break
  return found


def ceiling(operation, counts) -> float:
  """How likely a right answer is at most, of calls that made so many tokens."""
  left = sum(counts)
  if operation == 'shuffle':
    found = 1.0
    for k in counts:
      found *= math.perm(left, k) / left**k if k else 1
      left -= k
    return found
  if operation != 'replace':
    return 1.0
  found, none = 0.0, 1.0  # right so far, and nothing replaced yet
  for k in filter(None, counts):
    found += none * k / left * (1 - 1 / left) ** (k - 1)
    none *= (1 - 1 / left) ** k
    left -= k
  return found
