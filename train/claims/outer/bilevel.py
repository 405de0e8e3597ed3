"""Claims about minima over minimisers of blocks, on quadratic functions.

    g_i(x, y) = 1/2 y A_i y - y (C_i x + b_i)
    f_i(x, y) = 1/2 |y - t_i|^2 + RIDGE / 2 |x|^2

A sample has noise of its own in all of A, C, b and t; of B samples the mean is
drawn. What is reached is measured by the gradient in closed form,

    RIDGE x + mean_i C_i A_i^-1 (A_i^-1 (C_i x + b_i) - t_i)

Alpha and beta grow as B, the rates of y and z as I, as in the paper's theorem;
that of x, on which most depends, is the best of some for every I and B, on
problems of its own.

Legend: M blocks, I of them read, B samples; D numbers of x, Q of a block.
"""

import functools
import sys

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
HOLD = 250  # steps in a row that what is reached is kept for
FEW = 4  # blocks of `few`


def without_turning():
  """Knock-out: y is followed, what it does to f is not."""
  right = lib.step

  def step(outer, inner, rates, *given):
    return right(outer, inner, rates._replace(z=0.0), *given)

  return knockouts.patched(lib, 'step', step)


def alone():
  """Knock-out: whatever B is, one sample is read, and alpha is that of one."""
  return knockouts.patched(sys.modules[__name__], 'averaged', lambda B: 1)


def few():
  """Knock-out: of the blocks that a step could read it reads FEW."""
  return knockouts.patched(sys.modules[__name__], 'taken', lambda read: FEW)


def averaged(B):
  """Samples that a mean is of."""
  return B


def taken(read):
  """Blocks that a step reads."""
  return read


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
def _many(alpha, x, near, search, blocks, samples):
  """(Search after steps, x of each); alpha, beta alike, near: of y and z."""
  rates = lib.Rates(x, near, near, alpha, alpha)

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
      search, _ = _many(0.5, 0.0, 0.8, search, every, whole)
      found[str(seed)] = experiment.gap(search.along, closed(problem, x))
  return experiment.equal(
    found, within, f'float64, {steps} steps: {experiment.listed(found)}'
  )


def kept(norms, to):
  """Steps until norms, each a mean over SMOOTH, are at most `to` for HOLD in a
  row; None: they are not."""
  mean = np.convolve(norms, np.ones(SMOOTH) / SMOOTH, 'valid')
  if len(mean) < HOLD:
    return None
  held = np.convolve(mean <= to, np.ones(HOLD), 'valid') > HOLD - 0.5
  return int(np.argmax(held)) + SMOOTH if held.any() else None


def iterations(seed, read, B, rate, most, to):
  """Steps until the gradient's norm is at most `to` and stays so (`kept`);
  `most`, where that is not within so many.

  seed: of the problem; noise and blocks have one of their own for each I and B.
  read: I. rate: of x.
  """
  problem, norms = drawn(np.random.default_rng(seed)), np.zeros(0)
  rng = np.random.default_rng([seed, read, B])
  read, B = taken(read), averaged(B)
  search = lib.begun(
    outer, inner, jnp.full(D, 2.0), jnp.zeros((M, Q)),
    sampled(rng, problem, np.arange(M), B),
  )  # fmt: skip
  alpha, near, found = min(0.01 * B, 0.8), 0.6 * read / M, None
  while found is None and len(norms) < most:
    blocks = np.stack([rng.permutation(M)[:read] for _ in range(CHUNK)])
    samples = sampled(rng, problem, blocks, B)
    search, xs = _many(alpha, rate, near, search, blocks, samples)
    at = closed(problem, np.asarray(xs))
    norms = np.append(norms, np.linalg.norm(at, axis=-1))
    found = kept(norms, to)
  return most if found is None else found


def _at_best(cases, tuned, seeds, most, to):
  """({'I=8, B=4': [iterations of each seed]}, {likewise: its rate of x})."""
  found, best = {}, {}
  with jax.enable_x64(True):
    for read, B in cases:
      count = functools.partial(iterations, read=read, B=B, most=most, to=to)
      cost = lambda rate, count=count: sum(
        count(s, rate=rate) for s in tuned['seeds']
      )
      name = f'I={read}, B={B}'
      best[name] = min(tuned['rates'], key=cost)
      found[name] = [count(s, rate=best[name]) for s in seeds]
  return found, best


def _outcome(run, found, best, findings, most, to, more=''):
  chosen = ', '.join(f'{rate:g} ({name})' for name, rate in best.items())
  return ablation.outcome(
    run, found, findings, f'iterations to {to:g}',
    f'kept for {HOLD} more; {most} where it was not; rates of x, the best for '
    f'others: {chosen}{more}',
  )  # fmt: skip


def by_samples(run, *, read, samples, tuned, seeds, most, to, power):
  """LEARN: iterations to a norm of the gradient that stays fall with the
  samples of a block, as a power of them.

  Args:
    read: I. samples: list of B. tuned: {'rates': of x, 'seeds': of problems on
      which that of each B is chosen}. seeds: of problems. most: steps. to: the
      norm. power: [what it is, within].
  """
  (slope, within), cases = power, [(read, B) for B in samples]
  found, best = _at_best(cases, tuned, seeds, most, to)
  slopes = np.polyfit(np.log(samples), np.log([*found.values()]), 1)[0]
  text = f'power of B within {within:g} of {slope:g}'
  left = within - np.abs(slopes - slope)
  finding = ablation.judged(text, left, signed=False)
  more = f'; powers of B {experiment.numbers(slopes, ".2f")}'
  return _outcome(run, found, best, [finding], most, to, more)


def by_blocks(run, *, blocks, B, tuned, seeds, most, to):
  """LEARN: iterations as of `by_samples` fall with the blocks of a step.

  Args:
    blocks: list of I. B: samples. tuned, seeds, most, to: as of `by_samples`.
  """
  cases = [(read, B) for read in blocks]
  found, best = _at_best(cases, tuned, seeds, most, to)
  names = [*found]
  findings = [
    ablation.less(found, high, low)
    for low, high in zip(names, names[1:], strict=False)
  ]
  return _outcome(run, found, best, findings, most, to)
