"""Mamba's scan on GPU (Triton): channels over threads, tokens in order.

  h_t = e^(dt_t A) h_{t-1} + dt_t x_t B_t          y_t = sum_s C_ts h_ts

A program has one row of the batch and `LANES` neighbouring channels, whose
state (S, LANES) stays in registers. It walks the tokens; every CHUNK tokens it
writes the state down. The backward pass walks the chunks in reverse: it
computes the states of a chunk again and writes down those at every GROUP-th
token, then, group by group in reverse, computes those within once more, in
registers (arXiv:2312.00752, section 3.3). So no more than CHUNK / GROUP states
of a program lie in memory beside those at the chunks.

float32. Cost: x, dt (and dy) read once, twice more in the backward pass; y (or
dx, ddt) written once; T / CHUNK states of S numbers a channel; gradients of B
and C are written for every program, to be added.

Legend: B rows, T tokens, F channels, S numbers of the state, N = T / CHUNK.
"""

import functools
import math
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying

LANES, GROUP, CHUNK, WARPS, STAGES = 32, 8, 64, 1, 1
MOST_STATES = 64  # GROUP of them, a thread's registers
MOST_ELEMENTS = 2**31  # an address is counted in 32 bits
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


class _Program(NamedTuple):
  """What a program reads: references, its row, channels, numbers of a state."""

  x: Any
  dt: Any
  shared: Any
  keep: Any
  rate: Any  # (S, LANES)
  row: Any
  lane: Any
  state: Any
  live: Any  # of channels
  real: Any  # of numbers of a state

  @property
  def at(self):
    return self.state[:, None], self.lane[None]

  @property
  def both(self):
    return self.real[:, None] & self.live[None]

  def channels(self, ref, t):
    """(1, LANES) of token t."""
    at = ref.at[self.row, t, self.lane]
    return plgpu.load(at, mask=self.live, other=0.0)[None]

  def numbers(self, t, which):
    """(S, 1) of token t: B (0) or C (1)."""
    at = self.shared.at[self.row, t, which, self.state]
    return plgpu.load(at, mask=self.real, other=0.0)[:, None]

  def token(self, t):
    """(x, dt, B, whether it keeps the state before)."""
    keep = plgpu.load(self.keep.at[self.row, t]) > 0
    x, dt = (self.channels(ref, t) for ref in (self.x, self.dt))
    return x, dt, self.numbers(t, 0), keep

  def load(self, ref, *place):
    """(S, LANES) of states (B, .., S, F)."""
    at = ref.at[(self.row, *place, *self.at)]
    return plgpu.load(at, mask=self.both, other=0.0)

  def store(self, ref, value, *place):
    plgpu.store(ref.at[(self.row, *place, *self.at)], value, mask=self.both)

  def after(self, h, t):
    """(h after token t, h before it that is kept)."""
    x, dt, b, keep = self.token(t)
    before = jnp.where(keep, h, 0.0)
    return jnp.exp(dt * self.rate) * before + dt * x * b, before


def _program(refs, channels, states):
  x, dt, shared, keep, rate = refs
  lane = pl.program_id(1) * LANES + jnp.arange(LANES)
  state = jnp.arange(pl.next_power_of_2(states))
  live, real = lane < channels, state < states
  at = rate.at[state[:, None], lane[None]]
  rate = plgpu.load(at, mask=real[:, None] & live[None], other=0.0)
  row = pl.program_id(0)
  return _Program(x, dt, shared, keep, rate, row, lane, state, live, real)


def _forward(*refs, sizes):
  """Tokens in order; states are written down where a chunk begins."""
  tokens, channels, states = sizes
  first_ref, y_ref, last_ref, starts_ref = refs[5:]
  own = _program(refs[:5], channels, states)

  def chunk(i, h):
    own.store(starts_ref, h, i)

    def one(t, h):
      h, _ = own.after(h, t)
      y = (h * own.numbers(t, 1)).sum(0)
      plgpu.store(y_ref.at[own.row, t, own.lane], y, mask=own.live)
      return h

    return lax.fori_loop(
      i * CHUNK, jnp.minimum((i + 1) * CHUNK, tokens), one, h
    )

  last = lax.fori_loop(0, pl.cdiv(tokens, CHUNK), chunk, own.load(first_ref))
  own.store(last_ref, last)


def _backward(*refs, sizes):
  """Chunks in reverse, groups of tokens in reverse.

  Tokens are filled up to whole groups: dt = 0 and dy = 0 change nothing.
  """
  tokens, channels, states = sizes
  starts_ref, dy_ref, dlast_ref = refs[5:8]
  dx_ref, ddt_ref, dshared_ref, drate_ref, dfirst_ref, kept_ref = refs[8:]
  own = _program(refs[:5], channels, states)
  block = pl.program_id(1)

  def put(ref, t, value):
    plgpu.store(ref.at[own.row, t, own.lane], value, mask=own.live)

  def back(t, before, g, drate):
    x, dt, b, keep = own.token(t)
    dy, c = own.channels(dy_ref, t), own.numbers(t, 1)
    decay = jnp.exp(dt * own.rate)
    g = g + c * dy
    h = decay * before + dt * x * b
    d_input = (g * b).sum(0)
    d_exponent = g * decay * before
    put(dx_ref, t, dt[0] * d_input)
    put(ddt_ref, t, x[0] * d_input + (d_exponent * own.rate).sum(0))
    for which, terms in enumerate((g * (dt * x), h * dy)):
      at = dshared_ref.at[own.row, block, t, which, own.state]
      plgpu.store(at, terms.sum(1), mask=own.real)
    return jnp.where(keep, g * decay, 0.0), drate + d_exponent * dt

  def chunk(i, carry):
    i = pl.cdiv(tokens, CHUNK) - 1 - i
    groups = jnp.minimum(CHUNK, tokens - i * CHUNK) // GROUP

    def again(k, h):
      own.store(kept_ref, h, k)
      for j in range(GROUP):
        h, _ = own.after(h, i * CHUNK + k * GROUP + j)
      return h

    lax.fori_loop(0, groups, again, own.load(starts_ref, i))

    def group(k, carry):
      k = groups - 1 - k
      first = i * CHUNK + k * GROUP
      h, kept = own.load(kept_ref, k), []
      for j in range(GROUP):
        h, before = own.after(h, first + j)
        kept.append(before)
      for j in reversed(range(GROUP)):
        carry = back(first + j, kept[j], *carry)
      return carry

    return lax.fori_loop(0, groups, group, carry)

  carry = own.load(dlast_ref), jnp.zeros_like(own.rate)
  g, drate = lax.fori_loop(0, pl.cdiv(tokens, CHUNK), chunk, carry)
  own.store(dfirst_ref, g)
  own.store(drate_ref, drate)


def _call(kernel, arrays, shapes, interpret):
  x, rate = arrays[0], arrays[4]
  (n, t, f), states = x.shape, len(rate)
  whole = lambda s: pl.BlockSpec(s, lambda *_: (0,) * len(s))
  passes = 1 if kernel is _forward else 4
  return pl.pallas_call(
    functools.partial(kernel, sizes=(t, f, states)),
    name=f'selective_scan_gpu{kernel.__name__}',
    grid=(n, pl.cdiv(f, LANES)),
    in_specs=[whole(a.shape) for a in arrays],
    out_specs=[whole(s) for s in shapes],
    out_shape=[varying.result(x, s, jnp.float32) for s in shapes],
    compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
    cost_estimate=pl.CostEstimate(
      flops=6 * passes * x.size * states,
      transcendentals=passes * x.size * states,
      bytes_accessed=4 * sum(map(math.prod, shapes))
      + sum(a.nbytes for a in arrays),
    ),
    interpret=interpret,
  )(*arrays)


def _inputs(tokens, rate):
  keep = (~tokens.reset).astype(jnp.float32)
  return tokens.x, tokens.dt, tokens.shared, keep, rate


def forward(tokens, rate_SF, state_BSF, interpret=False):
  """-> (y_BTF, state_BSF after, states at the starts of chunks)."""
  (b, t, f), s = tokens.x.shape, len(rate_SF)
  shapes = [(b, t, f), (b, s, f), (b, pl.cdiv(t, CHUNK), s, f)]
  arrays = *_inputs(tokens, rate_SF), state_BSF
  return _call(_forward, arrays, shapes, interpret)


def backward(tokens, rate_SF, starts, dy_BTF, dstate_BSF, interpret=False):
  """-> (dx, ddt, dshared_BTUS, drate_SF, d of the first state_BSF)."""
  (b, length, f), s = tokens.x.shape, len(rate_SF)
  t = pl.cdiv(length, GROUP) * GROUP
  *inputs, rate = _inputs(tokens, rate_SF)
  inputs[3] = varying.pad(inputs[3], t, fill=1.0)
  inputs = [varying.pad(x, t) for x in inputs]
  arrays = *inputs, rate, starts, varying.pad(dy_BTF, t), dstate_BSF
  states = b, s, f
  shapes = [
    (b, t, f), (b, t, f), (b, pl.cdiv(f, LANES), t, 2, s), states, states,
    (b, CHUNK // GROUP, s, f),
  ]  # fmt: skip
  out = _call(_backward, arrays, shapes, interpret)
  dx, ddt, shared, drate, dfirst, _ = out
  dx, ddt, shared = (x[:, :length] for x in (dx, ddt, shared.sum(1)))
  return dx, ddt, shared, drate.sum(0), dfirst
