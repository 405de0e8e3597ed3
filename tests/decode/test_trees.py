"""Shapes of drafts."""

import itertools

import numpy as np
import pytest
import support

from paraxis.decode import trees


def test_a_chain():
  chain = trees.chain(3)
  assert chain.parents == (-1, 0, 1) and chain.is_chain and chain.depth == 3
  assert chain.depths().tolist() == [0, 1, 2, 3]
  assert chain.ancestors().tolist() == [1, 3, 7, 15]
  assert trees.chain(0).depth == 0


def test_paths_share_their_beginnings():
  tree = trees.of_paths([(0, 0), (0, 1), (1, 0)])
  assert tree.parents == (-1, -1, 0, 0, 1) and tree.ranks == (0, 1, 0, 1, 0)
  assert not tree.is_chain and tree.depths().tolist() == [0, 1, 1, 2, 2, 2]
  for c, bits in enumerate(tree.ancestors()):  # by walking up
    seen, node = {0, c}, c
    while node:
      node = tree.parents[node - 1] + 1
      seen.add(node)
    assert bits == sum(1 << i for i in seen)


def test_more_nodes_than_a_word_has_bits():
  """Words of 32 nodes; up to 32 nodes there is one."""
  assert trees.chain(31).ancestors().shape == (32,)
  assert trees.chain(31).ancestors()[-1] == 2**32 - 1
  rng = np.random.default_rng(0)
  parents = tuple(int(rng.integers(-1, c)) if c else -1 for c in range(70))
  tree = trees.Tree(parents, tuple(range(70)))
  words = tree.ancestors()
  assert words.shape == (71, 3) and words.dtype == np.uint32
  for c in range(71):
    seen, node = {0, c}, c
    while node:
      node = parents[node - 1] + 1
      seen.add(node)
    bits = sum(int(word) << 32 * w for w, word in enumerate(words[c]))
    assert bits == sum(1 << i for i in seen)
    assert set(np.flatnonzero(tree.sees()[c])) == seen


def gain(paths, accuracy):
  """Expected drafts that are kept, where each place is right on its own."""
  return sum(
    np.prod([accuracy[d][k] for d, k in enumerate(path)]) for path in paths
  )


def test_the_grown_tree_is_the_best_of_all():
  accuracy = [[0.5, 0.3, 0.1], [0.6, 0.2, 0.1]]
  every = [p for n in (1, 2) for p in itertools.product(range(3), repeat=n)]
  best = max(
    gain(paths, accuracy)
    for paths in itertools.combinations(every, 5)
    if all(p[:1] in paths for p in paths)
  )
  tree = trees.grown(accuracy, 5)
  paths = []
  for parent, rank in zip(tree.parents, tree.ranks, strict=True):
    paths.append((*(paths[parent] if parent >= 0 else ()), rank))
  assert gain(paths, accuracy) == pytest.approx(best) and len(paths) == 5


def test_a_probed_tree_has_tokens_behind_every_draft():
  tree = trees.of_paths([(0, 0), (1,)])
  wide = trees.probed(tree, 2)
  assert wide.parents[:3] == tree.parents and wide.ranks[:3] == tree.ranks
  assert wide.width == 3 + 4 * 2 and set(wide.ranks[3:]) == {-1}
  assert wide.depth == tree.depth == 2 and not wide.is_chain
  # Behind the last token, then behind each draft, two in a row.
  assert wide.parents[3:] == (-1, 3, 0, 5, 1, 7, 2, 9)
  depths = wide.depths()[1:]
  for c in range(3, 11, 2):
    behind = wide.parents[c]
    assert depths[c] == (depths[behind] if behind >= 0 else 0) + 1
    assert depths[c + 1] == depths[c] + 1
  assert not trees.probed(trees.chain(1), 1).is_chain
  with support.refused('64 drafts', '3 prompt tokens', '259', 'at most 63'):
    trees.probed(trees.chain(64), 3)


def test_a_tree_above_the_room_of_a_call():
  with support.refused('256 drafts', '1 to 255'):
    trees.grown(np.ones((8, 8)), 256)
  assert trees.grown(np.ones((1, 3)), 9).width == 3  # there are no more
