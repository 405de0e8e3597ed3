"""Claims about context parallel attention: what is sent where, what is kept.

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

Legend: B rows, T tokens of a rank, N query heads, K kv heads, H head width.
"""

import collections
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from paraxis.pallas_kernels.attention import op as attention_lib
from paraxis.sharding import replica_groups
from paraxis.sharding.meter import compiled
from paraxis.sharding.meter import hlo
from paraxis.sharding.sequence import attention as context
from paraxis.sharding.sequence import forms as context_forms
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts


def kv_ring():
  """Knock-out: what is called TokenRing is the ring of k and v."""
  return _instead('ring')


def no_ring():
  """Knock-out: every rank gathers all keys and values at once."""
  return _instead('all_gather')


def _instead(form):
  plan = context.ContextPlan
  other = lambda asked, *rest: plan(form, *rest)
  return knockouts.patched(context, 'ContextPlan', other)


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


def _passes(form, shape, mesh):
  """(jitted forward pass, its arguments as shapes, jitted backward pass).

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
  given = q, k, k, place(jnp.int32)
  return run, given, jax.jit(manual(backward, out_specs=spec))


@functools.lru_cache(maxsize=16)
def _counted(form, shape):
  """`Sends` of the forward and of the backward program, compiled here."""
  mesh = experiment.mesh_of({'context': shape.ranks})
  run, given, after = _passes(form, shape, mesh)
  first = run.lower(*given).compile()
  shapes = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    first.out_info,
    first.output_shardings,
  )
  second = after.lower(*reversed(shapes)).compile()
  return tuple(sends(part.as_text(), mesh) for part in (first, second))


def nothing_travels():
  """Knock-out: what a rank would send round the ring stays where it is."""
  stay = lambda job, tree, by=1: tree
  return knockouts.patched(context_forms.ContextCall, 'shift', stay)


def scores_are_kept(run, *, shape):
  """HLO: the config's form keeps whole rows of scores for the backward pass.

  Bytes that a rank keeps for it, less those of the online ring: 4 N T n T.

  Args: shape: fields of `Shape`.
  """
  one, form = Shape(**shape), run.config.mesh.context_form
  mesh, kept = experiment.mesh_of({'context': one.ranks}), []
  for name in (form, 'ring'):
    forward, given, _ = _passes(name, one, mesh)
    arrays = jax.tree.leaves(forward.lower(*given).out_info[1])
    kept.append(sum(x.size * x.dtype.itemsize for x in arrays) // one.ranks)
  scores = 4 * one.heads * one.tokens * one.ranks * one.tokens
  return claims.Outcome(
    f'{scores:,} bytes',
    f'{kept[0] - kept[1]:,} bytes',
    f'{form} keeps {kept[0]:,} on a rank, the online ring {kept[1]:,}; '
    f'{one.ranks} ranks of {one.tokens} tokens, {one.heads} heads, float32',
    kept[0] - kept[1] == scores,
  )


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


def bytes_against_ring(run, *, form, shape, groups):
  """HLO: bytes of a form over those of the KV ring, forward and backward.

  Both as the formulas; fewer with as many kv heads as query heads.

  Args:
    form: as above. shape: fields of `Shape` without kv_heads.
    groups: query heads per kv head, the first 1.
  """
  found, same, lines = [], True, []
  for group in groups:
    one = Shape(**shape, kv_heads=shape['heads'] // group)
    both = [_counted(f, one) for f in (form, 'ring')]
    same &= both == [formulas(f, one) for f in (form, 'ring')]
    ours, ring = (_views(passes, one.ranks) for passes in both)
    rest = {name: size / ring[name] for name, size in ours.items()}
    found.append(rest.pop('all'))
    each = ', '.join(f'{name} {x:.2f}' for name, x in rest.items())
    lines.append(f'at {group} query heads per kv head {each}')
  return claims.Outcome(
    'the formulas, < 1x',
    ', '.join(f'{x:.2f}x' for x in found),
    f'{"; ".join(lines)}; even at {1 / found[0]:.2f}; {shape["ranks"]} ranks, '
    f'width {shape["width"]}; {"as" if same else "NOT as"} the formulas',
    same and found[0] < 1,
  )
