"""Claims about update rules.

Named by configs such as fantastic_optimizers. whole.py: what rules of whole
matrices do on a mesh; ranks.py: which rule learns most from the same tokens,
when; leaderboard.py: which needs the fewest steps to a target.

Read first: ranks.py.
"""
