"""What every mixer promises, whatever it computes (models/mixers/protocol.py).

Packed documents do not see one another, padding changes nothing, no token sees
what follows, and decoding, in steps or in chunks, gives what one pass gives.

Legend: B rows, T tokens, V vocabulary.
"""

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import step
from paraxis.models import batch as batch_lib
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.models import layer
from paraxis.models import parameter
from paraxis.models.mixers import packed
from paraxis.models.mixers import protocol as mixer

pytestmark = pytest.mark.usefixtures('float64')

V, T = 32, 20
BOUND = 1e-11
LETTERS = ''.join(k for k in layer.MIXERS if k not in 'WN')  # F, masked
# C and V go by positions alone.
RECURRENT = 'GMSHRLUD'


def fields(pattern, **more):
  """schema.Model with two layers of each kind of the pattern."""
  own = dict(
    vocab_size=V, d_model=16, num_heads=2, d_ff=16, pattern=pattern, window=6,
    attention_chunk=6,
    num_layers=2, dtype='float64', param_dtype='float64', attention_block=8,
  )  # fmt: skip
  model = schema.Model(**own | more)
  small = dict(
    gated_linear=dict(gate_rank=3, conv_width=3),
    mamba=dict(head_dim=4, state=4, dt_rank=2, groups=2),
    hybrid=dict(attention_rank=3, mlp_rank=2),
    recurrent=dict(tolerance=1e-13, init_std=0.5),
    tcn=dict(kernel=3, depth=2, chunk=6),
    gated_delta=dict(value_heads=4, key_dim=4, value_dim=3),
    latent=dict(rank=6, nope_dim=4, rope_dim=4, value_dim=6, groups=2),
  )
  sections = {
    name: type(getattr(model, name))(**values) for name, values in small.items()
  }
  return schema.Model(**own | sections | more)


def made(pattern, **more):
  """(Decoder, random parameters)."""
  model = decoder.Decoder(fields(pattern, **more))
  return model, jax.tree.map(jnp.asarray, module_cases.parameters(model, 0.5))


def batch(tokens, see):
  return batch_lib.Batch(tokens, None, *see[:2], None, None)


def tokens(rows):
  return np.random.default_rng(0).integers(0, V, (rows, T)).astype(np.int32)


def farthest(a, b):
  return float(jnp.abs(a - b).max() / jnp.abs(b).max())


def packed_gap(model, params):
  """The largest difference of a packed document from the document alone."""
  run = jax.jit(lambda batch: model.features(params, batch)[0])
  ids, lengths = tokens(1), (7, 1, 9)
  rows = run(batch(ids, module_cases.see_of((lengths,), T)))
  gaps, first = [], 0
  for n in lengths:
    alone = np.zeros_like(ids)  # padding holds any token
    alone[0, :n] = ids[0, first : first + n]
    found = run(batch(alone, module_cases.see_of(((n,),), T)))
    gaps.append(farthest(rows[:, first : first + n], found[:, :n]))
    first += n
  return max(gaps)


@pytest.mark.sampled(4)
@pytest.mark.parametrize('kind', LETTERS)
def test_packed_documents_are_what_they_are_alone(kind):
  assert packed_gap(*made(kind)) <= BOUND


@pytest.mark.sampled(4)
@pytest.mark.parametrize('kind', RECURRENT)
def test_a_recurrence_that_is_not_reset_shows(kind, monkeypatch):
  never = lambda see: jnp.zeros(see.segments.shape, bool)
  monkeypatch.setattr(mixer, 'resets', never)
  assert packed_gap(*made(kind)) > 1e-3


@pytest.mark.parametrize('kind', LETTERS)
def test_no_token_sees_what_follows_or_another_document(kind):
  model, params = made(kind)
  ids, see = tokens(1), module_cases.see_of(((8, 10),), T)
  table = params['embedding'][ids]  # as a leaf of its own

  def others(x):
    inside = model.visibility(batch(ids, see))
    inside = inside._replace(embedded=x if kind == 'H' else None)
    y, _ = model.run(model.pattern, params, x, inside)
    return (y[:, 8:13] ** 2).sum()

  g = jnp.abs(jax.jit(jax.grad(others))(table)).max((0, 2))
  assert (g[:8] == 0).all() and (g[13:] == 0).all()
  assert (g[8:13] > 0).all()  # and each of its own past


@pytest.mark.parametrize('kind', LETTERS)
def test_prefill_and_steps_are_one_pass(kind):
  """Rows of unequal length, one empty: what pads a prompt leaves no trace."""
  model, params = made(kind)
  lengths, ids = [17, 11, 0], tokens(3)
  full = module_cases.logits(model, params, ids)
  (start, *steps), _ = module_cases.decoded(
    model, model.unstack(params), ids, lengths, 3
  )
  for b, n in enumerate(lengths):
    assert not n or farthest(start[b, :n], full[b, :n]) <= BOUND
    for t, z in enumerate(steps):
      assert farthest(z[b], full[b, n + t]) <= BOUND, (t, b)


@pytest.mark.parametrize('kind', LETTERS + 'W')
def test_prompts_in_chunks_are_one_pass(kind):
  """Of 9, 1 and 10 tokens; every array of the states is needed."""
  model, params = made(kind)
  loose, ids = model.unstack(params), tokens(3)
  rows = batch(ids, module_cases.see_of([(T,)] * 3, T))
  full = jax.jit(lambda: model.features(params, rows)[0])()

  @jax.jit
  def run(cache, part):
    form = (packed.Group(*part.shape),)
    first = cache.length
    x, flight = model.step(
      loose, cache, step.rows(part, first * 0 + part.shape[1], first), form
    )
    return x, model.commit(cache, flight, form, jnp.isfinite(x).all(-1))

  parts = ids[:, :9], ids[:, 9:10], ids[:, 10:]
  found, caches = [], [model.init_cache(3, T)]
  for part in parts:
    x, cache = run(caches[-1], part)
    found.append(x)
    caches.append(cache)
  assert farthest(jnp.concatenate(found, 1), full) <= BOUND
  leaves, tree = jax.tree.flatten(caches[1].states)
  for i, lost in enumerate(leaves):
    kept = [*leaves[:i], jnp.zeros_like(lost), *leaves[i + 1 :]]
    states = jax.tree.unflatten(tree, kept)
    x, _ = run(caches[1]._replace(states=states), parts[1])
    assert farthest(x, found[1]) > 1e-4


# What a cache, or its own rows, do not show: heads and rows on devices.
ON_A_MESH = dict(K=dict(attention_gate=True), H={}, U={}, D={})


@pytest.mark.parametrize('kind', ON_A_MESH)
def test_decoding_on_a_mesh_equals_one_device(kind):
  config = fields(kind, **ON_A_MESH[kind])
  model = decoder.Decoder(config)
  params = module_cases.parameters(model, 0.5)
  rows = tokens(4), [17, 11, 0, 6], 3
  want, _ = module_cases.decoded(model, model.unstack(params), *rows)
  mesh = dict(tensor=2, data=2, fsdp=2)
  found, _ = module_cases.decoded_on_mesh(mesh, config, params, *rows)
  for a, b in zip(found[1:], want[1:], strict=True):
    assert farthest(a, b) <= BOUND


@pytest.mark.parametrize('kind', LETTERS)
def test_the_state_grows_with_the_tokens_or_not_at_all(kind):
  model, _ = made(kind)
  size = lambda slots: sum(
    x.size
    for x in jax.tree.leaves(
      jax.eval_shape(lambda: model.init_cache(2, slots)).states
    )
  )
  own = layer.MIXERS[kind].capabilities
  stays = 2 * size(32) - size(64)
  assert (stays > 0) == (own.recurs or not own.slots)
  assert (size(64) > size(32)) == own.slots


def test_kinds_are_read_from_a_pattern():
  kinds = lambda **f: layer.kinds_of(schema.Model(**f))[1]
  assert kinds(pattern='WF', num_layers=3) == ('W', 'F', 'W')
  assert kinds(pattern='G-G*-', num_layers=4) == ('G', 'G.', 'F', 'G')
  assert kinds(pattern='GF', num_layers=2, mlp='none') == ('G.', 'F.')
  experts = schema.Model().experts.__class__(count=4, pattern='ED')
  assert kinds(pattern='G-F-', num_layers=3, experts=experts) == (
    'GE', 'F', 'GE',
  )  # fmt: skip


@pytest.mark.parametrize(
  'change, text',
  [
    (dict(pattern='-G'), "'-' is an mlp that follows no mixer"),
    (dict(pattern='G--'), 'follows no mixer'),
    (dict(pattern='KF'), 'has K layers but model.attention_chunk=0'),
    (dict(pattern='G-', mlp='none'), "asks for an mlp, and model.mlp='none'"),
    (dict(pattern='G', d_model=20, num_heads=4), 'which 4 heads'),
  ],
  ids=lambda x: str(x)[:20],
)
def test_bad_patterns_get_one_line(change, text):
  with pytest.raises(errors.UserError, match=text) as e:
    model_checks.check_model(schema.Model(**dict(num_heads=2) | change))
  assert '\n' not in str(e.value)


def test_matrices_begin_as_init_std_says(monkeypatch):
  """Those that add to residuals 1 / sqrt(2 L) as wide; steps of kind S and
  adapters by their own rank. Of numbers that are all drawn as 1."""
  monkeypatch.setattr(jax.random, 'normal', lambda key, shape: jnp.ones(shape))
  many = fields(LETTERS, num_layers=len(LETTERS), init_std=1e-3)
  model = decoder.Decoder(many)
  params = jax.jit(model.init)(jax.random.key(0))
  own = {'layers/mamba/step_up'}
  for path in (p for p, kind in model.kinds.items() if kind == 'matrix'):
    if path.endswith(parameter.OWN_ADAPTERS):
      continue
    added = path.endswith(('/output', 'mlp/down', 'tcn/hidden'))
    wanted = 1e-3 * (2 * len(LETTERS)) ** (-0.5 * added)
    found = float(params[path].ravel()[0])
    assert np.isclose(found, wanted, 1e-6) == (path not in own), path
  for name in (layer.MIXERS[kind].name for kind in 'RL'):
    assert (params[f'layers/{name}/recurrent'] == 0.5).all()


def test_layers_without_an_mlp_have_no_parameters_for_one():
  model, params = made('G-G')
  assert params['layers/gated_linear/query'].shape[0] == 2
  assert params['layers/mlp/up'].shape[0] == 1
  assert params['layers/mlp_norm/scale'].shape[0] == 1
  assert model.pattern == ('G', 'G.')
