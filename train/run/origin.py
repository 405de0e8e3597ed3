"""Where a run's first parameters are from: `paraxis train --init_from=`.

A run of ours, RUN/STEP, or weights of another program: a folder of Hugging
Face, a GGUF file. Every parameter is read; only the vocabulary may have fewer
rows. --init_layers=0:6 reads these layers alone, --init_ema the averages. What
becomes of every leaf is printed (taken.py).
"""

import contextlib
import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import register
from paraxis.models import trained
from paraxis.models.huggingface import files as files_lib
from paraxis.models.huggingface import source as source_lib
from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.sharding.checkpoint import folders
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.train.run import layers as layers_lib
from paraxis.train.run import taken
from paraxis.train.run import workdir as workdir_lib

OWN = 'own_mixers'  # in meta: the files they are from
PARAMS, OPTIMIZER = 'params/', 'optimizer/'
OTHER = dict(ends=[], bos=None, template='')  # of another tokenizer: nothing
FLAG = '--init_from'
GROWS = ('embedding', 'head', 'head_bias')  # may have more rows than there


def open_(
  text, optimizer=False, say=print, layers='', ema=False
) -> 'Run | Foreign | None':
  """What --init_from= names; '': None.

  Args:
    optimizer: its optimizer's state is read, too.
    layers: 'FIRST:END', of its layers these alone; '': all.
    ema: averages of its parameters in place of them.

  Raises:
    UserError: nothing is there, or not what is asked for.
  """
  asked = dict(init_optimizer=optimizer, init_layers=layers, init_ema=ema)
  flags = ', '.join(f'--{flag}' for flag, given in asked.items() if given)
  if not text:
    if flags:
      raise errors.UserError(f'{flags}: of which run? --init_from=RUN.')
    return None
  if not source_lib.is_foreign(text):
    return Run(text, optimizer, say, layers=layers, ema=ema)
  if flags:
    raise errors.UserError(
      f'{flags}: {text} is of another program, only a run of paraxis has what '
      'they ask for.'
    )
  return Foreign(text)


def named(about) -> str:
  """What a run began with, of `about` of its origin or None."""
  if about is None:
    return 'new parameters'
  parts = [about['source']]
  if about.get('ema'):
    parts.append('its averages')
  if about.get('layers'):
    parts.append(f'layers {about["layers"]}')
  return ', '.join(parts)


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
    part: {canonical path: (rows of the new leaf, rows there that they are)}, of
      leaves that `read` gives in part; the other rows are new. `fits` finds it.
  """

  def __init__(
    self, text, optimizer=False, say=print, flag=FLAG, layers='', ema=False
  ):
    """text: RUN, RUN/STEP or RUN/checkpoints/STEP; optimizer, layers, ema: as
    `open_`; flag: that named it."""
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
    self.about: dict[str, Any] = dict(
      source=str(path.parent),
      step=self._step,
      sha256=manifest['sha256'],
      began=before.get('source', ''),
      **{key: before.get(key, '') for key in ('kind', 'licence', 'template')},
      ends=before.get('ends', []),
      bos=before.get('bos'),
    )
    if optimizer and layers:
      raise errors.UserError(
        '--init_layers takes parameters, the state of an optimizer is of all '
        'layers: leave out --init_optimizer.'
      )
    self.part, self._layers = {}, layers
    if layers:
      depth = self.config().model.num_layers
      layers_lib.parse(layers, depth, f'{path.parent}')
      self.about['layers'] = layers
    self._names = {}  # of leaves that are read by another
    if ema:
      params = [p for p in self._saved if p.startswith(PARAMS)]
      asked, what = '--init_ema' if flag == FLAG else '--ema', f'{path.parent}'
      self._names = trained.averages(self._saved, params, asked, what)
      self.about['ema'] = 'yes'
    self._view = {
      p: self._saved[self._names.get(p, p)]
      for p in self._saved
      if p.startswith(self._under)
    }

  @contextlib.contextmanager
  def _store(self):
    from paraxis.sharding.checkpoint import store  # Orbax starts slowly

    with store.Store(self._path, read_only=True, say=self._say) as opened:
      yield opened

  def configured(self, config, folder, say):
    """The schema.Config of a new run: as given; says how its model differs."""
    del folder  # of the new run
    theirs = self.config().model
    for field in dataclasses.fields(config.model):
      was, now = (getattr(m, field.name) for m in (theirs, config.model))
      if was != now and field.name not in source_lib.RUNS:
        say(f'--init_from: model.{field.name} was {was!r}, is {now!r}')
    return config

  def config(self):
    """schema.Config of the run."""
    folder, meta = self._path.parent, self._meta
    config = schema.from_json(meta.get('config'), self._path)
    return tokenizer_lib.in_place(config, folder, meta.get('tokenizer'))

  def saved(self):
    """({canonical path: its entry of the manifest} of parameters, without
    adapters; meta of the manifest)."""
    own = lambda p: p.startswith(PARAMS) and not trained.is_adapter(p)
    leaves = {p: x for p, x in self._saved.items() if own(p)}
    return leaves, dict(self._meta)

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
    tree = self._restored(like)
    out = {path: np.asarray(tree[PARAMS + path]) for path in paths}
    for path, w in out.items():
      a, b = (tree.get(PARAMS + path + end) for end in (trained.A, trained.B))
      if a is not None:
        out[path] = np.asarray(trained.merge(w, a, b, self._scale()))
    return out

  def _restored(self, like):
    names = {path: self._names.get(path, path) for path in like}
    wanted = {names[path]: x for path, x in like.items()}
    with self._store() as store:
      tree, _ = store.restore(self._step, wanted, ())
    return {path: tree[name] for path, name in names.items()}

  def _scale(self):
    return trained.of(self.config().train).scale

  def read(self, job, like, say):
    """{canonical path: array}, verified; some in part, see `part`.

    Arguments as of start.begin. UserError: as of `fits`.
    """
    like, merges = self.fits(job, like, say)
    tree = self._restored(like)
    if merges:
      with job.context():
        tree = trained.merged(tree, self._scale())
    return tree

  def fits(self, job, like, say):
    """({path: jax.ShapeDtypeStruct} to be read, whether adapters are merged).

    Reads no array; says what becomes of every leaf. UserError: other leaves
    differ, all listed.
    """
    whole, words, self.part = like, {}, {}
    register.require(self._meta.get(OWN), self._path, say)
    if self._meta.get('tokenizer') != job.tokenizer.fingerprint:
      say('--init_from: its tokenizer was another, its ids may mean other text')
      self.about |= OTHER
    if OPTIMIZER in self._under:
      replicas = (self._saved.get('skipped', {}).get('shape') or [0])[0]
      was = self.config().optimizer.name, replicas
      taken.check_optimizer(self._path.parent, was, job)
    like = {p: x for p, x in like.items() if p.startswith(self._under)}
    if self._layers:
      found = layers_lib.part(self.config(), job, self._layers, like)
      self.part, words = found
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
        like[path] = layers_lib.rows_of(x, rows)
        self.part[path] = [*range(rows)], [*range(rows)]
        words[path] = f'{rows} rows of {x.shape[0]}, the others new'
    merges = self._adapters(job, like, say)
    shaped = [
      (name, was, now)
      for name, was, now in workdir_lib.differences(self.config(), job.config)
      if not workdir_lib.keeps_shapes(name, was, now)
    ]
    view = {
      path: leaf
      for path, leaf in self._view.items()
      if path in like
      or not (self._layers and path.startswith(layers_lib.STACKS))
    }
    manifest_lib.compare(
      view,
      like,
      f'{FLAG}: {self._path.parent}',
      self._under,
      f'Here {", ".join(f"{n} is {now!r}" for n, _, now in shaped)}: give '
      f'{" ".join(f"--config.{n}={was}" for n, was, _ in shaped)}, or begin '
      f'without {FLAG}.'
      if shaped
      else f'Begin without {FLAG}.',
    )
    found = taken.fates(whole, self._saved, like, words, self._names)
    for line in taken.lines(found):
      say(f'{FLAG}: {line}')
    return like, merges

  def _adapters(self, job, like, say):
    """Makes the adapters in `like` those of the run -> are they to be merged?

    What the run added to its model, adapters or a side network, is kept if the
    new run has the same; else its own are new.
    """
    theirs = [p for p in self._saved if p.startswith(PARAMS)]
    mine = list(filter(trained.is_added, like))
    was, now = self.config().train, job.config.train
    if (was.lora, was.side) == (now.lora, now.side):
      if mine and any(map(trained.is_added, theirs)):
        return False
    for path in mine:
      del like[path]
    theirs = [p for p in theirs if trained.is_adapter(p)]
    if theirs:
      say(f'--init_from: its {len(theirs) // 2} adapters are merged')
    if mine:
      low, side = f'{len(mine) // 2} adapters are', 'the side network is'
      say(f'--init_from: {low if now.lora.rank else side} new')
    for path in theirs:
      target = like.get(path.removesuffix(trained.A).removesuffix(trained.B))
      if target is not None:  # else the leaves differ, and are listed
        like[path] = _beside(target, self._saved[path], path)
    return bool(theirs)


class Foreign:
  """Weights of another program; attributes and methods as of `Run`."""

  def __init__(self, text):
    self._source = source_lib.Source(text)
    self.about, self.part = dict(self._source.about), {}

  def configured(self, config, folder, say, flag='--config.data.tokenizer='):
    """The config with the model of the weights, and their tokenizer.

    The tokenizer is written into the folder of the run, unless the config names
    another one than the default ('': theirs, as the default is). UserError:
    they have none, and the config none that fits; `flag` names one; the folder
    has a run of other weights.
    """
    begun = self._check_run(pathlib.Path(folder).resolve())
    model = self._source.configured(config.model, say, begun)
    data, text = config.data, self._source.files.tokenizer()
    file = pathlib.Path(folder).resolve() / files_lib.TOKENIZER
    if not text:
      self._check_named(data.tokenizer, model.vocab_size, flag)
      say(f'data.tokenizer: {data.tokenizer}; {self.about["source"]} has none')
    elif data.tokenizer in ('', schema.Data().tokenizer, str(file)):
      self._source.keep_tokenizer(file, begun, say)
      data = dataclasses.replace(data, tokenizer=str(file))
      say(f'data.tokenizer: the one of {self.about["source"]}')
    elif tokenizer_lib.load(data.tokenizer).text != text:
      self.about |= OTHER
    if self.about['licence']:
      say(f'licence of the weights: {self.about["licence"]}')
    return dataclasses.replace(config, model=model, data=data)

  def _check_run(self, folder):
    """Whether a run is there; UserError: its tokenizer would be replaced."""
    if not folders.steps(folder / workdir_lib.CHECKPOINTS):
      return False
    with contextlib.suppress(errors.IntegrityError):  # what follows says it
      began = Run(f'{folder}')._meta.get('origin') or dict(source='no others')
      old = self._source.files.fingerprint(sampled=False)
      if began.get('sha256') not in (self.about['sha256'], old):
        raise errors.UserError(
          f'{folder} has a run of {began["source"]}, not of '
          f'{self.about["source"]}: leave out {FLAG} or take another --workdir.'
        )
    return True

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

  def fits(self, job, like, say):
    """As of `Run`: `configured` took the model from the weights."""
    del job
    own = lambda path: path.startswith(PARAMS) and not trained.is_added(path)
    read = {path: x for path, x in like.items() if own(path)}
    for line in taken.lines(taken.fates(like, (), read)):
      say(f'{FLAG}: {line}')
    return read, False

  def read(self, job, like, say):
    """{canonical path: array} of parameters; arguments as of start.begin."""
    return {
      path: self._source.read(path.removeprefix(PARAMS), x)
      for path, x in self.fits(job, like, say)[0].items()
    }

  def rows(self, like):
    """{canonical path: rows.Rows} of parameters, to be saved as they are read.

    like: {path: anything with shape and dtype}, of a model without adapters.
    """
    return {f'{PARAMS}{p}': self._source.rows(p, x) for p, x in like.items()}
