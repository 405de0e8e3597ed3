"""Sampling from a run on any mesh: prefill, then a compiled loop.

From outside: load.Checkpoint, loop.Generator; __main__.py is the command.

Read first: loop.py, then step.py, cache.py, sampling.py.
"""
