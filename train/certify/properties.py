"""What `paraxis verify` compares, property by property, with one device.

Every function here takes a `Certification` and yields one or more `Verdict`s.
`PROPERTIES` names them all; a name that is not asked for costs nothing. To add
a property, add a function.

    difference of a leaf = max |a - b| / max |b|        (b: one device)

A leaf of the gradient counts as at least FLOOR of the largest gradient: where
positions are learned, the bias of keys has a gradient of rounding alone. Adam
divides gradients by their root, so that rounding moves a parameter as far as
anything else does: one update is compared from identical gradients, and
parameters after independent steps only within 0.05 x learning rate x steps,
without leaves whose gradient is rounding, and not in bfloat16.
"""

import dataclasses
import functools
import math
import tempfile
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train import state as state_lib
from paraxis.train.certify import declared
from paraxis.train.certify import trial
from paraxis.train.data import batch_ramp

# dtype -> relative bound on (the loss, gradients). Devices sum in another order
# than one does: over all forms and layouts float64 gave 1e-15 and 2e-14,
# float32 6e-7 and 3e-6, bfloat16 3e-4 and 8e-2.
BOUNDS = {
  'float64': (1e-9, 1e-9),
  'float32': (1e-5, 1e-5),
  'bfloat16': (2e-3, 1e-1),
}
CHANGES, NOT_CERTIFIED = 'CHANGES THE NUMBERS', 'NOT CERTIFIED'
FLOOR = 1e-2
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


class Verdict(NamedTuple):
  """On one property. bound, measured: floats; worst: the leaf furthest off.

  word: PASS, FAIL, or, with a reason why, CHANGES THE NUMBERS, or, if nothing
  was measured, NOT CERTIFIED.
  """

  name: str
  bound: float
  measured: float
  passed: bool
  worst: str
  why: str = ''

  @property
  def word(self):
    if self.passed:
      return 'PASS'
    return (CHANGES if self.measured else NOT_CERTIFIED) if self.why else 'FAIL'


class Certification:
  """A layout under test, its reference, and what both gave so far.

  Attributes:
    runner: trial.Runner in the layout under test. config, devices: of it.
    reference: trial.Reference.
  """

  def __init__(self, runner, packed):
    """packed: as for trial.batches."""
    self.runner, self.packed = runner, packed
    self.config, self.devices = runner.config, runner.devices
    self.loss_bound, self.bound = BOUNDS[self.config.model.dtype]
    self.reference = trial.reference(self.config, packed, self.devices[0])

  @functools.cached_property
  def state(self):
    """On the mesh, before the first step."""
    return self.runner.start(self.reference.params)

  @functools.cached_property
  def gradients(self):
    """(loss, gradients, aux.Aux) of batch 0, on the mesh."""
    return self.runner.gradients(self.state, self.reference.batches[0])

  @functools.cached_property
  def updated(self):
    """{path: leaf} of the state after one update from identical gradients."""
    loss, own, aux = self.gradients
    same = self.runner.job.on_mesh(self.reference.gradients, own)
    return state_lib.flatten(self.runner.update(self.state, loss, same, aux))

  def verdict(self, name, difference, bound=None):
    """`Verdict` on a (difference, leaf) against a bound."""
    measured, where = difference
    bound = self.bound if bound is None else bound
    return Verdict(name, bound, measured, measured <= bound, where)

  def loss_difference(self, loss, reference=None):
    """Of batch 0; infinite if it is not finite."""
    wanted = (reference or self.reference).loss
    gap = abs(float(loss) - wanted) / abs(wanted)
    return gap if math.isfinite(gap) else math.inf

  def gradient_difference(self, gradients, aux, reference=None):
    """(difference, leaf) of batch 0: gradients, terms of the loss, counts."""
    wanted, in_order = reference or self.reference, self.runner.job.in_order
    parts = [trial.worst(in_order(gradients), wanted.gradients, FLOOR)]
    # Apart: counts are hundreds, any gradient would look small beside them.
    for found, of_one in (
      (aux.terms, wanted.aux.terms), (aux.counts, wanted.aux.counts),
    ):  # fmt: skip
      if of_one:
        parts.append(trial.worst(in_order(found), of_one))
    return max(parts)

  def changed(self, change):
    """`Verdict` on loss and gradients with what a changes.Change names."""
    name = f'{change.field}={change.value}'
    if not change.tried:
      return Verdict(name, 0.0, 0.0, False, '', change.why)
    config = schema.with_values(self.config, change.tried)
    return self._compared(name, config, change.bound)._replace(why=change.why)

  def variant(self, name, **train):
    """`Verdict` on loss and gradients with other fields of config.train."""
    train = dataclasses.replace(self.config.train, **train)
    return self._compared(name, dataclasses.replace(self.config, train=train))

  def _compared(self, name, config, least=0.0):
    """`Verdict` on loss and gradients of a schema.Config on these devices.

    least: of the bounds.
    """
    of_loss, of_gradients = (max(b, least) for b in BOUNDS[config.model.dtype])
    runner = trial.Runner(config, self.devices)
    one = trial.reference(config, self.packed, self.devices[0])
    state = runner.start(one.params)
    loss, *found = runner.gradients(state, one.batches[0])
    gap = self.loss_difference(loss, one)
    found = self.gradient_difference(*found, one)
    gradient = self.verdict(name, found, of_gradients)
    if gradient.passed and gap > of_loss:
      return self.verdict(name, (gap, 'the loss'), of_loss)
    return gradient


def _loss(run):
  gap = run.loss_difference(run.gradients[0])
  yield run.verdict('loss', (gap, ''), run.loss_bound)


def _every_gradient(run):
  count = len(run.reference.gradients)
  found = run.gradient_difference(*run.gradients[1:])
  yield run.verdict(f'gradients, every one of {count} leaves', found)


def _one_update(run):
  job = run.runner.job
  with job.context():
    updated = jax.device_get(state_lib.in_order(run.updated, job.model))
  yield run.verdict(
    'one update, identical gradients, whole state',
    trial.worst(updated, run.reference.updated),
    BOUNDS[run.config.model.param_dtype][1],
  )


def _layout(run):
  """Gradients and state are laid out as the rules say, and are as small as the
  README says: nothing is silently replicated, which no number would show."""
  built = run.runner.job.built
  sizes, model = dict(built.mesh.shape), built.model
  stages = {'gradients': rules_lib.GRADIENTS, 'optimizer': rules_lib.OPTIMIZER}
  leaves = {f'gradients/{p}': g for p, g in run.gradients[1].items()}
  axes = {f'gradients/{p}': model.axes[p] for p in run.gradients[1]}
  axes |= state_lib.axes(run.state, model)
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
  gaps = {
    p: float(np.abs(found[p] - x).max())
    for p, x in wanted.items()
    if top.get(p, 0) > ROUNDING * max(top.values())
  }
  where = max(gaps, key=lambda path: gaps[path])
  rates = run.runner.job.optimizer.rates
  total = sum(
    float(max(rates(np.int32(t)).values())) for t in range(trial.STEPS)
  )
  yield run.verdict(
    f'parameters after {trial.STEPS} own steps (0.05 lr a step)',
    (gaps[where], where),
    0.05 * total,
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
  one = trial.reference(few, run.packed, run.devices[0])
  parts, rows = ramp.split(ramp.start)
  loss, *found = run.runner.gradients(run.state, one.batches[0], parts)
  gap = run.loss_difference(loss, one), 'the loss'
  found = max(gap, run.gradient_difference(*found, one))
  name = (
    f'a smaller step: {parts} x {rows} rows of {run.config.train.batch_size}'
  )
  yield run.verdict(name, found)


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
  bound = run.bound if model.experts.count else 0.0
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
  yield run.verdict('evaluation: bits per byte', (gap, where), run.loss_bound)


def _elsewhere(config, devices):
  """(mesh text, a Runner on it): a layout unlike that of `config`."""
  here = mesh_lib.describe(dataclasses.asdict(config.mesh))
  for text in ELSEWHERE:
    n = math.prod(mesh_lib.parse(text).values())
    if text == here or n > len(devices):
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
  raise AssertionError('one device always fits')


def _resume(run):
  """Save, restore in another layout, resume there."""
  runner, batch = run.runner, run.reference.batches[1]
  state = runner.update(run.state, *run.gradients)
  text, other = _elsewhere(run.config, run.devices)
  with tempfile.TemporaryDirectory() as folder:
    with store_lib.Store(folder, asynchronous=False) as store:
      with runner.job.context():
        tree = state_lib.in_order(state_lib.flatten(state), runner.job.model)
        store.save(1, tree, state_lib.axes(state, runner.job.model), {})
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
  here = float(runner.gradients(state, batch)[0])
  there = other.evaluate(state_lib.unflatten(like, read), batch)
  yield run.verdict(
    f'next loss on {text}',
    (abs(there - here) / abs(here), ''),
    run.loss_bound,
  )


PROPERTIES = {
  'loss': _loss,
  'gradients': _every_gradient,
  'update': _one_update,
  'layout': _layout,
  'steps': _steps,
  'accumulation': _accumulation,
  'ramp': _ramp,
  'remat': _remat,
  'packing': _packing,
  'evaluate': _evaluate,
  'resume': _resume,
}
