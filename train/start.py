"""The state that a run begins with, and what its checkpoints say beside it.

A run resumes from its newest good checkpoint. The first time it begins with new
parameters or, with `paraxis train --init_from=`, those of a run of ours,
RUN/STEP, or of another program: a folder of Hugging Face, a GGUF file. They are
read, every leaf; step and optimizer are new. Every checkpoint's manifest says
so under 'origin'.
"""

import contextlib
import dataclasses
import os
import pathlib

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import register
from paraxis.models import trained
from paraxis.models.huggingface import files as files_lib
from paraxis.models.huggingface import source as source_lib
from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.train import state as state_lib
from paraxis.train.run import workdir as workdir_lib

OWN = 'own_mixers'  # in meta: the files they are from
PARAMS, OPTIMIZER = 'params/', 'optimizer/'
FLAG = '--init_from'
GROWS = ('embedding', 'head')  # leaves that may have more rows than the origin


def open_(text, optimizer=False, say=print) -> 'Run | Foreign | None':
  """What --init_from= names; '': None.

  optimizer: its optimizer's state is read, too. UserError: nothing is there.
  """
  if not text:
    if optimizer:
      raise errors.UserError('--init_optimizer: of which run? --init_from=RUN.')
    return None
  if not source_lib.is_foreign(text):
    return Run(text, optimizer, say)
  if optimizer:
    raise errors.UserError(
      f'--init_optimizer: {text} holds no state of an optimizer, only a run of '
      'paraxis does.'
    )
  return Foreign(text)


def common(config, tokenizer, origin=None) -> dict:
  """The part of `meta` that imported weights have too.

  config: schema.Config. tokenizer: fingerprint.
  """
  import flax
  import optax
  import orbax.checkpoint

  return dict(
    config=schema.to_json(config),
    tokenizer=tokenizer,
    versions=dict(
      jax=jax.__version__,
      flax=flax.__version__,
      optax=optax.__version__,
      orbax=orbax.checkpoint.__version__,
    ),
    **({'origin': origin} if origin else {}),
    **({OWN: own} if (own := register.described(config.model.pattern)) else {}),
  )


def meta(job, step, origin=None) -> dict:
  """Metadata of a checkpoint: config, data cursor, fingerprints, versions.

  job: program.Job. origin: what `state` gave.
  """
  return common(job.config, job.tokenizer.fingerprint, origin) | dict(
    cursor=dict(step=step, seed=job.config.train.seed),
    corpus=job.corpus.fingerprint,
  )


def _check(job, step, found, where):
  """Raises unless a checkpoint is of the run that is to be resumed."""
  register.require(found.get(OWN), where)
  for name, now in (
    ('corpus', job.corpus.fingerprint),
    ('tokenizer', job.tokenizer.fingerprint),
  ):
    if found.get(name) != now:
      raise errors.IntegrityError(
        f'{where}: the {name} changed since the checkpoint (fingerprint '
        f'{found.get(name, "none")[:12]} then, {now[:12]} now): the batches '
        'would differ. Restore the data, or start in another --workdir, from '
        'these weights with --init_from.'
      )
  workdir_lib.compare(where, schema.from_json(found['config']), job.config)
  steps = job.config.train.steps
  if step > steps:
    raise errors.UserError(
      f'{where} is at step {step}, beyond train.steps={steps}: give at least '
      f'{step}, or take another --workdir.'
    )


def state(job, store, source, say) -> tuple[state_lib.State, int, dict | None]:
  """-> (state, step to begin with, its origin).

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
  found = store.restore_latest_good(state_lib.in_order(shapes, job.model))
  if found is None:
    if source is None:
      return job.initial_state(), 0, None
    began = begin(job, source, state_lib.in_order(shapes, job.model), say)
    return began, 0, source.about
  step, tree, kept = found
  tree = state_lib.on_stages(tree, shapes, job.model)
  _check(job, step, kept, store.directory)
  origin = kept.get('origin')
  if source and source.about['source'] != (origin or {}).get('source'):
    raise errors.UserError(
      f'{store.directory} is at step {step} of a run that began with '
      f'{origin["source"] if origin else "new parameters"}, --init_from is '
      f'{source.about["source"]}: take another --workdir.'
    )
  say(f'resumed from step {step}, every leaf verified')
  return state_lib.unflatten(job.state, tree), step, origin


def begin(job, source, like, say) -> state_lib.State:
  """The first state of a run, with the parameters of a source.

  Args:
    job: program.Job. source: `Run` or `Foreign`. say: prints one line.
    like: {canonical path: jax.ShapeDtypeStruct with its sharding} of the state,
      its layers in order.
  """
  tree = source.read(job, like, say)
  grown = {p for p, x in tree.items() if x.shape != like[p].shape}
  own = state_lib.flatten(job.state)
  # After reading, and no parameter that was read: never two of one.
  fresh = job.initial_leaves([p for p in own if p not in tree or p in grown])
  for path in tree:
    if path in grown:
      tree[path] = _grown(tree[path], fresh.pop(path), like[path])
    alone = {path: tree[path]}
    tree |= state_lib.on_stages(alone, {path: own[path]}, job.model)
  say(f'parameters of {source.about["source"]}, {len(tree)} leaves read')
  return state_lib.unflatten(job.state, fresh | tree)


def _grown(old, new, like):
  """The rows of `old`, then those that `new` has beyond them."""
  everywhere = jax.NamedSharding(like.sharding.mesh, jax.P())
  copy = jax.jit(lambda *x: x, out_shardings=everywhere)
  first, rest = (np.asarray(x.addressable_data(0)) for x in copy(old, new))
  whole = np.concatenate([first, rest[len(first) :]])
  return jax.make_array_from_callback(
    like.shape, like.sharding, lambda index: whole[index]
  )


def _beside(target, saved, path):
  """jax.ShapeDtypeStruct of an adapter, laid out as its stacked target.

  saved: its entry of a manifest.
  """
  shape, spec = tuple(saved['shape']), target.sharding.spec
  own = len(shape) - 2  # dimensions that it shares with its target
  if path.endswith(trained.A):
    spec = jax.P(*spec[: 1 + own], None)
  else:
    spec = jax.P(spec[0], None, *spec[len(spec) - own :])
  layout = jax.NamedSharding(target.sharding.mesh, spec)
  return jax.ShapeDtypeStruct(shape, saved['dtype'], sharding=layout)


class Run:
  """A step of a run of ours.

  Attributes:
    about: what the manifests of a new run keep of it.
  """

  def __init__(self, text, optimizer=False, say=print, flag=FLAG):
    """text: RUN, RUN/STEP or RUN/checkpoints/STEP; optimizer: as `open_`;
    flag: that named it."""
    path, step = pathlib.Path(text).expanduser().resolve(), None
    if path.name.isdecimal() and not (path / workdir_lib.CHECKPOINTS).is_dir():
      step, path = int(path.name), path.parent
    if path.name != workdir_lib.CHECKPOINTS:
      path = path / workdir_lib.CHECKPOINTS
    if not path.is_dir():
      foreign = ', a folder of Hugging Face, a .gguf file'
      raise errors.UserError(
        f'{flag}={text}: no folder {path}; name a run, RUN/STEP'
        f'{foreign if flag == FLAG else ""}.'
      )
    self._path, self._say = path, say
    self._under = (PARAMS, OPTIMIZER) if optimizer else (PARAMS,)
    with self._store() as store:
      manifest = store.read_manifest(step)
    self._step, self._saved = manifest['step'], manifest['leaves']
    self._meta = manifest['meta']
    before = self._meta.get('origin') or {}
    self.about = dict(
      source=str(path.parent),
      step=self._step,
      sha256=manifest['sha256'],
      began=before.get('source', ''),
      **{key: before.get(key, '') for key in ('kind', 'licence', 'template')},
      ends=before.get('ends', []),
    )

  @contextlib.contextmanager
  def _store(self):
    from paraxis.sharding.checkpoint import store  # Orbax starts slowly

    with store.Store(self._path, read_only=True, say=self._say) as opened:
      yield opened

  def configured(self, config, folder, say):
    """The schema.Config of a new run: as given; says how its model differs.

    folder: of the new run.
    """
    del folder
    theirs = self.config().model
    for field in dataclasses.fields(config.model):
      was, now = (getattr(m, field.name) for m in (theirs, config.model))
      if was != now and field.name not in source_lib.RUNS:
        say(f'--init_from: model.{field.name} was {was!r}, is {now!r}')
    return config

  def config(self):
    """schema.Config of the run."""
    return schema.from_json(self._meta['config'])

  def arrays(self, paths):
    """{path: NumPy array} of parameters, layers and experts in order.

    Adapters are merged, in at least float32.
    """
    under = tuple(PARAMS + path for path in paths)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {
      path: jax.ShapeDtypeStruct(
        tuple(leaf['shape']), leaf['dtype'], sharding=here
      )
      for path, leaf in self._saved.items()
      if path.startswith(under)
    }
    with self._store() as store:
      tree, _ = store.restore(self._step, like, under)
    out = {path: np.asarray(tree[PARAMS + path]) for path in paths}
    for path, w in out.items():
      pair = [tree.get(PARAMS + path + end) for end in (trained.A, trained.B)]
      if pair[0] is not None:
        out[path] = np.asarray(trained.merge(w, *pair, self._scale()))
    return out

  def _scale(self):
    return trained.of(self.config().train).scale

  def read(self, job, like, say):
    """{canonical path: array}, verified; some with fewer rows than in `like`.

    Arguments as of `begin`. UserError: other leaves differ, all listed.
    """
    register.require(self._meta.get(OWN), self._path, say)
    if self._meta.get('tokenizer') != job.tokenizer.fingerprint:
      say('--init_from: its tokenizer was another, its ids may mean other text')
    like = {p: x for p, x in like.items() if p.startswith(self._under)}
    for path in GROWS:
      path = PARAMS + path
      if path not in like or path not in self._saved:
        continue
      x, (rows, *rest) = like[path], self._saved[path]['shape']
      if rows < x.shape[0] and (*rest,) == x.shape[1:]:
        say(
          f'--init_from: {path} has {rows} rows there, {x.shape[0]} here: the '
          f'last {x.shape[0] - rows} are initialised'
        )
        layout = jax.NamedSharding(
          x.sharding.mesh, jax.P(None, *x.sharding.spec[1:])
        )
        like[path] = jax.ShapeDtypeStruct(
          (rows, *rest), x.dtype, sharding=layout
        )
    merges = self._adapters(job, like, say)
    with self._store() as store:
      tree, _ = store.restore(self._step, like, self._under)
    if merges:
      with job.context():
        tree = trained.merged(tree, self._scale())
    return tree

  def _adapters(self, job, like, say):
    """Makes the adapters in `like` those of the run -> are they to be merged?

    They go on if the new run has the same; else its own are new.
    """
    theirs = [p for p in self._saved if p.startswith(PARAMS)]
    theirs = [p for p in theirs if trained.is_adapter(p)]
    mine = list(filter(trained.is_adapter, like))
    if theirs and self.config().train.lora == job.config.train.lora:
      return False
    for path in mine:
      del like[path]
    if theirs:
      say(f'--init_from: its {len(theirs) // 2} adapters are merged')
    if mine:
      say(f'--init_from: {len(mine) // 2} adapters are new')
    for path in theirs:
      target = like.get(path.removesuffix(trained.A).removesuffix(trained.B))
      if target is not None:  # else the leaves differ, and are listed
        like[path] = _beside(target, self._saved[path], path)
    return bool(theirs)


class Foreign:
  """Weights of another program; attributes and methods as of `Run`."""

  def __init__(self, text):
    self._source = source_lib.Source(text)
    self.about = self._source.about

  def configured(self, config, folder, say, flag='--config.data.tokenizer='):
    """The config with the model of the weights, and their tokenizer.

    The tokenizer is written into the folder of the run, unless the config names
    another one than the default ('': theirs, as the default is). UserError:
    they have none that is read, and the config names none that fits; `flag`
    names one.
    """
    model = self._source.configured(config.model, say)
    data, text = config.data, self._source.files.tokenizer()
    file = pathlib.Path(folder).resolve() / files_lib.TOKENIZER
    if not text:
      self._check_named(data.tokenizer, model.vocab_size, flag)
      say(f'data.tokenizer: {data.tokenizer}; {self.about["source"]} has none')
    elif data.tokenizer in ('', schema.Data().tokenizer, str(file)):
      temporary = file.with_suffix(f'.{os.getpid()}.tmp')
      temporary.write_text(text, encoding='utf-8')
      os.replace(temporary, file)
      data = dataclasses.replace(data, tokenizer=str(file))
      say(f'data.tokenizer: the one of {self.about["source"]}')
      if self.about['template']:  # train/data/chat.py looks for it there
        beside = file.with_name(files_lib.TEMPLATE)
        beside.write_text(self.about['template'], encoding='utf-8')
    if self.about['licence']:
      say(f'licence of the weights: {self.about["licence"]}')
    return dataclasses.replace(config, model=model, data=data)

  def _check_named(self, name, rows, flag):
    """UserError: weights of so many rows cannot mean this tokenizer.

    The default was named by nobody, unless its ids are just the rows.
    """
    if not name:
      raise errors.UserError(self._source.no_tokenizer(flag))
    if name == 'ids':  # as many as their files have
      return
    ids = tokenizer_lib.load(name).vocab_size
    if ids > rows or (ids < rows and name == schema.Data().tokenizer):
      raise errors.UserError(
        f'tokenizer {name} has {ids} ids, the weights {rows}: '
        + self._source.no_tokenizer(flag)
      )

  def read(self, job, like, say):
    """{canonical path: array} of parameters; arguments as of `begin`."""
    del job, say
    return {
      path: self._source.read(path.removeprefix(PARAMS), x)
      for path, x in like.items()
      if path.startswith(PARAMS) and not trained.is_adapter(path)
    }

  def rows(self, like):
    """{canonical path: rows.Rows} of parameters, to be saved as they are read.

    like: {path: anything with shape and dtype}, of a model without adapters.
    """
    return {f'{PARAMS}{p}': self._source.rows(p, x) for p, x in like.items()}
