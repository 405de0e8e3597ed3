"""Softmax attention with its logsumexp, forward and backward, any mask.

op.py is what others import; xla.py is also used by the remote forms of
sharding/sequence, which merge parts of a row. block_table.json holds block
sizes that were searched for.

Read first: op.py, then xla.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
