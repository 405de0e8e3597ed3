"""Claims about recurrences that are computed in parallel over the sequence.

Gated scans in chunks (arXiv:2312.06635, section 4) and nonlinear cells solved
by Newton's method (arXiv:2510.21450). Equalities are in float64; iterations are
counted; what crosses devices is counted in the compiled program; costs are
process CPU-seconds, the candidates in turn, a ratio within a round.

Legend: B rows, T tokens, H heads, K key width, V value width, M numbers a
channel, D channels. The argument `shape` of a claim is [H, K, V].
"""

import functools

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.models.mixers import recurrent
from paraxis.pallas_kernels.scans import affine as affine_scan
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import gated_chunk
from paraxis.pallas_kernels.scans import newton as newton_scan
from paraxis.sharding.sequence import scan
from paraxis.train.bench import measure as bench_measure
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts

CELLS = {
  'gru': (recurrent.gru, 1, 3),
  'lstm': (recurrent.lstm, 2, 5),
}


SMALL = {
  'model.d_model': 32, 'model.d_ff': 32, 'model.vocab_size': 64,
  'model.num_layers': 2, 'model.num_heads': 2, 'model.dtype': 'float64',
  'model.param_dtype': 'float64', 'model.recurrent.tolerance': 1e-13,
  'data.sequence_length': 48,
}  # fmt: skip


def _rows(length, shape, dtype):
  """(q, k, v, log decay, reset, state) of one packed row; shape: (H, K, V)."""
  rng, (h, k, v) = np.random.default_rng(0), shape
  draw = lambda *s: jnp.asarray(rng.normal(size=s), dtype)
  decay = -np.logaddexp(0, -rng.normal(size=(1, length, h, k))) / 16
  reset = jnp.asarray(rng.uniform(size=(1, length)) < 4 / length)
  return (
    draw(1, length, h, k), draw(1, length, h, k), draw(1, length, h, v),
    jnp.asarray(decay, dtype), reset, draw(1, h, k, v),
  )  # fmt: skip


def _gradients(run, arrays):
  """(o, state) and the gradients of all arrays but the resets, by `run`."""
  *inputs, reset, state = arrays

  def call(inputs, state):
    return run(*inputs, reset, state)

  out, back = jax.vjp(call, inputs, state)
  return out, back(jax.tree.map(jnp.cos, out))


def chunks_apart():
  """Knock-out: no chunk knows the state before it."""
  real = gated_chunk.forward
  alone = lambda x, state, *how: real(x, jnp.zeros_like(state), *how)
  return knockouts.patched(gated_chunk, 'forward', alone)


def no_chunks():
  """Knock-out: a gated scan goes token by token."""
  loop = functools.partial(gated_scan.gated_scan, impl='loop')
  one = lambda *arrays, impl='': loop(*arrays)
  return knockouts.patched(gated_scan, 'gated_scan', one)


def gathered_maps():
  """Knock-out: no doubling of distances, every rank gets all maps."""
  return knockouts.patched(scan, '_permuted', scan._gathered)


def chunks_equal_the_loop(run, *, length, shape, chunks, within):
  """EQ: outputs, final state and all gradients, in chunks and in two halves.

  Args:
    chunks: their sizes.
  """
  found = {}
  with jax.enable_x64(True):
    arrays = _rows(length, shape, jnp.float64)
    form = lambda **how: functools.partial(gated_scan.gated_scan, **how)
    once = lambda run: jax.jit(functools.partial(_gradients, run))(arrays)
    loop = once(form(impl='loop'))

    def halves(q, k, v, g, reset, state):
      cut, parts = length // 2 - 1, []
      for part in (slice(0, cut), slice(cut, length)):
        row = [x[:, part] for x in (q, k, v, g, reset)]
        o, state = form(impl='xla')(*row, state)
        parts.append(o)
      return jnp.concatenate(parts, 1), state

    ways = {f'C={c}': form(impl='xla', chunk=c) for c in chunks}
    for name, way in (ways | {'in two parts': halves}).items():
      gaps = jax.tree.map(experiment.gap, once(way), loop)
      found[name] = np.max(jax.tree.leaves(gaps))
  return experiment.equal(
    found,
    within,
    f'T={length}, heads, keys, values {shape}, packed, an initial state: o, '
    'the last state and five gradients against the step-by-step loop; '
    f'{experiment.listed(found)}',
  )


def _run(function, arrays):
  jax.block_until_ready(function(*arrays))


def _plain(q, k, v, g, reset, state):
  """The recurrence as one would write it down: a scan over tokens."""

  def step(s, row):
    q, k, v, g, reset = row
    s = jnp.where(reset[:, None, None, None], 0, jnp.exp(g)[..., None] * s)
    s = s + k[..., None] * v[..., None, :]
    return s, jnp.einsum('bhkv,bhk->bhv', s, q)

  rows = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (q, k, v, g, reset))
  state, o = jax.lax.scan(step, state, rows)
  return jnp.swapaxes(o, 0, 1), state


def chunks_cost(run, *, lengths, shape, rounds, at_least):
  """CPU: CPU-seconds of our step-by-step loop over those in chunks.

  The loop's gradient is explicit; a scan that jax differentiates keeps every
  state, which is the weaker baseline and is reported beside it.

  Args:
    at_least: the median ratio, with gradients, at every length.
  """
  medians, spreads = [], []
  for length in lengths:
    arrays, ways = _rows(length, shape, jnp.float32), {}
    forms = {
      impl: functools.partial(gated_scan.gated_scan, impl=impl)
      for impl in ('xla', 'loop')
    }
    for name, op in (forms | {'plain': _plain}).items():
      whole = jax.jit(functools.partial(_gradients, op))
      ways[name] = functools.partial(_run, whole, (arrays,))
      ways[f'{name} forward'] = functools.partial(_run, jax.jit(op), arrays)
    times = bench_measure.interleave(ways, rounds, bench_measure.settled)
    ratio = lambda name, part='', times=times: bench_measure.spread(
      bench_measure.ratios(times[f'{name}{part}'], times[f'xla{part}'])
    )
    medians.append(ratio('loop').median)
    text = lambda name, ratio=ratio: experiment.numbers(ratio(name), '.1f')
    spreads.append(
      f'T={length}: {text("loop")} (least, median, most), forward alone '
      f'{ratio("loop", " forward").median:.2f}; a scan that jax '
      f'differentiates {text("plain")}'
    )
  return claims.Outcome(
    f'>= {at_least:g}',
    experiment.numbers(medians, '.1f'),
    f'B1, heads, keys, values {shape}, float32, {rounds} rounds in turn, with '
    'gradients, our loop over tokens, whose gradient is explicit, over chunks. '
    f'{"; ".join(spreads)}. Decoding, without gradients, takes the loop',
    min(medians) >= at_least,
  )


def _across(form, n, length, shape):
  """[hlo.Collective] of a gated scan, forward, of a row over n devices."""
  mesh = experiment.mesh_of({'context': n})
  plan = scan.ScanPlan(form, 'context')
  spec = jax.P(None, 'context')

  def local(q, k, v, g, reset):
    return scan.gated(q, k, v, g, reset, None, plan)[0]

  whole = jax.shard_map(
    local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )
  arrays = _rows(length, shape, jnp.float32)[:5]
  place = jax.NamedSharding(mesh, spec)
  shapes = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arrays
  ]
  return experiment.collectives(jax.jit(whole).trace(*shapes), mesh)


def state_crosses(run, *, devices, lengths, shape):
  """HLO: bytes received to hand states over, by formula, at every length.

  Args:
    devices: on the context axis.
  """
  h, k, v = shape
  received, right = [], True
  for form in scan.FORMS:
    want = scan.received(form, devices, 4 * h * k, 4 * h * k * v)
    found = set()
    for length in lengths:
      moved = _across(form, devices, length, shape)
      found.add(sum(c.total for c in moved))
    right &= found == {want}
    received.append(f'{form} {want:,}, counted {", ".join(map(str, found))}')
  keys = 4 * (devices - 1) * lengths[-1] // devices * h * (k + v)
  return claims.Outcome(
    'equal, any length',
    'equal' if right else 'NOT equal',
    f'bytes a device receives, forward, float32, {devices} devices, T '
    f'{" and ".join(map(str, lengths))}: {"; ".join(received)}. A ring of '
    f'attention with heads as wide receives {keys:,} at T={lengths[-1]}',
    right,
  )


def _problems(name, deviation, seeds, tokens, channels):
  """(cell, weights, inputs, states) of `seeds` random problems."""
  cell, numbers, gates = CELLS[name]
  rng = np.random.default_rng(0)
  a = rng.normal(0, deviation, (seeds, gates, channels))
  u = rng.normal(size=(seeds, 1, tokens, 3, channels))
  state = np.zeros((seeds, 1, numbers, channels))
  return cell, *map(jnp.asarray, (a, u, state))


def iterations(
  run, *, cell, problem, deviations, stronger, tolerance, cap, at_most
):
  """SIM: median Newton iterations by the strength of the recurrence.

  Args:
    cell: of CELLS. problem: {'tokens', 'channels', 'seeds': how many}.
    deviations: of the recurrent weights as they are initialised.
    stronger: others, which are reported alone.
    tolerance: residual of a solution. cap: iterations at most; as many as there
      are tokens solve any cell.
    at_most: a bound on the median at each of `deviations`.

  Raises:
    UserError: a bound that no measurement can pass.
  """
  if at_most >= cap:
    raise errors.UserError(
      f'at_most={at_most} iterations cannot fail under cap={cap}: raise cap.'
    )
  medians, ranges = [], []
  with jax.enable_x64(True):
    for deviation in (*deviations, *stronger):
      function, *arrays = _problems(cell, deviation, **problem)
      solve = functools.partial(
        newton_scan.iterations, function, tol=tolerance, cap=cap, bound=1.0
      )
      counts = np.asarray(jax.jit(solve)(*arrays))
      medians.append(int(np.median(counts)))
      ranges.append(f'{deviation:g}: {counts.min()} to {counts.max()}')
  first, rest = medians[: len(deviations)], medians[len(deviations) :]
  return claims.Outcome(
    f'<= {at_most} at {experiment.numbers(deviations)}',
    experiment.numbers(first),
    f'{cell}, {problem["channels"]} channels, {problem["tokens"]} tokens, '
    f'float64, residual <= {tolerance:g}, medians over {problem["seeds"]} '
    'seeds by the standard deviation of the recurrent weights; at '
    f'{experiment.numbers(stronger, "g")}: {experiment.numbers(rest)} '
    f'({"; ".join(ranges)}; cap {cap}), where the published code takes '
    f'{at_most} all the same',
    max(first) <= at_most,
  )


def picard():
  """Knock-out: Newton without Jacobians, a plain fixed-point iteration."""
  real = newton_scan._blocks

  def flat(step, before):
    y, j = real(step, before)
    return y, 0 * j

  return knockouts.patched(newton_scan, '_blocks', flat)


def _depth(jaxpr):
  """Longest chain of operations of a jaxpr; a loop counts all its turns."""
  deep, most = {}, 0
  of = lambda v: deep.get(v, 0) if type(v) is not core.Literal else 0
  for equation in jaxpr.eqns:
    inner = [
      j.jaxpr if hasattr(j, 'jaxpr') else j
      for j in equation.params.values()
      if hasattr(j, 'eqns') or hasattr(j, 'jaxpr')
    ]
    turns = equation.params.get('length', 1)
    own = turns * max(map(_depth, inner)) if inner else 1
    start = max(map(of, equation.invars), default=0)
    for v in equation.outvars:
      deep[v] = start + own
    most = max(most, start + own)
  return most


def depth_of_solve(run, *, lengths, channels, numbers):
  """SIM: the longest chain of operations of one Newton step's solve.

  Args:
    lengths: each twice the one before. channels, numbers: of a cell.
  """
  chains = {}
  for impl in ('xla', 'loop'):
    row = chains[impl] = []
    for t in lengths:
      j = jax.ShapeDtypeStruct((1, t, numbers, numbers, channels), jnp.float32)
      b = jax.ShapeDtypeStruct((1, t, numbers, channels), jnp.float32)
      h = jax.ShapeDtypeStruct((1, numbers, channels), jnp.float32)
      solve = functools.partial(affine_scan.affine_scan, impl=impl)
      row.append(_depth(jax.make_jaxpr(solve)(j, b, h).jaxpr))
  steps = {
    b - a for a, b in zip(chains['xla'], chains['xla'][1:], strict=False)
  }
  least, most = min(steps), max(steps)
  return claims.Outcome(
    'grows by a constant',
    f'by {least} to {most} a doubling' if least < most else f'by {most}',
    f'{numbers}x{numbers} blocks; operations in a row for T '
    f'{experiment.numbers(lengths)}: {experiment.numbers(chains["xla"])}; step '
    f'by step {experiment.numbers(chains["loop"])}',
    most <= 2 * least and chains['loop'][-1] > 4 * chains['xla'][-1],
  )


def in_turn():
  """Knock-out: the solve of a Newton step goes token by token."""
  loop = functools.partial(affine_scan.affine_scan, impl='loop')
  return knockouts.patched(
    affine_scan, 'affine_scan', lambda *arrays, impl='': loop(*arrays)
  )


def newton_equals_sequence(run, *, cases, within):
  """EQ: loss and every gradient of the model, solved and in sequence.

  The solver is that of the config. It must have iterated and never fallen back:
  else the sequential loop would be compared with itself.

  Args:
    cases: list of fields of schema.Model.
  """
  found, took, device = {}, [], jax.devices()[0]
  numbers = lambda side: side.gradients | {'the loss': np.asarray(side.loss)}
  with jax.enable_x64(True):
    for fields in cases:
      own = experiment.under('model', fields)
      config = experiment.fields(run.config, SMALL, own)
      solved = trial.Reference(config, True, device)
      in_sequence = trial.reference(config, True, device)
      gap, _ = trial.worst(numbers(solved), numbers(in_sequence))
      found[' '.join(f'{k}={v}' for k, v in fields.items())] = gap
      solves, steps, _, again = solved.aux.tallies['newton']
      took.append((float(steps / max(solves, 1)), float(again)))
  text = ', '.join(f'{n:.1f} ({again:.0f})' for n, again in took)
  return experiment.equal(
    found,
    within,
    'loss and all gradients, two layers, packed rows, float64, one device; '
    f'iterations of a solve (sequences that fell back to the loop): {text}; '
    f'{experiment.listed(found)}',
    all(n > 0 and not again for n, again in took),
  )
