"""Fields of sampling."""

import dataclasses

from paraxis.configs.base.field import MOST_LENGTH
from paraxis.configs.base.field import field


@dataclasses.dataclass(frozen=True)
class Decode:
  """Sampling."""

  max_new_tokens: int = field(64, 'tokens after the prompt', low=1)
  temperature: float = field(0.7, 'softmax temperature; 0: greedy', low=0.0)
  top_k: int = field(0, 'keep the top_k most likely tokens; 0: all', low=0)
  top_p: float = field(1.0, 'keep this probability mass', low=0.0, high=1.0)
  min_p: float = field(
    0.0, 'keep tokens this likely relative to the best', low=0.0, high=1.0
  )
  seed: int = field(0, 'random seed of sampling', low=0)
  cache_length: int = field(
    1024, 'maximum of prompt and new tokens', low=1, high=MOST_LENGTH
  )
