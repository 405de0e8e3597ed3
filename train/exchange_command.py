"""`paraxis checkpoint import | export`: flags, and what is missing of them."""

from paraxis.configs.base import command_line
from paraxis.configs.base import errors

INIT = (
  (str, 'init_from=PATH', '',
   'begin a new run with the weights of RUN, RUN/STEP, a folder of Hugging '
   'Face, a .gguf file, or smollm2'),
  (bool, 'init_optimizer', False,
   "with --init_from=RUN: its optimizer's state too"),
)  # fmt: skip


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
    values.checkpoint, values.out, values.dtype, values.family
  )


def commands(devices):
  """Both commands; devices: the row of a flag that all commands share."""
  return (
    command_line.Command(
      _import,
      'checkpoint import',
      'FOLDER --workdir=RUN',
      'keep weights of another program as a checkpoint, which decode and '
      'train --init_from read',
      (
        (str, 'workdir=RUN', '', 'folder to write, without checkpoints yet'),
        (
          str,
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
        (str, 'checkpoint=RUN', '', 'a run, or RUN/STEP'),
        (str, 'out=FOLDER', '', 'folder to write, empty or not there'),
        (str, 'dtype=NAME', 'float32', 'float32 or bfloat16'),
        (str, 'family=NAME', '', "model_type; '': the plainest that fits"),
        devices,
      ),
    ),
  )
