"""ZeRO stages 0 to 3: the run of one device, in the bytes that are promised.

    stage   parameters   sums of microbatches   gradients   optimizer state
      0     P            P                      P           2 P
      1     P            P                      P / n       2 P / n
      2     P            P / n                  P / n       2 P / n
      3     P / n        P / n                  P / n       2 P / n

(arXiv:1910.02054, section 5, in elements, n shards of data; AdamW keeps two
moments.) Every pair of mesh, collectives and stage is here, with two
microbatches; tests/models/test_decoder.py compares gradients in more layouts.

Legend: A microbatches, B rows, T tokens, D model, V vocabulary.
"""

import functools
import math
import re

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.sharding import annotate
from paraxis.sharding import rules as rules_lib
from paraxis.train import optimizers
from paraxis.train import program as job_lib
from paraxis.train import state as state_lib
from paraxis.train import step as step_lib

pytestmark = pytest.mark.usefixtures('float64')

A, B, T, D, V, L, STEPS = 2, 16, 24, 16, 64, 2, 3
MODEL = dict(
  vocab_size=V, d_model=D, num_layers=L, num_heads=4, num_kv_heads=2, d_ff=40,
  head_dim=8,
  dtype='float64', param_dtype='float64', attention_block=8, qk_norm='head',
)  # fmt: skip
WIDE, CUBE = 'data=8', 'data=2,fsdp=2,tensor=2'
CASES = [
  (WIDE, 'explicit', 0), (WIDE, 'annotated', 1), (WIDE, 'explicit', 2),
  (WIDE, 'annotated', 3), (WIDE, 'explicit', 3), (CUBE, 'annotated', 0),
  (CUBE, 'explicit', 1), (CUBE, 'annotated', 2), (CUBE, 'explicit', 3),
]  # fmt: skip
MUON = [(WIDE, 'annotated', 1), (CUBE, 'explicit', 1), (CUBE, 'annotated', 2),
        (CUBE, 'explicit', 3)]  # fmt: skip


def batch(step):
  """Rows of two documents and padding; weights that differ from row to row."""
  rng = np.random.default_rng(step)
  ids = rng.integers(0, V, (A, B // A, T + 1), np.int32)
  place = np.arange(T) + np.zeros((A, B // A, 1), int)
  cut = rng.integers(3, T - 4, (A, B // A, 1))
  segments = np.where(place < cut, 1, 2) * (place < T - 2)
  positions = np.where(place < cut, place, place - cut)
  weights = rng.uniform(size=place.shape) * (segments > 0)
  return batch_lib.Batch(
    ids[..., :-1],
    ids[..., 1:],
    segments.astype(np.int32),
    positions.astype(np.int32),
    weights,
    np.float64(weights.sum()),
  )


def job_of(mesh, optimizer='adamw', **choices):
  """A Program."""
  config = schema.Config(
    mesh=schema.Mesh(**choices),
    model=schema.Model(**MODEL),
    data=schema.Data(sequence_length=T),
    optimizer=schema.Optimizer(name=optimizer, warmup_steps=2),
    train=schema.Train(batch_size=B, microbatches=A),
  )
  devices = jax.devices()[: 1 if mesh == 'data=1' else 8]
  built = build.build(config, mesh, devices=devices)
  rule = optimizers.Optimizer(config.optimizer, STEPS, built.model)
  return job_lib.Program(config, built, rule)


@functools.cache
def parameters():
  rng = np.random.default_rng(0)
  shapes = job_of('data=1').built.params
  return {p: rng.normal(0, 0.3, s.shape) for p, s in sorted(shapes.items())}


def on_mesh(job):
  put = lambda path, leaf: jax.device_put(parameters()[path], leaf.sharding)
  return {p: put(p, leaf) for p, leaf in job.built.params.items()}


@functools.cache
def gradient(mesh, collectives='annotated', zero=0):
  """Compiled gradients of a layout: they do not know the optimizer."""
  job = job_of(mesh, collectives=collectives, zero=zero)
  with job.context():
    run = support.jit(step_lib.make(job.built, job.optimizer, 1.0).grads)
    return run.lower(job.built.params, job.put(batch(0))).compile()


@functools.cache
def trained(mesh, collectives='annotated', zero=0, optimizer='adamw'):
  """(Program, [losses], gradients of the last step, states before, after)."""
  job = job_of(mesh, optimizer, collectives=collectives, zero=zero)
  run = gradient(mesh, collectives, zero)
  with job.context():
    params = on_mesh(job)
    inner = support.jit(job.optimizer.init)(params)
    everywhere = jax.NamedSharding(job.mesh, jax.P())
    zeros = [jax.device_put(np.int32(0), everywhere) for _ in range(3)]
    first = state = state_lib.State(params, inner, *zeros)
    update = support.jit(step_lib.make(job.built, job.optimizer, 1.0).update)
    losses = []
    for i in range(STEPS):
      loss, grads = run(state.params, job.put(batch(i)))
      state, metrics = update(state, loss, grads)
      losses.append(float(metrics['loss']))
  return job, losses, grads, first, state


def near(found, wanted, bound):
  """Every leaf, relative to its largest value."""
  found, wanted = map(state_lib.flatten, (found, wanted))
  assert found.keys() == wanted.keys()
  for path, b in wanted.items():
    a, b = np.asarray(found[path]), np.asarray(b)
    assert np.abs(a - b).max() <= bound * max(np.abs(b).max(), 1e-30), path


@pytest.mark.parametrize('mesh, collectives, zero', CASES)
def test_steps_of_adamw_are_those_of_one_device(mesh, collectives, zero):
  _, losses, grads, _, state = trained(mesh, collectives, zero)
  _, want, single, _, end = trained('data=1')
  np.testing.assert_allclose(losses, want, rtol=1e-11)
  near(state, end, 1e-9)
  for path, g in single.items():
    assert np.abs(g).max() > 1e-6, path
  assert len(set(losses)) == STEPS and losses[-1] < losses[0]


@pytest.mark.parametrize('mesh, collectives, zero', MUON)
def test_steps_of_muon_are_those_of_one_device(mesh, collectives, zero):
  *_, state = trained(mesh, collectives, zero, 'muon')
  near(state, trained('data=1', optimizer='muon')[-1], 1e-9)


def test_a_sum_of_one_shard_is_seen(monkeypatch):
  """What is scattered is this shard's own term: the rest is lost."""

  def part(x, axes, scatter_dimension, tiled):
    assert tiled
    size = x.shape[scatter_dimension] // jax.lax.axis_size(axes)
    first = jax.lax.axis_index(axes) * size
    return jax.lax.dynamic_slice_in_dim(x, first, size, scatter_dimension)

  monkeypatch.setattr(jax.lax, 'psum_scatter', part)
  run = gradient.__wrapped__(WIDE, 'explicit', 2)
  job = job_of(WIDE, collectives='explicit', zero=2)
  loss, grads = run(on_mesh(job), job.put(batch(0)))
  want = job_of('data=1')
  loss_, wanted = gradient('data=1')(on_mesh(want), want.put(batch(0)))
  assert float(loss) == pytest.approx(float(loss_), rel=1e-12)
  far = [
    p
    for p, g in wanted.items()
    if np.abs(np.asarray(grads[p]) - np.asarray(g)).max()
    > 1e-3 * np.abs(np.asarray(g)).max()
  ]
  assert set(far) == set(wanted)


def bytes_of(tree):
  """Bytes that each device holds: one number, the same on all."""
  held = {}
  for x in jax.tree.leaves(tree):
    for shard in x.addressable_shards:
      key = shard.device.id
      held[key] = held.get(key, 0) + shard.data.nbytes
  assert len(held) == 8 and len(set(held.values())) == 1, held
  return next(iter(held.values()))


def elements(job, tree_names, *, over):
  """Elements a device holds of all parameters, each divided by `over`."""
  names = tree_names or job.built.params
  return sum(math.prod(job.built.params[p].shape) // over(p) for p in names)


@pytest.mark.parametrize('mesh, collectives, zero', CASES)
def test_bytes_per_device(mesh, collectives, zero):
  """The table above, by what every device really holds after some steps."""
  job, _, grads, first, state = trained(mesh, collectives, zero)
  axes = job.model.axes
  split = dict(
    embed=2 * (mesh == CUBE), heads=2 * (mesh == CUBE), mlp=2 * (mesh == CUBE),
    vocab=2 * (mesh == CUBE), kv_heads=2 * (mesh == CUBE),
  )  # fmt: skip
  n = 8 if mesh == WIDE else 2  # shards of data
  own = lambda p: math.prod(split.get(a) or 1 for a in axes[p])
  wide = lambda p: own(p) * (n if 'embed' in axes[p] and zero == 3 else 1)
  all_of = lambda p: own(p) * n
  params = elements(job, None, over=wide)
  mirrored = elements(job, None, over=all_of if zero else own)
  count = 4  # adamw's int32 step
  assert bytes_of(state.params) == 8 * params
  assert bytes_of(state.optimizer) == 2 * 8 * mirrored + count
  assert bytes_of(grads) == 8 * mirrored
  # The state is what it was: its memory can be given back, and resumed from.
  shardings = lambda s: [x.sharding for x in jax.tree.leaves(s)]
  for a, b, x in zip(
    shardings(first), shardings(state), jax.tree.leaves(state), strict=True
  ):
    assert a.is_equivalent_to(b, x.ndim)


@pytest.mark.parametrize('mesh, collectives, zero', CASES)
def test_gradients_and_moments_lie_alike(mesh, collectives, zero):
  """An update moves no gradient and no moment."""
  job, _, grads, _, state = trained(mesh, collectives, zero)
  moments = state.optimizer['adamw'][0]
  for path, g in grads.items():
    for x in (moments.mu[path], moments.nu[path]):
      assert x.sharding.is_equivalent_to(g.sharding, g.ndim), path
    with job.context():
      spec = rules_lib.stored(
        job.model.axes[path], g.shape, job.built.rules, annotate.sizes(), 1
      )
    want = jax.NamedSharding(job.mesh, spec)
    assert g.sharding.is_equivalent_to(want, g.ndim), path


def collectives_of(text, name):
  """[(elements made, in a loop)] of each collective of that name."""
  body, entry = text.split('ENTRY')
  found = []
  for part, inside in ((body, True), (entry, False)):
    for line in part.splitlines():
      m = re.search(rf'= (.*?) {name}(-start)?\(', line)
      if m:
        for dims in re.findall(r'\b[a-z]+\d+\[([\d,]*)\]', m[1]):
          sizes = [int(d) for d in dims.split(',') if d]
          found.append((math.prod(sizes), inside))
  return found


def test_stage_0_reduces_every_gradient():
  text = gradient(WIDE, 'explicit', 0).as_text()
  total = sum(x.size for x in parameters().values())
  assert not collectives_of(text, 'reduce-scatter')
  assert not collectives_of(text, 'all-gather')
  reduced = collectives_of(text, 'all-reduce')
  assert sum(n for n, _ in reduced) == total + 1  # and the loss
  assert not any(inside for _, inside in reduced)  # once, not per microbatch


def test_stage_2_scatters_every_microbatch_and_gathers_nothing():
  """Psi elements a microbatch (section 7.1); parameters are not moved."""
  text = gradient(WIDE, 'explicit', 2).as_text()
  total = sum(x.size for x in parameters().values())
  scattered = collectives_of(text, 'reduce-scatter')
  assert 8 * sum(n for n, _ in scattered) == total
  assert all(inside for _, inside in scattered)
  assert not collectives_of(text, 'all-gather')
  assert sum(n for n, _ in collectives_of(text, 'all-reduce')) == 1  # loss


def test_stage_1_scatters_once():
  text = gradient(CUBE, 'explicit', 1).as_text()
  inside = [n for n, loop in collectives_of(text, 'reduce-scatter') if not loop]
  held = job_of(CUBE, zero=1).built
  local = sum(
    math.prod(s.sharding.shard_shape(s.shape)) for s in held.params.values()
  )
  assert 2 * sum(inside) == local


def test_stage_3_gathers_weights_and_never_rows():
  text = gradient(WIDE, 'explicit', 3).as_text()
  params = job_of(WIDE, zero=3).built.params
  wide = {
    p: math.prod(s.shape[1 if p.startswith('layers/') else 0 :])
    for p, s in params.items()
    if 'data' in s.sharding.spec
  }
  gathered = [n for n, _ in collectives_of(text, 'all-gather')]
  assert gathered and set(gathered) <= set(wide.values())
  # A matrix of a layer forward and backward; each gradient scattered once.
  matrices = [n for p, n in wide.items() if p.startswith('layers/')]
  assert sum(n in matrices for n in gathered) >= 2 * len(matrices)
  scattered = [n for n, _ in collectives_of(text, 'reduce-scatter')]
  assert all(scattered.count(n // 8) >= 1 for n in wide.values())
  rest = sum(x.size for x in parameters().values()) - sum(
    math.prod(params[p].shape) for p in wide
  )
  summed = sum(n for n, _ in collectives_of(text, 'all-reduce'))
  assert summed <= rest + 1
