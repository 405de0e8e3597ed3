"""Claims about context parallel attention: what is sent where, what fits.

Sends are read from compiled programs, forward and backward as two programs (in
one, XLA merges a backward send with an equal forward one), by the distance that
they go round the ring of n ranks. In bytes that a rank receives, with T tokens
a rank, u = 4 T H (one head's rows), l = 4 T (a number a row), i = 8 T (position
and document of a token):

    form        pass      by +1                   by -1, of q and its like
    ring, rsa   forward   (n-1) (2K u + i)        0
                backward  the same, + n 2K u      0
    token_ring  forward   0                       (n-1) (N u + i)
                backward  0                       (n-1) (2N (u + l) + i)
                and results: forward N (u + l), backward N u, at each distance
                1 .. n-1 (n-1 is -1)

What fits is searched for by compiling ahead of time for a topology
(sharding/meter/aot.py): the gradient program of a step, and the optimizer's
state. A polynomial through the memory of the sizes tried says which to try
next; the answer fits, and a size at most `close` larger does not.

Legend: B rows, T tokens of a rank, N query heads, K kv heads, H head width.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.pallas_kernels.attention import op as attention_lib
from paraxis.sharding import replica_groups
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import compiled
from paraxis.sharding.meter import hlo
from paraxis.sharding.sequence import attention as context
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.certify import target_compile
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts


def kv_ring():
  """Knock-out: what is called TokenRing is the ring of k and v."""
  plan = context.ContextPlan
  ring = lambda form, *rest: plan('ring', *rest)
  return knockouts.patched(context, 'ContextPlan', ring)


class Shape(NamedTuple):
  """Of one attention: ranks, tokens of a rank, query heads, kv heads, width."""

  ranks: int
  tokens: int
  heads: int
  kv_heads: int
  width: int


class Sends(NamedTuple):
  """What one rank receives in a program.

  bytes: {distance round the ring, 1..n-1: bytes}. messages: those that carry
  floating-point numbers. others: bytes of what is no permute.
  """

  bytes: dict
  messages: int
  others: int


def sends(text, mesh):
  """`Sends` of a compiled program on a mesh of one axis.

  Raises:
    ValueError: a permute whose ranks do not all send equally far.
  """
  program, n = compiled.CompiledProgram(text), mesh.size
  moves = ('collective-permute', 'collective-permute-start')
  weigh = lambda runs: sum(r.instruction.opcode in moves for r in runs)
  far, messages = collections.Counter(), 0
  for run in program.runs(weigh):
    i = run.instruction
    if i.opcode not in moves:
      continue
    rows = replica_groups.pairs(i)
    distances = set(((rows[:, 1] - rows[:, 0]) % n).tolist())
    if len(distances) != 1:
      raise ValueError(f'{i.name} sends by {sorted(distances)} at once.')
    arrays = program.operand_arrays(i)
    far[distances.pop()] += run.times * sum(a.bytes for a in arrays)
    messages += run.times * sum(a.dtype[0] in 'fb' for a in arrays)
  every = sum(c.total for c in hlo.collectives(text, mesh))
  return Sends(dict(sorted(far.items())), messages, every - sum(far.values()))


def formulas(form, shape):
  """`Sends` of the forward and of the backward program: see the module."""
  n, t, heads, kv, width = shape
  unit, row, info = 4 * t * width, 4 * t, 8 * t
  if form != 'token_ring':
    there, count = (n - 1) * (2 * kv * unit + info), 2 * (n - 1)
    back = there + n * 2 * kv * unit
    return Sends({1: there}, count, 0), Sends({1: back}, count + 2 * n, 0)
  out = []
  for q, home, arrays in (
    (heads * unit + info, heads * (unit + row), 3),
    (2 * heads * (unit + row) + info, heads * unit, 5),
  ):
    far = dict.fromkeys(range(1, n), home)
    far[n - 1] += (n - 1) * q
    out.append(Sends(far, arrays * (n - 1), 0))
  return tuple(out)


def _texts(form, shape, mesh):
  """Compiled texts of attention's forward and of its backward program.

  What is kept for the second leaves the first with a dimension of ranks.
  """
  n, t, heads, kv, width = shape
  plan = context.ContextPlan(form, 'context', n, 'zigzag')
  mask = attention_lib.Mask(scale=width**-0.5)

  def forward(q, k, v, rows):
    attend = lambda q, k, v: context.attention(q, k, v, rows, rows, mask, plan)[
      0
    ]
    o, back = jax.vjp(attend, q, k, v)
    return o, jax.tree.map(lambda x: x[None], back)

  def backward(back, do):
    return jax.tree.map(lambda x: x[0], back)(do)

  place = lambda dtype, *rest: jax.ShapeDtypeStruct(
    (1, n * t, *rest), dtype, sharding=jax.NamedSharding(mesh, spec)
  )
  spec = P(None, 'context')
  manual = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
  q, k = place(jnp.float32, heads, width), place(jnp.float32, kv, width)
  run = jax.jit(manual(forward, out_specs=(spec, P('context'))))
  first = run.lower(q, k, k, place(jnp.int32)).compile()
  o, back = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    first.out_info,
    first.output_shardings,
  )
  second = jax.jit(manual(backward, out_specs=spec)).lower(back, o).compile()
  return first.as_text(), second.as_text()


@functools.lru_cache(maxsize=16)
def _counted(form, shape):
  """`Sends` of the forward and of the backward program, compiled here."""
  mesh = experiment.mesh_of({'context': shape.ranks})
  return tuple(sends(text, mesh) for text in _texts(form, shape, mesh))


def _by_distance(far, n):
  """{distance: bytes} as text; equal ones in a row are written once."""
  sign = lambda d: '-1' if d == n - 1 else f'+{d}'
  lines = []
  for size, distances in itertools.groupby(far, far.get):
    first, *rest = map(sign, distances)
    lines.append(f'{first}{f" .. {rest[-1]} each" if rest else ""} {size:,}')
  return ', '.join(lines)


def sends_equal_formulas(run, *, form, shape):
  """HLO: every permute, by distance and bytes, forward and backward apart.

  Args:
    form: 'ring', 'rsa' or 'token_ring'.
    shape: fields of `Shape`.
  """
  shape = Shape(**shape)
  found, right = _counted(form, shape), formulas(form, shape)
  count = lambda parts: ' + '.join(str(p.messages) for p in parts)
  far = [_by_distance(f.bytes, shape.ranks) for f in found]
  return claims.Outcome(
    f'{count(right)} permutes',
    f'{count(found)} permutes',
    f'forward + backward, those of positions apart; {shape.ranks} ranks of '
    f'{shape.tokens} tokens, {shape.heads} query and {shape.kv_heads} kv heads '
    f'of {shape.width}, float32. Bytes to a rank by distance round the ring: '
    f'forward {far[0]}; backward {far[1]}; '
    f'{"as" if found == right else "NOT as"} the formulas, and no other '
    'collective',
    found == right,
  )


def _views(passes, n):
  """{what: bytes} of the `Sends` of both passes on n ranks."""
  forward, backward = (p.bytes for p in passes)
  both = collections.Counter(forward) + collections.Counter(backward)
  return {
    'all': sum(both.values()),
    'forward': sum(forward.values()),
    'backward': sum(backward.values()),
    'busiest link if all are joined': max(both.values()),
    'bytes times links of a ring': sum(
      min(d, n - d) * size for d, size in both.items()
    ),
  }


def bytes_against_ring(run, *, form, shape, ratios, within):
  """HLO: bytes of a form over those of the KV ring, forward and backward.

  Args:
    form: as above. shape: fields of `Shape` without kv_heads.
    ratios: [[query heads per kv head, expected ratio], ...], the first for 1.
  """
  found, same, lines = [], True, []
  for group, _ in ratios:
    one = Shape(**shape, kv_heads=shape['heads'] // group)
    both = [_counted(f, one) for f in (form, 'ring')]
    same &= both == [formulas(f, one) for f in (form, 'ring')]
    ours, ring = (_views(passes, one.ranks) for passes in both)
    rest = {name: size / ring[name] for name, size in ours.items()}
    found.append(rest.pop('all'))
    each = ', '.join(f'{name} {x:.2f}' for name, x in rest.items())
    lines.append(f'at {group} query heads per kv head {each}')
  say = lambda values: ', '.join(f'{x:.2f}x' for x in values)
  right = [ratio for _, ratio in ratios]
  return claims.Outcome(
    f'{say(right)} +-{within:g}',
    say(found),
    f'{"; ".join(lines)}; even at {1 / found[0]:.2f}; {shape["ranks"]} ranks, '
    f'width {shape["width"]}; {"as" if same else "NOT as"} the formulas',
    same and experiment.close(found, right, within),
  )


@contextlib.contextmanager
def _quickly():
  """XLA's lowest level: a quarter of the time, up to a fifth more memory."""
  config: Any = jax.config
  before = config.jax_optimization_level
  try:
    jax.config.update('jax_optimization_level', 'O0')
    yield
  finally:
    jax.config.update('jax_optimization_level', before)


def _config(base, model, mesh, rows, tokens):
  """schema.Config of a step of `rows` rows of `tokens` tokens."""
  if model.get('position') == 'learned':
    model = {**model, 'max_positions': tokens}
  sizes = {'data.sequence_length': tokens, 'train.batch_size': rows}
  config = experiment.fields(base, experiment.under('model', model), sizes)
  return dataclasses.replace(config, mesh=mesh)


def needed(config, topology):
  """Bytes of a device in a step's gradient program and for the optimizer.

  Args:
    config: schema.Config; with adamw, which keeps two numbers a parameter.
    topology: aot.Topology.

  Returns:
    inf if the compiler finds that it does not fit.
  """
  with topology.context():
    job = job_lib.of_shapes(config, '', topology.devices)
    grads = step_lib.make(job.built, None, 0.0).grads
    with job.context(), _quickly():
      traced = jax.jit(grads).trace(job.built.params, job.batch_shapes())
      try:
        memory = aot.memory(aot.compile_for(topology, 'gradient', traced))
      except errors.UserError:
        return math.inf
  optimizer = 2 * target_compile.device_bytes(job.built.params)
  return memory.peak + memory.code + optimizer


def most(need, have, start, step, close):
  """(largest multiple of `step` that fits, or 0; smallest that does not).

  Args:
    need: size -> bytes, which grow with it; inf: it does not fit, and how much
      is missing is not known.
    have: bytes there are.
    start: the first that is tried, a multiple of `step`.
    step, close: how far apart the two sizes may be: one step, or this share.
  """
  known, good, bad, size = {}, 0, math.inf, start
  while True:
    known[size] = need(size)
    if known[size] <= have:
      good = max(good, size)
    else:
      bad = min(bad, size)
    gap = max(1, int(good * close) // step) * step
    if bad - good <= gap:
      return good, bad
    size = _guess(known, have) // step * step
    if size < good + 2 * gap:  # as good as found: see whether the next fails
      size = good + gap
    if size >= bad:
      size = (good + bad) // 2 // step * step


def _guess(known, have):
  """Where a polynomial through the largest known sizes reaches `have`."""
  points = sorted((x, y) for x, y in known.items() if math.isfinite(y))[-3:]
  if not points:
    return min(known) // 2
  x, y = np.transpose([(0, 0), *points] if len(points) == 1 else points)
  line = np.polyfit(x / x[-1], y / have, len(x) - 1)
  roots = np.roots(line - np.eye(len(line))[-1])
  ahead = [r.real for r in roots if abs(r.imag) < 1e-9 and r.real > 0]
  return int(min([*ahead, 4]) * x[-1])  # no further than 4 times what is known


def _largest(base, model, layout, vary, given, start, close):
  """(largest that fits, bytes of its device, devices) of one layout."""
  topology = aot.topology(layout['topology'])
  mesh, found = schema.Mesh(**layout['mesh']), {}

  def need(size):
    rows, tokens = (size, given) if vary == 'rows' else (given, size)
    config = _config(base, model, mesh, rows, tokens)
    found[size] = needed(config, topology)
    return found[size]

  step = mesh.data
  if vary == 'tokens':
    step = math.lcm(64, mesh.context * (mesh.tensor if mesh.sequence else 1))
  start = math.ceil(start / step) * step
  fits, _ = most(need, topology.hbm, start, step, close)
  return fits, found.get(fits, math.inf), len(topology.devices)


def most_that_fits(run, *, vary, given, start, model, layouts, at_least, close):
  """AOT: the largest step of the first layout against that of the second.

  Args:
    vary: 'rows' or 'tokens' of a row; the other is `given`.
    given, start: numbers; `start`: the first that is tried.
    model: fields of schema.Model beyond the config's.
    layouts: {name: {'topology': for sharding/meter/aot.py, 'mesh': fields of
      schema.Mesh}}; those after the second are only reported.
    at_least: the first, divided by the second. close: see `most`.
  """
  found = {
    name: _largest(run.config, model, layout, vary, given, start, close)
    for name, layout in layouts.items()
  }
  (first, *_), (second, *_), *_ = found.values()
  lines = [
    f'{name} {size:,} ({devices} chips, {memory / 2**30:.1f} GiB on each)'
    for name, (size, memory, devices) in found.items()
  ]
  other = {'rows': 'tokens', 'tokens': 'rows'}[vary]
  return claims.Outcome(
    f'>= {at_least:g}x',
    f'{first / max(1, second):.1f}x',
    f'{vary} at {given:,} {other}: {"; ".join(lines)}; each to {close:.0%}; '
    'gradient program and optimizer, compiled at the lowest effort, nothing '
    'run',
    first >= at_least * second > 0,
  )
