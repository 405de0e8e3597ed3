"""Every model_type: rows of its config.json, and names of its tensors."""

import difflib
from typing import Any

from paraxis.configs.base import errors
from paraxis.models.huggingface.families import absent
from paraxis.models.huggingface.families import dense
from paraxis.models.huggingface.families import dense_kin
from paraxis.models.huggingface.families import expert
from paraxis.models.huggingface.families import expert_kin
from paraxis.models.huggingface.families import gpt
from paraxis.models.huggingface.families import hybrid
from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import latent
from paraxis.models.huggingface.families import masked
from paraxis.models.huggingface.families import particular
from paraxis.models.huggingface.families import recurrent
from paraxis.models.huggingface.families import recurrent_kin
from paraxis.models.huggingface.families import zamba

# The plainest first: config.from_model takes the first that fits.
FAMILIES: dict[str, kin.Family] = {}
for _file in (
  dense, gpt, dense_kin, particular, expert, expert_kin, latent, recurrent,
  recurrent_kin, hybrid, zamba, masked,
):  # fmt: skip
  FAMILIES |= _file.FAMILIES


def find(model_type: Any) -> kin.Family:
  """Of a model_type; UserError with its reason, and the nearest names."""
  if not isinstance(model_type, str):
    raise errors.UserError(
      f'config.json: model_type={model_type!r} is not the name of a family.'
    )
  if model_type in FAMILIES:
    return FAMILIES[model_type]
  close = difflib.get_close_matches(model_type, FAMILIES, 3, 0.4)
  hint = f' Near it: {", ".join(close)}.' if close else ''
  why = absent.REASONS.get(model_type, '')
  raise errors.UserError(
    f'config.json: model_type={model_type!r} is not one of the '
    f'{len(FAMILIES)} known here{why and f": {why}"}.{hint}'
  )
