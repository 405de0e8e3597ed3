"""Claims about checkpoints that are read on another layout than the writer's.

A layout is {'mesh': text, 'section.field': value}. States are compared bit by
bit, as NumPy arrays in canonical order; trainings resume from one file, on the
same two batches of random tokens in turn, which it learns by heart.
"""

import pathlib
import sys
import tempfile
from typing import Any

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train import start
from paraxis.train import state as state_lib
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import gang
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.program import of_shapes

DEVICES = 8
SHAPE = 1024, 1024  # of each of ARRAYS float32 arrays
ARRAYS = 4


def layers_as_held():
  """Knock-out: layers and experts are written in the order of memory."""
  real = state_lib.in_order
  abstract = lambda x: isinstance(x, jax.ShapeDtypeStruct)
  held = lambda flat, model: (
    real(flat, model) if all(map(abstract, flat.values())) else dict(flat)
  )
  return knockouts.patched(state_lib, 'in_order', held)


def one_moment_lost():
  """Knock-out: one moment of the optimizer is zero after a restore."""
  real = _resumed

  def without(job, folder):
    tree = real(job, folder)
    lost = min(p for p, x in tree.items() if '/mu/' in p and x.ndim > 1)
    return dict(tree, **{lost: tree[lost] * 0})

  return knockouts.patched(sys.modules[__name__], '_resumed', without)


def _resumed(job, folder):
  """{canonical path: array} of a checkpoint on a job's mesh, in order."""
  with store_lib.Store(folder, read_only=True) as store:
    return store.restore(gang.STEP, start.wanted(job))[0]


def _saved(config, job, state, folder):
  """Writes a state as `paraxis train` does."""
  flat = state_lib.in_order(state_lib.flatten(state), job.leaves)
  options = start.kept(config)
  with store_lib.Store(folder, options, say=lambda line: None) as store:
    store.save(gang.STEP, flat, state_lib.axes(job.leaves), {})


def _held(job, tree):
  """The State of a canonical tree."""
  flat = state_lib.flatten(job.state)
  return state_lib.unflatten(
    job.state, state_lib.on_stages(tree, flat, job.leaves)
  )


def _made(run, layouts):
  """{text of a layout: (schema.Config, program.Program)}."""
  out = {}
  for case in layouts:
    config, devices = experiment.on_case(run.config, case)
    out[experiment.case_text(case)] = config, of_shapes(config, '', devices)
  return out


def _drawn(job):
  """{canonical path: NumPy array}: a state of random numbers."""
  rng = np.random.default_rng(0)
  with job.context():
    like = start.wanted(job)
  draw = lambda x: (
    rng.normal(size=x.shape).astype(x.dtype)
    if np.issubdtype(x.dtype, np.inexact)
    else rng.integers(0, 1000, x.shape).astype(x.dtype)
  )
  return {path: draw(x) for path, x in sorted(like.items())}


def _placed(job, values):
  """The State of a job's mesh with these numbers."""
  tree = {
    path: jax.make_array_from_callback(
      x.shape, x.sharding, values[path].__getitem__
    )
    for path, x in start.wanted(job).items()
  }
  return _held(job, tree)


def _equal(tree, wanted):
  """How many leaves are bitwise those."""
  return sum(
    np.asarray(x).tobytes() == wanted[p].tobytes() for p, x in tree.items()
  )


def every_pair(run, *, layouts, gang_of):
  """EQ: the state of each layout, saved, is restored on each, bit for bit.

  Two processes restore what one saved, and save it for one.

  Args:
    layouts: list of cases; all models have the same leaves.
    gang_of: places of those that the processes restore on.
  """
  made = _made(run, layouts)
  wanted = _drawn(next(iter(made.values()))[1])
  pairs = right = 0
  with tempfile.TemporaryDirectory(prefix='paraxis-layouts-') as root:
    folders = {text: pathlib.Path(root) / str(i) for i, text in enumerate(made)}
    for text, (config, job) in made.items():
      with job.context():
        _saved(config, job, _placed(job, wanted), folders[text])
    chosen = [list(made)[place] for place in gang_of]
    again = [pathlib.Path(root) / f'gang-{i}' for i in range(len(chosen))]
    first = next(iter(folders.values()))
    np.savez(first / gang.VALUES, **wanted)
    several = gang.together(
      2, DEVICES // 2, what='models', folder=str(first),
      configs=[schema.to_json(made[text][0]) for text in chosen],
      again=list(map(str, again)),
    )  # fmt: skip
    sources = [*folders.values(), *again]
    for _, job in made.values():  # programs of one mesh stay compiled
      with job.context():
        for folder in sources:
          tree = _resumed(job, folder)
          flat = state_lib.flatten(_held(job, tree))
          back = state_lib.in_order(flat, job.leaves)
          same = _equal(tree, wanted) == _equal(back, wanted) == len(wanted)
          right += same
          pairs += 1
  joined = sum(x['equal'] for x in several), sum(x['leaves'] for x in several)
  return claims.Outcome(
    f'{pairs} of {pairs}',
    f'{right} of {pairs}',
    f'{len(wanted)} leaves, written on {len(made)} layouts by one process and '
    f'on {len(again)} by two of {DEVICES // 2} devices, read on '
    f'{len(made)}: {"; ".join(made)}. Two processes read {joined[0]} of '
    f'{joined[1]} leaves bitwise',
    right == pairs and joined[0] == joined[1],
  )


def _losses(runner, state, batches):
  """[loss of each step], and the State after them."""
  found = []
  for batch in batches:
    loss, gradients, aux = runner.gradients(state, batch)
    state = runner.update(state, loss, gradients, aux)
    found.append(float(loss))
  return found, state


def _gaps(config, layouts, first, steps, folder):
  """({layout: largest relative difference of a loss}, losses of the first)."""
  gaps, batches, wanted = {}, [], []
  for case in layouts:
    runner = trial.Runner(*experiment.on_case(config, case))
    job = runner.job
    if not batches:
      two = trial.batches(runner.config, True)
      batches = [two[t % len(two)] for t in range(first + steps)]
      with job.context():
        state = job.initial_state()
      _, state = _losses(runner, state, batches[:first])
      with job.context():
        _saved(runner.config, job, state, folder)
      wanted, _ = _losses(runner, state, batches[first:])
    with job.context():
      state = _held(job, _resumed(job, folder))
    found, _ = _losses(runner, state, batches[first:])
    gap = np.max(np.abs(np.divide(found, wanted) - 1))
    gaps[experiment.case_text(case)] = float(gap)
  return gaps, wanted


def goes_on(run, *, layouts, first, steps, dtype, within):
  """EQ: losses after a change of layout are those of the run that never moved.

  Args:
    layouts: list of cases; the first trains, saves, and continues as it is.
    first: steps before the checkpoint. steps: compared, after it.
    dtype: of the model. within: largest difference of a loss, relative.
  """
  typed = {'model.dtype': dtype, 'model.param_dtype': dtype}
  config = experiment.fields(run.config, typed)
  with (
    tempfile.TemporaryDirectory(prefix='paraxis-layouts-') as folder,
    jax.enable_x64(dtype == 'float64'),
  ):
    gaps, wanted = _gaps(config, layouts, first, steps, folder)
  stays = next(iter(gaps))
  return experiment.equal(
    gaps,
    within,
    f'{first} steps on {stays}, then {steps} on each layout from one '
    f'checkpoint, losses {wanted[0]:.2f} to {wanted[-1]:.2f}, {dtype}, largest '
    f'relative difference: {experiment.listed(gaps)}',
    gaps[stays] == 0,
  )


def bytes_read(run, *, mesh, written, chunk_bytes, read, how, over, at_most):
  """CPU: a process reads few bytes beyond what its shards need.

  Two processes of four devices each, what the operating system counts.

  Args:
    written: cut of both dimensions of what is saved: 'fsdp+tensor,'.
    chunk_bytes: as checkpoint.chunk_bytes; 0: a chunk is a shard.
    read: list of cuts that it is restored in.
    how: 'once'; or a knock-out, as in gang.py.
    over: what bytes are compared with: 'chunks' that shards touch, or 'shards'.
    at_most: bytes over those, of any cut and process.
  """
  made = experiment.mesh_of(mesh)
  rng = np.random.default_rng(0)
  values: Any = {
    f'a{i}': rng.normal(size=SHAPE).astype(np.float32) for i in range(ARRAYS)
  }
  place = jax.NamedSharding(made, gang.spec_of(written))
  tree = {path: jax.device_put(x, place) for path, x in values.items()}
  config = experiment.fields(
    run.config, {'checkpoint.chunk_bytes': chunk_bytes}
  )
  with tempfile.TemporaryDirectory(prefix='paraxis-layouts-') as folder:
    quiet = lambda line: None
    with store_lib.Store(folder, start.kept(config), say=quiet) as store:
      axes = {path: (None, None) for path in tree}
      store.save(gang.STEP, tree, axes, {})
    np.savez(pathlib.Path(folder) / gang.VALUES, **values)
    several = gang.together(
      2, DEVICES // 2, what='arrays', folder=folder, mesh=mesh, specs=read,
      how=how,
    )  # fmt: skip
  ratios, texts = [], []
  for i, text in enumerate(read):
    each = [x['read'][i] / x[over][i] for x in several]
    ratios.append(max(each))
    part = several[0][over][i] / sum(x.nbytes for x in values.values())
    texts.append(f'({text}) {max(each):.3f}, {over} are {part:.2f} of all')
  size = f' of {chunk_bytes} bytes at most' if chunk_bytes else ''
  return experiment.at_most(
    max(ratios),
    at_most,
    f'{ARRAYS} float32 arrays {SHAPE}, written on {mesh} in shards ({written}) '
    f'and chunks{size or " that are shards"}, read by two processes: '
    f'{"; ".join(texts)}',
  )
