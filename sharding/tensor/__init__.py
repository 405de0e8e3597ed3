"""Products of activations and parameters with the collectives they need.

From outside: project.py (every product of a model), lookup.py and vocabulary.py
(tables), tape.py (weight gradients apart from the backward pass), narrow.py
(parameters gathered in the dtype of their products), int4.py (parameters of 4
bits). worlds.py writes the collectives of each kind of mesh, rings.py overlaps
them with products.

Read first: project.py, then worlds.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
