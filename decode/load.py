"""A checkpoint becomes a Generator: config, mesh, parameters, tokenizer.

Everything is read from the checkpoint's manifest, as JSON; no Python is
executed. Only parameters are read, each leaf's fingerprint is verified, and the
tokenizer must be the one the model was trained with.
"""

import dataclasses
import functools
import pathlib
import tempfile

import jax
import ml_collections

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import field
from paraxis.configs.base import mixers
from paraxis.decode import chat as chat_lib
from paraxis.decode import latents
from paraxis.decode import loop
from paraxis.decode import shared_rows
from paraxis.decode import stored
from paraxis.decode import weights
from paraxis.models import build
from paraxis.models import layer
from paraxis.models import register
from paraxis.models import trained
from paraxis.models.huggingface import files as files_lib
from paraxis.models.huggingface import source as source_lib
from paraxis.models.text import chat
from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import store as store_lib

CHECKPOINTS = 'checkpoints'  # a workdir's folder of steps
PARAMS = 'params/'
# Logical axes of arrays that have slots, or are multiplied with them.
_BESIDE_SLOTS = 'batch', 'heads', 'kv_heads', 'slot_heads', 'head_dim'
# Of config.json.
_POSITIONS = ('max_position_embeddings', 'n_positions', 'max_sequence_length')


def locate(checkpoint, step=None):
  """(folder of steps, step or None) of --checkpoint= and --step=.

  Args:
    checkpoint: a workdir, its folder of checkpoints, or one step's folder.
    step: a step's number, or None: the newest good one.

  Raises:
    UserError: no such folder, or a step's folder with another --step.
  """
  path = pathlib.Path(checkpoint).expanduser().resolve()
  if not path.is_dir():
    raise errors.UserError(f'--checkpoint={checkpoint}: no folder {path}.')
  if (path / CHECKPOINTS).is_dir():
    return path / CHECKPOINTS, step
  if path.name.isdecimal() and (path / 'manifest').is_dir():
    if step not in (None, int(path.name)):
      raise errors.UserError(
        f'--checkpoint={checkpoint} is step {path.name}, --step={step} is '
        'another; leave one out.'
      )
    return path.parent, int(path.name)
  return path, step


def for_decoding(mesh):
  """schema.Mesh without training-only options: one token has no shards."""
  return dataclasses.replace(
    schema.Mesh(), sequence=False, rules=mesh.rules,
    **{a: getattr(mesh, a) for a in mesh_lib.AXES},
  )  # fmt: skip


def check_mesh(text, sizes, pattern):
  """Mesh axes that a run had and decoding does not use; UserError if --mesh=
  names one that it cannot use.

  Args:
    sizes: of the mesh. pattern: model.pattern, whose layers keep what context
      is to share.
  """
  idle = [a for a in ('context', 'stage') if sizes.get(a, 1) != 1]
  if text and 'stage' in idle:
    raise errors.UserError(
      f'--mesh={text}: decoding has one token a row at a time, nothing for '
      'stage to share; use data, fsdp, tensor or context.'
    )
  letters = sorted(set(mixers.of_pattern(pattern)[0]))
  if text and idle and not any(_own(k).slots for k in letters):
    raise errors.UserError(
      f'--mesh={text}: context shares the slots of a cache, and layers of kind '
      f'{", ".join(letters)} have none: use data, fsdp or tensor.'
    )
  return [] if text else idle


def built_for(config, mesh_text, devices):
  """build.Built whose context axis, if it has one, shares slots."""
  run = functools.partial(build.build, config, mesh_text, devices=devices)
  if build.mesh_sizes(config, mesh_text).get('context', 1) == 1:
    return run()
  own = map(_own, mixers.of_pattern(config.model.pattern)[0])
  states = any(says.recurs or not says.slots for says in own)
  try:
    return run(change=functools.partial(_sharing_slots, states))
  except errors.UserError as e:
    if not states:
      raise
    raise errors.UserError(
      f'{e} While decoding, context shards heads and channels of a model with '
      'recurrences, beside the slots of the others.'
    ) from None


def _sharing_slots(states, rules):
  """rules.Rules of training -> with the axis context for slots.

  The few tokens of a step are whole on each device of that axis. A state of one
  size has no slots. With `states`, heads and channels of recurrences, and so of
  all layers, are sharded over it too, and attention gathers its queries. What
  else training sharded over it, and would meet one of these in an array, is
  not.
  """
  table = {}
  for name, axes in rules.table.items():
    if 'length' not in name:
      freed = states or name in _BESIDE_SLOTS
      table[name] = tuple(a for a in axes if not freed or a != 'context')
  table['slots'] = ('context',)
  if states:
    table.setdefault('slot_heads', table.get('heads', ()))
    for name in ('heads', 'mlp'):
      table[name] = (*table.get(name, ()), 'context')
  return dataclasses.replace(rules, table=table)


def _own(letter):
  """protocol.Capabilities of a kind of layer."""
  return layer.MIXERS[letter].capabilities


class Checkpoint:
  """A read-only view of one run's checkpoints. Also a context manager."""

  _of_a_run = True

  def __init__(self, checkpoint, step=None, say=print, ema=False):
    """See `locate`. Nothing is written. say: prints one line per finding.

    ema: averages of parameters are read in place of them."""
    folder, self.step = locate(checkpoint, step)
    self._say, self._known = say, False  # whether its own mixers are here
    self._store = store_lib.Store(folder, read_only=True, say=say)
    self._ema = ema

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self._store.close()

  def config(self):
    """The run's configuration, a locked ConfigDict.

    Raises:
      UserError: no checkpoint here. IntegrityError: none is readable.
    """
    store = self._store
    if self.step is None and not store.steps():
      store.restore_latest_good({}, PARAMS)  # raises if there are damaged ones
    meta = store.read_manifest(self.step)['meta']
    if not isinstance(meta, dict) or not isinstance(meta.get('config'), str):
      raise errors.UserError(
        f'{store.directory}: the checkpoint carries no configuration.'
      )
    if not self._known:
      register.require(meta.get('own_mixers'), store.directory, self._say)
    self._known = True
    config = schema.from_json(meta['config'], store.directory)
    config = tokenizer_lib.in_place(
      config, store.directory.parent, meta.get('tokenizer')
    )
    return ml_collections.ConfigDict(schema.to_dict(config)).lock()

  def generator(self, config, mesh_text='', rows=1, texts=(), template=''):
    """A loop.Generator of `parts`, which has the other arguments and errors.

    template: of a chat, whose answers end as its turns do."""
    built, params, tokenizer, ends = self.parts(config, mesh_text, rows, texts)
    if template:
      ends = *ends, *chat_lib.Chat(tokenizer, template).ends()
    next_token = config.train.objective == 'next_token'
    return loop.Generator(
      built, params, tokenizer, config.decode, self._say, ends,
      begins=next_token or config.model.mask_shift,
    )  # fmt: skip

  def parts(self, config, mesh_text='', rows=1, texts=()):
    """(build.Built, its parameters, verified, on its mesh; the tokenizer; ids
    that end a text, beside the tokenizer's end token).

    Args:
      config: schema.Config, as `config` gave it, perhaps with overrides.
      mesh_text: --mesh=; empty: the run's mesh if it fits the devices.
      rows: number of prompts, which chooses a substitute mesh.
      texts: calibration texts, where decoding rotates latents
        (model.latent.rotation=pca).

    Raises:
      UserError: the mesh does not fit; the checkpoint is of another
        architecture (every differing leaf is listed) or tokenizer; pca of too
        little text.
      IntegrityError: damaged.
    """
    tokenizer = self._tokenizer(config.data.tokenizer)
    mesh_text, devices = self._mesh(config, mesh_text, rows)
    config = dataclasses.replace(
      config, mesh=for_decoding(config.mesh),
      train=schema.Train(side=config.train.side), outer=schema.Outer(),
    )  # fmt: skip
    built = saved = built_for(config, mesh_text, devices)
    run = schema.view(self.config())
    rotates = latents.change(config.model) or latents.change(run.model)
    source = latents.as_trained(config, run) if rotates else config
    source = schema.with_value(source, 'train.lora', run.train.lora)
    if source != config:
      saved = built_for(source, mesh_text, devices)
    params, what = self._read(saved.params, tokenizer)
    self._say(f'{what}, on {mesh_lib.describe(dict(built.mesh.shape))}')
    if note := weights.stays(built.model, built.params, config.decode):
      self._say(note)
    if run.train.lora.rank:
      with build.use(saved):
        params = trained.merged(params, saved.model.trained.scale)
    if rotates:
      ids = [[*tokenizer.opening(), *tokenizer.encode(t)] for t in texts]
      length = config.data.sequence_length
      params = latents.rotated(params, built, ids, length, self._say)
    return built, params, tokenizer, self._ends()

  def template(self, data):
    """The chat template of schema.Data, or beside its tokenizer; '': none."""
    return chat.template(data)

  def _tokenizer(self, name):
    return tokenizer_lib.load(name)

  def _ends(self):
    """Ids that end a text for the weights that the run began with."""
    meta = self._store.read_manifest(self.step)['meta']
    return (meta.get('origin') or {}).get('ends', ())

  def _read(self, like, tokenizer):
    """({path: array} of parameters, what they are in words)."""
    like, under = {PARAMS + path: leaf for path, leaf in like.items()}, PARAMS
    names, where = {path: path for path in like}, self._store.directory
    if self._ema:
      saved = self._store.read_manifest(self.step)['leaves']
      manifest_lib.compare(saved, like, where, PARAMS)
      names, under = trained.averages(saved, like, '--ema', where), ()
    like = {names[path]: leaf for path, leaf in like.items()}
    if self.step is None:
      found = self._store.restore_latest_good(like, under)
      if found is None:
        raise errors.UserError(f'{self._store.directory}: no checkpoint here.')
      self.step, tree, meta = found
    else:
      tree, meta = self._store.restore(self.step, like, under)
    if meta.get('tokenizer') != tokenizer.fingerprint:
      raise errors.UserError(
        f'tokenizer {tokenizer.name} is not the one of the checkpoint '
        f'(fingerprint {tokenizer.fingerprint[:12]}, trained with '
        f'{str(meta.get("tokenizer"))[:12]}): its ids mean other text. Name '
        'the right one with --config.data.tokenizer=.'
      )
    params = {p.removeprefix(PARAMS): tree[name] for p, name in names.items()}
    what = f'{"averages of " if self._ema else ""}step {self.step}'
    return params, f'{what} of {where}'

  def _mesh(self, config, text, rows):
    """(--mesh= text, devices): the run's mesh, or a reported substitute."""
    devices, why = jax.devices(), ''
    sizes = build.mesh_sizes(config, text)
    idle = check_mesh(text, sizes, config.model.pattern)
    batch = rules_lib.preset(config.mesh.rules).axes('batch')
    try:
      full = mesh_lib.resolve(sizes, len(devices))
      split = {a: full[a] for a in batch if full[a] != 1}
      why = shared_rows.unsharded(config.decode, split)
      if why and text:
        raise errors.UserError(f'--mesh={text}: {why}.')
      if not idle and not why:
        return text, devices
    except errors.UserError:
      if text:
        raise
    shards = 1
    if 'data' in batch and not config.decode.requests:
      shards = max(
        n
        for n in range(1, len(devices) + 1)
        if n <= max(rows, 1) and len(devices) % n == 0
      )
    one = len(devices) == 1
    here = f'{len(devices)} device{"s" * (not one)}'
    self._say(
      f'the run used mesh {mesh_lib.describe(sizes)}, here '
      f'{"is" if one else "are"} {here}: decoding with data={shards} on '
      f'{shards} of them (--mesh= names another){why and f"; {why}"}'
      if self._of_a_run
      else f'{here}, decoding on {shards} (--mesh= names another)'
    )
    return f'data={shards}', devices[:shards]


class Weights(Checkpoint):
  """Weights of another program (models/huggingface), as a `Checkpoint`."""

  _of_a_run = False

  def __init__(self, path, say=print):
    """path: of a folder or file. say: prints one line per finding."""
    self._source = source_lib.Source(path)
    self._source.check_head()
    self._say, self.step = say, None
    self._folder = tempfile.TemporaryDirectory()  # of the tokenizer
    if self._source.left_out:
      say(self._source.left_out)
    if licence := self._source.about['licence']:
      say(f'licence of the weights: {licence}')

  def __exit__(self, *error):
    self._folder.cleanup()

  def config(self):
    """The default configuration with the model of the weights, and rows as
    long as the positions that they say they know. The tokenizer is theirs;
    '': they have none that is read, and only an override names one."""
    files = self._source.files
    config = schema.with_value(schema.Config(), 'model', self._source.model)
    known = [files.config.get(name) for name in _POSITIONS]
    if length := next(filter(None, known), 0):
      length = min(length, field.MOST_LENGTH)  # of rows, whatever they know
      config = schema.with_value(config, 'data.sequence_length', length)
    name = ''
    if files.tokenizer():
      file = pathlib.Path(self._folder.name, files_lib.TOKENIZER)
      if not file.exists():
        self._source.keep_tokenizer(file, say=self._say)
      name = str(file)
    config = schema.with_value(config, 'data.tokenizer', name)
    return ml_collections.ConfigDict(schema.to_dict(config)).lock()

  def parts(self, config, mesh_text='', rows=1, texts=()):
    platform = jax.default_backend()
    for line in stored.lines(self._source.files, config, platform):
      self._say(line)
    return super().parts(config, mesh_text, rows, texts)

  def template(self, data):
    return super().template(data) or self._source.files.template

  def _tokenizer(self, name):
    """Theirs, or the one that an override names."""
    if not name:
      flag = '--config.data.tokenizer='
      raise errors.UserError(self._source.no_tokenizer(flag))
    found = tokenizer_lib.load(name)
    if not self._source.files.tokenizer():
      self._say(f'tokenizer {name}; {self._source.files.path} has none')
    return found

  def _read(self, like, tokenizer):
    rows = self._source.model.vocab_size
    if tokenizer.vocab_size > rows:
      raise errors.UserError(
        f'tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, the '
        f'weights {rows}: name theirs with --config.data.tokenizer=.'
      )
    params = {path: self._source.read(path, x) for path, x in like.items()}
    return params, str(self._source.files.path)

  def _ends(self):
    return self._source.about['ends']
