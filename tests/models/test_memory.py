"""Saved, offloaded, recomputed: gradients stay, products and bytes change.

Legend: T tokens, D model, F mlp, L layers.
"""

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import batch as batch_lib
from paraxis.models import decoder
from paraxis.models import memory
from paraxis.sharding.meter import aot

pytestmark = pytest.mark.usefixtures('float64')

T, D, F, L = 8, 4, 12, 3
POLICIES = [
  ('full', ''),
  ('attention', ''),
  ('dots', ''),
  ('none', 'gate=recompute,attention=offload'),
  ('full', 'residual=offload,attention=offload'),  # MEMO's
  ('dots', 'up=offload,gate=offload,query=recompute'),
]


def layer(x_TD, w):
  """Five products, each named where the backward pass reads it."""
  name = checkpoint_name
  x = name(x_TD, 'residual')
  q = name(x @ w['query'], 'query')
  o = name(jnp.tanh(q) * q, 'attention')
  x = x + name(o @ w['output'], 'output')
  up, gate = name(x @ w['up'], 'up'), name(x @ w['gate'], 'gate')
  return x + name((jax.nn.silu(gate) * up) @ w['down'], 'down')


def shapes(d=D, f=F):
  return dict(query=(d, d), output=(d, d), up=(d, f), gate=(d, f), down=(f, d))


def arrays():
  rng = np.random.default_rng(0)
  w = {k: rng.normal(size=(L, *s)) * 0.3 for k, s in shapes().items()}
  return w, rng.normal(size=(T, D))


def under(layer, remat, text):
  """The layer under a policy, as a model runs it."""
  policy = memory.policy(remat, text)
  return layer if policy is None else jax.checkpoint(layer, policy=policy)


def loss(w, x, remat, text):
  run = under(layer, remat, text)
  y, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, w)
  return (jnp.sin(y) * y).sum()


gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=(2, 3))


@pytest.fixture(scope='module')
def expected():
  return jax.device_get(gradients(*arrays(), 'none', ''))


@pytest.mark.parametrize('remat, text', POLICIES)
def test_gradients_on_one_device(remat, text, expected):
  support.close(gradients(*arrays(), remat, text), expected)


def counted(remat, text, layer=layer):
  """(products repeated, copies to the host and back, elements kept).

  Of forward and backward pass of one layer; the weights are kept by all.
  """
  w, x = arrays()
  w = {k: v[0] for k, v in w.items()}
  run = under(layer, remat, text)
  total = lambda w, x: run(x, w).sum()
  jaxpr = str(jax.make_jaxpr(jax.grad(total, (0, 1)))(w, x))
  residuals = jax.eval_shape(lambda: jax.vjp(total, w, x)[1])
  kept = sum(a.size for a in jax.tree.leaves(residuals))
  weights = sum(v.size for v in w.values())
  products = jaxpr.count('dot_general') - 3 * len(w)
  return products, jaxpr.count('device_put'), kept - weights


@pytest.mark.parametrize(
  'remat, text, products, copies, kept',
  [
    # The product of 'down' is never needed again.
    ('full', 'residual=save', 4, 0, T * D),
    ('full', 'up=save', 3, 0, T * (D + F)),
    ('full', 'up=save,gate=save', 2, 0, T * (D + 2 * F)),
    ('full', 'up=save,gate=offload,residual=offload', 2, 4, T * (D + 2 * F)),
    ('full', 'residual=offload,attention=offload', 4, 4, 2 * T * D),
    ('full', 'query=save', 3, 0, 2 * T * D),
    ('full', 'down=save', 4, 0, T * D),
    # o's derivative needs q: saving o too spares no product.
    ('attention', 'query=save', 3, 0, 3 * T * D),
    ('dots', 'query=recompute', 1, 0, T * (3 * D + 2 * F)),
    ('dots', 'residual=save', 0, 0, T * (4 * D + 2 * F)),
    ('none', 'gate=recompute', 1, 0, T * (4 * D + F)),
  ],
)
def test_what_is_repeated_and_what_is_kept(remat, text, products, copies, kept):
  assert counted(remat, text) == (products, copies, kept)


def test_the_four_old_names():
  assert memory.policy('none') is None
  found = {r: counted(r, '') for r in ('none', 'dots', 'attention', 'full')}
  assert [found[r][0] for r in found] == [0, 0, 4, 4]
  kept = [found[r][2] for r in found]
  assert kept[0] > kept[1] > kept[2] > kept[3]
  assert all(copies == 0 for _, copies, _ in found.values())


def test_a_name_after_the_nonlinearity_spares_no_product():
  """The count notices what a wrong place for a name costs."""

  def late(x, w):
    return x + checkpoint_name(jnp.tanh(x @ w['up']), 'up') @ w['down']

  def early(x, w):
    return x + jnp.tanh(checkpoint_name(x @ w['up'], 'up')) @ w['down']

  assert (
    counted('full', 'up=save', early)[0] + 1
    == (counted('full', 'up=save', late)[0])
  )


def test_names_of_the_decoder():
  """Each product that the model names is spared by its name, no other."""
  config = schema.Model(
    vocab_size=16, d_model=8, num_layers=1, num_heads=2, d_ff=12, qk_norm='head'
  )
  ids = jnp.zeros((1, 4), jnp.int32)
  tokens = batch_lib.Batch(
    ids, ids, ids + 1, jnp.arange(4)[None], jnp.ones((1, 4)), jnp.ones(())
  )

  def products(text):
    model = decoder.Decoder(config, memory.policy('attention', text))
    params = jax.eval_shape(model.init, jax.random.key(0))
    total = lambda params: model.features(params, tokens)[0].sum()
    return str(jax.make_jaxpr(jax.grad(total))(params)).count('dot_general')

  every = products('residual=save')
  names = ('query', 'key', 'value', 'output', 'up', 'gate')
  for name in names:
    assert products(f'{name}=save') == every - 1, name
  assert products(','.join(f'{n}=save' for n in names)) == every - len(names)
  assert products('down=save') == every  # nothing reads it again
  assert products('attention=recompute') == every + 2  # q k and p v


def test_actions_of_all_names():
  found = memory.actions('attention', ' gate=offload, up=save ')
  assert set(found) == set(memory.NAMES)
  assert (found['gate'], found['up']) == ('offload', 'save')
  assert (found['attention'], found['down']) == ('save', 'recompute')
  assert found['residual'] == 'save' and memory.parse('') == {}


@pytest.mark.parametrize(
  'text, words',
  [
    ('gates=save', "Did you mean 'gate'"),
    ('gate=of', "the action 'of' is not one of save, offload, recompute"),
    ('gate=offlaod', "Did you mean 'offload'"),
    ('gate', "the action ''"),
    ('=save', "the name ''"),
    ('gate=save,gate=offload', "'gate' is there twice"),
    ('residual=recompute', 'save or offload it'),
  ],
)
def test_a_wrong_table(text, words):
  with support.refused(words, f'train.memory={text!r}'):
    memory.policy('full', text)


def test_no_host_memory(monkeypatch):
  monkeypatch.setattr(memory, '_memories', lambda: ('Toy 1', ['device']))
  with pytest.raises(errors.UserError, match='^[^\n]*$') as e:
    memory.policy('full', 'gate=offload,up=offload')
  assert 'Toy 1 has no pinned_host' in str(e.value)
  assert str(e.value).endswith('save or recompute up, gate.')
  memory.policy('full', 'gate=save')  # nothing to offload, nothing to miss


@support.compiles('tpu')
def test_host_memory_of_a_tpu():
  """Bytes of the compiled program: L x T x D leave the device, exactly."""
  topology = aot.topology('v5p:2x2x1')
  mesh = jax.sharding.Mesh(topology.devices[:1], ('data',))
  where = jax.NamedSharding(mesh, P())
  layers, tokens, d = 8, 2048, 128
  like = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=where)
  w = {k: like(layers, *s) for k, s in shapes(d, d).items()}

  def bytes_of(text):
    with topology.context(), jax.enable_x64(False):
      run = jax.jit(jax.grad(lambda w, x: loss(w, x, 'full', text)))
      found = run.lower(w, like(tokens, d)).compile().memory_analysis()
    return found.temp_size_in_bytes, found.host_temp_size_in_bytes

  one = layers * tokens * d * 2
  both = 'residual={},attention={}'
  device, host = zip(
    *(
      bytes_of(both.format(*actions))
      for actions in (('save', 'save'), ('offload', 'save'), ('offload',) * 2)
    ),
    strict=True,
  )
  assert host == (0, one, 2 * one)
  assert device[0] > device[1] > device[2]
  assert device[0] - device[2] > 1.9 * one
