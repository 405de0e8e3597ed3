"""Whole models on a device: training steps, decoding, checkpoints.

A step and its compilation are those of train.py, in bfloat16 with float32
parameters and AdamW; decoding is that of decode.py. Model FLOPs utilisation
(MFU) is the model's operations, recomputed ones not counted, over the maker's
figure (sharding/meter/target.py). Candidates run one after the other, for two
states do not fit; seconds are of the host's clock, around what the device has
finished.

Decoding reads parameters and cache once a token, and little else:

    limit (steps/s) = bandwidth of a copy / (bytes of both)

Legend: B rows, T tokens, V vocabulary, D model, L layers, N heads, F mlp.
"""

from collections.abc import Callable
import functools
import gc
import shutil
import tempfile
import time

import jax

from paraxis.configs import schema
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.sharding.meter import target
from paraxis.train import loop
from paraxis.train import program as job_lib
from paraxis.train import state as state_lib
from paraxis.train import step as step_lib
from paraxis.train.bench import decode as bench_decode
from paraxis.train.bench import train as bench_train
from paraxis.train.bench.device import report as device_report
from paraxis.train.bench.device import speed as device_speed
from paraxis.train.run import header

SIZES = {
  '1b': dict(
    vocab_size=32768, d_model=2048, num_layers=18, num_heads=16, d_ff=5632
  ),
  '350m': dict(
    vocab_size=32768, d_model=1024, num_layers=24, num_heads=8, d_ff=2816
  ),
  '125m': dict(
    vocab_size=32768, d_model=768, num_layers=12, num_heads=6, d_ff=2048
  ),
  'tiny': dict(vocab_size=256, d_model=64, num_layers=2, num_heads=4, d_ff=96),
}  # fmt: skip
# What is tried until one fits: (size, rows of a batch, recomputation).
LADDER = {
  '1b': (
    ('1b', 8, 'none'), ('1b', 8, 'attention'), ('1b', 4, 'full'),
    ('350m', 8, 'attention'), ('350m', 4, 'full'), ('125m', 4, 'full'),
  ),
  '125m': (('125m', 16, 'none'), ('125m', 8, 'attention'), ('125m', 4, 'full')),
  'tiny': (('tiny', 2, 'none'),),
}  # fmt: skip
# GiB of a device on which a size is decoded.
DECODES = {'1b': 12, '350m': 4, '125m': 2, 'tiny': 0}
LENGTH, TINY_LENGTH = 2048, 32
ROOM = 0.92  # of a device's memory may be predicted to be used
MFU_GOAL = 0.5
# Who computes attention and scans in a step, and whether layers are unrolled.
UNROLLED = 'our kernels, unrolled'
FORMS = {
  'our kernels': ('auto', False),
  UNROLLED: ('auto', True),
  'XLA alone': ('xla', False),
}
GIB = 2**30


def config(
  size: str,
  rows: int = 1,
  remat: str = 'none',
  form=FORMS['our kernels'],
  weights: str = 'loaded',
) -> schema.Config:
  """A run of a size, in bfloat16, without text.

  form: of FORMS. weights: decode.weights.
  """
  length = TINY_LENGTH if size == 'tiny' else LENGTH
  kernels, unrolled = form
  model = SIZES[size] | dict(
    tied_embedding=False, dtype='bfloat16', attention=kernels, scan=kernels
  )
  if unrolled:
    model['unroll'] = model['num_layers']
  return schema.view(
    dict(
      model=model,
      train=dict(batch_size=rows, remat=remat),
      data=dict(sequence_length=length),
      decode=dict(cache_length=64 if size == 'tiny' else 512, weights=weights),
    )
  )


def memory_of(device) -> int | None:
  """Bytes of a device that a program may use; None: it does not say."""
  stats = device.memory_stats() or {}
  chip = target.of_device(device)
  return stats.get('bytes_limit') or (chip.hbm if chip else None)


def predicted(c) -> int:
  """Bytes that a step is predicted to need (train/run/header.py)."""
  program = job_lib.on_devices(c, 'data=1', jax.devices()[:1])
  made = step_lib.make(program.built, program.optimizer, 0.0)
  return header.trace(program, made.grads).memory


def _too_large(error):
  return 'RESOURCE_EXHAUSTED' in str(error) or 'out of memory' in str(error)


def _fitting(make, what, say):
  """What make() gives; None, said after `what`, if memory ran out."""
  try:
    return make()
  except jax.errors.JaxRuntimeError as e:
    if not _too_large(e):
      raise
  say(f'{what}: the device ran out of memory')
  gc.collect()  # what the failed one held
  return None


def first_that_fits(ladder, form, say: Callable[[str], None]):
  """(rung, train.Ours on the device) of the first size whose step runs.

  Notes go to `say`: what was left out, and why.

  Raises:
    MemoryError: none fits.
  """
  limit = memory_of(jax.devices()[0])
  for size, rows, remat in ladder:
    name = f'{size} B{rows} remat {remat}'
    c = config(size, rows, remat, form)
    need = predicted(c)
    if limit and need > ROOM * limit:
      say(
        f'{name} does not fit: {need / GIB:.1f} GiB predicted of '
        f'{limit / GIB:.1f}'
      )
      continue

    def make(c=c):
      ours = bench_train.Ours(c, 'data=1', time.perf_counter)
      ours.run()
      return ours

    if ours := _fitting(make, f'{name} does not fit', say):
      return (size, rows, remat), ours
  raise MemoryError('no size fits this device; the notes say why')


def _memory(ours):
  """GiB of arguments and temporaries at most, as the compiler says: the device
  counts the most of all forms of the process."""
  return max(
    (m.argument_size_in_bytes + m.temp_size_in_bytes) / GIB
    for m in (p.memory_analysis() for p in ours.programs)
  )


def _step(wanted, form, work):
  """Compile time, step time, MFU and memory of one size."""
  report = work.report
  ladder = LADDER['tiny' if work.quick else wanted]
  note = lambda line: report.notes.append(f'{form}: {line}')
  (size, rows, remat), ours = first_that_fits(ladder, FORMS[form], note)
  c = config(size, rows, remat, FORMS[form])
  tokens = rows * c.data.sequence_length
  name = f'{size} B{rows} remat {remat}, {form}'
  report.setup = f'T{c.data.sequence_length}, bfloat16, AdamW'
  report.add({f'compile, {name}': [ours.built]})
  times = [ours.run()[''] for _ in range(work.rounds)]
  report.add({f'step, {name}': times})
  report.add({f'rate, {name}': [tokens / s for s in times]}, 'tokens/s')
  report.add({f'memory, {name}': [_memory(ours)]}, 'GiB')
  cost, peak = loop.cost(c), header.peak(jax.devices()[:1])
  rates = [cost.flops * tokens / s for s in times]
  report.add({f'model operations, {name}': [x / 1e12 for x in rates]}, 'TF/s')
  product = device_report.median(
    work.folder, 'ceilings', device_speed.PRODUCT
  )  # fmt: skip
  if product:
    share = [x / 1e12 / product for x in rates]
    report.add({f'model operations / product, {name}': share}, 'share')
  if size != wanted:
    note(f'{size} in place of {wanted}')
  if peak is None:
    kind = jax.devices()[0].device_kind
    note(f"no MFU: the maker's figure of {kind} is not known")
    return
  mfu = [x / peak for x in rates]
  report.add({f'MFU, {name}': mfu}, 'share')
  if form == UNROLLED and size == wanted == '1b':
    goal = f'{device_report.GOAL}MFU of a step of 1b'
    report.check(goal, mfu, MFU_GOAL)


def _steps(wanted):
  return {f: functools.partial(_step, wanted, f) for f in FORMS}


def train_1b(quick: bool) -> dict[str, Callable]:
  """Cases of the part: a step with our kernels, and without."""
  del quick
  return _steps('1b')


def train_125m(quick: bool) -> dict[str, Callable]:
  """Cases of the part: as `train_1b`; of --quick without its repetition."""
  made = _steps('125m')
  return dict(list(made.items())[:1]) if quick else made


# -------------------------------------------------------------------- decoding


def cache_bytes(c, new: int) -> float:
  """Bytes of valid slots of a row's cache, mean over the tokens made."""
  m, slots = c.model, bench_decode.PROMPT + (new + 1) / 2
  heads = m.num_kv_heads or m.num_heads
  return slots * 2 * m.num_layers * heads * m.head_width * 2


def first_that_decodes(sizes, weights, rows, new, say: Callable[[str], None]):
  """(size, decode.Ours, function that makes `new` tokens) of the first of
  `sizes` that decodes `rows` rows here; it has run once.

  Notes go to `say`: what was left out, and why.

  Raises:
    MemoryError: none fits.
  """
  limit = memory_of(jax.devices()[0])
  for size in sizes:
    if limit and limit < DECODES[size] * GIB:
      say(
        f'{size} is not decoded: it takes {DECODES[size]} GiB, the device has '
        f'{limit / GIB:.1f} GiB'
      )
      continue

    def make(size=size):
      made = bench_decode.Ours(config(size, weights=weights))
      run = functools.partial(made.run, rows, new)
      run()
      return size, made, run

    if found := _fitting(make, f'{size} is not decoded', say):
      return found
  raise MemoryError('no size decodes on this device; the notes say why')


def _decode(rows, weights, work):
  """Tokens a second of some rows, beside the time to read what they read."""
  report, new = work.report, 16 if work.quick else 256
  size, made, run = first_that_decodes(
    ['tiny'] if work.quick else ['1b', '350m', '125m'], weights, rows, new,
    report.notes.append,
  )  # fmt: skip
  c = config(size, weights=weights)
  params = bench_decode.bytes_per_token(made.maker.params)
  times = []
  for _ in range(work.rounds):
    before = time.perf_counter()
    run()
    times.append(time.perf_counter() - before)
  report.setup = f'{size}, bfloat16, greedy, {new} tokens after a prompt of '
  report.setup += f'{bench_decode.PROMPT}, prefill included'
  name = f'{rows} row{"s" * (rows > 1)}'
  name += f' of {size}' * (size not in ('1b', 'tiny'))
  name += f', {weights}' * (weights != 'loaded')
  moved = params + rows * cache_bytes(c, new)
  report.add({name: [rows * new / s for s in times]}, 'tokens/s')
  read = [moved * new / s / 1e9 for s in times]
  report.add({f'{name}, read': read}, 'GB/s')
  copy = device_report.median(work.folder, 'ceilings', device_speed.COPY)
  if not copy:
    report.notes.append(f'{name}: no copy was measured, so there is no share')
    return
  report.add({f'{name}, limit': [rows * copy * 1e9 / moved]}, 'tokens/s')
  what, shares = (
    f'decode of {name}: bytes read / copy',
    [x / copy for x in read],
  )
  if weights == 'loaded' and size in ('1b', 'tiny'):
    goal = device_speed.READ_GOAL
    report.check(f'{device_report.GOAL}{what}', shares, goal)
  else:
    report.add({what: shares}, 'share')


def decode(quick: bool) -> dict[str, Callable]:
  """Cases of the part: one row, 64, and one with weights of 4 bits."""
  del quick
  cases = {'B1': (1, 'loaded'), 'B64': (64, 'loaded'), 'B1 int4': (1, 'int4')}
  return {name: functools.partial(_decode, *x) for name, x in cases.items()}


# ----------------------------------------------------------------- checkpoints


def _checkpoint(work):
  """Seconds that a save holds up training, that it takes, and of restoring."""
  size = 'tiny' if work.quick else '125m'
  program = job_lib.on_devices(config(size), 'data=1', jax.devices()[:1])
  spent = {'save, blocking': [], 'save, in all': [], 'restore': []}
  folder = tempfile.mkdtemp(prefix='checkpoint-', dir=work.folder)
  clock = time.perf_counter
  try:
    with (
      program.context(),
      store_lib.Store(folder, store_lib.Options(1)) as store,
    ):
      state = jax.block_until_ready(program.initial_state())
      tree = state_lib.in_order(state_lib.flatten(state), program.leaves)
      axes = state_lib.axes(program.leaves)
      for step in range(min(work.rounds, 2) + 1):
        times = [clock()]
        store.save(step, tree, axes, {})
        times.append(clock())
        store.wait()
        times.append(clock())
        jax.block_until_ready(store.restore(step, tree)[0])
        times.append(clock())
        if step:  # the first compiles
          row = times[1] - times[0], times[2] - times[0], times[3] - times[2]
          for name, seconds in zip(spent, row, strict=True):
            spent[name].append(seconds)
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  held = sum(x.nbytes for x in tree.values())
  work.report.setup = f'state of {size}, {held / 2**20:.0f} MiB, to DIR'
  work.report.add(spent)
  rates = {f'{n}: rate': [held / s / 1e9 for s in t] for n, t in spent.items()}
  work.report.add(rates, 'GB/s')


def checkpoint(quick: bool) -> dict[str, Callable]:
  """The case of the part."""
  del quick
  return {'save and restore': _checkpoint}
