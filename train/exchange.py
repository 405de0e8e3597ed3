"""Weights of other programs to a checkpoint of ours, and back.

    paraxis checkpoint import FOLDER --workdir=RUN
    paraxis checkpoint export --checkpoint=RUN --out=FOLDER

An import is step 0 of a folder without a run: `decode --checkpoint=` and `train
--init_from=` read it. An export is config.json, safetensors, the tokenizer with
the chat template of the run (else of the weights that it began with), and a
README with the licence; transformers opens it, and ends an answer where the
template does. Of tokenizers without a tokenizer.json (bytes, ids) it says so
and writes none: reading the folder again then needs the name,
`--tokenizer=bytes`.
"""

import importlib.util
import json
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import ml_dtypes
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import chat as chat_lib
from paraxis.decode import loop
from paraxis.models import build
from paraxis.models.huggingface import config as config_lib
from paraxis.models.huggingface import files as files_lib
from paraxis.models.huggingface import leaves as leaves_lib
from paraxis.models.text import chat as templates
from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.train import start
from paraxis.train.run import origin as origin_lib
from paraxis.train.run import workdir as workdir_lib

SHARD = 4 * 2**30  # bytes of a file of an export
# Of a router, added to scores to choose by: rounded it would choose others.
# transformers keeps it in float32 in models of any dtype.
BALANCE = 'moe/bias'
SHOWN = 6  # paths that a message lists
BEGINS = ('cwm',)  # classes of transformers 5.23 that take no null bos_token_id
DTYPES = {'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}


def bring(text, workdir, say=print, tokenizer='') -> None:
  """Saves weights of another program as step 0 of a folder.

  They are read twice, a layer at a time: neither devices nor the host hold
  more, of parameters without layers one (sharding/checkpoint/rows.py).

  Args:
    text: folder, GGUF file or source.SMOLLM2.
    workdir: folder, without checkpoints yet.
    say: prints one line.
    tokenizer: as data.tokenizer; '': theirs.

  Raises:
    UserError: they do not read, have no tokenizer where none is named, or the
      folder holds a run.
  """
  from paraxis.sharding.checkpoint import store as store_lib  # starts slowly

  source = origin_lib.Foreign(text)
  with workdir_lib.without_run(workdir, '--workdir') as path:
    given = schema.with_value(schema.Config(), 'data.tokenizer', tokenizer)
    config = source.configured(given, path, say, '--tokenizer=')
    built = build.build(config, '', devices=jax.devices()[:1])
    chosen = tokenizer_lib.load(config.data.tokenizer)
    tree = source.rows(built.params)
    axes = {f'{origin_lib.PARAMS}{p}': a for p, a in built.model.axes.items()}
    meta = start.common(config, chosen.fingerprint, source.about)
    with store_lib.Store(path / workdir_lib.CHECKPOINTS, say=say) as store:
      store.preflight(tree)
      store.save(0, tree, axes, meta | {workdir_lib.IMPORTED: True})
    workdir_lib.write_config(path, config)
  size = sum(x.nbytes for x in tree.values())
  say(f'{len(tree)} leaves, {size:,} bytes, in {path}')


def send(
  text, out, dtype='float32', model_type='', say=print, ema=False
) -> None:
  """Writes a run's parameters as a folder that Hugging Face reads.

  Args:
    text: RUN, RUN/STEP. out: folder that does not exist, or is empty.
    dtype: of DTYPES. model_type: of config.json; '': the plainest that fits.
    say: prints one line. ema: averages of parameters instead of them.

  Raises:
    UserError: no family expresses the model, or its side network, or the folder
      is not empty, or cannot be written.
  """
  if dtype not in DTYPES:
    raise errors.UserError(
      f'--dtype={dtype} is not one of {", ".join(DTYPES)}.'
      + schema.suggest(dtype, DTYPES)
    )
  run = origin_lib.Run(text, say=say, flag='--checkpoint', ema=ema)
  config = run.config()
  if config.train.side:
    raise errors.UserError(
      f'--checkpoint={text}: train.side={config.train.side}, and no family of '
      'Hugging Face has a side network; export the run that it began with.'
    )
  described = config_lib.from_model(
    config.model, model_type or run.about['kind']
  )
  table = leaves_lib.table(config.model, described['model_type'])
  _check_leaves(text, run, table)
  about = described | run.about
  about['template'] = _template(config.data) or about['template']
  if about['template'] and importlib.util.find_spec('jinja2') is None:
    say(
      'what the chat template writes behind an answer is not among the ends of '
      "the export: reading it takes jinja2, pip install 'paraxis[chat]'"
    )
  out = pathlib.Path(out).expanduser().resolve()
  made = _beside(out)
  try:
    tokenizer = _write_tokenizer(made, config, about, say)
    _write_json(
      made / files_lib.CONFIG,
      described | _ids(tokenizer, config, about) | dict(torch_dtype=dtype),
    )
    files = _write_tensors(made, run, table, DTYPES[dtype])
    _write_readme(made, run.about)
    made.chmod(0o755)
    if out.exists():
      out.rmdir()
    made.rename(out)
  finally:
    shutil.rmtree(made, ignore_errors=True)
  say(f'{described["model_type"]}, {files} files of tensors, in {out}')


def _beside(out):
  """A new folder beside `out`, which is empty or not there."""
  try:
    if out.exists() and any(out.iterdir()):
      raise errors.UserError(f'--out={out} is not empty: name another folder.')
    out.parent.mkdir(parents=True, exist_ok=True)
    return pathlib.Path(tempfile.mkdtemp(prefix='export-', dir=out.parent))
  except OSError as e:
    raise errors.UserError(
      f'--out={out}: cannot write it as a folder ({e.strerror}: {e.filename}): '
      'name another one.'
    ) from e


def _check_leaves(text, run, table):
  """UserError: the run has parameters that no tensor is made of, or lacks
  some."""
  of = len(origin_lib.PARAMS)
  held, wanted = {path[of:] for path in run.saved()[0]}, {x.path for x in table}
  if found := sorted(held ^ wanted):
    more = f' and {len(found) - SHOWN} more' if found[SHOWN:] else ''
    raise errors.UserError(
      f'--checkpoint={text} has {len(held)} parameters, an export of its model '
      f'{len(wanted)}: only one has {", ".join(found[:SHOWN])}{more}. Nothing '
      'is written.'
    )


def _template(data):
  """The chat template that a run of schema.Data is trained with; '': it names
  none. UserError: it is not there any more."""
  try:
    return templates.template(data)
  except errors.UserError as e:
    raise errors.UserError(
      f'{e} An export has the template that its run was trained with: put the '
      'file back there.'
    ) from e


def _ends(tokenizer, about):
  """[id] that a text ends with, or an answer by the chat template.

  Arguments as of `_ids`. The tokenizer's own end stands before that of an
  answer: a template may write it elsewhere, as its eos_token.
  """
  ends = [*about['ends']]
  if tokenizer.specials:  # not of ids of an unknown tokenizer
    ends += loop.end_ids(tokenizer)
    if about['template']:
      ends += chat_lib.Chat(tokenizer, about['template']).ends()
  return [*dict.fromkeys(ends)]


def _bos(tokenizer, about):
  """Id that config.json says to begin a text: as that of the weights that a run
  began with; None: nobody knows one."""
  known, bos = tokenizer.special_ids, about['bos']
  if bos is not None and (bos in known or not known):
    return bos
  try:
    return tokenizer.bos_id(None) if known else None
  except errors.UserError:  # of weights whose texts begin with no such token
    return None


def _ids(tokenizer, config, about):
  """Ids of config.json that say where a text begins and ends, and what fills.

  None is written, too: without a field a class of transformers has its own,
  and refuses one of padding that is no row of the embedding. Only a bos that
  is None is left out for families of BEGINS, which would not open.

  about: of the run, with those of the weights that it began with, and of
  config.json.
  """
  ends = _ends(tokenizer, about)
  pad = tokenizer.own_pad_id
  fits = pad is not None and pad < config.model.vocab_size
  bos = _bos(tokenizer, about)
  begin = dict(bos_token_id=bos)
  if bos is None and about['model_type'] in BEGINS:
    begin = {}
  return begin | dict(
    eos_token_id=(ends if ends[1:] else ends[0]) if ends else None,
    pad_token_id=pad if fits else None,
  )


def _write_json(path, content):
  path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


def _write_tokenizer(folder, config, about, say):
  """tokenizer.json and its config, where there is one -> the tokenizer."""
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  if not tokenizer.text:
    say(
      f'no tokenizer is written: no tokenizer.json describes {tokenizer.name}'
    )
    return tokenizer
  (folder / files_lib.TOKENIZER).write_text(tokenizer.text, encoding='utf-8')
  written: dict[str, Any] = dict(tokenizer_class='PreTrainedTokenizerFast')
  bos, first = _bos(tokenizer, about), tokenizer.first
  bos = bos if first is None else first
  if bos in tokenizer.special_ids and not tokenizer.prefix:
    written['bos_token'] = tokenizer.name_of(bos)
  ends = tokenizer.last, *_ends(tokenizer, about)
  if named := [i for i in ends if i in tokenizer.special_ids]:
    written['eos_token'] = tokenizer.name_of(named[0])
  if first is not None:
    written['add_bos_token'] = True
  if 'max_position_embeddings' in about:
    written['model_max_length'] = about['max_position_embeddings']
  if about['template']:
    written['chat_template'] = about['template']
  _write_json(folder / files_lib.TOKENIZER_CONFIG, written)
  return tokenizer


def _together(table):
  """[[path]]: paths whose tensors overlap, in the order of the table."""
  group = {}  # tensor, and path -> the list of paths it is in
  for leaf in table:
    merged = group.get(leaf.path, [leaf.path])
    for name in leaf.names:
      other = group.get(name, merged)
      if other is not merged:
        merged += [p for p in other if p not in merged]
        for key, value in group.items():
          if value is other:
            group[key] = merged
      group[name] = merged
    group[leaf.path] = merged
  seen, out = set(), []
  for leaf in table:
    if leaf.path not in seen:
      out.append(group[leaf.path])
      seen |= set(group[leaf.path])
  return out


def _write_tensors(folder, run, table, dtype):
  """Writes model*.safetensors, a shard at a time -> number of files."""
  shards, tensors, where, total = [], {}, {}, 0

  def flush():
    from safetensors import numpy as files

    name = f'{len(shards)}.safetensors'
    files.save_file(tensors, str(folder / name), {'format': 'pt'})
    where.update(dict.fromkeys(tensors, len(shards)))
    shards.append(folder / name)
    tensors.clear()

  for paths in _together(table):
    arrays = run.arrays(paths)
    mine = [leaf for leaf in table if leaf.path in paths and leaf.names]
    for layer in sorted({leaf.layer or 0 for leaf in mine}):
      for leaf in (x for x in mine if (x.layer or 0) == layer):
        x = arrays[leaf.path]
        x = x if leaf.layer is None else x[layer]
        own = np.float32 if leaf.path.endswith(BALANCE) else dtype
        leaves_lib.put(tensors, leaf, x.astype(own))
      if sum(t.nbytes for t in tensors.values()) > SHARD:
        total += sum(t.nbytes for t in tensors.values())
        flush()
  total += sum(t.nbytes for t in tensors.values())
  if tensors:
    flush()
  names = ['model.safetensors']
  if len(shards) > 1:
    names = [
      f'model-{i:05d}-of-{len(shards):05d}.safetensors'
      for i in range(1, len(shards) + 1)
    ]
    _write_json(
      folder / files_lib.INDEX,
      dict(
        metadata=dict(total_size=total),
        weight_map={t: names[i] for t, i in sorted(where.items())},
      ),
    )
  for shard, name in zip(shards, names, strict=True):
    shard.chmod(0o644)  # the library makes it private
    shard.rename(folder / name)
  return len(shards)


def _write_readme(folder, about):
  """README.md: the licence in its head, and where the weights began."""
  lines = []
  if about['licence']:
    lines = ['---', f'license: {about["licence"]}', '---', '']
  lines += [
    f'Exported by paraxis from step {about["step"]} of a run '
    f'({about["sha256"][:16]}).'
  ]
  if about.get('began'):
    lines += [f'The run began with the weights of {about["began"]}.']
  (folder / 'README.md').write_text('\n'.join(lines) + '\n', encoding='utf-8')
