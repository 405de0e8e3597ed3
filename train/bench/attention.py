"""Benches of attention: beside what others have, and over context.

Bench attention: forward and backward on one device, compiled as programs of a
run are; every candidate waits for all that it started before its time is taken.

Bench context: every form of context parallel attention on 8 virtual devices.
One call is o and the gradients of q, k, v of causal attention over a sequence
that is sharded on the mesh axis `context`. Shapes are B1 N4 H64; ulysses, whose
8 ranks cannot share 4 heads, runs at B1 N8 H32, which is as many operations.
Reported: CPU-seconds of a call, seconds to compile it, and temporary memory per
device, in which the forms differ on a real machine.

Targets bind ring and usp, and ulysses at its own shape: of one device's time at
most 1.2, as tensor=8 of a step, in the same rounds; of memory what the ring of
the package ringattention 0.1.2 takes, 16 MiB a device at length 4096, 40 at
16384. all_gather (all keys), rsa (all scores) and token_ring (hops unrolled)
hold more by nature: no target.

Legend: B rows, T tokens, N heads, H head size.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from paraxis.configs.base import errors
from paraxis.pallas_kernels.attention import op as attention_lib
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import compiling
from paraxis.sharding.sequence import attention as context_lib
from paraxis.sharding.sequence import order as context_order
from paraxis.train.bench import measure
from paraxis.train.bench import peers
from paraxis.train.bench import train as bench_train

SHAPES = {'': (4, 64), ' N8 H32': (8, 32)}  # row's name -> N, H
TARGETS = {4096: 16.0, 16384: 40.0}  # length -> MiB
MOST_TIME = 1.2  # of one device's
ALONE = 'one device'
JUDGED = ('ring', 'usp', 'ulysses N8 H32')
MOST_SCORES = 2**28  # bytes of scores a device may hold, else rsa is left out


class Part(NamedTuple):
  """What is compared at once.

  Attributes:
    name: of the rows. dtype: of queries, keys and values. length: tokens.
    quick: tokens with --quick. dense: least speed of ours over
      jax.nn.dot_product_attention; None: its scores do not fit, peers only.
  """

  name: str
  dtype: str
  length: int
  quick: int
  dense: float | None


PARTS = (
  Part('float32', 'float32', 4096, 256, 6.0),
  Part('bfloat16', 'bfloat16', 4096, 256, 1.0),
  Part('float32 T16384', 'float32', 16384, 512, None),
)


def attention(rounds, quick, say):
  """Causal attention forward and backward against dense attention."""
  heads = (2, 16) if quick else (8, 64)
  setup = 'B1 T{} N{} H{}, causal, forward + backward'.format(
    PARTS[0].quick if quick else PARTS[0].length, *heads
  )
  now, report = bench_train.begin('attention', setup, quick)
  for part in PARTS:
    if report.lacks(part.name):
      shape = 1, part.quick if quick else part.length, *heads
      _attention(report, part, shape, rounds, now, say)
      report.finish(part.name)
  return report


def _forms(part, shape):
  """({name: (q, k, v) -> o}, name of ours); dense first, where there is one."""
  mask = attention_lib.Mask(scale=shape[-1] ** -0.5)
  dense = f'jax.nn.dot_product_attention, {part.name}'
  ours = f'ours, {part.name}'
  forms = {
    dense: lambda q, k, v: jax.nn.dot_product_attention(
      q, k, v, is_causal=True
    ),
    ours: lambda q, k, v: attention_lib.attention(q, k, v, mask)[0],
  }
  if part.dense is None:
    del forms[dense]
  return forms, ours


def _attention(report, part, shape, rounds, now, say):
  """All forms of one Part; shape: B, T, N, H."""
  keys = jax.random.split(jax.random.key(0), 4)
  *inputs, weight = (jax.random.normal(k, shape, part.dtype) for k in keys)
  forms, ours = _forms(part, shape)
  made, temporary, outputs = {}, {}, []
  for name, form in forms.items():
    loss = lambda q, k, v, form=form: (form(q, k, v) * weight).sum()
    both = jax.value_and_grad(loss, (0, 1, 2))
    traced = jax.jit(both).trace(*inputs)
    compiled = traced.lower().compile(compiling.options(traced.jaxpr))
    made[name] = lambda f=compiled: jax.block_until_ready(f(*inputs)) and None
    outputs.append(compiled(*inputs)[1])
    temporary[f'temporary memory, {name}'] = measure.temporary(compiled)
  sizes = dict(zip(('rows', 'length', 'heads', 'width'), shape, strict=True))
  sizes |= dict(dtype=part.dtype)
  with peers.beside(report, sizes, say) as others:
    times = measure.interleave(made | others.candidates, rounds, now, say)
    others.judge(times, ours, f'{part.name}: ')
  report.add(
    {
      f'{part.name}: {k}' if k in others.candidates else k: v
      for k, v in times.items()
    }
  )
  report.add(temporary, 'MiB')
  if part.dense is None:
    return
  dense = next(iter(forms))
  report.check(
    f'{part.name}: speed of ours / dot_product_attention',
    measure.ratios(times[dense], times[ours]),
    part.dense,
  )
  gaps = (
    jnp.abs(x - y).max() / jnp.abs(y).max()
    for x, y in zip(*outputs, strict=True)
  )
  report.notes.append(
    f'{part.name}, largest difference of the two gradients, relative: '
    f'{max(map(float, gaps)):.1e}'
  )


def alone(length, heads, width):
  """As `program`, on one device."""
  mask = attention_lib.Mask(scale=width**-0.5)

  def whole(q, k, v, do, positions, segments):
    del positions  # in order

    def attend(q, k, v):
      return attention_lib.attention(q, k, v, mask, (segments, segments))[0]

    o, back = jax.vjp(attend, q, k, v)
    return o, *back(do)

  place = functools.partial(
    jax.ShapeDtypeStruct,
    sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
  )
  array = place((1, length, heads, width), jnp.float32)
  return jax.jit(whole), (array,) * 4 + (place((1, length), jnp.int32),) * 2


def program(form, length, heads, width):
  """(jitted function of q, k, v, do, positions, segments; their shapes)."""
  mesh = mesh_lib.make({'context': len(jax.devices())})
  n = mesh.shape['context']
  context_lib.check(form, n, heads, heads, length, 'zigzag')
  plan = context_lib.ContextPlan(form, 'context', n, 'zigzag')
  mask = attention_lib.Mask(scale=width**-0.5)

  def local(q, k, v, do, positions, segments):
    def attend(q, k, v):
      return context_lib.attention(q, k, v, positions, segments, mask, plan)[0]

    o, back = jax.vjp(attend, q, k, v)
    return o, *back(do)

  spec = P(None, 'context')
  whole = jax.shard_map(
    local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )
  place = functools.partial(
    jax.ShapeDtypeStruct, sharding=jax.NamedSharding(mesh, spec)
  )
  row = place((1, length), jnp.int32)
  array = place((1, length, heads, width), jnp.float32)
  return jax.jit(whole), (array,) * 4 + (row,) * 2


def _inputs(shapes):
  """Random q, k, v, do of one document in zigzag order."""
  keys = jax.random.split(jax.random.key(0), 4)
  arrays = [
    jax.random.normal(k, s.shape) for k, s in zip(keys, shapes, strict=False)
  ]
  length, n = shapes[0].shape[1], len(jax.devices())
  positions = context_order.permutation('zigzag', n, length)[None]
  rows = [positions.astype('i4'), (0 * positions + 1).astype('i4')]
  return [
    jax.device_put(x, s.sharding)
    for x, s in zip(arrays + rows, shapes, strict=True)
  ]


class CompiledForm:
  """One form at one shape, with its inputs in place."""

  def __init__(self, form, length, shape, now):
    if form == ALONE:
      whole, shapes = alone(length, *shape)
    else:
      whole, shapes = program(form, length, *shape)
    before = now()
    self._call = whole.lower(*shapes).compile()
    self.compile_seconds = now() - before
    self.temporary = measure.temporary(self._call)
    self._inputs = _inputs(shapes)

  def run(self):
    """One call, which measure.interleave times."""
    jax.block_until_ready(self._call(*self._inputs))


def candidates(length, now, say):
  """({row: CompiledForm} of the forms that run, notes on those that do not)."""
  made, notes = {}, []
  n = len(jax.devices())
  for name, shape in SHAPES.items():
    forms = ('ring', 'ulysses') if name else context_lib.FORMS
    for form in (ALONE, *forms):
      row = f'{form}{name}, {length}'
      if form == 'rsa' and 4 * shape[0] * length**2 // n > MOST_SCORES:
        notes.append(f'{row}: left out, its scores take over 256 MiB a device')
        continue
      say(f'compiling {row}')
      try:
        made[row] = CompiledForm(form, length, shape, now)
      except errors.UserError as error:
        notes.append(f'{row}: left out: {error}')
  return made, notes


def context(rounds, quick, say):
  """Context parallel attention on 8 devices, forward and backward."""
  lengths = (256,) if quick else tuple(TARGETS)
  now, report = bench_train.begin(
    'context',
    f'B1 N4 H64 float32, causal, zigzag over {len(jax.devices())} devices, '
    f'lengths {", ".join(map(str, lengths))}',
    quick,
  )
  report.judged &= report.clock == measure.CPU
  for length in filter(lambda n: report.lacks(f'length {n}'), lengths):
    made, notes = candidates(length, now, say)
    report.notes += notes
    times = measure.interleave(
      {row: form.run for row, form in made.items()}, rounds, now, say
    )
    report.add(times)
    report.add({f'compile {r}': [f.compile_seconds] for r, f in made.items()})
    report.add({f'temporary {r}': f.temporary for r, f in made.items()}, 'MiB')
    size = TARGETS.get(length, 1.0)
    for row, form in made.items():
      kind = row.split(',')[0]
      if kind not in JUDGED:
        continue
      shape = next(n for n in reversed(SHAPES) if kind.endswith(n))
      one = times[f'{ALONE}{shape}, {length}']
      ratio = [t / o for t, o in zip(times[row], one, strict=True)]
      report.check(f'{row}: time / {ALONE}', ratio, MOST_TIME, least=False)
      if form.temporary:
        report.check(
          f'{row}: temporary / {size:g} MiB',
          [mib / size for mib in form.temporary],
          1.0,
          least=False,
        )
    report.finish(f'length {length}')
  return report
