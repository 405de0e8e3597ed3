"""Pipelines: schedules as values, and one executor for all of them.

From outside: schedules.py (what runs where at which tick), executor.py (the
scan over ticks that runs it), tables.py, residuals.py and uniform.py.

Read first: schedules.py, then executor.py, ticks.py, phases.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
