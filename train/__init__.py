"""Training: the loop and what it needs, proofs, measurements, the command line.

The files here are the core: program.py builds a run from a config, step.py
makes its two halves, loop.py runs them, cli.py is the command line. Rooms:
data/ and run/ below the core, steps/ within it: gradients, and replicas that
step alone; plot/, certify/, bench/ and claims/ above it.

Read first: loop.py, then program.py, step.py, state.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
