"""What the tests of mixers share: a module's random values, and packed rows.

Legend: B rows, T tokens, D model.
"""

from flax import nnx
import numpy as np

from paraxis.models.mixers import attention


def module(kind, config, letter, spread):
  """(run(values, x, see, state=None) -> (y, state), {name: random values}).

  Args:
    kind: class of a mixer. config: schema.Model. letter: of the mixer.
    spread: standard deviation of all values, norms and biases too.
  """
  graph, state = nnx.split(
    nnx.eval_shape(lambda: kind(config, nnx.Rngs(0), letter))
  )
  flat = nnx.to_flat_state(state)
  rng = np.random.default_rng(0)
  values = {p[0]: rng.normal(0, spread, v.shape) for p, v in flat}

  def run(values, x, see, state=None):
    """state: None, a state, or 'empty': the mixer's own."""
    given = [(p, v.replace(values[p[0]])) for p, v in flat]
    own = nnx.merge(graph, nnx.from_flat_state(given))
    if state == 'empty':
      state = own.init_state(len(x), 0, x.dtype)
    rotations = attention.rotations(config, letter, see.positions, x.dtype)
    return own(x, see._replace(rotations=rotations), state)

  return run, values


def see_of(lengths, length):
  """Visibility of rows of documents of those lengths, padding behind."""
  segments = np.zeros((len(lengths), length), np.int32)
  positions = np.zeros_like(segments)
  for b, row in enumerate(lengths):
    t = 0
    for i, n in enumerate(row):
      segments[b, t : t + n], positions[b, t : t + n] = i + 1, np.arange(n)
      t += n
  return attention.Visibility(segments, positions)


def close(a, b, bound):
  """Is the largest difference within `bound` of the largest value?"""
  a, b = np.asarray(a), np.asarray(b)
  assert a.shape == b.shape and a.dtype == b.dtype == np.float64
  assert np.abs(b).max() > 0
  return np.abs(a - b).max() <= bound * np.abs(b).max()
