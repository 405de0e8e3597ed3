"""Measurements against plain JAX and other libraries, interleaved.

From outside: measure.py; command.py is `paraxis bench`, kernel_matrix.py is
`paraxis doctor --kernels`.

Read first: command.py, then measure.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
