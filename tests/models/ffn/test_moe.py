"""Experts on one device and on meshes against a loop over experts and tokens.

Output, gradients of x and of every parameter, the terms of the loss, and the
counts that come as gradients of `load` and `bias`, in float64.

Legend: B rows, T tokens, D model, F hidden width, E experts, K choices.
"""

import functools
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import model as model_schema
from paraxis.models.ffn import moe
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, F, E = 4, 8, 6, 4, 8
DENOMINATOR = 17.0


class See(NamedTuple):
  """What a layer of experts reads of attention.Visibility."""

  valid: object
  denominator: object
  slot: object = None


# LLVM's optimisations take half of the time and change no number here.
jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': '0'}
)


def config(mlp='swiglu', **fields):
  fields = dict(count=E, top_k=2, d_ff=F, balance=0.3, router_z=0.2) | fields
  return model_schema.Model(
    d_model=D, d_ff=8, num_layers=2, mlp=mlp, dtype='float64',
    param_dtype='float64', experts=model_schema.Experts(**fields),
  )  # fmt: skip


def parts(c, wide=False):
  """(graph, {path: (key, variable)}) of the module."""
  graph, state = nnx.split(
    nnx.eval_shape(lambda: moe.Moe(c, nnx.Rngs(0), wide=wide))
  )
  flat = nnx.to_flat_state(state)
  flat = [(p, v) for p, v in flat if isinstance(v, nnx.Param)]
  return graph, {'/'.join(p): (p, v) for p, v in flat}


@functools.cache
def arrays(c, load=False, wide=False):
  """(params, x, valid, weights of the outputs), numpy."""
  rng = np.random.default_rng(0)
  params = {
    path: rng.normal(size=v.shape) for path, (_, v) in parts(c, wide)[1].items()
  }
  params['load'] = rng.integers(1, 9, params['load'].shape) * float(load)
  if 'bias' in params:
    params['bias'] = params['bias'] * 0.2
  x, u = rng.normal(size=(2, B, T, D))
  valid = rng.random((B, T)) > 0.2
  return params, x, valid, u


def layer(c, params, x, valid, wide=False):
  graph, variables = parts(c, wide)
  state = [(p, v.replace(params[path])) for path, (p, v) in variables.items()]
  module = nnx.merge(graph, nnx.from_flat_state(state))
  return module(x, See(valid, jnp.float64(DENOMINATOR)))


def ours(c, mesh_text='', inside=False, sequence=True, wide=False, **how):
  """{name: array}: y, gradients of sum(y u) + terms by x and parameters."""
  params, x, valid, u = arrays(c, wide=wide, **how)
  run = functools.partial(layer, c, wide=wide)

  def local(params, x, valid, u):
    y, vjp = jax.vjp(lambda p, x: run(p, x, valid), params, x)
    grads, dx = vjp(u)
    return y, dx, grads

  if not mesh_text:
    y, dx, grads = jit(local)(params, x, valid, u)
    return {'y': y, 'x': dx, **grads}
  sizes = mesh_lib.parse(mesh_text)
  mesh = mesh_lib.make(
    mesh_text, jax.devices()[: int(np.prod(list(sizes.values())))]
  )
  rules = rules_lib.of(
    schema.Mesh(sequence=sequence), sizes, 1, c.experts.region
  )
  axes = {p: v.get_metadata('axes') for p, (_, v) in parts(c, wide)[1].items()}
  with jax.set_mesh(mesh), annotate.use(rules):
    specs = {p: annotate.spec(a) for p, a in axes.items()}
    residual, rows = annotate.spec(moe.RESIDUAL), annotate.spec(moe.ROWS)
    put = lambda a, s: jax.device_put(a, jax.NamedSharding(mesh, s))
    args = (
      {p: put(v, specs[p]) for p, v in params.items()},
      put(x, residual), put(valid, rows), put(u, residual),
    )  # fmt: skip

    def summed(*args):
      y, dx, grads = local(*args)
      for p, g in grads.items():
        held = {
          a for s in specs[p] for a in (s if isinstance(s, tuple) else (s,))
        }
        missing = tuple(a for a in annotate.sizes() if a not in held)
        grads[p] = jax.lax.psum(g, missing)
      return y, dx, grads

    if inside:
      local_ = jax.shard_map(
        summed, in_specs=(specs, residual, rows, residual),
        out_specs=(residual, residual, specs), check_vma=False,
      )  # fmt: skip
    else:
      local_ = local
    y, dx, grads = jit(local_)(*args)
    return {k: np.asarray(v) for k, v in {'y': y, 'x': dx, **grads}.items()}


def mlp(form, x, up, down, gate=None):
  gelu = functools.partial(jax.nn.gelu, approximate=True)
  if form == 'gelu':
    return gelu(x @ up) @ down
  act = jax.nn.silu if form == 'swiglu' else gelu
  return (act(x @ gate) * (x @ up)) @ down


def route(c, s, bias):
  """ids of one token's experts, by sorting in numpy."""
  e, choice = c.experts, np.asarray(s) + bias
  if e.groups > 1:
    groups = choice.reshape(e.groups, -1)
    value = np.sort(groups, 1)[:, -2:].sum(1)
    keep = np.argsort(-value, kind='stable')[: e.top_groups]
    closed = np.setdiff1d(np.arange(e.groups), keep)
    groups[closed] = -np.inf
    choice = groups.reshape(-1)
  return np.argsort(-choice, kind='stable')[: e.top_k]


@functools.cache
def reference(c, wide=False, load=False):
  """The same by loops, differentiated by jax; routing in numpy beforehand."""
  params, x, valid, u = arrays(c, load, wide)
  e, count = c.experts, params['router'].shape[1]
  score = jax.nn.sigmoid if e.scores == 'sigmoid' else jax.nn.softmax
  bias = params.get('bias', np.zeros(count))
  s = score(x @ params['router'])
  chosen = np.zeros((B, T, count))
  for b in range(B):
    for t in range(T):
      chosen[b, t, route(c, s[b, t], bias)] = 1
  counts = (chosen * valid[..., None]).sum(1)
  if e.balance_scope == 'sequence':
    f = counts / counts.sum(1, keepdims=True)
  else:
    f = counts.sum(0, keepdims=True) / counts.sum()
  if e.balance_scope in ('running', 'step') and load:
    f = (params['load'][:count] / params['load'][:count].sum())[None]
  f = np.broadcast_to(f, counts.shape)

  def objective(params, x):
    logits = x @ params['router']
    s = score(logits)
    p = s / s.sum(-1, keepdims=True)
    mix = s * chosen
    mix = mix / mix.sum(-1, keepdims=True) if e.normalise else mix
    mix = e.scale * mix * valid[..., None]
    stacks = {k: params[k] for k in ('up', 'down', 'gate') if k in params}
    every = jax.vmap(lambda one: mlp(c.mlp, x, **one))(stacks)
    y = jnp.einsum('EBTD,BTE->BTD', every, mix)
    per_token = e.balance * count * (f[:, None] * p).sum(-1)
    per_token += e.router_z * jax.nn.logsumexp(logits, -1) ** 2
    term = (valid * per_token).sum()
    if e.shared or e.residual:
      names = ('up', 'down', 'gate')
      one = {n: params[f'beside/{n}'] for n in names if n in params}
      beside = mlp(c.mlp, x, **one)
    if e.residual:
      mix = jax.nn.softmax(x @ params['mix'], -1)
      y = mix[..., :1] * y + mix[..., 1:] * beside
    elif e.shared_gate:
      y = y + jax.nn.sigmoid(x @ params['shared_gate']) * beside
    elif e.shared:
      y = y + beside
    return (y * u).sum() + term / DENOMINATOR, (y, p)

  grads, (y, p) = jit(jax.grad(objective, (0, 1), has_aux=True))(params, x)
  entropy = -(np.asarray(p) * np.log(p)).sum(-1)[valid].sum()
  grads[0]['load'] = np.array([*counts.sum(0), 0, entropy])
  if 'bias' in params:
    grads[0]['bias'] = counts.sum(0)
  return {'y': y, 'x': grads[1], **grads[0]}


def far(found, expected):
  """Names of what differs -> by how much, relative to the largest value."""
  assert set(found) == set(expected)
  out = {}
  for name, b in expected.items():
    a, b = np.asarray(found[name]), np.asarray(b)
    assert a.dtype == b.dtype == np.float64 and a.shape == b.shape, name
    distance = np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)
    if not distance < 1e-10:
      out[name] = distance
  return out


FORMS = {
  'gelu': dict(mlp='gelu', normalise=False, balance_scope='sequence'),
  'deepseek': dict(
    mlp='geglu', scores='sigmoid', groups=4, top_groups=2, scale=2.5, shared=2,
    bias_rate=0.01, top_k=3,
  ),
  'qwen2': dict(shared=2, shared_gate=True, normalise=False, router_z=0.0),
}  # fmt: skip


@pytest.mark.parametrize('name', FORMS)
def test_one_device(name):
  c = config(**FORMS[name])
  assert not far(ours(c), reference(c))


# (mesh, region, fields, differentiated inside the region or from outside)
MESHES = [
  ('data=2,context=2,tensor=2', 'context+tensor', dict(bias_rate=0.1), True),
  ('data=2,context=2,tensor=2', 'context+tensor', dict(bias_rate=0.1), False),
  (
    'data=2,context=2,tensor=2', 'data+tensor',
    dict(balance_scope='sequence', hierarchical=True), False,
  ),
  ('data=2,context=2,tensor=2', 'data+context+tensor', dict(hot=2), True),
  (
    'fsdp=2,tensor=4', 'tensor',
    dict(residual=True, shared=0, top_k=1, normalise=False), False,
  ),
  ('fsdp=2,context=2,tensor=2', '', {}, False),
]  # fmt: skip


@pytest.mark.parametrize('mesh, region, fields, inside', MESHES)
def test_on_a_mesh(mesh, region, fields, inside):
  c = config(**dict(region=region, shared=1) | fields)
  assert not far(ours(c, mesh, inside), reference(c))


HELD_TWICE = dict(region='tensor', bias_rate=0.1, residual=True)


def test_tokens_that_several_devices_hold():
  """Without mesh.sequence the devices of tensor send the same tokens."""
  c = config(**HELD_TWICE)
  assert not far(ours(c, 'data=2,tensor=2', sequence=False), reference(c))


@pytest.mark.parametrize(
  'patch, fields, names',
  [
    # Loads of one device in place of all: the loss's term is another.
    ((jax.lax, 'psum', lambda x, axes: x), {}, {'router', 'x'}),
    ((moe, '_copies', lambda: 1), HELD_TWICE, {'router', 'x', 'load', 'bias'}),
  ],
)
def test_a_missing_sum_is_seen(patch, fields, names, monkeypatch):
  c = config(**dict(region='tensor') | fields)
  expected = reference(c)
  monkeypatch.setattr(*patch)
  found = ours(c, 'data=2,tensor=2', sequence=not fields)
  assert set(far(found, expected)) == names


def test_wide_layers_have_twice_the_experts():
  c = config(count=E // 2)
  found = ours(c, wide=True)
  assert found['up'].shape == (E, D, F)
  assert not far(found, reference(c, wide=True))


@functools.cache
def gradients(c):
  """jitted (params, x, valid, u) -> gradients by the parameters."""
  return jit(
    lambda params, x, valid, u: jax.vjp(
      lambda params: layer(c, params, x, valid), params
    )[1](u)[0]
  )


def of_loads(load):
  """(gradients of the batch, sum of those of its halves, what they should be).

  load: whether the counts of a step before are there.
  """
  c = config(balance_scope='step')
  params, *batch = arrays(c, load)
  f = gradients(c)
  halves = [f(params, *(a[i : i + 2] for a in batch)) for i in (0, 2)]
  total = jax.tree.map(jnp.add, *halves)
  whole = f(params, *batch)
  return whole, total, {p: reference(c, load=load)[p] for p in whole}


def test_loads_of_a_whole_step():
  """Given, microbatches add up; while there are none, each counts its own."""
  whole, total, expected = of_loads(True)
  assert not far(whole, expected) and not far(total, expected)
  whole, total, expected = of_loads(False)
  assert not far(whole, expected) and set(far(total, expected)) == {'router'}


@functools.cache
def forward(c):
  """jitted params -> y."""
  _, x, valid, _ = arrays(c)
  return jit(lambda params: layer(c, params, x, valid))


def test_equal_experts_are_an_mlp():
  c = config(scale=1.0)
  params, x, valid, _ = arrays(c)
  one = {k: params[k][0] for k in ('up', 'down', 'gate')}
  same = {k: np.broadcast_to(v, (E, *v.shape)) for k, v in one.items()}
  y = forward(c)(params | same)
  expected = np.where(valid[..., None], mlp(c.mlp, x, **one), 0)
  np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)


def test_experts_have_no_order():
  """A placement may permute them, with their columns of the router."""
  c = config()
  params, *_ = arrays(c)
  order = np.random.default_rng(3).permutation(E)
  moved = {k: params[k][order] for k in ('up', 'down', 'gate')}
  moved['router'] = params['router'][:, order]
  y = forward(c)(params)
  np.testing.assert_allclose(forward(c)(params | moved), y, atol=1e-12)
  del moved['router']
  assert np.abs(forward(c)(params | moved) - y).max() > 0.1


def test_nothing_is_dropped_with_a_cache(monkeypatch):
  c = config(capacity_factor=0.6, balance=0.0, router_z=0.0)
  monkeypatch.setattr(See.__new__, '__defaults__', (0,))
  y = jit(lambda p, x, v: layer(c, p, x, v))(*arrays(c)[:3])
  expected = reference(config(balance=0.0, router_z=0.0))['y']
  np.testing.assert_allclose(y, expected, rtol=0, atol=1e-10)


def test_what_is_dropped_is_counted():
  """By a loop over the tokens of one device; its tokens are then only 0."""
  c = config(capacity_factor=0.6, balance=0.0, router_z=0.0)
  params, x, valid, _ = arrays(c)
  s = np.asarray(jax.nn.softmax(x @ params['router'])).reshape(-1, E)
  capacity = int(np.ceil(B * T * 2 / E * 0.6))
  served, dropped, alone = np.zeros(E, int), 0, []
  for n in np.flatnonzero(valid):
    ids = np.argsort(-s[n])[:2]
    served[ids] += 1
    dropped += (served[ids] > capacity).sum()
    alone += [n] if (served[ids] > capacity).all() else []
  found = ours(c)
  assert dropped and alone and found['load'][E] == dropped
  np.testing.assert_array_equal(found['load'][:E], served)
  lost = np.zeros(B * T, bool)
  lost[alone] = True
  y = found['y'].reshape(-1, D)
  np.testing.assert_array_equal((y == 0).all(1), lost | ~valid.ravel())


def test_tokens_held_twice_are_an_error_inside_a_region():
  with pytest.raises(ValueError, match='2 devices hold .*mesh.sequence'):
    ours(config(region='tensor'), 'data=2,tensor=2', True, sequence=False)


def test_parameters_say_what_they_are():
  c = config(bias_rate=0.1, shared=2, shared_gate=True)
  module = jit(lambda: nnx.split(moe.Moe(c, nnx.Rngs(0))))()
  module = nnx.merge(*module)
  assert module.up[...].shape == module.gate[...].shape == (E, D, F)
  kinds = {k: getattr(module, k).get_metadata('kind') for k in ('load', 'bias')}
  assert kinds == dict(load='statistic', bias='balance')
  assert module.beside.up[...].shape == (D, 2 * F)
  # An expert is initialised by its own fan-in, not by that of the stack.
  assert 0.7 < np.std(module.up[...]) * D**0.5 < 1.3
  assert 0.7 < np.std(module.down[...]) * (F * 2 * 2) ** 0.5 < 1.3


@pytest.mark.parametrize(
  'count, rules, words',
  [
    (6, 'fsdp_tensor', ('6 experts', '4 devices', 'tensor')),
    (8, 'fsdp_tensor expert_mlp=context', ('expert_mlp', 'region')),
  ],
)
def test_layouts_that_do_not_fit(count, rules, words):
  c = config(count=count, region='tensor')
  sizes = dict(context=2, tensor=4)
  table = rules_lib.of(schema.Mesh(rules=rules), sizes, 1, 'tensor')
  params, x, valid, _ = arrays(c)
  mesh = mesh_lib.make('context=2,tensor=4', jax.devices())
  with jax.set_mesh(mesh), annotate.use(table):
    with pytest.raises(errors.UserError) as e:
      layer(c, params, x, valid)
  assert all(word in str(e.value) for word in words)
