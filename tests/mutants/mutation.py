"""What `make mutants` (tests/mutate.py) tries: plain data, a file for a folder.

Each mutation is one mistake that somebody could make: a sign, a term left out,
an index of the wrong thing, a sum in a narrow type. Its command is the cheapest
that must fail: a node id of pytest, or a line of `paraxis`.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
  """file: from the root; `before` stands in it once, and becomes `after`.

  breaks: what is wrong then. command: exit code 0 before, 1 after.
  """

  name: str
  file: str
  before: str
  after: str
  breaks: str
  command: str
