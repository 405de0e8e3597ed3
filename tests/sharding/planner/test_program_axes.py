"""Axes found in small programs, whose axes are plain to see.

Legend: B rows, T tokens, V vocabulary, D model, N heads, H head width, F mlp, E
experts, L layers.
"""

import jax
import jax.numpy as jnp

from paraxis.sharding.planner import program_axes

B, T, V, D, N, H, F, E, L = 2, 8, 32, 12, 4, 3, 20, 6, 5


def found(function, args=((B, T, D),), **params):
  """Axes; params: {name: shape}. args: shapes of other arguments."""
  shape = lambda s: jax.ShapeDtypeStruct(s, jnp.float32)
  given = {p: shape(s) for p, s in params.items()}
  return program_axes.find(function, given, *map(shape, args))


def mlp(p, x):
  return (jax.nn.silu(x @ p['gate']) * (x @ p['up'])) @ p['down']


MLP = dict(up=(D, F), gate=(D, F), down=(F, D))


def test_an_mlp():
  axes = found(mlp, **MLP)
  (d, f), (f_in, d_out) = axes.of['up'], axes.of['down']
  assert axes.of['gate'] == (d, f) and f_in == f
  assert len({d, f, d_out}) == 3  # no residual joins input and output
  assert {f, d_out} <= axes.columns and d not in axes.columns
  assert axes.rows == {f: D, d: 2 * F}
  assert d_out in axes.ends and f not in axes.ends and not axes.stacks


def test_a_residual_joins_input_and_output():
  axes = found(lambda p, x: x + mlp(p, x), **MLP)
  assert axes.of['down'][1] == axes.of['up'][0]


def test_layers_of_a_scan_are_one():
  def run(p, x):
    return jax.lax.scan(lambda x, own: (x + mlp(own, x), None), x, p)[0]

  axes = found(run, **{k: (L, *s) for k, s in MLP.items()})
  assert axes.of['up'][1:] == axes.of['down'][:0:-1]
  assert axes.of['up'][0] not in axes.of['down']


def test_a_function_with_a_gradient_of_its_own_a_loop_and_a_branch():
  act = jax.custom_vjp(jnp.tanh)
  act.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g,))

  def run(p, x):
    h = act(x @ p['up'])
    h = jax.lax.fori_loop(0, 3, lambda i, h: jnp.sin(h), h)
    h = jax.lax.cond(x.sum() > 0, jnp.cos, lambda h: h, h)
    return jax.checkpoint(lambda h: h @ p['down'])(h)

  axes = found(run, up=(D, F), down=(F, D))
  assert axes.of['up'][1] == axes.of['down'][0]


def test_heads_go_on_through_a_reshape_as_its_first_dimension():
  def run(p, x):
    q = (x @ p['flat']).reshape(B, T, N, H)
    return jnp.einsum('BTNH,NHD->BTD', q.swapaxes(0, 1), p['output'])

  axes = found(run, flat=(D, N * H), output=(N, H, D))
  assert axes.of['flat'][1] == axes.of['output'][0] != axes.of['output'][1]


def test_words_and_experts_are_stacks():
  def run(p, x):
    ids = x[..., 0].astype(jnp.int32)
    y = p['table'][ids] @ p['up']
    return jax.lax.map(lambda e: y @ p['expert'][e], jnp.arange(2))

  axes = found(run, table=(V, D), up=(D, D), expert=(E, D, F))
  assert axes.stacks == {axes.of['table'][0], axes.of['expert'][0]}
  # What is looked up is an activation: the product is one with 'up' alone.
  assert axes.of['table'][1] == axes.of['up'][0]
  assert axes.rows == {axes.of['up'][0]: D, axes.of['expert'][1]: F}


def test_experts_multiplied_one_by_one_or_by_runs_are_stacks():
  def run(p, x):
    y = jnp.einsum('END,EDF->ENF', x, p['each'])
    sizes = jnp.full(E, T, jnp.int32)
    return jax.lax.ragged_dot(y.reshape(E * T, F), p['runs'], sizes)

  axes = found(run, [(E, T, D)], each=(E, D, F), runs=(E, F, D))
  assert axes.stacks == {axes.of['each'][0], axes.of['runs'][0]}
  assert axes.of['each'][2] == axes.of['runs'][1]


def test_what_no_operation_ties_is_apart():
  """The negative: equal sizes alone join nothing."""
  cut = lambda p, x: jnp.concatenate([x @ p['up'], x], -1)[..., :F] @ p['down']
  axes = found(cut, **MLP)
  assert axes.of['up'][1] != axes.of['down'][0]
  assert axes.of['gate'][1] not in axes.columns
