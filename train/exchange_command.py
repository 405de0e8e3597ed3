"""`paraxis checkpoint import | export | merge`: flags, and what is missing."""

from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.configs.base import shares

INIT = (
  ('path', 'init_from=PATH', '',
   'begin a new run with the weights of RUN, RUN/STEP, a folder of Hugging '
   'Face, a .gguf file, or smollm2; configs/finetune.py has rates for them'),
  (bool, 'init_optimizer', False,
   "with --init_from=RUN: its optimizer's state too"),
  (str, 'init_layers=FIRST:END', '',
   'with --init_from=RUN: read only its layers FIRST to END - 1 (0:6 are 0 to '
   '5), the others are new'),
  (bool, 'init_ema', False,
   'with --init_from=RUN: averages of its parameters (optimizer.ema_decay) '
   'instead of them'),
)  # fmt: skip

_EMA = (
  bool, 'ema', False,
  'read the EMA of the parameters (optimizer.ema_decay)',
)  # fmt: skip


def source(values, config):
  """What the flags `INIT` name, as run/origin.py's `open_`.

  Prints one line if the rates of a schema.Config are not those of tuning.
  """
  from paraxis.train.run import origin
  from paraxis.train.updates import tuning

  found = origin.open_(
    values.init_from,
    values.init_optimizer,
    layers=values.init_layers,
    ema=values.init_ema,
  )
  line = tuning.line(config, found.about) if found else ''
  if line and values.process_id <= 0:
    print(line)
  return found


def _import(values, _, words):
  if not words or not values.workdir:
    raise errors.UserError(
      'paraxis checkpoint import FOLDER --workdir=RUN: name what to read, and '
      'where to keep it.'
    )
  command_line.prepare_devices(values.devices)
  from paraxis.train import exchange

  return exchange.bring(words[0], values.workdir, tokenizer=values.tokenizer)


def _export(values, *_):
  if not values.checkpoint or not values.out:
    raise errors.UserError(
      'paraxis checkpoint export --checkpoint=RUN --out=FOLDER: name both.'
    )
  command_line.prepare_devices(values.devices)
  from paraxis.train import exchange

  return exchange.send(
    values.checkpoint, values.out, values.dtype, values.family, ema=values.ema
  )


def _merge(values, _, words):
  if not words or not values.out:
    raise errors.UserError(
      'paraxis checkpoint merge RUN:WEIGHT RUN:WEIGHT ... --out=RUN: name what '
      'to average, and where to keep it.'
    )
  runs = shares.parse(words, 'paraxis checkpoint merge')
  command_line.prepare_devices(values.devices)
  from paraxis.train.run import merge

  return merge.write(runs, values.out, ema=values.ema)


def commands(devices):
  """The commands; devices: the row of a flag that all commands share."""
  return (
    command_line.Command(
      _import,
      'checkpoint import',
      'FOLDER --workdir=RUN',
      'keep weights of another program as a checkpoint, which decode and '
      'train --init_from read',
      (
        ('path', 'workdir=RUN', '', 'folder to write, without checkpoints yet'),
        (
          'path',
          'tokenizer=NAME',
          '',
          'as data.tokenizer, for weights without a tokenizer.json',
        ),
        devices,
      ),
      words=1,
    ),
    command_line.Command(
      _export,
      'checkpoint export',
      '--checkpoint=RUN --out=FOLDER',
      'write weights, tokenizer and licence as Hugging Face reads them',
      (
        ('path', 'checkpoint=RUN', '', 'a run, or RUN/STEP'),
        ('path', 'out=FOLDER', '', 'folder to write, empty or not there'),
        (str, 'dtype=NAME', 'float32', 'float32 or bfloat16'),
        (str, 'family=NAME', '', "model_type; '': the plainest that fits"),
        _EMA,
        devices,
      ),
    ),
    command_line.Command(
      _merge,
      'checkpoint merge',
      'RUN:WEIGHT RUN:WEIGHT ... --out=RUN',
      'average parameters of runs of one architecture, as a checkpoint that '
      'decode and train --init_from read',
      (
        ('path', 'out=RUN', '', 'folder to write, without checkpoints yet'),
        _EMA,
        devices,
      ),
      words=None,
      notes=(
        '',
        'RUN or RUN/STEP; without a weight it is 1. Weights are divided by',
        'their sum. Optimizers and steps are not kept.',
      ),
    ),
  )
