"""Measurements against plain JAX and other libraries, interleaved.

peers.py starts other libraries, in processes of their own.

From outside: measure.py; command.py is `paraxis bench`, kernel_matrix.py is
`paraxis doctor --kernels`.

device/ is `paraxis bench device`, a room of its own.

Read first: command.py, then measure.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
