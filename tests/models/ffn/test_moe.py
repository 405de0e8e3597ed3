"""Experts on one device and on meshes against a loop over experts and tokens.

Output, gradients of x and of every parameter with the terms of the loss, the
terms and the counts themselves, in float64.

Legend: B rows, T tokens, D model, F hidden width, E experts, K choices.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import model as model_schema
from paraxis.models import aux as aux_lib
from paraxis.models import skeleton as skeleton_lib
from paraxis.models.ffn import moe
from paraxis.models.ffn import router
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.train.certify import dtypes

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, F, E = 4, 8, 6, 4, 8
DENOMINATOR = 17.0


class See(NamedTuple):
  """What a layer of experts reads of attention.Visibility."""

  valid: object
  denominator: object
  plan: object = None


def config(mlp='swiglu', **fields):
  fields = dict(count=E, top_k=2, d_ff=F, balance=0.3, router_z=0.2) | fields
  return model_schema.Model(
    d_model=D, d_ff=8, num_layers=2, mlp=mlp, dtype='float64',
    param_dtype='float64', experts=model_schema.Experts(**fields),
  )  # fmt: skip


@functools.cache
def skeleton_of(c, wide=False):
  return skeleton_lib.Skeleton(lambda rngs: moe.Moe(c, rngs, wide=wide))


@functools.cache
def arrays(c, load=False, wide=False):
  """(params, x, valid, weights of the outputs), numpy."""
  params = module_cases.randomised(skeleton_of(c, wide), 1.0)
  rng = np.random.default_rng(1)
  params['load'] = rng.integers(1, 9, params['load'].shape) * float(load)
  if 'bias' in params:
    params['bias'] = params['bias'] * 0.2
  x, u = rng.normal(size=(2, B, T, D))
  valid = rng.random((B, T)) > 0.2
  return params, x, valid, u


def layer(c, params, x, valid, wide=False):
  """-> (y, aux.Aux of this device, or of all)."""
  module = skeleton_of(c, wide).module(params)
  y, aux = module(x, See(valid, jnp.float64(DENOMINATOR)))
  return y, aux_lib.whole(aux_lib.stacked([aux]))


def differentiate(run, params, x, u, valid):
  """(y, dx, {name: gradient, term or count}) of sum(y u) + terms."""

  def of(params, x):
    y, aux = run(params, x, valid)
    return (y * u).sum() + aux_lib.total(aux, y.dtype), (y, aux)

  (dw, dx), (y, aux) = jax.grad(of, (0, 1), has_aux=True)(params, x)
  return y, dx, dw | aux.terms | {'load': aux.counts['load'][0]}


def ours(c, mesh_text='', inside=False, sequence=True, wide=False):
  """{name: array}: y, gradients of sum(y u) + terms, the terms, the counts."""
  params, x, valid, u = arrays(c, wide=wide)
  run, args = functools.partial(layer, c, wide=wide), (params, x, u, valid)
  if not mesh_text:
    y, dx, grads = jax.jit(functools.partial(differentiate, run))(*args)
    return {'y': y, 'x': dx, **grads}
  sizes = mesh_lib.parse(mesh_text)
  mesh = mesh_lib.make(mesh_text, jax.devices()[: math.prod(sizes.values())])
  rules = rules_lib.of(
    schema.Mesh(sequence=sequence), sizes, 1, c.experts.region
  )
  axes = {p: leaf.axes for p, leaf in skeleton_of(c, wide).leaves.items()}
  terms = {'balance': c.experts.balance, 'z': c.experts.router_z}
  axes |= {name: () for name, factor in terms.items() if factor}
  y, dx, grads = module_cases.on_mesh(
    run, axes, args, mesh, rules, inside, moe.ROWS, differentiate
  )
  return {'y': y, 'x': dx, **grads}


def mlp(form, x, up, down, gate=None, **biases):
  gelu = functools.partial(jax.nn.gelu, approximate=True)
  b = lambda name: biases.get(f'{name}_bias', 0)
  up = x @ up + b('up')
  if form == 'gelu':
    return gelu(up) @ down + b('down')
  gate = x @ gate + b('gate')
  if form == 'clamped':
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return (gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1)) @ down + b('down')
  act = jax.nn.silu if form == 'swiglu' else gelu
  return (act(gate) * up) @ down + b('down')


@functools.cache
def reference(c, wide=False, load=False):
  """The same by loops, differentiated by jax; routing in numpy beforehand."""
  params, x, valid, u = arrays(c, load, wide)
  e, count = c.experts, params['router'].shape[1]
  score = jax.nn.sigmoid if e.scores == 'sigmoid' else jax.nn.softmax
  bias = params.get('bias', np.zeros(count))
  s = score(x @ params['router'] + params.get('router_bias', 0))
  chosen = np.zeros((B, T, count))
  for b in range(B):
    for t in range(T):
      chosen[b, t, module_cases.routed(np.asarray(s[b, t]) + bias, e)] = 1
  counts = (chosen * valid[..., None]).sum(1)
  if e.balance_scope == 'sequence':
    f = counts / counts.sum(1, keepdims=True)
  else:
    f = counts.sum(0, keepdims=True) / counts.sum()
  if e.balance_scope in ('running', 'step') and load:
    f = (params['load'][:count] / params['load'][:count].sum())[None]
  f = np.broadcast_to(f, counts.shape)

  def objective(params, x):
    logits = x @ params['router'] + params.get('router_bias', 0)
    s = score(logits)
    p = s / s.sum(-1, keepdims=True)
    mix = s * chosen
    mix = mix / mix.sum(-1, keepdims=True) if e.normalise else mix
    mix = e.scale * mix * valid[..., None]
    stacks = {k: params[k] for k in moe.WEIGHTS if k in params}
    if e.scale_inputs:
      times, mix = (
        jnp.moveaxis(mix, -1, 0)[..., None],
        chosen * valid[..., None],
      )
      run = lambda one, times: mlp(c.mlp, times * x, **one)
      every = jax.vmap(run)(stacks, times)
    else:
      every = jax.vmap(lambda one: mlp(c.mlp, x, **one))(stacks)
    y = jnp.einsum('EBTD,BTE->BTD', every, mix)
    per_token = {'balance': e.balance * count * (f[:, None] * p).sum(-1)}
    per_token['z'] = e.router_z * jax.nn.logsumexp(logits, -1) ** 2
    mean = lambda x: (valid * x).sum() / DENOMINATOR
    terms = {name: mean(x) for name, x in per_token.items()}
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
      y = y + e.shared_scale * beside
    return (y * u).sum() + sum(terms.values()), (y, p, terms)

  differentiated = jax.jit(jax.grad(objective, (0, 1), has_aux=True))
  grads, (y, p, terms) = differentiated(params, x)
  entropy = -(np.asarray(p) * np.log(p)).sum(-1)[valid].sum()
  grads[0]['load'] = np.array([*counts.sum(0), 0, entropy])
  terms = {name: x for name, x in terms.items() if x}
  return {'y': y, 'x': grads[1], **grads[0], **terms}


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
    shared_scale=0.5, bias_rate=0.01, top_k=3,
  ),
  'gpt_oss': dict(mlp='clamped', mlp_bias=True, router_bias=True),
  'qwen2': dict(shared=2, shared_gate=True, normalise=False, router_z=0.0),
  'llama4': dict(
    mlp='swiglu', scores='sigmoid', normalise=False, shared=1,
    scale_inputs=True, mlp_bias=True, top_k=3,
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', FORMS)
def test_one_device(name):
  c = config(**FORMS[name])
  assert not far(ours(c), reference(c))


# What tests/train/certify/test_invariance_experts.py does not meet: (mesh,
# region, fields, differentiated inside the region or from outside).
MESHES = [
  (
    'data=2,context=2,tensor=2', 'data+context+tensor',
    dict(hot=2, bias_rate=0.1, mlp_bias=True), True,
  ),
  (
    'fsdp=2,tensor=4', 'tensor',
    dict(
      residual=True, shared=0, top_k=1, normalise=False, mlp_bias=True,
      router_bias=True,
    ), False,
  ),
  (
    'data=2,context=2,tensor=2', 'context+tensor',
    dict(scores='sigmoid', normalise=False, scale_inputs=True, hot=1), True,
  ),
]  # fmt: skip


@pytest.mark.parametrize('mesh, region, fields, inside', MESHES)
def test_on_a_mesh(mesh, region, fields, inside):
  c = config(**dict(region=region, shared=1) | fields)
  assert not far(ours(c, mesh, inside), reference(c))


HELD_TWICE = dict(region='tensor', bias_rate=0.1, residual=True)


def test_weights_of_outputs_are_not_those_of_inputs():
  scaled = config(**FORMS['llama4'])
  plain = config(**FORMS['llama4'] | dict(scale_inputs=False))
  assert 'y' in far(ours(plain), reference(scaled))


def test_tokens_that_several_devices_hold():
  """Without mesh.sequence the devices of tensor send the same tokens."""
  c = config(**HELD_TWICE)
  assert not far(ours(c, 'data=2,tensor=2', sequence=False), reference(c))


@pytest.mark.parametrize(
  'patch, fields, names',
  [
    # Loads of one device in place of all: the loss's term is another.
    ((jax.lax, 'psum', lambda x, axes: x), {}, {'router', 'x', 'balance'}),
    (
      (moe, '_copies', lambda: 1),
      HELD_TWICE,
      {'router', 'x', 'load', 'balance', 'z'},
    ),
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


def of_loads(load):
  """(gradients of the batch, sum of those of its halves, what they should be).

  load: whether the counts of a step before are there.
  """
  c = config(balance_scope='step')
  params, x, valid, u = arrays(c, load)
  run = functools.partial(layer, c)
  f = jax.jit(functools.partial(differentiate, run))
  halves = [
    f(params, *(a[i : i + 2] for a in (x, u, valid)))[2] for i in (0, 2)
  ]
  total = jax.tree.map(jnp.add, *halves)
  whole = f(params, x, u, valid)[2]
  return whole, total, {p: reference(c, load=load)[p] for p in whole}


def test_loads_of_a_whole_step():
  """Given, microbatches add up; while there are none, each counts its own."""
  whole, total, expected = of_loads(True)
  assert not far(whole, expected) and not far(total, expected)
  whole, total, expected = of_loads(False)
  assert not far(whole, expected)
  assert set(far(total, expected)) == {'router', 'balance'}


def test_loads_of_another_step_choose_hot_experts_and_nothing_else(monkeypatch):
  """Negative: the balance is of the tokens here, hot are the busiest before."""
  c, seen = config(balance_scope='step', hot=2), []
  params, x, valid, _ = jax.tree.map(jnp.asarray, arrays(c, load=True))
  right = moe.expert.hottest
  watch = lambda load, n: seen.append(right(load, n)) or seen[-1]
  monkeypatch.setattr(moe.expert, 'hottest', watch)
  before = params | {'load': -params['load']}
  _, aux = layer(c, before, x, valid)
  (hot,) = map(np.asarray, seen)
  loads = np.asarray(params['load'])[:E]
  np.testing.assert_array_equal(loads[hot], np.sort(loads)[:-3:-1])
  wanted = reference(c)['balance']
  np.testing.assert_allclose(aux.terms['balance'], wanted, rtol=1e-12)
  _, aux = layer(c, params, x, valid)
  assert abs(aux.terms['balance'] / wanted - 1) > 1e-3


def test_nothing_is_dropped_with_a_cache(monkeypatch):
  c = config(capacity_factor=0.6, balance=0.0, router_z=0.0)
  monkeypatch.setattr(See.__new__, '__defaults__', (0,))
  y, _ = jax.jit(lambda p, x, v: layer(c, p, x, v))(*arrays(c)[:3])
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


def test_logits_of_the_router_are_products_of_all_bits():
  """Accelerators round operands by default; so do gradients' products."""
  c = config(shared=0)
  params, x, valid, u = arrays(c)
  run = functools.partial(differentiate, functools.partial(layer, c))
  traced = jax.jit(run).trace(params, x, u, valid).jaxpr.jaxpr
  highest = (jax.lax.Precision.HIGHEST,) * 2
  found = [
    {tuple(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)}
    for eqn in dtypes.equations(traced)
    if eqn.primitive.name == 'dot_general'
    and eqn.params['precision'] == highest
  ]
  of_router = [{(B, T, D), (D, E), (B, T, E)}] * 3  # and both its gradients
  assert len(found) == 3 and found[0] == of_router[0], found


def test_parameters_say_what_they_are():
  skeleton = skeleton_of(config(bias_rate=0.1, shared=2, shared_gate=True))
  kinds = {name: leaf.kind for name, leaf in skeleton.leaves.items()}
  assert (kinds['load'], kinds['bias']) == ('statistic', 'balance')
  params = skeleton.init(jax.random.key(0), jnp.float64)
  assert params['up'].shape == params['gate'].shape == (E, D, F)
  assert params['beside/up'].shape == (D, 2 * F)
  # An expert is initialised by its own fan-in, not by that of the stack.
  assert 0.7 < np.std(params['up']) * D**0.5 < 1.3
  assert 0.7 < np.std(params['down']) * (F * 2 * 2) ** 0.5 < 1.3


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


def test_hot_experts_are_the_busiest_of_the_step_before(monkeypatch):
  """The result does not depend on which are hot, so nothing else shows it."""
  given, right = [], moe.expert.dispatch

  def dispatch(*args):
    given.append(args[-1])
    return right(*args)

  monkeypatch.setattr(moe.expert, 'dispatch', dispatch)
  c = config(hot=3)
  params, x, valid, _ = jax.tree.map(jnp.asarray, arrays(c))
  counts = jnp.array([4, 1, 9, 2, 8, 3, 7, 5, *[99.0] * router.EXTRA])
  layer(c, params | {'load': counts}, x, valid)
  assert sorted(map(int, given[0])) == [2, 4, 6]
