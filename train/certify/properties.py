"""What `paraxis verify` compares, property by property, with one device.

Every function here takes a `Certification` and yields one or more `Verdict`s
(certification.py: how far apart numbers are, and may be). `PROPERTIES` names
them all; a name that is not asked for costs nothing. To add a property, add a
function.
"""

import dataclasses
import math
import tempfile
from typing import Any

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import trained
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train import state as state_lib
from paraxis.train.certify import certification
from paraxis.train.certify import declared
from paraxis.train.certify import dtypes
from paraxis.train.certify import trial
from paraxis.train.data import batch_ramp
from paraxis.train.data import shape_cycle

ROUNDING = 1e-5
# Of schema.Train, remat and memory. The last is MEMO (arXiv:2407.12117).
MEMORY = (
  ('none', ''),
  ('attention', ''),
  ('dots', ''),
  ('full', ''),
  ('full', 'residual=offload,attention=offload'),
)
ELSEWHERE = ('data=2,fsdp=2,tensor=2', 'fsdp=8', 'data=1')


def _loss(run):
  yield run.verdict('loss', (run.loss_difference(), ''), run.bounds[0])


def _every_gradient(run):
  count = len(run.reference.gradients)
  found = run.gradient_difference()
  yield run.verdict(f'gradients, every one of {count} leaves', found)


def _one_update(run):
  job = run.runner.job
  with job.context():
    updated = jax.device_get(state_lib.in_order(run.updated, job.leaves))
  yield run.verdict(
    'one update, identical gradients, whole state',
    trial.worst(updated, run.reference.updated),
    certification.BOUNDS[run.config.model.param_dtype][1],
  )


def _layout(run):
  """Gradients and state are laid out as the rules say, and are as small as the
  README says: nothing is silently replicated, which no number would show."""
  built = run.runner.job.built
  sizes, model = dict(built.mesh.shape), built.model
  stages = {'gradients': rules_lib.GRADIENTS, 'optimizer': rules_lib.OPTIMIZER}
  stages[trained.EMA] = rules_lib.OPTIMIZER
  leaves = {f'gradients/{p}': g for p, g in run.gradients[1].items()}
  # A slope along a direction is of no parameter.
  axes = {f'gradients/{p}': model.axes.get(p, ()) for p in run.gradients[1]}
  axes |= state_lib.axes(run.runner.job.leaves)
  leaves |= run.updated
  moved = []
  for path, x in leaves.items():
    stage = stages.get(path.split('/')[0], math.inf)
    spec = rules_lib.stored(axes[path], x.shape, built.rules, sizes, stage)
    wanted = jax.NamedSharding(built.mesh, spec)
    count = declared.elements(axes[path], x.shape, run.config, stage)
    as_small = math.prod(x.sharding.shard_shape(x.shape)) == count
    if not (as_small and x.sharding.is_equivalent_to(wanted, x.ndim)):
      moved.append(path)
  yield run.verdict(
    f'layout, {len(leaves)} leaves of gradients and state',
    (float(len(moved)), ', '.join(moved[:1])),
    0.0,
  )


def _steps(run):
  if run.config.model.dtype == 'bfloat16':
    return
  reference = run.reference
  state = run.runner.steps(reference.params, reference.batches)
  found, wanted = run.runner.job.in_order(state.params), reference.stepped
  top = {p: np.abs(g).max() for p, g in reference.gradients.items()}
  if not top.keys() & wanted.keys():  # one slope moves them all
    top = dict.fromkeys(wanted, 1.0)
  gaps = {
    p: float(np.abs(found[p] - x).max())
    for p, x in wanted.items()
    if top.get(p, 0) > ROUNDING * max(top.values())
  }
  where = max(gaps, key=lambda path: gaps[path])
  rates = run.runner.job.optimizer.rates
  total = sum(
    float(max(rates(np.int32(run.runner.first + t)).values()))
    for t in range(trial.STEPS)
  )
  yield run.verdict(
    f'parameters after {trial.STEPS} own steps (0.05 lr a step)',
    (gaps[where], where),
    0.05 * total,
  )


def _dtypes(run):
  """Nothing that a gradient adds up is narrow; of several microbatches too."""
  if not run.narrow:
    return
  runner = run.runner
  if run.config.microbatches == 1:
    more = schema.with_value(run.config, 'train.microbatches', 2)
    runner = trial.Runner(more, run.devices)
  traced = runner.traced(run.state, run.reference.batches[0])
  found, count, lost = dtypes.narrow_sums(*traced)
  if lost:
    paths = sorted(run.reference.gradients)
    lost = [paths[traced[1].index(i)] for i in lost]
    why = f'of {", ".join(lost)} no sum over tokens was found in the program'
    name = 'sums in float32'
    yield certification.Verdict(name, 0.0, 0.0, False, '', why)
  yield run.verdict(
    f'sums in float32: {count} of gradients, statistics',
    (float(len(found)), ' '.join(found[0]) if found else ''),
    0.0,
  )


def _accumulation(run):
  now = run.config.train.microbatches
  other = 1 if now > 1 else 2
  yield run.variant(
    f'accumulation: {other} microbatches instead of {now}', microbatches=other
  )


def _ramp(run):
  """A step of a batch that still grows: fewer rows, or fewer microbatches."""
  ramp = batch_ramp.of(run.config)
  if ramp is None:
    return
  few = schema.with_value(run.config, 'train.batch_size', ramp.start)
  references = run.references_of(few)
  parts, rows = ramp.split(ramp.start)
  outcomes = certification.outcomes_of(run.runner, references, parts)
  gap = run.loss_difference(outcomes, references), 'the loss'
  found = max(gap, run.gradient_difference(outcomes, references))
  name = (
    f'a smaller step: {parts} x {rows} rows of {run.config.train.batch_size}'
  )
  yield run.verdict(name, found)


def _shapes(run):
  """A step whose rows are cut: more of them, and shorter."""
  *_, pieces = shape_cycle.of(run.config).all(run.config.train.steps)
  if pieces == 1:
    return
  rows = run.config.train.batch_size * pieces
  length = run.config.data.sequence_length // pieces
  few = {'train.batch_size': rows, 'data.sequence_length': length}
  references = run.references_of(schema.with_values(run.config, few))
  outcomes = certification.outcomes_of(run.runner, references)
  gap = run.loss_difference(outcomes, references), 'the loss'
  found = max(gap, run.gradient_difference(outcomes, references))
  yield run.verdict(f'a step of other shape: {rows} rows of {length}', found)


def _remat(run):
  train = run.config.train
  for remat, memory in MEMORY:
    stored = run.config.pipeline.activations == 'store'
    if stored and run.config.mesh.stage > 1 and 'offload' in memory:
      continue  # refused: slots are on the device
    if (remat, memory) != (train.remat, train.memory):
      name = f'remat {remat}' + (' with offload' if memory else '')
      yield run.variant(name, remat=remat, memory=memory)


def _packing(run):
  """Loss and gradients of the other documents: not a bit may change, or, with
  experts, nothing but rounding."""
  if not run.packed:
    return
  batch, vocabulary = run.reference.batches[0], run.config.model.vocab_size
  arrays = trial.change_one_document(batch, vocabulary)
  runner, model = run.runner, run.config.model
  if model.experts.count:
    # Loads and what balances them are of all documents together.
    alone = dataclasses.replace(model.experts, balance=0.0, router_z=0.0)
    model = dataclasses.replace(model, experts=alone)
    config = dataclasses.replace(run.config, model=model)
    runner = trial.Runner(config, run.devices)
  before, after, seen = (runner.gradients(run.state, b) for b in arrays)
  as_tree = lambda found: jax.device_get(found[1] | {'the loss': found[0]})
  found = trial.worst(as_tree(after), as_tree(before))
  if float(seen[0]) == float(runner.gradients(run.state, batch)[0]):
    found = math.inf, 'nor did the document itself'
  # Of an expert's tokens, a change moves others to other places of a sum.
  bound = run.again[1] if model.experts.count else 0.0
  name = 'packing: others do not see one change'
  if model.experts.count:
    name += ' (no balance)'
  yield run.verdict(name, found, bound)


def _evaluate(run):
  """Held-out text and its nats, as a training run reads and reports them."""
  text, found = run.runner.evaluated(run.state)
  wanted_text, wanted = run.reference.evaluated
  moved = (text - wanted_text) + (wanted_text - text)
  targets = sum(map(len, wanted_text.elements()))
  yield run.verdict(
    f'evaluation: the same {targets} targets of text',
    (float(moved.total()), 'rows of text'),
    0.0,
  )
  gaps = {
    name: abs(bits - wanted.values()[name]) / wanted.values()[name]
    for name, bits in found.values().items()
  }
  where = max(gaps, key=lambda name: gaps[name])
  gap = gaps[where] if math.isfinite(gaps[where]) else math.inf
  yield run.verdict('evaluation: bits per byte', (gap, where), run.again[0])


def _elsewhere(config, devices):
  """(mesh text, a Runner on it): a layout unlike that of `config`."""
  here = mesh_lib.describe(dataclasses.asdict(config.mesh))
  # One device has no other layout: the state is read back on it.
  for text in (*(text for text in ELSEWHERE if text != here), here):
    n = math.prod(mesh_lib.parse(text).values())
    if n > len(devices):
      continue
    train = dataclasses.replace(config.train, microbatches=1)
    sizes: dict[str, Any] = mesh_lib.parse(text)
    mesh = schema.Mesh(**sizes)
    other = dataclasses.replace(
      config, mesh=mesh, train=train, pipeline=schema.Pipeline()
    )
    try:
      return text, trial.Runner(other, devices[:n])
    except errors.UserError:  # this many kv heads, say, on such a mesh
      continue
  raise AssertionError('its own layout always fits')


def _resume(run):
  """Save, restore in another layout, resume there."""
  runner, batch = run.runner, run.reference.batches[1]
  state = runner.update(run.state, *run.gradients)
  text, other = _elsewhere(run.config, run.devices)
  with tempfile.TemporaryDirectory() as folder:
    with store_lib.Store(
      folder, store_lib.Options(asynchronous=False)
    ) as store:
      with runner.job.context():
        tree = state_lib.in_order(state_lib.flatten(state), runner.job.leaves)
        store.save(1, tree, state_lib.axes(runner.job.leaves), {})
      like = other.start(run.reference.params)
      with other.job.context():
        read, _ = store.restore(1, state_lib.flatten(like))
  saved = jax.device_get(tree)
  changed = [
    p for p, x in jax.device_get(read).items() if (x != saved[p]).any()
  ]
  yield run.verdict(
    f'state read on {text}, bitwise',
    (float(len(changed)), ', '.join(changed[:1])),
    0.0,
  )
  # An evaluation has no other terms of the loss.
  *_, aux = runner.gradients(state, batch)
  here = float(aux.terms['nats'])
  there = other.evaluate(state_lib.unflatten(like, read), batch)
  yield run.verdict(
    f'next nats a token on {text}',
    (abs(there - here) / abs(here), ''),
    run.again[0],
  )


PROPERTIES = {
  'loss': _loss,
  'gradients': _every_gradient,
  'update': _one_update,
  'layout': _layout,
  'dtypes': _dtypes,
  'steps': _steps,
  'accumulation': _accumulation,
  'ramp': _ramp,
  'shapes': _shapes,
  'remat': _remat,
  'packing': _packing,
  'evaluate': _evaluate,
  'resume': _resume,
}
