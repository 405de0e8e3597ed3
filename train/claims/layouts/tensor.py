"""Claims about collective matmuls: equal to plain products, and overlapped.

The rings of sharding/tensor/rings.py against collectives and plain products
(EQ), their messages counted in the compiled program (HLO), the order in which a
TPU runs messages and products (AOT). What overlap can gain: overlap.py.

Legend: B rows, T tokens, D model, F mlp, N heads, H head width.
"""

import collections
import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from paraxis.sharding.meter import aot
from paraxis.sharding.meter import hlo
from paraxis.sharding.tensor import rings as tensor
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts

_AXIS = 'tensor'
_COLUMNS = ('BTD,DF->BTF', 'BTD,DNH->BTNH')
_ROWS = 'BTF,FD->BTD'


def _gather(x, *weights):
  products = list(zip(_COLUMNS, weights, strict=True))
  return tensor.gather_matmul(x, products, _AXIS, 1)


def _gather_backward(args, cotangents):
  x, *weights = args
  products = list(zip(_COLUMNS, weights, strict=True))
  dx, dws = tensor.gather_matmul_gradients(x, products, cotangents, _AXIS, 1)
  return dx, *dws


def _gather_first(x, *weights):
  x = jax.lax.all_gather(x, _AXIS, axis=1, tiled=True)
  return tuple(map(jnp.einsum, _COLUMNS, (x, x), weights))


def _scatter(h, w):
  return (tensor.matmul_scatter(_ROWS, h, w, _AXIS, 1),)


def _scatter_backward(args, cotangents):
  (h, w), (y,) = args, cotangents
  return tensor.matmul_scatter_gradients(_ROWS, h, w, y, _AXIS, 1)


def _scatter_last(h, w):
  y = jnp.einsum(_ROWS, h, w)
  return (jax.lax.psum_scatter(y, _AXIS, scatter_dimension=1, tiled=True),)


def wrong_way():
  """Knock-out: chunks travel against the order in which they are counted."""
  real = tensor._send
  back = lambda x, axis, step: real(x, axis, -step)
  return knockouts.patched(tensor, '_send', back)


@contextlib.contextmanager
def collectives_apart():
  """Knock-out: no ring, a collective before or after one whole product."""

  def gather(x, products, axis, dim):
    x = jax.lax.all_gather(x, axis, axis=dim, tiled=True)
    return tuple(jnp.einsum(equation, x, w) for equation, w in products)

  def scatter(equation, x, w, axis, dim):
    y = jnp.einsum(equation, x, w)
    return jax.lax.psum_scatter(y, axis, scatter_dimension=dim, tiled=True)

  with (
    knockouts.patched(tensor, 'gather_matmul', gather),
    knockouts.patched(tensor, 'matmul_scatter', scatter),
  ):
    yield


class _Pair(NamedTuple):
  """A ring, its backward pass, and its collective apart; of local arrays.

  ins, outs: (shape, dimension that is sharded) of arguments and results.
  permutes: rings that a forward and a backward pass consist of.
  """

  ring: object
  backward: object
  plain: object
  ins: tuple
  outs: tuple
  permutes: tuple


def _pairs(tokens, width, mlp):
  x, h = ((1, tokens, width), 1), ((1, tokens, mlp), 2)
  q = ((1, tokens, 8, mlp // 8), 2)
  up, query = ((width, mlp), 1), ((width, *q[0][2:]), 1)
  down = ((mlp, width), 0)
  return {
    'gather': _Pair(
      _gather, _gather_backward, _gather_first, (x, up, query), (h, q), (1, 2)
    ),
    'scatter': _Pair(
      _scatter, _scatter_backward, _scatter_last, (h, down), (x,), (1, 1)
    ),
  }


def _backward(function):
  """function(*args) -> its gradients, as one function of (args, cotangents)."""
  return lambda args, cotangents: jax.vjp(function, *args)[1](cotangents)


def _spec(array):
  shape, dim = array
  return P(*(_AXIS if i == dim else None for i in range(len(shape))))


def _programs(pair, mesh, ring=True):
  """(forward, backward) of a pair's ring, or of its plain form."""
  function = pair.ring if ring else pair.plain
  backward = pair.backward if ring else _backward(function)
  ins, outs = (tuple(map(_spec, arrays)) for arrays in (pair.ins, pair.outs))
  local = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
  return (
    jax.jit(local(function, in_specs=ins, out_specs=outs)),
    jax.jit(local(backward, in_specs=(ins, outs), out_specs=ins)),
  )


def _mesh(shards):
  devices = experiment.mesh_of({_AXIS: shards}).devices.ravel()
  return jax.sharding.Mesh(devices, (_AXIS,))


def _gaps(pair, shards):
  """Differences of results and gradients from einsum on one device."""
  rng = np.random.default_rng(0)
  draw = lambda arrays: tuple(rng.normal(size=shape) for shape, _ in arrays)
  args, cotangents = draw(pair.ins), draw(pair.outs)
  equations = _COLUMNS if pair.ring is _gather else (_ROWS,)

  def whole(x, *weights):
    pairs = zip(equations, weights, strict=True)
    return tuple(jnp.einsum(e, x, w) for e, w in pairs)

  forward, backward = _programs(pair, _mesh(shards))
  found = *forward(*args), *backward(args, cotangents)
  right = *whole(*args), *_backward(whole)(args, cotangents)
  return list(map(experiment.gap, found, right))


def rings_equal_products(run, *, shards, within):
  """EQ: both rings and all their gradients equal einsum on one device."""
  with jax.enable_x64(True):
    pairs = _pairs(2 * shards, 12, 8 * shards)
    gaps = [gap for pair in pairs.values() for gap in _gaps(pair, shards)]
  return experiment.equal(
    gaps,
    within,
    f'{shards} shards, float64, two products in one gather ring, one in the '
    'scatter ring, results and every gradient',
  )


def ring_messages(run, *, shards):
  """HLO: n - 1 permutes a ring, as many bytes as the collective, nothing else.

  Forward and backward are counted as separate programs.
  """
  mesh, expected, found, same = _mesh(shards), [], [], True
  for pair in _pairs(2 * shards, 16, 8 * shards).values():
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s, _ in pair.ins]
    outs = [jax.ShapeDtypeStruct(s, jnp.float32) for s, _ in pair.outs]
    received = []
    for ring in (True, False):
      forward, backward = _programs(pair, mesh, ring)
      lowered = (
        forward.lower(*args),
        backward.lower(tuple(args), tuple(outs)),
      )
      read = [hlo.collectives(l.compile().as_text(), mesh) for l in lowered]
      received.append([sum(c.total for c in r) for r in read])
      if ring:
        found += [dict(collections.Counter(c.kind for c in r)) for r in read]
        expected += [
          {'collective-permute': k * (shards - 1)} for k in pair.permutes
        ]
    same = same and received[0] == received[1]
  count = lambda rows: '+'.join(str(sum(row.values())) for row in rows)
  return claims.Outcome(
    f'{count(expected)} permutes',
    f'{count(found)} permutes',
    f'{shards} shards; gather forward, backward, scatter forward, backward; '
    f'bytes {"equal" if same else "DIFFER from"} those of all-gather and '
    'reduce-scatter',
    found == expected and same,
  )


def messages_enclose_products(run, *, topology, tokens, width, mlp):
  """AOT: in the TPU's schedule every message has a product under way.

  Of both rings, forward and backward, against the same with all_gather before
  or reduce_scatter after one product, where nothing can be under way.

  Args:
    topology: the ring spans its devices.
    tokens, width, mlp: of one row and one product, in bfloat16.
  """
  where = aot.topology(topology)
  mesh = jax.sharding.Mesh(where.devices, (_AXIS,))
  place = lambda array: jax.ShapeDtypeStruct(
    array[0], jnp.bfloat16, sharding=jax.NamedSharding(mesh, _spec(array))
  )
  found = {True: [], False: []}
  for pair in _pairs(tokens, width, mlp).values():
    args, outs = (tuple(map(place, arrays)) for arrays in (pair.ins, pair.outs))
    for ring, counts in found.items():
      forward, backward = _programs(pair, mesh, ring)
      for program, given in ((forward, args), (backward, (args, outs))):
        with where.context():
          traced = program.trace(*given)
        compiled = aot.compile_for(where, 'rings', traced)
        counts += [
          len(o.products) for o in hlo.overlapped(compiled.as_text() or '')
        ]
  rings, plain = ([n > 0 for n in found[ring]] for ring in (True, False))
  return claims.Outcome(
    f'{len(rings)} messages',
    f'{sum(rings)} messages',
    f'{topology}, tokens {tokens}, width {width}, mlp {mlp}; forward and '
    f'backward; collectives apart: {sum(plain)} of {len(plain)}; the '
    "compiler's schedule, no time measured",
    bool(rings) and all(rings) and sum(plain) < sum(rings),
  )
