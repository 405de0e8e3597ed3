"""A decoder described by data, its layers, its tokenizers.

The files here put models together (build.py checks a config and makes one) or
are what every part needs (parameter.py, norm.py, depth.py, batch.py). A model
names logical axes only, never mesh axes.

Read first: build.py, then decoder.py, stack.py, layer.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
