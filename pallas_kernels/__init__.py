"""Kernels: arrays in, arrays out, no mesh and no Flax.

A room is a family of ops; in it op.py (or the op's name) holds the contract and
the choice of a form, xla the form that runs anywhere, tpu and gpu the kernels.
From outside: the ops, reference.py in tests, registry.py for what would run.

Read first: registry.py, then attention/op.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
