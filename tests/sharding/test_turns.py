"""A named branch counts as often as it is taken: traced and compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.sharding import turns
from paraxis.sharding.meter import compiled
from paraxis.sharding.meter import flops

N = 16


def program(name):
  """A loop of 8 turns; a product of 2 N^3 operations in 3 of them."""

  def turn(x, on):
    def product():
      with jax.named_scope('work'):
        return x @ x

    with jax.named_scope('x') if name is None else turns.scope(*name):
      return jax.lax.cond(on, product, lambda: x), None

  flags = np.arange(8) < 3
  return lambda x: jax.lax.scan(turn, x, jnp.asarray(flags))[0]


@pytest.mark.parametrize('name, taken, n', [(None, 8, N), ((3, 8), 3, N + 8)])
def test_a_branch_counts_as_often_as_its_name_says(name, taken, n):
  x = jnp.eye(n)  # a cache of programs takes no notice of names
  assert flops.count(program(name), x).total == taken * 2 * n**3
  text = jax.jit(program(name)).lower(x).compile().as_text()
  runs = compiled.CompiledProgram(text).runs(weigh=len)
  found = [r.times for r in runs if r.instruction.opcode == 'dot']
  assert sum(found) == taken


def until_small(name):
  """A product of 2 N^3 operations a turn, as often as the data want it."""

  def run(x):
    with jax.named_scope(name):
      return jax.lax.while_loop(
        lambda c: (c[0] < 9) & (c[1].sum() > 1),
        lambda c: (c[0] + 1, c[1] @ c[1]),
        (0, x),
      )[1]

  return run


def test_a_loop_over_data_counts_as_its_name_says():
  x = jnp.eye(N)
  assert flops.count(until_small('about_4_trips'), x).total == 4 * 2 * N**3
  text = jax.jit(until_small('about_4_trips')).lower(x).compile().as_text()
  runs = compiled.CompiledProgram(text).runs(weigh=len)
  assert sum(r.times for r in runs if r.instruction.opcode == 'dot') == 4
  with pytest.raises(ValueError, match='trip count depends on data'):
    flops.count(until_small('x'), x)
  assert turns.trips('jit(f)/transpose(jvp(about_4_trips))/while') == 4
  assert turns.trips('jit(f)/about_4_trips/body') is None


def test_share():
  assert turns.times(22, turns.share('jit(f)/turns_15_of_22/cond')) == 15
  assert turns.times(10, turns.share('turns_1_of_4')) == 2.5
  # Only a conditional's own name counts, not one further out.
  assert turns.share('jit(f)/turns_15_of_22/forward/cond') == 1
