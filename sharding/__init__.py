"""Parallelism of any model: layouts, collectives, schedules, checkpoints.

The modules of this folder serve all of its packages: the one mesh (mesh.py),
the rules from logical names to mesh axes (rules.py), the functions that shard
and reshard arrays by logical names (annotate.py), and those that move arrays
from one mesh to another (reallocate.py). Nothing here depends on a model.

Read first: mesh.py, rules.py, annotate.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
