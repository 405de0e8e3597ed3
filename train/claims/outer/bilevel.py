"""Claims about minima over minimisers of blocks, on quadratic functions.

    g_i(x, y) = 1/2 y A_i y - y (C_i x + b_i)
    f_i(x, y) = 1/2 |y - t_i|^2 + RIDGE / 2 |x|^2

A sample has noise of its own in all of A, C, b and t; of B samples the mean is
drawn. What is reached is measured by the gradient in closed form,

    RIDGE x + mean_i C_i A_i^-1 (A_i^-1 (C_i x + b_i) - t_i)

Legend: M blocks, I of them read, B samples; D numbers of x, Q of a block.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import knockouts
from paraxis.train.steps import bilevel as lib

M, D, Q, RIDGE = 16, 4, 3, 0.1
NOISE = 0.1, 0.3, 1.0, 1.0  # of A, C, b, t
CHUNK, SMOOTH = 250, 50  # steps between measurements; that a mean is of


def without_turning():
  """Knock-out: y is followed, what it does to f is not."""
  right = lib.step

  def step(outer, inner, rates, *given):
    return right(outer, inner, rates._replace(z=0.0), *given)

  return knockouts.patched(lib, 'step', step)


def inner(x, y, problem):
  """g of a block."""
  a, c, b, _ = problem
  return y @ a @ y / 2 - y @ (c @ x + b)


def outer(x, y, problem):
  """f of a block."""
  gap = y - problem[3]
  return gap @ gap / 2 + RIDGE * x @ x / 2


def drawn(rng):
  """(A (M, Q, Q), C (M, Q, D), b (M, Q), t (M, Q)), NumPy."""
  turns = np.linalg.qr(rng.normal(size=(M, Q, Q)))[0]
  sizes = rng.uniform(0.7, 1.3, (M, Q))
  a = np.einsum('mij,mj,mkj->mik', turns, sizes, turns)
  c = rng.normal(size=(M, Q, D)) / D**0.5
  return a, c, rng.normal(size=(M, Q)), rng.normal(size=(M, Q))


def closed(problem, x):
  """(.., D): the gradient at x (.., D)."""
  a, c, b, t = problem
  solve = lambda v: np.linalg.solve(a, v[..., None])[..., 0]
  y = solve(np.einsum('mqd,...d->...mq', c, x) + b)
  return RIDGE * x + np.einsum('mqd,...mq->...d', c, solve(y - t)) / M


def sampled(rng, problem, blocks, B):
  """Means of B samples of blocks (.., I): leaves (.., I, ..)."""
  out = []
  for value, noise in zip(problem, NOISE, strict=True):
    own = value[blocks]
    own = own + noise / B**0.5 * rng.normal(size=own.shape)
    out.append(own)
  out[0] = (out[0] + out[0].swapaxes(-1, -2)) / 2
  return tuple(out)


@functools.partial(jax.jit, static_argnums=0)
def _many(rates, search, blocks, samples):
  def body(search, given):
    search = lib.step(outer, inner, rates, search, *given)
    return search, search.x

  return jax.lax.scan(body, search, (blocks, samples))


def hypergradient(run, *, seeds, steps, within):
  """EQ: what is followed at a fixed x, all blocks read without noise, is the
  gradient in closed form.

  Args:
    seeds: of problems. steps: of y and z.
  """
  found = {}
  with jax.enable_x64(True):
    for seed in seeds:
      rng = np.random.default_rng(seed)
      problem, x = drawn(rng), rng.normal(size=D)
      search = lib.begun(outer, inner, x, jnp.zeros((M, Q)), problem)
      every = np.tile(np.arange(M), (steps, 1))
      whole = tuple(np.broadcast_to(v, (steps, *v.shape)) for v in problem)
      rates = lib.Rates(0.0, 0.8, 0.8, 0.5, 0.5)
      search, _ = _many(rates, search, every, whole)
      found[str(seed)] = experiment.gap(search.along, closed(problem, x))
  return experiment.equal(
    found, within, f'float64, {steps} steps: {experiment.listed(found)}'
  )


def iterations(seed, read, B, growth, most, to):
  """Steps until the gradient's norm, a mean over SMOOTH, is at most `to`.

  read: blocks of a step. growth: samples whose rates are taken.
  """
  rng = np.random.default_rng(seed)
  problem, norms = drawn(rng), np.zeros(0)
  search = lib.begun(
    outer, inner, jnp.full(D, 2.0), jnp.zeros((M, Q)),
    sampled(rng, problem, np.arange(M), B),
  )  # fmt: skip
  follow, near = min(0.01 * growth, 0.8), 0.6 * read / M
  rate = 0.006 * growth**0.5 * read / M
  rates = lib.Rates(rate, near, near, follow, follow)
  while len(norms) < most:
    blocks = np.stack([rng.permutation(M)[:read] for _ in range(CHUNK)])
    samples = sampled(rng, problem, blocks, B)
    search, xs = _many(rates, search, blocks, samples)
    at = closed(problem, np.asarray(xs))
    norms = np.append(norms, np.linalg.norm(at, axis=-1))
    mean = np.convolve(norms, np.ones(SMOOTH) / SMOOTH, 'valid')
    if (mean <= to).any():
      return int(np.argmax(mean <= to)) + SMOOTH
  return most


def fewer(run, *, blocks, samples, seeds, most, to, power, alone):
  """LEARN: iterations to a norm of the gradient fall with the samples of a
  block, as a power of them, and with the blocks that are read.

  Rates are those of the paper's theorem: of x as I sqrt(B), alpha as B.

  Args:
    blocks: list of I, the largest of B. samples: list of B, the middle of I.
    seeds: of problems and noise. most: steps. to: the norm.
    power: [what it is, within].
    alone: one sample is read, whatever the rates.
  """
  found, middle, (slope, within) = {}, blocks[len(blocks) // 2], power
  cases = [(middle, B) for B in samples]
  cases += [(read, samples[-1]) for read in blocks if read != middle]
  with jax.enable_x64(True):
    for read, B in cases:
      found[f'I={read}, B={B}'] = [
        iterations(seed, read, 1 if alone else B, B, most, to) for seed in seeds
      ]
  rows = np.log([found[f'I={middle}, B={B}'] for B in samples])
  slopes = np.polyfit(np.log(samples), rows, 1)[0]
  name = lambda read: f'I={read}, B={samples[-1]}'
  findings = [
    ablation.judged(
      f'power of B within {within:g} of {slope:g}',
      within - np.abs(slopes - slope), signed=False,
    ),
    *(
      ablation.less(found, name(high), name(low))
      for low, high in zip(blocks, blocks[1:], strict=False)
    ),
  ]  # fmt: skip
  return ablation.outcome(
    run, found, findings, f'iterations to {to:g}',
    f'powers of B {experiment.numbers(slopes, ".2f")}; {most} where it was not '
    'reached',
  )  # fmt: skip
