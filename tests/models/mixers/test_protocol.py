"""What every mixer promises, whatever it computes (models/mixers/protocol.py).

Packed documents do not see one another, padding changes nothing, no token sees
what follows, and decoding, in steps or in chunks, gives what one pass gives.

Legend: B rows, T tokens, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import step
from paraxis.models import batch as batch_lib
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.models import layer
from paraxis.models.mixers import protocol as mixer

pytestmark = pytest.mark.usefixtures('float64')

V, T, B = 32, 20, 2
BOUND = 1e-11
QUICK = {'xla_backend_optimization_level': 0}  # to compile
LETTERS = ''.join(k for k in layer.MIXERS if k not in 'WN')  # F, masked
# C goes by positions alone.
RECURRENT = 'GMSRL'


def fields(pattern, **more):
  """schema.Model with two layers of each kind of the pattern."""
  own = dict(
    vocab_size=V, d_model=16, num_heads=2, d_ff=16, pattern=pattern, window=6,
    num_layers=2, dtype='float64', param_dtype='float64', attention_block=8,
  )  # fmt: skip
  model = schema.Model(**own | more)
  small = dict(
    gated_linear=dict(gate_rank=3, conv_width=3),
    mamba=dict(head_dim=4, state=4, dt_rank=2),
    recurrent=dict(tolerance=1e-13),
    tcn=dict(kernel=3, depth=2, chunk=6),
    latent=dict(rank=6, nope_dim=4, rope_dim=4, value_dim=6),
  )
  sections = {
    name: type(getattr(model, name))(**values) for name, values in small.items()
  }
  return schema.Model(**own | sections | more)


def made(pattern, **more):
  """(Decoder, random parameters: at their initial 0 and 1 mistakes hide)."""
  model = decoder.Decoder(fields(pattern, **more))
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  draw = lambda path, shape: (
    rng.normal(0.5, 0.3, shape)
    if model.kinds[path] == 'vector'
    else rng.normal(0, 0.3, shape)
  )
  return model, {
    p: jnp.asarray(draw(p, s.shape), s.dtype) for p, s in sorted(shapes.items())
  }


def batch(tokens, segments, positions):
  cast = lambda x: jnp.asarray(x, jnp.int32)
  return batch_lib.Batch(
    cast(tokens), None, cast(segments), cast(positions), None, None
  )


def documents(lengths, width=T):
  """(segments, positions), both (1, T): documents in a row, padding behind."""
  segments, positions = np.zeros((2, 1, width), np.int32)
  first = 0
  for i, n in enumerate(lengths):
    segments[0, first : first + n] = i + 1
    positions[0, first : first + n] = np.arange(n)
    first += n
  return segments, positions


def tokens(rows=B, seed=0):
  return np.random.default_rng(seed).integers(0, V, (rows, T))


def farthest(a, b):
  return float(jnp.abs(a - b).max() / jnp.abs(b).max())


def packed_gap(model, params):
  """The largest difference of a packed document from the document alone."""
  run = jax.jit(lambda batch: model(params, batch)[0], compiler_options=QUICK)
  ids, lengths = tokens(1), (7, 1, 9)
  rows = run(batch(ids, *documents(lengths)))
  gaps, first = [], 0
  for n in lengths:
    alone = np.zeros_like(ids)  # padding holds any token
    alone[0, :n] = ids[0, first : first + n]
    found = run(batch(alone, *documents((n,))))
    gaps.append(farthest(rows[:, first : first + n], found[:, :n]))
    first += n
  return max(gaps)


@pytest.mark.parametrize('kind', LETTERS)
def test_packed_documents_are_what_they_are_alone(kind):
  assert packed_gap(*made(kind)) <= BOUND


@pytest.mark.parametrize('kind', RECURRENT)
def test_a_recurrence_that_is_not_reset_shows(kind, monkeypatch):
  never = lambda see: jnp.zeros(see.segments.shape, bool)
  monkeypatch.setattr(mixer, 'resets', never)
  assert packed_gap(*made(kind)) > 1e-3


@pytest.mark.parametrize('kind', LETTERS)
def test_no_token_sees_what_follows_or_another_document(kind):
  model, params = made(kind)
  ids, marks = tokens(1), documents((8, 10))
  table = params['embedding'][ids]  # as a leaf of its own

  def others(x):
    inside = model.visibility(batch(ids, *marks))
    y = model.run(model.pattern, params, x, inside)
    return (y[:, 8:13] ** 2).sum()

  g = jnp.abs(jax.jit(jax.grad(others), compiler_options=QUICK)(table)).max(
    (0, 2)
  )
  assert (g[:8] == 0).all() and (g[13:] == 0).all()
  assert (g[8:13] > 0).all()  # and each of its own past


@pytest.mark.parametrize('kind', LETTERS)
def test_prefill_and_steps_are_one_pass(kind):
  """Rows of unequal length: what pads a prompt leaves no trace."""
  model, params = made(kind)
  ids, lengths, n = tokens(), np.array([17, 11]), 3
  rows = [np.repeat(x, B, 0) for x in documents((T,))]
  whole = jax.jit(lambda batch: model(params, batch)[0], compiler_options=QUICK)
  full = whole(batch(ids, *rows))
  loose = model.unstack(params)
  prompt = jnp.asarray(ids[:, :17], jnp.int32)
  start = jax.jit(
    lambda lengths: step.prefill(model, loose, prompt, lengths, 17 + n),
    compiler_options=QUICK,
  )
  x, cache = start(lengths)
  for b, length in enumerate(lengths):
    assert farthest(x[b, :length], full[b, :length]) <= BOUND
  one = jax.jit(
    lambda cache, *row: model(loose, batch(*row), cache), compiler_options=QUICK
  )
  for t in range(n):
    at = lengths + t
    row = ids[np.arange(B), at], np.ones(B), at
    x, cache = one(cache, *(a[:, None] for a in row))
    for b in range(B):
      assert farthest(x[b, 0], full[b, at[b]]) <= BOUND, (t, b)


@pytest.mark.parametrize('kind', LETTERS)
def test_prefill_in_chunks_is_one_pass(kind):
  model, params = made(kind)
  loose, ids = model.unstack(params), tokens()
  segments, positions = (np.repeat(x, B, 0) for x in documents((T,)))

  def whole_and_parts(rows):
    full = model(params, batch(*rows))[0]
    cache, found = model.init_cache(B, T), []
    for first, last in ((0, 9), (9, 10), (10, T)):
      part = [x[:, first:last] for x in rows]
      x, cache = model(loose, batch(*part), cache)
      found.append(x)
    return jnp.concatenate(found, 1), full

  rows = ids, segments, positions
  found = jax.jit(whole_and_parts, compiler_options=QUICK)(rows)
  assert farthest(*found) <= BOUND


@pytest.mark.parametrize('kind', LETTERS)
def test_the_state_grows_with_the_tokens_or_not_at_all(kind):
  model, _ = made(kind)
  size = lambda slots: sum(
    x.size
    for x in jax.tree.leaves(
      jax.eval_shape(lambda: model.init_cache(B, slots)).states
    )
  )
  grows = layer.MIXERS[kind].capabilities.slots
  assert size(64) == (2 * size(32) if grows else size(32))


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
    (dict(pattern='GX'), "'X' is no mixer"),
    (dict(pattern='-G'), "'-' is an mlp that follows no mixer"),
    (dict(pattern='G--'), 'follows no mixer'),
    (dict(pattern=''), 'name at least one layer kind'),
    (dict(pattern='G-', mlp='none'), "asks for an mlp, and model.mlp='none'"),
    (dict(pattern='G', d_model=20, num_heads=4), 'which 4 heads'),
  ],
  ids=lambda x: str(x)[:20],
)
def test_bad_patterns_get_one_line(change, text):
  with pytest.raises(errors.UserError, match=text) as e:
    model_checks.check_model(schema.Model(**dict(num_heads=2) | change))
  assert '\n' not in str(e.value)


def test_layers_without_an_mlp_have_no_parameters_for_one():
  model, params = made('G-G')
  assert params['layers/gated_linear/query'].shape[0] == 2
  assert params['layers/mlp/up'].shape[0] == 1
  assert params['layers/mlp_norm/scale'].shape[0] == 1
  assert model.pattern == ('G', 'G.')
