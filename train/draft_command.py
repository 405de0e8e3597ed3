"""`paraxis draft`: trains what lets a model make several tokens a call.

The text is split as for training; drafts learn the training part, and their
accuracy is that of the held-out part.
"""

import math
import pathlib
import tempfile

from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.configs.base import plain_files

KINDS = 'medusa', 'speculative', 'eagle', 'falcon', 'ppd', 'filter'
SHORT = 64  # tokens of a row of ppd, each with prompt tokens behind it
# --steps and --rate that are not given.
STEPS, RATE = dict(filter=2000), dict(filter=1e-2)
# Flags that not every --method reads.
READ = dict(heads=('medusa', 'ppd'), block=('filter',), words=KINDS[:-1])
USED = {
  'filter': 'unmask --config.decode.unmask.score=filter '
  '--config.decode.unmask.count=threshold'
}  # --method of decode


def _check(values):
  if values.method not in KINDS:
    raise errors.UserError(
      f'--method={values.method}: trained are {", ".join(KINDS)}.'
    )
  if not values.out:
    raise errors.UserError('name the file to write with --out=FILE.npz.')
  length = values.length or (SHORT if values.method == 'ppd' else 512)
  if values.own and not 0 < values.own < length:
    raise errors.UserError(
      f'--own={values.own}: of a row of --length={length} tokens the model '
      f'writes 1 to {length - 1}; 0: none.'
    )
  if values.method == 'filter' and not values.own:
    raise errors.UserError(
      '--method=filter learns from what a masked model writes: name how many '
      f'tokens of a row of --length={length} with --own.'
    )
  if (values.method == 'speculative') != bool(values.draft_layers):
    raise errors.UserError(
      f'--method={values.method} --draft_layers={values.draft_layers}: '
      'speculative needs the number of layers that draft, others have none.'
    )
  for name, kinds in READ.items():
    if values[name].present and values.method not in kinds:
      raise errors.UserError(
        f'--{name}={values[name].value} is read by --method='
        f'{" and ".join(kinds)}, not by {values.method}: leave it out.'
      )
  if values.method in READ['heads'] and values.heads >= length:
    raise errors.UserError(
      f'--heads={values.heads}: in a row of --length={length} tokens at most '
      f'{length - 1} come after one; take fewer, or longer rows.'
    )
  if not 0 <= values.rate < math.inf:
    raise errors.UserError(
      f'--rate={values.rate}: give a learning rate above 0; 0: the usual one.'
    )
  if values.draft_group > max(values.draft_layers, 1):
    raise errors.UserError(
      f'--draft_group={values.draft_group}: layers that read the same, of '
      f'--draft_layers={values.draft_layers}; take 1 to '
      f'{max(values.draft_layers, 1)}.'
    )
  return length


def _out(text):
  """The path of --out; UserError: no file can be written there.

  What is there is never opened: a device is no file, a named pipe would wait.
  """
  out = pathlib.Path(text).expanduser().resolve()
  if not out.parent.is_dir():
    raise errors.UserError(f'--out={text}: no folder {out.parent}.')
  try:
    if out.is_dir():
      raise errors.UserError(f'--out={text} is a folder: name a file in it.')
    plain_files.check(out)
    with tempfile.TemporaryFile(dir=out.parent):  # as heads.save makes one
      pass
  except OSError as e:
    raise errors.UserError(
      f'--out={text} cannot be written ({e.strerror}): name another file.'
    ) from e
  return out


def _draft(values, overrides, _):
  from paraxis.decode import __main__ as decode_main

  for name in overrides:
    raise errors.UserError(
      f'--config.{name}: a draft is of the model as the run has it; leave it '
      'out.'
    )
  length, out = _check(values), _out(values.out)
  decode_main.require_one(values.checkpoint, values.weights)
  command_line.prepare_devices(1)
  from paraxis.decode.drafts import distill
  from paraxis.decode.drafts import heads
  from paraxis.train import draft

  kind = values.method
  recipe = distill.Recipe(
    heads=values.heads, batch=values.batch, length=length, seed=values.seed,
    steps=values.steps or STEPS.get(kind, 200),
    rate=values.rate or RATE.get(kind, 1e-3), words=values.words,
    group=values.draft_group,
  )  # fmt: skip
  text = draft.Text(values.data, values.tokens, values.own)
  given = values.checkpoint, values.weights
  with decode_main.open_(*given) as opened:
    made = opened.generator(draft.alone(opened, length))
    if kind == 'filter':
      about, own = draft.filtered(made, text, values.block, recipe, print)
    else:
      about, own = draft.trained(
        made, text, kind, values.draft_layers, recipe, print
      )
  heads.save(out, about, own)
  print(
    f'{out}: {heads.numbers(own):,} parameters; paraxis decode '
    f'--method={USED.get(kind, kind)} --draft={out}'
  )


COMMAND = command_line.Command(
  _draft,
  'draft',
  '--checkpoint=RUN --method=medusa --out=heads.npz',
  'train what drafts several tokens a call (paraxis decode --draft)',
  (
    ('path', 'checkpoint=PATH', None, 'a run, or one of its steps'),
    ('path', 'weights=PATH', None, 'instead: Hugging Face, .gguf, or smollm2'),
    (str, 'method=NAME', 'medusa',
     'medusa: heads; speculative: blocks behind the first layers; eagle: a '
     'layer that continues the features; falcon: one that makes two a pass; '
     'ppd: prompt tokens behind drafts; filter: which tokens of a masked '
     'model are right already'),
    ('path', 'out=FILE', '', 'the .npz file to write'),
    ('path', 'data=PATH', 'fixture', 'text, as data.path'),
    ('positive', 'tokens=N', 100_000, 'of the text that are read, at most'),
    ('count', 'own=N', 0,
     'tokens of each row that the model writes itself, after a piece of text; '
     '0: rows are text'),
    ('count', 'words=N', 0,
     'ids that the draft says, the most frequent ones; 0: all'),
    ('count', 'draft_layers=N', 0, 'speculative: layers, from the first on'),
    ('positive', 'draft_group=N', 1,
     'speculative, for decode.method=easyspec: layers whose mixers read the '
     'same features, from which the draft learns, too'),
    ('positive', 'heads=N', 3,
     'medusa: tokens after the next one; ppd: prompt tokens'),
    ('positive', 'block=N', 32,
     'filter: tokens of a canvas; of model.visibility=block, model.block'),
    ('count', 'steps=N', 0, 'of training; 0: 200, of a filter 2000'),
    ('positive', 'batch=N', 256, 'tokens of a step; filter: calls'),
    ('count', 'length=N', 0,
     'tokens of a row of text; 0: 512, of ppd 64, which costs 1 + heads times '
     'as many'),
    (float, 'rate=X', 0.0,
     'learning rate in the beginning, cosine decay; 0: 1e-3, of a filter 1e-2'),
    ('count', 'seed=N', 0, 'order of the text'),
  ),
  'overrides',
)  # fmt: skip
