"""Attention of a few new queries over the slots of a cache, ragged rows.

From outside: op.py, and schedule.py for how rows of unequal length are divided
evenly over workers (LeanAttention).

Read first: op.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
