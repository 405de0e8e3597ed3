"""Runs of one architecture to one checkpoint: the average of their parameters.

    theta = sum_i w_i theta_i,    sum_i w_i = 1

A set of experts, each trained alone on its domain, becomes one model of the
size of one (Branch-Train-Merge, arXiv:2208.03306, section 2.2); the average is
also where a new expert begins. Sums are made in float64 and rounded once: equal
runs give their own bits, and so does a run of weight 1 beside others of 0.

What is written is step 0 of a folder without a run, as by `paraxis checkpoint
import`: `decode --checkpoint=` and `train --init_from=` read it.

Cost: every parameter is read twice, a leaf of one run at a time.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models.huggingface import source as source_lib
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import rows
from paraxis.train.run import origin as origin_lib
from paraxis.train.run import workdir as workdir_lib

WHAT = 'merge'
KEPT = ('tokenizer', 'versions', origin_lib.OWN)  # of the first run's meta


def write(runs, out, say=print, ema=False) -> None:
  """Saves the average of some runs as step 0 of a folder.

  Args:
    runs: [(RUN or RUN/STEP, weight)], weights that sum to 1.
    out: folder, without checkpoints yet. say: prints one line.
    ema: averages of parameters over steps in place of them.

  Raises:
    UserError: the runs are of different architectures (all leaves that differ
      are listed) or tokenizers, or the folder holds checkpoints or is in use.
    IntegrityError: its run has lost its checkpoints.
  """
  from paraxis.sharding.checkpoint import store as store_lib  # starts slowly

  sources = [
    origin_lib.Run(text, False, say, WHAT, ema=ema) for text, _ in runs
  ]
  weights = [weight for _, weight in runs]
  for other in sources[1:]:
    _check(sources[0], other)
  leaves, meta = sources[0].saved()
  tree = {p: _average(sources, weights, p, leaf) for p, leaf in leaves.items()}
  config = sources[0].config()  # adapters are merged
  config = schema.with_value(config, 'train.lora', schema.Lora())
  if not config.train.side:  # else everything is learned
    config = schema.with_value(config, 'train.learn', '')
  kept = {n: meta[n] for n in KEPT if n in meta}
  meta = dict(config=schema.to_json(config), origin=_about(sources, runs))
  axes = {p: tuple(leaf['axes']) for p, leaf in leaves.items()}
  with workdir_lib.without_run(out, '--out') as path:
    with store_lib.Store(path / workdir_lib.CHECKPOINTS, say=say) as store:
      store.preflight(tree)
      store.save(0, tree, axes, kept | meta | {workdir_lib.IMPORTED: True})
    workdir_lib.write_config(path, config)
  say(f'the average of {len(runs)} runs, {len(tree)} leaves, in {path}')


def _average(sources, weights, path, leaf):
  """rows.Rows of the average of one leaf, which is in a manifest as `leaf`."""
  dtype, name = jnp.dtype(leaf['dtype']), path.removeprefix(origin_lib.PARAMS)

  def blocks():
    yield mean(weights, (s.arrays([name])[name] for s in sources), dtype)

  return rows.Rows(tuple(leaf['shape']), dtype, blocks)


def mean(weights, arrays, dtype):
  """sum_i w_i x_i, in float64, of as many arrays as weights; one of weight 0
  counts for nothing, whatever it holds."""
  total: Any = None
  for weight, x in zip(weights, arrays, strict=True):
    if weight:
      part = weight * np.asarray(x, np.float64)
      total = part if total is None else total + part
  return total.astype(dtype)


def _check(first, other):
  """UserError unless two runs have the same leaves, model and tokenizer."""
  (leaves, meta), (theirs, about) = first.saved(), other.saved()
  here, there = map(_named, (first, other))
  like = {p: _Leaf(**leaf) for p, leaf in leaves.items()}
  manifest_lib.compare(
    theirs, like, f'{WHAT}: {there}', advice=f'Wanted is what {here} has: only '
    'parameters of one architecture have an average.',
  )  # fmt: skip
  models = (s.config().model for s in (first, other))
  differ = source_lib.differences(*models)
  if about.get('tokenizer') != meta.get('tokenizer'):
    differ.append('its tokenizer is another, whose ids mean other text')
  if differ:
    raise errors.UserError(
      f'{WHAT}: {there} and {here} have leaves of equal shapes, but compute '
      f'differently: {"; ".join(differ)}.'
    )


class _Leaf:
  """shape and dtype of a leaf of a manifest, as `compare` reads them."""

  def __init__(self, shape, dtype, **more):
    self.shape, self.dtype = tuple(shape), dtype


def _named(source):
  """RUN/STEP of an origin.Run."""
  return f'{source.about["source"]}/{source.about["step"]}'


def _about(sources, runs):
  """As origin.Run.about, of all."""
  each = [
    f'{_named(source)} x {weight:g}'
    for source, (_, weight) in zip(sources, runs, strict=True)
  ]
  licences = dict.fromkeys(s.about['licence'] for s in sources)
  return sources[0].about | dict(
    source=' + '.join(each),
    began='',
    licence=' and '.join(filter(None, licences)),
  )
