"""Claims about states that move between layouts in memory.

The states are those of the config's model and optimizer, of random numbers, as
each layout shards them. A layout is {'mesh': text, 'first': the first of its
devices, 'section.field': value, ...}, a pair is two of them.
"""

import contextlib
import math
import tempfile

import jax
import numpy as np

from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import pieces
from paraxis.sharding import reallocate
from paraxis.sharding.planner import conversions
from paraxis.train import program as job_lib
from paraxis.train import state as state_lib
from paraxis.train.bench import measure as bench_measure
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts


def nothing_travels():
  """Knock-out: what a device lacks of a shard is zeros."""
  zeros = lambda arrays, devices: [
    jax.device_put(np.zeros(x.shape, x.dtype), device)
    for x, device in zip(arrays, devices, strict=True)
  ]
  return knockouts.patched(reallocate, 'send', zeros)


def whole_blocks():
  """Knock-out: devices send all that they hold of an array, if any of it is
  wanted."""
  return knockouts.patched(pieces, 'sent', lambda block, part: block)


def nothing_is_held():
  """Knock-out: bytes are counted as if a device held nothing of its shards."""
  return knockouts.patched(pieces, 'overlap', lambda a, b: None)


def by_the_disk():
  """Knock-out: arrays move through a checkpoint."""
  return knockouts.patched(reallocate, 'move', _through_the_disk)


def _shapes(run, layout):
  """{canonical path: ShapeDtypeStruct} of the state of a layout."""
  mesh, first = layout['mesh'], layout['first']
  more = {k: v for k, v in layout.items() if '.' in k}
  config = experiment.laid_out(run.config, mesh, more)
  count = math.prod(mesh_lib.parse(mesh).values())
  devices = jax.devices()[first : first + count]
  job = job_lib.on_devices(config, devices=devices)
  return state_lib.flatten(job.state)


def _shardings(shapes):
  return {path: x.sharding for path, x in shapes.items()}


def _state(shapes):
  """{path: array} as the shapes say: all bits of random numbers count."""
  rng = np.random.default_rng(0)
  numbers = {
    path: rng.normal(size=x.shape).astype(x.dtype)
    if np.issubdtype(x.dtype, np.floating)
    else rng.integers(0, 2**30, x.shape).astype(x.dtype)
    for path, x in shapes.items()
  }
  return jax.device_put(numbers, _shardings(shapes))


def _through_the_disk(tree, shardings):
  """As reallocate.move: saved, and restored by the other shardings."""
  # Orbax starts slowly.
  from paraxis.sharding.checkpoint import store as store_lib

  like = {
    path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[path])
    for path, x in tree.items()
  }
  axes = {path: (None,) * x.ndim for path, x in tree.items()}
  with tempfile.TemporaryDirectory(prefix='paraxis-') as folder:
    with store_lib.Store(folder) as store:
      store.save(0, tree, axes, {})
      return store.restore(0, like)[0]


def _text(layout):
  """'fsdp=4 mesh.zero=1 from device 4'."""
  more = {k: v for k, v in layout.items() if k != 'first'}
  where = f' from device {layout["first"]}' if layout['first'] else ''
  return experiment.case_text(more) + where


def _arrow(pair):
  return ' -> '.join(map(_text, pair))


def equals_the_disk(run, *, pairs):
  """EQ: every shard, on every device, is the one that a checkpoint restores.

  Args: pairs: of layouts.
  """
  wrong, total = {}, 0
  for pair in pairs:
    source, target = (_shapes(run, layout) for layout in pair)
    tree, to = _state(source), _shardings(target)
    moved, disk = reallocate.move(tree, to), _through_the_disk(tree, to)
    bits = lambda x: {
      s.device: np.asarray(s.data).tobytes() for s in x.addressable_shards
    }
    shards = [(bits(moved[path]), bits(disk[path])) for path in to]
    total += sum(len(wanted) for _, wanted in shards)
    wrong[_arrow(pair)] = sum(
      found.get(device) != x
      for found, wanted in shards
      for device, x in wanted.items()
    )
  each = '; '.join(f'{pair}: {n}' for pair, n in wrong.items())
  return claims.Outcome(
    f'0 of {total} shards',
    f'{sum(wrong.values())} of {total} shards',
    'shards that differ in a bit from those restored from a checkpoint, '
    f'parameters and moments; {each}',
    not any(wrong.values()),
  )


@contextlib.contextmanager
def _counted():
  """Yields {device: bytes that it is sent}; no other transfer is allowed."""
  found, send = {}, reallocate.send

  def count(arrays, devices):
    for x, device in zip(arrays, devices, strict=True):
      if x.devices() != {device}:
        found[device] = found.get(device, 0) + x.nbytes
    with jax.transfer_guard('allow'):
      return send(arrays, devices)

  reallocate.send = count
  try:
    with jax.transfer_guard('disallow_explicit'):
      yield found
  finally:
    reallocate.send = send


def _least(source, target):
  """{device: bytes} of the elements that it wants and does not hold.

  Element by element, as NumPy indexes: no arithmetic of reallocate.py.
  """
  bound = {}
  for path, x in target.items():
    index = lambda sharding, x=x: sharding.devices_indices_map(x.shape)
    held = index(source[path].sharding)
    for device, wanted in index(x.sharding).items():
      lacks = np.ones(x.shape, bool)
      if device in held:
        lacks[held[device]] = False
      count = int(lacks[wanted].sum()) * x.dtype.itemsize
      bound[device] = bound.get(device, 0) + count
  return bound


def bytes_are_least(run, *, pairs, within):
  """EQ: bytes that each device is sent over those that it lacks.

  Args: pairs: of layouts. within: on every device.
  """
  worst, lines = 0.0, []
  for pair in pairs:
    source, target = (_shapes(run, layout) for layout in pair)
    tree, to = _state(source), _shardings(target)
    with _counted() as found:
      reallocate.move(tree, to)
    bound = _least(source, target)
    said = reallocate.received(source, to)
    for device, least in bound.items():
      for count in (found.get(device, 0), said[device]):
        worst = max(worst, abs(count - least) / max(least, 1))
    total, most = sum(bound.values()), max(bound.values()) / 1e6
    ratio = f'{sum(found.values()) / total:.3f}x, ' if total else ''
    lines.append(f'{_arrow(pair)}: {ratio}{most:.2f} MB at most')
  return claims.Outcome(
    f'1 +-{within:g}',
    f'1 +-{worst:.2g}',
    'arrays handed to device_put, counted by receiver, and what '
    'reallocate.received says, over elements that the receiver wants and does '
    'not hold; any other transfer is refused; ' + '; '.join(lines),
    worst <= within,
  )


def compiler_sends_no_less(run, *, mesh, shape, conversions_of):
  """HLO: bytes of the compiler's own reshard over those that `move` sends.

  On one mesh, within one program: the only place where it can. On the device
  that receives most.

  Args:
    shape: of a float32 array.
    conversions_of: 'data:S(0) -> tensor:S(1)', as of sharding/planner.
  """
  mesh, ratios = experiment.mesh_of(mesh), []
  for text in conversions_of:
    source, target = (
      jax.NamedSharding(mesh, conversions.parse(side).spec(len(shape)))
      for side in text.split(' -> ')
    )
    x = jax.ShapeDtypeStruct(tuple(shape), np.float32, sharding=source)
    with jax.set_mesh(mesh):
      traced = jax.jit(lambda x, to=target: jax.reshard(x, to)).trace(x)
      found = experiment.collectives(traced, mesh)
    ours = max(reallocate.received([x], [target]).values())
    theirs = sum(c.total for c in found)
    ratios.append(theirs / ours if ours else 1.0 + theirs)
  return claims.Outcome(
    '>= 1x',
    experiment.numbers(ratios, '.2f'),
    f'{"; ".join(conversions_of)}; float32 {shape}: collectives of the '
    'compiled program over what reallocate.received says',
    min(ratios) >= 1,
  )


def cost(run, *, pairs, rounds, at_least):
  """CPU: CPU-seconds through a checkpoint over those in memory.

  Args: pairs: of layouts. at_least: the median ratio of each.
  """
  medians, lines = [], []
  for pair in pairs:
    source, target = (_shapes(run, layout) for layout in pair)
    tree, to = _state(source), _shardings(target)
    ways = {
      'disk': lambda tree=tree, to=to: (
        jax.block_until_ready(_through_the_disk(tree, to)) and None
      ),
      'memory': lambda tree=tree, to=to: (
        jax.block_until_ready(reallocate.move(tree, to)) and None
      ),
    }
    times = bench_measure.interleave(ways, rounds, bench_measure.settled)
    spread = bench_measure.spread(
      bench_measure.ratios(times['disk'], times['memory'])
    )
    medians.append(spread.median)
    lines.append(f'{_arrow(pair)}: {experiment.numbers(spread, ".1f")}')
  size = sum(x.nbytes for x in tree.values()) / 1e6
  return claims.Outcome(
    f'>= {at_least:g}x',
    experiment.numbers(medians, '.1f'),
    f'a save and a verified restore over a move, compiled before, of '
    f'{size:.0f} MB in {len(tree)} arrays; {rounds} rounds in turn; least, '
    f'median, most: {"; ".join(lines)}',
    min(medians) >= at_least,
  )
