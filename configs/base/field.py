"""How a field of the configuration is declared."""

import dataclasses


def field(default, doc, choices=None, low=None, high=None):
  """A dataclass field with its documentation and its valid values."""
  return dataclasses.field(
    default=default,
    metadata=dict(doc=doc, choices=choices, low=low, high=high),
  )
