"""Every change of a tensor has its inverse, to the bit.

Arrays hold random bits, NaNs with payloads among them, and are compared as
integers: a change moves numbers and computes none.
"""

import math

import hf_families
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from paraxis.models.huggingface import joined
from paraxis.models.huggingface import leaves as leaves_lib
from paraxis.models.huggingface import transforms

DTYPES = ('float32', 'float16', 'int64')
size = st.integers(1, 5)
sizes = lambda least, most: st.lists(size, min_size=least, max_size=most)


def bits(draw, shape):
  """An array of random bits."""
  dtype = np.dtype(draw(st.sampled_from(DTYPES)))
  seed = draw(st.integers(0, 2**32 - 1))
  count = math.prod(shape) * dtype.itemsize
  raw = np.random.default_rng(seed).bytes(count)
  return np.frombuffer(raw, dtype).reshape(shape)


def raw(a):
  """An array as integers."""
  return np.ascontiguousarray(a).view(f'u{a.dtype.itemsize}')


def same(a, b):
  assert a.dtype == b.dtype and a.shape == b.shape
  np.testing.assert_array_equal(raw(a), raw(b))


def is_inverse(change, theirs, ours):
  """Both ways round, and the numbers are those that there were.

  theirs: a tensor. ours: the shape that it gets.
  """
  there = change.ours(theirs)
  assert there.shape == tuple(ours)
  same(change.theirs(there), theirs)
  same(change.ours(change.theirs(there)), there)
  assert sorted(raw(there).flat) == sorted(raw(theirs).flat)


@st.composite
def matrices(draw):
  shape = draw(sizes(2, 4))
  inputs = draw(st.integers(1, len(shape) - 1))
  width = math.prod(shape[:inputs])
  theirs = bits(draw, (math.prod(shape[inputs:]), width))
  return transforms.matrix(shape, inputs), theirs, shape


@st.composite
def keeps(draw):
  shape = draw(sizes(1, 4))
  flat = draw(st.sampled_from([None, (math.prod(shape),), (-1,)]))
  wanted = shape if flat is None else (math.prod(shape),)
  return transforms.kept(shape, flat), bits(draw, wanted), shape


@st.composite
def turns(draw):
  shape = draw(sizes(2, 4))
  ours = (*shape[:-2], shape[-1], shape[-2])
  return transforms.turned, bits(draw, shape), ours


@st.composite
def convolutions(draw):
  width, shape = draw(size), draw(sizes(1, 3))
  theirs = bits(draw, (math.prod(shape), 1, width))
  return transforms.taps((width, *shape)), theirs, (width, *shape)


@st.composite
def rotations(draw):
  first, pairs, rest = draw(size) - 1, draw(size), draw(size) - 1
  end = first + 2 * pairs
  last = end if draw(st.booleans()) or rest else None
  shape = (*draw(sizes(0, 2)), end + rest)
  return transforms.halves(first, last), bits(draw, shape), shape


@st.composite
def swaps(draw):
  half = draw(size)
  shape = (*draw(sizes(0, 2)), 2 * half)
  return transforms.swapped(half), bits(draw, shape), shape


@st.composite
def chains(draw):
  """As parts.attention has it: a matrix with heads, each of them rotated."""
  d, heads, pairs = draw(size), draw(size), draw(size)
  shape = (d, heads, 2 * pairs)
  change = transforms.chain(
    transforms.matrix(shape), transforms.halves(0), transforms.turned
  )
  return change, bits(draw, (heads * 2 * pairs, d)), (d, 2 * pairs, heads)


EVERY = dict(
  matrix=matrices(), kept=keeps(), turned=turns(), taps=convolutions(),
  halves=rotations(), swapped=swaps(), chain=chains(),
)  # fmt: skip


@pytest.mark.parametrize('name', EVERY)
def test_there_and_back(name):
  @hypothesis.settings(max_examples=60, deadline=None, database=None)
  @hypothesis.given(EVERY[name])
  def check(case):
    is_inverse(*case)

  check()


def test_every_transform_is_tried():
  public = {
    name
    for name, value in vars(transforms).items()
    if getattr(value, '__module__', '') == transforms.__name__
    and not isinstance(value, type)
  }
  assert public | {'turned'} == set(EVERY)


def test_a_change_that_is_no_inverse_is_seen():
  broken = transforms.Transform(transforms.halves(0).ours, lambda a: a)
  with pytest.raises(AssertionError):
    is_inverse(broken, np.arange(8.0).reshape(2, 4), (2, 4))


@st.composite
def together(draw, kind):
  """(kind, D, N, K, H, whole weight, whole bias) of a joined matrix."""
  d, k, h = draw(size), draw(size), draw(size)
  n = k * draw(st.integers(1, 3))
  if kind == 'codegen':
    k = n = 4 * draw(st.integers(1, 3))
  total = (n + 2 * k) * h
  shape = (d, total) if kind == 'conv1d' else (total, d)
  return d, n, k, h, bits(draw, shape), bits(draw, (total,))


@pytest.mark.parametrize('kind', joined.KINDS)
def test_parts_of_a_joined_matrix(kind):
  """Queries, keys and values are the whole, each number once."""

  @hypothesis.settings(max_examples=60, deadline=None, database=None)
  @hypothesis.given(together(kind))
  def check(case):
    *dims, weight, bias = case
    for which, whole in enumerate((weight, bias)):
      cuts = [
        joined.KINDS[kind](x, *dims)[which] for x in 'query key value'.split()
      ]
      found = np.zeros_like(whole)
      parts = [np.array(cut.read(whole)) for cut in cuts]
      assert sum(p.size for p in parts) == whole.size
      for cut, part in zip(cuts, parts, strict=True):
        assert cut.shape == whole.shape
        cut.write(found, part)
      same(found, whole)

  check()


def tensors_of(leaves, tree):
  """{name: tensor} of {path: parameter}."""
  out = {}
  for leaf in leaves:
    value = tree[leaf.path]
    value = value if leaf.layer is None else value[leaf.layer]
    leaves_lib.put(out, leaf, value)
  return out


@pytest.mark.parametrize('name', hf_families.TINY)
def test_leaves_there_and_back(name):
  """Parameters to tensors and back, and tensors to parameters and back."""
  record = hf_families.read_golden(name)
  model = hf_families.model_of(record['config'], 'float32')
  leaves = leaves_lib.table(model, record['config']['model_type'])
  rng = np.random.default_rng(0)
  tree = {
    path: np.frombuffer(rng.bytes(4 * math.prod(s)), 'f4').reshape(s)
    for path, s in hf_families.shapes_of(model).items()
  }
  for leaf in leaves:
    if not leaf.names:  # counts, which no file has
      tree[leaf.path] = np.zeros_like(tree[leaf.path])
  tensors = tensors_of(leaves, tree)
  back = hf_families.tree_of(leaves, tensors, 'float32')
  assert set(back) == set(tree)
  for path, x in tree.items():
    same(back[path], x)
  again = tensors_of(leaves, back)
  assert set(again) == set(tensors)
  for key, x in tensors.items():
    same(again[key], x)
