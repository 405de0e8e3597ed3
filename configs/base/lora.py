"""Fields of adapters of low rank."""

import dataclasses

from paraxis.configs.base.field import field


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters, the other parameters frozen (models/trained.py)."""

  rank: int = field(0, 'inner width of the adapters; 0: none', low=0)
  alpha: float = field(
    16.0, 'adapters add alpha / rank x their product', low=1e-9
  )
  targets: str = field(
    '',
    "matrices that get one, by patterns of their paths: 'layers/attention/*,"
    "layers/mlp/up'; empty: all of mixers and mlps",
  )
