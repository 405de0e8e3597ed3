"""A batch is a pytree that data code can make without jax."""

import ast
import pathlib

import jax
import numpy as np

from paraxis.models import batch


def test_a_batch_is_a_pytree_of_six():
  one = batch.Batch(*(np.full((2, 3), i) for i in range(5)), np.float32(6))
  assert one._fields == (
    'tokens', 'targets', 'segments', 'positions', 'weights', 'denominator',
  )  # fmt: skip
  doubled = jax.tree.map(lambda x: 2 * x, one)
  assert isinstance(doubled, batch.Batch)
  assert doubled.positions[0, 0] == 6 and doubled.denominator == 12


def test_the_file_starts_no_jax():
  code = ast.parse(pathlib.Path(batch.__file__).read_text())
  modules = {
    n.module for n in ast.walk(code) if isinstance(n, ast.ImportFrom)
  } | {
    a.name for n in ast.walk(code) if isinstance(n, ast.Import) for a in n.names
  }
  assert modules == {'typing'}
