"""Bench of a run of one's own: weights come in, steps are logged, LoRA.

    import    a folder of Hugging Face of 135M float32 numbers (the shape of
              SmolLM2-135M) to step 0 of a run, its leaves verified; beside it
              safetensors' own reader and one save of the same arrays by Orbax,
              uncompressed
    logging   what the loop does with a step's numbers: metrics.jsonl, rates,
              the lines printed. It is timed alone, over many steps, as a share
              of a step of the quickstart's model: a difference of two steps
              is noisier than what is asked for
    LoRA      a step that learns adapters of rank 8 on all matrices of mixers
              and mlps; beside it one that learns everything

Starting the process, and the header of a run, are in none of them.
"""

import contextlib
import json
import pathlib
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as tensor_files

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.models import build
from paraxis.models.huggingface import config as config_lib
from paraxis.models.huggingface import files as files_lib
from paraxis.models.huggingface import leaves as leaves_lib
from paraxis.train import exchange
from paraxis.train import recorder as recorder_lib
from paraxis.train.bench import checkpoint
from paraxis.train.bench import measure
from paraxis.train.bench import train as bench_train
from paraxis.train.run import metrics as metrics_lib
from paraxis.train.run import rates as rates_lib

FOREIGN = dict(
  vocab_size=49152, d_model=576, num_layers=30, num_heads=9, num_kv_heads=3,
  d_ff=1536, rope_theta=1e5, norm_epsilon=1e-5,
)  # fmt: skip
QUICK = dict(
  vocab_size=256, d_model=48, num_layers=2, num_heads=3, num_kv_heads=1,
  d_ff=96,
)  # fmt: skip
TENSORS = 'model.safetensors'
STEPS = 1000  # logged, for one figure
RANK = 8
SILENT = lambda line: None


def own_run(rounds, quick, say):
  """Importing weights, logging steps, LoRA: each beside its yardstick."""
  model = QUICK if quick else FOREIGN
  c = bench_train.config(quick)
  now, report = bench_train.begin(
    'own_run',
    f'import of V{model["vocab_size"]} D{model["d_model"]} '
    f'L{model["num_layers"]}, float32; logging, quickstart; LoRA, '
    f'{bench_train.describe(c)}, rank {RANK}',
    quick,
  )
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    size = write(root / 'theirs', model)
    say(f'wrote {size / 1e6:.0f} MB')
    of_import = measure.interleave(importing(root, now), rounds, now, say)
    c_logging = c if quick else schema.view(command_line.load('quickstart'))
    with logging(c_logging, root, now) as made:
      of_logging = measure.interleave(made, rounds, now, say)
  of_lora = measure.interleave(lora(c, now), rounds, now, say)
  for times in (of_import, of_logging, of_lora):
    report.add(times)
  plain, ours = of_import.values()
  report.check(
    'import: time of ours / safetensors and Orbax',
    measure.ratios(ours, plain),
    1.5,
    least=False,
  )
  calls, step = (of_logging[name] for name in ('logging a step', 'a step'))
  report.check(
    'logging: % of the time of a step',
    [100 * x for x in measure.ratios(calls, step)],
    0.5,
    least=False,
  )
  full, adapters = (of_lora[name] for name in ('full step', 'LoRA step'))
  report.check(
    'LoRA: time of a step / of a full step',
    measure.ratios(adapters, full),
    0.75,
    least=False,
  )
  return report


def write(folder, fields):
  """A folder of Hugging Face with random weights -> bytes of its tensors.

  fields: of the model, {field: value}.
  """
  c = schema.view(dict(model=fields))
  described = config_lib.from_model(c.model)
  shapes = build.build(c, 'data=1', devices=jax.devices()[:1]).params
  random, tensors = np.random.default_rng(0), {}
  arrays = {
    path: random.standard_normal(x.shape, np.float32) * np.float32(0.02)
    for path, x in shapes.items()
  }
  for leaf in leaves_lib.table(c.model, described['model_type']):
    x = arrays[leaf.path]
    leaves_lib.put(tensors, leaf, x if leaf.layer is None else x[leaf.layer])
  folder.mkdir()
  (folder / files_lib.CONFIG).write_text(json.dumps(described), 'utf-8')
  tensor_files.save_file(tensors, str(folder / TENSORS), {'format': 'pt'})
  return sum(x.nbytes for x in tensors.values())


def importing(root, now):
  """Candidates that make a checkpoint of `root`/theirs; it is removed after."""

  def timed(run):
    def call():
      made, before = root / 'made', now()
      run(made)
      after = now()
      shutil.rmtree(made)
      return {'': after - before}

    return call

  def plain(made):
    tensors = tensor_files.load_file(str(root / 'theirs' / TENSORS))
    arrays = {name: jnp.asarray(x) for name, x in tensors.items()}
    store = checkpoint.Orbax(made, compressed=False)
    store.begin(arrays)
    store.wait()
    store.close()

  def ours(made):
    exchange.bring(str(root / 'theirs'), made, SILENT, 'ids')

  return {
    'load_file and Orbax': timed(plain),
    'checkpoint import': timed(ours),
  }


@contextlib.contextmanager
def logging(c, root, now):
  """Candidates: a step of a config, and what the loop does with its numbers."""
  ours, settings = bench_train.Ours(c, 'data=1', now), c.train
  writers = metrics_lib.Writers(root, settings, c, '')
  progress = metrics_lib.Progress(settings.steps, settings.print_every, SILENT)
  counted, flops = bench_train.batch(c), 1e7
  with writers, progress:
    recorder = recorder_lib.Recorder(
      ours.job, writers, progress, (), rates_lib.Rates(flops)
    )

    def calls():
      before = now()
      for step in range(1, STEPS + 1):
        recorder.later(step, ours.numbers, counted)
      recorder.write()
      return {'': (now() - before) / STEPS}

    yield {'a step': ours.run, 'logging a step': calls}


def lora(c, now):
  """Candidates: a step of a config, and one that learns adapters alone."""
  adapters = schema.with_values(c, {'train.lora.rank': RANK})
  make = lambda c: bench_train.Ours(c, 'data=1', now).run
  return {'full step': make(c), 'LoRA step': make(adapters)}
