"""Claims about layouts: OneFlow's conversions, signatures, deferred sums.

Bytes are those that one device receives, counted in the compiled program by
sharding/meter/hlo.py, against what sharding/planner/conversions.py declared
before it ran.

Legend: B rows, T tokens, D model, N heads, P head width, F mlp.
"""

import functools
import itertools
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.sharding.meter import hlo
from paraxis.sharding.planner import conversions as layout
from paraxis.sharding.planner import signatures
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts


def by_broadcast():
  """Knock-out: every conversion gathers or sums the whole tensor first."""
  plan = layout.plan

  def detour(shape, dtype, source, target, sizes):
    if source == target:
      return ()
    whole = layout.SbpLayout()
    first = plan(shape, dtype, source, whole, sizes)
    return (*first, *plan(shape, dtype, whole, target, sizes))

  return knockouts.patched(layout, 'plan', detour)


def sums_at_once():
  """Knock-out: no sum is deferred."""
  block = _block
  at_once = lambda x, weights, defer: block(x, weights, False)
  return knockouts.patched(sys.modules[__name__], '_block', at_once)


def whole_tensors():
  """Knock-out: conversions gather or sum the whole tensor, which they do not
  declare."""
  real, whole = layout.convert, layout.SbpLayout()

  def convert(x, source, target):
    if source == target:
      return x
    return real(real(x, source, whole), whole, target)

  return knockouts.patched(layout, 'convert', convert)


def terms_apart():
  """Knock-out: an all-reduce leaves every device its own term."""
  real = layout._apply
  some = lambda step, x, sizes: (
    x if step.kind == 'all_reduce' else real(step, x, sizes)
  )
  return knockouts.patched(layout, '_apply', some)


def no_partial_sums():
  """Knock-out: no product gives terms of a sum."""
  real = signatures.signatures
  whole = lambda equation: [way for way in real(equation) if 'P' not in way]
  return knockouts.patched(signatures, 'signatures', whole)


_COLUMNS, _ROWS = 'tensor:S(1)', 'tensor:S(0)'  # of a weight (in, out)


def _pair(text):
  return tuple(layout.parse(side) for side in text.split(' -> '))


def _terms(x, at, sizes, rng):
  """x as the host holds it in the layout `at`: its terms, or x itself."""
  if not at.partial:
    return x
  count = math.prod(sizes[a] for a in at.partial)
  parts = rng.normal(size=(count, *x.shape))
  parts[-1] = x - parts[:-1].sum(0)
  return parts


def _conversion(mesh, shape, source, target):
  """A conversion compiled and run in float64: ({axes: bytes}, worst error).

  Terms are stacked on a first dimension, as layout.on_mesh wants them.
  """
  rng = np.random.default_rng(0)
  x = rng.normal(size=shape)
  start, spec = _terms(x, source, mesh.shape, rng), source.spec(len(shape))
  with jax.enable_x64(True), jax.set_mesh(mesh):
    run = jax.jit(lambda x: layout.on_mesh(x, source, target))
    args = jax.device_put(start, jax.NamedSharding(mesh, spec))
    program = run.lower(args).compile()
    y = np.asarray(program(args))
  error = np.abs((y.sum(0) if target.partial else y) - x).max()
  return hlo.by_axis(hlo.collectives(program.as_text(), mesh)), error


def conversion_totals(run, *, size, shape, totals):
  """HLO: bytes of each conversion on one axis, all devices together.

  Args:
    size: devices. shape: of a float64 tensor T.
    totals: {'S(0) -> B': bytes of all devices, in tensors T}.
  """
  mesh = experiment.mesh_of({'tensor': size})
  whole, right, moved = math.prod(shape) * 8, 0, []
  for text, expected in totals.items():
    a, b = (f'tensor:{side}' for side in text.split(' -> '))
    counted, _ = _conversion(mesh, shape, layout.parse(a), layout.parse(b))
    found = sum(counted.values()) * size / whole
    right += found == expected
    moved.append(f'{text} {found:g}')
  return claims.Outcome(
    f'{len(totals)} of {len(totals)}',
    f'{right} of {len(totals)}',
    f'on {size} devices, in tensors: {", ".join(moved)}',
    right == len(totals),
  )


def conversions_declared(run, *, mesh, shape, conversions):
  """HLO: bytes declared before running are those counted, axis by axis.

  Args:
    shape: of a float64 tensor.
    conversions: 'data:S(0) tensor:P -> B', ... (layout.parse).
  """
  made, right, moved = experiment.mesh_of(mesh), 0, 0
  for text in conversions:
    a, b = _pair(text)
    declared = layout.cost(shape, 'float64', a, b, dict(made.shape))
    counted, _ = _conversion(made, shape, a, b)
    right += counted == declared
    moved += sum(counted.values())
  return claims.Outcome(
    f'{len(conversions)} of {len(conversions)}',
    f'{right} of {len(conversions)}',
    f'{mesh}; {moved:,} bytes in all, each conversion equal on each axis',
    right == len(conversions),
  )


def conversions_equal(run, *, mesh, shape, conversions, within):
  """EQ: converted tensors are the tensors (sums of terms: within rounding).

  Args:
    shape, conversions: as `conversions_declared`; values are of order one.
  """
  made = experiment.mesh_of(mesh)
  errors = [_conversion(made, shape, *_pair(t))[1] for t in conversions]
  return experiment.equal(
    errors,
    within,
    f'{len(conversions)} conversions on {mesh}, against NumPy; gradients are '
    'in tests/sharding/planner/test_conversions.py',
  )


def cheapest_pair(run, *, size, rows):
  """SIM: of the layouts of two weights, Megatron's pair declares least bytes.

  y = f(x a) b with whole x and y; f is not linear, so its input is no sum.

  Args:
    size: devices. rows: tokens; widths are those of the config.
  """
  d, f = run.config.model.d_model, run.config.model.d_ff
  cheap = functools.partial(
    signatures.cheapest, 'ab,bc->ac', dtype='float32', sizes={'tensor': size}
  )
  shapes, found = (((rows, d), (d, f)), ((rows, f), (f, d))), {}
  whole, splits = layout.parse('B'), list(map(layout.parse, (_COLUMNS, _ROWS)))
  for a, b in itertools.product(splits, repeat=2):
    ways = [
      cheap(shapes[0], signatures.Signature(whole, a, middle)).bytes
      + cheap(shapes[1], signatures.Signature(middle, b, whole)).bytes
      for middle in (whole, *splits)
    ]
    found[f'{a["tensor"]},{b["tensor"]}'] = min(ways)
  best = min(found, key=lambda pair: found[pair])
  declared = ', '.join(f'{pair} {n:,}' for pair, n in found.items())
  return claims.Outcome(
    'S(1),S(0)',
    best,
    f'bytes declared per device: {declared}; {rows} rows, '
    f'{d} x {f}, {size} devices',
    best == 'S(1),S(0)' and list(found.values()).count(found[best]) == 1,
  )


def _block(x_BTD, weights, defer):
  """x + attention(x) + mlp(x), of local weights: two rows-parallel products.

  defer: terms are added and then summed over devices; else each is summed.
  """
  query, key, value, output, up, down = weights
  q, k, v = (jnp.einsum('BTD,DNP->BTNP', x_BTD, w) for w in (query, key, value))
  mask = attention_op.Mask(scale=q.shape[-1] ** -0.5)
  attend: Any = attention_op.attention  # its custom_vjp is untyped
  o_BTNP = attend(q, k, v, mask)[0]
  a = jnp.einsum('BTNP,NPD->BTD', o_BTNP, output)
  h = jax.nn.gelu(jnp.einsum('BTD,DF->BTF', x_BTD, up))
  m = jnp.einsum('BTF,FD->BTD', h, down)
  whole = lambda y: layout.convert(
    y, layout.parse('tensor:P'), layout.SbpLayout()
  )
  return x_BTD + (whole(a + m) if defer else whole(a) + whole(m))


_BLOCK = ('tensor:S(1)',) * 3 + ('tensor:S(0)', 'tensor:S(1)', 'tensor:S(0)')


def _block_arrays(config):
  """x and weights of the config's shapes, float64, on the host."""
  model, rng = config.model, np.random.default_rng(0)
  d, n, f = model.d_model, model.num_heads, model.d_ff
  into = (d, n, d // n)
  shapes = (into, into, into, (n, d // n, d), (d, f), (f, d))
  weights = [rng.normal(size=s) * d**-0.5 for s in shapes]
  rows = config.train.batch_size, config.data.sequence_length
  return rng.normal(size=(*rows, d)), weights


def _block_program(config, mesh, defer, differentiate):
  """The block over `tensor`, or its gradients: jitted, and its arguments.

  mesh None: one device.
  """
  x, weights = _block_arrays(config)
  run = functools.partial(_block, defer=defer)
  if mesh is not None:
    layouts = map(layout.parse, _BLOCK)
    specs = [a.spec(w.ndim) for a, w in zip(layouts, weights, strict=True)]
    put = lambda v, s: jax.device_put(v, jax.NamedSharding(mesh, s))
    weights = [put(w, s) for w, s in zip(weights, specs, strict=True)]
    x = put(x, PartitionSpec())
    run = jax.shard_map(
      run,
      in_specs=(PartitionSpec(), specs),
      out_specs=PartitionSpec(),
      check_vma=False,
    )
  if differentiate:
    total = lambda x, weights: jnp.sin(run(x, weights)).sum()
    return jax.jit(jax.value_and_grad(total, (0, 1))), (x, weights)
  return jax.jit(run), (x, weights)


def deferred_sums(run, *, mesh):
  """HLO: a block of attention beside an mlp needs one all-reduce, not two."""
  made, found = experiment.mesh_of(mesh), {}
  # The CPU compiler would send both sums in one message: no fewer bytes.
  apart: Any = {'xla_disable_hlo_passes': 'cpu-all-reduce-combiner'}
  with jax.enable_x64(True), jax.set_mesh(made):
    for defer in (False, True):
      program, args = _block_program(run.config, made, defer, False)
      text = program.lower(*args).compile(apart).as_text()
      sums = hlo.collectives(text, made)
      found[defer] = sum(c.count for c in sums), sum(c.total for c in sums)
  (each, each_bytes), (one, one_bytes) = found[False], found[True]
  return claims.Outcome(
    '2 -> 1',
    f'{each} -> {one}',
    f'{mesh}, forward: {each_bytes:,} -> {one_bytes:,} bytes per device; terms '
    'of attention and mlp are added where they are',
    (each, one) == (2, 1) and each_bytes == 2 * one_bytes,
  )


def deferred_sums_equal(run, *, mesh, within):
  """EQ: that block and all its gradients equal one device, in float64."""
  made, gaps = experiment.mesh_of(mesh), []
  with jax.enable_x64(True):
    program, args = _block_program(run.config, None, False, True)
    expected = jax.tree.leaves(jax.device_get(program(*args)))
    for defer in (False, True):
      with jax.set_mesh(made):
        program, args = _block_program(run.config, made, defer, True)
        found = jax.tree.leaves(jax.device_get(program(*args)))
      found, wanted = (dict(enumerate(t)) for t in (found, expected))
      gaps.append(trial.worst(found, wanted)[0])
  return experiment.equal(
    gaps, within, f'{mesh}; loss, dx and six weights, deferred and not'
  )
