"""Pictures: losses of runs, loads of experts, schedules, layouts.

From outside: losses.draw, experts.draw; command.py is `paraxis plot`.

Read first: losses.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
