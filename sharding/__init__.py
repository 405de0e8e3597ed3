"""Parallelism that knows no model: layouts, collectives, schedules,
checkpoints.

The files here are what every room needs: the one mesh (mesh.py), the rules from
logical names to its axes (rules.py), and the verbs that place and move arrays
by name (annotate.py). Only mesh.py, rules.py and the rooms' operators are
imported by models and training; nothing here knows a model.

Read first: mesh.py, rules.py, annotate.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
