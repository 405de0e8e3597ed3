"""Fields of checkpoints on disk."""

import dataclasses

from paraxis.configs.base.errors import UserError
from paraxis.configs.base.field import MOST_BYTES
from paraxis.configs.base.field import field

LEAST_CHUNK = 4096  # bytes: a block of a disk, of which no part is read


def check_chunk_bytes(most):
  """UserError unless chunks of at most so many bytes are of use, or 0."""
  if most and most < LEAST_CHUNK:
    raise UserError(
      f'checkpoint.chunk_bytes={most} is below {LEAST_CHUNK}, which a disk '
      'reads anyway: give at least that, or 0, for chunks as large as shards.'
    )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Checkpoints on disk."""

  every: int = field(20, 'steps between checkpoints', low=1)
  keep: int = field(3, 'checkpoints kept', low=1)
  asynchronous: bool = field(True, 'write while training continues')
  failures: int = field(3, 'failed saves in a row that end the run', low=1)
  verify_every: int = field(
    10, 'commits between those that are read back and compared; 0: none', low=0
  )
  host_bytes: int = field(
    0,
    'host memory of copies not yet written; 0: of two copies',
    low=0,
    high=MOST_BYTES,
  )
  chunk_bytes: int = field(
    0,
    'most that a stored chunk holds, from 4096: a process on another layout '
    'reads whole chunks; 0: a shard of the process that writes',
    low=0,
    high=MOST_BYTES,
  )

  def __post_init__(self):
    check_chunk_bytes(self.chunk_bytes)
