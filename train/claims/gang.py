"""One of the processes that restore and save a checkpoint together.

    python -m paraxis.train.claims.gang '{"process": 0, ...}'

`together` starts them and gives what each found: a line of JSON. They compare
what they restored with NumPy arrays that the first process wrote; how many
bytes a restore reads is what the operating system counts (/proc/self/io).
"""

import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import command_line

SECONDS = 300  # until processes that do not end are an error
VALUES = 'values.npz'
STEP = 0


def together(processes: int, devices: int, **given) -> list[dict]:
  """What each of some processes finds.

  Args:
    processes: their number. devices: virtual ones, of each.
    given: what='models' or 'arrays', and what `_models` or `_arrays` takes.

  Raises:
    RuntimeError: one failed.
  """
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  given |= dict(address=address, processes=processes, devices=devices)
  command = [sys.executable, '-m', 'paraxis.train.claims.gang']
  started = [
    subprocess.Popen(
      [*command, json.dumps(given | dict(process=process))],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for process in range(processes)
  ]
  found = []
  try:
    for process in started:
      out, err = process.communicate(timeout=SECONDS)
      if process.returncode:
        last = err.strip().splitlines()[-3:]
        raise RuntimeError(f'exit {process.returncode}: {" | ".join(last)}')
      found.append(json.loads(out.strip().splitlines()[-1]))
  finally:
    for process in started:
      process.kill()
  return found


def values(folder) -> dict[str, np.ndarray]:
  """The arrays that the first process wrote beside a checkpoint."""
  with np.load(pathlib.Path(folder) / VALUES) as kept:
    return {path: kept[path] for path in kept.files}


def _equal_shards(tree, wanted):
  """Leaves whose shards on this process are bitwise those of `wanted`."""
  same = lambda x, whole: all(
    np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()
    for shard in x.addressable_shards
  )
  return sum(same(x, wanted[path]) for path, x in tree.items())


def _models(folder, configs, again):
  """Restores the checkpoint of a folder on each config's mesh.

  configs: schema.Config as JSON. again: folders, one a config; the restored
  state is saved there, by all processes, as the config says.

  Returns:
    {'equal', 'leaves': of all configs}.
  """
  import jax

  from paraxis.sharding.checkpoint import store as store_lib
  from paraxis.train import program as job_lib
  from paraxis.train import start
  from paraxis.train import state as state_lib

  wanted, equal, leaves = values(folder), 0, 0
  for text, other in zip(configs, again, strict=True):
    config = schema.from_json(text)
    job = job_lib.of_shapes(config, '', jax.devices())
    with job.context():
      with store_lib.Store(folder, read_only=True) as store:
        tree, _ = store.restore(STEP, start.wanted(job))
      equal += _equal_shards(tree, wanted)
      leaves += len(tree)
      held = state_lib.on_stages(tree, state_lib.flatten(job.state), job.leaves)
      with store_lib.Store(other, start.kept(config)) as store:
        flat = state_lib.in_order(held, job.leaves)
        store.save(STEP, flat, state_lib.axes(job.leaves), {})
  return dict(equal=equal, leaves=leaves)


def read_so_far() -> int:
  """Bytes that this process has read, of any file."""
  lines = pathlib.Path('/proc/self/io').read_text(encoding='utf-8').split()
  return int(lines[lines.index('rchar:') + 1])


def _chunks(folder, path, shards):
  """Bytes of the chunks of a stored array that some shards touch.

  The chunks are what the array's own metadata says.

  shards: {device: tuple of slices}.
  """
  import tensorstore as ts

  state = pathlib.Path(folder) / str(STEP) / 'state'
  name = path.replace('/', '.')  # as Orbax writes it
  kvstore = dict(driver='ocdbt', base=f'file://{state}/', path=name)
  stored = ts.open(dict(driver='zarr', kvstore=kvstore), read=True).result()
  sizes: Any = stored.chunk_layout.read_chunk.shape
  touched = set()
  for index in shards.values():
    each = []
    for part, size, whole in zip(index, sizes, stored.shape, strict=True):
      first, end, _ = part.indices(whole)
      each.append(range(first // size, -(-end // size)))
    touched.update(itertools.product(*each))
  width = np.dtype(stored.dtype.numpy_dtype).itemsize
  return len(touched) * int(np.prod(sizes)) * width


def _held(x, shards):
  """Bytes of some shards of an array, replicas once."""
  return sum({str(i): x[i].nbytes for i in shards.values()}.values())


def spec_of(text):
  """jax.PartitionSpec of a cut: 'fsdp+tensor,' or ',tensor'."""
  import jax

  return jax.P(*(tuple(filter(None, s.split('+'))) for s in text.split(',')))


def _apart():
  """Each shard fetches its chunks itself, one shard after another."""
  from paraxis.sharding.checkpoint import chunks
  from paraxis.sharding.checkpoint import shards

  real = shards._read_cell

  async def alone(stored, box, targets, gate):
    async with gate:
      await real(stored, box, targets, gate)

  chunks.cells = lambda whole, chunk, boxes: (
    (box, [place]) for place, box in enumerate(boxes)
  )
  shards._read_cell, shards.STAGED = alone, 1


def _arrays(folder, mesh, specs, how):
  """Restores arrays, cut in several ways.

  Args:
    folder: of the checkpoint. mesh: text as for --mesh.
    specs: of both dimensions of all arrays: 'fsdp+tensor,', ',tensor'.
    how: 'once': as ever; 'apart': a chunk is read for each shard that touches
      it; 'whole': every process reads all arrays, whatever its shards are.

  Returns:
    {'read', 'chunks', 'shards': [bytes]}: read; of the chunks that shards
      of this process touch; of these shards, replicas once.
  """
  import jax

  from paraxis.sharding import mesh as mesh_lib
  from paraxis.sharding.checkpoint import store as store_lib

  made = mesh_lib.make(mesh_lib.parse(mesh), jax.devices())
  if how == 'apart':
    _apart()  # this process ends soon
  wanted, out = values(folder), dict(read=[], chunks=[], shards=[])
  with store_lib.Store(folder, read_only=True) as store:
    for text in specs:
      cut = spec_of(text)
      of = lambda spec: {
        path: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=jax.NamedSharding(made, spec)
        )
        for path, x in wanted.items()
      }
      like = of(jax.P() if how == 'whole' else cut)
      own = jax.NamedSharding(made, cut).addressable_devices_indices_map
      for _ in range(2):  # modules are imported, programs compiled at first
        before = read_so_far()
        tree = jax.block_until_ready(store.restore(STEP, like)[0])
        read = read_so_far() - before
      if _equal_shards(tree, wanted) != len(wanted):
        raise RuntimeError(f'{text}: what was restored is not what was saved')
      out['read'].append(read)
      out['chunks'].append(
        sum(_chunks(folder, p, own(x.shape)) for p, x in wanted.items())
      )
      out['shards'].append(sum(_held(x, own(x.shape)) for x in wanted.values()))
  return out


if __name__ == '__main__':
  given = json.loads(sys.argv[1])
  command_line.prepare_devices(given.pop('devices'))
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  from paraxis.train.run import hosts

  hosts.connect(
    given.pop('address'), given.pop('processes'), given.pop('process')
  )
  what = dict(models=_models, arrays=_arrays)[given.pop('what')]
  print(json.dumps(what(**given)))
