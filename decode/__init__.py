"""Sampling from a run on any mesh: prefill, then a compiled loop.

From outside: load.Checkpoint, loop.Generator; __main__.py is the command.
methods.py lists what drafts several tokens a call (drafts/), judges.py has what
judges them.

Read first: loop.py, then program.py, step.py, proposal.py, cache.py.
"""
