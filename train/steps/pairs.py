"""Replicas exchange by twos: no message is of all of them.

NoLoCo (arXiv:2506.10911): every replica i has an anchor phi_i and a momentum of
its own. After a period it meets one other, j, drawn anew for every exchange:

    D = mean of (phi - theta) over the two
    m_i <- momentum m_i + D + (pull / rate) (phi_i - mean of phi over the two)
    phi_i <- phi_i - rate m_i;    theta_i <- phi_i

The last term of m makes anchors approach; over all replicas it sums to 0, so
that their mean moves as the one anchor of heavy-ball DiLoCo does (as long as no
momentum is clipped). With outer.nesterov phi moves by what outer.py says.

Both means are sums of what a replica has and of one array of the other,

    (phi_j - theta_j) - (pull / rate) phi_j,

so that a message is as large as the parameters, not twice. Who meets whom is
drawn, by the seed and the step, from matchings of a round-robin tournament: R -
1 of them for an even number of replicas; of an odd one R, and one replica sits
out, which moves by what it found alone.

Legend: R replicas.
"""

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.train.steps import replicas

MOST = 16  # matchings that a program has, whatever R: each is a branch of it


def matchings(n: int) -> np.ndarray:
  """(K, n) rounds of a tournament: [k, i] is whom replica i meets in round k.

  In all rounds together everyone meets every other once; K <= MOST of them are
  returned. Of an odd n one meets itself in each: it sits out.
  """
  places = n + n % 2
  rounds = min(places - 1, MOST)
  other = np.empty((rounds, places), int)
  for k in range(rounds):
    ring = np.roll(np.arange(places - 1), -k)
    circle = np.concatenate([[places - 1], ring])
    other[k, circle] = circle[::-1]
  other = other[:, :n]
  return np.where(other < n, other, np.arange(n))


def drawn(seed: int, step, n: int):
  """() int32: which of `matchings` is of a step."""
  key = jax.random.fold_in(jax.random.key(seed), step)
  return jax.random.randint(key, (), 0, len(matchings(n)))


def gap(plan, params, anchor, step):
  """What moves the anchor of a replica: {path: array} of a fragment.

  Args:
    plan: outer.Plan. params, anchor: {path: shard} of this replica.
    step: () int32, steps that are done.
  """
  outer, n = plan.outer, plan.replicas
  pull = outer.pull / outer.rate if outer.pull else 0
  own = jax.tree.map(jnp.subtract, anchor, params)
  message = jax.tree.map(lambda d, a: d - pull * a, own, anchor)

  def sends(other):
    to = list(enumerate(other.tolist()))
    return lambda tree: jax.lax.ppermute(tree, replicas.AXIS, to)

  branches = [sends(other) for other in matchings(n)]
  chosen = drawn(plan.seed, step, n)
  arrived = jax.lax.switch(chosen, branches, message)
  half = lambda d, a, b: (d + pull * a + b) / 2
  return jax.tree.map(half, own, anchor, arrived)
