"""Mamba's scan on GPU (Triton): channels over threads, segments of tokens.

  h_t = e^(dt_t A) h_{t-1} + dt_t x_t B_t          y_t = sum_s C_ts h_ts

A program has one row of the batch, `LANES` neighbouring channels, whose state
(S, LANES) stays in registers, and one segment of the tokens, which it walks one
after the other. There are as many segments as fill the processors. What a
segment makes of a state is known when it was walked once from a zero state:

  h after = left h before + own          left = e^(A sum dt), 0 after a reset

That is a sweep, a kernel of its own, which writes `left` and `own`; then each
program passes its first state through the segments before its own. Gradients of
states pass the segments behind it in the same way, with the same `left`.

Every CHUNK tokens the forward pass writes the state down. The backward pass
walks the chunks in reverse: it computes the states of a chunk again and writes
down those at every GROUP-th token, then, group by group in reverse, computes
those within once more, in registers (arXiv:2312.00752, section 3.3). So no more
than CHUNK / GROUP states of a program lie in memory beside those at the chunks.

float32. Cost: x, dt (and dy) read once, twice more in the backward pass; y (or
dx, ddt) written once; T / CHUNK states of S numbers a channel; gradients of B
and C are written for every block of channels, to be added. A sweep reads dt and
x (or dy) once more. Memory latency limits all of it: what tokens need is asked
for before the first of them is computed.

Legend: B rows, T tokens, F channels, S numbers of the state, N segments.
"""

import functools
import math
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying

LANES, CHUNK, WARPS, STAGES = 32, 64, 1, 1
GROUP, AHEAD = 8, 4  # tokens read at once: by all but _forward, by _forward
# Programs that a GPU of 132 processors holds at once, by their registers.
FORWARD, BACKWARD = 16 * 132, 8 * 132
FEWEST = 3  # segments; with two, the sweeps take what is gained
MOST_STATES = 64  # GROUP of them, a thread's registers
MOST_ELEMENTS = 2**31  # an address is counted in 32 bits
LOG2E = math.log2(math.e)  # e^z = 2^(z LOG2E), in fewer instructions
DTYPES = ('float32',)


def limits(spec, target):
  """None, or what else the kernel cannot take (registry.kernel)."""
  del target
  b, t, f, states = spec.shape
  if states > MOST_STATES:
    return f'a state of {states} numbers, at most {MOST_STATES} fit'
  size = b * t * f * max(1, 2 * states / LANES)
  if size >= MOST_ELEMENTS:
    return f'{size:.0f} elements, addresses fewer than {MOST_ELEMENTS}'
  return None


class _Sizes(NamedTuple):
  """Of a call; length: tokens of a segment, the last may have fewer."""

  tokens: int
  channels: int
  states: int
  segments: int
  length: int

  def span(self, segment):
    """(first token of a segment, the token behind it)."""
    first = segment * self.length
    return first, jnp.minimum(first + self.length, self.tokens)


def _sizes(shape, states, programs):
  """Segments of whole chunks for x (B, T, F): about `programs` in all.

  None is shorter than two chunks, or than there are states to pass on.
  """
  b, t, f = shape
  count = programs // (b * pl.cdiv(f, LANES))
  count = min(count, t // max(2 * CHUNK, math.isqrt(t)))
  if count < FEWEST:
    return _Sizes(t, f, states, 1, t)
  length = pl.cdiv(t, count * CHUNK) * CHUNK
  return _Sizes(t, f, states, pl.cdiv(t, length), length)


class _Token(NamedTuple):
  """What may be read of a token; what is not used is not read."""

  t: Any
  x: Any  # (LANES,), as dt and dy
  dt: Any
  dy: Any
  b: Any  # (S, 1), as c
  c: Any
  keep: Any  # whether the state before is kept


class _Program(NamedTuple):
  """What a program reads: references, its place, numbers of a state."""

  x: Any
  dt: Any
  shared: Any
  keep: Any
  dy: Any  # None: there is none
  rate: Any  # (S, LANES), LOG2E times
  row: Any
  block: Any  # of channels
  segment: Any
  lane: Any
  state: Any
  live: Any  # of channels
  real: Any  # of numbers of a state
  sizes: Any

  @property
  def at(self):
    return self.state[:, None], self.lane[None]

  @property
  def both(self):
    return self.real[:, None] & self.live[None]

  def channels(self, ref, t):
    """(LANES,) of token t."""
    return plgpu.load(ref.at[self.row, t, self.lane], mask=self.live)

  def spread(self, x):
    """(1, LANES), 0 where there is no channel.

    To be called where x is used, not where it is read: here threads exchange
    it, which waits for the read, and no later read passes that.
    """
    return jnp.where(self.live, x, 0.0)[None]

  def put(self, ref, t, value):
    plgpu.store(ref.at[self.row, t, self.lane], value, mask=self.live)

  def numbers(self, t, which):
    """(S, 1) of token t: B (0) or C (1)."""
    at = self.shared.at[self.row, t, which, self.state]
    return plgpu.load(at, mask=self.real, other=0.0)[:, None]

  def token(self, t):
    x, dt = (self.channels(ref, t) for ref in (self.x, self.dt))
    dy = None if self.dy is None else self.channels(self.dy, t)
    keep = plgpu.load(self.keep.at[self.row, t]) > 0
    return _Token(t, x, dt, dy, self.numbers(t, 0), self.numbers(t, 1), keep)

  def tokens(self, first, count):
    return [self.token(first + j) for j in range(count)]

  def load(self, ref, *place):
    """(S, LANES) of states (B, .., S, F)."""
    at = ref.at[(self.row, *place, *self.at)]
    return plgpu.load(at, mask=self.both, other=0.0)

  def store(self, ref, value, *place, when=True):
    at = ref.at[(self.row, *place, *self.at)]
    plgpu.store(at, value, mask=self.both & when)

  def decay(self, dt):
    return jnp.exp2(self.spread(dt) * self.rate)

  def after(self, h, token):
    """h after a token."""
    kept = jnp.where(token.keep, h, 0.0)
    new = self.spread(token.dt) * self.spread(token.x) * token.b
    return self.decay(token.dt) * kept + new

  def passed(self, state, maps, count, segment):
    """A state (or gradient) behind `count` segments, segment(0) the first."""

    def one(i, state):
      left, own = (self.load(ref, segment(i)) for ref in maps)
      # A state that is not finite must not pass a reset.
      return jnp.where(left == 0, 0.0, left * state) + own

    return lax.fori_loop(0, count, one, state) if maps else state


def _program(refs, sizes, dy=None):
  x, dt, shared, keep, rate = refs
  row, block, segment = (pl.program_id(i) for i in range(3))
  lane = block * LANES + jnp.arange(LANES)
  state = jnp.arange(pl.next_power_of_2(sizes.states))
  live, real = lane < sizes.channels, state < sizes.states
  at = rate.at[state[:, None], lane[None]]
  rate = plgpu.load(at, mask=real[:, None] & live[None], other=0.0) * LOG2E
  place = row, block, segment, lane, state, live, real, sizes
  return _Program(x, dt, shared, keep, dy, rate, *place)


def _walk(own, span, count, step, carry):
  """step(token, carry) of a span of tokens, `count` of them read at once.

  Where there is a dy in reverse, and tokens were filled up to whole groups.
  """
  start, stop = span
  whole, reverse = (stop - start) // count, own.dy is not None

  def group(k, carry):
    k = whole - 1 - k if reverse else k
    tokens = own.tokens(start + k * count, count)
    for token in reversed(tokens) if reverse else tokens:
      carry = step(token, carry)
    return carry

  carry = lax.fori_loop(0, whole, group, carry)
  if own.sizes.tokens % count == 0:
    return carry
  single = lambda t, carry: step(own.token(t), carry)
  return lax.fori_loop(start + whole * count, stop, single, carry)


def _sweep(*refs, sizes):
  """(left, own) of a segment; if dy is given, those of gradients."""
  *inputs, left_ref, own_ref = refs
  own = _program(inputs[:5], sizes, *inputs[5:])

  def step(token, carry):
    state, total, kept = carry
    if own.dy is None:
      state = own.after(state, token)
    else:
      state = own.decay(token.dt) * (state + token.c * own.spread(token.dy))
      state = jnp.where(token.keep, state, 0.0)
    return state, total + token.dt, kept & token.keep

  zero = jnp.zeros_like(own.rate), jnp.zeros(LANES, jnp.float32)
  carry = *zero, jnp.bool_(True)
  state, total, kept = _walk(own, sizes.span(own.segment), GROUP, step, carry)
  own.store(left_ref, jnp.where(kept, own.decay(total), 0.0), own.segment)
  own.store(own_ref, state, own.segment)


def _forward(*refs, sizes):
  """Tokens in order; states are written down where a chunk begins."""
  *inputs, y_ref, last_ref, starts_ref = refs
  own = _program(inputs[:5], sizes)
  first_ref, *maps = inputs[5:]
  n = own.segment
  first, end = sizes.span(n)

  def step(token, h):
    h = own.after(h, token)
    own.put(y_ref, token.t, (h * token.c).sum(0))
    return h

  def chunk(i, h):
    own.store(starts_ref, h, i)
    span = i * CHUNK, jnp.minimum((i + 1) * CHUNK, end)
    return _walk(own, span, AHEAD, step, h)

  h = own.passed(own.load(first_ref), maps, n, lambda i: i)
  h = lax.fori_loop(first // CHUNK, (end + CHUNK - 1) // CHUNK, chunk, h)
  own.store(last_ref, h, when=n == sizes.segments - 1)


def _back(own, outs, token, states, carry):
  """A token in reverse; states: (before it, after it)."""
  (dx_ref, ddt_ref, dshared_ref), (before, h), (g, drate) = outs, states, carry
  dt, dy = own.spread(token.dt), own.spread(token.dy)
  g = g + token.c * dy
  d_input = (g * token.b).sum(0)
  d_before = jnp.where(token.keep, g * own.decay(token.dt), 0.0)
  d_exponent = d_before * jnp.where(token.keep, before, 0.0)
  d_dt = (d_exponent * own.rate).sum(0) / LOG2E
  own.put(dx_ref, token.t, token.dt * d_input)
  own.put(ddt_ref, token.t, token.x * d_input + d_dt)
  terms = g * (dt * own.spread(token.x)), h * dy
  for which, term in enumerate(terms):
    at = dshared_ref.at[own.row, own.block, token.t, which, own.state]
    plgpu.store(at, term.sum(1), mask=own.real)
  return d_before, drate + d_exponent * dt


def _backward(*refs, sizes):
  """Chunks in reverse, groups of tokens in reverse.

  Tokens are filled up to whole groups: dt = 0 and dy = 0 change nothing.
  """
  *inputs, dx_ref, ddt_ref, dshared_ref, drate_ref, dfirst_ref, kept_ref = refs
  outs = dx_ref, ddt_ref, dshared_ref
  dy_ref, starts_ref, dlast_ref, *maps = inputs[5:]
  own = _program(inputs[:5], sizes, dy_ref)
  n, last = own.segment, sizes.segments - 1
  first, end = sizes.span(n)

  def chunk(i, carry):
    i = (end + CHUNK - 1) // CHUNK - 1 - i
    groups = jnp.minimum(CHUNK, end - i * CHUNK) // GROUP

    def again(k, h):
      own.store(kept_ref, h, n, k)
      for token in own.tokens(i * CHUNK + k * GROUP, GROUP):
        h = own.after(h, token)
      return h

    lax.fori_loop(0, groups, again, own.load(starts_ref, i))

    def group(k, carry):
      k = groups - 1 - k
      start = i * CHUNK + k * GROUP
      # What is read here for the first time is asked for a token before.
      new = lambda j: dict(
        dy=own.channels(dy_ref, start + j), c=own.numbers(start + j, 1)
      )
      coming, h = new(GROUP - 1), [own.load(kept_ref, n, k)]
      for token in own.tokens(start, GROUP):
        h.append(own.after(h[-1], token))
      for j in reversed(range(GROUP)):
        token = own.token(start + j)._replace(**coming)
        coming = new(j - 1) if j else {}
        carry = _back(own, outs, token, h[j : j + 2], carry)
      return carry

    return lax.fori_loop(0, groups, group, carry)

  g = own.passed(own.load(dlast_ref), maps, last - n, lambda i: last - i)
  chunks = (end + CHUNK - 1) // CHUNK - first // CHUNK
  carry = g, jnp.zeros_like(own.rate)
  g, drate = lax.fori_loop(0, chunks, chunk, carry)
  own.store(dfirst_ref, g, when=n == 0)
  own.store(drate_ref, drate, n)


def _call(kernel, sizes, arrays, shapes, interpret):
  x, rate = arrays[0], arrays[4]
  whole = lambda s: pl.BlockSpec(s, lambda *_: (0,) * len(s))
  passes = 4 if kernel is _backward else 1
  return pl.pallas_call(
    functools.partial(kernel, sizes=sizes),
    name=f'selective_scan_gpu{kernel.__name__}',
    grid=(len(x), pl.cdiv(sizes.channels, LANES), sizes.segments),
    in_specs=[whole(a.shape) for a in arrays],
    out_specs=[whole(s) for s in shapes],
    out_shape=[varying.result(x, s, jnp.float32) for s in shapes],
    compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
    cost_estimate=pl.CostEstimate(
      flops=6 * passes * x.size * len(rate),
      transcendentals=passes * x.size * len(rate),
      bytes_accessed=4 * sum(map(math.prod, shapes))
      + sum(a.nbytes for a in arrays),
    ),
    interpret=interpret,
  )(*arrays)


def _maps(sizes, arrays, interpret):
  """[left, own] of all segments, (B, N, S, F) each; []: there is but one."""
  if sizes.segments == 1:
    return []
  shape = len(arrays[0]), sizes.segments, sizes.states, sizes.channels
  return _call(_sweep, sizes, arrays, [shape, shape], interpret)


def _inputs(tokens, rate):
  keep = (~tokens.reset).astype(jnp.float32)
  return tokens.x, tokens.dt, tokens.shared, keep, rate


def forward(tokens, rate_SF, state_BSF, interpret=False):
  """-> (y_BTF, state_BSF after, states at the starts of chunks)."""
  (b, t, f), s = tokens.x.shape, len(rate_SF)
  sizes = _sizes((b, t, f), s, FORWARD)
  arrays = _inputs(tokens, rate_SF)
  maps = _maps(sizes, arrays, interpret)
  shapes = [(b, t, f), (b, s, f), (b, pl.cdiv(t, CHUNK), s, f)]
  return _call(_forward, sizes, (*arrays, state_BSF, *maps), shapes, interpret)


def backward(tokens, rate_SF, starts, dy_BTF, dstate_BSF, interpret=False):
  """-> (dx, ddt, dshared_BTUS, drate_SF, d of the first state_BSF)."""
  (b, length, f), s = tokens.x.shape, len(rate_SF)
  t = pl.cdiv(length, GROUP) * GROUP
  sizes = _sizes((b, t, f), s, BACKWARD)
  *inputs, rate = _inputs(tokens, rate_SF)
  inputs[3] = varying.pad(inputs[3], t, fill=1.0)
  inputs = [varying.pad(x, t) for x in inputs]
  arrays = *inputs, rate, varying.pad(dy_BTF, t)
  maps = _maps(sizes, arrays, interpret)
  shapes = [
    (b, t, f), (b, t, f), (b, pl.cdiv(f, LANES), t, 2, s),
    (b, sizes.segments, s, f), (b, s, f),
    (b, sizes.segments, CHUNK // GROUP, s, f),
  ]  # fmt: skip
  arrays = *arrays, starts, dstate_BSF, *maps
  out = _call(_backward, sizes, arrays, shapes, interpret)
  dx, ddt, shared, drate, dfirst, _ = out
  dx, ddt, shared = (x[:, :length] for x in (dx, ddt, shared.sum(1)))
  return dx, ddt, shared, drate.sum((0, 1)), dfirst
