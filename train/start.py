"""The state that a run begins with, and what its checkpoints say beside it.

A run resumes from its newest good checkpoint. The first time it begins with new
parameters or, with `paraxis train --init_from=`, those of an origin (run/
origin.py); step and optimizer are new. Every checkpoint's manifest says so
under 'origin'.
"""

import functools
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import register
from paraxis.sharding import rules as rules_lib
from paraxis.train import state as state_lib
from paraxis.train.run import origin as origin_lib
from paraxis.train.run import taken
from paraxis.train.run import workdir as workdir_lib

# Packages that decide the batches: random numbers, order of rows, ids of text.
_BATCHES = ('numpy', 'grain', 'tokenizers')


def common(config, tokenizer, origin=None) -> dict:
  """The part of `meta` that imported weights have too.

  config: schema.Config. tokenizer: fingerprint.
  """
  own = register.described(config.model.pattern)
  return dict(
    config=schema.to_json(config),
    tokenizer=tokenizer,
    versions=_versions(),
    **({'origin': origin} if origin else {}),
    **({origin_lib.OWN: own} if own else {}),
  )


def _versions():
  """{package: version} of what decides the bits of a step, or its batch."""
  import flax
  import optax
  import orbax.checkpoint

  return dict(
    jax=jax.__version__,
    flax=flax.__version__,
    optax=optax.__version__,
    orbax=orbax.checkpoint.__version__,
    **{name: importlib.metadata.version(name) for name in _BATCHES},
  )


def kept(config, committed=lambda step: None):
  """store.Options of a run. committed: called with each committed step."""
  from paraxis.sharding.checkpoint import store  # starts slowly

  c = config.checkpoint
  return store.Options(
    keep=c.keep,
    asynchronous=c.asynchronous,
    failures=c.failures,
    host_bytes=c.host_bytes,
    verify_every=c.verify_every,
    chunk_bytes=c.chunk_bytes,
    committed=committed,
  )


def saves(config) -> int:
  """Checkpoints that a run makes at most, if nothing stops it on the way."""
  return config.train.steps // config.checkpoint.every + 1


def meta(job, step, origin=None, cursor=None, suspect=False) -> dict:
  """Metadata of a checkpoint: config, data cursor, fingerprints, versions.

  Args:
    job: program.Job. step: of the state. origin: of the first parameters.
    cursor: more of the data cursor (run/spikes.py).
    suspect: the state is of a streak of skipped steps, or of a loss spike.
  """
  return common(job.config, job.tokenizer.fingerprint, origin) | dict(
    cursor=dict(step=step, seed=job.config.train.seed) | (cursor or {}),
    corpus=job.corpus.fingerprint,
    **({'suspect': True} if suspect else {}),
  )


def _say_versions(then, say):
  """One line, if a checkpoint is of other packages. then: {package: version}.

  Such a run may resume: formats are what a reader must know.
  """
  differ = {
    name: f'{str(then.get(name, "of no known version")):.40}, here {version}'
    for name, version in _versions().items()
    if then.get(name) != version
  }
  if differ:
    which = '; '.join(f'{name} {text}' for name, text in differ.items())
    what = 'batches' if differ.keys() & set(_BATCHES) else 'last bits'
    say(
      f'versions: the checkpoint was written with {which}: the steps from here '
      f'on may differ in their {what}'
    )


def _saved_config(step, found, where):
  """The schema.Config in a meta, whose cursor must be the step's."""
  problem, config = '', schema.Config()
  try:
    config = schema.from_json(found.get('config'), 'its config')
  except (errors.UserError, errors.IntegrityError) as e:
    problem = str(e).rstrip('.')
  for name in ('cursor', 'versions', 'origin', origin_lib.OWN):
    if not isinstance(found.get(name, {}), dict):
      problem = problem or f'its {name} is no object'
  cursor = {} if problem else found.get('cursor', {})
  for name, value in dict(step=step, seed=config.train.seed).items():
    if not problem and cursor.get(name) != value:
      problem = f'its cursor has {name} {cursor.get(name)!r:.40}, not {value}'
  if problem:
    raise errors.IntegrityError(
      f'checkpoint {where / str(step)} is damaged: {problem}. Move it away to '
      'resume from an older one.'
    )
  return config


def _check(job, step, found, where, say):
  """Raises unless a checkpoint is of the run that is to be resumed."""
  config = _saved_config(step, found, where)
  register.require(found.get(origin_lib.OWN), where)
  for name, now, what in (
    ('corpus', job.corpus.fingerprint, ', of the text and what is held out'),
    ('tokenizer', job.tokenizer.fingerprint, ''),
  ):
    if found.get(name) != now:
      raise errors.IntegrityError(
        f'{where}: the {name} changed since the checkpoint (fingerprint '
        f'{str(found.get(name))[:12]} then, {now[:12]} now{what}): '
        'the batches would differ. Restore the data, or start in another '
        '--workdir, from these weights with --init_from.'
      )
  # Of the same content: a host may keep its text elsewhere.
  places = {n: schema.value(job.config, n) for n in workdir_lib.PLACES}
  workdir_lib.compare(where, schema.with_values(config, places), job.config)
  steps = job.config.train.steps
  if step > steps:
    raise errors.UserError(
      f'{where} is at step {step}, beyond train.steps={steps}: give at least '
      f'{step}, or take another --workdir.'
    )
  _say_versions(found.get('versions', {}), say)


def state(job, store, source, say) -> tuple[state_lib.State, int, dict]:
  """-> (state, step to begin with, its checkpoint's `meta` or its beginning).

  Args:
    job: program.Job. store: store.Store of the run.
    source: what origin.open_ gives, or None.
    say: prints one line.

  Raises:
    UserError, IntegrityError: what is there does not fit.
  """
  if store.steps():
    if store.read_manifest()['meta'].get(workdir_lib.IMPORTED):
      raise workdir_lib.imported(store.directory.parent)
  shapes = state_lib.flatten(job.state)
  like = functools.partial(_of_former_replicas, job, store)
  found = store.restore_latest_good(like)
  if found is None:
    new = source and begin(job, source, wanted(job), say)
    new = new or job.initial_state()
    if not source and job.built.model.frozen:
      say('the frozen parameters are random: no --init_from')
    # Hosts of other code are seen here; the first save finds it compiled.
    store.compare_replicas(0, state_lib.flatten(new))
    return new, 0, {'origin': source.about} if source else {}
  step, tree, kept = found
  if former := _former(job, tree):
    tree |= _merged(job, tree)
    say(
      f'replicas: {store.directory} is of {former}, this run has '
      f'{job.state.replicas}: each new one begins with the mean of the former '
      "ones' parameters and optimizer states"
    )
  tree = state_lib.on_stages(tree, shapes, job.leaves)
  _check(job, step, kept, store.directory, say)
  origin = kept.get('origin')
  if source and origin_lib.named(source.about) != origin_lib.named(origin):
    raise errors.UserError(
      f'{store.directory} is at step {step} of a run that began with '
      f'{origin_lib.named(origin)}, --init_from is '
      f'{origin_lib.named(source.about)}: take another --workdir.'
    )
  say(f'resumed from step {step}, every leaf verified')
  return state_lib.unflatten(job.state, tree), step, kept


def _each(job):
  """Paths of leaves that every replica has one of."""
  named = job.leaves.items()
  return [p for p, leaf in named if leaf.axes[:1] == (rules_lib.REPLICAS,)]


def _of_former_replicas(job, store, step):
  """As `wanted`, of the replicas that a checkpoint has; IntegrityError: its
  manifest is damaged."""
  like, shape = wanted(job), None
  if job.state.replicas:
    saved = store.read_manifest(step)['leaves'].get('skipped', {})
    shape = saved.get('shape')
  if not shape or shape[0] == job.state.replicas:
    return like
  for path in _each(job):
    x = like[path]
    layout = jax.NamedSharding(job.mesh, jax.P(None, *x.sharding.spec[1:]))
    like[path] = jax.ShapeDtypeStruct(
      (shape[0], *x.shape[1:]), x.dtype, sharding=layout
    )
  return like


def _former(job, tree):
  """The replicas of a restored tree; 0: they are this run's, or none steps
  alone."""
  n = len(tree['skipped']) if job.state.replicas else 0
  return n if n != job.state.replicas else 0


def _merged(job, tree):
  """{path: array} of this run's replicas: each has the mean of those of a tree,
  of whole numbers the largest."""

  def run(x, like):
    whole = jnp.issubdtype(x.dtype, jnp.integer)
    one = x.max(0) if whole else x.mean(0)
    return jnp.broadcast_to(one, like.shape)

  shapes = state_lib.flatten(job.state)
  made = {}
  for path in _each(job):
    like = shapes[path]
    of = functools.partial(run, like=like)
    made[path] = jax.jit(of, out_shardings=like.sharding)(tree[path])
  return made


def back(job, store, steps) -> tuple[state_lib.State, int, dict]:
  """(state, its step, meta) of the newest of some checkpoints that is good."""
  tree, kept = {}, {}
  for step in sorted(steps, reverse=True):
    try:
      like = _of_former_replicas(job, store, step)
      tree, kept = store.restore(step, like)
      tree |= _merged(job, tree) if _former(job, tree) else {}
      break
    except errors.IntegrityError:
      if step == min(steps):
        raise
  tree = state_lib.on_stages(tree, state_lib.flatten(job.state), job.leaves)
  return state_lib.unflatten(job.state, tree), kept['cursor']['step'], kept


def wanted(job):
  """{canonical path: jax.ShapeDtypeStruct} of the state, layers in order."""
  return state_lib.in_order(state_lib.flatten(job.state), job.leaves)


def begin(job, source, like, say) -> state_lib.State:
  """The first state of a run, with the parameters of a source.

  Args:
    job: program.Job. source: what origin.open_ gives. say: prints one line.
    like: {canonical path: jax.ShapeDtypeStruct with its sharding} of the state,
      its layers in order.
  """
  tree = source.read(job, like, say)
  own = state_lib.flatten(job.state)
  copies = {p: name for p in own if (name := taken.parameter_of(p))}
  copies = {p: name for p, name in copies.items() if p not in tree}
  # After reading, and no parameter that was read whole: never two of one.
  new = {p for p in own if p not in tree or p in source.part}
  new -= copies.keys()
  fresh = job.initial_leaves([p for p in own if p in new])
  for path in tree:
    if path in source.part:
      made = state_lib.in_order({path: fresh.pop(path)}, job.leaves)[path]
      rows = source.part[path]
      tree[path] = _mixed(tree[path], made, rows, like[path].sharding)
    alone = {path: tree[path]}
    tree |= state_lib.on_stages(alone, {path: own[path]}, job.leaves)
  say(f'parameters of {source.about["source"]}, {len(tree)} leaves read')
  whole = fresh | tree
  for path, name in copies.items():
    x, like = whole[f'{origin_lib.PARAMS}{name}'], own[path]
    copy = functools.partial(jnp.broadcast_to, shape=like.shape)
    whole[path] = jax.jit(copy, out_shardings=like.sharding)(x)
  return state_lib.unflatten(job.state, whole)


def _mixed(old, new, rows, sharding):
  """`new` with rows of `old`. rows: (of `new`, those of `old` they become)."""
  mine, theirs = rows
  pick, chosen = np.zeros(len(new), int), np.zeros(len(new), bool)
  pick[mine], chosen[mine] = theirs, True
  # Rows that no device shares can be picked: `old` is laid out so.
  whole = jax.NamedSharding(sharding.mesh, jax.P(None, *sharding.spec[1:]))

  def run(old, new):
    found = old.at[pick].get(out_sharding=whole)
    where = chosen.reshape(-1, *[1] * (new.ndim - 1))
    return jnp.where(where, found, jax.reshard(new, whole))

  return jax.jit(run, out_shardings=sharding)(old, new)
