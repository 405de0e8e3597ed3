"""The arrays of one step, as the batch program makes them.

Legend: B rows of the step, T tokens of a row, A microbatches.
NumPy or JAX: this file imports neither, so that data code never starts jax.
"""

from typing import Any, NamedTuple


class Batch(NamedTuple):
  """A step's rows; a pytree. With accumulation arrays are (A, B / A, T).

  tokens:      (B, T) int32, inputs.
  targets:     (B, T) int32, the next token of the same document.
  segments:    (B, T) int32, 0 is padding, 1.. number the documents of a row.
  positions:   (B, T) int32, from 0 in each segment.
  weights:     (B, T) float32, 1 where a target exists, else 0.
  denominator: () float32, the sum of weights over the whole step: all devices,
               all processes, all microbatches.
  features:    (B, T, C) float, or None: frames (models/frames.py) at places of
               a row, zeros where it has none; C is model.features.
  draw:        () int32, or None: a key of the step, which models draw from
               (models/recurrent_depth.py).
  valid:       () float32, or None: tokens of the whole step without padding;
               None: each is a target with loss, as the denominator counts them.
  """

  tokens: Any
  targets: Any
  segments: Any
  positions: Any
  weights: Any
  denominator: Any
  features: Any = None
  draw: Any = None
  valid: Any = None

  @property
  def read(self):
    """() float32, tokens of the whole step without padding."""
    return self.denominator if self.valid is None else self.valid

  @property
  def axes(self):
    """A Batch of each array's logical axes; None where there is no array."""
    rows = (None,) * (self.tokens.ndim - 2) + ('batch', 'length')
    frames = None if self.features is None else (*rows, None)
    whole = {k: None if x is None else () for k, x in self.whole.items()}
    return Batch(*[rows] * 5, features=frames, **whole)

  @property
  def whole(self):
    """{name: scalar of the whole step, the same whatever rows are here}."""
    return dict(denominator=self.denominator, draw=self.draw, valid=self.valid)
