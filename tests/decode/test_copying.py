"""What is copied: from the source of a correction, as a plain loop has it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.decode.drafts import copying


def followed_by_loop(text, length, source, place, n):
  """The place of the source that is copied next, in words of lists."""
  new, old = text[length - n : length], text[place : place + n]
  if new == old and place + n <= source:
    return place + n
  for size in (3, 2):
    if length < size:
      continue
    tail = text[length - size : length]
    ends = [e for e in range(size, source + 1) if text[e - size : e] == tail]
    if ahead := [e for e in ends if e >= place]:
      return ahead[0]
    if ends:
      return ends[-1]
  return place + n


def test_the_place_is_a_plain_loop():
  rng = np.random.default_rng(0)
  follow = jax.jit(copying._followed)
  kinds = set()
  for _ in range(400):
    length = int(rng.integers(6, 24))
    source = int(rng.integers(3, length))
    text = rng.integers(0, 3, 24)
    place, n = int(rng.integers(1, source + 1)), int(rng.integers(1, 4))
    want = followed_by_loop(text.tolist(), length, source, place, n)
    got = follow(jnp.asarray(text), *map(jnp.int32, (length, source, place, n)))
    assert int(got) == want
    kinds.add(np.sign(want - place - n))
  assert kinds == {-1, 0, 1}


def test_drafts_end_with_the_source():
  text = jnp.arange(10)
  cut = functools.partial(copying._from, 4, text)
  tokens, there = cut(jnp.int32(6), jnp.int32(4))
  assert tokens.tolist() == [4, 5, 6, 7]
  assert there.tolist() == [True, True, False, False]
  assert not cut(jnp.int32(6), jnp.int32(6))[1].any()
