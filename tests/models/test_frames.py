"""Frames in a decoder and integrate-and-fire, against loops and on meshes.

Legend: B rows, T places, C numbers of a frame, S frames, N tokens, D model.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models import frames
from paraxis.sharding.sequence import order as context_order
from paraxis.train import step
from paraxis.train.data import objectives
from paraxis.train.steps import gradients
from paraxis.train.updates import optimizers

pytestmark = pytest.mark.usefixtures('float64')

B, T, C, V, D = 8, 16, 5, 24, 16
SMALL = dict(
  vocab_size=V, d_model=D, num_heads=4, num_kv_heads=2, d_ff=32, num_layers=2,
  attention_block=4, dtype='float64', param_dtype='float64', visibility='full',
  tied_embedding=False,
)  # fmt: skip


def rows(features=C, shape=(B, T)):
  rng = np.random.default_rng(1)
  ids = lambda: rng.integers(0, V, shape).astype(np.int32)
  places = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
  given = rng.normal(size=(*shape, features)) if features else None
  if features:
    given[..., shape[-1] // 2 :, :] = 0  # places without a frame
  weights = rng.random(shape)
  return batch_lib.Batch(
    ids(), ids(), np.ones(shape, np.int32), places, weights, weights.sum(),
    given,
  )  # fmt: skip


def model_of(**fields):
  return decoder.Decoder(schema.view(dict(model=SMALL | fields)).model)


# ------------------------------------------------------------- in a decoder


def test_a_frame_is_part_of_an_embedding():
  """A model whose table has the sum of each place gives the same; gradients of
  table, projection and frames follow from those of that table by hand."""
  model, batch = model_of(features=C), rows()
  params = module_cases.parameters(model, 0.3)
  plain = model_of(vocab_size=B * T)
  head = {'head': np.pad(params['head'], ((0, B * T - V), (0, 0)))}
  own = {p: x for p, x in params.items() if p != 'frames'} | head
  table = params['embedding'][batch.tokens]
  for b in range(B):
    for t in range(T):
      for c in range(C):
        table[b, t] += batch.features[b, t, c] * params['frames'][c]
  own['embedding'] = table.reshape(B * T, D)
  ids = np.arange(B * T, dtype=np.int32).reshape(B, T)
  alone = batch._replace(tokens=ids, features=None)
  # More words: the head's further rows have logits of 0, not of - inf.
  logits = lambda m, p, b: m.logits(p, m.features(p, b)[0])[..., :V]
  np.testing.assert_allclose(
    logits(model, params, batch), logits(plain, own, alone), atol=1e-12
  )
  c_BTV = np.random.default_rng(4).normal(size=(B, T, V))
  of = lambda m, b: jax.grad(lambda p: (logits(m, p, b) * c_BTV).sum())
  found, wanted = of(model, batch)(params), of(plain, alone)(own)
  dx = np.asarray(wanted['embedding']).reshape(B, T, D)
  into, rows_of = np.zeros((C, D)), np.zeros((V, D))
  for b in range(B):
    for t in range(T):
      into += np.outer(batch.features[b, t], dx[b, t])
      rows_of[batch.tokens[b, t]] += dx[b, t]
  assert module_cases.close(found['frames'], into, 1e-12)
  assert module_cases.close(found['embedding'], rows_of, 1e-12)
  by_frame = jax.grad(
    lambda f: (logits(model, params, batch._replace(features=f)) * c_BTV).sum()
  )(batch.features)
  assert module_cases.close(by_frame, dx @ params['frames'].T, 1e-12)
  other = np.roll(batch.features, 1, 1)  # each frame at the place behind
  moved = of(model, batch._replace(features=other))(params)
  assert not module_cases.close(moved['frames'], into, 1e-3)


def _step(batch, mesh, microbatches=1):
  """(loss, {path: gradient}) of step.grads of rows on a mesh, in order."""
  config = schema.view(dict(
    model=SMALL | dict(features=C),
    mesh=mesh,
    data=dict(sequence_length=T),
    train=dict(batch_size=B, microbatches=microbatches),
  ))  # fmt: skip
  count = int(np.prod([n for n in mesh.values() if isinstance(n, int)]))
  made = build.build(config, devices=jax.devices()[:count], remat='none')
  optimizer = optimizers.Optimizer(config.optimizer, 10, made.model)
  run = step.make(made, optimizer, 0.0).grads
  plan = made.model.layout.context
  order = np.arange(T)
  if plan is not None:
    order = context_order.permutation(plan.layout, plan.n, T)
  along = lambda x: x[:, order] if np.ndim(x) > 1 else x
  batch = jax.tree.map(along, batch)
  parts = config.microbatches
  if parts > 1:
    apart = lambda x: x.reshape(parts, -1, *x.shape[1:]) if np.ndim(x) else x
    batch = jax.tree.map(apart, batch)
  full = module_cases.parameters(decoder.Decoder(config.model), 0.3)
  with build.use(made):
    params = module_cases.placed(made, full)
    specs = gradients.batch_specs(batch)
    put = lambda x, s: jax.device_put(x, jax.NamedSharding(made.mesh, s))
    placed = jax.tree.map(put, batch, specs)
    value, grads, _ = jax.jit(run)(params, placed)
  return float(value), jax.device_get(grads)


MESHES = [
  dict(data=2, fsdp=2, tensor=2),
  dict(context=4, data=2),
  dict(data=4, tensor=2, collectives='explicit'),
  dict(stage=2, data=4),
]


@pytest.mark.parametrize(
  'mesh', MESHES, ids=lambda m: '-'.join(map(str, m.values()))
)
def test_a_mesh_is_one_device(mesh):
  batch = rows()
  alone, here = _step(batch, dict(data=1)), _step(batch, mesh)
  assert abs(alone[0] - here[0]) < 1e-12 * abs(alone[0])
  support.close(here[1], alone[1])
  swapped = batch._replace(features=batch.features[::-1])  # other rows' frames
  assert abs(_step(swapped, mesh)[0] - alone[0]) > 1e-3


def test_microbatches_are_the_step():
  batch = rows()
  alone = _step(batch, dict(data=1))
  here = _step(batch, dict(data=2), microbatches=4)
  support.close(here[1], alone[1])


def test_without_frames_a_step_compiles_as_it_did():
  """The text of a step whose batch has no such leaf at all is the same."""
  names = [n for n in batch_lib.Batch._fields if n != 'features']
  old = collections.namedtuple('Batch', names)  # noqa: PYI024
  config = schema.view(dict(model=SMALL, train=dict(batch_size=B)))
  made = build.build(config, devices=jax.devices()[:1])
  optimizer = optimizers.Optimizer(config.optimizer, 10, made.model)
  run = step.make(made, optimizer, 0.0).grads
  batch = rows(features=0)

  def text(batch):
    with build.use(made):
      return jax.jit(run).lower(made.params, batch).as_text()

  class Old(old):
    features, read = None, batch_lib.Batch.read

  assert text(batch) == text(Old(*(getattr(batch, n) for n in names)))
  with build.use(made), support.refused('model.features=0', '5 numbers'):
    jax.jit(run).lower(made.params, rows())


def test_what_does_not_fit_is_refused():
  model = model_of(features=C)
  params = module_cases.parameters(model, 0.3)
  with support.refused(f'model.features={C}', 'frames of 0 numbers'):
    model.features(params, rows(features=0))
  with support.refused(f'model.features={C}', 'frames of 3 numbers'):
    model.features(params, rows(features=3))
  batch = rows()
  short = batch._replace(features=batch.features[:, 1:])
  with support.refused('each place of a row has a frame'):
    model.features(params, short)
  with support.refused(f'model.features={C}', 'text'):
    objectives.check(schema.view(dict(model=SMALL | dict(features=C))))


# ------------------------------------------------------- integrate-and-fire

S, N = 23, 14


def fired_by_loop(h_SD, alpha_S, apart=True):
  """List of tokens (D,): frames come one by one, and a token is fired when the
  weights have summed to 1; apart: the frame is then split."""
  out, total, sum_D = [], 0.0, 0.0
  for t in range(len(alpha_S)):
    left = alpha_S[t]
    while total + left >= 1:
      part = 1 - total if apart else left
      out.append(sum_D + part * h_SD[t])
      left, total, sum_D = left - part, 0.0, 0.0
    total, sum_D = total + left, sum_D + left * h_SD[t]
  if total >= 1 - 0.45:
    out.append(sum_D)
  return out


def frames_of(scale=1.0, seed=0):
  rng = np.random.default_rng(seed)
  alpha = rng.uniform(0.05, 0.95, (3, S)) * np.array([[1.0], [0.6], [0.3]])
  return rng.normal(size=(3, S, D)), alpha * scale


@pytest.mark.parametrize('scale', [1.0, 1.4], ids=['', 'several_a_frame'])
def test_one_product_is_the_loop(scale):
  h, alpha = frames_of(scale)
  count = frames.counted(alpha)
  most = int(count.max())
  # Sums of weights are rounded as numbers up to N are, those of the loop as 1.
  within = 2 * most * np.finfo(float).eps * abs(h).max()
  found = frames.fired(h, alpha, count, most)
  c = np.random.default_rng(3).normal(size=found.shape)
  of = lambda h, a: (frames.fired(h, a, count, most) * c).sum()
  dh, da = jax.grad(of, (0, 1))(h, jnp.asarray(alpha))
  for b in range(len(h)):
    want = fired_by_loop(h[b], alpha[b])
    assert len(want) == count[b] and not np.any(found[b, len(want) :])
    np.testing.assert_allclose(found[b, : len(want)], want, atol=within, rtol=0)

    def by_loop(h, a, b=b):
      made = fired_by_loop(h, a)
      return sum((x * w).sum() for x, w in zip(made, c[b], strict=False))

    want_h, want_a = jax.grad(by_loop, (0, 1))(
      jnp.asarray(h[b]), jnp.asarray(alpha[b])
    )
    np.testing.assert_allclose(dh[b], want_h, atol=1e-13)
    np.testing.assert_allclose(da[b], want_a, atol=1e-12)


def test_a_frame_that_is_not_split_is_another_token():
  """Knock-out: the comparison above sees whose a boundary's frame is."""
  h, alpha = frames_of()
  count = frames.counted(alpha)
  found = frames.fired(h, alpha, count, int(count.max()))
  want = fired_by_loop(h[0], alpha[0], apart=False)
  same = min(len(want), int(count[0]))
  assert abs(found[0, :same] - np.array(want[:same])).max() > 0.1


def test_known_counts_have_whole_tokens():
  _, alpha = frames_of()
  count = np.array([4, 1, 9])
  assert float(frames.quantity(alpha, count)) > 1
  own = frames.scaled(alpha, count)
  assert float(frames.quantity(own, count)) < 1e-14
  w = np.asarray(frames.split(own, N))
  for b, n in enumerate(count):
    np.testing.assert_allclose(w[b, :, :n].sum(0), 1, atol=2e-15 * n)
    np.testing.assert_allclose(w[b, :, n:].sum(0), 0, atol=2e-15 * n)
  np.testing.assert_allclose(w.sum(2), own, atol=4e-15)
  np.testing.assert_array_equal(frames.counted(own), count)


def test_weights_are_a_loop_over_frames():
  own = frames.initial(jax.random.key(0), D)
  own['taps_bias'] = jnp.linspace(-1, 1, D)
  h, _ = frames_of()
  found = frames.weights(own, h)
  for t in range(S):
    x = h[:, t] + own['taps_bias']
    for i, at in enumerate((t - 1, t, t + 1)):
      if 0 <= at < S:
        x = x + h[:, at] @ own['taps'][i]
    z = np.maximum(x, 0) @ own['out'] + own['out_bias']
    np.testing.assert_allclose(found[:, t], 1 / (1 + np.exp(-z)), atol=1e-14)


def test_rows_on_devices_are_rows_on_one():
  rng = np.random.default_rng(5)
  h, count = rng.normal(size=(8, S, D)), np.arange(1, 9)
  own = frames.initial(jax.random.key(1), D)

  def run(own, h, count):
    alpha = frames.scaled(frames.weights(own, h), count)
    return jnp.square(frames.fired(h, alpha, count, N)).sum()

  both = jax.jit(jax.value_and_grad(run, (0, 1)))
  wanted = both(own, h, count)
  with support.laid_out('data=8') as mesh:
    over = functools.partial(jax.NamedSharding, mesh)
    put = lambda x: jax.device_put(x, over(jax.P('data')))
    held = jax.device_put(jax.tree.map(np.asarray, own), over(jax.P()))
    found = both(held, put(h), put(count))
    support.close(jax.device_get(found), jax.device_get(wanted))
  with support.laid_out('context=2'), support.refused('mesh.context=1'):
    frames.fired(h, h[..., 0], count, N)


def test_targets_are_glanced_where_they_were_wrong_so_often():
  rng = np.random.default_rng(6)
  E, target = rng.normal(size=(2, 5, 9, D))
  there = np.arange(9) < np.array([9, 9, 6, 3, 0])[:, None]
  wrong = np.zeros_like(there)
  for b, n in enumerate([0, 4, 5, 3, 0]):
    wrong[b, :n] = True
  found = frames.glanced(E, target, wrong, there, 0.75, jax.random.key(0))
  shown = np.asarray((found == target).all(-1))
  assert ((found == E).all(-1) | shown).all() and not (shown & ~there).any()
  assert shown.sum(1).tolist() == [0, 3, 3, 2, 0]
  again = frames.glanced(E, target, wrong, there, 0.75, jax.random.key(1))
  assert not np.array_equal(again, found)
