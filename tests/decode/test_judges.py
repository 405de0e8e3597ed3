"""What judges keep of drafts, of logits that are given."""

import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.decode import judges
from paraxis.decode import sampling
from paraxis.decode import trees

CASES = (
  # (other tokens, p of the draft, whether it is kept). Of two others the
  # entropy is below 1: .3 exp(-entropy) is above .09.
  (2, 0.10, True),
  (2, 0.08, False),
  # Of 198 others it is about 5.2: .3 exp(-5.2) is .0016.
  (198, 0.004, True),
  (198, 0.0005, False),
)


def test_typical_acceptance_asks_less_where_more_is_open():
  """p > min(.09, .3 exp(-entropy)), as Medusa's own code has it."""
  draft, none = jnp.zeros((1, 1), jnp.int32), jnp.zeros((2, 1), jnp.uint32)
  drafts = judges.Drafts(draft, draft == 0)
  for others, p, kept in CASES:
    every = np.array([p, *np.full(others, (1 - p) / others)])
    entropy = -np.sum(every * np.log(every))
    assert (p > min(0.09, 0.3 * np.exp(-entropy))) == kept
    form, values = sampling.check(
      schema.Decode(temperature=1.0, judge='typical'), len(every)
    )
    z = jnp.tile(jnp.log(jnp.asarray(every, jnp.float32)), (1, 2, 1))
    draws = judges.Draws(form, values, *none)
    found = judges.typical(z, drafts, draws, trees.chain(1))
    assert found.n.tolist() == [int(kept)], (others, p)
