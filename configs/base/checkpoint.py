"""Fields of checkpoints on disk."""

import dataclasses

from paraxis.configs.base.field import field


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
    0, 'host memory of copies not yet written; 0: of two copies', low=0
  )
