"""Sampling from a run on any mesh: prefill, then a compiled loop.

From outside: load.Checkpoint, loop.Generator; __main__.py is the command. What
drafts several tokens a call is in methods.py, what judges them in judges.py.

Read first: loop.py, then program.py, step.py, proposal.py, cache.py.
"""
